"""Gather optimizer states into torch's format, full tensors by parameter number, and shard them again."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from npuzero import observe
from npuzero.errors import CheckpointError, StateError
from npuzero.optim.rules.rule import Options
from npuzero.optim.workers.base import OptimizerWorker
from npuzero.shard.engine import Engine
from npuzero.shard.find_engine import engine_behind, split_by_engine
from npuzero.shard.layout.tensor_slices import full_tensor_shape
from npuzero.shard.offload.delayed_update import LAGGING, warn_of_delay
from npuzero.shard.state.flat_parameter import AHEAD, FlatParameter, snapshot_masters
from npuzero.shard.state.snapshot import NOW

#: The rule that keeps states of these names; saved states do not name their class.
_RULES = {
    frozenset({"exp_avg", "exp_avg_sq"}): "Adam or AdamW",
    frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}): "Adam or AdamW with amsgrad",
    frozenset({"exp_avg"}): "Lion",
    frozenset({"momentum_buffer"}): "SGD with momentum",
    frozenset({"square_avg"}): "RMSprop",
    frozenset({"sum"}): "Adagrad",
}
#: Names that do not identify a rule: step counts, masters, and the states of delayed plans.
_OF_ALL_RULES = frozenset({"step", "master", AHEAD, LAGGING})


def numbered_parameters(groups: list[Options]) -> Iterator[tuple[Options, nn.Parameter]]:
    """Yield every parameter with its group, in the order of their numbers."""
    for group in groups:
        for parameter in group["params"]:
            yield group, parameter


class PlainParameterStates(defaultdict[Any, Options]):
    """Store states by plain parameter, as ``torch.optim.Optimizer.state``; refuse a sharded parameter."""

    def __init__(self) -> None:
        super().__init__(dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (), None, None, iter(self.items())

    def __missing__(self, parameter: Any) -> Options:
        """Create the state of a plain parameter.

        Raises:
            StateError: the parameter belongs to a sharded model, and this rank has only a part of its state.
        """
        if isinstance(parameter, nn.Parameter) and engine_behind(parameter) is not None:
            raise StateError(
                "optimizer.state of a sharded parameter",
                expected="a plain parameter: each rank keeps a part of a sharded one's state",
                got=f"a parameter of shape {tuple(full_tensor_shape(parameter))} of a model made by npuzero.zero()",
                do="Read optimizer.state_dict(), and write by optimizer.load_state_dict(): every rank calls them.",
            )
        return super().__missing__(parameter)


def pack_state_dict(state: Mapping[Any, Options], groups: list[Options]) -> Options:
    """Return the states of a torch optimizer, kept by parameter, in the format of a state dict."""
    held = {
        number: state[parameter]
        for number, (_, parameter) in enumerate(numbered_parameters(groups))
        if parameter in state
    }
    numbers = itertools.count()
    return {"state": held, "param_groups": [{"params": [next(numbers) for _ in group["params"]]} for group in groups]}


def unshard_state_dict(
    worker: OptimizerWorker, optimizer: torch.optim.Optimizer, engines: list[Engine], plain: list[nn.Parameter]
) -> Options:
    """Return the ``state_dict`` that torch has for the unsharded model. Collective over each engine."""
    groups = optimizer.param_groups
    numbers = {id(parameter): number for number, (_, parameter) in enumerate(numbered_parameters(groups))}
    state: dict[int, Options] = {
        numbers[id(parameter)]: dict(held) for parameter in plain if (held := worker.plain_state(optimizer, parameter))
    }
    for engine in engines:
        engine.values.check_here()
        # Every rank must gather every flat, also with no parameter of this optimizer in it: gathers are collective.
        for flat in engine.flats():
            for i, gathered in enumerate(gather_slot_states(worker, engine, flat)):
                if gathered and id(flat.parameters[i]) in numbers:
                    state[numbers[id(flat.parameters[i])]] = gathered
    packed = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [numbers[id(p)] for p in group["params"]]}
        for group in groups
    ]
    return {"state": dict(sorted(state.items())), "param_groups": packed}


def gather_slot_states(worker: OptimizerWorker, engine: Engine, flat: FlatParameter) -> list[Options]:
    """Gather the full state of each slot of ``flat`` from all ranks. Collective."""
    # A rank may hold no part of a slot, so names come from all ranks, sorted: gathers need the same order everywhere.
    said = cast(list[list[Options]], engine.world.exchange([describe_slot_state(worker, flat, i) for i in flat.slots]))
    known = [{name: value for rank in said for name, value in rank[i].items()} for i in flat.slots]
    if engine.lag.pending:
        engine.lag.quiet()
        known = [{**slot, AHEAD: None} if slot else slot for slot in known]
    names = sorted({name for slot in known for name, value in slot.items() if value is None})
    own = slice(0, flat.rests.states.numel)
    mine = {n: snapshot_masters(flat, own, NOW) if n == AHEAD else worker.later(flat, n, own, NOW) for n in names}
    wholes = {name: engine.values.gather_states(flat, later and later()).cpu() for name, later in mine.items()}
    return [
        {
            name: engine.values.whole_slot(flat, i, wholes[name]) if value is None else torch.tensor(value)
            for name, value in state.items()
        }
        for i, state in enumerate(known)
    ]


def describe_slot_state(worker: OptimizerWorker, flat: FlatParameter, i: int) -> dict[str, float | None]:
    """Return a slot's state as text can carry it: numbers, and None for each tensor of the parameter's shape."""
    state = {name: value for name, value in worker.slot_state(flat, i).items() if value is not None}
    return {k: None if isinstance(v, Tensor) and v.dim() else float(v) for k, v in state.items()}


def load_pending_masters(engine: Engine, flat: FlatParameter, i: int, ahead: Tensor) -> None:
    """Load this rank's part of slot ``i``'s masters after the pending update; without lag they apply at once."""
    take = engine.lag.take if engine.lag else FlatParameter.write_master
    take(flat, flat.own_slots[i], ahead)


def load_state_dict_shards(worker: OptimizerWorker, optimizer: torch.optim.Optimizer, state_dict: Options) -> None:
    """Load this rank's part of a state in torch's format, full tensors by parameter number.

    Raises:
        CheckpointError: it is no state dict, or its groups, tensors or shapes differ.
    """
    # Structure, groups and rule are checked before the first write; shapes are checked in the loop, one by one.
    groups = optimizer.param_groups
    check_state_dict(state_dict, groups)
    for owner in split_by_engine(parameter for _, parameter in numbered_parameters(groups))[0]:
        owner.values.check_here()
    saved = [state for state in state_dict["state"].values() if isinstance(state, Mapping)]
    names = {name for state in saved for name, value in state.items() if value is not None}
    check_rule(worker, optimizer, names, state_dict["param_groups"])
    for group, loaded in zip(groups, state_dict["param_groups"], strict=True):
        group.update((key, copy.deepcopy(value)) for key, value in loaded.items() if key != "params")
    order = [number for group in state_dict["param_groups"] for number in group["params"]]
    needs = worker.state_names(groups)
    took: dict[Engine, None] = {}
    with torch.no_grad():
        for number, (group, parameter) in zip(order, numbered_parameters(groups), strict=True):
            state = state_dict["state"].get(number, {})
            if state:
                check_parameter_state(number, parameter, state, needs)
            engine = engine_behind(parameter)
            place = engine.place(parameter) if engine else None
            if engine is None:
                worker.restore_plain(optimizer, group, parameter, state)
            elif place is not None:
                mine = shard_slot_state(*place, state, worker.numbers)
                ahead = mine.pop(AHEAD, None)
                worker.restore(optimizer, engine, *place, mine)
                if ahead is not None:
                    if engine not in took:
                        engine.values.settle()
                    load_pending_masters(engine, *place, ahead)
                    took[engine] = None
        for engine in took:
            warn_of_delay(state_dict["state"].values(), engine.lag)
            engine.values.restore_parameters()


def check_rule(
    worker: OptimizerWorker, optimizer: torch.optim.Optimizer, saved: Collection[str], groups: Sequence[Options]
) -> None:
    """Warn on rank 0 if the state to be loaded is of another rule than the optimizer's.

    torch loads it silently: a moment of the same name is used as it is, and all others are dropped.

    Args:
        saved: the state names that any parameter has.
        groups: the saved options of each group, which replace the optimizer's.

    Raises:
        CheckpointError: the optimizer's rule cannot continue from such a state.
    """
    theirs = frozenset(saved) - _OF_ALL_RULES
    if not theirs:  # no step was saved
        return
    pairs = zip(optimizer.param_groups, groups, strict=True)
    kept = worker.kept_names([{**group, **loaded, "params": group["params"]} for group, loaded in pairs], saved)
    ours = frozenset(kept) - _OF_ALL_RULES
    if theirs == ours or observe.current_rank() != 0:
        return
    fates = {"taken as they are": theirs & ours, "dropped": theirs - ours, "begun anew": ours - theirs}
    told = "; ".join(f"{fate}: {', '.join(sorted(names))}" for fate, names in fates.items() if names)
    warnings.warn(
        f"Optimizer state of another rule: it has {', '.join(sorted(theirs))}, "
        f"as {_RULES.get(theirs, 'another class')} keeps, and is loaded into {worker.kind(type(optimizer).__name__)}, "
        f"which keeps {', '.join(sorted(ours)) or 'no moments'}. Moments {told}. The saved options (lr, betas, ...) "
        "replace those of the groups, too. Load it into an optimizer of the class that saved it; or load the model "
        "alone, and begin with a new optimizer.",
        RuntimeWarning,
        stacklevel=2,
    )


def shard_slot_state(flat: FlatParameter, i: int, state: Mapping[str, Any], numbers: frozenset[str]) -> Options:
    """Return this rank's part of the state of slot ``i``, given full tensors; ``numbers`` are not cut."""
    parameter, portion = flat.parameters[i], flat.portions[i]

    def own(whole: Tensor) -> Tensor:
        return flat.cut_like_own(i, whole if portion is None else portion.take(whole))

    shape = full_tensor_shape(parameter)
    wholes = {k for k, v in state.items() if isinstance(v, Tensor) and v.shape == shape and (shape or k not in numbers)}
    return {k: own(v) if k in wholes else v for k, v in state.items()}


def check_state_dict(state_dict: object, groups: list[Options]) -> None:
    """Raise CheckpointError if ``state_dict`` is no state of an optimizer with these groups."""
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


def check_parameter_state(number: int, parameter: nn.Parameter, state: object, needs: tuple[str, ...]) -> None:
    """Raise CheckpointError if ``state`` does not fit the parameter, or lacks one of the names ``needs``."""
    subject = f"optimizer state {number}"
    if not isinstance(state, Mapping):
        raise CheckpointError(
            subject, expected="a mapping", got=type(state).__name__, do="Load a state of the same optimizer class."
        )
    check_state_names(subject, state, needs)
    for name, value in state.items():
        shaped = name in needs and name != "step"
        if isinstance(value, Tensor) and (value.dim() or shaped) and value.shape != full_tensor_shape(parameter):
            raise CheckpointError(
                f"{subject}.{name}",
                expected=f"shape {tuple(full_tensor_shape(parameter))}",
                got=str(tuple(value.shape)),
                do="Load a state of the same model.",
            )


def check_state_names(subject: str, state: Mapping[str, Any], needs: tuple[str, ...]) -> None:
    """Raise CheckpointError if ``state`` lacks one of the names ``needs``."""
    if any(name not in state for name in needs):
        raise CheckpointError(
            subject,
            expected=f"a mapping with {', '.join(needs)}",
            got=str(sorted(state)),
            do="Load a state of the same optimizer class.",
        )
