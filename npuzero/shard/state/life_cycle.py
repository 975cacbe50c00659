"""The states of a unit's parameters and of a flat's gradient: who holds memory, and which state may follow."""

from __future__ import annotations

import enum
from typing import TypeVar

from npuzero.errors import StateError


class ParameterState(enum.Enum):
    """Name who holds a unit's parameters."""

    SHARDED = "sharded"  # the resting shard only
    GATHERING = "being gathered"  # a gather writes into the unsharded flat
    WHOLE = "unsharded"  # the unsharded flat may be read
    HELD = "kept within the step"  # the resting shard, and what the plan keeps for backward, or the next micro-batch


class GradientState(enum.Enum):
    """Name who holds a flat's gradient."""

    EMPTY = "empty"
    PARTIAL = "partial"  # some have left autograd
    REDUCING = "reducing"  # a reduction is under way
    ACCUMULATED = "accumulated"  # this backward's are in the accumulator
    READY = "ready"  # summed over all ranks, this rank's own shard


_P, _G = ParameterState, GradientState
MOVES: dict[enum.Enum, tuple[enum.Enum, ...]] = {
    _P.SHARDED: (_P.GATHERING,),
    _P.GATHERING: (_P.WHOLE, _P.SHARDED, _P.HELD),  # back to where it was, if the gather raises
    _P.WHOLE: (_P.SHARDED, _P.HELD, _P.GATHERING),
    _P.HELD: (_P.GATHERING, _P.SHARDED),
    _G.EMPTY: (_G.PARTIAL, _G.REDUCING, _G.ACCUMULATED),
    _G.PARTIAL: (_G.REDUCING, _G.ACCUMULATED, _G.EMPTY),
    _G.REDUCING: (_G.ACCUMULATED, _G.READY),
    _G.ACCUMULATED: (_G.PARTIAL, _G.REDUCING, _G.READY, _G.EMPTY),
    _G.READY: (_G.ACCUMULATED, _G.EMPTY),
}

_State = TypeVar("_State", ParameterState, GradientState)


def check_transition(subject: str, now: _State, to: _State) -> _State:
    """Return ``to``, if the life-cycle lets it follow ``now``; else raise a StateError naming both."""
    if to is not now and to not in MOVES[now]:
        allowed = ", ".join(state.name for state in MOVES[now])
        raise StateError(
            subject,
            expected=f"a move from {now.name} to one of {allowed}",
            got=to.name,
            do="This is a fault of the engine; please report it with the model's structure.",
        )
    return to
