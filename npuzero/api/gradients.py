"""Clip, measure and gather gradients between backward and the step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from npuzero.arguments import as_number, describe_value
from npuzero.errors import StateError
from npuzero.shard.find_engine import engine_behind, find_gradient_targets
from npuzero.shard.step.clip_gradients import clip_gradient_norm, clip_gradient_values, skip_nonfinite


def clip_grad_norm_(
    model: nn.Module | Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the gradients of a sharded model by their global norm, as ``torch.nn.utils.clip_grad_norm_`` does.

    The norm is over the averaged gradients of all ranks, each element once. If it covers all gradients of the model,
    the optimizer's update applies the scale. Collective: call it on every rank, with the same parameters. With a loss
    scaler, call ``unscale_`` first. Over a pipeline the norm covers the arguments of all stages and is the same on
    every rank, including those of a frozen stage.

    Args:
        model: made by :func:`zero`; or exactly the parameters to measure and clip, of a part of a model or of several
            models. A parameter that is given twice counts twice, as in torch. Plain tensors among them must have the
            same gradients on every rank.
        max_norm: positive.
        norm_type: p of the p-norm, more than 0; infinity for the largest magnitude.
        error_if_nonfinite: raise if the norm is inf or NaN.

    Returns:
        The norm before clipping, a float32 scalar on the device.

    Raises:
        StateError: the model is not sharded; with ``error_if_nonfinite``, gradients that are inf or nan.
        ConfigError: ``max_norm`` or ``norm_type`` is no positive number.

    Example::

        loss.backward()
        norm = npuzero.clip_grad_norm_(model, 1.0)
        optimizer.step()
    """
    most = _check_positive_number("clip_grad_norm_: max_norm", max_norm)
    kind = _check_positive_number("clip_grad_norm_: norm_type", norm_type)
    return clip_gradient_norm(find_gradient_targets("clip_grad_norm_", model), most, kind, error_if_nonfinite)


def clip_grad_value_(model: nn.Module | Iterable[nn.Parameter], clip_value: float) -> None:
    """Clip every element of the gradients to ``[-clip_value, clip_value]``, as ``torch.nn.utils.clip_grad_value_``.

    It applies to the averaged gradients of all ranks. Collective: call it on every rank. With a loss scaler, call
    ``unscale_`` first.

    Args:
        model: made by :func:`zero`; or parameters, as for :func:`clip_grad_norm_`.
        clip_value: positive.

    Raises:
        StateError: the model is not sharded.
        ConfigError: ``clip_value`` is no positive number.

    Example::

        loss.backward()
        npuzero.clip_grad_value_(model, 0.5)
        optimizer.step()
    """
    most = _check_positive_number("clip_grad_value_: clip_value", clip_value)
    clip_gradient_values(find_gradient_targets("clip_grad_value_", model), most)


def skip_nonfinite_(model: nn.Module | Iterable[nn.Parameter]) -> Tensor:
    """Skip the next optimizer step if any gradient of these parameters, on any rank, is inf or NaN.

    For float32 and bfloat16, which have no loss scale to skip steps: DeepSpeed's ``check_grad_overflow``, and
    InternEvo's step. A skipped step leaves parameters, masters, moments and step counts as they are, and the host does
    not wait, as under :class:`npuzero.LossScaler`, which checks gradients itself. :class:`npuzero.FiniteGuard` raises
    instead. Over a pipeline all stages skip the step. Collective: call it on every rank, after the step's last backward
    and before :func:`clip_grad_value_`.

    Args:
        model: made by :func:`zero`; or the parameters to check, of one or several such models. An optimizer that has
            any of them skips its step for all of its parameters.

    Returns:
        () bool on the device, the same on every rank: whether the step is skipped.

    Raises:
        StateError: the model is not sharded.
        ConfigError: it is not called on every rank, or the optimizer updates early.

    Example::

        loss.backward()
        skipped = npuzero.skip_nonfinite_(model)
        npuzero.clip_grad_norm_(model, 1.0)
        optimizer.step()
    """
    return skip_nonfinite(find_gradient_targets("skip_nonfinite_", model, plain=False))


def grad_norms(model: nn.Module | Iterable[nn.Parameter], norm_type: float = 2.0) -> dict[str, float]:
    """Measure the gradient norm of each parameter over all ranks, by one collective; the same floats on every rank.

    The gradients are the ones that the optimizer would see now: averaged over the ranks, and clipped if clipping was
    called before. Synchronizes with the device. Collective: call it on every rank. Over a pipeline it measures all
    stages, and every rank gets the names of all.

    Args:
        model: made by :func:`zero`, or the parameters of one to measure.
        norm_type: p of the p-norm, more than 0; infinity for the largest magnitude.

    Returns:
        Norms by parameter name (the first name of a tied parameter), rounded to float32. Parameters without a gradient
        on any rank are left out.

    Raises:
        StateError: the model is not sharded.
        ConfigError: ``norm_type`` is no positive number.

    Example::

        loss.backward()
        for name, norm in npuzero.grad_norms(model).items():
            print(f"{name}: {norm:.3g}")
    """
    kind = _check_positive_number("grad_norms: norm_type", norm_type)
    ((engine, parameters),) = find_gradient_targets("grad_norms", model, plain=False, models=1).engines.items()
    return engine.gradients.norms(kind, parameters)


def full_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Gather the full gradient of one parameter of a sharded model. Collective: call it on every rank, for the same
    one.

    It equals ``parameter.grad`` in plain torch with the data of all ranks: averaged, and clipped if clipping was called
    before. If each rank keeps the full gradient (``zero0``, or a single rank), ``parameter.grad`` can be read as well
    once the ranks have summed it: after this call, clipping, :func:`grad_norms` or the step, until ``zero_grad()``.
    Over a pipeline each rank asks for a parameter of its own stage.

    Returns:
        A float32 copy in the parameter's shape; None where no rank has a gradient.

    Raises:
        StateError: the parameter belongs to no model made by :func:`zero`, or does not train.

    Example::

        loss.backward()
        gradient = npuzero.full_gradient(next(model.parameters()))
        print(gradient.shape, gradient.abs().max())
    """
    engine = engine_behind(parameter) if isinstance(parameter, nn.Parameter) else None
    place = engine.place(parameter) if engine is not None else None
    if engine is None or place is None:
        raise StateError(
            "npuzero.full_gradient",
            expected="a parameter that trains, of a model made by npuzero.zero()",
            got="a frozen one" if engine is not None else describe_value(parameter),
            do="Pass e.g. model.head.weight; the gradient of a plain parameter is in its .grad.",
        )
    return engine.gradients.full(*place)


def _check_positive_number(what: str, value: object) -> float:
    do = "Give e.g. 1.0, after the model."
    return as_number(what, value, "a positive number", do, holds=lambda number: number > 0)
