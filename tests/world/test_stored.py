"""Masters and moments in fewer bits: their exact values, their dependences, and their distance to float32."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import Precision, Settings, comm
from npuzero.comm import World
from npuzero.errors import ConfigError
from world.toy import EPS, TrainingRecipe, build_seeded_model, toy_loss, toy_tokens
from world.train import CutSession, Session, State, assert_same_bits, run_cut, train_by_recipe

BF16 = torch.bfloat16
STAGES = ("zero0", "zero1", "zero2", "zero3")
CLIPPED = TrainingRecipe(steps=3, micro_batches=2, clip=0.5, groups=True)
WHOLE, SPLIT = Precision(BF16), Precision(BF16, masters="split")
#: Where something is rounded stochastically, or in blocks.
FEW = {
    "no masters": Precision(BF16, masters="none"),
    "bf16 moments": Precision(BF16, moments="bf16"),
    "int8 moments": Precision(torch.float32, moments="int8"),
    "no masters, int8 moments": Precision(BF16, masters="none", moments="int8"),
    "split, int8 moments": Precision(BF16, masters="split", moments="int8"),
}


def flat_masters(session: CutSession) -> State:
    """Return full float32 masters by flat."""
    engine = npuzero.api.model.engine_of(session.model)
    return {
        f"masters of {flat.name}": engine.values.gather_states(
            flat, flat.read_master(slice(0, flat.master.numel())).clone()
        )
        for flat in engine.flats()
    }


@cache
def train_stored(plan: str, precision: Precision, recipe: TrainingRecipe, size: int) -> State:
    """Return the final model, masters and optimizer state."""

    def rank(world: World) -> State:
        session = CutSession(build_seeded_model(), world, plan=plan, local_size=-(-size // 2), precision=precision)
        optimizers: list[torch.optim.Optimizer] = []
        make = session.optimizer
        session.optimizer = lambda *a, **k: optimizers.append(make(*a, **k)) or optimizers[0]  # type: ignore[method-assign]
        state = train_by_recipe(session, recipe) | session.state() | flat_masters(session)
        moments = optimizers[0].state_dict()["state"]
        return state | {f"{i}.{name}": value for i, values in moments.items() for name, value in values.items()}

    states = comm.run_threads(size, rank)
    for state in states[1:]:
        assert_same_bits(state, states[0])
    return states[0]


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3, 4))])
@pytest.mark.parametrize("plan", npuzero.PRESETS)
def test_split_masters_are_whole_masters_to_the_bit(plan: str, size: int) -> None:
    if size % -(-size // 2):
        pytest.skip("two levels need an even number of ranks")
    assert_same_bits(train_stored(plan, SPLIT, CLIPPED, size), train_stored(plan, WHOLE, CLIPPED, size))


def test_split_masters_are_whole_masters_with_moments_in_few_bits() -> None:
    for moments in ("bf16", "int8"):
        few = [train_stored("zero2", replace(p, moments=moments), CLIPPED, 2) for p in (SPLIT, WHOLE)]
        assert_same_bits(*few)


@pytest.mark.parametrize("precision", FEW)
def test_stages_give_the_same_bits(precision: str) -> None:
    expected = train_stored(STAGES[0], FEW[precision], TrainingRecipe(steps=3, clip=0.5), 2)
    for plan in STAGES[1:]:
        assert_same_bits(train_stored(plan, FEW[precision], TrainingRecipe(steps=3, clip=0.5), 2), expected)


@pytest.mark.parametrize("precision", FEW)
def test_buckets_and_ranks_change_no_bit(precision: str) -> None:
    # All ranks see the same tokens: then the mean over two or four of them is exact.
    def alike(session: Session) -> State:
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(3):
            toy_loss(session.model, toy_tokens(step, 0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {}

    results = [
        run_cut(alike, size, plan=plan, precision=FEW[precision], settings=Settings(bucket_bytes=bucket_bytes))[0]
        for size, plan, bucket_bytes in ((1, "zero0", 1 << 20), (2, "zero3", 1 << 20), (4, "zero1", 3000))
    ]
    for other in results[1:]:
        assert_same_bits(other, results[0])


@pytest.mark.parametrize(
    "precision", [p if p.startswith("no") else pytest.param(p, marks=pytest.mark.slow) for p in FEW]
)
def test_a_hundred_steps_stay_near_float32(precision: str) -> None:
    # Without masters one run differs from another by what its draws add; 3 % of the loss is three times that.
    def losses(session: Session) -> State:
        optimizer = session.optimizer(torch.optim.AdamW, lr=3e-3)
        found: list[Tensor] = []
        for step in range(100):
            loss = session.loss(step % 4)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return {"loss": torch.stack(found)}

    exact, few = (
        run_cut(losses, 1, plan="zero0", precision=p)[0]["loss"] for p in (Precision(torch.float32), FEW[precision])
    )
    assert exact[-10:].mean() < 0.6 * exact[0]
    assert (few[-10:].mean() / exact[-10:].mean() - 1).abs() < 0.03


@pytest.mark.parametrize("precision", FEW)
def test_an_optimizer_state_goes_on_where_it_was(precision: str) -> None:
    def run(world: World) -> None:
        kinds = {"plan": "zero3", "precision": FEW[precision]}
        one = CutSession(build_seeded_model(), world, **kinds)
        first = one.optimizer(torch.optim.AdamW, lr=1e-2, amsgrad=True)
        _run_stored_steps(one, first, range(3))
        other = CutSession(build_seeded_model(seed=1), world, **kinds)
        second = other.optimizer(torch.optim.AdamW, lr=1e-2, amsgrad=True)
        engines = [npuzero.api.model.engine_of(session.model) for session in (one, other)]
        state = first.state_dict()
        assert all(v.dtype == torch.float32 for values in state["state"].values() for v in values.values())
        other.load(one.state())
        for mine, theirs in zip(*(engine.flats() for engine in engines), strict=True):
            everything = slice(0, mine.master.numel())
            theirs.write_master(everything, mine.read_master(everything))
        second.load_state_dict(state)
        for session, optimizer in ((one, first), (other, second)):
            _run_stored_steps(session, optimizer, range(3, 5))
        assert_same_bits(other.state(), one.state())

    comm.run_threads(2, run)


def _run_stored_steps(session: Session, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        session.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("precision", FEW)
def test_plain_parameters_are_updated_as_those_of_a_plan(precision: str) -> None:
    kinds = FEW[precision]

    def rank(world: World) -> None:
        cut = CutSession(build_seeded_model().to(kinds.parameters), world, plan="zero0", precision=kinds)
        model = build_seeded_model().to(kinds.parameters)
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2, eps=EPS, masters=kinds.masters, moments=kinds.moments)
        _run_stored_steps(cut, cut.optimizer(torch.optim.AdamW, lr=1e-2), range(3))
        for step in range(3):
            toy_loss(model, toy_tokens(step, 0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        names = dict(model.named_parameters())
        own, expected = ({name: state[name] for name in names} for state in (model.state_dict(), cut.state()))
        assert_same_bits(own, expected)

    comm.run_threads(1, rank)


@pytest.mark.parametrize("kinds", [{"masters": "split"}, {"masters": "none", "moments": "bf16"}, {"moments": "int8"}])
def test_a_plain_optimizers_state_is_float32_and_comes_back(kinds: dict[str, Any]) -> None:
    models = [nn.Linear(37, 5).bfloat16() for _ in range(2)]
    optimizers = [npuzero.AdamW(model.parameters(), lr=1e-2, amsgrad=True, **kinds) for model in models]

    def step(i: int, seed: int) -> None:
        x = torch.randn(4, 37, generator=torch.Generator().manual_seed(seed)).bfloat16()
        models[i](x).float().square().mean().backward()
        optimizers[i].step()
        optimizers[i].zero_grad()

    for seed in range(5):
        step(0, seed)
    state = optimizers[0].state_dict()
    assert all(v.dtype == torch.float32 for values in state["state"].values() for v in values.values())
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(state)
    for i in (0, 1):
        step(i, 9)
    assert_same_bits(models[1].state_dict(), models[0].state_dict())


@pytest.mark.parametrize("precision", FEW)
def test_torchs_optimizers_refuse_what_they_cannot_keep(precision: str) -> None:
    def rank(world: World) -> None:
        session = CutSession(build_seeded_model(), world, plan="zero2", precision=FEW[precision])
        optimizer = session.optimizer(torch.optim.AdamW, fused=False, lr=1e-2)
        session.loss().backward()
        with pytest.raises(ConfigError, match=r"precision\.(masters|moments)"):
            optimizer.step()

    comm.run_threads(1, rank)


def test_a_choice_that_a_plan_contradicts_is_refused() -> None:
    def rank(world: World) -> None:
        session = CutSession(build_seeded_model(), world, plan="zero2", precision="bf16")
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2, moments="int8")
        session.loss().backward()
        with pytest.raises(ConfigError, match="moments='int8'"):
            optimizer.step()

    comm.run_threads(1, rank)
    for bad in ({"moments": "int4"}, {"masters": "bf16"}, {"seed": -1}, {"seed": 2.0}):
        with pytest.raises(ConfigError):
            npuzero.AdamW([torch.zeros(3, requires_grad=True)], **bad)  # type: ignore[arg-type]
