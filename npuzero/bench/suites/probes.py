"""Probes of a rank, one per kind of work: matrix products, element-wise passes, updates, collectives, copies.

A probe is a call and its facts: the FLOPs, bytes, tokens or messages of one call. All ranks of a world build the same
probes and call them simultaneously, as in training: on a CPU they share the memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npuzero import config
from npuzero import device as devices
from npuzero.bench.harness import local_contender
from npuzero.bench.suites.updates import FlatAdamRun
from npuzero.comm import Communicator, process_world
from npuzero.plan import ring_bytes
from npuzero.planner.model_work.units import measure_workload
from npuzero.planner.models import ModelShape
from npuzero.shard.build import get_unit_parameters, nested_unit_spans

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Collectives of a step: all-gather of parameters, reductions of gradients.
VERBS = ("all_gather", "reduce_scatter", "all_reduce")

_TIMEOUT_S = 60.0
_BLOCKS = 2
#: Products of forward and backward, in multiples of forward's.
_PASSES = 3
_RINGS = {"all_reduce": 2}  # rounds over all ranks; 1 for other collectives


@dataclass(frozen=True)
class ProbeSizes:
    """Define the sizes of the probes.

    Attributes:
        dtypes: of matrix products.
        large: sizes of square matrices, for the peak of a device.
        width, head, sequence, batches: of a small decoder.
        update: elements of an updated shard.
        short, long: bytes of messages, for latency and bandwidth.
    """

    dtypes: tuple[str, ...]
    large: tuple[int, ...]
    width: int
    head: int
    sequence: int
    batches: tuple[int, ...]
    update: int
    short: int = 1 << 12
    long: int = 1 << 24

    @classmethod
    def of(cls, kind: str, quick: bool) -> ProbeSizes:
        """Return the sizes for a kind of device; with ``quick`` all probes take seconds."""
        if quick:
            return cls(("bf16", "fp32"), (128,), 64, 64, 64, (1, 2), 1 << 16, long=1 << 18)
        if kind == "cpu":
            return cls(("bf16", "fp32"), (1024, 2048), 512, 64, 256, (1, 4), 1 << 23)
        return cls(("bf16", "fp16", "fp32"), (4096, 8192), 4096, 128, 4096, (1,), 1 << 27, long=1 << 28)


@dataclass(frozen=True)
class Probe:
    """Represent one kind of work.

    Attributes:
        call: does it once.
        facts: numbers describing one call.
    """

    call: Callable[[], object]
    facts: Mapping[str, float] = field(default_factory=dict)


class ProbeBlock(nn.Module):
    """Compute a transformer block, [B, T, D] -> [B, T, D]; if ``bare``, only its products.

    A bare block has no norms, biases, activation or residuals.
    """

    def __init__(self, width: int, heads: int, bare: bool) -> None:
        super().__init__()
        self.heads, self.bare = heads, bare
        self.norms = nn.ModuleList(nn.Identity() if bare else nn.LayerNorm(width) for _ in range(2))
        shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        self.qkv, self.out, self.up, self.down = (nn.Linear(*shape, bias=not bare) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        if self.bare:
            return self.down(self.up(self.out(attended)))  # type: ignore[no-any-return]
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class ProbeDecoder(nn.Module):
    """Predict the next token with a few blocks, int64[B, T] -> logits [B, T, V].

    If ``bare``, compute only its products, [B, T, D] -> [B, T, V].
    """

    def __init__(self, sizes: ProbeSizes, bare: bool = False) -> None:
        super().__init__()
        width = sizes.width
        self.embedding = nn.Identity() if bare else nn.Embedding(width, width)
        self.blocks = nn.ModuleList(ProbeBlock(width, max(1, width // sizes.head), bare) for _ in range(_BLOCKS))
        self.norm = nn.Identity() if bare else nn.LayerNorm(width)
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for each in self.blocks:
            x = each(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def decoder_probes(sizes: ProbeSizes, dtype: str, batch: int, device: torch.device) -> dict[str, Probe]:
    """Make the probes of a small decoder's forward and backward, and of its products only."""
    shape = (batch, sizes.sequence)
    facts = count_decoder_work(sizes, dtype, batch)
    model, bare = (ProbeDecoder(sizes, bare).to(device, DTYPES[dtype]) for bare in (False, True))
    tokens = torch.randint(sizes.width, shape, device=device)
    x = torch.randn(*shape, sizes.width, dtype=DTYPES[dtype], device=device).requires_grad_()
    seed = torch.randn_like(x)

    def whole() -> None:
        F.cross_entropy(model(tokens).flatten(0, -2).float(), tokens.flatten()).backward()
        model.zero_grad(set_to_none=True)

    def products() -> None:
        bare(x).backward(seed)
        x.grad = None
        bare.zero_grad(set_to_none=True)

    return {f"products/{dtype}/{batch}": Probe(products, facts), f"passes/{dtype}/{batch}": Probe(whole, facts)}


def count_decoder_work(sizes: ProbeSizes, dtype: str, batch: int) -> dict[str, float]:
    """Return the FLOPs, bytes and tokens of the small decoder's forward and backward, counted as the planner does."""
    with torch.device("meta"):
        model = ProbeDecoder(sizes).to(DTYPES[dtype])
    units = get_unit_parameters(model)
    shape = ModelShape("decoder", units, nested_unit_spans([f"blocks.{i}" for i in range(len(units))]), lambda: model)
    work = measure_workload(shape, sizes.sequence, batch, dtype=DTYPES[dtype]).units
    return {
        "flops": _PASSES * sum(unit.flops for unit in work),
        "nbytes": float(sum(unit.forward_bytes + unit.backward_bytes for unit in work)),
        "tokens": float(batch * sizes.sequence),
    }


def product_probe(n: int, dtype: str, device: torch.device) -> Probe:
    """Make the probe of one square matrix product."""
    a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(2))
    out = torch.empty_like(a)
    return Probe(lambda: torch.mm(a, b.t(), out=out), {"flops": 2.0 * n**3})


def adamw_probe(numel: int, device: torch.device) -> Probe:
    """Make the probe of AdamW on a flat shard: reads value, gradient and two moments, writes all but the gradient."""
    start, gradient = torch.randn(numel, device=device), torch.randn(numel, device=device)
    return Probe(FlatAdamRun(start, gradient).update, {"nbytes": 7 * start.nbytes})


def host_copy_probes(nbytes: int, device: torch.device) -> dict[str, Probe]:
    """Make the probes of copies between a device and its host, with pinned host memory if possible."""
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    here = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    facts = {"nbytes": float(nbytes)}
    return {
        "host/to_device": Probe(lambda: there.copy_(here, non_blocking=True), facts),
        "host/to_host": Probe(lambda: here.copy_(there, non_blocking=True), facts),
    }


def collective_probe(door: Communicator, verb: str, nbytes: int) -> Probe:
    """Make the probe of a bf16 collective on a buffer of ``nbytes``, which remaining ranks may read in place."""
    numel = max(1, nbytes // 2 // door.size) * door.size
    shard = numel // door.size
    whole = door.buffer(numel, torch.bfloat16)
    part = door.buffer(shard, torch.bfloat16)
    starts: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: door.all_gather(whole, part),
        "reduce_scatter": lambda: door.reduce_scatter(part, whole),
        "all_reduce": lambda: door.all_reduce(whole),
    }
    start = starts[verb]
    facts = {
        "nbytes": float(ring_bytes(verb, whole.nbytes, door.size)),
        "messages": float(_RINGS.get(verb, 1) * (door.size - 1)),
    }
    return Probe(lambda: start().wait(), facts)


class ProbeRank:
    """Run one rank's probes. All ranks call the same methods in the same order.

    Args:
        quick: small sizes; the figures are meaningless.
    """

    def __init__(self, device: torch.device | str, quick: bool = False) -> None:
        self.world = process_world(device, _TIMEOUT_S)
        self.device = self.world.device
        self.sizes = ProbeSizes.of(self.device.type, quick)
        self.all = self.world.communicator(range(self.world.size), "probes")
        self.levels = ranks_by_level(self.world.rank, self.world.size, config.read_launch().local_world_size)
        self.probes = {
            **self._products(),
            **self._links(),
            **host_copy_probes(self.sizes.long, self.device),
        }

    def _products(self) -> dict[str, Probe]:
        sizes, device = self.sizes, self.device
        found = {f"large/{dtype}/{n}": product_probe(n, dtype, device) for dtype in sizes.dtypes for n in sizes.large}
        for dtype in sizes.dtypes:
            for batch in sizes.batches:
                found |= decoder_probes(sizes, dtype, batch, device)
        return found | {"update": adamw_probe(sizes.update, device)}

    def _links(self) -> dict[str, Probe]:
        """Make the probes of collectives by level, and of overlap with compute on the level with the most traffic."""
        found: dict[str, Probe] = {}
        for level, ranks in self.levels.items():
            door = self.world.communicator(ranks, f"probes {level}")
            for verb in VERBS:
                for size in ("short", "long"):
                    found[f"{level}/{verb}/{size}"] = collective_probe(door, verb, getattr(self.sizes, size))
        if self.levels:
            found |= self._beside(self.world.communicator(next(iter(self.levels.values())), "probes beside"))
        return found

    def _beside(self, door: Communicator) -> dict[str, Probe]:
        """Make the probes of compute, of collectives that take as long, and of both overlapped."""
        dtype, batch = self.sizes.dtypes[0], self.sizes.batches[-1]
        compute = decoder_probes(self.sizes, dtype, batch, self.device)[f"products/{dtype}/{batch}"]
        whole = door.buffer(self.sizes.long // 2 // door.size * door.size, torch.bfloat16)
        once = {
            name: self._seconds(call)
            for name, call in {"compute": compute.call, "traffic": lambda: door.all_reduce(whole).wait()}.items()
        }
        times = max(1, min(64, round(once["compute"] / once["traffic"])))

        def traffic() -> list[Any]:
            return [door.all_reduce(whole) for _ in range(times)]

        def wait(handles: Sequence[Any]) -> None:
            for handle in handles:
                handle.wait()

        def both() -> None:
            handles = traffic()
            compute.call()
            wait(handles)

        return {
            "beside/compute": compute,
            "beside/traffic": Probe(lambda: wait(traffic())),
            "beside/both": Probe(both),
        }

    def _seconds(self, call: Callable[[], object]) -> float:
        """Return the slowest rank's time for the third call: the same on all ranks."""
        visit = local_contender("", call, device=self.device, prepare=self.all.barrier).visit
        for _ in range(3):
            seconds = visit(1)
        return float(max(self.world.exchange(seconds)))

    def facts(self) -> dict[str, dict[str, float]]:
        """Return the facts of each probe."""
        return {name: dict(probe.facts) for name, probe in self.probes.items()}

    def visit(self, name: str, count: int) -> float:
        """Return this rank's seconds per call of a probe, over ``count`` calls. All ranks start together."""
        return local_contender(name, self.probes[name].call, device=self.device, prepare=self.all.barrier).visit(count)

    def place(self) -> dict[str, Any]:
        """Return facts of this rank's device and host."""
        device = devices.get(self.device)
        return {
            "name": device.capability().partition(",")[0],
            "memory_bytes": device.memory().total,
            "host_bytes": devices.get("cpu").memory().total,
            "local": config.read_launch().local_world_size,
            "ranks": self.world.size,
            "kind": self.device.type,
        }

    def close(self) -> None:
        """End the world."""
        self.world.drain()
        self.world.close()


def ranks_by_level(rank: int, size: int, local_size: int) -> dict[str, list[int]]:
    """Return by level the ranks that a rank communicates with. Levels of one rank are omitted."""
    here = rank // local_size * local_size
    found = {"local": list(range(here, here + local_size)), "node": list(range(rank % local_size, size, local_size))}
    return {level: ranks for level, ranks in found.items() if len(ranks) > 1}


def make(rank: int, size: int, options: Mapping[str, Any]) -> ProbeRank:
    """Make this rank's work for worker.py."""
    return ProbeRank(options["device"], options["quick"])
