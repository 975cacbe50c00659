"""States on the host or in files, gradients on the host: equal bits; held and moved bytes as predicted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import npuzero
from npuzero import Memory, Plan, Precision, Report, Settings, comm
from npuzero.comm import World
from world.test_chunks import train_chunked as awkward
from world.test_optimizers import optimizer_state
from world.toy import ToyGPT, TrainingRecipe, build_seeded_model
from world.train import CutSession, Session, State, assert_same_bits, run_cut, train_by_recipe

PRECISIONS = {
    "fp32": Precision(torch.float32),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
    "split": Precision(torch.bfloat16, masters="split"),
    "8 bits": Precision(torch.bfloat16, masters="split", moments="int8"),
    "drawn": Precision(torch.bfloat16, masters="none", moments="int8"),
}
FOUR = TrainingRecipe(steps=3, micro_batches=4, clip=0.5, groups=True)
#: Ranks, and how many of them share a group.
LOCAL_SIZE = {1: 1, 2: 1, 3: 3, 4: 2}
SETTINGS = {
    "one chunk": Settings(),
    "many chunks": Settings(chunk_bytes=3000),
    "no overlap": Settings(overlap=False, chunk_bytes=20000),
    "by the device": Settings(chunk_bytes=3000, update_on="device"),
}


HOST, NVME = Memory.HOST, Memory.NVME


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the folders for files of a plan: alternately two."""
    names = [tmp_path / "one", tmp_path / "two"]
    for name in names:
        name.mkdir()
    monkeypatch.setenv("NPUZERO_NVME_PATHS", ":".join(map(str, names)))


def placed_plan(
    plan: str,
    precision: Precision,
    size: int,
    gradients: bool = False,
    share: float = 1.0,
    memory: Memory = HOST,
    parameters: Memory = Memory.DEVICE,
) -> Plan:
    """Return the preset with states off the device, and gradients and parameters if requested."""
    row = Plan.preset(plan, precision=precision, local_size=LOCAL_SIZE[size])
    return replace(
        row,
        parameters=replace(row.parameters, memory=parameters),
        gradients=replace(row.gradients, memory=HOST if gradients else Memory.DEVICE),
        states=replace(row.states, memory=memory, share=share),
    )


@cache
def train_resident(scenario: Any, plan: str, precision: str, size: int) -> list[State]:
    row = Plan.preset(plan, precision=PRECISIONS[precision], local_size=LOCAL_SIZE[size])
    return run_cut(scenario, size, ToyGPT, plan=row)


def assert_as_resident(scenario: Any, plan: str, precision: str, size: int, settings: Settings, **where: Any) -> None:
    row = placed_plan(plan, PRECISIONS[precision], size, **where)
    found = run_cut(scenario, size, ToyGPT, plan=row, settings=settings)
    for mine, expected in zip(found, train_resident(scenario, plan, precision, size), strict=True):
        assert_same_bits(mine, expected)


CASES = [
    ("zero0", "bf16", 1, "many chunks", {"gradients": True}),
    ("zero1", "fp32", 2, "no overlap", {}),
    ("zero2", "8 bits", 3, "one chunk", {"gradients": True}),
    ("zero3", "drawn", 2, "many chunks", {"gradients": True}),
    ("hsdp", "split", 4, "many chunks", {"gradients": True, "share": 0.3}),
    ("zero3", "bf16", 2, "one chunk", {"share": 0.7}),
    ("zero3", "8 bits", 3, "many chunks", {"memory": NVME, "gradients": True}),
    ("zero1", "fp32", 2, "one chunk", {"memory": NVME}),
    ("zero2", "bf16", 2, "no overlap", {"memory": NVME, "share": 0.6}),
    ("zero3", "bf16", 2, "by the device", {"gradients": True}),
    ("zero1", "8 bits", 2, "by the device", {"memory": NVME}),
    ("zero0", "bf16", 1, "many chunks", {"parameters": HOST}),
    ("zero3", "split", 3, "many chunks", {"parameters": HOST, "gradients": True}),
    ("hpz", "fp32", 4, "no overlap", {"parameters": HOST, "gradients": True}),
    ("zero3-keep", "8 bits", 1, "by the device", {"parameters": HOST, "memory": NVME}),
    ("zero3", "bf16", 2, "many chunks", {"parameters": NVME, "memory": NVME, "gradients": True}),
    ("zero3", "fp32", 3, "one chunk", {"parameters": NVME}),
    ("zero0", "drawn", 1, "many chunks", {"parameters": NVME, "memory": NVME}),
    ("hpz", "split", 4, "no overlap", {"parameters": NVME, "memory": NVME}),
]
four = partial(train_by_recipe, recipe=FOUR)


@pytest.mark.parametrize(("plan", "precision", "size", "settings", "where"), CASES, ids=lambda value: str(value))
def test_where_states_rest_moves_no_bit(
    plan: str, precision: str, size: int, settings: str, where: dict[str, Any]
) -> None:
    """Groups, clipping, parameters without a gradient, an overflow that only the device knows of; amsgrad."""
    assert_as_resident(awkward, plan, precision, size, SETTINGS[settings], **where)


@pytest.mark.parametrize(("plan", "precision", "size", "settings", "where"), CASES[2:5], ids=lambda value: str(value))
def test_micro_batches_add_up_at_home(
    plan: str, precision: str, size: int, settings: str, where: dict[str, Any]
) -> None:
    assert_as_resident(four, plan, precision, size, SETTINGS[settings], **where)


def train_and_report(world: World, plan: Plan, recipe: TrainingRecipe, settings: Settings) -> Report:
    session = CutSession(build_seeded_model(), world, plan=plan, settings=settings)
    train_by_recipe(session, recipe)
    session.state()  # a rank that leaves now would end the last step's pending gather for its peers
    return npuzero.report(session.model)


@pytest.mark.parametrize("recipe", [TrainingRecipe(steps=3), FOUR], ids=["plain", "micro-batches, clipped"])
@pytest.mark.parametrize(
    ("plan", "precision", "settings", "where"),
    [
        ("zero3", "bf16", "one chunk", {}),
        ("zero2", "8 bits", "many chunks", {"gradients": True}),
        ("hsdp", "split", "no overlap", {"gradients": True, "share": 0.5}),
        ("zero1", "fp32", "many chunks", {"share": 0.5}),
        ("zero3", "8 bits", "many chunks", {"memory": NVME, "gradients": True}),
        ("hsdp", "bf16", "no overlap", {"memory": NVME, "share": 0.5}),
        ("zero3", "bf16", "by the device", {"memory": NVME, "gradients": True}),
        ("hpz", "split", "many chunks", {"parameters": HOST, "gradients": True}),
        ("zero3-keep", "bf16", "no overlap", {"parameters": HOST, "memory": NVME}),
        ("hsdp", "bf16", "many chunks", {"parameters": NVME, "memory": NVME, "gradients": True}),
        ("zero3", "split", "no overlap", {"parameters": NVME}),
    ],
    ids=lambda value: str(value),
)
def test_report_equals_predict(
    plan: str, precision: str, settings: str, where: dict[str, Any], recipe: TrainingRecipe
) -> None:
    row = placed_plan(plan, PRECISIONS[precision], 4, **where)
    facts = {"micro_batches": recipe.micro_batches, "clip": recipe.clip is not None}
    expected = npuzero.predict(build_seeded_model(), row, 4, settings=SETTINGS[settings], **facts)
    for report in comm.run_threads(4, lambda world: train_and_report(world, row, recipe, SETTINGS[settings])):
        assert report.held == expected.held
        assert report.bytes_sent == expected.bytes_sent
        assert report.bytes_moved == expected.bytes_moved
    assert sum(expected.bytes_moved.values()) > 0


def test_what_is_read_between_steps_changes_no_report() -> None:
    """Reading parameters ends the R4 that a step has left to the next one; it counts all the same."""
    row = placed_plan("zero2", PRECISIONS["bf16"], 2)

    def rank(world: World) -> Report:
        session = CutSession(build_seeded_model(), world, plan=row)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(3):
            session.state()
            session.loss(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.state()
        return npuzero.report(session.model)

    for report in comm.run_threads(2, rank):
        assert report.bytes_sent == npuzero.predict(build_seeded_model(), row, 2).bytes_sent


def train_torch_sgd(session: Session) -> State:
    optimizer = session.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, fused=False)
    for step in range(3):
        session.loss(step).backward()
        session.clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer_state(optimizer)


@pytest.mark.parametrize(("plan", "precision", "gradients"), [("zero3", "bf16", True), ("zero1", "fp32", False)])
def test_torchs_optimizers_update_on_the_host(plan: str, precision: str, gradients: bool) -> None:
    assert_as_resident(train_torch_sgd, plan, precision, 2, Settings(), gradients=gradients)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_torchs_optimizers_update_parameters_that_rest_there(precision: str) -> None:
    assert_as_resident(train_torch_sgd, "zero3", precision, 2, Settings(), parameters=HOST)
