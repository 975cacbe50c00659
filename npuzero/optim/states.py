"""States of optimizers in torch's shape, unsharded tensors by parameter number: gathered from ranks,
and taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from npuzero.errors import CheckpointError
from npuzero.optim.rule import Options
from npuzero.optim.worker import Worker
from npuzero.shard.cuts import whole_shape
from npuzero.shard.engine import Engine
from npuzero.shard.flat import AHEAD, Flat, masters_later
from npuzero.shard.snapshot import NOW


def members(groups: list[Options]) -> Iterator[tuple[Options, nn.Parameter]]:
    """Yield every parameter with its group, in the order that numbers them."""
    for group in groups:
        for parameter in group["params"]:
            yield group, parameter


def gather(worker: Worker, engine: Engine, flat: Flat) -> list[Options]:
    """Put together, per slot of ``flat``, its full state from what the ranks say they have. Collective."""
    said = cast(list[list[Options]], engine.world.exchange([describe(worker, flat, i) for i in flat.slots]))
    known = [{name: value for rank in said for name, value in rank[i].items()} for i in flat.slots]
    if engine.lag.pending:
        engine.lag.quiet()
        known = [{**slot, AHEAD: None} if slot else slot for slot in known]
    names = sorted({name for slot in known for name, value in slot.items() if value is None})
    own = slice(0, flat.rests.states.numel)
    mine = {n: masters_later(flat, own, NOW) if n == AHEAD else worker.later(flat, n, own, NOW) for n in names}
    wholes = {name: engine.values.gather_states(flat, later and later()).cpu() for name, later in mine.items()}
    return [
        {
            name: engine.values.whole_slot(flat, i, wholes[name]) if value is None else torch.tensor(value)
            for name, value in state.items()
        }
        for i, state in enumerate(known)
    ]


def describe(worker: Worker, flat: Flat, i: int) -> dict[str, float | None]:
    """Tell a slot's state as text can carry it: numbers, and None for each tensor of the parameter's shape."""
    state = {name: value for name, value in worker.slot_state(flat, i).items() if value is not None}
    return {k: None if isinstance(v, Tensor) and v.dim() else float(v) for k, v in state.items()}


def take_ahead(engine: Engine, flat: Flat, i: int, ahead: Tensor) -> None:
    """Take this rank's part of slot ``i``'s masters after the update that was pending; without lag they count at
    once.
    """
    take = engine.lag.take if engine.lag else Flat.write_master
    take(flat, flat.own_slots[i], ahead)


def cut(flat: Flat, i: int, state: Mapping[str, Any]) -> Options:
    """Return this rank's part of the state of slot ``i``, whose tensors are unsharded."""
    parameter, portion = flat.parameters[i], flat.portions[i]

    def own(whole: Tensor) -> Tensor:
        return flat.cut_like_own(i, whole if portion is None else portion.take(whole))

    return {k: own(v) if _is_whole(k, v, parameter) else v for k, v in state.items()}


def _is_whole(name: str, value: object, parameter: nn.Parameter) -> bool:
    """Tell whether ``value`` is a state of the parameter's shape, of which a rank keeps its part: a scalar's step is
    not.
    """
    return isinstance(value, Tensor) and value.shape == whole_shape(parameter) and (value.dim() > 0 or name != "step")


def check(state_dict: object, groups: list[Options]) -> None:
    """Raise CheckpointError where ``state_dict`` is no state of an optimizer with such groups."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise CheckpointError(
            "optimizer state",
            expected="a mapping with state and param_groups, as state_dict() gives",
            got=str(sorted(state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__,
            do="Load what an optimizer's state_dict() gave.",
        )
    loaded = state_dict["param_groups"]
    if [len(g["params"]) for g in loaded] != [len(g["params"]) for g in groups]:
        raise CheckpointError(
            "optimizer state",
            expected=f"groups of {[len(g['params']) for g in groups]} parameters",
            got=str([len(g["params"]) for g in loaded]),
            do="Build the optimizer with the same groups.",
        )


def check_one(number: int, parameter: nn.Parameter, state: object, needs: tuple[str, ...]) -> None:
    """Raise CheckpointError where ``state`` is not one of such a parameter, or lacks one of the names ``needs``."""
    subject = f"optimizer state {number}"
    if not isinstance(state, Mapping):
        raise CheckpointError(
            subject, expected="a mapping", got=type(state).__name__, do="Load a state of the same optimizer class."
        )
    check_names(subject, state, needs)
    for name, value in state.items():
        shaped = name in needs and name != "step"
        if isinstance(value, Tensor) and (value.dim() or shaped) and value.shape != whole_shape(parameter):
            raise CheckpointError(
                f"{subject}.{name}",
                expected=f"shape {tuple(whole_shape(parameter))}",
                got=str(tuple(value.shape)),
                do="Load a state of the same model.",
            )


def check_names(subject: str, state: Mapping[str, Any], needs: tuple[str, ...]) -> None:
    """Raise CheckpointError where ``state`` lacks one of the names ``needs``."""
    if any(name not in state for name in needs):
        raise CheckpointError(
            subject,
            expected=f"a mapping with {', '.join(needs)}",
            got=str(sorted(state)),
            do="Load a state of the same optimizer class.",
        )
