"""Forks children that use a store, and ends them: by SIGKILL at random moments, or by themselves. Run as a script.

    python nursery.py kill FOLDER TIMES     children that write; prints how many of them left something in the folder
    python nursery.py train FOLDER TIMES    the same of children that train with states in the folder
    python nursery.py inherit FOLDER        a child that inherits a store of its parent's leaves it alone

Children of a process without threads: it imports torch once for all of them.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import npuzero
from npuzero.errors import StateError
from npuzero.memory.file import FileStore

NBYTES = 16 << 20


def write_for_ever(folder: Path, ready: int) -> None:
    store = FileStore([folder], NBYTES)
    buffer = store.aligned(NBYTES)
    buffer.fill_(1)
    while True:
        os.write(ready, b"r")
        store.write(0, buffer).wait()


def train_for_ever(folder: Path, ready: int) -> None:
    world = npuzero.init("cpu")
    os.write(ready, b"r")  # the model is made next
    settings = npuzero.Settings(nvme_paths=(str(folder),), chunk_bytes=64 << 10)
    layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    model = npuzero.zero(layers, stage=3, offload="nvme", precision="bf16", world=world, settings=settings)
    optimizer = npuzero.AdamW(model.parameters())
    while True:
        model(torch.ones(2, 256, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(ready, b"r")


def kill(live: Callable[[Path, int], None], folder: Path, times: int) -> int:
    """Each child is killed soon after it has told of a few turns."""
    left = 0
    draw = random.Random(times)
    for _ in range(times):
        ends = os.pipe()
        child = os.fork()
        if child == 0:
            live(folder, ends[1])
        os.close(ends[1])
        for _ in range(draw.randint(1, 5)):
            assert os.read(ends[0], 1) == b"r", "it ended by itself"
        time.sleep(draw.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.close(ends[0])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        left += bool(os.listdir(folder)) or shared_memory_of(child)
    return left


def shared_memory_of(child: int) -> bool:
    return any(str(child) in path.name for path in Path("/dev/shm").glob("npuzero*"))


def inherit(folder: Path) -> int:
    """The child's end of the store is not the parent's; 0 where both came through."""
    store = FileStore([folder], NBYTES)
    buffer = store.aligned(NBYTES)
    buffer.fill_(3)
    before = store.write(0, buffer)
    child = os.fork()
    if child == 0:
        own = FileStore.aligned(NBYTES)
        try:
            store.write(0, own)
        except StateError:
            store.close()
            os._exit(0)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    before.wait()
    back = store.aligned(NBYTES)
    store.read(0, back).wait()
    return code or int(not back.eq(3).all())


if __name__ == "__main__":
    verb, where, *rest = sys.argv[1:]
    lives = {"kill": write_for_ever, "train": train_for_ever}
    print(kill(lives[verb], Path(where), int(rest[0])) if verb in lives else inherit(Path(where)))
