"""Whether an installation computes what it should on a device: ops on a grid, collectives between ranks, bandwidths.

For machines that nobody of the project has seen: one command, whose report is sent back. Ops are compared with their
references on the host, bit for bit where the contract says so; collectives with sums made on the host.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from npuzero import _native, ops
from npuzero import device as devices
from npuzero.bench.spread import median
from npuzero.bench.team import Team, python_worker
from npuzero.comm import process_world
from npuzero.errors import NpuZeroError
from npuzero.ops import storage
from npuzero.ops.flat_adam import Segment
from npuzero.optim import MOMENT_DTYPES, dynamic_rows
from npuzero.plan import MASTERS, MOMENT_BLOCK, ring_bytes

QUICK_SIZES = (0, 1, 17, 4099)
SIZES = (0, 1, 15, 16, 17, 1023, 1025, 4096, 4097, 65_543, 1_000_003)
OFFSETS = (0, 1, 3)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_GUARD = 64  # elements before and after each buffer, which no op may touch
_PATTERN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TOLD = 5  # of what is wrong, by check

#: Places a tensor where the op shall find it.
Put = Callable[[Tensor], Tensor]
#: Runs an op on `numel` elements; the tensors it has written.
Case = Callable[[Put, int], list[Tensor]]


@dataclass
class Finding:
    """One check: how many cases, and what was wrong in the first few of those that were."""

    name: str
    cases: int = 0
    wrong: int = 0
    first: list[str] = field(default_factory=list)

    def count(self, problem: str | None) -> None:
        """One case more."""
        self.cases += 1
        if problem is not None:
            self.wrong += 1
            self.first += [problem] * (len(self.first) < _TOLD)


class _Buffers:
    """Tensors on the device, each between guards and `offset` elements after an aligned address."""

    def __init__(self, device: torch.device, offset: int) -> None:
        self._device = device
        self._offset = offset
        self._wholes: list[tuple[Tensor, Tensor]] = []

    def put(self, content: Tensor) -> Tensor:
        """A copy of `content` between guards."""
        guard = 7 + len(self._wholes)  # another for each: a neighbour's would not be told from its own
        around = torch.full((2 * _GUARD + self._offset + content.numel(),), guard, dtype=content.dtype)
        begin = _GUARD + self._offset
        around[begin : begin + content.numel()] = content
        whole = around.to(self._device, copy=True)
        self._wholes.append((whole, around))
        return whole[begin : begin + content.numel()]

    def touched(self) -> bool:
        """Whether a guard has changed."""
        begin = _GUARD + self._offset
        for whole, around in self._wholes:
            guards = [torch.cat([buffer[:begin], buffer[-_GUARD:]]) for buffer in (whole.cpu(), around)]
            if not torch.equal(*guards):
                return True
        return False


def check_ops(device: torch.device, quick: bool = False) -> Iterator[Finding]:
    """Every op, size, start offset and dtype on `device` against the reference on the host."""
    for name, case in _cases():
        finding = Finding(name)
        for numel in QUICK_SIZES if quick else SIZES:
            for offset in OFFSETS:
                finding.count(_compare(case, device, numel, offset))
        yield finding


def _compare(case: Case, device: torch.device, numel: int, offset: int) -> str | None:
    where = f"{numel} elements from offset {offset}"
    buffers = _Buffers(device, offset)
    backend = _native.backend()
    try:
        _native.use_backend("native")
        found = [tensor.cpu() for tensor in case(buffers.put, numel)]
        if buffers.touched():
            return f"{where}: memory outside the buffers was written"
        _native.use_backend("reference")
        expected = case(Tensor.clone, numel)
    except (NpuZeroError, RuntimeError) as error:
        return f"{where}: {type(error).__name__}: {error}"
    finally:
        _native.use_backend(backend)
    differences = filter(None, map(_differ, found, expected))
    return next((f"{where}: {difference}" for difference in differences), None)


def _differ(found: Tensor, expected: Tensor) -> str | None:
    """The first difference in bits; one NaN is as good as another."""
    pattern = _PATTERN[found.element_size()]
    same = (found.view(pattern) == expected.view(pattern)) | (found.isnan() & expected.isnan())
    if bool(same.all()):
        return None
    i = int((~same).nonzero()[0])
    return f"{int((~same).sum())} differ, first [{i}]: {found[i].item()!r} instead of {expected[i].item()!r}"


def _cases() -> Iterator[tuple[str, Case]]:
    for source in FLOATS:
        for target in FLOATS:
            yield f"cast {_short(source)} to {_short(target)}", partial(_cast, source, target, "nearest")
    yield "cast away from zero", partial(_cast, torch.float32, torch.bfloat16, "away")
    yield "cast tf32", partial(_cast, torch.float32, torch.float32, "tf32")
    yield "cast stochastic", partial(_cast, torch.float32, torch.bfloat16, "stochastic")
    for source in FLOATS:
        for target in FLOATS:
            for accumulate in (False, True):
                name = f"pack {_short(source)} {'added to' if accumulate else 'to'} {_short(target)}"
                yield name, partial(_pack, source, target, accumulate)
    for dtype in FLOATS:
        yield f"norm {_short(dtype)}", partial(_norm, dtype, False)
        yield f"norm with {_short(dtype)} added", partial(_norm, dtype, True)
    for grad in FLOATS:
        for low in (torch.bfloat16, torch.float16, None):
            yield f"flat_adam {_short(grad)} to {_short(low) if low else 'nothing'}", partial(_adam, grad, low, {})
    for name, options in (
        ("l2", {"decoupled": False}),
        ("maximize", {"maximize": True}),
        ("amsgrad", {"amsgrad": True}),
    ):
        yield f"flat_adam {name}", partial(_adam, torch.bfloat16, torch.bfloat16, options)
    for masters, moments in itertools.product(MASTERS, MOMENT_DTYPES):
        low = torch.bfloat16 if masters == "fp32" else None
        yield (
            f"flat_adam with {masters} masters and {moments} moments, amsgrad",
            partial(_adam, torch.bfloat16, low, {"amsgrad": True}, masters=masters, moments=MOMENT_DTYPES[moments]),
        )
    yield "flat_adam coefficients of lr and step, in float64", _coefficients


def _cast(source: torch.dtype, target: torch.dtype, rounding: str, put: Put, numel: int) -> list[Tensor]:
    src, dst = put(_values(numel, source)), put(torch.zeros(numel, dtype=target))
    ops.cast(src, dst, rounding=rounding, seed=2**40 + 7, offset=3)
    return [dst]


def _pack(source: torch.dtype, target: torch.dtype, accumulate: bool, put: Put, numel: int) -> list[Tensor]:
    parts = [put(_values(size, source, seed)) for seed, size in enumerate((numel, 3, numel // 2))]
    offsets = [0, numel + 5, numel + 8]
    wire, scale = put(_values(2 * numel + 11, target, 9)), put(torch.tensor([0.37]))
    ops.pack(parts, offsets, wire, scale=scale, accumulate=accumulate)
    return [wire]


def _norm(dtype: torch.dtype, added: bool, put: Put, numel: int) -> list[Tensor]:
    """Squares are summed in another order than the reference's: what is compared is the sum as float32."""
    x = put(_values(numel, torch.float32 if added else dtype, specials=False))
    addend = put(_values(numel, dtype, 1, specials=False)) if added else None
    out = put(torch.zeros(2, dtype=torch.float64))
    ops.norm(x, out, addend=addend, scale=0.5)
    return [out.cpu().float(), *([x] if added else [])]


def _adam(
    grad: torch.dtype,
    low: torch.dtype | None,
    options: Mapping[str, bool],
    put: Put,
    numel: int,
    *,
    masters: str = "fp32",
    moments: torch.dtype = torch.float32,
) -> list[Tensor]:
    flags = {"decoupled": True, "maximize": False, "amsgrad": False, **options}
    coded = moments == torch.uint8  # one value that is not finite spoils a block
    values = partial(_values, numel, torch.float32, specials=not coded)
    upper, lower = storage.split(values(1))
    master = put(values(1) if masters == "fp32" else upper)
    remainder = put(lower) if masters == "split" else None
    m, v, top = (put(_stored(values(seed), moments, signed=seed == 2)) for seed in (2, 3, 4))
    gradient, scale = put(_values(numel, grad, 5, specials=not coded)), put(torch.tensor([0.5]))
    rounded = None if low is None else put(torch.zeros(numel, dtype=low))
    bounds = [
        0,
        *(bound // MOMENT_BLOCK * MOMENT_BLOCK if coded else bound for bound in (numel // 3, numel // 2)),
        numel,
    ]
    segments = [
        Segment(begin, end, 10.0**-k, 0.9, 0.99, 1e-8, 0.1 * k, k, **flags, stream=k)
        for k, (begin, end) in enumerate(itertools.pairwise(bounds), 1)
    ]
    ops.flat_adam(
        master, m, v, gradient, segments, low=rounded, remainder=remainder, max_exp_avg_sq=top, grad_scale=scale, seed=7
    )
    return [tensor for tensor in (master, remainder, m, v, top, rounded) if tensor is not None]


def _stored(values: Tensor, dtype: torch.dtype, *, signed: bool) -> Tensor:
    """A moment as it lies in memory; one without a sign is not negative."""
    stored = torch.zeros(storage.stored_numel(values.numel(), dtype), dtype=dtype)
    storage.narrow(values if signed else values.abs(), stored, signed=signed)
    return stored


def _coefficients(put: Put, numel: int) -> list[Tensor]:
    """Not a kernel's: torch computes them on the device, where the steps are counted that a scaler let through."""
    steps = put(torch.arange(1.0, 2.0 + min(numel, 5), dtype=torch.float64) ** 4)
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1, "decoupled_weight_decay": True}
    table = dynamic_rows([options] * steps.numel(), steps.unbind(), steps.device)
    return [table.flatten()]


def _values(numel: int, dtype: torch.dtype, seed: int = 0, *, specials: bool = True) -> Tensor:
    """Values over many magnitudes; with `specials` every seventh is zero, denormal, largest, infinite, NaN or a tie."""
    generator = torch.Generator().manual_seed(1000 * seed + numel)
    x = torch.randn(numel, generator=generator)
    x = (x * torch.exp2(torch.randint(-12, 9, (numel,), generator=generator).float())).to(dtype)
    if specials:
        info = torch.finfo(dtype)
        extremes = [0.0, -0.0, info.tiny * info.eps, info.tiny, info.max, -info.max, torch.inf, -torch.inf, torch.nan]
        odd = torch.tensor([*extremes, 1 + 2**-8, -1 - 3 * 2**-8, 1 + 2**-11])  # halfway between two of bf16, of f16
        x[::7] = odd.to(dtype)[torch.randint(len(odd), (len(x[::7]),), generator=generator)]
    return x


def check_collectives(device: str, ranks: int, quick: bool = False) -> tuple[list[Finding], dict[str, float]]:
    """Every verb between `ranks` processes of this host, and their bandwidths in GB/s (bytes that a rank sends).

    Raises:
        BenchmarkError: a rank died, failed, or did not answer.
    """
    with Team("check", python_worker(__name__), ranks, options={"device": device}) as team:
        answers = team.ask("verbs", quick=quick)
        findings = [Finding(**entry) for entry in answers[0]]
        for other in answers[1:]:
            for finding, entry in zip(findings, other, strict=True):
                finding.wrong += entry["wrong"]
                finding.first = (finding.first + entry["first"])[:_TOLD]
        return findings, team.ask("bandwidths", quick=quick)[0]


def make(rank: int, size: int, options: Mapping[str, Any]) -> Ranks:
    """For worker.py."""
    return Ranks(options["device"])


class Ranks:
    """One rank of ``check_collectives``."""

    def __init__(self, device: str) -> None:
        self.world = process_world(device, timeout_s=300.0)
        self.group = self.world.communicator(range(self.world.size), "check")

    def verbs(self, quick: bool) -> list[dict[str, Any]]:
        """A finding for each verb and dtype."""
        findings = []
        for dtype in (*FLOATS, torch.float64, torch.int64, torch.uint8):
            for verb in ("all_gather", "all_to_all", "broadcast", "all_reduce", "reduce_scatter"):
                if verb == "reduce_scatter" and dtype not in FLOATS:
                    continue
                finding = Finding(f"{verb} {_short(dtype)}")
                for numel in (1, 513, 70_001)[: 2 if quick else 3]:
                    finding.count(self._wrong(verb, dtype, numel))
                findings.append(vars(finding))
        return findings

    def bandwidths(self, quick: bool) -> dict[str, float]:
        """GB/s of what each rank sends, by verb."""
        size, n = self.world.size, (1 << 16 if quick else 1 << 24)
        whole, shard = torch.ones(size * n, device=self.world.device), torch.ones(n, device=self.world.device)
        calls: dict[str, Callable[[], Any]] = {
            "all_gather": lambda: self.group.all_gather(whole, shard).wait(),
            "reduce_scatter": lambda: self.group.reduce_scatter(shard, whole).wait(),
            "all_reduce": lambda: self.group.all_reduce(whole).wait(),
        }
        seconds = {verb: _seconds(call, self.world.device, 3 if quick else 7) for verb, call in calls.items()}
        return {verb: ring_bytes(verb, whole.nbytes, size) / time_s / 1e9 for verb, time_s in seconds.items()}

    def close(self) -> None:
        """Ends the world."""
        self.world.drain()

    def _brings(self, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point:
            return _values(numel, torch.float32, 100 + rank, specials=False).to(dtype)
        return torch.randint(0, 50, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)

    def _wrong(self, verb: str, dtype: torch.dtype, numel: int) -> str | None:
        size, rank = self.world.size, self.world.rank
        own = slice(rank * numel, (rank + 1) * numel)
        wholes = [self._brings(other, size * numel, dtype) for other in range(size)]
        mine = wholes[rank].to(self.world.device, copy=True)
        shard = mine[:numel].clone()
        result = torch.zeros_like(mine)
        if verb == "all_gather":
            self.group.all_gather(result, shard).wait()
            expected = torch.cat([whole[:numel] for whole in wholes])
        elif verb == "all_to_all":
            self.group.all_to_all(result, mine).wait()
            expected = torch.cat([whole[own] for whole in wholes])
        elif verb == "broadcast":
            self.group.broadcast(mine, root=size - 1).wait()
            result, expected = mine, wholes[-1]
        elif verb == "all_reduce":
            self.group.all_reduce(mine).wait()
            result, expected = mine, _sum(wholes)
        else:
            result = shard
            self.group.reduce_scatter(shard, mine).wait()
            expected = _sum([whole[own] for whole in wholes])
        exact = not dtype.is_floating_point or verb in ("all_gather", "all_to_all", "broadcast")
        parts = [whole[own] if verb == "reduce_scatter" else whole for whole in wholes]
        bound = 0.0 if exact else size * torch.finfo(dtype).eps * torch.stack(parts).double().abs().sum(0)
        difference = (result.cpu().double() - expected.double()).abs()
        if bool((difference <= bound).all()):
            return None
        return f"{numel} elements on rank {rank}: differs by up to {float(difference.max()):.3g}"


def _sum(parts: Sequence[Tensor]) -> Tensor:
    dtype = parts[0].dtype
    wide = torch.float64 if dtype.is_floating_point else dtype
    return torch.stack([part.to(wide) for part in parts]).sum(0).to(dtype)


def bandwidths(device: torch.device, quick: bool = False) -> dict[str, float]:
    """GB/s (bytes read and written) of copies and kernels on large buffers."""
    n = 1 << 16 if quick else 1 << 26
    x, y = torch.ones(n, device=device), torch.empty(n, device=device)
    low = torch.empty(n, dtype=torch.bfloat16, device=device)
    m, v = torch.zeros(n, device=device), torch.ones(n, device=device)
    out = torch.zeros(2, dtype=torch.float64, device=device)
    segment = Segment(0, n, 1e-3, 0.9, 0.99, 1e-8, 0.1, 1, decoupled=True, maximize=False, amsgrad=False)
    host, rounded = torch.ones(n), torch.empty(n, dtype=torch.bfloat16, device=device)
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "torch's copy": (lambda: y.copy_(x), 8),
        "cast to bf16": (lambda: ops.cast(x, low), 6),
        "norm": (lambda: ops.norm(x, out), 4),
        "flat_adam, bf16 in and out": (lambda: ops.flat_adam(x, m, v, low, [segment], low=rounded), 28),
    }
    if device.type != "cpu":
        host = host.pin_memory()
        calls["host to device"] = (lambda: x.copy_(host, non_blocking=True), 4)
        calls["device to host"] = (lambda: host.copy_(x, non_blocking=True), 4)
    repeats = 3 if quick else 9
    return {name: nbytes * n / _seconds(call, device, repeats) / 1e9 for name, (call, nbytes) in calls.items()}


def _seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    found = devices.get(device)
    times = []
    for _ in range(repeats + 2):
        found.synchronize()
        begin = time.perf_counter()
        call()
        found.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[2:])


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}.get(dtype, str(dtype)[6:])
