"""Calls of a program right after a step, while states off the device are still updated; and updates that fail."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import npuzero
from npuzero import Memory, Placement, Plan, Settings, StateError, StorageError, comm
from npuzero.api.model import engine_of
from npuzero.comm import World
from npuzero.device import AsyncHandle
from npuzero.memory.file import FileStore
from npuzero.plan import RING_SLOTS
from npuzero.shard.offload.offloaded_update import StagedChunk
from world.test_optimizers import optimizer_state
from world.test_tiers import HOST, NVME, PRECISIONS, folders, placed_plan
from world.toy import ToyGPT, build_seeded_model
from world.train import CutSession, Session, State, assert_same_bits, run_cut

__all__ = ["folders"]  # a fixture

SETTINGS = Settings(chunk_bytes=3000)
PLACES = [
    ("zero3", {"memory": HOST, "gradients": True}),
    ("zero1", {"memory": NVME}),
    ("zero3", {"memory": NVME, "parameters": NVME}),
]
ids = ["gradients and states on the host", "states in files", "parameters in files, too"]


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow every chunk down, so that a call that does not wait for it comes early."""
    master = StagedChunk.master.fget
    assert master is not None

    def late(staged: StagedChunk) -> torch.Tensor:
        if threading.current_thread().name == "npuzero-update":
            time.sleep(0.001)
        return master(staged)

    monkeypatch.setattr(StagedChunk, "master", property(late))


def make_after_step_scenario(
    what: Callable[[Session, torch.optim.Optimizer], State | None],
) -> Callable[[Session], State]:
    """Run a loop that does ``what`` right after each step; all results count."""

    def scenario(session: Session) -> State:
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        found: State = {}
        for step in range(3):
            session.loss(step).backward()
            session.clip(0.5)
            optimizer.step()
            seen = what(session, optimizer) or {}
            found |= {f"{step}: {name}": value.detach().clone() for name, value in seen.items()}
        return found

    return scenario


def drops_gradients(session: Session, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def drops_and_accumulates(session: Session, optimizer: torch.optim.Optimizer) -> None:
    """Without dropping every other time: gradients add up, scaled as they were."""
    if len(optimizer.state_dict()["state"]) % 2:
        optimizer.zero_grad()


def shows_parameters(session: Session, optimizer: torch.optim.Optimizer) -> State:
    optimizer.zero_grad()
    return session.state()


def shows_states(session: Session, optimizer: torch.optim.Optimizer) -> State:
    optimizer.zero_grad()
    return optimizer_state(optimizer)


def loads_own_states(session: Session, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()


def loads_parameters(session: Session, optimizer: torch.optim.Optimizer) -> None:
    session.load(session.state())
    optimizer.zero_grad()


def writes_parameters(session: Session, optimizer: torch.optim.Optimizer) -> None:
    with npuzero.gathered(session.model), torch.no_grad():
        for parameter in session.model.parameters():
            parameter.mul_(0.5)
    optimizer.zero_grad()


def evaluates_after_step(session: Session, optimizer: torch.optim.Optimizer) -> State:
    optimizer.zero_grad()
    with torch.no_grad():
        return {"loss": session.loss(99)}


def looks_at_gradients(session: Session, optimizer: torch.optim.Optimizer) -> State:
    norms = npuzero.grad_norms(session.model)
    optimizer.zero_grad()
    return {name: torch.tensor(norm) for name, norm in norms.items()}


@pytest.mark.checkered
@pytest.mark.parametrize(("plan", "where"), PLACES, ids=ids)
@pytest.mark.parametrize(
    "what",
    [
        drops_gradients,
        drops_and_accumulates,
        shows_parameters,
        shows_states,
        loads_own_states,
        loads_parameters,
        writes_parameters,
        evaluates_after_step,
        looks_at_gradients,
    ],
    ids=lambda what: what.__name__,
)
@pytest.mark.usefixtures("slowly")
def test_right_after_a_step(what: Any, plan: str, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npuzero.shard.step.step_boundary.LENT_BYTES", 1)
    options = {"local_size": 1, "precision": "bf16-split"}
    row = placed_plan(plan, PRECISIONS["split"], 2, **where)
    found = run_cut(make_after_step_scenario(what), 2, ToyGPT, plan=row, settings=SETTINGS)
    for mine, expected in zip(
        found, run_cut(make_after_step_scenario(what), 2, ToyGPT, plan=plan, **options), strict=True
    ):
        assert_same_bits(mine, expected)


@pytest.mark.usefixtures("slowly")
def test_a_parameter_is_read_when_it_is_updated() -> None:
    def rank(world: World) -> tuple[State, State]:
        session = CutSession(
            build_seeded_model(), world, plan=placed_plan("zero0", PRECISIONS["bf16"], 1), settings=SETTINGS
        )
        train_a_step(session)
        read = {name: parameter.detach().clone() for name, parameter in session.model.named_parameters()}
        return read, session.state()

    ((read, state),) = comm.run_threads(1, rank)
    assert_same_bits(read, {name: state[name] for name in read})


class LateWrite(AsyncHandle):
    """A write that begins when a thread waits for it."""

    def __init__(self, write: Callable[[], AsyncHandle]) -> None:
        self._write = write
        self._begun: AsyncHandle | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            self._begun = self._begun or self._write()
        self._begun.wait()

    def done(self) -> bool:
        return self._begun is not None and self._begun.done()


@pytest.mark.parametrize("parameters", [Memory.DEVICE, NVME])
def test_a_slot_is_filled_again_and_parameters_are_read_when_they_are_stored(
    parameters: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = placed_plan("zero3", PRECISIONS["bf16"], 1, memory=NVME, parameters=parameters)
    expected = run_cut(make_after_step_scenario(drops_gradients), 1, ToyGPT, plan=row, settings=SETTINGS)
    write = FileStore.write
    monkeypatch.setattr(FileStore, "write", lambda self, *where: LateWrite(lambda: write(self, *where)))
    for mine, other in zip(
        run_cut(make_after_step_scenario(drops_gradients), 1, ToyGPT, plan=row, settings=SETTINGS),
        expected,
        strict=True,
    ):
        assert_same_bits(mine, other)


def test_what_an_update_reads_first_is_read_when_the_one_before_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as the rings hold, once; again where the program has opened a state since, and may have written."""
    reads: list[int] = []
    read = FileStore.read
    monkeypatch.setattr(FileStore, "read", lambda self, *where: [reads.append(where[0]), read(self, *where)][1])

    def count(call: Callable[[], Any]) -> int:
        reads.clear()
        call()
        return len(reads)

    def rank(world: World) -> tuple[int, list[int]]:
        row = placed_plan("zero3", PRECISIONS["bf16"], 1, memory=NVME)
        session = CutSession(build_seeded_model(), world, plan=row, settings=SETTINGS)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()
            npuzero.report(session.model)

        session.loss().backward()
        update()
        found = [count(lambda: session.loss(1).backward()), count(update), count(optimizer.state_dict)]
        session.loss(2).backward()
        return len(engine_of(session.model).far.stream.chunks), [*found, count(update)]

    ((chunks, (backward, steady, shown, opened)),) = comm.run_threads(1, rank)
    assert chunks > RING_SLOTS and backward == 0 and shown > 0
    assert steady == 2 * chunks, "masters and moments, some of them for the next update"
    assert opened == steady + RING_SLOTS, "the moments that were read for it, again"


@pytest.mark.parametrize(("plan", "where"), PLACES, ids=ids)
@pytest.mark.usefixtures("slowly")
def test_a_model_may_go_while_it_is_updated(plan: str, where: dict[str, Any]) -> None:
    def rank(world: World) -> weakref.ref[Any]:
        session = CutSession(
            build_seeded_model(), world, plan=placed_plan(plan, PRECISIONS["bf16"], 2, **where), settings=SETTINGS
        )
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        session.loss().backward()
        optimizer.step()
        return weakref.ref(engine_of(session.model))

    engines = comm.run_threads(2, rank)
    deadline = time.monotonic() + 30
    while any(engine() is not None for engine in engines) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert [engine() for engine in engines] == [None, None]


def list_update_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "npuzero-update"]


def test_no_thread_stays() -> None:
    row = placed_plan("zero0", PRECISIONS["bf16"], 1)
    comm.run_threads(
        1, lambda world: train_a_step(CutSession(build_seeded_model(), world, plan=row, settings=SETTINGS))
    )
    deadline = time.monotonic() + 30
    while list_update_threads() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not list_update_threads()


def train_a_step(session: CutSession, step: int = 0) -> None:
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    session.loss(step).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_disk_that_fails_ends_training(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise at the next wait, and at every later one: no step continues from states of two different steps."""

    tried = []

    def fail(*arguments: Any) -> Any:
        tried.append(arguments)
        raise StorageError("write in a folder", expected="success", got="EIO", do="Look at the disk.")

    def rank(world: World) -> list[str]:
        settings = SETTINGS.replace(overlap=overlap)
        session = CutSession(
            build_seeded_model(),
            world,
            plan=placed_plan("zero3", PRECISIONS["bf16"], 1, memory=NVME),
            settings=settings,
        )
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        session.loss().backward()
        optimizer.step()
        session.state()
        monkeypatch.setattr(FileStore, "write", fail)
        session.loss(1).backward()
        said = []
        for call in (optimizer.step, lambda: session.loss(2), session.state, optimizer.state_dict, optimizer.step):
            try:
                call()
            except StorageError as error:
                said.append(error.got)
        return said

    (said,) = comm.run_threads(1, rank)
    assert said == ["EIO"] * (5 if not overlap else 4)
    assert len(tried) == 1, "after a chunk that failed none is updated"


def test_an_update_that_breaks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(staged: StagedChunk) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    def rank(world: World) -> None:
        row = placed_plan("zero1", PRECISIONS["bf16"], 1)
        session = CutSession(build_seeded_model(), world, plan=row, settings=SETTINGS)
        monkeypatch.setattr(StagedChunk, "master", property(broken))
        train_a_step(session)
        with pytest.raises(StateError, match="no such kernel"):
            session.loss(1)
        with pytest.raises(StateError, match="last checkpoint"):
            session.state()

    comm.run_threads(1, rank)


@pytest.mark.parametrize(("plan", "where"), PLACES, ids=ids)
def test_a_steady_step_allocates_nothing(plan: str, where: dict[str, Any]) -> None:
    def rank(world: World) -> list[list[int]]:
        session = CutSession(
            build_seeded_model(), world, plan=placed_plan(plan, PRECISIONS["bf16"], 2, **where), settings=SETTINGS
        )
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        made = []
        for step in range(5):
            for micro_batch in range(2):
                session.loss(step, micro_batch).backward()
            session.clip(0.5)
            optimizer.step()
            optimizer.zero_grad()
            made.append([space.allocations for space in engine_of(session.model).spaces.values()])
        session.state()
        return made

    for made in comm.run_threads(2, rank):
        assert made[1] == made[-1]


def test_memories_of_units_may_differ() -> None:
    """One on the device, one on the host, one in files; and all of it on the device."""
    here = Plan.preset("zero3", local_size=1)
    host, files = (
        Plan(states=Placement(here.states.axes, memory), gradients=here.gradients, local_size=1, name=memory.value)
        for memory in (Memory.HOST, Memory.NVME)
    )
    plans = {"blocks.0": host, "blocks.2": files}
    found = run_cut(
        make_after_step_scenario(drops_gradients), 2, ToyGPT, plan=here, unit_plans=plans, settings=SETTINGS
    )
    for mine, expected in zip(
        found, run_cut(make_after_step_scenario(drops_gradients), 2, ToyGPT, plan=here), strict=True
    ):
        assert_same_bits(mine, expected)
