"""Ownership: from a parameter or a model to its engine, without keeping either alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

from torch import Tensor, nn

from npuzero.errors import StateError
from npuzero.shard.flat import Flat
from npuzero.shard.unit import Unit

if TYPE_CHECKING:
    from npuzero.shard.engine import Engine


class EngineReference(weakref.ref["Engine"]):
    """Refer to a parameter's engine; keep the model from being pickled in part."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        engine = self()
        raise uncopied("pickled") if engine else TypeError("cannot pickle a parameter of a deleted model")


def claim(reference: EngineReference, unit: Unit) -> None:
    """Let the parameters of ``unit``, and the markers of their gradients, know their engine."""
    for flat in unit.flats:
        for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
            parameter._npuzero_engine = reference  # type: ignore[attr-defined]
            parameter._npuzero_open = _opener(reference, unit, slot.name)  # type: ignore[attr-defined]
        for i, marker in enumerate(flat.gradient.markers if flat.trainable else ()):
            marker.whole = _reader(reference, flat, i)


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a model made by :func:`npuzero.zero`.

    Raises:
        StateError: there is none.
    """
    engine = getattr(model, "_npuzero", None)
    if engine is None:
        raise not_cut(model)
    return engine  # type: ignore[no-any-return]


def engine_behind(parameter: nn.Parameter) -> Engine | None:
    """Return the engine whose model owns ``parameter``; None for a plain one.

    Raises:
        StateError: that model is gone.
    """
    reference = parameter.__dict__.get("_npuzero_engine")
    if reference is None:
        return None
    engine = reference()
    if engine is None:
        raise deleted("optimizer")
    return cast("Engine", engine)


def owners(parameters: Iterable[nn.Parameter]) -> tuple[list[Engine], list[nn.Parameter]]:
    """Return the engines whose models own ``parameters``, each once, in order; and the plain parameters among them.

    Raises:
        StateError: one of those models is gone.
    """
    # Several times a step, so one parameter must cost next to nothing: an engine's own share one reference to it.
    seen: dict[int, nn.Parameter] = {}
    plain = []
    for parameter in parameters:
        reference = parameter.__dict__.get("_npuzero_engine")
        if reference is None:
            plain.append(parameter)
        else:
            seen[id(reference)] = parameter
    return [engine for engine in map(engine_behind, seen.values()) if engine is not None], plain


def not_cut(model: nn.Module) -> StateError:
    """Return the error for a plain module where a sharded one is needed."""
    return StateError(
        type(model).__name__,
        expected="a model made by npuzero.zero()",
        got="a plain module",
        do="Call npuzero.zero(model) first, and pass that same (outermost) module here.",
    )


def deleted(subject: str) -> StateError:
    """Return the error for parameters of a model that is gone."""
    return StateError(
        subject,
        expected="parameters of a living model",
        got="parameters whose model was deleted",
        do="Keep the model, and build the optimizer over the parameters of the one that is trained.",
    )


def uncopied(verb: str) -> StateError:
    """Return the error for copying or pickling a model, or its optimizer, of which each rank holds a part."""
    return StateError(
        "a model made by npuzero.zero()",
        expected=f"not to be {verb}: each rank holds a part of it",
        got="copy or pickle of it, or of its optimizer",
        do="Use npuzero.full_state_dict(model) and load it into a plain model.",
    )


def _reader(engine_of: EngineReference, flat: Flat, i: int) -> Callable[[], Tensor]:
    flat_of, name = weakref.ref(flat), flat.layout.slots[i].name

    def read() -> Tensor:
        engine, flat = engine_of(), flat_of()
        if engine is None or flat is None:
            raise deleted(f"gradient of {name}")
        return engine.gradients.read(flat, i)

    return read


def _opener(engine_of: EngineReference, unit: Unit, name: str) -> Callable[[], None]:
    its_unit = weakref.ref(unit)

    def open_() -> None:
        engine, unit = engine_of(), its_unit()
        if engine is None or unit is None:
            raise deleted(f"parameter {name}")
        engine.values.open(unit, name)

    return open_
