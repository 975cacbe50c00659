"""Updates that begin inside a step's last backward pass: the same bits, and an error for calls in between."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch

import npuzero
from npuzero import ConfigError, Memory, NpuZeroError, Settings, StateError, StorageError, comm, observe
from npuzero.api.model import engine_of
from npuzero.comm import World
from npuzero.memory.file import FileStore
from npuzero.observe import Events
from npuzero.shard.offload.offloaded_update import StagedChunk
from world.test_optimizers import optimizer_state
from world.test_tiers import HOST, NVME, PRECISIONS, folders, placed_plan
from world.toy import ToyGPT, build_seeded_model
from world.train import CutSession, Session, State, assert_same_bits, run_cut

__all__ = ["folders"]  # a fixture

SETTINGS = Settings(chunk_bytes=3000)


@dataclass(frozen=True)
class EarlyCourse:
    """Describe a training.

    Attributes:
        passes: backward passes of each step.
        alone: all but the last within ``no_sync``.
        absent: the step in which a block's parameter has no gradient.
        lion: use Lion instead of AdamW.
    """

    passes: tuple[int, ...] = (1, 1, 1, 1)
    alone: bool = False
    absent: int | None = None
    lion: bool = False


def train_early(course: EarlyCourse, early: bool | int, session: Session) -> State:
    """Train with options that change from step to step, in two groups; also return the flats that began in backward."""
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
def train_early_resident(course: EarlyCourse, plan: str, precision: str, size: int) -> list[State]:
    row = placed_plan(plan, PRECISIONS[precision], size, memory=Memory.DEVICE)
    return run_cut(partial(train_early, course, False), size, ToyGPT, plan=row)


def count_begun_flats(
    course: EarlyCourse,
    plan: str,
    precision: str,
    size: int,
    settings: Settings,
    early: bool | int = True,
    **where: Any,
) -> list[int]:
    """Return how many flats began inside backward, by step, on rank 0; check the bits against the resident run."""
    row = placed_plan(plan, PRECISIONS[precision], size, **where)
    found = run_cut(partial(train_early, course, early), size, ToyGPT, plan=row, settings=settings)
    counts = [mine.pop("begun").tolist() for mine in found]
    for mine, expected in zip(found, train_early_resident(course, plan, precision, size), strict=True):
        assert_same_bits(mine, {name: value for name, value in expected.items() if name != "begun"})
    return counts[0]


USUAL, LION = EarlyCourse(), EarlyCourse(lion=True)
ADDED, ALONE = EarlyCourse(passes=(2, 2, 2)), EarlyCourse(passes=(2, 3, 1), alone=True)
SHORT, ABSENT = EarlyCourse(passes=(2, 1, 2, 2)), EarlyCourse(absent=2)
CASES = {
    "files": (USUAL, "zero1", "fp32", 1, SETTINGS, {"memory": NVME}, [0, 3, 3, 3]),
    "Lion in files": (LION, "zero3", "8 bits", 3, SETTINGS, {"memory": NVME, "gradients": True}, [0, 3, 3, 3]),
    "added at home": (ADDED, "zero3", "bf16", 2, SETTINGS, {"gradients": True}, [0, 3, 3]),
    "a short step": (SHORT, "zero2", "split", 2, Settings(chunk_bytes=20000), {"share": 0.5}, [0, 0, 3, 3]),
    "alone": (ALONE, "zero3", "drawn", 2, SETTINGS, {"gradients": True, "share": 0.6}, [0, 3, 0]),
    "an absent gradient": (ABSENT, "zero1", "bf16", 2, SETTINGS, {"memory": NVME}, [0, 3, 2, 3]),
    "a sum under way": (SHORT, "zero0", "bf16", 2, SETTINGS, {"gradients": True}, [0, 0, 0, 2]),
    "four ranks": (USUAL, "hsdp", "fp16", 4, Settings(), {}, [0, 1, 1, 1]),
    "by the device": (USUAL, "zero0", "8 bits", 1, Settings(chunk_bytes=3000, update_on="device"), {}, [0, 3, 3, 3]),
    "no overlap": (USUAL, "zero3", "bf16", 2, Settings(chunk_bytes=3000, overlap=False), {}, [0, 0, 0, 0]),
    "on the device": (USUAL, "zero3", "bf16", 2, SETTINGS, {"memory": Memory.DEVICE}, [0, 0, 0, 0]),
}


@pytest.mark.parametrize(
    ("course", "plan", "precision", "size", "settings", "where", "begun"), CASES.values(), ids=CASES
)
def test_early_moves_no_bit(
    course: EarlyCourse,
    plan: str,
    precision: str,
    size: int,
    settings: Settings,
    where: dict[str, Any],
    begun: list[int],
) -> None:
    assert count_begun_flats(course, plan, precision, size, settings, **where) == begun


def a_step_begun(session: Session, early: bool | int = True) -> torch.optim.Optimizer:
    """Take a full step, and another up to the end of its backward, inside which its update has begun."""
    optimizer = npuzero.AdamW(session.model.parameters(), lr=1e-2, early=early)
    session.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    session.loss(1).backward()
    return optimizer


BETWEEN: dict[str, Callable[[Session, torch.optim.Optimizer], Any]] = {
    "a forward": lambda session, _: session.loss(2),
    "zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "parameters": lambda session, _: session.state(),
    "a parameter": lambda session, _: session.model.blocks[0].qkv.weight.sum(),
    "states": lambda _, optimizer: optimizer.state_dict(),
    "loading": lambda session, _: session.load(build_seeded_model().state_dict()),
    "gathered": lambda session, _: npuzero.gathered(session.model).__enter__(),
    "report": lambda session, _: npuzero.report(session.model),
}


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_who_comes_before_the_step_is_told(plan: str) -> None:
    """Each call is a StateError with the remedy; step() still ends the update, with the same bits."""

    def trained(between: bool, session: Session) -> State:
        optimizer = a_step_begun(session, early=between)
        if between:
            for call in BETWEEN.values():
                with pytest.raises(StateError, match=r"early=4|while it is sharded"):
                    call(session, optimizer)
            assert len(npuzero.grad_norms(session.model)) > 3, "gradients may be read"
        optimizer.step()
        optimizer.zero_grad()
        return optimizer_state(optimizer)

    row = placed_plan(plan, PRECISIONS["bf16"], 1)
    ((found,), (expected,)) = (
        run_cut(partial(trained, between), 1, ToyGPT, plan=row, settings=SETTINGS) for between in (True, False)
    )
    assert_same_bits(found, expected)


def test_a_backward_after_the_last_is_told() -> None:
    """Both forwards came first; the second backward adds nothing."""

    def rank(world: World) -> None:
        session = CutSession(
            build_seeded_model(), world, plan=placed_plan("zero3", PRECISIONS["bf16"], 1), settings=SETTINGS
        )
        optimizer = npuzero.AdamW(session.model.parameters(), early=True)
        for step in range(2):
            first, second = session.loss(step), session.loss(step, 1)
            first.backward()
            if step:
                with pytest.raises(StateError, match="no_sync"):
                    second.backward()
            optimizer.step() if not step else None

    comm.run_threads(1, rank)


def changes_lr(_: Session, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def drops_a_gradient(session: Session, _: torch.optim.Optimizer) -> None:
    session.model.blocks[2].out.bias.grad = None


@pytest.mark.parametrize("change", [changes_lr, drops_a_gradient])
def test_a_change_between_backward_and_step_is_told(change: Callable[..., None]) -> None:
    """The step raises and changes nothing further; every later call raises as well."""

    def rank(world: World) -> None:
        session = CutSession(
            build_seeded_model(), world, plan=placed_plan("zero1", PRECISIONS["bf16"], 1), settings=SETTINGS
        )
        optimizer = a_step_begun(session)
        change(session, optimizer)
        for call in (optimizer.step, optimizer.step, lambda: session.loss(2), optimizer.zero_grad):
            with pytest.raises(StateError, match="early"):
                call()

    comm.run_threads(1, rank)


def test_lr_may_be_set_back() -> None:
    def rank(world: World) -> State:
        session = CutSession(
            build_seeded_model(), world, plan=placed_plan("zero1", PRECISIONS["bf16"], 1), settings=SETTINGS
        )
        optimizer = a_step_begun(session)
        changes_lr(session, optimizer)
        with pytest.raises(StateError, match="set them back"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-2
        optimizer.step()
        return optimizer_state(optimizer)

    (state,) = comm.run_threads(1, rank)
    assert {int(value) for name, value in state.items() if name.endswith(".step")} == {2}


REFUSED: dict[str, Callable[[Session, torch.optim.Optimizer], Any]] = {
    "clip_grad_norm_": lambda session, _: session.clip(1.0),
    "clip_grad_value_": lambda session, _: npuzero.clip_grad_value_(session.model, 1.0),
    "skip_nonfinite_": lambda session, _: npuzero.skip_nonfinite_(session.model),
    "LossScaler.unscale_": lambda session, optimizer: used_scaler(session).unscale_(optimizer),
    "FiniteGuard": lambda session, _: npuzero.FiniteGuard(session.model),
}


def used_scaler(session: Session) -> Any:
    scaler = session.scaler()
    scaler.scale(torch.zeros(()))
    return scaler


@pytest.mark.parametrize("memory", [HOST, Memory.DEVICE], ids=["far", "near"])
def test_what_changes_gradients_is_refused(memory: Memory) -> None:
    """From the first step on, under every plan; not once the optimizer has gone."""

    def rank(world: World) -> None:
        row = placed_plan("zero1", PRECISIONS["bf16"], 1, memory=memory)
        session = CutSession(build_seeded_model(), world, plan=row, settings=SETTINGS)
        optimizer = npuzero.AdamW(session.model.parameters(), early=True)
        session.loss().backward()
        for name, call in REFUSED.items():
            with pytest.raises(ConfigError, match=f"(?s){name}.*without early=True"):
                call(session, optimizer)
        optimizer.step()
        del optimizer
        gc.collect()  # the exception held it
        session.loss(1).backward()
        session.clip(1.0)

    comm.run_threads(1, rank)


@pytest.mark.parametrize("early", [0, -1, 1.5, "yes", None])
def test_what_early_may_be(early: Any) -> None:
    with pytest.raises(ConfigError, match="how many backward passes"):
        npuzero.AdamW([torch.nn.Parameter(torch.ones(3))], early=early)


def test_plain_parameters_go_with_the_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = npuzero.Lion([parameter], early=True)
    parameter.square().sum().backward()
    optimizer.step()
    assert parameter.detach().ne(1).all()


def test_the_number_of_passes_may_be_said() -> None:
    """Then no step need be taken as a measure: after a short one, and a longer one is an error from the start."""

    def rank(world: World) -> list[int]:
        session = CutSession(
            build_seeded_model(), world, plan=placed_plan("zero1", PRECISIONS["bf16"], 1), settings=SETTINGS
        )
        optimizer = npuzero.AdamW(session.model.parameters(), early=2)
        begun = []
        for step, passes in enumerate((1, 1, 2)):
            for micro_batch in range(passes):
                session.loss(step, micro_batch).backward()
            begun.append(len(engine_of(session.model).early.begun))
            optimizer.step()
            optimizer.zero_grad()
        return begun

    assert comm.run_threads(1, rank) == [[0, 0, 3]]


class LateBiasGPT(ToyGPT):
    """Multiply the first block's input by a parameter of the last block, without a gradient for it."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        return super().run_blocks(x * self.blocks[2].out.bias.detach())


def test_a_parameter_that_backward_still_needs_is_not_changed_unseen() -> None:
    """torch raises, as for any tensor written since the forward."""

    def rank(world: World) -> None:
        session = CutSession(
            build_seeded_model(make=LateBiasGPT),
            world,
            plan=placed_plan("zero1", PRECISIONS["fp32"], 1),
            settings=SETTINGS,
        )
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            a_step_begun(session)

    comm.run_threads(1, rank)


def test_another_optimizers_step_is_told() -> None:
    def rank(world: World) -> None:
        session = CutSession(
            build_seeded_model(), world, plan=placed_plan("zero1", PRECISIONS["bf16"], 1), settings=SETTINGS
        )
        optimizer = a_step_begun(session)
        with pytest.raises(StateError, match="another's"):
            npuzero.AdamW(session.model.parameters()).step()
        optimizer.step()

    comm.run_threads(1, rank)


def test_a_disk_that_fails_inside_backward_ends_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise StorageError("write in a folder", expected="success", got="EIO", do="Look at the disk.")

    def rank(world: World) -> None:
        row = placed_plan("zero3", PRECISIONS["bf16"], 1, memory=NVME)
        session = CutSession(build_seeded_model(), world, plan=row, settings=SETTINGS)
        optimizer = npuzero.AdamW(session.model.parameters(), early=True)
        session.loss().backward()
        optimizer.step()
        session.state()
        optimizer.zero_grad()
        monkeypatch.setattr(FileStore, "write", fail)
        session.loss(1).backward()
        deadline = time.monotonic() + 30
        while not isinstance(caught_npuzero_error(optimizer.zero_grad), StorageError) and time.monotonic() < deadline:
            time.sleep(0.01)
        for call in (optimizer.step, lambda: session.loss(2), session.state, optimizer.step):
            assert isinstance(caught_npuzero_error(call), StorageError)

    comm.run_threads(1, rank)


def caught_npuzero_error(call: Callable[[], Any]) -> NpuZeroError | None:
    try:
        call()
    except NpuZeroError as error:
        return error
    return None


def test_what_a_step_holds_and_moves_is_the_same() -> None:
    """Of gradients on either side, over ranks, and in several passes."""

    def report(early: bool, world: World) -> npuzero.Report:
        row = placed_plan("zero3", PRECISIONS["8 bits"], 2, memory=NVME, gradients=True, share=0.7)
        session = CutSession(build_seeded_model(), world, plan=row, settings=SETTINGS)
        train_early(EarlyCourse(passes=(2, 2, 2)), early, session)
        return npuzero.report(session.model)

    for found, expected in zip(*(comm.run_threads(2, partial(report, early)) for early in (True, False)), strict=True):
        assert found.held == expected.held
        assert found.bytes_moved == expected.bytes_moved
        assert found.bytes_sent == expected.bytes_sent


@pytest.mark.parametrize("memory", [HOST, NVME])
def test_what_the_next_forward_wants_first_is_updated_first(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reorder all chunks that arrived while the lane was busy, except the lane's own chunk and the next one."""
    begun, over = threading.Event(), threading.Event()
    master = StagedChunk.master.fget
    assert master is not None

    def held(staged: StagedChunk) -> torch.Tensor:
        if threading.current_thread().name == "npuzero-update":
            begun.set()
            assert over.wait(30)
        return master(staged)

    def rank(world: World) -> None:
        row = placed_plan("zero3", PRECISIONS["bf16"], 1, memory=memory)
        session = CutSession(build_seeded_model(), world, plan=row, settings=SETTINGS)
        optimizer = npuzero.AdamW(session.model.parameters(), lr=1e-2, early=True)
        for step in range(2):
            if step:  # the lane is at a chunk of later blocks before the first is ready
                session.model.blocks[0].register_full_backward_pre_hook(lambda *_: None if begun.wait(30) else 1 / 0)
            begun.clear()
            over.clear()
            session.loss(step).backward()
            optimizer.step()
            over.set()
            optimizer.zero_grad()
            session.state()

    monkeypatch.setattr(StagedChunk, "master", property(held))
    with observe.recording(Events()) as sink:
        comm.run_threads(1, rank)
    found = [int(event.name) for event in sink.events if event.category == "update chunk"]
    count = len(found) // 2
    assert found[:count] == sorted(found[:count]), "all with step()"
    order = found[count:]
    assert count > 4 and order[0] > 0 and order[2:] == sorted(order[2:])


#: Where ranks reduce at the boundary only, a step begins early if it has as many passes as the previous one.
ALONE_AGAIN = EarlyCourse(passes=(2, 2, 3, 1), alone=True)
COURSES = {"usual": USUAL, "added": ADDED, "alone": ALONE_AGAIN, "short": SHORT, "absent": ABSENT, "Lion": LION}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2", "zero3", "zero3-keep"])
@pytest.mark.parametrize("course", COURSES)
def test_every_course(course: str, plan: str, size: int) -> None:
    gradients = plan in ("zero0", "zero2", "zero3", "zero3-keep")
    for precision, memory, share in (("fp32", HOST, 1.0), ("8 bits", NVME, 0.6), ("drawn", NVME, 1.0)):
        where = {"memory": memory, "share": share, "gradients": gradients}
        begun = count_begun_flats(COURSES[course], plan, precision, size, SETTINGS, **where)
        assert any(begun), "something began inside backward"
