"""Updates that take effect a step late: the same bits as by hand, and the calls of a program before they do."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import npuzero
from npuzero import ConfigError, Memory, Plan, Settings, StateError, StorageError, checkpoint, comm
from npuzero.comm import World
from npuzero.memory.file import FileStore
from npuzero.shard.offload.offloaded_update import StagedChunk
from world.late import HandSession, LateSession, PlainLateSession
from world.test_chunks import PRECISIONS
from world.test_optimizers import optimizer_state
from world.test_tiers import folders
from world.test_tiers_lane import (
    drops_and_accumulates,
    drops_gradients,
    evaluates_after_step,
    looks_at_gradients,
    make_after_step_scenario,
    shows_parameters,
    shows_states,
    slowly,
)
from world.toy import ToyGPT, TrainingRecipe, build_seeded_model, toy_param_groups
from world.train import Session, State, assert_same_bits, assert_states_close, run_cut

__all__ = ["folders", "slowly"]  # fixtures

SETTINGS = {
    "one chunk": Settings(),
    "many chunks": Settings(chunk_bytes=3000),
    "no overlap": Settings(overlap=False, chunk_bytes=20000),
    "by the device": Settings(chunk_bytes=3000, update_on="device"),
}
MANY = SETTINGS["many chunks"]
ALL = ("node", "local")


def delayed_plan(row: str = "zero2", memory: Memory = Memory.HOST, **options: Any) -> Plan:
    """Return the row with its states in that memory, gradients on the host, and updates a step late."""
    plan = Plan.preset(row, **options)
    gradients, states = replace(plan.gradients, memory=Memory.HOST), replace(plan.states, memory=memory)
    return replace(plan, gradients=gradients, states=states, lag=1)


def train_delayed(
    session: Any, steps: int = 5, micro_batches: int = 2, clip: float | None = 0.5, scaled: bool = True
) -> State:
    """Train with groups, varying lr, parameters without a gradient in some steps, and overflows known to the device."""
    optimizer = session.optimizer(
        torch.optim.AdamW, toy_param_groups(session.model, TrainingRecipe(groups=True)), lr=1e-2
    )
    scaler = session.scaler(init_scale=8.0, growth_interval=2) if scaled else None
    even = [p for p in session.model.parameters() if p.requires_grad][::2]
    seen: State = {}
    for step in range(steps):
        for micro_batch in range(micro_batches):
            loss = session.loss(step, micro_batch) * (float("inf") if scaled and step == 2 else 1.0) / micro_batches
            (scaler.scale(loss) if scaler else loss).backward()
        for parameter in even if step % 2 else ():
            parameter.grad = None
        if scaler:
            scaler.unscale_(optimizer)
        if clip is not None and step != 2:
            session.clip(clip)
        scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
        session.stepped()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
        seen |= {f"{step}: {name}": value.clone() for name, value in session.seen().items()}
    session.ends()
    return seen | session.seen()


def delayed_by_hand(size: int, precision: str, gradients: bool, **how: Any) -> list[State]:
    """With everything on the device; ``gradients``: sharded, so that ranks are summed before micro-batches are."""
    options = {"plan": "zero2" if gradients else "zero0", "precision": PRECISIONS[precision]}
    return comm.run_threads(
        size, lambda world: train_delayed(HandSession(build_seeded_model(), world, **options), **how)
    )


def assert_as_by_hand(plan: Plan, size: int, precision: str, settings: Settings, **how: Any) -> None:
    def rank(world: World) -> State:
        return train_delayed(LateSession(build_seeded_model(), world, plan=plan, settings=settings), **how)

    expectations = delayed_by_hand(size, precision, bool(plan.gradients.axes), **how)
    for found, expected in zip(comm.run_threads(size, rank), expectations, strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize(
    ("row", "precision", "size", "settings", "memory"),
    [
        ("zero0", "fp32", 1, "many chunks", Memory.HOST),
        ("zero2", "8 bits", 3, "one chunk", Memory.HOST),
        ("zero3", "bf16", 2, "many chunks", Memory.NVME),
        ("zero3", "split", 2, "no overlap", Memory.HOST),
        ("zero2", "drawn", 2, "by the device", Memory.HOST),
    ],
    ids=str,
)
def test_as_by_hand(row: str, precision: str, size: int, settings: str, memory: Memory) -> None:
    assert_as_by_hand(delayed_plan(row, memory, precision=PRECISIONS[precision]), size, precision, SETTINGS[settings])


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("settings", SETTINGS)
def test_as_by_hand_in_any_case(size: int, precision: str, settings: str) -> None:
    """Every precision, with and without clipping, accumulation and a scaler; gradients and states in any memory."""
    for i, (micro_batches, clip, scaled) in enumerate([(1, None, False), (3, 0.5, False), (1, 0.5, True)]):
        how = {"steps": 6, "micro_batches": micro_batches, "clip": clip, "scaled": scaled}
        memory = (Memory.HOST, Memory.NVME)[i % 2]
        for row in ("zero2", "zero3", "hpz", "zero0"):
            plan = delayed_plan(row, memory, precision=PRECISIONS[precision], local_size=1 if size == 2 else size)
            assert_as_by_hand(plan, size, precision, SETTINGS[settings], **how)


@pytest.mark.parametrize("size", [1, 2])
def test_as_plain_torch(size: int) -> None:
    how = {"scaled": False}
    expected = train_delayed(PlainLateSession(build_seeded_model(), range(size), size), **how)
    for found in comm.run_threads(
        size, lambda world: train_delayed(LateSession(build_seeded_model(), world, plan="delayed"), **how)
    ):
        assert_states_close(found, expected)


def test_the_first_step_changes_nothing_and_one_without_gradients_ends_what_is_pending() -> None:
    def rank(world: World) -> list[State]:
        session = LateSession(build_seeded_model(), world, plan="delayed", precision="bf16-split")
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        states = [session.state()]
        for do in (optimizer.step, optimizer.step, optimizer.step, lambda: npuzero.apply_pending(session.model)):
            if len(states) == 1:
                session.loss().backward()
            do()
            optimizer.zero_grad()
            states.append(session.state())
        return states

    for first, second, *others in comm.run_threads(2, rank):
        assert_same_bits(first, second)
        assert not torch.equal(others[0]["blocks.0.qkv.weight"], first["blocks.0.qkv.weight"])
        for other in others[1:]:
            assert_same_bits(other, others[0])


class HeldUpdates:
    """Hold updates back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.met = threading.Event()
        master = StagedChunk.master.fget
        assert master is not None

        def held(staged: StagedChunk) -> torch.Tensor:
            if threading.current_thread().name == "npuzero-update":
                self.met.set()
                assert self.go.wait(20)
            return master(staged)

        monkeypatch.setattr(StagedChunk, "master", property(held))


def test_neither_forward_nor_backward_waits_for_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def two_steps(world: World, held: HeldUpdates | None) -> State:
        session = LateSession(build_seeded_model(), world, plan=delayed_plan(), settings=MANY)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        session.loss(0).backward()
        session.clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert held is None or held.met.wait(30)
        for micro_batch in range(3):
            session.loss(1, micro_batch).backward()
        norm = session.clip(0.5)
        before = session.state()
        world.exchange(None)
        if held is not None:
            held.go.set()
        optimizer.step()
        session.ends()
        return {"norm": norm} | before | {f"after {name}": value for name, value in session.state().items()}

    expected = comm.run_threads(2, lambda world: two_steps(world, None))
    held = HeldUpdates(monkeypatch)
    for mine, other in zip(comm.run_threads(2, lambda world: two_steps(world, held)), expected, strict=True):
        assert_same_bits(mine, other)


def reloads_optimizer_states(session: Session, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()


def keeps_gradients(session: Session, optimizer: torch.optim.Optimizer) -> None:
    """More gradients are added to clipped ones that the update reads."""


@pytest.mark.parametrize("memory", [Memory.HOST, pytest.param(Memory.NVME, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "what",
    [
        drops_gradients,
        keeps_gradients,
        drops_and_accumulates,
        shows_parameters,
        shows_states,
        reloads_optimizer_states,
        evaluates_after_step,
        looks_at_gradients,
    ],
    ids=lambda what: what.__name__,
)
@pytest.mark.usefixtures("slowly")
def test_right_after_a_step(what: Any, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as if each step waited for its update."""
    monkeypatch.setattr("npuzero.shard.step.step_boundary.LENT_BYTES", 1)
    row = delayed_plan("zero3", memory, precision=PRECISIONS["split"])
    found = run_cut(make_after_step_scenario(what), 2, ToyGPT, plan=row, settings=MANY)
    expected = run_cut(make_after_step_scenario(what), 2, ToyGPT, plan=row, settings=SETTINGS["no overlap"])
    for mine, other in zip(found, expected, strict=True):
        assert_same_bits(mine, other)


def delayed_steps(session: LateSession, optimizer: torch.optim.Optimizer, begin: int, end: int) -> State:
    """Take some steps; return the final parameters in use, the states, and the pending update."""
    for step in range(begin, end):
        session.loss(step).backward()
        session.clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return delayed_state(session, optimizer)


def delayed_state(session: LateSession, optimizer: torch.optim.Optimizer) -> State:
    return optimizer_state(optimizer) | session.state()


def build_late_session(world: World, plan: Plan | str, seed: int = 1) -> tuple[LateSession, torch.optim.Optimizer]:
    session = LateSession(build_seeded_model(seed), world, plan=plan, settings=MANY)
    return session, session.optimizer(torch.optim.AdamW, lr=1e-2)


@pytest.mark.parametrize(
    "precision", ["8 bits", *(pytest.param(p, marks=pytest.mark.slow) for p in ("fp32", "bf16", "split", "drawn"))]
)
def test_a_checkpoint_goes_on_as_if_nothing_had_been(precision: str, tmp_path: Path) -> None:
    """Bit for bit on as many ranks under another delayed plan; on other numbers of ranks the saved state is equal."""
    kept = {"precision": PRECISIONS[precision]}
    plans = [delayed_plan("zero2", **kept), delayed_plan("zero3", Memory.NVME, **kept)]

    def saves(world: World) -> State:
        session, optimizer = build_late_session(world, plans[0], seed=0)
        delayed_steps(session, optimizer, 0, 3)
        checkpoint.save(tmp_path, session.model, optimizer, step=3)
        return delayed_steps(session, optimizer, 3, 5)

    def goes_on(world: World, folder: Path) -> State:
        session, optimizer = build_late_session(world, plans[1])
        checkpoint.load(folder, session.model, optimizer)
        return delayed_steps(session, optimizer, 3, 5)

    def passes_on(world: World) -> State:
        session, optimizer = build_late_session(world, plans[world.size % 2])
        checkpoint.load(tmp_path, session.model, optimizer)
        checkpoint.save(tmp_path / str(world.size), session.model, optimizer, step=3)
        found = delayed_state(session, optimizer)
        session.ends()
        return found | {f"ended {name}": value for name, value in delayed_state(session, optimizer).items()}

    expected = comm.run_threads(2, saves)
    one, three = (comm.run_threads(size, passes_on)[0] for size in (1, 3))
    assert_same_bits(one, three)
    weight = "blocks.0.qkv.weight"
    assert not torch.equal(one[weight], one[f"ended {weight}"]), "something was pending"
    for folder in (tmp_path, tmp_path / "1", tmp_path / "3"):
        found = comm.run_threads(2, lambda world, folder=folder: goes_on(world, folder))
        for mine, other in zip(found, expected, strict=True):
            assert_same_bits(mine, other)


def test_state_dicts_go_on_as_if_nothing_had_been() -> None:
    """Unsharded states, torch's for torch.distributed.checkpoint, and its template of a model without states."""

    def rank(world: World) -> list[State]:
        session, optimizer = build_late_session(world, delayed_plan(), seed=0)
        delayed_steps(session, optimizer, 0, 3)
        model, states = session.state(), optimizer.state_dict()
        by_name, its_states = build_late_session(world, delayed_plan("zero3"))
        npuzero.load_full_state_dict(by_name.model, model)
        its_states.load_state_dict(states)
        sharded, its_shards = build_late_session(world, delayed_plan())
        empty = checkpoint.state_dict(sharded.model, its_shards)
        checkpoint.load_state_dict(sharded.model, its_shards, state=empty)
        assert_same_bits(sharded.state(), build_late_session(world, delayed_plan())[0].state())
        checkpoint.load_state_dict(sharded.model, its_shards, state=checkpoint.state_dict(session.model, optimizer))
        pairs = ((session, optimizer), (by_name, its_states), (sharded, its_shards))
        return [delayed_steps(*pair, 3, 5) for pair in pairs]

    for expected, *others in comm.run_threads(2, rank):
        for other in others:
            assert_same_bits(other, expected)


EARLY = "delayed plan saved this state"


def test_a_plan_without_lag_applies_at_once_what_was_pending(tmp_path: Path) -> None:
    def saves(world: World) -> tuple[State, State, Any]:
        session, optimizer = build_late_session(world, delayed_plan(precision="bf16"), seed=0)
        delayed_steps(session, optimizer, 0, 3)
        checkpoint.save(tmp_path, session.model, optimizer, step=3)
        unsharded = session.state(), optimizer.state_dict()
        session.ends()
        return delayed_state(session, optimizer), *unsharded

    def goes_on(world: World, model: State | None, states: Any) -> State:
        session, optimizer = build_late_session(world, Plan.preset("zero2", precision="bf16"))
        if model is None:
            checkpoint.load(tmp_path, session.model, optimizer)
        else:
            session.load(model)
            optimizer.load_state_dict(states)
        return delayed_state(session, optimizer)

    for expected, model, states in comm.run_threads(1, saves):
        for given in (None, model):
            with pytest.warns(RuntimeWarning, match=EARLY):
                (found,) = comm.run_threads(1, lambda world, given=given, states=states: goes_on(world, given, states))
            assert_same_bits(found, expected)


def test_a_checkpoint_without_lag_begins_as_a_model_does(tmp_path: Path) -> None:
    def rank(world: World) -> tuple[State, State]:
        session, optimizer = build_late_session(world, "zero3", seed=0)
        delayed_steps(session, optimizer, 0, 3)
        checkpoint.save(tmp_path, session.model, optimizer, step=3)
        late, its = build_late_session(world, delayed_plan())
        checkpoint.load(tmp_path, late.model, its)
        before = delayed_state(late, its)
        assert_same_bits(before, delayed_state(session, optimizer))
        assert_same_bits(late.state(), session.state())
        for model, states in ((session, optimizer), (late, its)):
            model.loss(3).backward()
            states.step()
        seen = late.state()
        late.ends()
        return {name: before[name] for name in seen}, seen, session.state(), late.state()

    for before, seen, expected, ended in comm.run_threads(2, rank):
        assert_same_bits(seen, before)
        assert_same_bits(ended, expected)


def test_exported_is_what_the_last_step_made(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        session, optimizer = build_late_session(world, delayed_plan(precision="bf16"), seed=0)
        delayed_steps(session, optimizer, 0, 2)
        npuzero.export(session.model, tmp_path / "pending")
        npuzero.export(session.model, tmp_path / "exact", dtype="fp32")
        session.ends()
        npuzero.export(session.model, tmp_path / "ended")
        npuzero.export(session.model, tmp_path / "ended exact", dtype="fp32")

    comm.run_threads(2, rank)
    pending, exact, ended, ended_exact = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("pending", "exact", "ended", "ended exact")
    )
    assert pending == ended and exact == ended_exact


def test_other_parameters_end_what_is_pending() -> None:
    def rank(world: World) -> tuple[State, State]:
        session, optimizer = build_late_session(world, delayed_plan(), seed=0)
        first = session.state()
        delayed_steps(session, optimizer, 0, 2)
        with pytest.warns(RuntimeWarning, match="pending update of a delayed plan is dropped"):
            npuzero.load_full_state_dict(session.model, first)
        session.ends()
        return first, session.state()

    ((first, found),) = comm.run_threads(1, rank)
    assert_same_bits(found, first)


@pytest.mark.parametrize("row", ["zero2", "zero3"])
def test_parameters_are_written_when_nothing_is_pending(row: str) -> None:
    """Otherwise the update would end with the values before the write."""

    def rank(world: World) -> tuple[State, State]:
        session, optimizer = build_late_session(world, delayed_plan(row, precision="bf16-split"), seed=0)

        def write() -> None:
            with npuzero.gathered(session.model), torch.no_grad():
                for parameter in session.model.parameters():
                    parameter.mul_(0.5)

        delayed_steps(session, optimizer, 0, 2)
        session.ends()
        write()
        half = session.state()
        optimizer.step()
        session.ends()
        assert_same_bits(session.state(), half)
        delayed_steps(session, optimizer, 2, 3)
        with pytest.raises(StateError, match="apply_pending"):
            write()
            session.loss(3).backward()
            optimizer.step()
        return half

    comm.run_threads(1, rank)


def test_one_optimizer_has_all_parameters() -> None:
    def rank(world: World) -> None:
        session = LateSession(build_seeded_model(), world, plan="delayed")
        parameters = [p for p in session.model.parameters() if p.requires_grad]
        one, two = npuzero.AdamW(parameters[:3]), npuzero.AdamW(parameters[3:])
        session.loss().backward()
        one.step()
        with pytest.raises(StateError, match="pending"):
            two.step()
        session.ends()
        two.step()

    comm.run_threads(1, rank)


def test_an_update_that_fails_is_told_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of the states flushes them as well; parameters are still the earlier ones."""

    def fail(*arguments: Any) -> Any:
        raise StorageError("write in a folder", expected="success", got="EIO", do="Look at the disk.")

    def rank(world: World) -> None:
        session, optimizer = build_late_session(world, delayed_plan("zero2", Memory.NVME), seed=0)
        delayed_steps(session, optimizer, 0, 1)
        before = session.state()
        monkeypatch.setattr(FileStore, "write", fail)
        session.loss(1).backward()
        optimizer.step()
        optimizer.zero_grad()
        now = session.state()
        assert not torch.equal(now["blocks.0.qkv.weight"], before["blocks.0.qkv.weight"])
        session.loss(2).backward()
        for call in (optimizer.step, optimizer.step, optimizer.state_dict, session.ends):
            with pytest.raises(StorageError, match="EIO"):
                call()
        assert_same_bits(session.state(), now)

    comm.run_threads(1, rank)


def check_delayed_refused(match: str, *plans: Any, early: bool = False, **options: Any) -> None:
    def rank(world: World) -> None:
        session = LateSession(build_seeded_model(), world, plan=plans[world.rank], **options)
        how: dict[str, Any] = {"early": True} if early else {}
        optimizer = session.optimizer(torch.optim.AdamW if early else torch.optim.SGD, lr=0.1, **how)
        session.loss().backward()
        optimizer.step()

    with pytest.raises(ConfigError, match=match):
        comm.run_threads(len(plans), rank)


def test_what_cannot_be_delayed_is_refused() -> None:
    check_delayed_refused("lag", "offload", replace(Plan.preset("offload"), lag=1))
    check_delayed_refused("torch's optimizers update within", "delayed")
    check_delayed_refused("a plan without lag, whose updates can begin", "delayed", early=True)
    check_delayed_refused("unit_plans: blocks.0, lag", "delayed", unit_plans={"blocks.0": "offload"})
