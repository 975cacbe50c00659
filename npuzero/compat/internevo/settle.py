"""Resolve InternEvo keys that depend on each other, and refuse contradictions."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from npuzero.compat.internevo.evaluate import EvaluatedFile, evaluate
from npuzero.compat.internevo.keys import COUNTING, RULES, SHORT
from npuzero.compat.rules import ABSENT, Decision
from npuzero.compat.translation import TranslatedKey, Translation, translate_configuration
from npuzero.plan import parse_precision

#: The mode that shards sequences and parameters, and no layers.
ISP = "isp"
# Similarity at which a program's own key counts as a misspelling of a known one.
_SLIP = 0.8


#: A configuration: the path of its file, or its content.
Source = str | Path | Mapping[str, Any]


def translate_file(source: Source) -> tuple[EvaluatedFile, Translation]:
    """Return the evaluated configuration and the decision for each key; a bad key does not raise here.

    Raises:
        ConfigError: the file needs to be run to be read.
    """
    evaluated = EvaluatedFile("a mapping", source, frozenset()) if isinstance(source, Mapping) else evaluate(source)
    values = _expand_sections(evaluated.values)
    keys = {name: value for name, value in values.items() if _is_configuration_key(name, evaluated)}
    found = translate_configuration(f"InternEvo configuration {evaluated.source}", keys, RULES)
    for name, value in values.items():
        if name not in keys:
            words = "A name of the file's own, which counts where the file reads it."
            found.add(TranslatedKey(name, value, ABSENT, Decision.NOTED, "", words))
    for settle in (
        _refuse_misspelt_keys,
        _settle_sequence_sizes,
        _note_fsdp_sharding,
        _settle_pipeline,
        _note_overlap,
        _settle_loss_scale,
        _settle_bucket_bytes,
    ):
        settle(found)
    return evaluated, found


def _expand_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with number sections expanded: ``tensor=2`` becomes ``tensor=dict(size=2)``."""
    found = dict(values)
    for path in SHORT:
        section, name = path.split(".")
        inner = found.get(section)
        if isinstance(inner, dict) and isinstance(inner.get(name), int) and not isinstance(inner[name], bool):
            found[section] = {**inner, name: {"size": inner[name]}}
    return found


def _is_configuration_key(name: str, evaluated: EvaluatedFile) -> bool:
    """Return whether a top-level name is a key: a known one, or one neither upper-case nor read by the file."""
    known = RULES.find(name) is not None or bool(RULES.below(name))
    return known or not (name in evaluated.read or name.isupper())


def _refuse_misspelt_keys(found: Translation) -> None:
    """Refuse unknown keys with a name similar to one that has an effect."""
    for entry in found.entries:
        section, _, key = entry.path.partition(".")
        rule = RULES.find(entry.path)
        own = rule is not None and rule.path.endswith("*")
        near = difflib.get_close_matches(key, COUNTING.get(section, ()), n=1, cutoff=_SLIP) if own else []
        if near:
            found.refuse(entry.path, f"Did you mean {near[0]!r}? A key of your own wants a name less like it.")


def _settle_sequence_sizes(found: Translation) -> None:
    """Resolve tensor and weight sizes by the mode."""
    weights = found.value("parallel.weight.size", 1)
    if found.value("parallel.tensor.mode") == ISP:
        words = "Under isp: neighbours that share a sequence."
        for entry in found.entries:
            if entry.target == "mesh.tensor" and entry.counts:
                found.add(replace(entry, target="mesh.sequence", words=words))
        for path in ("parallel.zero1.fsdp", "parallel.fsdp.enable"):
            if found.value(path):
                found.refuse(path, "isp shards parameters by weight.size: leave it False, or take another mode.")
    elif weights > 1:
        found.refuse("parallel.weight.size", "Weights are sharded so under isp: take tensor.mode='isp', or size=1.")
    if weights <= 1 or found.value("parallel.tensor.mode") != ISP:
        _note_without_effect(found, "parallel.weight.overlap", "no weights are sharded")


def _note_fsdp_sharding(found: Translation) -> None:
    """Note the zero1 keys that torch's FSDP overrides."""
    if found.value("parallel.fsdp.enable"):
        for path in ("parallel.zero1.size", "parallel.zero1.fsdp"):
            _note_without_effect(found, path, "parallel.fsdp shards states over all data ranks")


def _settle_pipeline(found: Translation) -> None:
    """Resolve the keys of pipeline and chunks."""
    chunks = found.value("model.num_chunks", 1)
    if found.value("parallel.pipeline.size", 1) == 1:
        for key in ("interleaved_overlap", "mode", "zero_bubble"):
            _note_without_effect(found, f"parallel.pipeline.{key}", "there is one stage")
        _note_without_effect(found, "model.num_chunks", "there is one stage")
        return
    if chunks == 1:
        _note_without_effect(found, "parallel.pipeline.interleaved_overlap", "stages are not interleaved")
    elif uses_zero_bubble(found):
        found.refuse("model.num_chunks", "zero-bubble has one stage on each rank: take 1, or pipeline.mode='1F1B'.")


def get_overlapped_traffic(found: Translation) -> tuple[str, ...]:
    """Return the kinds of traffic to overlap. Two of a pipeline's three kinds mean all three."""
    said = found.into("Settings")
    wanted = {name: said.get(f"overlap_{name}", False) for name in ("gradients", "parameters")}
    if said.get("overlap_weights", False):
        wanted = dict.fromkeys(wanted, True)
    if found.value("parallel.pipeline.size", 1) > 1:
        wanted["activations"] = said.get("overlap_activations", True)
    names = tuple(name for name, asked in wanted.items() if asked)
    return tuple(wanted) if len(names) > 1 else names


def _note_overlap(found: Translation) -> None:
    """Note the kinds of traffic that overlap although their own switch is off."""
    names = get_overlapped_traffic(found)
    for entry in found.entries:
        name = entry.target.removeprefix("Settings.overlap_")
        kinds = {"weights": ("gradients", "parameters")}.get(name, (name,))
        if entry.counts and entry.target != name and not entry.value and set(kinds) <= set(names):
            words = "It overlaps all the same: other switches ask for it, or for two of a pipeline's three overlaps."
            found.amend(entry.path, Decision.NOTED, words)


def uses_zero_bubble(found: Translation) -> bool:
    """Return whether a configuration asks for the zero-bubble schedule."""
    mode = found.value("parallel.pipeline.mode") == "zero-bubble"
    return bool(mode or found.value("parallel.pipeline.zero_bubble"))


def _settle_loss_scale(found: Translation) -> None:
    """Note the scaler's keys where the dtype needs no scale, and check its bounds."""
    if found.value("model.dtype") in ("fp32", "tf32"):
        for entry in found.entries:
            if entry.path.startswith("grad_scaler."):
                _note_without_effect(found, entry.path, "float32 is not scaled")
    initial = found.value("grad_scaler.fp16.initial_scale", 0)
    if initial > (found.value("grad_scaler.max_scale") or initial):
        found.refuse("grad_scaler.max_scale", "It is less than fp16.initial_scale: raise it, or begin lower.")
    if initial < (found.value("grad_scaler.fp16.min_scale") or 0):
        found.refuse("grad_scaler.fp16.min_scale", "It is more than fp16.initial_scale: lower it, or begin higher.")


def _settle_bucket_bytes(found: Translation) -> None:
    """Convert the bucket size from elements to bytes of gradients."""
    entry = next((entry for entry in found.entries if entry.target == "Settings.bucket_bytes" and entry.counts), None)
    if entry is not None:
        precision = parse_precision(found.value("model.dtype", "fp16"))
        wire = precision.wire_of(precision.parameter_of(torch.float32))
        found.add(replace(entry, value=entry.value * wire.itemsize))


def _note_without_effect(found: Translation, path: str, why: str) -> None:
    """Note a key that has no effect in this configuration; skip one that is absent."""
    if found.value(path) is not None:
        found.amend(path, Decision.NOTED, f"Without effect: {why}.")
