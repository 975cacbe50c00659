"""Find the engine that owns a model, or the parameters that a program passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor, nn

from npuzero.config import describe_value
from npuzero.errors import StateError
from npuzero.shard.state.claim import deleted_model_error

if TYPE_CHECKING:
    from npuzero.shard.engine import Engine


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a model made by :func:`npuzero.zero`.

    Raises:
        StateError: there is none.
    """
    engine = getattr(model, "_npuzero", None)
    if engine is None:
        raise not_sharded_error(model)
    return engine  # type: ignore[no-any-return]


class GradientTargets(NamedTuple):
    """Hold what a call about gradients was given.

    Attributes:
        engines: by engine the parameters of its model; None: all of them.
        plain: tensors that no engine owns.
    """

    engines: dict[Engine, Sequence[nn.Parameter] | None]
    plain: list[Tensor]


def find_gradient_targets(
    subject: str, model: nn.Module | Iterable[nn.Parameter], *, plain: bool = True, models: int | None = None
) -> GradientTargets:
    """Return what ``subject`` was given: a model made by :func:`npuzero.zero`, or parameters of one or more of them.

    Args:
        plain: whether it takes tensors that no sharded model has, beside others.
        models: of how many models it takes parameters; None: of any number.

    Raises:
        StateError: nothing of a sharded model is among it, or more than ``subject`` takes.
    """
    engine = getattr(model, "_npuzero", None)
    if engine is not None:
        return GradientTargets({engine: None}, [])
    if isinstance(model, nn.Module):
        raise not_sharded_error(model)
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
        return GradientTargets({**engines}, others)
    got = f"{len(others)} that no model made by npuzero.zero() has" if others else describe_value(model)
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
        raise deleted_model_error("optimizer")
    return cast("Engine", engine)


def split_by_engine(parameters: Iterable[nn.Parameter]) -> tuple[list[Engine], list[nn.Parameter]]:
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


def not_sharded_error(model: nn.Module) -> StateError:
    """Return the error for a plain module where a sharded one is needed."""
    plain = "a part of one" if _has_sharded_parameter(model) else "a plain module"
    return StateError(
        type(model).__name__,
        expected="a model made by npuzero.zero()",
        got=plain if isinstance(model, nn.Module) else describe_value(model),
        do="Call npuzero.zero(model) first, and pass that same (outermost) module here.",
    )


def _has_sharded_parameter(model: object) -> bool:
    return isinstance(model, nn.Module) and any("_npuzero_engine" in p.__dict__ for p in model.parameters())
