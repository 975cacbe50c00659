"""Check that ranks agree on the model and plan before they shard it; otherwise they hang or mix up bytes later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from torch import nn

from npuzero.comm import Mesh, World
from npuzero.errors import ConfigError, NpuZeroError
from npuzero.plan import PIPE, STAGE, TENSOR
from npuzero.shard.layout.axis_relations import get_relations, is_tied
from npuzero.shard.layout.find_units import UnitSpec
from npuzero.shard.layout.mesh_axes import (
    check_tensor_axis,
    repeated_stage_error,
    stage_parameter_names,
    uses_tensor_axis,
)
from npuzero.shard.layout.tensor_slices import get_cut


def describe_model(model: nn.Module, specs: list[UnitSpec]) -> list[tuple[str, str]]:
    """Return (name, description) of every parameter and buffer, in order; all ranks must agree on them."""
    parameters = [
        (
            name,
            f"{name} of unit {spec.name}, {list(p.shape)} {p.dtype}, "
            f"requires_grad={p.requires_grad}{_describe_relations(p)}",
        )
        for spec in specs
        for name, p in spec.parameters
    ]
    return parameters + [(name, f"buffer {name}, {list(b.shape)} {b.dtype}") for name, b in model.named_buffers()]


def _describe_relations(parameter: nn.Parameter) -> str:
    words = [f", {relation.value} along {axis}" for axis, relation in get_relations(parameter).items()]
    return "".join([*words, f", {cut}" if (cut := get_cut(parameter)) else ""])


def check_same_model(
    model: list[tuple[str, str]], same: dict[str, str], world: World, problem: NpuZeroError | None
) -> None:
    """Check that all ranks shard the same model by the same plan.

    A rank with a ``problem`` takes part in the exchange, so that no rank waits for it.
    """
    # Compare digests first: the names of a large model are exchanged only if the digests differ.
    digest = hashlib.sha256(json.dumps(model).encode()).hexdigest()
    mine = {"problem": problem and str(problem), **same, "model": digest}
    said: list[Any] = world.exchange(mine)
    _check_exchanged(said, ("problem", "model"), problem, world.ranks)
    if any(other["model"] != said[0]["model"] for other in said):
        models: list[Any] = world.exchange(model)
        for rank, other in enumerate(models):
            if other != models[0]:
                raise _model_mismatch_error(
                    "model", *_first_difference(models[0], other, world.ranks[rank]), world.ranks[0]
                )


def check_same_stages(
    mesh: Mesh, same: dict[str, str], problem: NpuZeroError | None, described: dict[str, str], specs: list[UnitSpec]
) -> None:
    """Check that all stages follow one plan and have different parameters.

    Only the first and the last stage may share parameters. If the mesh has a tensor axis, a stage must use it. A stage
    with a ``problem`` takes part in the exchange, so that no rank waits for it.
    """
    stage, last, ranks = mesh.index((PIPE,)), mesh.size((PIPE,)) - 1, range(mesh.world.size)
    tied = [] if problem else [described[name] for name, p in specs[0].parameters if is_tied(p)]
    own = [] if mesh.index(STAGE) else stage_parameter_names(specs)  # all ranks of a stage have the same names
    mine = {
        "problem": problem and str(problem),
        "tied": tied,
        "stage": stage,
        "own": own,
        "tensor": uses_tensor_axis(specs),
    }
    said: list[Any] = mesh.world.exchange({**same, **mine})
    _check_exchanged(said, tuple(mine), problem, ranks)
    stages_of: dict[str, list[int]] = {}
    for other in said:
        for name in other["own"]:
            stages_of.setdefault(name, []).append(other["stage"])
    twice = next((name for name, stages in stages_of.items() if len(stages) > 1), None)
    if twice is not None:
        raise repeated_stage_error(twice, stages_of[twice])
    check_tensor_axis(mesh.size((TENSOR,)), any(other["tensor"] for other in said))
    for rank, other in enumerate(said):
        if other["tied"] != (said[0]["tied"] if other["stage"] in (0, last) else []):
            raise ConfigError(
                "npuzero.zero(): parameters that stages have in common (relation along pipe)",
                expected=f"in the last stage those of the first, in the same order: {said[0]['tied']}; none in others",
                got=f"in stage {other['stage']}, on rank {rank}: {other['tied']}",
                do="Say the same of a tied parameter in the first and in the last stage, where it has the same name.",
                rank=rank,
            )


def _check_exchanged(
    said: Sequence[dict[str, Any]], apart: Sequence[str], problem: NpuZeroError | None, ranks: Sequence[int]
) -> None:
    """Raise this rank's ``problem``, that of another rank, or an error for a value outside ``apart`` that differs."""
    if problem is not None:
        raise problem
    # Raise another rank's problem before any difference: a rank with a problem has no model to compare.
    for rank, other in zip(ranks, said, strict=True):
        if other["problem"] is not None:
            raise ConfigError(
                "npuzero.zero()",
                expected="a model that every rank can shard",
                got=f"rank {rank}: {other['problem']}",
                do="Mend it on that rank.",
                rank=rank,
            )
    for subject in dict.fromkeys(key for other in said for key in other if key not in apart):
        for rank, other in zip(ranks, said, strict=True):
            if other.get(subject) != said[0].get(subject):
                first, theirs = said[0].get(subject, "none"), other.get(subject, "none")
                raise _model_mismatch_error(subject, first, rank, theirs, ranks[0])


def _first_difference(a: list[list[str]], b: list[list[str]], rank: int) -> tuple[str, int, str]:
    """Return the descriptions on rank 0 (``a``) and on ``rank`` (``b``) of the first name that differs."""
    mine, theirs = dict(a), dict(b)
    for name in (*mine, *theirs):
        if mine.get(name) != theirs.get(name):
            return mine.get(name, f"no {name}"), rank, theirs.get(name, f"no {name}")
    first, other = next((x, y) for (x, _), (y, _) in zip(a, b, strict=True) if x != y)
    return f"{first} before {other}", rank, f"{other} before {first}"


def _model_mismatch_error(subject: str, said: str, rank: int, theirs: str, first: int) -> ConfigError:
    return ConfigError(
        f"npuzero.zero(): {subject}",
        expected=f"the same on every rank, as on rank {first}: {said}",
        got=f"on rank {rank}: {theirs}",
        do="Build the same model with the same arguments on every rank.",
        rank=rank,
    )
