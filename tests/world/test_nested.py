"""A model that calls itself within its call, as a framework's training step does: the outermost call is its forward."""

from __future__ import annotations

import pytest
from torch import Tensor

import npuzero
from npuzero import comm
from npuzero.comm import World
from world.toy import ToyGPT, TrainingRecipe, build_seeded_model, toy_tokens
from world.train import Session, State, check_equals_plain, train_by_recipe

PLANS = ("zero2", "zero3")
every_plan = pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in PLANS else pytest.mark.slow) for plan in npuzero.PRESETS]
)


class SelfCallingGPT(ToyGPT):
    """Uses a parameter of its own after the call within."""

    def forward(self, tokens: Tensor, inner: bool = False) -> Tensor:
        return super().forward(tokens) if inner else self(tokens, inner=True) * self.scale


class RaisingNestedGPT(ToyGPT):
    """The call within raises, and its caller goes on without it."""

    def forward(self, tokens: Tensor, inner: bool = False) -> Tensor:
        if inner:
            raise ValueError("within")
        with pytest.raises(ValueError, match="within"):
            self(tokens, inner=True)
        return super().forward(tokens)


def train_nested_steps(session: Session) -> State:
    return train_by_recipe(session, TrainingRecipe(steps=3, micro_batches=2, clip=0.5))


@every_plan
@pytest.mark.parametrize("make", [SelfCallingGPT, RaisingNestedGPT])
def test_it_trains_as_in_plain_torch(make: type[ToyGPT], plan: str) -> None:
    check_equals_plain(train_nested_steps, 2, make, plan=plan)


def test_after_a_call_that_raised_its_parameters_are_sharded_again() -> None:
    class Failing(ToyGPT):
        def forward(self, tokens: Tensor, inner: bool = False) -> Tensor:
            if inner:
                raise ValueError("within")
            return self(tokens, inner=True)

    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(make=Failing), stage=3, world=world)
        for _ in range(2):
            with pytest.raises(ValueError, match="within"):
                model(toy_tokens(0, 0, world.rank))
        with pytest.raises(npuzero.StateError, match="while it is sharded"):
            model.scale.item()

    comm.run_threads(2, rank)
