"""torch.compile of a model's blocks under zero(): one graph a unit, and the numbers of the original model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import npuzero
from npuzero import comm
from npuzero.comm import World
from npuzero.shard.layout.find_units import discover_units

from .toy import ToyBlock, ToyGPT, TrainingRecipe, build_seeded_model
from .train import (
    BOUND,
    CutSession,
    PlainSession,
    Session,
    State,
    assert_same_bits,
    assert_states_close,
    check_equals_plain,
    run_cut,
    run_plain,
    train_by_recipe,
)

# Dynamo filters warnings while it reads a tensor, for all threads at once: ranks that are threads undo each other's.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

RECIPE = TrainingRecipe(steps=2, micro_batches=2, clip=0.5)
RANKS = 2


class CheckpointedBlocksGPT(ToyGPT):
    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def compile_in_place(model: Any, **options: Any) -> None:
    for block in model.blocks:
        block.compile(**options)


def wrap_compiled(model: Any, **options: Any) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, **options)


def check_all_compiled(model: Any, **options: Any) -> None:
    model.compile(**options)


@pytest.fixture(autouse=True)
def _from_scratch() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def train_compiled(
    world: World,
    how: Callable[..., None] | None,
    before: bool,
    options: dict[str, Any],
    make: Callable[[], nn.Module] = ToyGPT,
    **zero: Any,
) -> State:
    """Weights and norms of a model compiled before ``zero()``, after it, or not at all."""
    model = build_seeded_model(make=make)
    if how is not None and before:
        how(model, **options)
    session = CutSession(model, world, **zero)
    if how is not None and not before:
        how(model, **options)
    state = train_by_recipe(session, RECIPE) | session.state()
    with torch.no_grad():
        state["loss"] = session.loss(7)
    return {name.replace("._orig_mod", ""): value for name, value in state.items()}


def train_compiled_plain(session: Session, how: Callable[..., None], options: dict[str, Any]) -> State:
    """The same by torch alone: compilers round differently."""
    torch._dynamo.reset()  # its parameters have another class, for which Dynamo would recompile
    how(session.model, **options)
    return train_by_recipe(session, RECIPE)


def expected_compiled(how: Callable[..., None], options: dict[str, Any], **more: Any) -> State:
    state = run_plain(partial(train_compiled_plain, how=how, options=options), RANKS, **more)
    return {name.replace("._orig_mod", ""): value for name, value in state.items()}


def check_compiled(
    how: Callable[..., None], before: bool, backend: str, plan: str, bound: float = 10 * BOUND, **more: Any
) -> None:
    """Without a graph break within a unit: equal to compiled plain torch, and to the engine without compilation.

    Over two micro-batches one gradient nearly vanishes, and Adam makes 4e-5 of another order of its sum.
    """
    options = {"backend": backend, "fullgraph": True}
    states = comm.run_threads(
        RANKS, partial(train_compiled, how=how, before=before, options=options, plan=plan, local_size=1, **more)
    )
    assert counters["stats"]["unique_graphs"] >= 2 and not counters["graph_break"]
    expected = expected_compiled(how, options, **more)
    eager = comm.run_threads(
        RANKS, partial(train_compiled, how=None, before=before, options={}, plan=plan, local_size=1, **more)
    )
    for state, own in zip(states, eager, strict=True):
        assert_states_close({name: state[name] for name in expected}, expected, bound)
        assert_states_close(state, own, bound)


PLANS = [pytest.param(plan, marks=() if plan == "zero3" else pytest.mark.slow) for plan in npuzero.PRESETS]


@pytest.mark.parametrize("plan", PLANS)
def test_every_preset(plan: str) -> None:
    check_compiled(compile_in_place, True, "aot_eager", plan)


@pytest.mark.parametrize(
    "how, before",
    [
        pytest.param(compile_in_place, False, marks=pytest.mark.slow),
        pytest.param(wrap_compiled, True, marks=pytest.mark.slow),
        (wrap_compiled, False),
    ],
)
def test_however_and_whenever_blocks_are_compiled(how: Callable[..., None], before: bool) -> None:
    check_compiled(how, before, "aot_eager", "zero3")


@pytest.mark.slow
def test_checkpointed_blocks() -> None:
    check_compiled(compile_in_place, True, "aot_eager", "zero3", make=CheckpointedBlocksGPT)


@pytest.mark.slow
@pytest.mark.parametrize("make", [ToyGPT, CheckpointedBlocksGPT])
@pytest.mark.parametrize("plan", ["zero0", "zero3", "zero3-keep"])
def test_inductor(plan: str, make: Callable[[], nn.Module]) -> None:
    # Its sums have another order for each plan; Adam's first steps amplify gradients that nearly vanish.
    check_compiled(compile_in_place, True, "inductor", plan, make=make)


@pytest.mark.slow
def test_inductor_leaves_stages_alike() -> None:
    """Bit for bit with one micro-batch a step, and equal to compiled plain torch."""

    def scenario(session: Session) -> State:
        compile_in_place(session.model, fullgraph=True)
        return train_by_recipe(session, TrainingRecipe(steps=2, clip=0.5))

    first, *others = (run_cut(scenario, RANKS, plan=plan)[0] for plan in ("zero0", "zero1", "zero2", "zero3"))
    for other in others:
        assert_same_bits(other, first)
    assert_states_close(first, run_plain(scenario, RANKS))


@pytest.mark.parametrize("plan", [pytest.param("zero1", marks=pytest.mark.slow), "zero3"])
def test_a_model_compiled_as_a_whole_is_compiled_unit_by_unit(plan: str) -> None:
    options = {"backend": "aot_eager"}
    states = comm.run_threads(
        RANKS, partial(train_compiled, how=check_all_compiled, before=True, options=options, plan=plan)
    )
    assert counters["stats"]["unique_graphs"] >= 2
    breaks = list(counters["graph_break"])
    assert breaks and all("npuzero's engine" in reason for reason in breaks)
    expected = expected_compiled(check_all_compiled, options)
    assert_states_close({name: states[0][name] for name in expected}, expected)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_what_is_compiled_while_there_are_gradients(plan: str) -> None:
    """Recompile between two micro-batches, as at a new shape: Dynamo reads gradients as well."""

    def scenario(session: Session) -> State:
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        session.loss(0, 0).backward()
        compile_in_place(session.model, backend="aot_eager", fullgraph=True)
        session.loss(0, 1).backward()
        norm = session.clip(0.5)
        optimizer.step()
        return {"norm": norm}

    check_equals_plain(scenario, RANKS, plan=plan, bound=10 * BOUND)  # two micro-batches: see check_compiled
    assert counters["stats"]["unique_graphs"] >= 2


def test_units_by_class_are_found_in_what_is_compiled() -> None:
    model = build_seeded_model()
    before = discover_units(model, ToyBlock)
    wrap_compiled(model)
    after = discover_units(model, ToyBlock)
    assert [unit.name for unit in after] == [unit.name for unit in before]
    assert [unit.module for unit in after[1:]] == list(model.blocks)
    assert [unit.name for unit in discover_units(model)] == [unit.name for unit in before]


def test_hooks_of_the_user_see_whole_parameters() -> None:
    """Registered in any way, before zero() or after."""

    def rank(world: World) -> list[float]:
        model, seen = build_seeded_model(), []
        hook = lambda module, *_: seen.append(float(module.out.weight.detach().sum()))  # noqa: E731
        model.blocks[0].register_forward_hook(hook)
        npuzero.zero(model, plan="zero3", world=world)
        model.blocks[0].register_forward_hook(hook)
        model.blocks[0].register_forward_pre_hook(hook)
        model(torch.zeros(1, 12, dtype=torch.int64))
        return seen

    expected = float(build_seeded_model().blocks[0].out.weight.detach().sum())
    assert comm.run_threads(RANKS, rank) == [[pytest.approx(expected)] * 3] * RANKS


COMPILED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: npuzero.AdamW(params, lr=1e-2),
    "over shards": lambda params: npuzero.ZeroOptimizer(torch.optim.SGD, params, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("plan", [None, "zero0", "zero3"])
@pytest.mark.parametrize("kind", COMPILED)
def test_a_compiled_function_that_clips_and_steps(kind: str, plan: str | None) -> None:
    """The graph breaks at the optimizer, as at torch's own, and the numbers stay."""

    def run(world: World, compiled: bool) -> State:
        session = (
            PlainSession(build_seeded_model(), [0], 1)
            if plan is None
            else CutSession(build_seeded_model(), world, plan=plan)
        )
        optimizer: Any = COMPILED[kind](session.model.parameters())
        scaler = npuzero.LossScaler(init_scale=16.0)

        def update() -> None:
            if plan is not None:
                scaler.unscale_(optimizer)
                session.clip(0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        step = torch.compile(update, backend="eager") if compiled else update
        for number in range(3):
            scaler.scale(session.loss(number)).backward()
            step()
        session.loss(3).backward()
        (torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step)()
        return {name: value.clone() for name, value in session.state().items()}

    for found, expected in zip(*(comm.run_threads(1, partial(run, compiled=c)) for c in (True, False)), strict=True):
        assert_same_bits(found, expected)
