"""A model's training state leaves the device temporarily: nothing stays there, and training keeps its bits."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import Memory, Settings, comm
from npuzero.comm import World
from npuzero.errors import NpuZeroError, OutOfSpace, StateError
from npuzero.memory import MemorySpaces, ReleasableBuffer, SpaceOffload
from world.test_tiers import CASES, LOCAL_SIZE, PRECISIONS, SETTINGS, placed_plan
from world.toy import ToyGPT, TrainingRecipe, build_seeded_model, toy_param_groups
from world.train import CutSession, Session, State, assert_same_bits, run_cut

RECIPE = TrainingRecipe(steps=2, micro_batches=2, clip=0.5, groups=True)
Pause = Callable[[Session], None]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPUZERO_NVME_PATHS", str(tmp_path))


def leave_and_return(session: Session) -> None:
    """Leave the device and come back, if this is npuzero."""
    with npuzero.offloaded(session.model):
        report = npuzero.report(session.model)
        assert not any(report.held[Memory.DEVICE].values())
        assert sum(report.held[Memory.HOST].values()) >= report.bytes_moved["device>host"] > 0


def stay_on_device(session: Session) -> None:
    pass


def train_interrupted(
    session: Session, pause: Pause, between: Pause, kind: Any = torch.optim.AdamW, **options: Any
) -> State:
    """Train, with a pause at every supported place; ``between``: also between a forward and its backward."""
    groups = toy_param_groups(session.model, RECIPE) if kind is torch.optim.AdamW else None
    optimizer = session.optimizer(kind, groups, lr=1e-2, **options)
    norms = []
    pause(session)
    for step in range(RECIPE.steps):
        for micro_batch in range(RECIPE.micro_batches):
            loss = session.loss(step, micro_batch) / RECIPE.micro_batches
            between(session)
            loss.backward()
            pause(session)
        norms.append(session.clip(0.5))
        pause(session)
        optimizer.step()
        pause(session)
        optimizer.zero_grad()
        pause(session)
    return {"gradient norms": torch.stack(norms)}


def assert_unmoved(size: int, kind: Any = torch.optim.AdamW, optimizer: Any = None, **options: Any) -> None:
    scenario = partial(train_interrupted, kind=kind, **(optimizer or {}))
    expected = run_cut(partial(scenario, pause=stay_on_device, between=stay_on_device), size, ToyGPT, **options)
    found = run_cut(partial(scenario, pause=leave_and_return, between=leave_and_return), size, ToyGPT, **options)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


QUICK = [
    *(CASES[i] for i in (2, 4, 6)),
    ("zero0", "split", 1, "one chunk", None),
    ("zero1", "bf16", 2, "many chunks", None),
    ("zero3-keep", "8 bits", 3, "one chunk", None),
]


@pytest.mark.parametrize(("plan", "precision", "size", "settings", "where"), QUICK, ids=lambda value: str(value))
def test_no_bit_moves(plan: str, precision: str, size: int, settings: str, where: dict[str, Any] | None) -> None:
    """Between all calls: gradients are there or not, an update is under way or not, and whatever is far stays far."""
    row = placed_plan(plan, PRECISIONS[precision], size, **(where or {"memory": Memory.DEVICE}))
    assert_unmoved(size, plan=row, settings=SETTINGS[settings])


@pytest.mark.slow
@pytest.mark.parametrize("size", LOCAL_SIZE)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", [*npuzero.PRESETS, *npuzero.OFFLOADED, *npuzero.THINNED])
def test_under_every_plan(plan: str, precision: str, size: int) -> None:
    for settings in SETTINGS.values():
        assert_unmoved(size, plan=npuzero.Plan.preset(plan, precision=PRECISIONS[precision]), settings=settings)


@pytest.mark.parametrize(("plan", "size"), [("zero3", 2), ("zero1", 3), ("offload", 2)])
def test_states_that_torch_has_made_leave_too(plan: str, size: int) -> None:
    assert_unmoved(size, torch.optim.SGD, {"momentum": 0.9, "fused": False}, plan=plan)


def test_states_of_torchs_optimizers_are_counted() -> None:
    def rank(world: World) -> None:
        model = npuzero.zero(nn.Linear(64, 64, bias=False), world=world, stage=3)
        optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        with npuzero.offloaded(model):
            assert npuzero.report(model).held[Memory.HOST]["states"] == 64 * 64 * 4 // 2

    comm.run_threads(2, rank)


def build_offloaded_session(world: World, stage: int | str = 3, **options: Any) -> CutSession:
    return CutSession(
        build_seeded_model(), world, **({"stage": stage} if isinstance(stage, int) else {"plan": stage}), **options
    )


def refused_text(call: Callable[[], object]) -> str:
    with pytest.raises(NpuZeroError) as caught:
        call()
    assert type(caught.value) is StateError
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3, "offload3"])
def test_what_needs_the_state_says_so(stage: int | str, tmp_path: Path) -> None:
    """Raise on every rank at once; no state is damaged."""

    def rank(world: World) -> None:
        session = build_offloaded_session(world, stage)
        model, optimizer = session.model, session.optimizer(torch.optim.AdamW, lr=1e-2)
        parameter = model.norm.weight
        session.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        state, whole = optimizer.state_dict(), session.state()
        loss = session.loss()
        calls: dict[str, Callable[[], object]] = {
            "forward": session.loss,
            "backward": loss.backward,
            "optimizer.step": optimizer.step,
            "optimizer.state_dict": optimizer.state_dict,
            "load": lambda: optimizer.load_state_dict(state),
            "clip_grad_norm_": lambda: npuzero.clip_grad_norm_(model, 1.0),
            "grad_norms": lambda: npuzero.grad_norms(model),
            "full_gradient": lambda: npuzero.full_gradient(parameter),
            "full_state_dict": lambda: npuzero.full_state_dict(model),
            "load_full_state_dict": lambda: npuzero.load_full_state_dict(model, whole),
            "gathered": lambda: contextlib.ExitStack().enter_context(npuzero.gathered(model)),
            "reading": parameter.sum,
            "reading or writing": lambda: model.load_state_dict(whole),
            "save": lambda: npuzero.checkpoint.save(tmp_path / "saved", model, optimizer, step=1),
        }
        with npuzero.offloaded(model):
            for name, call in calls.items():
                text = refused_text(call)
                assert "offloaded" in text and "Leave the block" in text, (name, text)
            optimizer.zero_grad()
        loss = session.loss(1)
        loss.backward()
        optimizer.step()

    comm.run_threads(2, rank)


def test_it_is_refused_where_parameters_are_in_use() -> None:
    def rank(world: World) -> None:
        session = build_offloaded_session(world)
        model = session.model

        def enter(*_: object) -> None:
            with npuzero.offloaded(model):
                pass

        with npuzero.gathered(model):
            assert "inside npuzero.gathered()" in refused_text(enter)
        hook = model.norm.register_forward_hook(enter)
        assert "inside a forward" in refused_text(session.loss)
        hook.remove()
        loss = session.loss()
        loss.grad_fn.register_prehook(enter)
        assert "inside a backward" in refused_text(loss.backward)
        enter()
        session.loss().backward()

    comm.run_threads(1, rank)


def test_blocks_within_blocks_count_as_one() -> None:
    def rank(world: World) -> None:
        session = build_offloaded_session(world)
        with npuzero.offloaded(session.model):
            with npuzero.offloaded(session.model):
                pass
            assert not any(npuzero.report(session.model).held[Memory.DEVICE].values())
        session.loss()

    comm.run_threads(1, rank)


def test_an_exception_brings_it_back() -> None:
    def rank(world: World) -> State:
        session = build_offloaded_session(world)
        before = session.state()
        with pytest.raises(ZeroDivisionError), npuzero.offloaded(session.model):
            raise ZeroDivisionError
        assert_same_bits(session.state(), before)
        return before

    comm.run_threads(2, rank)


def test_a_model_may_go_inside() -> None:
    def rank(world: World) -> None:
        session = build_offloaded_session(world)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        session.loss().backward()
        optimizer.step()
        alive = weakref.ref(session.model)
        with npuzero.offloaded(session.model):
            del session, optimizer
            gc.collect()
            assert alive() is None

    comm.run_threads(1, rank)


class SharedBufferCounter(nn.Module):
    """A module with buffers that share memory, and one that numpy holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        both = torch.arange(6.0)
        self.register_buffer("all", both)
        self.register_buffer("last", both[4:])
        self.register_buffer("held", torch.ones(3))
        self.array = self.held.numpy()

    def forward(self, x: Tensor) -> Tensor:
        self.last += 1
        return self.linear(x)


def test_buffers_of_modules_leave_and_can_be_used_meanwhile() -> None:
    def rank(world: World) -> None:
        model = npuzero.zero(SharedBufferCounter(), world=world, stage=0)
        own = model.all
        with npuzero.offloaded(model):
            assert own.untyped_storage().nbytes() == 0
            assert model.all.tolist() == [0, 1, 2, 3, 4, 5] and model.held.tolist() == [1, 1, 1]
            model.last += 1
            assert dict(model.named_buffers())["all"].tolist() == [0, 1, 2, 3, 5, 6]
        assert model.all is own
        model(torch.ones(1, 4))
        assert model.all.tolist() == [0, 1, 2, 3, 6, 7] and model.array.tolist() == [1, 1, 1]

    comm.run_threads(1, rank)


def test_memory_goes_and_what_a_program_has_views_of_comes_back() -> None:
    """On the host addresses stay, and memory that is given back reads as zeros; nothing else has it."""

    def rank(world: World) -> None:
        model = npuzero.zero(nn.Linear(1024, 1024), world=world, stage=0)
        optimizer = npuzero.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        view = model.weight.detach()
        before, address = view.clone(), model.weight.data_ptr()
        pages = process_resident_bytes()
        with npuzero.offloaded(model):
            assert view.count_nonzero() == 0
            assert process_resident_bytes() < pages + 2**20, "each byte is on the host once"
        assert torch.equal(view, before) and model.weight.data_ptr() == address
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        assert not torch.equal(view, before)

    comm.run_threads(1, rank)


def process_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_the_limit_of_the_host_holds() -> None:
    """Nothing has moved, and training goes on."""

    def rank(world: World) -> None:
        session = build_offloaded_session(world, settings=Settings(host_bytes=1000))
        with pytest.raises(OutOfSpace, match="host_bytes"), npuzero.offloaded(session.model):
            pass
        session.loss().backward()
        session.optimizer(torch.optim.AdamW, lr=1e-2).step()
        assert Memory.HOST not in npuzero.report(session.model).held

    comm.run_threads(1, rank)


def test_reports_of_steps_are_as_ever() -> None:
    """Between steps an offload leaves no trace in the next step's bytes held, sent and moved."""

    def rank(world: World) -> None:
        session = build_offloaded_session(world)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(3):
            leave_and_return(session)
            session.loss(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        report, expected = npuzero.report(session.model), npuzero.predict(build_seeded_model(), 3, 2)
        assert (report.held, report.bytes_sent, report.bytes_moved) == (
            expected.held,
            expected.bytes_sent,
            expected.bytes_moved,
        )
        session.state()

    comm.run_threads(2, rank)


def test_what_finds_no_room_on_the_device_stays_on_the_host() -> None:
    """And comes back when it is tried again."""
    spaces = MemorySpaces(torch.device("cpu"))
    buffer = spaces[Memory.DEVICE].allocate(8, torch.float32, "states")
    buffer.copy_(torch.arange(8.0))
    full = True

    def take() -> None:
        if full:
            raise OutOfSpace("memory", expected="room", got="none", do="Wait.")

    block = ReleasableBuffer("buffers", torch.arange(4, dtype=torch.uint8), lambda: block.raw.zero_(), take)
    evacuation = SpaceOffload(spaces)
    evacuation.leave([block])
    assert spaces[Memory.DEVICE].held["states"] == 0 and evacuation.nbytes == 36
    with pytest.raises(OutOfSpace):
        evacuation.come_back()
    assert evacuation.nbytes == 36
    full = False
    evacuation.come_back()
    assert buffer.tolist() == list(range(8)) and block.raw.tolist() == [0, 1, 2, 3]
    assert evacuation.nbytes == 0 and Memory.HOST not in list(spaces)
