"""Adam and AdamW (Kingma & Ba, 2015; Loshchilov & Hutter, 2019): the rule, and optimizers with torch's signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from npuzero import ops
from npuzero.config import describe_value
from npuzero.errors import ConfigError, refuse_unknown_keywords
from npuzero.optim.fused import FusedWorker
from npuzero.optim.optimizer import ZeroOptimizer
from npuzero.optim.rules.rule import Options, ParameterRange, UpdateRule
from npuzero.optim.rules.segments import stack_float64

# Saved at import, since a program may replace torch's classes by this module's.
_ADAM, _ADAMW = torch.optim.Adam, torch.optim.AdamW


@final
class AdamRule(UpdateRule):
    """Update by Adam, in ``ops.flat_adam``.

    Args:
        optimizer_class: the torch class that checks options.
        bias_correction: False uses moments without correction. As torch lacks this option, groups have it only where it
            is False, and otherwise equal torch's groups.
        always: see :class:`UpdateRule`.
    """

    moments: ClassVar = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
    line = ops.AdamLine

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], bias_correction: bool, **always: Any) -> None:
        self.alike = f"torch.optim.{optimizer_class.__name__}"
        self.always = always if bias_correction else {**always, "bias_correction": False}
        self._class = optimizer_class
        self._corrects = bool(bias_correction)

    def defaults(self, options: Mapping[str, Any]) -> Options:
        arguments = inspect.signature(self._class).parameters.keys() - {"params"}
        mine = {key: value for key, value in options.items() if key in arguments}
        said = options.get("bias_correction", self._corrects)
        if said is not self._corrects:
            raise ConfigError(
                f"bias_correction={said!r}",
                expected=f"{self._corrects}, which the optimizer was told for all of its groups"
                if isinstance(said, bool)
                else "True or False",
                got=describe_value(said),
                do="Say it to the optimizer; parameters that want another get an optimizer of their own.",
            )
        return {**self._class([torch.zeros(1)], **mine).defaults, **self.always}

    def kept(self, options: Mapping[str, Any]) -> Sequence[str]:
        return list(self.moments)[: 3 if options["amsgrad"] else 2]

    def segment(self, first: ParameterRange, last: ParameterRange) -> ops.AdamSegment:
        options = last.options
        beta1, beta2 = options["betas"]
        return ops.AdamSegment(
            first.begin,
            last.end,
            float(options["lr"]) if last.row is None else 0.0,
            float(beta1),
            float(beta2),
            options["eps"],
            options["weight_decay"],
            last.step,
            options["decoupled_weight_decay"],
            options["maximize"],
            options["amsgrad"],
            last.row,
            first.stream,
            first.place,
            self._corrects,
        )

    def keeps_zeros(self, options: Mapping[str, Any]) -> bool:
        return bool(options["eps"] > 0)  # 0 / (0 + eps)

    def rows(
        self, options: Sequence[Mapping[str, Any]], steps: Sequence[float | Tensor], device: torch.device
    ) -> Tensor:
        return dynamic_rows(options, steps, device, self._corrects)


def dynamic_rows(
    options: Sequence[Mapping[str, Any]],
    steps: Sequence[float | Tensor],
    device: torch.device,
    bias_correction: bool = True,
) -> Tensor:
    """Return [rows, 4] float32 on ``device``: coefficients of lr and step, in float64 on the device, without a sync.

    Args:
        options: of each row: lr (a number or a tensor of one element), betas, weight_decay, decoupled_weight_decay.
        steps: of each row the step count, including this update; a number or a tensor.
        bias_correction: whether moments are divided by ``1 - beta**step``.
    """
    lr = stack_float64([o["lr"] for o in options], device)
    beta1, beta2 = (stack_float64([o["betas"][i] for o in options], device) for i in (0, 1))
    decay = stack_float64([o["weight_decay"] if o["decoupled_weight_decay"] else 0.0 for o in options], device)
    count = stack_float64(steps, device)
    bias1, bias2 = (1 - beta**count if bias_correction else torch.ones_like(count) for beta in (beta1, beta2))
    return torch.stack([lr / bias1, bias2.sqrt(), 1 - lr * decay, count], dim=1).float()


def _make_adam_rule(bias_correction: bool) -> AdamRule:
    return AdamRule(_ADAM, bias_correction)


def _make_adamw_rule(bias_correction: bool) -> AdamRule:
    return AdamRule(_ADAMW, bias_correction, decoupled_weight_decay=True)


@refuse_unknown_keywords(learning_rate="lr")
class Adam(ZeroOptimizer):
    """Replace ``torch.optim.Adam`` by one fused launch for a model's shards or all plain parameters; see
    :class:`AdamW`. Weight decay is L2, added to the gradient, as with DeepSpeed's ``adam_w_mode: false``.

    Example::

        optimizer = npuzero.Adam(model.parameters(), lr=1e-3, amsgrad=True)
        loss.backward()
        optimizer.step()
    """

    def __init__(  # noqa: PLR0913 - torch's signature, and five more
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        bias_correction: bool = True,
        masters: str | None = None,
        moments: str | None = None,
        seed: int = 0,
        early: bool | int = False,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "foreach": foreach,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
        }
        self._open(FusedWorker(_make_adam_rule(bias_correction), masters, moments, seed, early), params, options)


@refuse_unknown_keywords(learning_rate="lr")
class AdamW(Adam):
    """Replace ``torch.optim.AdamW``: one launch for all shards of a model does unscaling, update and the rounded copy.

    Over a model made by :func:`npuzero.zero` the plan shards moments and masters. Over plain parameters it is a drop-in
    with torch's ``state_dict`` (and a ``master`` of each 16-bit parameter), and one launch updates all of them. A
    program may write into plain parameters between steps; parameters with masters must not be written in place through
    ``p.data``, which torch does not track.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as for ``torch.optim.AdamW``. An lr that is a tensor on
            the parameters' device is read there, never by the host.
        capturable: as in torch: steps are counted on the device, so that a graph can capture :meth:`step` after one
            step outside the capture. A replay continues the count, and sees a new lr if lr is a tensor on the device.
        bias_correction: of all groups; False leaves moments uncorrected, so small in the first steps, like BERT's
            optimizer and the option of this name in apex and DeepSpeed.
        masters: for plain contiguous bfloat16 parameters: ``"fp32"`` (None); ``"split"``, which stores only the 16 bits
            that the parameter lacks, with the same results; ``"none"``, no master, with stochastic rounding. All other
            parameters have fp32 masters.
        moments: for plain parameters: ``"fp32"`` (None), ``"bf16"`` or ``"int8"``. ``state_dict`` always has float32.
            For a model with a plan, the plan's precision decides masters and moments.
        seed: of stochastic rounding, combined with the step and the parameter's place among ``params``.
        early: if states are offloaded, their update begins inside backward, as soon as gradients are summed; the bits
            are the same. Then nothing may change gradients or options between a step's last backward and :meth:`step`:
            clipping, a loss scaler and a FiniteGuard raise ConfigError under every plan; another pass,
            :meth:`zero_grad` or a read of parameters before the step raises a StateError. True takes the pass as a
            step's last by the largest number of passes in any step so far; a number, such as ``early=4``, takes the
            fourth; a pass within ``no_sync()`` never counts as the last. A step of fewer passes, and the first one, are
            updated in :meth:`step`, as is everything if lr is a tensor, ``capturable`` is set or
            ``Settings(overlap=False)``.
        fused: the update always is; True makes torch.amp.GradScaler decide on the device, as for torch's.
        foreach: accepted for compatibility.
        differentiable: must be False.

    Raises:
        ConfigError: options out of range, or parameters that torch refuses; also an instance of torch's exception type.

    Example::

        optimizer = npuzero.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    With ``early``, several micro-batches to a step::

        optimizer = npuzero.AdamW(model.parameters(), early=len(micro_batches))
        for micro_batch in micro_batches:
            model(micro_batch).mean().backward()  # the last one begins the update, from the second step on
        optimizer.step()
        optimizer.zero_grad()
    """

    def __init__(  # noqa: PLR0913 - torch's signature, and five more
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        bias_correction: bool = True,
        masters: str | None = None,
        moments: str | None = None,
        seed: int = 0,
        early: bool | int = False,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "foreach": foreach,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "bias_correction": bias_correction,
        }
        self._open(FusedWorker(_make_adamw_rule(bias_correction), masters, moments, seed, early), params, options)


#: Maps a torch class to the class here that does the same, and to the maker of its rule.
FUSED: dict[type[torch.optim.Optimizer], tuple[type[ZeroOptimizer], Callable[[bool], AdamRule]]] = {
    _ADAM: (Adam, _make_adam_rule),
    _ADAMW: (AdamW, _make_adamw_rule),
}
