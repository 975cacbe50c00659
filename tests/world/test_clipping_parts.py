"""Clip exactly the given parameters: a part of a model, one optimizer's, several models', plain ones among them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import ConfigError, comm
from npuzero.comm import World
from world.test_gradient_values import every_plan, prefix_names
from world.toy import build_seeded_model
from world.train import CutSession, Session, State, assert_states_close, check_equals_plain


def clip_given_norm(session: Session, given: Iterable[nn.Parameter], max_norm: float, p: float = 2.0) -> Tensor:
    cut = isinstance(session, CutSession)
    return (npuzero if cut else torch.nn.utils).clip_grad_norm_(given, max_norm, p)


def clip_given_values(session: Session, given: Iterable[nn.Parameter], limit: float) -> None:
    (npuzero if isinstance(session, CutSession) else torch.nn.utils).clip_grad_value_(given, limit)


def split_by_dimensions(session: Session) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Matrices and vectors, which share every flat parameter, and all of them."""
    some = [parameter for parameter in session.model.parameters() if parameter.numel()]  # torch has no largest of none
    return [p for p in some if p.dim() > 1], [p for p in some if p.dim() < 2], some


def gradients_of_parts(session: Session) -> State:
    found = {
        name: npuzero.full_gradient(parameter) if isinstance(session, CutSession) else parameter.grad
        for name, parameter in session.model.named_parameters()
        if parameter.grad is not None and parameter.numel()
    }
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize("p", [2.0, math.inf, 3.5])
@every_plan
def test_parts_of_a_model(plan: str, p: float) -> None:
    """One part after the other, then all; all, then a part; more micro-batches after it; two optimizers."""

    def scenario(session: Session) -> State:
        matrices, vectors, every = split_by_dimensions(session)
        first, second = (session.optimizer(torch.optim.AdamW, part, lr=1e-2) for part in (matrices, vectors))
        norms = []
        for step in range(3):
            session.loss(step, 0).backward()
            if step == 0:
                norms += [
                    clip_given_norm(session, matrices, 0.2, p),
                    clip_given_norm(session, (v for v in vectors), 0.1, p),
                ]
                norms.append(clip_given_norm(session, every, 0.15, p))
            elif step == 1:
                norms += [clip_given_norm(session, every, 0.2, p), clip_given_norm(session, reversed(vectors), 0.01, p)]
                clip_given_values(session, vectors, 1e-3)
                session.loss(step, 1).backward()
                norms.append(clip_given_norm(session, matrices[0], 0.05, p))
            else:
                norms.append(clip_given_norm(session, matrices, 0.05, p))
                first.step()
                norms.append(clip_given_norm(session, vectors, 0.05, p))
            if step < 2:
                first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
        return {"norms": torch.stack(norms)}

    check_equals_plain(scenario, 4, plan=plan, local_size=2)


@every_plan
def test_frozen_for_the_moment_and_given_twice(plan: str) -> None:
    """A parameter frozen after backward keeps its gradient, which counts only where it is given."""

    def scenario(session: Session) -> State:
        matrices, vectors, every = split_by_dimensions(session)
        optimizer = session.optimizer(torch.optim.SGD, lr=1.0)
        seen: State = {}
        for step in range(2):
            session.loss(step).backward()
            for parameter in (frozen := [v for v in vectors if v.requires_grad]):
                parameter.requires_grad_(False)
            trained = [parameter for parameter in every if parameter.requires_grad]
            seen[f"{step} trained"] = clip_given_norm(session, trained, 1e-2)
            seen[f"{step} frozen"] = clip_given_norm(session, vectors, 1e-2 if step else 1e2)
            seen[f"{step} twice"] = clip_given_norm(session, [*matrices, *matrices], 1e-3)
            seen[f"{step} all, and some twice"] = clip_given_norm(
                session, [*session.model.parameters(), *matrices], 1e-4
            )
            for parameter in frozen:
                parameter.requires_grad_(True)
            seen |= prefix_names(step, gradients_of_parts(session))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    check_equals_plain(scenario, 2, plan=plan)


class AdversarialPair(nn.Module):
    """A generator and a discriminator, each with a separate loss."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Linear(5, 7)
        self.d = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 1))

    def forward(self, x: Tensor, weight: float) -> Tensor:
        return self.g(x).square().mean() + self.d(x).mean() * weight


def clipping_batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


@every_plan
def test_only_the_optimizer_that_overflowed_is_skipped(plan: str) -> None:
    """A scaler checks each optimizer's own gradients, and so does ``skip_nonfinite_``."""

    def scenario(session: Session) -> State:
        model = session.model
        assert isinstance(model, AdversarialPair)
        optimizers = [session.optimizer(torch.optim.SGD, part.parameters(), lr=0.1) for part in (model.g, model.d)]
        scaler = session.scaler(init_scale=4.0, growth_interval=1)
        norms = []
        for step in range(4):
            # In step 1 the gradients of d overflow; without a scaler in step 3 as well.
            loss = session.mean(lambda rank, step=step: model(clipping_batch(step, rank), 1e39 if step % 2 else 1.0))
            if step < 2:
                scaler.scale(loss).backward()
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                norms.append(clip_given_norm(session, model.g.parameters(), 1e-2))
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                for part, optimizer in zip((model.g, model.d), optimizers, strict=True):
                    if isinstance(session, CutSession):
                        skipped = npuzero.skip_nonfinite_(part.parameters())
                        assert bool(skipped) == (step == 3 and part is model.d)
                        optimizer.step()
                    elif all(parameter.grad.isfinite().all() for parameter in part.parameters()):
                        optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return {"norms": torch.stack(norms), "scale": torch.tensor(scaler.get_scale())}

    check_equals_plain(scenario, 2, AdversarialPair, plan=plan)


def step_overflowing_pair(world: World, checked: str) -> dict[str, bool]:
    """Tell whether g and d have moved, each by its optimizer's step, where the gradients of d overflow."""
    model = npuzero.zero(build_seeded_model(0, AdversarialPair), world=world, plan="zero2")
    assert isinstance(model, AdversarialPair)
    before = npuzero.full_state_dict(model, rank0_only=False)
    first, second = (npuzero.AdamW(part.parameters()) for part in (model.g, model.d))
    model(clipping_batch(0, world.rank), 1e39).backward()
    npuzero.skip_nonfinite_(model.get_submodule(checked).parameters() if checked else model)
    first.step()
    second.step()
    after = npuzero.full_state_dict(model, rank0_only=False)
    return {name: not torch.equal(before[f"{name}.bias"], after[f"{name}.bias"]) for name in ("g", "d.0")}


def test_an_overflow_skips_its_own_optimizer_later() -> None:
    """Another optimizer steps in between."""
    assert comm.run_threads(2, lambda world: step_overflowing_pair(world, "d")) == [{"g": True, "d.0": False}] * 2


def test_an_overflow_skips_every_optimizer_of_what_was_checked() -> None:
    assert comm.run_threads(2, lambda world: step_overflowing_pair(world, "")) == [{"g": False, "d.0": False}] * 2


@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3"])
def test_two_models_and_a_plain_one(plan: str) -> None:
    """One norm over all of them, as diffusers clips: the plain model's gradients are the same on all ranks."""

    def run(world: World | None) -> State:
        models = [build_seeded_model(seed, AdversarialPair) for seed in (1, 2)]
        plain = build_seeded_model(3, lambda: nn.Linear(5, 1))
        if world is not None:
            models = [npuzero.zero(model, world=world, plan=plan) for model in models]
        chain = itertools.chain.from_iterable
        norms = []
        for step in range(2):
            for model in models:
                ranks = range(2) if world is None else [world.rank]
                torch.stack([model(clipping_batch(step, rank), 1.0) for rank in ranks]).mean().backward()
            plain(clipping_batch(step, 7)).square().mean().backward()
            clip_of = torch.nn.utils if world is None else npuzero
            norms.append(clip_of.clip_grad_norm_(chain(m.parameters() for m in (*models, plain)), 0.3))
            norms.append(clip_of.clip_grad_norm_([*models[0].g.parameters(), plain.weight], 0.1, math.inf))
            clip_of.clip_grad_value_([*models[1].parameters(), plain.bias], 1e-3)
        seen = {"norms": torch.stack(norms), "plain": plain.weight.grad, "bias": plain.bias.grad}
        for i, model in enumerate(models):
            for name, p in model.named_parameters():
                gradient = p.grad if world is None else npuzero.full_gradient(p)
                assert gradient is not None
                seen[f"{i} {name}"] = gradient
        return {name: value.clone() for name, value in seen.items()}

    for found in comm.run_threads(2, run):
        assert_states_close(found, run(None))


def test_norms_of_some_parameters() -> None:
    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(0, AdversarialPair), world=world, plan="zero2")
        model(clipping_batch(0, world.rank), 1.0).backward()
        every = npuzero.grad_norms(model)
        assert npuzero.grad_norms([model.g.bias]) == {"g.bias": every["g.bias"]}
        assert npuzero.grad_norms(model.d.parameters()).keys() == {n for n in every if n.startswith("d.")}

    comm.run_threads(2, rank)


@pytest.mark.parametrize("first", [True, False], ids=["at the first call", "at the next step"])
def test_ranks_that_give_different_parts_are_told(first: bool) -> None:
    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(0, AdversarialPair), world=world, plan="zero2")
        optimizer = npuzero.AdamW(model.parameters())
        for step in range(2):
            model(clipping_batch(step, world.rank), 1.0).backward()
            if not first:
                npuzero.clip_grad_norm_(model.parameters(), 1.0)
            npuzero.clip_grad_norm_(model.g.parameters() if world.rank else model.d.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(ConfigError, match=r"clip_grad_norm_.*parameters.*from d\.0\.weight to d\.2\.bias.*on rank 0"):
        comm.run_threads(2, rank)
