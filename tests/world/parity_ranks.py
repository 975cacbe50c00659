"""The program of a rank in a job of processes: train by DDP, then by every preset, and compare there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch.nn.parallel import DistributedDataParallel

from npuzero.comm import World

from .toy import TrainingRecipe, build_seeded_model
from .train import PlainSession, State, assert_same_bits, assert_states_close, train_by_recipe, train_sharded

ONE = TrainingRecipe()
CLIPPED = TrainingRecipe(steps=5, clip=0.5, groups=True)
FOUR = TrainingRecipe(micro_batches=4, clip=0.5, groups=True)

STAGES = ("zero0", "zero1", "zero2", "zero3")
#: A job: recipes, and the plans that train by them.
Work = Mapping[TrainingRecipe, Sequence[str]]


class DdpSession(PlainSession):
    """Run torch's DistributedDataParallel on one rank."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(DistributedDataParallel(build_seeded_model(), find_unused_parameters=True), [rank], world)

    def state(self) -> State:
        return {name.removeprefix("module."): value for name, value in super().state().items()}


def check_equals_ddp(world: World, work: Work, local_size: int) -> dict[tuple[TrainingRecipe, str], str]:
    """Train by each plan: equal to DDP, the same on all ranks, and equal bits across stages with one micro-batch.

    Returns:
        A digest of each outcome's bits.
    """
    digests = {}
    for recipe, plans in work.items():
        session = DdpSession(world.rank, world.size)
        expected = train_by_recipe(session, recipe) | session.state()
        states = {}
        for plan in plans:
            states[plan], _ = train_sharded(world, recipe, plan=plan, local_size=local_size)
            assert_states_close(states[plan], expected)
            digests[recipe, plan] = mine = state_digest(states[plan])
            assert world.exchange(mine) == [mine] * world.size, f"{plan}: the ranks have parted"
        stages = [states[plan] for plan in plans if plan in STAGES]
        if recipe.micro_batches == 1:
            for stage in stages:
                assert_same_bits(stage, stages[0])
    return digests


def state_digest(state: State) -> str:
    hashed = hashlib.sha256()
    for name in sorted(state):
        hashed.update(state[name].numpy().tobytes())
    return hashed.hexdigest()
