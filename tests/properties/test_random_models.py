"""Models nobody would write, by chance: whatever the tree, npuzero trains it as plain torch does."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import npuzero
from npuzero import Settings, comm
from npuzero.comm import World
from world.train import CutSession, PlainSession, Session, State, assert_same_bits, assert_states_close

DIM, STEPS = 6, 3
#: Shapes that are hard to cut: nothing, a scalar, fewer rows than ranks, and an ordinary one.
SHAPES = ((0, DIM), (), (1,), (1, DIM), (3, DIM), (DIM,), (2, 0, 3), (17, DIM))


@dataclass(frozen=True)
class RandomDesign:
    """A random model: all of it follows from the seed."""

    seed: int
    depth: int
    width: int


class RandomNode(nn.Module):
    """Some parameters of its own and some children, called in order: alone, in a list or in a Sequential."""

    def __init__(self, draw: random.Random, depth: int, width: int) -> None:
        super().__init__()
        for i in range(draw.randint(0, 3)):
            data = torch.randn(draw.choice(SHAPES)) * 0.3
            setattr(self, f"p{i}", nn.Parameter(data, requires_grad=draw.random() < 0.8))
        children = [RandomNode(draw, depth - 1, width) for _ in range(draw.randint(1, width))] if depth else []
        leaves = [nn.Linear(DIM, DIM, bias=draw.random() < 0.5) for _ in range(draw.randint(0, 2))]
        kind = draw.choice(("list", "sequential", "attributes"))
        self.kind = kind
        if kind == "list":
            self.parts = nn.ModuleList([*children, *leaves])
        elif kind == "sequential":
            self.parts = nn.Sequential(*children, *leaves)
        else:
            for i, child in enumerate((*children, *leaves)):
                setattr(self, f"child{i}", child)
        self.skip = draw.random() < 0.2  # its own parameters take no part in the forward

    def forward(self, x: Tensor) -> Tensor:
        if not self.skip:
            for parameter in self.parameters(recurse=False):
                x = x + parameter.sum(0)[:DIM] if parameter.shape[1:] == (DIM,) else x + parameter.sum() * 0.1
        parts = self.parts if self.kind == "list" else self.children()
        for part in parts:
            x = x + torch.tanh(part(x))
        return x


class RandomTreeModel(nn.Module):
    """A tree between an entry that always trains and a head; some parameters of one shape are tied."""

    def __init__(self, design: RandomDesign) -> None:
        super().__init__()
        draw = random.Random(design.seed)
        self.entry = nn.Linear(DIM, DIM)
        self.tree = RandomNode(draw, design.depth, design.width)
        self.head = nn.Linear(DIM, 3)
        for _ in range(draw.randint(0, 2)):
            linears = [m for m in self.modules() if isinstance(m, nn.Linear) and m.weight.shape == (DIM, DIM)]
            draw.choice(linears).weight = draw.choice(linears).weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tree(self.entry(x)))


def build_random_model(design: RandomDesign) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(design.seed)
        return RandomTreeModel(design)


def train_random_model(session: Session, micro_batches: int) -> State:
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    norms = []
    for step in range(STEPS):
        for micro_batch in range(micro_batches):

            def loss_of(rank: int, number: int = 10 * step + micro_batch) -> Tensor:
                x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(100 * number + rank))
                return session.model(x).square().mean()

            (session.mean(loss_of) / micro_batches).backward()
        norms.append(session.clip(1.0))
        optimizer.step()
        optimizer.zero_grad()
    return {"gradient norms": torch.stack(norms)} | session.state()


designs = st.builds(RandomDesign, st.integers(0, 10_000), st.integers(0, 2), st.integers(1, 3))
settings_of = st.builds(
    Settings, overlap=st.booleans(), prefetch=st.integers(0, 3), bucket_bytes=st.sampled_from([1, 200, 2**20])
)
worlds = st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 3), (3, 1), (4, 2), (4, 4)])


def check_random_model(
    design: RandomDesign, plan: str, shape: tuple[int, int], settings: Settings, micro_batches: int
) -> None:
    size, local_size = shape
    models = [
        build_random_model(design) for _ in range(size)
    ]  # made here: the generator that fills them is the process's own

    def rank(world: World) -> State:
        session = CutSession(models[world.rank], world, plan=plan, local_size=local_size, settings=settings)
        return train_random_model(session, micro_batches)

    states = comm.run_threads(size, rank)
    for state in states[1:]:
        assert_same_bits(state, states[0])
    assert_states_close(
        states[0], train_random_model(PlainSession(build_random_model(design), range(size), size), micro_batches)
    )


@pytest.fixture(autouse=True, scope="module")
def _one_thread_per_rank():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


sweep = partial(settings, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
examples = given(designs, st.sampled_from(npuzero.PRESETS), worlds, settings_of, st.integers(1, 2))


@sweep(max_examples=12)
@examples
def test_a_random_model_trains_as_plain_torch(
    design: RandomDesign, plan: str, shape: tuple[int, int], settings: Settings, micro_batches: int
) -> None:
    check_random_model(design, plan, shape, settings, micro_batches)


@pytest.mark.slow
@sweep(max_examples=150)
@examples
def test_many_random_models_train_as_plain_torch(
    design: RandomDesign, plan: str, shape: tuple[int, int], settings: Settings, micro_batches: int
) -> None:
    check_random_model(design, plan, shape, settings, micro_batches)
