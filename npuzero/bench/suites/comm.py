"""Benchmarks of the collectives against the device's torch.distributed backend: gloo, nccl or hccl.

Without a launcher, a CPU runs teams of 2 and of 4 ranks; under a launcher (torchrun, Slurm) its ranks run. Sizes are of
the unsharded tensor on one rank. Bytes are those that a rank sends in a ring (plan.ring_bytes), so that bytes per
second can be compared between collectives and numbers of ranks. The probe ``copy`` copies as many bytes as a rank has
to read and write within its own memory, on all ranks at once; a collective that is faster than the copy profits from
the caches.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from npuzero import config, ops
from npuzero import device as devices
from npuzero.bench.harness import (
    Benchmark,
    Contender,
    Effort,
    Result,
    check_close,
    check_equal,
    local_contender,
    run_benchmark,
)
from npuzero.bench.record import benchmark_as_dict, benchmark_from_dict
from npuzero.bench.setting import OWN
from npuzero.bench.suites.updates import ADAM_TOLERANCE, FlatAdamRun, torch_adam
from npuzero.bench.team import Team, python_worker
from npuzero.comm import process_world
from npuzero.comm.backends.process_group import all_gather_single, reduce_scatter_single
from npuzero.plan import ring_bytes

SUITE = "comm"
RANKS = (2, 4)
IN_PLACE = "npuzero, read in place"

_TIMEOUT_S = 60.0
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
_SUMS, _MOVES = ("reduce_scatter", "all_reduce"), ("all_gather", "all_to_all")
_SIZES_KIB = (256, 1024, 16384, 32768, 65536)
_MAX_NORM = 1.0


def comm_benchmark_names(quick: bool) -> list[str]:
    """Return every benchmark of the suite as ``collective/dtype/KiB``, without the number of ranks."""
    sizes = (64,) if quick else _SIZES_KIB
    middle = sizes[len(sizes) // 2]
    return [
        "barrier",
        "all_reduce/fp32/1",
        *(f"{verb}/fp32/{size}" for verb in (*_SUMS, *_MOVES) for size in sizes),
        *(f"{verb}/{dtype}/{middle}" for verb in _SUMS for dtype in ("bf16", "fp16")),
        *(f"{verb}/int8/{middle}" for verb in _MOVES),
        *(f"send/fp32/{size}" for size in sizes),
        *(f"update/{dtype}/{sizes[-1]}" for dtype in ("fp32", "bf16")),
    ]


def comm_effort(quick: bool) -> Effort:
    """Return the duration of each benchmark of the suite."""
    return Effort.quick() if quick else Effort(most_s=2.0, error=0.01)


def measure_comm(wanted: Sequence[str], device: torch.device, quick: bool) -> Iterator[Result]:
    """Measure the named benchmarks, on the launcher's ranks if there are any, else on 2 and on 4 ranks of this host.

    Raises:
        BenchmarkError: a wrong result, or a rank failed.
        CollectiveError: a rank failed under a launcher.
    """
    launch = config.read_launch()
    if launch.world_size > 1:
        ranks = make(launch.rank, launch.world_size, {"device": str(device)})
        for name in wanted:
            yield ranks.result(name, comm_effort(quick))
        return
    cores = len(os.sched_getaffinity(0))
    for size in RANKS:
        team = Team(
            f"{size} ranks",
            python_worker("npuzero.bench.suites.comm"),
            size,
            options={"device": device.type},
            threads=max(1, cores // size),
            timeout_s=2 * _TIMEOUT_S,
        )
        with team:
            for name in wanted:
                yield benchmark_from_dict(team.ask("measure", name=name, effort=asdict(comm_effort(quick)))[0])


def make(rank: int, size: int, options: Mapping[str, Any]) -> CommBenchmarkRank:
    """Make this rank's work for worker.py."""
    return CommBenchmarkRank(options["device"])


Call = Callable[[Tensor, Tensor], object]  # out, inp; an all_reduce works on inp, in place


class CommBenchmarkRank:
    """Run one rank of the suite. All ranks call the same methods in the same order.

    Args:
        others: further contenders, by collective and name; they take plain tensors.
    """

    def __init__(
        self, device: torch.device | str, others: Mapping[str, Mapping[str, Call]] = MappingProxyType({})
    ) -> None:
        self.world = process_world(device, _TIMEOUT_S)
        self.device = self.world.device
        self.size, self.rank = self.world.size, self.world.rank
        self.communicator = self.world.communicator(range(self.size), "benchmark")
        self.backend = devices.get(self.device).backend
        self.others = others

    def measure(self, name: str, effort: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result in the form of a record."""
        return benchmark_as_dict(self.result(name, Effort(**effort)))

    def result(self, name: str, effort: Effort) -> Result:
        """Check and measure the named benchmark."""
        verb, *rest = name.split("/")
        if verb == "barrier":
            benchmark = self._barrier(name)
        else:
            dtype, kib = _DTYPES[rest[0]], int(rest[1])
            benchmark = (self._update if verb == "update" else functools.partial(self._verb, verb))(name, dtype, kib)
        return run_benchmark(benchmark, effort, combine=self._slowest)

    def close(self) -> None:
        """End the world."""
        self.world.drain()
        self.world.close()

    def _slowest(self, values: list[float]) -> list[float]:
        return [max(each) for each in zip(*self.world.exchange(values), strict=True)]

    def _contender(self, name: str, call: Callable[[], object], nbytes: int | None = None) -> Contender:
        return local_contender(name, call, device=self.device, nbytes=nbytes, prepare=self.communicator.barrier)

    def _benchmark(
        self, name: str, title: str, contenders: list[Contender], check: Callable[[], str], **parameters: Any
    ) -> Benchmark:
        facts = {"ranks": self.size, **parameters}
        return Benchmark(f"{name}/{self.size}", f"{title}, {self.size} ranks", contenders, self.backend, check, facts)

    def _random(self, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the input of ``rank``, known on every rank, so small that no dtype rounds the sum over ranks."""
        most = max(1, 128 // self.size)
        drawn = torch.randint(-most, most, (numel,), generator=torch.Generator().manual_seed(rank), dtype=torch.int8)
        return (drawn if dtype == torch.int8 else drawn.to(dtype) / 16).to(self.device)

    def _barrier(self, name: str) -> Benchmark:
        contenders = [self._contender(self.backend, dist.barrier), self._contender(OWN, self.communicator.barrier)]
        return self._benchmark(name, "barrier", contenders, lambda: "returns")

    def _verb(self, verb: str, name: str, dtype: torch.dtype, kib: int) -> Benchmark:
        whole = kib * 1024 // dtype.itemsize
        shard = whole // self.size
        brings, gets = {
            "reduce_scatter": (whole, shard),
            "all_gather": (shard, whole),
            "all_to_all": (whole, whole),
            "all_reduce": (whole, whole),
            "send": (whole, whole),
        }[verb]
        door = self.communicator
        own: dict[str, Call] = {
            "reduce_scatter": lambda out, inp: door.reduce_scatter(out, inp).wait(),
            "all_gather": lambda out, inp: door.all_gather(out, inp).wait(),
            "all_to_all": lambda out, inp: door.all_to_all(out, inp).wait(),
            "all_reduce": lambda out, inp: door.all_reduce(inp).wait(),
            "send": lambda out, inp: self._pass_on(door.send, door.recv, out, inp),
        }
        theirs: dict[str, Call] = {
            "reduce_scatter": reduce_scatter_single,
            "all_gather": all_gather_single,
            "all_to_all": dist.all_to_all_single,
            "all_reduce": lambda out, inp: dist.all_reduce(inp),
            "send": lambda out, inp: self._pass_on(dist.isend, dist.irecv, out, inp),
        }
        plain = torch.zeros(brings, dtype=dtype, device=self.device)
        ways = {
            self.backend: (theirs[verb], plain),
            **{name: (call, plain) for name, call in self.others.get(verb, {}).items()},
            OWN: (own[verb], plain),
            IN_PLACE: (own[verb], door.buffer(brings, dtype)),
        }
        out = torch.zeros(gets, dtype=dtype, device=self.device)

        def check() -> str:
            want = self._expected(verb, brings, dtype)
            for way, (call, inp) in ways.items():
                inp.copy_(self._random(self.rank, brings, dtype))
                call(out, inp)
                check_equal(f"{verb} by {way}", inp if verb == "all_reduce" else out, want)
                inp.zero_()  # so that an all_reduce, applied to its own result, stays in range
            return "every element to the bit on every rank (no dtype rounds these sums)"

        nbytes = ring_bytes(verb, whole * dtype.itemsize, self.size)
        contenders = [
            self._contender(way, functools.partial(call, out, inp), nbytes) for way, (call, inp) in ways.items()
        ]
        # A reduce_scatter reads the unsharded input and writes a shard; other collectives read and write the full size.
        moved = whole + shard if verb == "reduce_scatter" else 2 * whole
        source, target = (torch.ones(moved // 2, dtype=dtype, device=self.device) for _ in range(2))
        contenders.append(self._contender("copy", lambda: target.copy_(source), nbytes))
        title = f"{verb} of {_format_kib(kib)} {_dtype_label(dtype)}"
        return self._benchmark(name, title, contenders, check, dtype=_dtype_label(dtype), kib=kib, verb=verb)

    def _pass_on(self, send: Callable[..., Any], recv: Callable[..., Any], out: Tensor, inp: Tensor) -> None:
        """Send ``inp`` to the next rank of a ring, and receive ``out`` from the previous."""
        ends = [(send, inp, (self.rank + 1) % self.size), (recv, out, (self.rank - 1) % self.size)]
        # Two ranks may share one queue for both directions, so they must not both send first.
        under_way = [call(buffer, peer) for call, buffer, peer in ends[:: -1 if self.rank % 2 else 1]]
        for each in under_way:
            each.wait()

    def _expected(self, verb: str, brings: int, dtype: torch.dtype) -> Tensor:
        all_bring = [self._random(rank, brings, dtype) for rank in range(self.size)]
        if verb == "send":
            return all_bring[self.rank - 1]
        if verb == "all_gather":
            return torch.cat(all_bring)
        own = [bring.view(self.size, -1)[self.rank] for bring in all_bring] if verb != "all_reduce" else all_bring
        return torch.cat(own) if verb == "all_to_all" else torch.stack(own).float().sum(0).to(dtype)

    def _update(self, name: str, dtype: torch.dtype, kib: int) -> Benchmark:
        """Compare sharded updates: reduce-scatter, norm, clip, AdamW on the local shard, all-gather of parameters."""
        n = kib * 1024 // 4
        shard = slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)
        begin = self._random(self.size, n, torch.float32)  # seeded by a rank beyond the last: the same on all ranks
        gradient = self._random(self.rank, n, dtype)
        places = [self.communicator.buffer(n, dtype) for _ in range(2)]
        in_place = OwnUpdate(self, begin[shard], places[0].copy_(gradient), places[1])
        own = OwnUpdate(self, begin[shard], gradient, torch.empty_like(gradient))
        other = TorchUpdate(begin[shard], gradient)
        ways: dict[str, Callable[[], Tensor]] = {self.backend: other.step, OWN: own.step, IN_PLACE: in_place.step}

        def check() -> str:
            total = sum(self._random(rank, n, dtype).double() for rank in range(self.size))
            assert isinstance(total, Tensor)
            scale = (_MAX_NORM / (total.square().sum().sqrt() + 1e-6)).clamp(max=1.0)
            want = FlatAdamRun(begin, total).expected(scale)
            # bf16 has 8 significant bits, and the backend may also have rounded the sums to it.
            tolerance = ADAM_TOLERANCE if dtype == torch.float32 else 2.0**-7
            for way, step in ways.items():
                check_close(f"update by {way}", step(), want, tolerance=tolerance)
            return "all parameters after the first step against float64"

        title = f"gradients to new parameters, {_dtype_label(dtype)}, {n:,} elements"
        contenders = [self._contender(way, step) for way, step in ways.items()]
        return self._benchmark(name, title, contenders, check, dtype=_dtype_label(dtype), elements=n)


class OwnUpdate:
    """Update as the engine does: float32 sums, the norm in one pass, clipping and the rounded copy within the update.

    Args:
        begin: the local shard of the parameters.
        gradient, parameters: unsharded, optionally in memory that other ranks can read.
    """

    def __init__(self, ranks: CommBenchmarkRank, begin: Tensor, gradient: Tensor, parameters: Tensor) -> None:
        self.communicator, self.gradient, self.parameters = ranks.communicator, gradient, parameters
        own = parameters[ranks.rank * begin.numel() : (ranks.rank + 1) * begin.numel()]
        self.own = own
        self.shard = torch.empty_like(begin)
        self.adam = FlatAdamRun(begin, self.shard, None if own.dtype == torch.float32 else own)
        if own.dtype == torch.float32:
            self.adam.master = own.copy_(begin)
        self.found = torch.zeros(2, dtype=torch.float64, device=begin.device)
        self.scale = torch.ones(1, device=begin.device)

    def step(self) -> Tensor:
        self.communicator.reduce_scatter(self.shard, self.gradient).wait()
        ops.norm(self.shard, self.found)
        self.communicator.all_reduce(self.found).wait()
        torch.div(_MAX_NORM, self.found[0].sqrt() + 1e-6, out=self.scale[0]).clamp_(max=1.0)
        self.adam.update(self.scale)
        self.communicator.all_gather(self.parameters, self.own).wait()
        return self.parameters


class TorchUpdate:
    """Update with torch's collectives and separate passes."""

    def __init__(self, begin: Tensor, gradient: Tensor) -> None:
        self.gradient, self.parameters = gradient, torch.empty_like(gradient)
        self.shard = gradient.new_empty(begin.numel())
        self.wide = self.shard if gradient.dtype == torch.float32 else torch.empty_like(begin)
        self.master = nn.Parameter(begin.clone())
        self.adam = torch_adam([self.master], [self.wide])

    def step(self) -> Tensor:
        reduce_scatter_single(self.shard, self.gradient)
        if self.wide is not self.shard:
            self.wide.copy_(self.shard)
        total = torch.linalg.vector_norm(self.wide).square()
        dist.all_reduce(total)
        self.wide.mul_((_MAX_NORM / (total.sqrt() + 1e-6)).clamp(max=1.0))
        self.adam.step()
        new = self.master.detach()
        all_gather_single(self.parameters, new.to(self.parameters.dtype))
        return self.parameters


def _dtype_label(dtype: torch.dtype) -> str:
    return next(name for name, known in _DTYPES.items() if known == dtype)


def _format_kib(kib: int) -> str:
    return f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"
