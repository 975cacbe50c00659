"""Weak references from parameters and gradients to their engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, SupportsIndex

from torch import Tensor

from npuzero.errors import StateError
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.unit import Unit

if TYPE_CHECKING:
    from npuzero.shard.engine import Engine  # noqa: F401 - named in a string below


class EngineReference(weakref.ref["Engine"]):
    """Refer weakly to a parameter's engine; refuse to be pickled with one rank's part of the model."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        engine = self()
        raise refused_copy_error("pickled") if engine else TypeError("cannot pickle a parameter of a deleted model")


def claim_unit(reference: EngineReference, unit: Unit) -> None:
    """Set the engine reference on the parameters of ``unit`` and on the markers of their gradients."""
    for flat in unit.flats:
        for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
            parameter._npuzero_engine = reference  # type: ignore[attr-defined]
            parameter._npuzero_open = _make_parameter_opener(reference, unit, slot.name)  # type: ignore[attr-defined]
        for i, marker in enumerate(flat.gradient.markers if flat.trainable else ()):
            marker.whole, marker.name = _make_gradient_reader(reference, flat, i), flat.layout.slots[i].name
            marker.sharded_by = flat.plan.name if flat.rests.states.guarded else ""


def deleted_model_error(subject: str) -> StateError:
    """Return the error for parameters of a deleted model."""
    return StateError(
        subject,
        expected="parameters of a living model",
        got="parameters whose model was deleted",
        do="Keep the model, and build the optimizer over the parameters of the one that is trained.",
    )


def refused_copy_error(verb: str) -> StateError:
    """Return the error for copying or pickling a sharded model or its optimizer."""
    return StateError(
        "a model made by npuzero.zero()",
        expected=f"not to be {verb}: each rank holds a part of it",
        got="copy or pickle of it, or of its optimizer",
        do="Use npuzero.full_state_dict(model) and load it into a plain model.",
    )


def _make_gradient_reader(engine_of: EngineReference, flat: FlatParameter, i: int) -> Callable[[], Tensor]:
    flat_of, name = weakref.ref(flat), flat.layout.slots[i].name

    def read() -> Tensor:
        engine, flat = engine_of(), flat_of()
        if engine is None or flat is None:
            raise deleted_model_error(f"gradient of {name}")
        return engine.gradients.read(flat, i)

    return read


def _make_parameter_opener(engine_of: EngineReference, unit: Unit, name: str) -> Callable[[], None]:
    its_unit = weakref.ref(unit)

    def open_() -> None:
        engine, unit = engine_of(), its_unit()
        if engine is None or unit is None:
            raise deleted_model_error(f"parameter {name}")
        engine.values.open(unit, name)

    return open_
