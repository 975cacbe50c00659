"""A plan must never change the mathematics: every preset trains as plain torch does, on threads."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import npuzero
from npuzero import Settings
from world.toy import ToyBlock, TrainingRecipe, build_seeded_model
from world.train import State, assert_same_bits, assert_states_close, run_cut, run_plain, train_by_recipe

#: Ranks, and how many of them share a group: all shapes a mesh can have.
LOCAL_SIZE = {2: 1, 3: 3, 4: 2, 8: 4}
SIZES = [pytest.param(size, marks=() if size in (2, 4) else pytest.mark.slow) for size in LOCAL_SIZE]

ONE = TrainingRecipe(steps=4)
CLIPPED = TrainingRecipe(steps=3, clip=0.5, groups=True)
FOUR = TrainingRecipe(steps=2, micro_batches=4, clip=0.5, groups=True)
LONG = (TrainingRecipe(steps=10), TrainingRecipe(steps=10, micro_batches=4, clip=0.5, groups=True))

#: Plans that use every rule of the table; `make test-all` runs the remaining plans.
QUICK = ("zero1", "zero3", "hpz", "hsdp")
PLANS = [
    pytest.param(plan, marks=() if plan in QUICK else pytest.mark.slow)
    for plan in ("zero1", "zero2", "zero3", "zero3-keep", "hpz", "hsdp")
]

STAGES = ("zero0", "zero1", "zero2", "zero3")
#: Plans that sum a gradient over all ranks at once, in rank order; HSDP and its like sum in two levels.
ONE_LEVEL = (*STAGES, "zero3-keep", "hpz")


@cache
def plain_parity(recipe: TrainingRecipe, size: int) -> State:
    return run_plain(partial(train_by_recipe, recipe=recipe), size)


@cache
def train_parity(plan: str, recipe: TrainingRecipe, size: int, **options: Any) -> State:
    """Return rank 0's outcome; every rank has the same."""
    states = run_cut(partial(train_by_recipe, recipe=recipe), size, plan=plan, local_size=LOCAL_SIZE[size], **options)
    for state in states[1:]:
        assert_same_bits(state, states[0])
    return states[0]


@pytest.mark.parametrize("plan", npuzero.PRESETS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", [ONE, FOUR], ids=["one micro-batch", "four, clipped, two groups"])
def test_training_equals_plain_torch(plan: str, size: int, recipe: TrainingRecipe) -> None:
    assert_states_close(train_parity(plan, recipe, size), plain_parity(recipe, size))


@pytest.mark.slow
@pytest.mark.parametrize("plan", npuzero.PRESETS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", LONG, ids=["one micro-batch", "four, clipped, two groups"])
def test_ten_steps_equal_plain_torch(plan: str, size: int, recipe: TrainingRecipe) -> None:
    assert_states_close(train_parity(plan, recipe, size), plain_parity(recipe, size))


@pytest.mark.parametrize("plan", npuzero.PRESETS)
def test_what_does_not_train_keeps_its_bits(plan: str) -> None:
    """Frozen parameters, and one that no forward uses: it has no gradient, so not even weight decay touches it."""
    before = {name: value.detach() for name, value in build_seeded_model().state_dict().items()}
    still = ("positions", "blocks.1.norm.weight", "blocks.1.norm.bias", "unused")
    after = train_parity(plan, ONE, 4)
    assert_same_bits({name: after[name] for name in still}, {name: before[name] for name in still})
    trains = [
        name for name, parameter in build_seeded_model().named_parameters() if name not in still and parameter.numel()
    ]
    assert not [name for name in trains if torch.equal(after[name], before[name])], "these should have moved"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", [ONE, CLIPPED], ids=["plain", "clipped, two groups"])
def test_stages_give_the_same_bits(size: int, recipe: TrainingRecipe) -> None:
    for plan in ONE_LEVEL[1:]:
        assert_same_bits(train_parity(plan, recipe, size), train_parity(ONE_LEVEL[0], recipe, size))


def test_with_several_micro_batches_the_bits_depend_on_when_gradients_are_reduced_alone() -> None:
    for at_the_end, after_each in (("zero0", "zero2"), ("zero1", "zero3"), ("zero1", "zero3-keep"), ("zero1", "hpz")):
        assert_same_bits(train_parity(at_the_end, FOUR, 4), train_parity("zero0", FOUR, 4))
        assert_same_bits(train_parity(after_each, FOUR, 4), train_parity("zero2", FOUR, 4))


#: Overlap, prefetch depth, and bytes per bucket: each parameter alone, a few, all of a unit.
SETTINGS = (
    *(Settings(overlap=what) for what in (False, "gradients", "parameters")),
    *(Settings(prefetch=ahead) for ahead in (0, 2, 5)),
    *(Settings(bucket_bytes=nbytes) for nbytes in (1, 2048)),
    Settings(overlap=False, bucket_bytes=2048),
)


@pytest.mark.parametrize("plan", PLANS)
def test_settings_change_no_bit(plan: str) -> None:
    for settings in SETTINGS:
        assert_same_bits(train_parity(plan, FOUR, 4, settings=settings), train_parity(plan, FOUR, 4))


def _one_unit(name: str, module: nn.Module) -> bool:
    return name == "blocks.0"


#: The default by class; every layer by itself; units within units; one block alone.
UNITS = (ToyBlock, (nn.Linear, nn.LayerNorm), (ToyBlock, nn.Sequential), _one_unit)


@pytest.mark.parametrize("plan", PLANS)
def test_units_change_no_bit(plan: str) -> None:
    """Without clipping: the norm adds up flat by flat."""
    for units in UNITS:
        assert_same_bits(train_parity(plan, ONE, 4, units=units), train_parity(plan, ONE, 4))


def test_a_world_of_one_rank_is_plain_training() -> None:
    for plan in npuzero.PRESETS:
        (state,) = run_cut(partial(train_by_recipe, recipe=FOUR), 1, plan=plan)
        assert_states_close(state, plain_parity(FOUR, 1))
