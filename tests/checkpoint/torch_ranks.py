"""FSDP2 and plain torch against npuzero: the program of each rank of a job of processes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import npuzero
from npuzero import checkpoint
from npuzero.comm import World
from world.toy import ToyBlock

from .training import checkpoint_loss, global_batch_tokens

SAVED, END = 2, 4


class FsdpModel(nn.Module):
    """A model that FSDP2 supports: no scalars, every parameter in use."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(37, dim)
        self.blocks = nn.ModuleList(ToyBlock(dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 37, bias=False)
        for block in self.blocks:
            block.empty = nn.Parameter(torch.zeros(3, dim))
        self.register_buffer("seen", torch.arange(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_fsdp_model(seed: int) -> FsdpModel:
    torch.manual_seed(seed)
    return FsdpModel()


class Fsdp2Training:
    """Train a model by FSDP2 and torch's AdamW."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        mesh = init_device_mesh("cpu", (world.size,))
        self.model = build_fsdp_model(seed)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def steps(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            checkpoint_loss(self.model, global_batch_tokens(step).chunk(self.world.size)[self.world.rank]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def load(self, folder: Path) -> None:
        state = self.state_dict()
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optim"])

    def state(self) -> dict[str, Tensor]:
        found = self.state_dict()
        return flatten_states(found["model"], found["optim"]["state"])


class NpuzeroTraining:
    """Train the same model by npuzero."""

    def __init__(self, world: World, seed: int, plan: str) -> None:
        self.world = world
        self.model: Any = npuzero.zero(build_fsdp_model(seed), plan=plan, local_size=1, world=world)
        self.optimizer: Any = npuzero.AdamW(self.model.parameters(), lr=1e-2)

    steps = Fsdp2Training.steps

    def state(self) -> dict[str, Tensor]:
        names = [name for name, _ in self.model.named_parameters()]
        found = self.optimizer.state_dict()["state"]
        state = npuzero.full_state_dict(self.model, rank0_only=False)
        return flatten_states(state, {names[i]: values for i, values in found.items()})


def flatten_states(weights: dict[str, Any], states: dict[str, Any]) -> dict[str, Tensor]:
    everything = weights | {f"{name}.{key}": v for name, values in states.items() for key, v in values.items()}
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for k, v in everything.items()}


def assert_tensors_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different, different


def fsdp2_loads_ours(world: World, folder: Path) -> None:
    for plan in ("zero3", "zero1", "hpz"):
        ours = NpuzeroTraining(world, 0, plan)
        ours.steps(0, SAVED)
        path = checkpoint.save(folder / plan, ours.model, ours.optimizer, step=SAVED).wait()
        theirs = Fsdp2Training(world, 1)
        theirs.load(path)
        assert_tensors_equal(theirs.state(), ours.state())
        theirs.steps(SAVED, END)  # trains on from the loaded state
        assert int(theirs.state()["norm.weight.step"]) == END


def we_load_fsdp2s(world: World, folder: Path) -> None:
    theirs = Fsdp2Training(world, 0)
    theirs.steps(0, SAVED)
    dcp.save(theirs.state_dict(), checkpoint_id=folder / "theirs")
    flat = {
        "model": get_model_state_dict(theirs.model),
        "optim": get_optimizer_state_dict(
            theirs.model, theirs.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
        ),
    }
    dcp.save({"app": flat}, checkpoint_id=folder / "flattened")
    for name, plan in (("theirs", "zero3"), ("theirs", "zero0"), ("flattened", "hsdp")):
        ours = NpuzeroTraining(world, 1, plan)
        loaded = checkpoint.load(folder / name, ours.model, ours.optimizer)
        assert loaded.step is None and ours.optimizer.param_groups[0]["lr"] == 1e-2
        assert_tensors_equal(ours.state(), theirs.state())
        ours.steps(SAVED, END)
        assert int(ours.state()["norm.weight.step"]) == END


def dcp_itself_takes_cut_tensors(world: World, folder: Path) -> None:
    """Save and load by torch.distributed.checkpoint, with npuzero's models under different plans on both sides."""
    first = NpuzeroTraining(world, 0, "zero3")
    first.steps(0, SAVED)
    dcp.save(checkpoint.state_dict(first.model, first.optimizer), checkpoint_id=folder)
    theirs = Fsdp2Training(world, 1)
    theirs.load(folder)
    assert_tensors_equal(theirs.state(), first.state())
    second = NpuzeroTraining(world, 1, "zero1.5")
    state = checkpoint.state_dict(second.model, second.optimizer)
    dcp.load(state, checkpoint_id=folder)
    checkpoint.load_state_dict(second.model, second.optimizer, state=state)
    assert_tensors_equal(second.state(), first.state())


def exchange_both_ways(world: World, folder: Path) -> None:
    """Run all checks in one job: processes start slowly."""
    warnings.simplefilter("default")  # torch's own
    assert dist.get_world_size() == world.size
    for fn in (fsdp2_loads_ours, we_load_fsdp2s, dcp_itself_takes_cut_tensors):
        fn(world, folder / fn.__name__)
