"""Several optimizers over one model: a step sends each byte once, and the report counts all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import comm
from npuzero.comm import World
from world.test_gradient_values import every_plan
from world.toy import build_seeded_model, toy_tokens
from world.train import CutSession, Session, State, check_equals_plain

Step = Callable[[list[torch.optim.Optimizer]], None]


def one_after_the_other(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def each_by_itself(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def build_both_optimizers(session: Session) -> list[torch.optim.Optimizer]:
    """One of matrices, as Muon's users have it, one of the rest: each unit has parameters of both."""
    parameters = list(session.model.parameters())
    return [
        session.optimizer(torch.optim.AdamW, [p for p in parameters if (p.dim() > 1) is matrices], lr=1e-2)
        for matrices in (True, False)
    ]


@pytest.mark.parametrize("step", [one_after_the_other, each_by_itself])
@every_plan
def test_they_train_as_torchs(plan: str, step: Step) -> None:
    """Also where one of them skips a turn, where the program reads and writes in between, and steps without zeroing."""

    def scenario(session: Session) -> State:
        optimizers = build_both_optimizers(session)
        norms = []
        for turn in range(6):
            session.loss(turn).backward()
            if turn == 1:
                norms.append(session.clip(0.1))
            if turn == 2:
                optimizers[0].step()
                norms.append(torch.stack([p.float().norm() for p in session.state().values()]).norm())
                optimizers[1].step()
            elif turn == 3:
                optimizers[1].step()
                session.loss(turn, 1).backward()
            elif turn == 4:
                optimizers[0].step()
                norms.append(session.clip(0.1))
                optimizers[1].step()
                session.model.zero_grad()
            else:
                step(optimizers)
        return {"norms": torch.stack(norms)}

    check_equals_plain(scenario, 4, plan=plan, local_size=2)


@pytest.mark.parametrize("step", [one_after_the_other, each_by_itself])
@pytest.mark.parametrize("plan", ["zero1", "zero2", "hsdp", "zero3", "offload", "zero1.5"])
def test_a_step_sends_what_was_foretold(plan: str, step: Step) -> None:
    def rank(world: World) -> None:
        session = CutSession(build_seeded_model(), world, plan=plan, local_size=2)
        foretold = npuzero.predict(build_seeded_model(), plan, world=4, local_size=2, precision="fp32").bytes_sent
        optimizers = build_both_optimizers(session)
        for turn in range(3):
            session.loss(turn).backward()
            step(optimizers)
            if turn:  # R4 of parts off the device runs in the next forward
                sent = npuzero.report(session.model).bytes_sent
                assert {k: v for k, v in sent.items() if k != "control"} == {
                    k: v for k, v in foretold.items() if k != "control"
                }

    comm.run_threads(4, rank)


class TwoNetworks(nn.Module):
    """A generator and a discriminator, of blocks that are units."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.d = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, parts: str) -> Tensor:
        for part in parts:
            for block in self.g if part == "g" else self.d:
                x = block(x).tanh()
        return x


@pytest.mark.parametrize("plan", ["zero1", "zero2"])
def test_only_units_that_were_updated_are_sent(plan: str) -> None:
    """Of a generator's step those of the generator, though the discriminator has gradients; of both steps all."""

    def rank(world: World) -> list[int]:
        model = npuzero.zero(build_seeded_model(make=TwoNetworks), world=world, plan=plan)
        assert isinstance(model, TwoNetworks)
        g, d = (npuzero.AdamW(part.parameters(), lr=0.1) for part in (model.g, model.d))
        sent = []
        for parts, steps in (("d", [d]), ("gd", [g]), ("gd", [g, d])):
            model.zero_grad()
            model(toy_tokens(0, 0, world.rank)[:, :8].float(), parts).square().mean().backward()
            for optimizer in steps:
                optimizer.step()
            sent.append(npuzero.report(model).bytes_sent["all_gather"])
        return sent

    for of_d, of_g, of_both in comm.run_threads(2, rank):
        assert of_d > 0 and of_g > 0
        assert of_d * 2 == of_g * 3
        assert of_both == of_d + of_g


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("plan", ["zero1", "zero2", "hsdp", "offload"])
def test_chunks_are_updated_before_they_are_sent(plan: str, overlap: bool) -> None:
    """The second optimizer has more chunks to update when R4 of the first unit ends."""

    def scenario(session: Session) -> None:
        optimizers = build_both_optimizers(session)
        for turn in range(3):
            session.loss(turn).backward()
            one_after_the_other(optimizers)

    check_equals_plain(
        scenario, 2, plan=plan, settings=npuzero.Settings(overlap=overlap, chunk_bytes=100, bucket_bytes=1)
    )
