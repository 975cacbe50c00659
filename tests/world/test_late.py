"""Collectives delayed until a thread waits for them: no result is used before it has arrived.

No buffer is overwritten before it is sent. On an idle machine most collectives finish before any wait, which hides a
missing wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from npuzero.comm import AsyncHandle
from npuzero.comm.backends.shared_memory import SharedMemoryCommunicator
from world import test_behaviour as behaviour
from world import test_gradients as gradients
from world.toy import TrainingRecipe
from world.train import Session, State, check_equals_plain, train_by_recipe

PLANS = ("zero1", "zero3", "hpz", "hsdp")


class LateHandle(AsyncHandle):
    """An operation that has not begun; earlier ones on its communicator begin first."""

    def __init__(self, waiting: list[LateHandle], begin: Callable[[], AsyncHandle]) -> None:
        self._waiting = waiting
        self._begin = begin
        self._begun: AsyncHandle | None = None
        waiting.append(self)

    def wait(self) -> None:
        while self._begun is None:
            first = self._waiting.pop(0)
            first._begun = first._begin()
        self._begun.wait()

    def done(self) -> bool:
        return self._begun is not None and self._begun.done()


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = SharedMemoryCommunicator._submit

    def later(self: Any, *args: Any, **kwargs: Any) -> AsyncHandle:
        waiting = self.__dict__.setdefault("_waiting", [])
        return LateHandle(waiting, lambda: submit(self, *args, **kwargs))

    monkeypatch.setattr(SharedMemoryCommunicator, "_submit", later)


def micro_batches_and_clipping(session: Session) -> State:
    return train_by_recipe(session, TrainingRecipe(steps=3, micro_batches=2, clip=0.5, groups=True))


def a_look_at_parameters_after_the_step(session: Session) -> State:
    """Where parameters rest unsharded, without a call of the engine."""
    read = []
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        session.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        read.append(session.model.blocks[1].out.weight.detach().clone())
    return {"read": torch.stack(read)}


SCENARIOS = (
    micro_batches_and_clipping,
    behaviour.several_forwards_before_one_backward,
    gradients.an_evaluation_that_foresees_another_unit,
    gradients.no_sync_after_a_synchronised_pass,
    behaviour.zero_grad_of_the_model,
    behaviour.gradients_that_are_dropped_unused,
    behaviour.some_gradients_that_are_dropped,
    behaviour.clipping_and_then_more_gradients,
    behaviour.two_steps_over_one_gradient,
)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.replace("_", " "))
def test_loops(scenario: Callable[[Session], State | None], plan: str) -> None:
    check_equals_plain(scenario, 4, behaviour.BranchingGPT, plan=plan, local_size=2)


def test_reading_what_a_step_has_sent() -> None:
    check_equals_plain(a_look_at_parameters_after_the_step, 2, behaviour.BranchingGPT, plan="zero1")
