"""Updates that begin inside the last backward pass of a step: the same bits, and an error for who comes between."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch

import npuzero
from npuzero import Memory, Settings
from npuzero.api.model import engine_of
from world.test_optimizers import optimizer_state
from world.test_tiers import NVME, PRECISIONS, folders, placed
from world.toy import ToyGPT
from world.train import Session, State, assert_same_bits, run_cut

__all__ = ["folders"]  # a fixture

SETTINGS = Settings(chunk_bytes=3000)


@dataclass(frozen=True)
class Course:
    """How a model is trained.

    Attributes:
        passes: backward passes of each step.
        alone: all but the last within ``no_sync``.
        absent: the step in which a block's parameter has no gradient.
        lion: in the place of AdamW.
    """

    passes: tuple[int, ...] = (1, 1, 1, 1)
    alone: bool = False
    absent: int | None = None
    lion: bool = False


def trained(course: Course, early: bool | int, session: Session) -> State:
    """Options change from step to step, in two groups; at the end also which flats began inside backward."""
    kind: Any = npuzero.Lion if course.lion else npuzero.AdamW
    odd, even = list(session.model.parameters())[::2], list(session.model.parameters())[1::2]
    optimizer = kind([{"params": odd}, {"params": even, "weight_decay": 0.1}], lr=1e-3, early=early)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) ** 2)
    begun = []
    for step, passes in enumerate(course.passes):
        for micro_batch in range(passes):
            alone = course.alone and micro_batch + 1 < passes
            with session.no_sync() if alone else contextlib.nullcontext():
                frozen = session.model.blocks[2].out.bias
                frozen.requires_grad_(step != course.absent)
                session.loss(step, micro_batch).backward()
        begun.append(len(engine_of(session.model).early.begun))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {"begun": torch.tensor(begun), **optimizer_state(optimizer)}


@cache
def resident(course: Course, plan: str, precision: str, size: int) -> list[State]:
    row = placed(plan, PRECISIONS[precision], size, memory=Memory.DEVICE)
    return run_cut(partial(trained, course, False), size, ToyGPT, plan=row)


def begun_of(
    course: Course, plan: str, precision: str, size: int, settings: Settings, early: bool | int = True, **where: Any
) -> list[int]:
    """How many flats began inside backward, step by step, on rank 0; the bits are the resident run's."""
    row = placed(plan, PRECISIONS[precision], size, **where)
    found = run_cut(partial(trained, course, early), size, ToyGPT, plan=row, settings=settings)
    counts = [mine.pop("begun").tolist() for mine in found]
    for mine, expected in zip(found, resident(course, plan, precision, size), strict=True):
        assert_same_bits(mine, {name: value for name, value in expected.items() if name != "begun"})
    return counts[0]


USUAL, LION = Course(), Course(lion=True)
ADDED, ALONE = Course(passes=(2, 2, 2)), Course(passes=(2, 3, 1), alone=True)
SHORT, ABSENT = Course(passes=(2, 1, 2, 2)), Course(absent=2)
CASES = [
    (USUAL, "zero1", "fp32", 1, SETTINGS, {"memory": NVME}, [0, 3, 3, 3]),
    (LION, "zero3", "8 bits", 3, SETTINGS, {"memory": NVME, "gradients": True}, [0, 3, 3, 3]),
    (ADDED, "zero3", "bf16", 2, SETTINGS, {"gradients": True}, [0, 3, 3]),
    (SHORT, "zero2", "split", 2, Settings(chunk_bytes=20000), {"share": 0.5}, [0, 0, 3, 3]),
    (ALONE, "zero3", "drawn", 2, SETTINGS, {"gradients": True, "share": 0.6}, [0, 3, 0]),
    (ABSENT, "zero1", "bf16", 2, SETTINGS, {"memory": NVME}, [0, 3, 2, 3]),
    (USUAL, "hsdp", "fp16", 4, Settings(), {}, [0, 1, 1, 1]),
    (USUAL, "zero0", "8 bits", 1, Settings(chunk_bytes=3000, update_on="device"), {}, [0, 3, 3, 3]),
    (USUAL, "zero3", "bf16", 2, Settings(chunk_bytes=3000, overlap=False), {}, [0, 0, 0, 0]),
    (USUAL, "zero3", "bf16", 2, SETTINGS, {"memory": Memory.DEVICE}, [0, 0, 0, 0]),
]


@pytest.mark.parametrize(("course", "plan", "precision", "size", "settings", "where", "begun"), CASES, ids=str)
def test_early_moves_no_bit(
    course: Course, plan: str, precision: str, size: int, settings: Settings, where: dict[str, Any], begun: list[int]
) -> None:
    assert begun_of(course, plan, precision, size, settings, **where) == begun
