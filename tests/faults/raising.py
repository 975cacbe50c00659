"""Raise at the nth call that may fail inside the engine, and the trainings that this interrupts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import Settings, comm, ops
from npuzero.api.model import engine_of
from npuzero.comm import Communicator, World
from npuzero.comm.backends.shared_memory import SharedMemoryHandle
from npuzero.memory import FileStore, HostCopier
from npuzero.memory.space import MemorySpace, TransientBuffer
from npuzero.ops import AdamLine
from npuzero.shard.gradients import norms as sums
from npuzero.shard.state import micro_batch_gradient as contribution
from world.test_optimizers import optimizer_state
from world.toy import build_seeded_model
from world.train import State

#: The calls that may fail, by their place of lookup: memory, collectives and waits for them, disks, copies, kernels.
CALLS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (TransientBuffer, ("restore",)),
    (MemorySpace, ("allocate",)),
    (Communicator, ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv")),
    (SharedMemoryHandle, ("wait",)),
    (World, ("exchange",)),
    (FileStore, ("read", "write")),
    (HostCopier, ("to_host", "to_device", "snapshot")),
    (ops, ("cast", "quantize", "dequantize_sum")),
    (contribution, ("pack_unchecked",)),
    (sums, ("norm_unchecked",)),
    (AdamLine, ("update",)),
)

_here = threading.local()


class UserInterrupt(KeyboardInterrupt):
    """Stand in for the KeyboardInterrupt of a user's Ctrl-C."""


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("out of memory (pretended)")


#: Makes the error to raise.
Make = Callable[[], BaseException]
PRETENDED = (torch.OutOfMemoryError, UserInterrupt)


def watch_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let :func:`raising_at` count and fail the calls in :data:`CALLS`."""
    for owner, names in CALLS:
        for name in names:
            monkeypatch.setattr(owner, name, _raise_at_count(getattr(owner, name), f"{owner.__name__}.{name}"))


def _raise_at_count(real: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        left = getattr(_here, "left", None)
        if left is not None:
            _here.left = left - 1 if left else None
            if not left:
                _here.hit = name
                raise _here.make()
        return real(*args, **kwargs)

    return call


class RaisedCall:
    """Record which call raised.

    Attributes:
        name: the call's name; "" if there were fewer calls.
    """

    name = ""


@contextlib.contextmanager
def raising_at(n: int | None, make: Make) -> Iterator[RaisedCall]:
    """Raise ``make()`` at this thread's ``n``th call inside, and swallow it on exit; None: never."""
    hit = RaisedCall()
    _here.left, _here.make, _here.hit = n, make, ""
    try:
        yield hit
    except PRETENDED:
        assert _here.hit
    finally:
        _here.left, hit.name = None, _here.hit


#: By name: the function that makes the error.
ERRORS: dict[str, Make] = {"out of memory": out_of_memory, "interrupt": UserInterrupt}
#: By name: plan, ranks, further arguments of zero().
PLANS: dict[str, tuple[str, int, dict[str, Any]]] = {
    name: (name, 4 if name in ("hpz", "hsdp", "thin", "zero++") else 2, {})
    for name in ("zero0", "zero1", "zero2", "zero3", "zero3-keep", "hpz", "hsdp", "thin", "zero++", "offload")
} | {
    "offload3": ("offload3", 2, {}),
    "infinity": ("infinity", 2, {}),
    "delayed": ("delayed", 2, {}),
    "zero2 bf16": ("zero2", 2, {"precision": "bf16"}),
    "hsdp bf16": ("hsdp", 4, {"precision": "bf16"}),
    "zero3 on one rank": ("zero3", 1, {}),
}
PHASES = ("forward", "backward", "second micro-batch", "evaluation", "full_state_dict", "gathered")
#: Phases that lose no batch: the program tries once more.
READING = ("evaluation", "full_state_dict", "gathered")


@dataclass
class RunCourse:
    """Record a run.

    Attributes:
        trained: the batches it trained on.
        hits: the calls that raised.
        state: the final state.
    """

    trained: list[int] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    hits: list[str] = field(default_factory=list)
    state: State = field(default_factory=dict)


class FrozenBiasNet(nn.Module):
    """Build a root unit and one unit per block, each of two flat parameters; one block has a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 8)
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


class RaisingRun:
    """Train on one rank, and raise in one phase if asked."""

    def __init__(self, world: World, name: str, folder: Path, **settings: Any) -> None:
        plan, ranks, options = PLANS[name]
        settings = {"bucket_bytes": 256, "nvme_paths": (str(folder),), "chunk_bytes": 600} | settings
        self.rank = world.rank
        net = build_seeded_model(0, FrozenBiasNet)
        self.model = npuzero.zero(
            net, plan=plan, local_size=min(2, ranks), world=world, settings=Settings(**settings), **options
        )
        self.optimizer = npuzero.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3)
        self.course = RunCourse()

    def settle(self) -> None:
        """Wait for the last update, so that all ranks make the same calls however far their threads are."""
        engine_of(self.model).update.stream.quiet()

    def loss(self, step: int, micro_batch: int = 0) -> Tensor:
        inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * step + 10 * micro_batch + self.rank))
        return self.model(inputs).float().square().mean()

    def part(self, phase: str, n: int | None, make: Make, step: int) -> None:
        """Train on one batch, and raise at call ``n`` of ``phase``."""
        self.settle()
        if phase in READING:
            with raising_at(n, make) as hit:
                self.read(phase)
            self.course.hits += [hit.name] * bool(hit.name)
            n = None
        if phase == "second micro-batch":
            self.loss(step, 1).backward()
        with raising_at(n if phase != "backward" else None, make) as hit:
            loss = self.loss(step)
        if not hit.name:
            with raising_at(n if phase != "forward" else None, make) as hit:
                loss.backward()
        if hit.name:
            self.course.hits.append(hit.name)
            self.optimizer.zero_grad()
            return
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.course.trained.append(step)
        self.course.losses.append(loss.detach())

    def read(self, phase: str) -> None:
        if phase == "full_state_dict":
            npuzero.full_state_dict(self.model)
        elif phase == "gathered":
            with npuzero.gathered(self.model):
                pass
        else:
            with torch.no_grad():
                self.loss(0)

    def end(self) -> RunCourse:
        npuzero.apply_pending(self.model)
        self.course.state = npuzero.full_state_dict(self.model, rank0_only=False) | optimizer_state(self.optimizer)
        return self.course


def run_raising_ranks(name: str, body: Any) -> list[Any]:
    return comm.run_threads(PLANS[name][1], body, timeout_s=60)


def run_without_raising(name: str, folder: Path, batches: Iterable[int], phase: str = "forward") -> RunCourse:
    """Run ``batches`` alone, without any error."""

    def rank(world: World) -> RunCourse:
        run = RaisingRun(world, name, folder)
        for step in batches:
            run.part(phase, None, out_of_memory, step)
        return run.end()

    return run_raising_ranks(name, rank)[0]
