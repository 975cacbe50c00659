"""One scenario, two runs: plain torch with the data of all ranks, and npuzero on each rank with its own.

A scenario is a function of a :class:`Session`: a user's training loop. ``check_equals_plain`` runs it
both ways and compares every tensor of the model, and the scenario's other results.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import npuzero
from npuzero import comm
from npuzero.comm import World

from .toy import EPS, ToyGPT, TrainingRecipe, build_seeded_model, toy_loss, toy_param_groups, toy_tokens

State = dict[str, Tensor]
Make = Callable[[], nn.Module]

#: Largest difference, relative to each tensor's largest magnitude, from another order of a sum.
BOUND = 1e-5


class Session(ABC):
    """Train a model in one of the two ways.

    Attributes:
        model: the model, sharded or plain.
        ranks: the ranks that supply this session's data.
        world: the number of ranks.
    """

    def __init__(self, model: nn.Module, ranks: Iterable[int], world: int) -> None:
        self.model = model
        self.ranks = tuple(ranks)
        self.world = world

    def mean(self, of: Callable[[int], Tensor]) -> Tensor:
        """Return the mean of ``of(rank)`` over the ranks that supply this session's data."""
        return torch.stack([of(rank) for rank in self.ranks]).mean()

    def loss(self, step: int = 0, micro_batch: int = 0, **options: Any) -> Tensor:
        return self.mean(lambda rank: toy_loss(self.model, toy_tokens(step, micro_batch, rank), **options))

    def optimizer(
        self, kind: type[torch.optim.Optimizer], params: Any = None, *, fused: bool = True, **options: Any
    ) -> torch.optim.Optimizer:
        """Return ``kind`` over ``params``, by default all parameters; ``fused``: npuzero's own form if there is one."""
        if kind in (torch.optim.Adam, torch.optim.AdamW):
            options.setdefault("eps", EPS)
        params = self.model.parameters() if params is None else params
        return self.contender(kind, fused)(params, **options)

    @abstractmethod
    def contender(self, kind: type[torch.optim.Optimizer], fused: bool) -> Callable[..., torch.optim.Optimizer]:
        """Return this session's constructor of ``kind``, from parameters and options."""

    @abstractmethod
    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients; return their norm before."""

    @abstractmethod
    def scaler(self, **options: Any) -> Any:
        """Return a loss scaler."""

    @abstractmethod
    def no_sync(self) -> contextlib.AbstractContextManager[None]: ...

    @abstractmethod
    def load(self, state: State) -> None: ...

    @abstractmethod
    def state(self) -> State:
        """Return unsharded tensors by name."""


class PlainSession(Session):
    """Plain torch: the oracle."""

    def contender(self, kind: type[torch.optim.Optimizer], fused: bool) -> Callable[..., torch.optim.Optimizer]:
        return kind

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        some = [parameter for parameter in self.model.parameters() if parameter.numel()]  # torch has no largest of none
        return torch.nn.utils.clip_grad_norm_(some, max_norm, norm_type)

    def scaler(self, **options: Any) -> Any:
        return torch.amp.GradScaler("cpu", **options)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def load(self, state: State) -> None:
        self.model.load_state_dict(state)

    def state(self) -> State:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


class CutSession(Session):
    """npuzero, on one rank."""

    def __init__(self, model: nn.Module, world: World, **options: Any) -> None:
        super().__init__(npuzero.zero(model, world=world, **options), [world.rank], world.size)

    def contender(self, kind: type[torch.optim.Optimizer], fused: bool) -> Callable[..., torch.optim.Optimizer]:
        own = {torch.optim.AdamW: npuzero.AdamW, torch.optim.Adam: npuzero.Adam}
        return own[kind] if fused and kind in own else partial(npuzero.ZeroOptimizer, kind)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return npuzero.clip_grad_norm_(self.model, max_norm, norm_type)

    def scaler(self, **options: Any) -> Any:
        return npuzero.LossScaler("cpu", **options)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return npuzero.no_sync(self.model)

    def load(self, state: State) -> None:
        npuzero.load_full_state_dict(self.model, state)

    def state(self) -> State:
        return npuzero.full_state_dict(self.model, rank0_only=False)


#: A training loop; its result is compared in addition to the model.
Scenario = Callable[[Session], "State | None"]


def train_by_recipe(session: Session, recipe: TrainingRecipe) -> State:
    """Run the loop of all parity tests; return the final model, and the gradient norms of the steps."""
    optimizer = session.optimizer(torch.optim.AdamW, toy_param_groups(session.model, recipe), lr=1e-2, eps=recipe.eps)
    norms = []
    for step in range(recipe.steps):
        for micro_batch in range(recipe.micro_batches):
            (session.loss(step, micro_batch) / recipe.micro_batches).backward()
        if recipe.clip is not None:
            norms.append(session.clip(recipe.clip))
        optimizer.step()
        optimizer.zero_grad()
    return {"gradient norms": torch.stack(norms)} if norms else {}


def train_plain(model: nn.Module, world: int, recipe: TrainingRecipe) -> State:
    """Return the expected result of a run on ``world`` ranks, by plain torch."""
    session = PlainSession(model, range(world), world)
    return train_by_recipe(session, recipe) | session.state()


def train_sharded(world: World, recipe: TrainingRecipe, model: Any = None, **options: Any) -> tuple[State, Any]:
    """Train under ``npuzero.zero(model, **options)`` on this rank; return unsharded tensors, and the model."""
    session = CutSession(build_seeded_model() if model is None else model, world, **options)
    return train_by_recipe(session, recipe) | session.state(), session.model


def run_plain(scenario: Scenario, size: int, make: Make = ToyGPT) -> State:
    """Return the scenario's outcome by plain torch."""
    session = PlainSession(build_seeded_model(make=make), range(size), size)
    returned = scenario(session) or {}
    return returned | session.state()


_expected = cache(run_plain)


def run_cut(scenario: Scenario, size: int, make: Make = ToyGPT, **options: Any) -> list[State]:
    """Return the scenario's outcome by npuzero, on each rank."""

    def rank(world: World) -> State:
        session = CutSession(build_seeded_model(make=make), world, **options)
        returned = scenario(session) or {}
        return {name: value.detach().clone() for name, value in returned.items()} | session.state()

    return comm.run_threads(size, rank)


def check_equals_plain(
    scenario: Scenario, size: int, make: Make = ToyGPT, bound: float = BOUND, **options: Any
) -> State:
    """Check that npuzero's outcome is the same on all ranks, and equals plain torch's."""
    states = run_cut(scenario, size, make, **options)
    for state in states:
        assert_same_bits(state, states[0])
    assert_states_close(states[0], _expected(scenario, size, make), bound)
    return states[0]


def assert_states_close(found: State, expected: State, bound: float = BOUND) -> None:
    """Check that every tensor differs by at most ``bound`` of its largest magnitude."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = relative_difference(found[name], value)
        assert difference <= bound, f"{name} differs by {difference:.2e} of its largest magnitude"


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest magnitude expected."""
    assert found.shape == expected.shape
    if not expected.numel():
        return 0.0
    scale = expected.double().abs().max().clamp(min=1e-30)
    return float((found.double() - expected.double()).abs().max() / scale)


def worst_difference(found: State, expected: State) -> float:
    """Return the largest relative difference of any tensor."""
    assert found.keys() == expected.keys()
    return max(relative_difference(found[name], value) for name, value in expected.items())


def assert_same_bits(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(_as_bytes(found[name]), _as_bytes(value))]
    assert not different, f"{different} differ in some bits"


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
