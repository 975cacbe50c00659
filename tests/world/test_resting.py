"""Parameters on the host or in files: programs use them as they use parameters on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import npuzero
from npuzero import Memory, Plan, Settings, StateError, comm
from npuzero.comm import World
from world.test_tiers import HOST, NVME, PRECISIONS, folders, placed_plan
from world.toy import ToyBlock, ToyGPT, build_seeded_model
from world.train import CutSession, Session, State, assert_same_bits, run_cut

__all__ = ["folders"]  # a fixture

SETTINGS = Settings(chunk_bytes=10_000)  # of two units, some; more chunks than a ring has slots


class ClampingToyBlock(ToyBlock):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.out.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


class CheckpointedToyBlock(ToyBlock):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


def run_resting_steps(session: Session, between: Callable[[int], Any] = lambda step: None) -> State:
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        between(step)
        for micro_batch in range(2):
            session.loss(step, micro_batch).backward()
        session.clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return session.state()


def evaluates_between_steps(session: Session) -> State:
    """Without a backward, twice, right after a step and before one."""

    def evaluate(step: int) -> None:
        with torch.no_grad():
            session.loss(step)
            session.loss(step + 1)

    return run_resting_steps(session, evaluate)


def freezes(session: Session) -> State:
    """Some trainable parameters are frozen later: chunks are updated in part."""

    def freeze(step: int) -> None:
        for name, parameter in session.model.named_parameters():
            if "blocks.2" in name and step == 1:
                parameter.requires_grad_(False)

    return run_resting_steps(session, freeze)


def averages(session: Session) -> State:
    """Keep an average of weights, and copy it back."""
    kept: State = {}

    def average(step: int) -> None:
        with npuzero.gathered(session.model, write=True), torch.no_grad():
            for name, parameter in session.model.named_parameters():
                kept[name] = parameter.detach().clone().lerp(kept.get(name, parameter), 0.5)
                parameter.copy_(kept[name])

    return run_resting_steps(session, average)


def make_toy_of_block(block: type[ToyBlock]) -> Callable[[], nn.Module]:
    return lambda: ToyGPT(block=block)


PROGRAMS: dict[str, tuple[Callable[[Session], State], Callable[[], nn.Module]]] = {
    "a forward that clamps": (run_resting_steps, make_toy_of_block(ClampingToyBlock)),
    "checkpointed activations": (run_resting_steps, make_toy_of_block(CheckpointedToyBlock)),
    "evaluations": (evaluates_between_steps, ToyGPT),
    "parameters that are frozen later": (freezes, ToyGPT),
    "an average copied back": (averages, ToyGPT),
}


@pytest.mark.parametrize("memory", [HOST, NVME], ids=lambda memory: memory.name)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_do_as_with_parameters_on_the_device(program: str, memory: Memory) -> None:
    scenario, make = PROGRAMS[program]
    precision = PRECISIONS["split" if memory is HOST else "bf16"]
    far = placed_plan("zero3", precision, 2, memory=memory, parameters=memory)
    here = Plan.preset("zero3", precision=precision, local_size=1)
    found = run_cut(scenario, 2, make, plan=far, settings=SETTINGS)
    for mine, expected in zip(found, run_cut(scenario, 2, make, plan=here), strict=True):
        assert_same_bits(mine, expected)


@pytest.mark.parametrize("block", range(3))
def test_what_was_read_ahead_and_written_since_is_read_again(block: int) -> None:
    """A forward that stops early has prefetched a unit, which is then loaded again, and the first that computes."""

    def rank(world: World, plan: Plan) -> list[Tensor]:
        model = npuzero.zero(build_seeded_model(), world=world, plan=plan, settings=SETTINGS)
        tokens = torch.arange(12).view(1, 12)
        inputs: list[Tensor] = []
        with torch.no_grad():
            model(tokens)
            state = npuzero.full_state_dict(model, rank0_only=False)
            stop = model.blocks[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]) or 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(tokens)
            stop.remove()
            npuzero.load_full_state_dict(model, {name: value * 0.5 for name, value in state.items()})
            return [model.blocks[block](*inputs), model(tokens)]

    far = placed_plan("zero3", PRECISIONS["fp32"], 1, memory=NVME, parameters=NVME)
    found, expected = (
        comm.run_threads(1, lambda world, plan=plan: rank(world, plan))[0]
        for plan in (far, replace(far, parameters=replace(far.parameters, memory=Memory.DEVICE)))
    )
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("memory", [HOST, NVME], ids=lambda memory: memory.name)
def test_one_rank_reads_them_where_their_unit_computes(memory: Memory) -> None:
    def rank(world: World) -> None:
        plan = placed_plan("zero0", PRECISIONS["fp32"], 1, memory=memory, parameters=memory)
        model = CutSession(build_seeded_model(), world, plan=plan).model
        with pytest.raises(StateError, match=f"keeps it on {memory.value}") as refused:
            print(model.scale + 1)
        assert "strict mode" not in str(refused.value)
        with npuzero.gathered(model):
            assert model.scale.item() == 1

    comm.run_threads(1, rank)


def test_what_is_made_from_meta_comes_to_files_flat_by_flat() -> None:
    def rank(world: World, plan: Plan) -> State:
        torch.manual_seed(3)
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
        npuzero.zero(model, world=world, plan=plan, units=nn.Linear)
        return npuzero.full_state_dict(model, rank0_only=False)

    far = placed_plan("zero3", PRECISIONS["bf16"], 1, memory=NVME, parameters=NVME)
    here = Plan.preset("zero3", precision=PRECISIONS["bf16"], local_size=1)
    found, expected = (comm.run_threads(1, lambda world, plan=plan: rank(world, plan))[0] for plan in (far, here))
    assert_same_bits(found, expected)
