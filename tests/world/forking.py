"""A program with ranks that fork during training, in every way that programs do; started by test_fork.py.

    python forking.py init|gloo|shm PRESET

Each rank trains twice, once undisturbed, and compares the bits. A child reports by its exit status.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import npuzero
from npuzero import comm
from world.toy import build_seeded_model, toy_loss, toy_tokens

#: Seconds that a child may take: half of its rank's limit.
CHILD_S = 30


def forked_child(child: Callable[[], object]) -> Callable[..., None]:
    """Fork; the child runs ``child()`` and then ends as Python processes do, atexit included."""

    def fork(*training: Any) -> None:
        pid = os.fork()
        if pid == 0:
            faulthandler.register(signal.SIGALRM, chain=True)  # prints the stack of a hanging child
            signal.alarm(CHILD_S)
            child(*training)
            sys.exit(0)
        _, status = os.waitpid(pid, 0)
        assert status == 0, f"{child.__name__}: the child ended with {os.waitstatus_to_exitcode(status)}"

    return fork


def ends_normally(*_: Any) -> None:
    pass


def ends_at_once(*_: Any) -> None:
    os._exit(0)


def ends_in_a_thread(*_: Any) -> None:
    threading.Thread(target=gc.collect).start()


def drops_everything(training: ForkTraining) -> None:
    vars(training).clear()
    comm.joining._process_world = None
    gc.collect()


def uses_npuzero(training: ForkTraining) -> None:
    """Every call that would reach another rank raises: a world does not survive a fork. A world of one does."""
    for call in (
        npuzero.init,
        lambda: npuzero.zero(build_seeded_model()),
        lambda: comm.current_world().exchange(1),
        lambda: comm.current_world().communicator(range(2), "of a child"),
        lambda: training.communicator.all_reduce(torch.ones(3)),
        training.communicator.barrier,
        lambda: training.communicator.send(torch.ones(3), 1 - training.communicator.rank),
        training.optimizer.step,
        lambda: training.loss(0).backward(),
    ):
        check_fork_refused(call)
    alone = npuzero.zero(build_seeded_model(), world=comm.SingleWorld())
    optimizer = npuzero.AdamW(alone.parameters(), lr=1e-2)
    toy_loss(alone, toy_tokens(0, 0, 0)).backward()
    optimizer.step()


def writes_into_the_model(training: ForkTraining) -> None:
    """Write into parameters, gradients and all their memory that the ranks share."""
    for tensor in gc.get_objects():
        if issubclass(type(tensor), Tensor) and tensor.is_floating_point() and tensor.numel():
            with contextlib.suppress(npuzero.StateError):  # pending work does not arrive after a fork
                tensor.detach().fill_(3.0)


def check_fork_refused(call: Callable[[], object]) -> None:
    try:
        call()
    except npuzero.StateError as error:
        assert "A world does not survive a fork" in str(error), error
    else:
        raise AssertionError(f"line {call.__code__.co_firstlineno} is not refused")


def loads_data(training: ForkTraining) -> None:
    """A DataLoader with workers that end during training."""
    loader = torch.utils.data.DataLoader([toy_tokens(0, 0, 0)] * 6, num_workers=2, multiprocessing_context="fork")
    for _ in loader:
        training.exchange()


def uses_a_pool(training: ForkTraining) -> None:
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:  # a thread starts new workers
        results = [pool.apply_async(abs, (-number,)) for number in range(4)]
        training.exchange()
        assert [result.get(CHILD_S) for result in results] == list(range(4))


WAYS = (
    *map(
        forked_child,
        (ends_normally, ends_at_once, ends_in_a_thread, drops_everything, writes_into_the_model, uses_npuzero),
    ),
    loads_data,
    uses_a_pool,
)


class ForkTraining:
    def __init__(self, preset: str) -> None:
        self.model = npuzero.zero(build_seeded_model(), plan=preset)
        self.optimizer = npuzero.AdamW(self.model.parameters(), lr=1e-2)
        self.rank = comm.current_world().rank
        self.communicator = comm.current_world().communicator(range(2), "beside training")

    def loss(self, step: int) -> Tensor:
        return toy_loss(self.model, toy_tokens(step, 0, self.rank))

    def exchange(self) -> None:
        """Keep operations in flight between the ranks, torch's and npuzero's."""
        for all_reduce in (dist.all_reduce, lambda total: self.communicator.all_reduce(total).wait()):
            total = torch.ones(1000)
            all_reduce(total)
            assert torch.equal(total, torch.full((1000,), 2.0))

    def run(self, disturb: Callable[[ForkTraining, int], None]) -> dict[str, Tensor]:
        """Fork between the parts of a step, and within its forward and backward."""
        count, parent = 0, os.getpid()

        def now(*_: object) -> None:
            nonlocal count
            if os.getpid() == parent:  # children run the model as well
                count += 1
                disturb(self, count)

        self.model.blocks[1].register_forward_hook(now)
        self.model.blocks[1].register_full_backward_hook(now)
        for step in range(2):
            loss = self.loss(step)
            now()
            loss.backward()
            now()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return npuzero.full_state_dict(self.model, rank0_only=False)


def main(door: str, preset: str) -> None:
    torch.set_num_threads(1)
    if door == "shm":
        dist.init_process_group("shm")
    else:
        npuzero.init("cpu", backend=None if door == "init" else door)
    expected = ForkTraining(preset).run(lambda *_: None)
    found = ForkTraining(preset).run(lambda training, count: WAYS[count - 1](training))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name} is not what an undisturbed training gives"
    print("trained")


if __name__ == "__main__":
    main(*sys.argv[1:])
