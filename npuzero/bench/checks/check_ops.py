"""Correctness of an installation on a device: a grid of ops, collectives between ranks, and bandwidths.

For machines that the project has no access to: one command produces a report to send back. Ops are compared with their
references on the host, bit for bit where the contract requires it; collectives with sums computed on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from npuzero import _native, ops
from npuzero import device as devices
from npuzero.bench.checks.op_cases import FLOATS, Case, check_cases, make_values, short_dtype_name
from npuzero.bench.spread import median
from npuzero.bench.team import Team, python_worker
from npuzero.comm import process_world
from npuzero.errors import NpuZeroError
from npuzero.ops import storage
from npuzero.ops.flat_adam import AdamSegment
from npuzero.plan import MOMENT_BLOCK, ring_bytes

QUICK_SIZES = (0, 1, 17, 4099)
SIZES = (0, 1, 15, 16, 17, 1023, 1025, 4096, 4097, 65_543, 1_000_003)
OFFSETS = (0, 1, 3)

COPY = "torch's copy"  # the reference bandwidth, measured first
LINKS = ("host to device", "device to host")  # not bandwidths of the device's memory

_GUARD = 64  # elements before and after each buffer that no op may touch
_PATTERN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TOLD = 5  # problems reported per check


@dataclass
class CheckFinding:
    """Record one check: the number of cases, the number of failures, and the first few problems."""

    name: str
    cases: int = 0
    wrong: int = 0
    first: list[str] = field(default_factory=list)

    def count(self, problem: str | None) -> None:
        """Count one more case."""
        self.cases += 1
        if problem is not None:
            self.wrong += 1
            self.first += [problem] * (len(self.first) < _TOLD)


class _GuardedBuffers:
    """Allocate tensors on the device, each between guards, starting `offset` elements after an aligned address."""

    def __init__(self, device: torch.device, offset: int) -> None:
        self._device = device
        self._offset = offset
        self._wholes: list[tuple[Tensor, Tensor]] = []

    def put(self, content: Tensor) -> Tensor:
        """Copy `content` between guards."""
        guard = 7 + len(self._wholes)  # different per buffer: a buffer's guard cannot pass for its neighbour's
        around = torch.full((2 * _GUARD + self._offset + content.numel(),), guard, dtype=content.dtype)
        begin = _GUARD + self._offset
        around[begin : begin + content.numel()] = content
        whole = around.to(self._device, copy=True)
        self._wholes.append((whole, around))
        return whole[begin : begin + content.numel()]

    def touched(self) -> bool:
        """Return whether a guard has changed."""
        begin = _GUARD + self._offset
        for whole, around in self._wholes:
            guards = [torch.cat([buffer[:begin], buffer[-_GUARD:]]) for buffer in (whole.cpu(), around)]
            if not torch.equal(*guards):
                return True
        return False


def check_ops(device: torch.device, quick: bool = False) -> Iterator[CheckFinding]:
    """Check every op, size, start offset and dtype on `device` against the reference on the host."""
    for name, case, sizes in check_cases(QUICK_SIZES if quick else SIZES):
        finding = CheckFinding(name)
        for numel in sizes:
            for offset in OFFSETS:
                finding.count(_compare_case(case, device, numel, offset))
        yield finding


def _compare_case(case: Case, device: torch.device, numel: int, offset: int) -> str | None:
    where = f"{numel} elements from offset {offset}"
    buffers = _GuardedBuffers(device, offset)
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
    differences = filter(None, map(_find_bit_difference, found, expected))
    return next((f"{where}: {difference}" for difference in differences), None)


def _find_bit_difference(found: Tensor, expected: Tensor) -> str | None:
    """Return the first bitwise difference. All NaNs count as equal."""
    pattern = _PATTERN[found.element_size()]
    same = (found.view(pattern) == expected.view(pattern)) | (found.isnan() & expected.isnan())
    if bool(same.all()):
        return None
    i = int((~same).nonzero()[0])
    return f"{int((~same).sum())} differ, first [{i}]: {found[i].item()!r} instead of {expected[i].item()!r}"


def check_collectives(device: str, ranks: int, quick: bool = False) -> tuple[list[CheckFinding], dict[str, float]]:
    """Check every collective between `ranks` processes of this host; return findings and GB/s sent per rank.

    Raises:
        BenchmarkError: a rank died, failed, or did not answer.
    """
    with Team("check", python_worker(__name__), ranks, options={"device": device}) as team:
        answers = team.ask("verbs", quick=quick)
        findings = [CheckFinding(**entry) for entry in answers[0]]
        for other in answers[1:]:
            for finding, entry in zip(findings, other, strict=True):
                finding.wrong += entry["wrong"]
                finding.first = (finding.first + entry["first"])[:_TOLD]
        return findings, team.ask("bandwidths", quick=quick)[0]


def make(rank: int, size: int, options: Mapping[str, Any]) -> CollectiveCheckRank:
    """Make this rank's work for worker.py."""
    return CollectiveCheckRank(options["device"])


class CollectiveCheckRank:
    """Run one rank of ``check_collectives``."""

    def __init__(self, device: str) -> None:
        self.world = process_world(device, timeout_s=300.0)
        self.group = self.world.communicator(range(self.world.size), "check")

    def verbs(self, quick: bool) -> list[dict[str, Any]]:
        """Return one finding per collective and dtype."""
        findings = []
        for dtype in (*FLOATS, torch.float64, torch.int64, torch.uint8):
            for verb in ("all_gather", "all_to_all", "broadcast", "all_reduce", "reduce_scatter"):
                if verb == "reduce_scatter" and dtype not in FLOATS:
                    continue
                finding = CheckFinding(f"{verb} {short_dtype_name(dtype)}")
                for numel in (1, 513, 70_001)[: 2 if quick else 3]:
                    finding.count(self._wrong(verb, dtype, numel))
                findings.append(vars(finding))
        return findings

    def bandwidths(self, quick: bool) -> dict[str, float]:
        """Return the GB/s that each rank sends, by collective."""
        size, n = self.world.size, (1 << 16 if quick else 1 << 24)
        whole, shard = torch.ones(size * n, device=self.world.device), torch.ones(n, device=self.world.device)
        calls: dict[str, Callable[[], Any]] = {
            "all_gather": lambda: self.group.all_gather(whole, shard).wait(),
            "reduce_scatter": lambda: self.group.reduce_scatter(shard, whole).wait(),
            "all_reduce": lambda: self.group.all_reduce(whole).wait(),
        }
        seconds = {
            verb: _measure_median_seconds(call, self.world.device, 3 if quick else 7) for verb, call in calls.items()
        }
        return {verb: ring_bytes(verb, whole.nbytes, size) / time_s / 1e9 for verb, time_s in seconds.items()}

    def close(self) -> None:
        """End the world."""
        self.world.drain()

    def _brings(self, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point:
            return make_values(numel, torch.float32, 100 + rank, specials=False).to(dtype)
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
            result, expected = mine, _sum_parts(wholes)
        else:
            result = shard
            self.group.reduce_scatter(shard, mine).wait()
            expected = _sum_parts([whole[own] for whole in wholes])
        # Sums of floats may be in any order: allow one eps per rank, relative to the sum of magnitudes.
        exact = not dtype.is_floating_point or verb in ("all_gather", "all_to_all", "broadcast")
        parts = [whole[own] if verb == "reduce_scatter" else whole for whole in wholes]
        bound = 0.0 if exact else size * torch.finfo(dtype).eps * torch.stack(parts).double().abs().sum(0)
        difference = (result.cpu().double() - expected.double()).abs()
        if bool((difference <= bound).all()):
            return None
        return f"{numel} elements on rank {rank}: differs by up to {float(difference.max()):.3g}"


def _sum_parts(parts: Sequence[Tensor]) -> Tensor:
    dtype = parts[0].dtype
    wide = torch.float64 if dtype.is_floating_point else dtype
    return torch.stack([part.to(wide) for part in parts]).sum(0).to(dtype)


def bandwidth_probes(device: torch.device, quick: bool = False) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield the names of copies and ops on large buffers, each with a function that returns GB/s read and written."""
    n = 1 << 16 if quick else 1 << 26
    repeats = 3 if quick else 9
    with torch.device(device):
        x, y, m, v = torch.ones(n), torch.empty(n), torch.zeros(n), torch.ones(n)
        grad, low = torch.ones(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.bfloat16)
        remainder, out = torch.zeros(n, dtype=torch.int16), torch.zeros(2, dtype=torch.float64)
        codes = [torch.zeros(storage.stored_numel(n, torch.uint8), dtype=torch.uint8) for _ in range(2)]
    segment = AdamSegment(0, n, 1e-3, 0.9, 0.99, 1e-8, 0.1, 1, decoupled=True, maximize=False, amsgrad=False)
    host = torch.ones(n) if device.type == "cpu" else torch.ones(n).pin_memory()
    calls: dict[str, tuple[Callable[[], Any], float]] = {
        COPY: (lambda: y.copy_(x), 8),
        "cast to bf16": (lambda: ops.cast(x, low), 6),
        "cast to bf16, stochastic": (lambda: ops.cast(x, low, rounding="stochastic"), 6),
        "pack to bf16, scaled": (lambda: ops.pack([x], [0], low, scale=0.5), 6),
        "pack bf16, added to f32": (lambda: ops.pack([grad], [0], x, scale=1e-9, accumulate=True), 10),
        "norm": (lambda: ops.norm(x, out), 4),
        "norm, bf16 added": (lambda: ops.norm(x, out, addend=grad, scale=1e-9), 10),
        "flat_adam, bf16 in and out": (lambda: ops.flat_adam(x, m, v, grad, [segment], low=low), 28),
        "flat_adam, split masters": (lambda: ops.flat_adam(low, m, v, grad, [segment], remainder=remainder), 26),
        "flat_adam, bf16 masters": (lambda: ops.flat_adam(low, m, v, grad, [segment]), 22),
        "flat_adam, 8-bit moments": (
            lambda: ops.flat_adam(x, codes[0], codes[1], grad, [segment], low=low),
            16 + 4 / MOMENT_BLOCK,
        ),
    }
    if device.type != "cpu":
        there, back = LINKS
        calls[there] = (lambda: x.copy_(host, non_blocking=True), 4)
        calls[back] = (lambda: host.copy_(x, non_blocking=True), 4)
    for name, (call, nbytes) in calls.items():
        yield name, partial(_measure_gb_per_s, call, nbytes * n, device, repeats)


def _measure_gb_per_s(call: Callable[[], Any], nbytes: float, device: torch.device, repeats: int) -> float:
    return nbytes / _measure_median_seconds(call, device, repeats) / 1e9


def _measure_median_seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    found = devices.get(device)
    times = []
    for _ in range(repeats + 2):
        found.synchronize()
        begin = time.perf_counter()
        call()
        found.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[2:])
