"""A job that saves at every step, and is killed at any time, life after life."""

from __future__ import annotations

import hashlib
import random
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import npuzero
from npuzero import Settings, checkpoint
from npuzero.comm import World
from npuzero.plan import DATA
from world import comm_ranks
from world.toy import build_seeded_model

from .training import CheckpointTraining

TIMEOUT_S = 20.0
#: Bounds the time of a broken job; a busy machine starts processes slowly.
LIMIT_S = 300.0


class StagedTraining:
    """Train two stages of a pipeline, each sharded over the data ranks; same interface as Training."""

    def __init__(self, world: World, plan: str, schedule: str) -> None:
        self.mesh = npuzero.mesh(world=world, pipe=2)
        layers = build_seeded_model(
            make=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        )
        chunks = 2 if schedule == "interleaved" else 1
        options = {"schedule": schedule, "micro_batches": 2, "chunks": chunks, "loss_fn": nn.functional.mse_loss}
        self.pipe = npuzero.pipeline(layers, self.mesh, plan=plan, **options)
        self.optimizer = npuzero.AdamW(self.pipe.parameters(), lr=1e-2)

    @staticmethod
    def of(world: World, words: str) -> StagedTraining:
        """Build a training from ``words``: ``staged``, the plan and the schedule."""
        return StagedTraining(world, *words.split()[1:])

    def steps(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            generator = torch.Generator().manual_seed(10 * step + self.mesh.index(DATA))
            x = torch.randn(4, 8, generator=generator)
            self.pipe.step(x, target=x.roll(1, -1))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, folder: Path, step: int, **options: Any) -> Any:
        return checkpoint.save(folder, self.pipe, self.optimizer, step=step, **options)

    def load(self, folder: Path) -> Any:
        return checkpoint.load(folder, self.pipe, self.optimizer)

    def state(self) -> dict[str, Any]:
        return npuzero.full_state_dict(self.pipe, rank0_only=False) | {"losses": None}


def train_until_killed(world: World, pipe: Any, folder: Path, plan: str) -> None:
    """Resume, and train until killed, saving every step; after the first step report the step it started from."""
    # The folder of the optimizer states, if the plan keeps them on a disk.
    if plan.startswith("staged"):
        training: Any = StagedTraining.of(world, plan)
    else:
        training = CheckpointTraining(
            world, plan, seed=1, settings=Settings(nvme_paths=(str(folder.parent),), chunk_bytes=3000)
        )
    begin = 0
    if checkpoint.latest(folder):
        loaded = training.load(folder)
        begin = loaded.step or 0
        assert loaded.extra == training_digest(training), f"rank {world.rank} has not what was saved"
    for step in range(begin, 10**6):
        training.steps(step, step + 1)
        if step == begin:  # the first one takes long: torch imports what it needs
            pipe.send(begin)
        training.save(
            folder, step + 1, keep_last=2, asynchronous=step % 2 == 0, rng=False, extra=training_digest(training)
        )


def training_digest(training: Any) -> str:
    """Hash the state that training resumes from, without the losses of this life."""
    state = training.state()
    del state["losses"]
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


def checkpoint_step(path: Path | None) -> int:
    """Return the step of a checkpoint; 0 for None."""
    return int(path.name.removeprefix("step-")) if path else 0


class RankProcesses:
    """Run ranks as processes.

    They join by a store that outlives them, as under torchrun. torch's file store does not survive kills: a rank killed
    while it writes leaves half a record there, and every reader of it waits forever.
    """

    def __init__(self, ranks: int, folder: Path, plan: str) -> None:
        self._children, self._pipes = [], []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(ranks):
            ours, theirs = comm_ranks.context.Pipe(duplex=False)
            setup = (rank, ranks, self._store.port, None, TIMEOUT_S, comm_ranks.SLOT_BYTES)
            child = comm_ranks.context.Process(
                target=comm_ranks.run_rank_body,
                args=(theirs, setup, train_until_killed, (theirs, folder, plan)),
                daemon=True,
            )
            child.start()
            theirs.close()
            self._children.append(child)
            self._pipes.append(ours)

    def resumed(self) -> list[int]:
        """Return the step from which each rank resumes."""
        deadline = time.monotonic() + LIMIT_S
        steps = []
        for pipe in self._pipes:
            assert wait([pipe], deadline - time.monotonic()), "a rank does not come"
            step = pipe.recv()
            assert isinstance(step, int), step
            steps.append(step)
        return steps

    def await_save(self, folder: Path, step: int) -> None:
        """Wait until a checkpoint of ``step`` or a later one is complete."""
        deadline = time.monotonic() + LIMIT_S
        while checkpoint_step(checkpoint.latest(folder)) < step:
            assert time.monotonic() < deadline, f"step {step} is never saved"
            time.sleep(0.005)

    def kill(self, chance: random.Random) -> None:
        """Kill one rank, then the remaining ranks: at once, or after they have noticed."""
        victim = chance.choice(self._children)
        victim.kill()
        victim.join()
        notice = chance.random() < 0.5
        for child in self._children:
            if notice:
                child.join(TIMEOUT_S)
                assert child.exitcode is not None, "a rank hangs"
            child.kill()
            child.join()
