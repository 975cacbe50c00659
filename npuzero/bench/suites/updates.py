"""Benchmarks of the optimizer update: AdamW, and the mixed-precision step around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from npuzero import ops
from npuzero.api import AdamW
from npuzero.bench.harness import Benchmark, check_close, check_equal
from npuzero.bench.setting import OWN, SEED, BenchmarkSetting
from npuzero.bench.shapes import gpt_shapes
from npuzero.config import Settings
from npuzero.ops import storage
from npuzero.ops.reference import cast as cast_reference
from npuzero.optim import MOMENT_DTYPES

FLATS = "npuzero, in flats"
_LR, _BETAS, _EPS, _DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2
_LOSS_SCALE, _MAX_NORM = 1024.0, 1.0


class FlatAdamRun:
    """Hold Adam's state on one flat buffer, and update it with npuzero's op."""

    def __init__(self, start: Tensor, gradient: Tensor, low: Tensor | None = None) -> None:
        self.start, self.gradient, self.low = start, gradient, low
        self.master, self.exp_avg, self.exp_avg_sq = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        self.step = 0

    def begin(self) -> None:
        """Reset the state, so that the next step is the first."""
        self.master.copy_(self.start)
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()
        self.step = 0

    def update(self, scale: Tensor | None = None) -> None:
        self.step += 1
        self._update(slice(0, self.master.numel()), scale)

    def update_parts(self, numel: int) -> None:
        """Update with one call per ``numel`` elements."""
        self.step += 1
        for start in range(0, self.master.numel(), numel):
            self._update(slice(start, start + numel), None)

    def _update(self, part: slice, scale: Tensor | None) -> None:
        master, low = self.master[part], None if self.low is None else self.low[part]
        whole = ops.AdamSegment(
            0, master.numel(), _LR, *_BETAS, _EPS, _DECAY, self.step, decoupled=True, maximize=False, amsgrad=False
        )
        moments = self.exp_avg[part], self.exp_avg_sq[part]
        ops.flat_adam(master, *moments, self.gradient[part], [whole], low=low, grad_scale=scale)

    def expected(self, scale: Tensor | None = None) -> Tensor:
        """Return the master after the first step in float64, by the paper's formula (Loshchilov & Hutter, 2019)."""
        gradient = self.gradient.double() * (1.0 if scale is None else scale.double())
        decayed = self.start.double() * (1 - _LR * _DECAY)
        return decayed.sub_(gradient.div(gradient.abs().add_(_EPS)).mul_(_LR))

    def lend(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        """Replace the moments of an optimizer that has taken its first step by these.

        Contenders then work in the same memory: the placement of a buffer's pages changes its speed by a tenth.

        Args:
            parameters: of the optimizer; consecutive views of the master.
        """
        place = 0
        for parameter in parameters:
            end = place + parameter.numel()
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[parameter][name] = getattr(self, name)[place:end].view(parameter.shape)
            place = end


MakeAdam = Callable[[Sequence[Tensor], Sequence[Tensor]], torch.optim.Optimizer]


def torch_adam_factory(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> MakeAdam:
    """Return a factory of such optimizers with the benchmarks' hyper-parameters. It sets the leaves' gradients."""

    def make(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> torch.optim.Optimizer:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return kind(parameters, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY, **options)

    return make


torch_adam = torch_adam_factory(torch.optim.AdamW, fused=True)

# Relative to the largest parameter: some units in the last place. Part of it is torch's float32 norm; updates are 1e-3.
ADAM_TOLERANCE = 1e-6


def benchmark_flat_adam(setting: BenchmarkSetting) -> Benchmark:
    """Compare AdamW on one flat tensor."""
    n = setting.elements
    own = FlatAdamRun(setting.random(n), setting.random(n).mul_(0.01))
    parameter = nn.Parameter(own.master)
    fused = torch_adam([parameter], [own.gradient])

    def check() -> str:
        want = own.expected()
        own.update()
        check_close("flat_adam", own.master, want, tolerance=ADAM_TOLERANCE)
        own.begin()
        fused.step()
        check_close("torch's fused AdamW", own.master, want, tolerance=ADAM_TOLERANCE)
        own.lend(fused, [parameter])
        return "all parameters after the first step against float64"

    return Benchmark(
        "flat_adam/flat",
        "AdamW fp32, one flat tensor",
        [
            setting.contender("torch fused", fused.step, 28, n),
            setting.contender(OWN, own.update, 28, n),
            *setting.probes("in place", "triad"),
        ],
        "torch fused",
        check,
        {"elements": n},
    )


class StoredAdamRun:
    """Update bf16 parameters with their stored masters and moments on one flat buffer, with npuzero's op.

    Args:
        masters, moments: as in a Precision.
    """

    def __init__(self, start: Tensor, gradient: Tensor, masters: str, moments: str) -> None:
        upper, remainder = storage.split_halves(start)
        self.low = upper if masters == "fp32" else None
        self.master = start.clone() if masters == "fp32" else upper
        self.remainder = remainder if masters == "split" else None
        dtype = MOMENT_DTYPES[moments]
        stored = (storage.stored_numel(start.numel(), dtype) for _ in range(2))
        exp_avg, exp_avg_sq = (torch.zeros(count, dtype=dtype, device=start.device) for count in stored)
        self.line = ops.AdamLine(self.master, exp_avg, exp_avg_sq, low=self.low, remainder=self.remainder, seed=SEED)
        self.gradient, self.step = gradient, 0
        kept = 2 if masters == "none" else 4
        # Read and written, except for the gradient (read) and the rounded copy (written).
        self.bytes_per_element = 2 * (kept + 2 * exp_avg.element_size()) + 2 + (2 if masters == "fp32" else 0)

    def update(self) -> None:
        self.step += 1
        n = self.gradient.numel()
        whole = ops.AdamSegment(
            0, n, _LR, *_BETAS, _EPS, _DECAY, self.step, decoupled=True, maximize=False, amsgrad=False
        )
        self.line.update(self.gradient, [whole])

    def value(self) -> Tensor:
        """Return the masters in float32."""
        return self.master.float() if self.remainder is None else storage.join_halves(self.master, self.remainder)


def benchmark_flat_adam_storage(setting: BenchmarkSetting) -> Benchmark:
    """Compare AdamW on bf16 parameters with masters and moments stored in fewer and fewer bits."""
    n = setting.elements
    start, gradient = setting.random(n), setting.random(n, dtype=torch.bfloat16).mul_(0.01)
    kinds = {
        OWN: ("fp32", "fp32"),
        "split masters": ("split", "fp32"),
        "split, bf16 moments": ("split", "bf16"),
        "split, int8 moments": ("split", "int8"),
        "no masters, bf16 moments": ("none", "bf16"),
        "no masters, int8 moments": ("none", "int8"),
    }
    ways = {name: StoredAdamRun(start, gradient, *kind) for name, kind in kinds.items()}

    def check() -> str:
        for way in ways.values():
            way.update()
        want = ways[OWN].value()
        for name, way in ways.items():
            if way.remainder is not None:  # moments are rounded after use
                check_equal(name, way.value(), want)
            elif way.low is None:
                check_close(name, way.value(), want, tolerance=2.0**-6)
        return "after the first step split masters to the bit, parameters alone within two units"

    return Benchmark(
        "flat_adam/stored",
        "AdamW on bf16 parameters, states in fewer bits",
        [
            *(setting.contender(name, way.update, way.bytes_per_element, n) for name, way in ways.items()),
            *setting.probes("in place"),
        ],
        OWN,
        check,
        {"elements": n},
    )


def benchmark_flat_adam_tensors(setting: BenchmarkSetting) -> Benchmark:
    """Compare AdamW on the tensors of a GPT: separate, and in flat parameters as npuzero.zero() lays them out."""
    shapes = gpt_shapes(setting.elements)
    sizes = [math.prod(shape) for shape in shapes]
    n = sum(sizes)
    flat = FlatAdamRun(setting.random(n), setting.random(n).mul_(0.01))
    parameters, gradients = (
        [part.view(shape) for part, shape in zip(whole.split(sizes), shapes, strict=True)]
        for whole in (flat.master, flat.gradient)
    )
    parameters = [nn.Parameter(parameter) for parameter in parameters]
    ways = {"torch fused": torch_adam(parameters, gradients), OWN: torch_adam_factory(AdamW)(parameters, gradients)}
    most = Settings().bucket_bytes // 4

    def update_flats() -> None:
        flat.update_parts(most)

    def check() -> str:
        want = flat.expected()
        update_flats()
        check_close("AdamW in flats", flat.master, want, tolerance=ADAM_TOLERANCE)
        for name, optimizer in ways.items():
            flat.begin()
            optimizer.step()
            check_close(f"AdamW by {name}", flat.master, want, tolerance=ADAM_TOLERANCE)
            flat.lend(optimizer, parameters)
        return "all parameters after the first step against float64"

    return Benchmark(
        "flat_adam/400",
        "AdamW fp32, 400 tensors of a GPT",
        [
            *(setting.contender(name, optimizer.step, 28, n) for name, optimizer in ways.items()),
            setting.contender(FLATS, update_flats, 28, n),
            *setting.probes("in place"),
        ],
        "torch fused",
        check,
        {"elements": n, "tensors": len(shapes), "flats": math.ceil(n / most)},
    )


class MixedStepPasses:
    """Take the mixed-precision step with a float32-only optimizer and a separate pass over the gradients per operation.

    Args:
        own: provides the memory.
        wide: float32 buffer of as many elements, for the gradients.
        adam: makes the optimizer of the first tensors with the second as gradients.
    """

    def __init__(self, own: FlatAdamRun, wide: Tensor, adam: MakeAdam) -> None:
        assert own.low is not None
        self.master, self.gradient, self.wide, self.low = nn.Parameter(own.master), own.gradient, wide, own.low
        self.adam = adam([self.master], [self.wide])

    def step(self) -> None:
        self.wide.copy_(self.gradient)
        self.clip()
        self.adam.step()
        self.low.copy_(self.master.detach())

    def clip(self) -> None:
        """Unscale and clip in one pass."""
        total = torch.linalg.vector_norm(self.wide) / _LOSS_SCALE
        self.wide.mul_((_MAX_NORM / (total + 1e-6)).clamp_(max=1.0) / _LOSS_SCALE)


class PlainStepPasses(MixedStepPasses):
    """Take the same passes with a separate unscaling and torch's clipping function."""

    def clip(self) -> None:
        self.wide.mul_(1 / _LOSS_SCALE)
        nn.utils.clip_grad_norm_([self.master], _MAX_NORM)


def benchmark_mixed_step(setting: BenchmarkSetting, others: Mapping[str, MakeAdam] = MappingProxyType({})) -> Benchmark:
    """Compare steps from scaled bf16 gradients: norm, clip, unscale, AdamW on fp32 masters, bf16 parameters.

    Args:
        others: further optimizers, used like torch's in the lean passes, by contender name.
    """
    n = setting.elements
    start = setting.random(n)
    gradient = setting.random(n, dtype=torch.bfloat16)
    low = torch.empty_like(gradient)
    own = FlatAdamRun(start, gradient, low)
    found, scale = torch.zeros(2, dtype=torch.float64, device=setting.device), torch.ones(1, device=setting.device)

    def step() -> None:
        ops.norm(gradient, found)
        total = found[0].sqrt() / _LOSS_SCALE
        torch.div((_MAX_NORM / (total + 1e-6)).clamp_(max=1.0), _LOSS_SCALE, out=scale[0])
        own.update(scale)

    wide = torch.empty_like(start)
    passes = {
        "torch passes": PlainStepPasses(own, wide, torch_adam),
        "torch passes, unscale and clip in one": MixedStepPasses(own, wide, torch_adam),
        **{name: MixedStepPasses(own, wide, adam) for name, adam in others.items()},
    }

    def check() -> str:
        total = gradient.double().square().sum().sqrt() / _LOSS_SCALE
        want = own.expected((_MAX_NORM / (total + 1e-6)).clamp_(max=1.0) / _LOSS_SCALE)

        def check_result(name: str, rounding: str) -> None:
            check_close(f"the mixed step of {name}", own.master, want, tolerance=ADAM_TOLERANCE)
            rounded = torch.empty_like(low)
            cast_reference.reference_cast(own.master, rounded, rounding, 0, 0)
            check_equal(f"the rounded parameters of {name}", low, rounded)

        step()
        check_result(OWN, "away")
        for name, way in passes.items():
            own.begin()
            way.step()
            check_result(name, "nearest")
            own.lend(way.adam, [way.master])
        return "all masters after the first step against float64; their rounded copies to the bit"

    return Benchmark(
        "mixed_step",
        "mixed step: bf16 gradients to bf16 parameters",
        [
            *(setting.contender(name, way.step, 30, n) for name, way in passes.items()),
            setting.contender(OWN, step, 30, n),
            *setting.probes("in place"),
        ],
        "torch passes",
        check,
        {"elements": n},
    )
