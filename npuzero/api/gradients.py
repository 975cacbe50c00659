"""What programs ask of gradients between backward and the step: clipping, norms, and an unsharded one."""

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
    """Clip the gradients of a sharded model by their global norm, as ``torch.nn.utils.clip_grad_norm_`` would.

    The norm is over the averaged gradients of all ranks, each element once. Where it is over all gradients that the
    model has, the scaling itself happens inside the optimizer's update. Collective: call it on every rank, with the
    same parameters. With a loss scaler, call ``unscale_`` before. Over the stages of a pipeline it is over what every
    stage gives, the same on every rank, also of a stage that is frozen.

    Args:
        model: made by :func:`zero`; or parameters, exactly those whose gradients are measured and clipped: of a part of
            a model, of several models, one that is given twice counts twice, as in torch. Plain tensors among them
            must have the same gradients on every rank.
        max_norm: positive.
        norm_type: p of the p-norm, more than 0; infinity for the largest magnitude.
        error_if_nonfinite: raise where the norm is inf or NaN.

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
    """Bring every element of the gradients into ``[-clip_value, clip_value]``, as ``torch.nn.utils.clip_grad_value_``.

    The elements are those of the averaged gradients of all ranks. Collective: call it on every rank. With a loss
    scaler, call ``unscale_`` before.

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
    """Have the next step of some parameters change nothing if any gradient of these, on any rank, is inf or NaN.

    For float32 and bfloat16, where no loss scale would skip it: DeepSpeed's ``check_grad_overflow``, and InternEvo's
    step. A skipped step leaves parameters, masters, moments and step counts as they are; the host waits for nothing,
    as under :class:`npuzero.LossScaler`, which looks by itself. :class:`npuzero.FiniteGuard` stops instead. Over the
    stages of a pipeline the step of all is skipped. Collective: call it on every rank, after the step's last backward
    and before :func:`clip_grad_value_`.

    Args:
        model: made by :func:`zero`; or parameters of one or several such models, which alone are looked at. A step of
            an optimizer that has any of them is skipped, all of it.

    Returns:
        () bool on the device, the same on every rank: whether the step is skipped.

    Raises:
        StateError: the model is not sharded.
        ConfigError: not on every rank, or the optimizer updates early.

    Example::

        loss.backward()
        skipped = npuzero.skip_nonfinite_(model)
        npuzero.clip_grad_norm_(model, 1.0)
        optimizer.step()
    """
    return skip_nonfinite(find_gradient_targets("skip_nonfinite_", model, plain=False))


def grad_norms(model: nn.Module | Iterable[nn.Parameter], norm_type: float = 2.0) -> dict[str, float]:
    """Measure the gradient of each parameter, over all ranks, by one collective: the same floats on every rank.

    Of what the optimizer would see now: averaged over the ranks, after clipping if it was called before. Waits for the
    device. Collective: call it on every rank. Over the stages of a pipeline it measures the whole model's, with the
    names of all stages on every rank.

    Args:
        model: made by :func:`zero`, or some of its parameters, which alone are measured.
        norm_type: p of the p-norm, more than 0; infinity for the largest magnitude.

    Returns:
        By the parameter's name (the first one of a tied parameter) the norm, rounded to float32; parameters without a
        gradient on any rank are left out.

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
    """Gather the full gradient of one parameter of a sharded model. Collective: call it on every rank,
    for the same one.

    It is what ``parameter.grad`` would be under plain torch with the data of all ranks: averaged over them, after
    clipping if it was called before. Where a plan leaves each rank all of it (``zero0``, or one rank alone),
    ``parameter.grad`` can be read as well once the ranks have summed it: after this call, clipping, :func:`grad_norms`
    or the step, until ``zero_grad()``. Over the stages of a pipeline each rank asks for one of its own stage.

    Returns:
        float32 of the parameter's shape, a copy; None where no rank has a gradient.

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
