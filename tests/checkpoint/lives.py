"""A job that saves all the time and is killed at any time, life after life."""

from __future__ import annotations

import hashlib
import random
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from npuzero import Settings, checkpoint
from npuzero.comm import World
from world import comm_ranks

from .training import Training

TIMEOUT_S = 20.0


def live(world: World, pipe: Any, folder: Path, plan: str) -> None:
    """Resume, train until killed, saving every step; after the first say from where."""
    # Where states go, if the plan has them on a disk.
    training = Training(world, plan, seed=1, settings=Settings(nvme_paths=(str(folder.parent),), chunk_bytes=3000))
    begin = 0
    if checkpoint.latest(folder):
        loaded = training.load(folder)
        begin = loaded.step or 0
        assert loaded.extra == digest(training), f"rank {world.rank} has not what was saved"
    for step in range(begin, 10**6):
        training.steps(step, step + 1)
        if step == begin:  # the first one takes long: torch imports what it needs
            pipe.send(begin)
        training.save(folder, step + 1, keep_last=2, asynchronous=step % 2 == 0, rng=False, extra=digest(training))


def digest(training: Training) -> str:
    """Of everything that training goes on from, but the losses of this life."""
    state = training.state()
    del state["losses"]
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


class Job:
    """Ranks that are processes.

    They meet at a store that outlives them, as under torchrun: torch's store in a file is none for ranks that are
    killed. One that dies while it writes there leaves half a record, and whoever reads that waits for ever.
    """

    def __init__(self, ranks: int, folder: Path, plan: str) -> None:
        self._children, self._pipes = [], []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(ranks):
            ours, theirs = comm_ranks.context.Pipe(duplex=False)
            setup = (rank, ranks, self._store.port, None, TIMEOUT_S, comm_ranks.SLOT_BYTES)
            child = comm_ranks.context.Process(
                target=comm_ranks.body, args=(theirs, setup, live, (theirs, folder, plan)), daemon=True
            )
            child.start()
            theirs.close()
            self._children.append(child)
            self._pipes.append(ours)

    def resumed(self) -> list[int]:
        """From which step each rank goes on."""
        deadline = time.monotonic() + 60.0
        steps = []
        for pipe in self._pipes:
            assert wait([pipe], deadline - time.monotonic()), "a rank does not come"
            step = pipe.recv()
            assert isinstance(step, int), step
            steps.append(step)
        return steps

    def kill(self, chance: random.Random) -> None:
        """One rank, and then the others: at once, or when they have noticed."""
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
