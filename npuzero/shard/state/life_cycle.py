"""States of a unit's parameters and of a flat parameter's gradient, and the allowed transitions."""

from __future__ import annotations

import enum
from typing import TypeVar

from npuzero.errors import StateError


class ParameterState(enum.Enum):
    """Name the state of a unit's parameters."""

    SHARDED = "sharded"  # the resting shard only
    GATHERING = "being gathered"  # an all-gather writes into the unsharded flat parameter
    WHOLE = "unsharded"  # the unsharded flat parameter may be read
    HELD = "kept within the step"  # the resting shard, and the shard held for backward or for the next micro-batch


class GradientState(enum.Enum):
    """Name the state of a flat parameter's gradient."""

    EMPTY = "empty"
    PARTIAL = "partial"  # some slots have received their gradient from autograd
    REDUCING = "reducing"  # a reduction is in progress
    ACCUMULATED = "accumulated"  # this backward's gradients are in the accumulation buffer
    READY = "ready"  # this rank's states shard, summed over all ranks


_P, _G = ParameterState, GradientState
MOVES: dict[enum.Enum, tuple[enum.Enum, ...]] = {
    _P.SHARDED: (_P.GATHERING,),
    _P.GATHERING: (_P.WHOLE, _P.SHARDED, _P.HELD),  # back to the earlier state, if the all-gather raises
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
    """Return ``to`` if it may follow ``now``; else raise a StateError naming both."""
    if to is not now and to not in MOVES[now]:
        allowed = ", ".join(state.name for state in MOVES[now])
        raise StateError(
            subject,
            expected=f"a move from {now.name} to one of {allowed}",
            got=to.name,
            do="This is a fault of the engine; please report it with the model's structure.",
        )
    return to
