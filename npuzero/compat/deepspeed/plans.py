"""Build a plan and settings from a configuration's keys for sharding, offload and dtypes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from npuzero.compat.translation import Translation
from npuzero.config import Settings
from npuzero.plan import Memory, Placement, Plan, Precision

_MOST_BUCKET_BYTES = 2**40
#: The axes of hierarchically sharded parts: all ranks, the local axis outermost.
_EVERYWHERE = ("local", "node")
_WITHIN = ("local",)
_MEMORIES = {"host": Memory.HOST, "nvme": Memory.NVME}


def get_parameter_dtype(found: Translation) -> torch.dtype:
    """Return the dtype of parameters, as set by bf16 and fp16."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((dtype for name, dtype in low.items() if found.into(name).get("enabled")), torch.float32)


def build_translated_plan(found: Translation) -> Plan:
    """Return the plan of a configuration.

    Raises:
        ConfigError: the keys together make no valid plan.
    """
    said = found.into("zero")
    plan = Plan.preset(said.get("stage", 0), precision=_build_translated_precision(found, said))
    group, shards = said.get("group", 1), said.get("shard_group", -1)
    sharded = plan.parameters.axes
    if sharded and shards > 0:
        within = Placement(_WITHIN)
        plan = replace(
            plan, parameters=within, after_forward=within, gradients=within, states=within, local_size=shards
        )
    elif sharded and group > 1:
        all_ranks = Placement(_EVERYWHERE)
        plan = replace(
            plan,
            parameters=all_ranks,
            after_forward=Placement(_WITHIN),
            gradients=all_ranks,
            states=all_ranks,
            local_size=group,
        )
    if said.get("host_activations"):
        plan = replace(plan, activations=Placement((), Memory.HOST))
    return _offload_translated_plan(plan, found.into("offload"))


def _build_translated_precision(found: Translation, said: dict[str, Any]) -> Precision:
    parameters = get_parameter_dtype(found)
    wires: Any = found.into("Precision").get("wires")
    sharded = Plan.preset(said.get("stage", 0)).parameters.axes
    if sharded and said.get("thin_gradients"):
        wires = {"node": "int4", "local": "int4"}
    thin = "int8" if sharded and said.get("thin_gathers") else None
    return Precision(parameters, wires=wires, gathers=thin)


def _offload_translated_plan(plan: Plan, said: dict[str, Any]) -> Plan:
    """Move states and parameters off the device. Offloaded parameters need offloaded states, updated next to them."""
    states, parameters, share = said.get("optimizer"), said.get("param"), said.get("ratio", 1.0)
    if parameters is not None:
        states, share = states or "host", 1.0
    if states is None or share == 0:
        return plan
    plan = plan.offloaded(states)
    plan = replace(plan, states=replace(plan.states, share=float(share)))
    if parameters is None:
        return plan
    return replace(plan, parameters=replace(plan.parameters, memory=_MEMORIES[parameters]))


def build_translated_settings(found: Translation) -> Settings:
    """Return the settings of a configuration; they change no bit."""
    said: dict[str, Any] = found.into("Settings")
    elements = found.into("zero").get("bucket_elements")
    if elements is not None:
        said["bucket_bytes"] = min(elements * get_parameter_dtype(found).itemsize, _MOST_BUCKET_BYTES)
    paths = found.into("offload")
    folders = {str(paths[key]) for key in ("optimizer_path", "param_path") if paths.get(key)}
    return Settings(nvme_paths=tuple(sorted(folders)), **said)
