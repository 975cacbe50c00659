"""Ownership: from a parameter or a model to its engine, without keeping either alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, cast

from torch import Tensor, nn

from npuzero.config import describe
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
            marker.whole, marker.name = _reader(reference, flat, i), flat.layout.slots[i].name
            marker.sharded_by = flat.plan.name if flat.rests.states.guarded else ""


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a model made by :func:`npuzero.zero`.

    Raises:
        StateError: there is none.
    """
    engine = getattr(model, "_npuzero", None)
    if engine is None:
        raise not_cut(model)
    return engine  # type: ignore[no-any-return]


class Given(NamedTuple):
    """Hold what a call about gradients was given.

    Attributes:
        engines: by engine the parameters of its model; None: all of them.
        plain: tensors that no engine owns.
    """

    engines: dict[Engine, Sequence[nn.Parameter] | None]
    plain: list[Tensor]


def given_to(
    subject: str, model: nn.Module | Iterable[nn.Parameter], *, plain: bool = True, models: int | None = None
) -> Given:
    """Return what ``subject`` was given: a model made by :func:`npuzero.zero`, or parameters of one or more of them.

    Args:
        plain: whether it takes tensors that no sharded model has, beside others.
        models: of how many models it takes parameters; None: of any number.

    Raises:
        StateError: nothing of a sharded model is among it, or more than ``subject`` takes.
    """
    engine = getattr(model, "_npuzero", None)
    if engine is not None:
        return Given({engine: None}, [])
    if isinstance(model, nn.Module):
        raise not_cut(model)
    tensors: list[Any] = [model] if isinstance(model, Tensor) else list(model) if isinstance(model, Iterable) else []
    engines: dict[Engine, list[nn.Parameter]] = {}
    others = []
    for tensor in tensors:
        owner = engine_behind(tensor) if isinstance(tensor, Tensor) else None
        if owner is None:
            others.append(tensor)
        else:
            engines.setdefault(owner, []).append(tensor)
    refused = others if not plain else [other for other in others if not isinstance(other, Tensor)]
    if engines and not refused and (models is None or len(engines) <= models):
        return Given({**engines}, others)
    got = f"{len(others)} that no model made by npuzero.zero() has" if others else describe(model)
    raise StateError(
        f"npuzero.{subject}",
        expected="the model that npuzero.zero() returned, or parameters of it",
        got=f"parameters of {len(engines)} models" if engines and not refused else got,
        do=f"Pass the model: npuzero.{subject}(model, ...); for plain parameters there is torch.nn.utils.",
    )


def engine_behind(parameter: Tensor) -> Engine | None:
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
    plain = "a part of one" if _has_owned(model) else "a plain module"
    return StateError(
        type(model).__name__,
        expected="a model made by npuzero.zero()",
        got=plain if isinstance(model, nn.Module) else describe(model),
        do="Call npuzero.zero(model) first, and pass that same (outermost) module here.",
    )


def _has_owned(model: object) -> bool:
    return isinstance(model, nn.Module) and any("_npuzero_engine" in p.__dict__ for p in model.parameters())


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
