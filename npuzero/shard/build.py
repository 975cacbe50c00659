"""From a model and a plan to units: checks, grouping, layout; and the prediction for the same flats."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from npuzero.comm import World
from npuzero.config import Settings
from npuzero.errors import ConfigError, StateError
from npuzero.plan import Axes, FlatSize, MeshShape, Plan, Report, predict_bytes
from npuzero.shard.discover import UnitRule, UnitSpec, discover
from npuzero.shard.layout import Layout
from npuzero.shard.unit import Flat, Ranks, Unit

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PARTS = ("parameters", "held", "gradients", "states")


def build_units(
    model: nn.Module,
    plan: Plan,
    settings: Settings,
    rule: UnitRule,
    world: World,
    size: Callable[[Axes], int],
    index: Callable[[Axes], int],
) -> list[Unit]:
    """The units of ``model`` on this rank, before any data moves. Collective: the ranks compare what they have.

    Args:
        size, index: of the mesh: shards for a tuple of axes, and this rank's.

    Raises:
        ConfigError: something cannot be cut, or the ranks disagree.
        StateError: the model is cut already.
    """
    specs = discover(model, rule)
    problem: ConfigError | StateError | None = None
    try:
        for spec in specs:
            for name, parameter in spec.parameters:
                _check_parameter(name, parameter, world)
    except (ConfigError, StateError) as error:
        problem = error
    _check_agreement(specs, plan, settings, world, problem)
    axes = {part: getattr(plan, part).axes for part in _PARTS}
    count, own = {p: size(a) for p, a in axes.items()}, {p: index(a) for p, a in axes.items()}
    ranks = Ranks(plan, world.size, count, own)
    units = []
    for i, spec in enumerate(specs):
        flats = [Flat(layout, ps, ranks) for layout, ps in _layouts(spec, plan.parameters.dtype, world.size)]
        units.append(Unit(spec, i, flats))
    return units


def predict(model: nn.Module, plan: Plan, shape: MeshShape, rule: UnitRule = None, **facts: Any) -> Report:
    """:func:`npuzero.plan.predict_bytes` for the flats that :func:`build_units` makes of ``model``."""
    sizes, tensors = [], 0
    for i, spec in enumerate(discover(model, rule)):
        for layout, parameters in _layouts(spec, plan.parameters.dtype, shape.world):
            trainable = parameters[0].requires_grad
            sizes.append(FlatSize(i, layout.numel, layout.dtype, trainable))
            tensors += len(parameters) if trainable else 0
    return predict_bytes(plan, sizes, shape, trainable_parameters=tensors, **facts)


def _layouts(spec: UnitSpec, dtype: torch.dtype | None, world: int) -> Iterator[tuple[Layout, list[nn.Parameter]]]:
    """A unit's parameters grouped by dtype (``dtype``, or each one's own) and by whether they train."""
    groups: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in spec.parameters:
        groups.setdefault((dtype or parameter.dtype, parameter.requires_grad), []).append((name, parameter))
    for (kind, _), members in groups.items():
        yield Layout.of(((name, p.shape) for name, p in members), world, kind), [p for _, p in members]


def _check_parameter(name: str, parameter: nn.Parameter, world: World) -> None:
    if getattr(parameter, "_npuzero_engine", None) is not None:
        raise StateError(
            f"parameter {name}",
            expected="a model that npuzero.zero() has not seen",
            got="one it has cut already",
            do="Call npuzero.zero() once, on the outermost module.",
        )
    if parameter.is_meta or parameter.dtype not in _FLOATS or parameter.device.type != world.device.type:
        raise ConfigError(
            f"parameter {name}",
            expected=f"float32, bfloat16 or float16 data on {world.device.type}",
            got=f"{parameter.dtype} on {parameter.device.type}",
            do=f"Convert it, and move the model first: model.to({world.device.type!r}).",
        )


def _check_agreement(
    specs: list[UnitSpec], plan: Plan, settings: Settings, world: World, problem: ConfigError | StateError | None
) -> None:
    """All ranks must cut the same model by the same plan: anything else would hang or mix up bytes later.

    A rank with a problem of its own says so to the others, so that none is left waiting for it.
    """
    model = [[f"{s.name}/{n}", list(p.shape), str(p.dtype), p.requires_grad] for s in specs for n, p in s.parameters]
    digest = hashlib.sha256(json.dumps(model).encode()).hexdigest()
    mine = {"problem": problem and str(problem), "plan": repr(plan), "settings": repr(settings), "model": digest}
    said: list[Any] = world.exchange(mine)
    if problem is not None:
        raise problem
    for rank, other in enumerate(said):
        if other["problem"] is not None:
            raise ConfigError(
                "npuzero.zero()",
                expected="a model that every rank can cut",
                got=f"rank {rank}: {other['problem']}",
                do="Mend it on that rank.",
                rank=rank,
            )
    for subject in ("plan", "settings"):
        for rank, other in enumerate(said):
            if other[subject] != said[0][subject]:
                raise _disagreement(subject, said[0][subject], rank, other[subject])
    if any(other["model"] != said[0]["model"] for other in said):
        models: list[Any] = world.exchange(model)
        for rank, other in enumerate(models):
            if other != models[0]:
                first, theirs = _first_difference(models[0], other)
                raise _disagreement("model", first, rank, theirs)


def _first_difference(a: Any, b: Any) -> tuple[str, str]:
    longest = max(len(a), len(b))
    padded = zip(a + [None] * (longest - len(a)), b + [None] * (longest - len(b)), strict=True)
    mine, theirs = next((x, y) for x, y in padded if x != y)
    return str(mine or "no further parameter"), str(theirs or "no further parameter")


def _disagreement(subject: str, first: str, rank: int, theirs: str) -> ConfigError:
    return ConfigError(
        f"npuzero.zero(): {subject}",
        expected=f"the same on every rank, as on rank 0: {first}",
        got=f"on rank {rank}: {theirs}",
        do="Build the same model with the same arguments on every rank.",
        rank=rank,
    )
