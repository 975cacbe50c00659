"""Gradients that programs log or clip by value: equal to plain torch's p.grad."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import ConfigError, StateError, comm
from npuzero.comm import World
from world.test_behaviour import BranchingGPT
from world.toy import build_seeded_model
from world.train import (
    CutSession,
    PlainSession,
    Session,
    State,
    assert_same_bits,
    assert_states_close,
    check_equals_plain,
)

PLANS = ("zero0", "zero1", "zero3", "hsdp")
every_plan = pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in PLANS else pytest.mark.slow) for plan in npuzero.PRESETS]
)


def gradient_norms(session: Session, p: float) -> State:
    if isinstance(session, CutSession):
        return {name: torch.tensor(norm) for name, norm in npuzero.grad_norms(session.model, p).items()}
    named = session.model.named_parameters()
    return {
        name: torch.linalg.vector_norm(parameter.grad, p) if parameter.numel() else torch.tensor(0.0)
        for name, parameter in named
        if parameter.grad is not None
    }


def full_gradients(session: Session) -> State:
    found: dict[str, Tensor | None] = {
        name: npuzero.full_gradient(parameter) if isinstance(session, CutSession) else parameter.grad
        for name, parameter in session.model.named_parameters()
        if parameter.requires_grad
    }
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def clip_model_values(session: Session, limit: float) -> None:
    if isinstance(session, CutSession):
        npuzero.clip_grad_value_(session.model, limit)
    elif some := [parameter for parameter in session.model.parameters() if parameter.grad is not None]:
        torch.nn.utils.clip_grad_value_(some, limit)  # rejects None


def prefix_names(prefix: object, state: State) -> State:
    return {f"{prefix} {name}": value for name, value in state.items()}


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, float("inf")])
@every_plan
def test_norms_by_name(plan: str, p: float) -> None:
    """Before clipping and after; a unit that was not used has none."""

    def scenario(session: Session) -> State:
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        seen: State = {}
        for step in range(2):
            session.loss(step, blocks=(0, 2)).backward()
            seen |= prefix_names(f"{step} before", gradient_norms(session, p))
            session.clip(0.1)
            seen |= prefix_names(f"{step} after", gradient_norms(session, p))
            optimizer.step()
            optimizer.zero_grad()
        assert any("blocks.0" in name for name in seen) and not any("blocks.1" in name for name in seen)
        return seen

    check_equals_plain(scenario, 4, BranchingGPT, plan=plan, local_size=2)


@every_plan
def test_whole_gradients(plan: str) -> None:
    """Over micro-batches, after clipping, and of gradients set aside during accumulation."""

    def scenario(session: Session) -> State:
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        seen: State = {}
        for step in range(2):
            session.loss(step, 0).backward()
            session.loss(step, 1).backward()
            seen |= prefix_names(f"{step} two", full_gradients(session))
            session.clip(0.1)
            seen |= prefix_names(f"{step} clipped", full_gradients(session))
            session.loss(step, 2, blocks=(0, 2)).backward()
            seen |= prefix_names(f"{step} three", full_gradients(session))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    check_equals_plain(scenario, 4, BranchingGPT, plan=plan, local_size=2)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
@every_plan
def test_clipping_by_value(plan: str, kind: type[torch.optim.Optimizer]) -> None:
    """Alone, together with clipping by norm, and before more micro-batches."""

    def scenario(session: Session) -> State:
        optimizer = session.optimizer(kind, lr=1e-2)
        norms = []
        for step in range(3):
            session.loss(step, 0).backward()
            if step == 1:
                norms.append(session.clip(0.1))
            clip_model_values(session, 1e-3)
            if step == 2:
                session.loss(step, 1).backward()
            norms.append(session.clip(0.05))
            optimizer.step()
            optimizer.zero_grad()
        return {"norms": torch.stack(norms)}

    check_equals_plain(scenario, 4, plan=plan, local_size=2)


def test_the_norms_are_the_same_floats_on_every_rank_and_under_every_plan() -> None:
    def norms(world: World, plan: str) -> dict[str, float]:
        session = CutSession(build_seeded_model(), world, plan=plan)
        session.loss().backward()
        return npuzero.grad_norms(session.model)

    found = [mine for plan in ("zero0", "zero1", "zero3") for mine in comm.run_threads(2, partial(norms, plan=plan))]
    assert all(other == found[0] for other in found) and len(found[0]) > 20


@pytest.mark.usefixtures("permissive")
@pytest.mark.parametrize("plan", npuzero.PRESETS)
def test_p_grad_is_readable_on_a_rank_alone(plan: str) -> None:
    """As in plain torch, right after backward; an error names the call to use for writes."""

    def scenario(session: Session) -> State:
        seen: State = {}
        for micro_batch in range(2):
            session.loss(0, micro_batch).backward()
            for name, parameter in session.model.named_parameters():
                if parameter.grad is not None:
                    seen[f"{micro_batch} {name}"] = parameter.grad.clone()
        return seen

    check_equals_plain(scenario, 1, plan=plan)


def test_p_grad_is_readable_where_a_plan_keeps_it_whole() -> None:
    def rank(world: World) -> tuple[State, State]:
        session = CutSession(build_seeded_model(), world, plan="zero0", precision="bf16")
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        weight: nn.Parameter = session.model.head.weight
        session.loss().backward()
        with pytest.raises(StateError, match=r"not summed yet.*npuzero\.full_gradient"):
            weight.grad.norm()
        session.clip(0.1)
        assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
        whole = npuzero.full_gradient(weight)
        assert whole is not None
        assert_same_bits({"it": weight.grad.clone()}, {"it": whole.bfloat16()})
        assert weight.grad.tolist() == whole.bfloat16().tolist()
        for writing in (lambda: weight.grad.mul_(2), lambda: weight.grad.clamp_(max=1)):
            with pytest.raises(StateError, match=r"npuzero\.clip_grad_norm_"):
                writing()
        optimizer.step()
        after = weight.grad.float().clone()
        session.loss(1).backward()
        with pytest.raises(StateError, match="not summed yet"):
            weight.grad.float()
        return {"it": after}, {"it": whole.bfloat16().float()}

    for after, whole in comm.run_threads(2, rank):
        assert_states_close(after, whole)


@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3"])
def test_a_cut_gradient_says_what_to_call_instead(plan: str) -> None:
    def rank(world: World) -> None:
        session = CutSession(build_seeded_model(), world, plan=plan)
        session.loss().backward()
        session.clip(1.0)
        for reading in (
            lambda: session.model.scale.grad.item(),
            lambda: session.model.head.weight.grad.norm(),
            lambda: session.model.head.weight.grad.numpy(),
        ):
            with pytest.raises(StateError, match=rf"plan '{plan}'.*npuzero\.full_gradient\(parameter\)"):
                reading()

    comm.run_threads(2, rank)


def test_what_is_asked_wrongly() -> None:
    model = npuzero.zero(build_seeded_model(), plan="zero1")
    assert npuzero.grad_norms(model) == {} and npuzero.full_gradient(model.head.weight) is None
    for asking in (
        lambda: npuzero.clip_grad_value_(model, 0.0),
        lambda: npuzero.grad_norms(model, -1.0),
        lambda: npuzero.grad_norms(model, True),
    ):
        with pytest.raises(ConfigError, match="a positive number"):
            asking()
    with pytest.raises(StateError, match="made by npuzero"):
        npuzero.grad_norms(build_seeded_model())
    with pytest.raises(StateError, match="a frozen one"):
        npuzero.full_gradient(model.positions)
    with pytest.raises(StateError, match=r"got shape=\(\d+, \d+\), dtype=torch.float32 \(Parameter\)"):
        npuzero.full_gradient(build_seeded_model().head.weight)


def test_plain_torch_has_the_same_words() -> None:
    """The helpers of this file, by the oracle alone."""
    session = PlainSession(build_seeded_model(), range(2), 2)
    session.loss().backward()
    assert full_gradients(session).keys() == gradient_norms(session, 2.0).keys()
