"""The guard against inf and NaN: the place of origin, the same text on every rank, no trace of the bad step."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import FiniteGuard, NonFiniteError, comm
from npuzero.comm import World
from world.toy import ToyGPT, build_seeded_model
from world.train import CutSession, Session, State, assert_same_bits, run_cut

PLANS = ("zero0", "zero1", "zero3", "hsdp")
every_plan = pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in PLANS else pytest.mark.slow) for plan in npuzero.PRESETS]
)
SIZE, BAD_STEP, BAD_RANK = 4, 2, 2


class PoisonedGPT(ToyGPT):
    """Multiply a value by inf on request, in forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.poison: str | None = None
        for name, module in self.named_modules():
            if name in ("blocks.1.mlp.1", "norm", "blocks.2.out"):
                module.register_forward_hook(self._spoil(name))

    def _spoil(self, name: str) -> Callable[..., Tensor | None]:
        def hook(_: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            if self.poison == f"forward {name}":
                return output * math.inf
            if self.poison == f"backward {name}" and output.requires_grad:
                output.register_hook(lambda gradient: gradient * math.inf)
            return None

        return hook


class PoisonCase:
    """A faulty place, and the guard's text for it."""

    def __init__(self, where: str, says: str, **facts: Any) -> None:
        self.where, self.says, self.facts = where, says, facts


POISONS = [
    PoisonCase("forward blocks.1.mlp.1", "output of unit 'blocks.1' on rank 2", unit="blocks.1", rank=BAD_RANK),
    PoisonCase("forward norm", "output of unit 'root' on rank 2", unit="root", rank=BAD_RANK),
    PoisonCase("loss", "loss on rank 2, of finite outputs", rank=BAD_RANK),
    # Gradients come out of a module from its end: the bias before the weight.
    PoisonCase("backward blocks.2.out", "gradient of parameter blocks.2.out.", unit="blocks.2"),
    PoisonCase("backward blocks.1.mlp.1", "gradient of parameter blocks.1.mlp.1.", unit="blocks.1"),
]


def train_with_poison(session: Session, poison: str, scaled: bool = False) -> State:
    """Run steps, one of them bad on one rank; return the guard's errors and the model."""
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    scaler = session.scaler(init_scale=8.0) if scaled else None
    said: list[NonFiniteError] = []
    with FiniteGuard(session.model, scaler) as guard:
        for step in range(4):
            bad = step == BAD_STEP and session.ranks[0] == BAD_RANK
            session.model.poison = poison if bad else None
            try:
                loss = session.loss(step)
            except NonFiniteError as error:
                said.append(error)
                loss = session.loss(step)  # after its error training may continue
            if bad and poison == "loss":
                loss = loss * math.inf
            (loss if scaler is None else scaler.scale(loss)).backward()
            guard.check(loss)
            session.clip(1.0)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    session.model.said = said
    steps = {float(state["step"]) for state in optimizer.state_dict()["state"].values()}
    return {"steps": torch.tensor(sorted(steps))}


@every_plan
@pytest.mark.parametrize("poison", POISONS, ids=lambda poison: poison.where)
def test_where_it_began(plan: str, poison: PoisonCase) -> None:
    def rank(world: World) -> tuple[list[str], dict[str, Any]]:
        session = CutSession(build_seeded_model(make=PoisonedGPT), world, plan=plan, local_size=2)
        train_with_poison(session, poison.where)
        session.state()
        (error,) = session.model.said
        return str(error), error.facts

    told = comm.run_threads(SIZE, rank)
    assert all(text == told[0][0] and poison.says in text for text, _ in told)
    for name, value in poison.facts.items():
        assert told[0][1][name] == value


@every_plan
def test_the_bad_step_leaves_no_trace(plan: str) -> None:
    def without(session: Session) -> State:
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in set(range(4)) - {BAD_STEP}:
            session.loss(step).backward()
            session.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {"steps": torch.tensor([3.0])}

    options = {"plan": plan, "local_size": 2}
    guarded = run_cut(lambda session: train_with_poison(session, "loss"), SIZE, PoisonedGPT, **options)
    assert_same_bits(guarded[0], run_cut(without, SIZE, PoisonedGPT, **options)[0])


def test_a_parameter_that_is_not_finite_is_named() -> None:
    def rank(world: World) -> NonFiniteError:
        model = build_seeded_model(make=PoisonedGPT)
        with torch.no_grad():
            model.blocks[1].norm.weight[3] = math.nan  # a frozen one
        session = CutSession(model, world, plan="zero3")
        with pytest.raises(NonFiniteError) as caught, FiniteGuard(session.model) as guard:
            session.loss().backward()
            guard.check()
        return caught.value

    for error in comm.run_threads(2, rank):
        assert error.facts == {"unit": "blocks.1", "parameter": "blocks.1.norm.weight", "rank": None}


def test_with_a_scaler_gradients_may_overflow_until_the_floor() -> None:
    """An overflow is for the scaler; at the floor, or in a non-finite output, it is for the guard."""

    def rank(world: World) -> list[int]:
        session = CutSession(build_seeded_model(make=PoisonedGPT), world)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        scaler = npuzero.LossScaler(init_scale=4.0)
        model, steps = session.model, 0
        guard = FiniteGuard(model, scaler)
        model.poison = "backward norm"
        with pytest.raises(NonFiniteError):
            for steps in range(9):
                loss = session.loss(steps)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                guard.check(loss)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return [steps, scaler.skipped]

    assert comm.run_threads(2, rank) == [[3, 3]] * 2  # 4, 2, and at 1 it raises before the fourth


def test_under_a_scaler_too_a_step_is_left_out_that_the_guard_alone_objects_to() -> None:
    def rank(world: World) -> tuple[State, State]:
        session = CutSession(build_seeded_model(), world)
        optimizer, scaler = session.optimizer(torch.optim.AdamW, lr=1e-2), npuzero.LossScaler(init_scale=4.0)
        guard = FiniteGuard(session.model, scaler)
        before, loss = session.state(), session.loss()
        scaler.scale(loss).backward()
        guard.check(loss * math.inf)
        scaler.step(optimizer)
        scaler.update()
        with pytest.raises(NonFiniteError, match="the loss on rank 0"):
            session.loss()
        return session.state(), before

    for after, before in comm.run_threads(2, rank):
        assert_same_bits(after, before)


def test_all_is_as_without_it_while_all_is_finite() -> None:
    """The same bits, and no host read of a value between one forward and the next."""

    def plain(session: Session) -> State:
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(4):
            session.loss(step).backward()
            session.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {"steps": torch.tensor([4.0])}

    guarded = run_cut(lambda session: train_with_poison(session, "nothing"), SIZE, PoisonedGPT, plan="zero3")
    assert_same_bits(guarded[0], run_cut(plain, SIZE, PoisonedGPT, plan="zero3")[0])


def test_check_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a value was asked for")

    def rank(world: World) -> None:
        session = CutSession(build_seeded_model(), world)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        guard = FiniteGuard(session.model)
        loss = session.loss()
        loss.backward()
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy"):
                patch.setattr(Tensor, name, refuse)
            guard.check(loss)
            optimizer.step()
        guard.look()

    comm.run_threads(1, rank)


def test_a_guard_that_is_gone_watches_nothing_and_holds_nothing() -> None:
    def rank(world: World) -> None:
        session = CutSession(build_seeded_model(make=PoisonedGPT), world)
        with FiniteGuard(session.model):
            session.loss().backward()
        session.model.poison = "forward norm"
        session.loss().backward()
        session.loss()
        parameter = weakref.ref(next(session.model.parameters()))
        guard = FiniteGuard(session.model)
        session.model = None
        del guard
        gc.collect()
        assert parameter() is None

    comm.run_threads(1, rank)
