"""Benchmarks of the ops against torch's ways to do the same.

Each is made, checked, measured and dropped before the next, so that one benchmark's memory is the peak. Bytes are those
the op's contract cannot avoid; probes measure in the same rounds what the machine moves: ``copy`` (out of place),
``in place`` and ``triad`` (STREAM's).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from npuzero import ops
from npuzero.api import AdamW
from npuzero.bench.harness import Benchmark, Contender, Effort, Result, check_close, check_equal, local, run
from npuzero.bench.shapes import gpt_shapes
from npuzero.config import Settings
from npuzero.ops import storage
from npuzero.ops.reference import cast as cast_reference
from npuzero.ops.reference import norm as norm_reference
from npuzero.ops.reference import pack as pack_reference
from npuzero.optim import MOMENT_DTYPES

SUITE = "ops"
ELEMENTS, QUICK_ELEMENTS = 64 * 2**20, 2**20
OWN, FLATS = "npuzero", "npuzero, in flats"

_CPU = torch.device("cpu")
_LR, _BETAS, _EPS, _DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2
_LOSS_SCALE, _MAX_NORM = 1024.0, 1.0
_WORLD = 8  # gradients are scaled by one over so many ranks as they are packed
_SEED = 1


@dataclass(frozen=True)
class Setting:
    """How much of what, where."""

    elements: int = ELEMENTS
    device: torch.device = _CPU

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal values; the same for the same shape."""
        drawn = torch.empty(*shape, dtype=dtype, device=self.device)
        return drawn.normal_(generator=torch.Generator(self.device).manual_seed(_SEED))

    def contender(self, name: str, call: Callable[[], object], bytes_per_element: int | None, count: int) -> Contender:
        """A contender of this device that moves so many bytes for each of ``count`` elements."""
        nbytes = None if bytes_per_element is None else bytes_per_element * count
        return local(name, call, device=self.device, nbytes=nbytes)

    def probes(self, *names: str) -> list[Contender]:
        """What the machine can do, on buffers of their own."""
        n = self.elements
        a, b, c = (self.random(n) for _ in range(3))
        known: dict[str, tuple[Callable[[], object], int]] = {
            "copy": (lambda: a.copy_(b), 8),
            "in place": (lambda: a.mul_(1.0), 8),
            "triad": (lambda: torch.add(b, c, alpha=0.5, out=a), 12),
        }
        return [self.contender(name, known[name][0], known[name][1], n) for name in names]


class Adam:
    """Adam's state on one flat buffer, and one call of npuzero's update of it."""

    def __init__(self, start: Tensor, gradient: Tensor, low: Tensor | None = None) -> None:
        self.start, self.gradient, self.low = start, gradient, low
        self.master, self.exp_avg, self.exp_avg_sq = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        self.step = 0

    def begin(self) -> None:
        """Makes the next step the first."""
        self.master.copy_(self.start)
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()
        self.step = 0

    def update(self, scale: Tensor | None = None) -> None:
        self.step += 1
        self._update(slice(0, self.master.numel()), scale)

    def update_parts(self, numel: int) -> None:
        """The same by a call for each ``numel`` elements."""
        self.step += 1
        for start in range(0, self.master.numel(), numel):
            self._update(slice(start, start + numel), None)

    def _update(self, part: slice, scale: Tensor | None) -> None:
        master, low = self.master[part], None if self.low is None else self.low[part]
        whole = ops.Segment(
            0, master.numel(), _LR, *_BETAS, _EPS, _DECAY, self.step, decoupled=True, maximize=False, amsgrad=False
        )
        moments = self.exp_avg[part], self.exp_avg_sq[part]
        ops.flat_adam(master, *moments, self.gradient[part], [whole], low=low, grad_scale=scale)

    def expected(self, scale: Tensor | None = None) -> Tensor:
        """The master after the first step, in float64, by the formula of the paper (Loshchilov & Hutter, 2019)."""
        gradient = self.gradient.double() * (1.0 if scale is None else scale.double())
        decayed = self.start.double() * (1 - _LR * _DECAY)
        return decayed.sub_(gradient.div(gradient.abs().add_(_EPS)).mul_(_LR))

    def lend(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        """Gives an optimizer that has taken its first step these moments for its own.

        Contenders then work in the same memory: where the pages of a buffer lie makes one faster or slower than its
        copy by a tenth.

        Args:
            parameters: of the optimizer; views of the master, in order and without gaps.
        """
        place = 0
        for parameter in parameters:
            end = place + parameter.numel()
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[parameter][name] = getattr(self, name)[place:end].view(parameter.shape)
            place = end


MakeAdam = Callable[[Sequence[Tensor], Sequence[Tensor]], torch.optim.Optimizer]


def adam_of(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> MakeAdam:
    """Makes optimizers of this kind, of the benchmarks' hyper-parameters, over leaves whose gradients are given."""

    def make(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> torch.optim.Optimizer:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return kind(parameters, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY, **options)

    return make


torch_adam = adam_of(torch.optim.AdamW, fused=True)

# Of the largest parameter: some units in the last place. torch's norm in float32 takes part of it; updates are 1e-3.
ADAM_TOLERANCE = 1e-6


def flat_adam_flat(setting: Setting) -> Benchmark:
    """AdamW on one flat tensor."""
    n = setting.elements
    own = Adam(setting.random(n), setting.random(n).mul_(0.01))
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


class StoredAdam:
    """One call of npuzero's update of bf16 parameters and what is kept beside them, on one flat buffer.

    Args:
        masters, moments: as a Precision has them.
    """

    def __init__(self, start: Tensor, gradient: Tensor, masters: str, moments: str) -> None:
        upper, remainder = storage.split(start)
        self.low = upper if masters == "fp32" else None
        self.master = start.clone() if masters == "fp32" else upper
        self.remainder = remainder if masters == "split" else None
        dtype = MOMENT_DTYPES[moments]
        stored = (storage.stored_numel(start.numel(), dtype) for _ in range(2))
        exp_avg, exp_avg_sq = (torch.zeros(count, dtype=dtype, device=start.device) for count in stored)
        self.line = ops.Line(self.master, exp_avg, exp_avg_sq, low=self.low, remainder=self.remainder, seed=_SEED)
        self.gradient, self.step = gradient, 0
        kept = 2 if masters == "none" else 4
        # Read and written, but for the gradient and the rounded copy.
        self.bytes_per_element = 2 * (kept + 2 * exp_avg.element_size()) + 2 + (2 if masters == "fp32" else 0)

    def update(self) -> None:
        self.step += 1
        n = self.gradient.numel()
        whole = ops.Segment(0, n, _LR, *_BETAS, _EPS, _DECAY, self.step, decoupled=True, maximize=False, amsgrad=False)
        self.line.update(self.gradient, [whole])

    def value(self) -> Tensor:
        """The masters in float32."""
        return self.master.float() if self.remainder is None else storage.join(self.master, self.remainder)


def flat_adam_stored(setting: Setting) -> Benchmark:
    """AdamW on bf16 parameters, with what is kept beside them in fewer and fewer bits."""
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
    ways = {name: StoredAdam(start, gradient, *kind) for name, kind in kinds.items()}

    def check() -> str:
        for way in ways.values():
            way.update()
        want = ways[OWN].value()
        for name, way in ways.items():
            if way.remainder is not None:  # moments are rounded after they are used
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


def flat_adam_tensors(setting: Setting) -> Benchmark:
    """AdamW on the tensors of a GPT: as they are, and in flats, as npuzero.zero() lays a model's parameters out."""
    shapes = gpt_shapes(setting.elements)
    sizes = [math.prod(shape) for shape in shapes]
    n = sum(sizes)
    flat = Adam(setting.random(n), setting.random(n).mul_(0.01))
    parameters, gradients = (
        [part.view(shape) for part, shape in zip(whole.split(sizes), shapes, strict=True)]
        for whole in (flat.master, flat.gradient)
    )
    parameters = [nn.Parameter(parameter) for parameter in parameters]
    ways = {"torch fused": torch_adam(parameters, gradients), OWN: adam_of(AdamW)(parameters, gradients)}
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


class Passes:
    """The mixed step by an optimizer that knows of float32 alone: a pass over the gradients for each thing besides.

    Args:
        own: whose memory it works in.
        wide: float32 of as many elements, for the gradients.
        adam: makes the optimizer of leaves whose gradients are the second tensors.
    """

    def __init__(self, own: Adam, wide: Tensor, adam: MakeAdam) -> None:
        assert own.low is not None
        self.master, self.gradient, self.wide, self.low = nn.Parameter(own.master), own.gradient, wide, own.low
        self.adam = adam([self.master], [self.wide])

    def step(self) -> None:
        self.wide.copy_(self.gradient)
        self.clip()
        self.adam.step()
        self.low.copy_(self.master.detach())

    def clip(self) -> None:
        """Unscales and clips in one pass."""
        total = torch.linalg.vector_norm(self.wide) / _LOSS_SCALE
        self.wide.mul_((_MAX_NORM / (total + 1e-6)).clamp_(max=1.0) / _LOSS_SCALE)


class PlainPasses(Passes):
    """The same with torch's function for clipping, and unscaling before it."""

    def clip(self) -> None:
        self.wide.mul_(1 / _LOSS_SCALE)
        nn.utils.clip_grad_norm_([self.master], _MAX_NORM)


def mixed_step(setting: Setting, others: Mapping[str, MakeAdam] = MappingProxyType({})) -> Benchmark:
    """bf16 gradients, times the loss scale -> norm, clip, unscale, AdamW on fp32 masters -> bf16 parameters.

    Args:
        others: optimizers that take part as torch's lean passes do, by the name of the contender.
    """
    n = setting.elements
    start = setting.random(n)
    gradient = setting.random(n, dtype=torch.bfloat16)
    low = torch.empty_like(gradient)
    own = Adam(start, gradient, low)
    found, scale = torch.zeros(2, dtype=torch.float64, device=setting.device), torch.ones(1, device=setting.device)

    def step() -> None:
        ops.norm(gradient, found)
        total = found[0].sqrt() / _LOSS_SCALE
        torch.div((_MAX_NORM / (total + 1e-6)).clamp_(max=1.0), _LOSS_SCALE, out=scale[0])
        own.update(scale)

    wide = torch.empty_like(start)
    passes = {
        "torch passes": PlainPasses(own, wide, torch_adam),
        "torch passes, unscale and clip in one": Passes(own, wide, torch_adam),
        **{name: Passes(own, wide, adam) for name, adam in others.items()},
    }

    def check() -> str:
        total = gradient.double().square().sum().sqrt() / _LOSS_SCALE
        want = own.expected((_MAX_NORM / (total + 1e-6)).clamp_(max=1.0) / _LOSS_SCALE)

        def check_result(name: str, rounding: str) -> None:
            check_close(f"the mixed step of {name}", own.master, want, tolerance=ADAM_TOLERANCE)
            rounded = torch.empty_like(low)
            cast_reference.cast(own.master, rounded, rounding, 0, 0)
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


def _wire(setting: Setting) -> tuple[list[Tensor], list[int], list[Tensor], Tensor]:
    """Tensors of a GPT, their offsets in a flat bf16 buffer, their places in it, and it."""
    tensors = [setting.random(*shape) for shape in gpt_shapes(setting.elements)]
    ends = torch.tensor([tensor.numel() for tensor in tensors]).cumsum(0).tolist()
    offsets = [0, *ends[:-1]]
    wire = torch.zeros(ends[-1], dtype=torch.bfloat16, device=setting.device)
    places = [wire[at : at + tensor.numel()].view(tensor.shape) for at, tensor in zip(offsets, tensors, strict=True)]
    return tensors, offsets, places, wire


def pack(setting: Setting) -> Benchmark:
    """Many fp32 tensors to one flat bf16 buffer, times a scale."""
    tensors, offsets, places, wire = _wire(setting)
    scale = 1 / _WORLD  # a power of two: torch's two roundings are one then

    def own() -> None:
        ops.pack(tensors, offsets, wire, scale=scale)

    def loop() -> None:
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor).mul_(scale)

    def cat() -> None:
        wire.copy_(torch.cat([tensor.view(-1) for tensor in tensors]).mul_(scale))

    def check() -> str:
        pack_reference.pack(tensors, places, scale, False)
        want = wire.clone()
        for name, call in ((OWN, own), ("a loop", loop), ("torch.cat", cat)):
            wire.zero_()
            call()
            check_equal(f"pack by {name}", wire, want)
        return "every element to the bit against the reference"

    n = wire.numel()
    return Benchmark(
        "pack",
        "pack 400 fp32 tensors to flat bf16, scaled",
        [
            setting.contender("loop of copy_ and mul_", loop, 6, n),
            setting.contender("torch.cat, mul_, copy_", cat, 6, n),
            setting.contender(OWN, own, 6, n),
            *setting.probes("copy"),
        ],
        "loop of copy_ and mul_",
        check,
        {"elements": n, "tensors": len(tensors)},
    )


def unpack(setting: Setting) -> Benchmark:
    """One flat bf16 buffer to many fp32 tensors, times a scale."""
    tensors, offsets, places, wire = _wire(setting)
    wire.copy_(setting.random(wire.numel()))
    scale = 1 / _WORLD

    def own() -> None:
        ops.unpack(wire, tensors, offsets, scale=scale)

    def loop() -> None:
        for place, tensor in zip(places, tensors, strict=True):
            tensor.copy_(place).mul_(scale)

    def check() -> str:
        want = wire.float() * scale
        for name, call in ((OWN, own), ("a loop", loop)):
            for tensor in tensors:
                tensor.zero_()
            call()
            check_equal(f"unpack by {name}", torch.cat([tensor.view(-1) for tensor in tensors]), want)
        return "every element to the bit"

    n = wire.numel()
    return Benchmark(
        "unpack",
        "unpack flat bf16 to 400 fp32 tensors, scaled",
        [
            setting.contender("loop of copy_ and mul_", loop, 6, n),
            setting.contender(OWN, own, 6, n),
            *setting.probes("copy"),
        ],
        "loop of copy_ and mul_",
        check,
        {"elements": n, "tensors": len(tensors)},
    )


def cast_nearest(setting: Setting) -> Benchmark:
    """fp32 to bf16, to nearest even."""
    src = setting.random(setting.elements)
    out = torch.empty_like(src, dtype=torch.bfloat16)

    def check() -> str:
        ops.cast(src, out)
        check_equal("cast", out, src.bfloat16())
        return "every element to the bit against copy_"

    return _cast(setting, "nearest", "copy_", lambda: out.copy_(src), lambda: ops.cast(src, out), 6, check)


def cast_stochastic(setting: Setting) -> Benchmark:
    """fp32 to bf16, rounded up or down with the probability that keeps the mean."""
    src = setting.random(setting.elements)
    out = torch.empty_like(src, dtype=torch.bfloat16)
    bits = torch.empty_like(src, dtype=torch.int32)

    def passes() -> None:
        bits.random_(0, 1 << 16).add_(src.view(torch.int32)).bitwise_and_(-(1 << 16))
        out.copy_(bits.view(torch.float32))

    def check() -> str:
        part = src[: min(src.numel(), 2**20)]  # the reference takes a hundred bytes an element
        want = torch.empty_like(part, dtype=torch.bfloat16)
        cast_reference.cast(part, want, "stochastic", _SEED, 0)
        own()
        check_equal("stochastic cast", out[: part.numel()], want)
        passes()
        check_close("stochastic cast by passes", out, src, tolerance=2.0**-7)
        return f"the first {part.numel()} elements to the bit against the reference"

    def own() -> None:
        ops.cast(src, out, rounding="stochastic", seed=_SEED)

    return _cast(setting, "stochastic", "random bits added, cut off", passes, own, 6, check)


def cast_tf32(setting: Setting) -> Benchmark:
    """fp32 to fp32 with 10 bits of mantissa, out of place."""
    src = setting.random(setting.elements)
    out = torch.empty_like(src)

    def passes() -> None:
        bits = out.view(torch.int32)
        torch.add(src.view(torch.int32), 1 << 12, out=bits)
        bits.bitwise_and_(-(1 << 13))

    def check() -> str:
        want = cast_reference.tf32(src)
        own()
        check_equal("tf32 cast", out, want)
        passes()
        check_equal("tf32 cast by passes", out, want)
        return "every element to the bit against the reference"

    def own() -> None:
        ops.cast(src, out, rounding="tf32")

    return _cast(setting, "tf32", "integer add and mask", passes, own, 8, check)


def _cast(
    setting: Setting,
    rounding: str,
    baseline: str,
    passes: Callable[[], object],
    own: Callable[[], object],
    nbytes: int,
    check: Callable[[], str],
) -> Benchmark:
    n = setting.elements
    return Benchmark(
        f"cast/{rounding}",
        "cast fp32 to tf32" if rounding == "tf32" else f"cast fp32 to bf16, {rounding}",
        [
            setting.contender(baseline, passes, nbytes, n),
            setting.contender(OWN, own, nbytes, n),
            *setting.probes("copy"),
        ],
        baseline,
        check,
        {"elements": n},
    )


def norm(setting: Setting) -> Benchmark:
    """The sum of squares and the number of elements that are not finite, of fp32."""
    n = setting.elements
    x = setting.random(n)
    found = torch.zeros(2, dtype=torch.float64, device=setting.device)

    def passes() -> None:
        torch.linalg.vector_norm(x)
        torch.isfinite(x).all()

    def check() -> str:
        want = torch.zeros_like(found)
        norm_reference.norm(x, want)
        ops.norm(x, found)
        check_close("norm", found, want, tolerance=1e-12)
        # torch sums in float32, and is the further off the more elements there are: 0.5 % at 64 M.
        check_close("torch's norm", torch.linalg.vector_norm(x).double(), want[0].sqrt(), tolerance=1e-2)
        return "npuzero's against the reference within 1e-12, torch's within 1e-2"

    return Benchmark(
        "norm",
        "norm and overflow check of fp32",
        [
            setting.contender("torch.linalg.vector_norm", lambda: torch.linalg.vector_norm(x), 4, n),
            setting.contender("vector_norm, isfinite", passes, 4, n),
            setting.contender(OWN, lambda: ops.norm(x, found), 4, n),
            *setting.probes("copy"),
        ],
        "torch.linalg.vector_norm",
        check,
        {"elements": n},
    )


def norm_of_sum(setting: Setting) -> Benchmark:
    """A micro-batch's bf16 gradients added to the accumulated fp32 ones, and the norm of the sum, in one pass."""
    n = setting.elements
    # The addend is all zeros in the rounds, so that sums stay in range however many there are.
    total, addend = setting.random(n), setting.random(n, dtype=torch.bfloat16)
    found = torch.zeros(2, dtype=torch.float64, device=setting.device)

    def passes() -> None:
        torch.linalg.vector_norm(total.add_(addend, alpha=1 / _WORLD))

    def own() -> None:
        ops.norm(total, found, addend=addend, scale=1 / _WORLD)

    def check() -> str:
        start, found_there = total.clone(), torch.zeros_like(found)
        want = start + addend.float() / _WORLD
        norm_reference.norm(want, found_there)
        passes()
        check_equal("the sum by torch", total, want)
        total.copy_(start)
        own()
        check_equal("the sum by npuzero", total, want)
        check_close("its norm", found, found_there, tolerance=1e-12)
        addend.zero_()
        return "the sum to the bit, its norm within 1e-12"

    return Benchmark(
        "norm/sum",
        "accumulate bf16 into fp32, norm of the sum",
        [
            setting.contender("add_, vector_norm", passes, 10, n),
            setting.contender(OWN, own, 10, n),
            *setting.probes("in place"),
        ],
        "add_, vector_norm",
        check,
        {"elements": n},
    )


#: What makes each benchmark of the suite, by its name.
CASES: dict[str, Callable[[Setting], Benchmark]] = {
    "flat_adam/flat": flat_adam_flat,
    "flat_adam/stored": flat_adam_stored,
    "flat_adam/400": flat_adam_tensors,
    "mixed_step": mixed_step,
    "pack": pack,
    "unpack": unpack,
    "cast/nearest": cast_nearest,
    "cast/stochastic": cast_stochastic,
    "cast/tf32": cast_tf32,
    "norm": norm,
    "norm/sum": norm_of_sum,
}


def names(quick: bool) -> list[str]:
    """Every benchmark of the suite."""
    return list(CASES)


def effort(quick: bool) -> Effort:
    """How long each benchmark of the suite is measured."""
    return Effort.quick() if quick else Effort(most_s=5.0)


def results(wanted: Sequence[str], device: torch.device, quick: bool) -> Iterator[Result]:
    """Measures the benchmarks named, in this process.

    Raises:
        BenchmarkError: a wrong result.
        KernelUnavailable: the device has no kernels.
    """
    setting = Setting(QUICK_ELEMENTS if quick else ELEMENTS, device)
    for name in wanted:
        yield run(CASES[name](setting), effort(quick))
