"""Lion (Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675): rule and optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from npuzero import ops
from npuzero.errors import ConfigError, refuse_unknown_keywords
from npuzero.optim.fused import FusedWorker
from npuzero.optim.optimizer import ZeroOptimizer
from npuzero.optim.rules.rule import Options, ParameterRange, UpdateRule
from npuzero.optim.rules.segments import stack_float64


@final
class LionRule(UpdateRule):
    """Update by Lion, in ``ops.flat_lion``."""

    alike = "an optimizer for them"  # torch has no Lion
    moments: ClassVar = {"exp_avg": True}
    line = ops.LionLine

    def __init__(self) -> None:
        self.always: Mapping[str, Any] = {}

    def defaults(self, options: Mapping[str, Any]) -> Options:
        lr, betas, weight_decay = options["lr"], options["betas"], options["weight_decay"]
        of_one = not isinstance(lr, Tensor) or lr.numel() == 1
        rules = (
            ("lr", of_one and (isinstance(lr, Tensor) or 0 <= lr < math.inf), "a number from 0 on, or a tensor of one"),
            ("betas", len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "two numbers in [0, 1)"),
            ("weight_decay", 0 <= weight_decay < math.inf, "a number from 0 on"),
        )
        for name, holds, expected in rules:
            if not holds:
                raise ConfigError(
                    f"Lion: {name}", expected=expected, got=repr(options[name]), do="Correct the parameter group."
                )
        return dict(options)

    def kept(self, options: Mapping[str, Any]) -> Sequence[str]:
        return list(self.moments)

    def segment(self, first: ParameterRange, last: ParameterRange) -> ops.LionSegment:
        options = last.options
        beta1, beta2 = options["betas"]
        return ops.LionSegment(
            first.begin,
            last.end,
            float(options["lr"]) if last.row is None else 0.0,
            float(beta1),
            float(beta2),
            options["weight_decay"],
            last.step,
            options["maximize"],
            last.row,
            first.stream,
            first.place,
        )

    def keeps_zeros(self, options: Mapping[str, Any]) -> bool:
        return True  # sign(0) = 0

    def rows(
        self, options: Sequence[Mapping[str, Any]], steps: Sequence[float | Tensor], device: torch.device
    ) -> Tensor:
        lr = stack_float64([o["lr"] for o in options], device)
        decay = stack_float64([o["weight_decay"] for o in options], device)
        return torch.stack([lr, 1 - lr * decay, stack_float64(steps, device)], dim=1).float()


@refuse_unknown_keywords(learning_rate="lr")
class Lion(ZeroOptimizer):
    """Update as Lion does: one launch for a model's shards or all plain parameters; half of AdamW's optimizer states.

    Each element moves by lr, independent of the gradient's size, so the paper (section 5) advises an lr 3 to 10 times
    smaller than AdamW's, and a weight_decay larger by the same factor. Over a model made by :func:`npuzero.zero` as
    over plain parameters it behaves as :class:`npuzero.AdamW` does.

    Args:
        params: parameters, or groups of them.
        lr: a number, or a tensor of one element; a tensor on the parameters' device is read there, never by the host.
        betas: of the update, and of the momentum.
        weight_decay: decoupled.
        maximize: go up instead of down.
        capturable, fused, masters, moments, seed, early: as for :class:`npuzero.AdamW`; ``exp_avg`` in fewer bits is
            rounded stochastically.

    Raises:
        ConfigError: options out of range.

    Example::

        optimizer = npuzero.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
        loss.backward()
        optimizer.step()
    """

    def __init__(  # noqa: PLR0913 - torch's signature, and four more
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
        masters: str | None = None,
        moments: str | None = None,
        seed: int = 0,
        early: bool | int = False,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "capturable": capturable,
            "fused": fused,
        }
        self._open(FusedWorker(LionRule(), masters, moments, seed, early), params, options)
