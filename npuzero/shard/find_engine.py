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
        StateError: the model has no engine.
    """
    engine = getattr(model, "_npuzero", None)
    if engine is None:
        raise not_sharded_error(model)
    return engine  # type: ignore[no-any-return]


class GradientTargets(NamedTuple):
    """Hold the targets of a call on gradients.

    Attributes:
        engines: by engine, the given parameters of its model; None: all of them.
        plain: tensors that belong to no engine.
    """

    engines: dict[Engine, Sequence[nn.Parameter] | None]
    plain: list[Tensor]


def find_gradient_targets(
    subject: str, model: nn.Module | Iterable[nn.Parameter], *, plain: bool = True, models: int | None = None
) -> GradientTargets:
    """Return the targets of ``subject``: a model made by :func:`npuzero.zero`, or parameters of one or more models.

    Args:
        plain: whether it also accepts tensors that belong to no sharded model.
        models: maximum number of models with given parameters; None: any number.

    Raises:
        StateError: no parameter of a sharded model is given, or more than ``subject`` accepts.
    """
    # The model first: an nn.Module is never taken as an iterable of parameters, even if it is one (nn.ParameterList).
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
    """Return the engine of the model that owns ``parameter``; None for a plain parameter.

    Raises:
        StateError: the model has been deleted.
    """
    reference = parameter.__dict__.get("_npuzero_engine")
    if reference is None:
        return None
    engine = reference()
    if engine is None:
        raise deleted_model_error("optimizer")
    return cast("Engine", engine)


def split_by_engine(parameters: Iterable[nn.Parameter]) -> tuple[list[Engine], list[nn.Parameter]]:
    """Return the engines of ``parameters``, each once, in order, and the plain parameters among them.

    Raises:
        StateError: a model has been deleted.
    """
    # Called several times a step, so it must be fast: parameters of an engine share one reference object.
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
    """Return the error for a plain module in place of a sharded one."""
    plain = "a part of one" if _has_sharded_parameter(model) else "a plain module"
    return StateError(
        type(model).__name__,
        expected="a model made by npuzero.zero()",
        got=plain if isinstance(model, nn.Module) else describe_value(model),
        do="Call npuzero.zero(model) first, and pass that same (outermost) module here.",
    )


def _has_sharded_parameter(model: object) -> bool:
    return isinstance(model, nn.Module) and any("_npuzero_engine" in p.__dict__ for p in model.parameters())
