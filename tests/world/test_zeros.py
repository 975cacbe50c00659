"""zero_grad(set_to_none=False): zeros are a gradient, by which momentum and weight decay move a parameter on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import comm
from npuzero.comm import World
from world.test_gradient_values import every_plan
from world.toy import build_seeded_model
from world.train import BOUND, CutSession, Session, State, assert_same_bits, check_equals_plain

#: By step the ranks that use the shift.
SHIFTS = [(0, 1), (), (1,), (1,), (), (0,)]


class UsedBranches(nn.Module):
    """Blocks of which a forward uses some, the same on all ranks, and a vector that it uses on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 3)
        self.shift = nn.Parameter(torch.ones(5))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, blocks: Sequence[int], shifted: bool) -> Tensor:
        x = x + self.shift if shifted else x
        for i in blocks:
            x = x + self.blocks[i](x)
        return self.head(x).square().mean()


def branches_loss(session: Session, step: int, *blocks: int, shifts: Sequence[int] = ()) -> Tensor:
    def of(rank: int) -> Tensor:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        return session.model(x, blocks, rank in shifts)

    return session.mean(of)


def weights_and_rest_optimizers(session: Session, kind: type[torch.optim.Optimizer]) -> Iterator[torch.optim.Optimizer]:
    """One of weights, one of the rest: each flat has parameters of both."""
    options = {"momentum": 0.9, "lr": 0.1} if kind is torch.optim.SGD else {"lr": 0.1}
    for matrices in (True, False):
        some = [p for p in session.model.parameters() if (p.dim() > 1) is matrices]
        yield session.optimizer(kind, some, weight_decay=0.1, **options)


def by_the_optimizers(session: Session, made: list[torch.optim.Optimizer], step: int) -> None:
    for optimizer in made:
        optimizer.zero_grad(set_to_none=False)


def by_the_model(session: Session, made: list[torch.optim.Optimizer], step: int) -> None:
    session.model.zero_grad(set_to_none=False)


def by_one_optimizer(session: Session, made: list[torch.optim.Optimizer], step: int) -> None:
    """The second optimizer drops its gradients, or keeps them."""
    made[step % 2].zero_grad(set_to_none=False)
    if step % 3 == 1:
        made[1 - step % 2].zero_grad()


@pytest.mark.parametrize("zero", [by_the_optimizers, by_the_model, by_one_optimizer])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
@every_plan
def test_zeros_update(plan: str, kind: type[torch.optim.Optimizer], zero: Callable[..., None]) -> None:
    """In the next step no rank uses block 1, and one rank alone the shift; zeros before the step, and twice; a step by
    zeros alone; more micro-batches.
    """

    def scenario(session: Session) -> State:
        made = list(weights_and_rest_optimizers(session, kind))
        norms = []
        for step in range(6):
            for micro in range(1 + step % 2):
                used = (0, 2) if step else (0, 1, 2)
                branches_loss(session, 7 * step + micro, *used, shifts=SHIFTS[step]).backward()
            if step == 3:
                zero(session, made, step)
                branches_loss(session, step, 0, 1, shifts=(0,)).backward()
            if step % 2:
                norms.append(session.clip(0.05))
            if step == 5:
                zero(session, made, step)
            for optimizer in made:
                optimizer.step()
            zero(session, made, step)
            if step == 2:
                zero(session, made, step)
                for optimizer in made:
                    optimizer.step()
        return {"norms": torch.stack(norms)}

    check_equals_plain(scenario, 2, UsedBranches, bound=BOUND if kind is torch.optim.SGD else 1e-4, plan=plan)


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2", "zero3", "offload"])
def test_zeros_can_be_read(plan: str) -> None:
    def rank(world: World) -> None:
        session = CutSession(build_seeded_model(make=UsedBranches), world, plan=plan)
        weight = session.model.head.weight
        for zero in (session.model.zero_grad, npuzero.AdamW(session.model.parameters()).zero_grad):
            branches_loss(session, 0, 0, 1).backward()
            zero(set_to_none=False)
            found = npuzero.full_gradient(weight)
            assert found is not None and not found.any()
            assert npuzero.full_gradient(session.model.never) is None
            assert set(npuzero.grad_norms(session.model).values()) == {0.0}
            branches_loss(session, 0, 0, 1).backward()
            again = npuzero.full_gradient(weight)
            assert again is not None and again.any()
            if plan == "zero0":
                assert weight.grad.any()
                zero(set_to_none=False)
                assert not weight.grad.any()
            zero()

    comm.run_threads(2, rank)


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2", "zero3"])
def test_where_all_is_used_no_bit_moves(plan: str) -> None:
    def train(world: World, to_none: bool) -> State:
        session = CutSession(build_seeded_model(make=UsedBranches), world, plan=plan, precision="bf16")
        optimizer = session.optimizer(torch.optim.AdamW, lr=0.1)
        for step in range(3):
            for micro in range(2):
                with session.no_sync() if micro == 0 else torch.enable_grad():
                    branches_loss(session, 2 * step + micro, 0, 1, 2).backward()
            session.clip(0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        return session.state()

    first, second = (comm.run_threads(2, lambda world, to=to: train(world, to)) for to in (True, False))
    assert_same_bits(second[0], first[0])
