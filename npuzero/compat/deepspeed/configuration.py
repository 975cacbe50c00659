"""Translate a DeepSpeed configuration, and check keys that depend on each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from npuzero.compat.deepspeed.batch import KEYS, complete_batch_sizes
from npuzero.compat.deepspeed.makers import ObjectMaker, choose_optimizer_maker, choose_schedule_maker
from npuzero.compat.deepspeed.plans import build_translated_plan
from npuzero.compat.deepspeed.rules import RULES, torch_option_rule
from npuzero.compat.rules import Decision, KeyRule, KeyRules
from npuzero.compat.translation import Translation, translate_configuration
from npuzero.config import describe_value, read_json
from npuzero.errors import ConfigError, did_you_mean
from npuzero.plan import Plan

PathLike = str | os.PathLike[str]
Config = Mapping[str, Any] | PathLike


def explain(config: Config, *, world: int | None = None, auto: Mapping[str, Any] | None = None) -> Translation:
    """Return the decision for each key of a DeepSpeed 0.19.8 configuration.

    Args:
        config: nested mappings, or the path of a JSON file.
        world: number of data ranks; None means unknown, and checks that depend on it are left out.
        auto: values for keys that are "auto", by path, such as ``{"optimizer.params.lr": 1e-4}``.

    Raises:
        ConfigError: there is no such file, or it holds no object. Refused keys do not raise; the translation has them.

    Example::

        from npuzero.compat.deepspeed import explain

        translation = explain({"train_batch_size": 8, "zero_optimization": {"stage": 2}, "gradient_cliping": 1.0})
        for entry in translation.entries:
            print(entry.path, entry.decision.value, entry.words)
    """
    subject, values = _read_configuration(config)
    kinds = {"optimizer": _get_section_type(values, "optimizer"), "scheduler": _get_section_type(values, "scheduler")}
    found = translate_configuration(subject, values, KeyRules([*RULES, *_torch_option_rules(values, kinds)]), auto)
    _check_precision_keys(found)
    _check_section_options(found, "optimizer", lambda: find_optimizer_maker(found))
    _check_section_options(found, "scheduler", lambda: find_schedule_maker(found))
    _note_adam_decay(found)
    _check_plan_keys(found)
    _check_rank_groups(found, world)
    _check_batch_sizes(found, world)
    return found


def find_optimizer_maker(found: Translation) -> ObjectMaker | str | None:
    """Return the maker of the optimizer in the file; a text with the reason if there is none; None if the file has
    none.
    """
    kind = found.into("Optimizer").get("type")
    adam = found.into("Adam")
    return None if kind is None else choose_optimizer_maker(kind, adam.get("decoupled", True), adam.get("torch", False))


def find_schedule_maker(found: Translation) -> ObjectMaker | str | None:
    """Return the maker of the file's schedule; a text with the reason if there is none; None if the file names none."""
    kind = found.into("Scheduler").get("type")
    return None if kind is None else choose_schedule_maker(kind)


def _read_configuration(config: Config) -> tuple[str, Mapping[str, Any]]:
    if isinstance(config, Mapping):
        return "deepspeed configuration", config
    if isinstance(config, (str, os.PathLike)):
        return f"deepspeed configuration {os.fspath(config)}", read_json(config)
    raise ConfigError(
        "deepspeed configuration",
        expected="a dict, or the path of a JSON file",
        got=describe_value(config),
        do="Give config= what deepspeed.initialize() got.",
    )


def _get_section_type(values: Mapping[str, Any], section: str) -> str:
    inside = values.get(section)
    return str(inside.get("type", "")) if isinstance(inside, Mapping) else ""


def _torch_option_rules(values: Mapping[str, Any], kinds: Mapping[str, str]) -> list[KeyRule]:
    """Return rules for options that only a torch class has."""
    owners = {"optimizer": "optimizer", "scheduler": "lr_scheduler"}
    made = {
        "optimizer": choose_optimizer_maker(kinds["optimizer"], True, False),
        "scheduler": choose_schedule_maker(kinds["scheduler"]),
    }
    rules = []
    for section, maker in made.items():
        names = maker.options if isinstance(maker, ObjectMaker) else ()
        paths = {name: f"{section}.params.{name}" for name in names}
        rules += [
            torch_option_rule(path, owners[section], name) for name, path in paths.items() if RULES.find(path) is None
        ]
    return rules


def _check_precision_keys(found: Translation) -> None:
    # The loss scale exists for float16 parameters alone, so any other use of float16 is refused.
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}
    on = [name for name in low if found.into(name).get("enabled")]
    if len(on) > 1:
        found.refuse("fp16.enabled", "bf16 is enabled as well: enable one of them.")
    parameters = low[on[0]] if on else torch.float32
    if found.into("Precision").get("wires") is torch.float16 and parameters is not torch.float16:
        found.refuse("communication_data_type", "float16 gradients need the loss scale of fp16: say bf16 or fp32.")
    for entry in found.entries:
        if entry.path == "data_types.param_dtype" and entry.value not in (None, parameters):
            found.refuse(entry.path, f"Parameters are {parameters} by bf16 and fp16: say the same, or leave it out.")
    if found.into("Autocast").get("enabled") and found.into("Autocast").get("dtype") is torch.float16:
        found.refuse("torch_autocast.dtype", "Under torch.autocast take bf16; for float16 enable fp16.")


def _check_section_options(found: Translation, section: str, made: Callable[[], ObjectMaker | str | None]) -> None:
    """Refuse an unknown type, options that it does not take, and required options that are missing."""
    # Only options that are passed to the optimizer or schedule are checked; others have targets elsewhere.
    maker = made()
    path = f"{section}.params"
    given = {entry.path.rpartition(".")[2]: entry for entry in found.entries if entry.path.startswith(path + ".")}
    if isinstance(maker, str):
        found.refuse(f"{section}.type", maker)
    if not isinstance(maker, ObjectMaker):
        if maker is None and any(entry.counts for entry in given.values()):
            found.refuse(f"{section}.type", "Options need a type: name it, such as AdamW or WarmupLR.")
        return
    for name, entry in given.items():
        goes = entry.target.partition(".")[0] in ("optimizer", "lr_scheduler")
        if entry.counts and goes and name not in maker.options:
            words = f"{found.value(f'{section}.type')} takes {', '.join(maker.options)}"
            found.refuse(entry.path, f"{words}. {did_you_mean(name, maker.options, 'Leave it out.')}")
    for name in maker.required:
        if name not in given:
            found.refuse(f"{path}.{name}", f"{found.value(f'{section}.type')} needs it: say it.")


def _note_adam_decay(found: Translation) -> None:
    """Note the keys of Adam's weight decay where the type is not adam."""
    if str(found.value("optimizer.type")).lower() != "adam":
        for path in ("optimizer.params.adam_w_mode", "optimizer.params.adamw_mode"):
            if found.value(path) is not None:
                found.amend(path, Decision.NOTED, "Without effect: it is of the type Adam; AdamW is decoupled anyway.")


def _check_plan_keys(found: Translation) -> None:
    """Refuse or note the keys that do not fit the stage."""
    if found.decided(Decision.REFUSED):
        return  # the plan is unknown
    sharded = Plan.preset(found.into("zero").get("stage", 0)).parameters.axes
    for path, what in _OF_SHARDED_PARAMETERS.items() if not sharded else ():
        if found.value(path):
            decision = Decision.REFUSED if what else Decision.NOTED
            found.amend(path, decision, what or "Without effect, as parameters are not sharded: that is stage 3.")
    try:
        if not found.decided(Decision.REFUSED):
            build_translated_plan(found)
    except ConfigError as error:
        found.refuse("zero_optimization.stage", f"Expected {error.expected}; got {error.got}. {error.do}")


def _check_rank_groups(found: Translation, world: int | None) -> None:
    """Refuse group sizes that do not divide the number of ranks."""
    if world is None or found.decided(Decision.REFUSED) or not build_translated_plan(found).parameters.axes:
        return
    for path in ("zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size"):
        size = found.value(path)
        if size is not None and size > 0 and world % size:
            found.refuse(path, f"{size} ranks of a group do not divide {world} ranks: say a divisor of {world}.")


#: Keys that only apply to sharded parameters, with the advice to refuse them by; empty: the key is noted.
_OF_SHARDED_PARAMETERS = {
    "zero_optimization.zero_hpz_partition_size": "",
    "zero_optimization.mics_shard_size": "",
    "zero_optimization.zero_quantized_weights": "",
    "zero_optimization.zero_quantized_gradients": "",
    "zero_optimization.offload_param.device": "Parameters go off the device where they are sharded: say stage 3.",
    "zero_optimization.cpu_offload_param": "Parameters go off the device where they are sharded: say stage 3.",
}


def _check_batch_sizes(found: Translation, world: int | None) -> None:
    paths = set(KEYS.values())
    if world is None or any(entry.path in paths for entry in found.decided(Decision.REFUSED)):
        return
    said = found.into("Batch")
    try:
        complete_batch_sizes(said.get("total"), said.get("micro"), said.get("accumulation"), world)
    except ConfigError as error:
        found.refuse(error.subject, f"Expected {error.expected}; got {error.got}. {error.do}")
