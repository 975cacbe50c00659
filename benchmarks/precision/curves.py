"""Training runs by precision, all with the same batches and initial weights, and their distances from fp32."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import npuzero
from npuzero import Precision, comm
from npuzero.comm import World
from npuzero.plan import PrecisionLike

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))

from data import Corpus, train_batch
from model import GPT, next_byte_loss
from train import Options, build_optimizer

RANKS, PLAN, STEPS = 2, "zero3", 300
_FIRST_WEIGHTS = threading.Lock()
BASELINE = "fp32"
#: Losses are compared as means over this many steps, because single batches are noisy.
WINDOW = 20
#: Warm-up steps: losses fall steeply, and any two runs diverge temporarily.
AFTER = 60


@dataclass(frozen=True)
class PrecisionContender:
    """Settings of one run, and the allowed distance of its mean loss from fp32's, in nats per byte.

    Attributes:
        precision: of the model.
        band: largest distance after the first :data:`AFTER` steps.
        scale: initial loss scale; None: without a scaler.
        autocast: forward under torch's autocast to bfloat16.
        plan, ranks, local_size: sharding, and number of ranks.
    """

    precision: PrecisionLike
    band: float
    scale: float | None = None
    autocast: bool = False
    plan: str = PLAN
    ranks: int = RANKS
    local_size: int | None = None


BF16, FP32 = torch.bfloat16, torch.float32
CONTENDERS = {
    BASELINE: PrecisionContender("fp32", 0.0),
    "autocast bf16": PrecisionContender("fp32", 0.03, autocast=True),
    "fp32, reduced in bf16": PrecisionContender(Precision(FP32, wires=BF16), 0.03),
    "bf16": PrecisionContender("bf16", 0.03),
    "fp16": PrecisionContender("fp16", 0.03, scale=2.0**14),
    "bf16-split": PrecisionContender("bf16-split", 0.03),
    "bf16-stochastic": PrecisionContender("bf16-stochastic", 0.03),
    "bf16-8bit": PrecisionContender("bf16-8bit", 0.03),
}


class MatrixUnits(TorchDispatchMode):
    """Compute float16 matrix products as accelerators do: sums in float32, rounded once.

    A CPU without float16 units would take ten times as long for the same result.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[0].dtype is not torch.float16:
            return func(*args, **kwargs)
        wide = [arg.float() if isinstance(arg, Tensor) and arg.dtype is torch.float16 else arg for arg in args]
        made = func(*wide, **kwargs)
        if func is _ATTENTION:  # its second result, sums of exponentials, is not rounded
            return made[0].half(), made[1]
        return made.half() if isinstance(made, Tensor) else tuple(each.half() for each in made)


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    _ATTENTION,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


@dataclass(frozen=True)
class TrainingCurve:
    """The result of one run: each step's loss averaged over ranks, and the number of steps skipped by its scaler."""

    losses: list[float]
    skipped: int


def train_curve(contender: PrecisionContender, text: torch.Tensor, options: Options) -> TrainingCurve:
    """Train for ``options.steps`` on the contender's ranks."""
    ranks = contender.ranks

    def rank(world: World) -> TrainingCurve:
        with _FIRST_WEIGHTS:
            torch.manual_seed(options.seed)
            model = GPT(options.model)
        model = npuzero.zero(
            model, plan=contender.plan, precision=contender.precision, local_size=contender.local_size, world=world
        )
        optimizer, scheduler = build_optimizer(model, options)
        scaler = npuzero.LossScaler(init_scale=contender.scale or 1.0, enabled=contender.scale is not None)
        losses = []
        for step in range(options.steps):
            window = train_batch(
                text,
                seed=options.seed,
                step=step,
                rank=world.rank,
                ranks=ranks,
                batch=options.batch,
                length=options.seq,
            )
            with MatrixUnits() if contender.precision == "fp16" else contextlib.nullcontext():
                with torch.autocast("cpu", dtype=BF16, enabled=contender.autocast):
                    loss = next_byte_loss(model, window)
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            npuzero.clip_grad_norm_(model, options.clip)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        by_rank = world.exchange(losses)
        mean = [sum(each) / ranks for each in zip(*by_rank, strict=True)]
        return TrainingCurve(mean, scaler.skipped if contender.scale else 0)

    return comm.run_threads(ranks, rank)[0]


def smooth_losses(losses: Sequence[float]) -> list[float]:
    """Return means over :data:`WINDOW` steps, by their last step."""
    return [sum(losses[i - WINDOW : i]) / WINDOW for i in range(WINDOW, len(losses) + 1)]


def largest_distance(losses: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the largest distance of two curves' means, without windows that begin before :data:`AFTER`."""
    pairs = zip(smooth_losses(losses[AFTER:]), smooth_losses(baseline[AFTER:]), strict=True)
    return max(abs(own - other) for own, other in pairs)


def load_corpus() -> torch.Tensor:
    """Return the demo's training data: u8[n]."""
    return Corpus.standard_library().train
