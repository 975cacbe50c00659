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

# As torch has them: a program may put this module's in their place.
_ADAM, _ADAMW = torch.optim.Adam, torch.optim.AdamW


@final
class AdamRule(UpdateRule):
    """Update as Adam does, by ``ops.flat_adam``.

    Args:
        optimizer_class: torch's, which checks options.
        bias_correction: False takes moments as they are. What torch has not is an option of groups only where it says
            something else: groups are torch's otherwise.
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
    """Return [rows, 4] float32 on ``device``: what lr and step come to, computed there in float64 without a host's
    wait.

    Args:
        options: of each row: lr (a number or a tensor of one element), betas, weight_decay, decoupled_weight_decay.
        steps: of each row the step count, this update included; a number or a tensor.
        bias_correction: whether moments are divided by what they lack yet.
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
    """Replace ``torch.optim.Adam``, with one fused launch for a model's shards or all plain parameters; see
    :class:`AdamW`. Its weight decay is L2's, added to the gradient, as that of DeepSpeed's ``adam_w_mode: false``.

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

    Over a model made by :func:`npuzero.zero` moments and masters are sharded as its plan says. Over plain parameters
    it is a drop-in whose ``state_dict`` is torch's (with a ``master`` of each parameter in 16 bits), and all of them
    are updated by one launch. A program may write into plain parameters between steps, but where they have masters not
    in place through ``p.data``, which torch does not show.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as for ``torch.optim.AdamW``. An lr that is a tensor on
            the parameters' device is read there, and never by the host.
        capturable: as torch's: steps are counted on the device, so that a graph can capture :meth:`step` after one step
            outside of it. A replay goes on counting, and sees another lr where that is a tensor on the device.
        bias_correction: of all groups; False takes moments as they are, too small in the first steps: the choice of
            BERT's optimizer, and apex's and DeepSpeed's option of this name.
        masters: of plain contiguous bfloat16 parameters: ``"fp32"`` (None); ``"split"``, the 16 bits that the parameter
            lacks, with the same results; ``"none"``, the parameter alone, rounded stochastically. Others have fp32.
        moments: of plain parameters: ``"fp32"`` (None), ``"bf16"`` or ``"int8"``. ``state_dict`` has float32 always.
            Of a model with a plan its precision says both.
        seed: of stochastic rounding, with the step and the parameter's place among ``params``.
        early: over a model whose states rest off the device their update begins inside backward, as soon as gradients
            are summed; the bits are the same. Then nothing may change gradients or options between a step's last
            backward and :meth:`step`: clipping, a loss scaler and a FiniteGuard raise ConfigError under every plan, and
            another pass, :meth:`zero_grad` or a read of parameters before it a StateError. Which pass is the last? With
            True that by which there are as many as in any step so far; with a number, such as ``early=4``, the
            fourth; never one within ``no_sync()``. A step of fewer passes, and the first one, are updated in
            :meth:`step`, as is everything where lr is a tensor, ``capturable`` is set or ``Settings(overlap=False)``.
        fused: the update is, always; True lets torch.amp.GradScaler decide on the device, as for torch's.
        foreach: accepted for compatibility.
        differentiable: must be False.

    Raises:
        ConfigError: options out of range, or parameters that torch refuses; of torch's kind of error, too.

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


#: By a class of torch's the class here that does the same, and what makes its rule.
FUSED: dict[type[torch.optim.Optimizer], tuple[type[ZeroOptimizer], Callable[[bool], AdamRule]]] = {
    _ADAM: (Adam, _make_adam_rule),
    _ADAMW: (AdamW, _make_adamw_rule),
}
