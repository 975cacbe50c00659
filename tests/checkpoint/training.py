"""Training with data that depend on the step alone, on any number of ranks; and its state, to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import npuzero
from npuzero import checkpoint
from npuzero.comm import World
from world.toy import SEQUENCE, VOCABULARY, build_seeded_model

#: Sequences per step: divisible by every number of ranks from 1 to 4.
BATCH = 12
LOCAL_SIZE = {1: 1, 2: 1, 3: 3, 4: 2}

State = dict[str, Tensor]


class DataPosition:
    """Store a position in the data."""

    def __init__(self, place: int = 0) -> None:
        self.place = place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class CheckpointTraining:
    """Hold a model, its optimizer and scheduler on one rank."""

    def __init__(self, world: World, plan: str, *, seed: int = 0, fused: bool = True, **options: Any) -> None:
        self.world = world
        model = build_seeded_model(seed)
        self.model: Any = npuzero.zero(model, plan=plan, local_size=LOCAL_SIZE[world.size], world=world, **options)
        self.optimizer: Any = npuzero.AdamW(self.groups(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.5, total_iters=10)
        self.losses: list[float] = []

    def groups(self) -> list[dict[str, Any]]:
        named = list(self.model.named_parameters())
        matrices = [p for _, p in named if p.dim() >= 2]
        vectors = [p for _, p in named if p.dim() < 2]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-2}]

    def steps(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            loss = checkpoint_loss(self.model, global_batch_tokens(step).chunk(self.world.size)[self.world.rank])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.losses.append(sum(self.world.exchange(loss.item())) / self.world.size)

    def save(self, folder: Path, step: int, **options: Any) -> checkpoint.Saving:
        return checkpoint.save(folder, self.model, self.optimizer, scheduler=self.scheduler, step=step, **options)

    def load(self, folder: Path, **options: Any) -> checkpoint.Loaded:
        return checkpoint.load(folder, self.model, self.optimizer, scheduler=self.scheduler, **options)

    def state(self) -> State:
        """Return the state that training resumes from, unsharded, by name."""
        names = {i: name for i, (name, _) in enumerate(self._in_groups())}
        state = npuzero.full_state_dict(self.model, rank0_only=False)
        optimizer = self.optimizer.state_dict()
        for number, values in optimizer["state"].items():
            state |= {f"{names[number]}.{key}": value for key, value in values.items()}
        rates = [group["lr"] for group in optimizer["param_groups"]]
        return state | {"rates": torch.tensor(rates, dtype=torch.float64), "losses": torch.tensor(self.losses)}

    def _in_groups(self) -> list[tuple[str, nn.Parameter]]:
        names = {id(p): name for name, p in self.model.named_parameters()}
        return [(names[id(p)], p) for group in self.optimizer.param_groups for p in group["params"]]


def global_batch_tokens(step: int) -> Tensor:
    """Return tokens, [BATCH, SEQUENCE + 1] int64."""
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))


def checkpoint_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
