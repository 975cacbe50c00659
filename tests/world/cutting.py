"""A model with parameters cut over tensor ranks in every supported way, and its training in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import npuzero
from npuzero.comm import Communicator, Mesh, World
from npuzero.parallel.functions import all_reduce_sum, copy_to_ranks, gather_replicated, split_replicated
from npuzero.plan import DATA, Cut
from npuzero.shard.layout.tensor_slices import cut_parameter
from world.toy import build_seeded_model

DIM, HIDDEN, WORDS = 12, 24, 17
TENSOR = ("tensor",)


class CutLayer(nn.Module):
    """Rows, packed rows, columns, and packed columns; a bias that is added once."""

    group: Communicator | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.gate_up = nn.Linear(DIM, 2 * HIDDEN)
        self.packed = nn.Parameter(torch.randn(DIM, 2 * HIDDEN) / 4)  # as GPT-2 has it: inputs first
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.bias = nn.Parameter(torch.randn(DIM) / 4)
        self.register_buffer("calls", torch.zeros(()))

    def reset_parameters(self) -> None:
        for parameter in (self.packed, self.bias):
            nn.init.normal_(parameter, std=0.25)
        self.calls.zero_()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.norm(x)
        h = h if self.group is None else copy_to_ranks(h, self.group)
        gate, up = self.gate_up(h).chunk(2, -1)
        left, right = (h @ self.packed).chunk(2, -1)
        y = self.down(F.silu(gate) * up + left * right.sigmoid())
        return x + (y if self.group is None else all_reduce_sum(y, self.group)) + self.bias


class CutWordsModel(nn.Module):
    """A tied embedding cut by columns; the remaining layers see full activations."""

    group: Communicator | None = None

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(CutLayer() for _ in range(2))
        self.head = nn.Linear(DIM, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x if self.group is None else gather_replicated(x, self.group, -1)
        for layer in self.layers:
            x = layer(x)
        if self.group is None:
            return self.head(x)
        return all_reduce_sum(self.head(split_replicated(x, self.group, -1)), self.group)


#: By the ends of names.
CUTS = {
    "gate_up.weight": Cut("tensor", 0, (HIDDEN, HIDDEN)),
    "gate_up.bias": Cut("tensor", 0, (HIDDEN, HIDDEN)),
    "packed": Cut("tensor", 1, (HIDDEN, HIDDEN)),
    "down.weight": Cut("tensor", 1),
    "tokens.weight": Cut("tensor", 1),
}


def find_cut(name: str) -> Cut | None:
    return next((cut for end, cut in CUTS.items() if name.endswith(end)), None)


def cut_model(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Shard ``model`` over the tensor ranks of ``mesh``; its parameters declare their cuts."""
    for module in model.modules():
        if isinstance(module, (CutLayer, CutWordsModel)):
            module.group = mesh.communicator(TENSOR, "tensor") if mesh.size(TENSOR) > 1 else None
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (how := find_cut(name)) is not None:
            cut_parameter(parameter, how)
    return model


def tensor_mesh(world: World, tensor: int) -> Mesh:
    return npuzero.mesh(tensor=tensor, local_size=2 if world.size // tensor == 4 else 1, world=world)


def build_cut_model(world: World, tensor: int, plan: str, seed: int = 0, **options: Any) -> tuple[Any, Mesh]:
    mesh = tensor_mesh(world, tensor)
    return npuzero.zero(
        cut_model(build_seeded_model(seed, make=CutWordsModel), mesh), plan=plan, mesh=mesh, **options
    ), mesh


def cut_batch(step: int, rank: int, ranks: int) -> Tensor:
    """Return [12 / ranks, 6] int64: the rank's part of a step's tokens, for any number of ranks."""
    tokens = torch.randint(WORDS, (12, 6), generator=torch.Generator().manual_seed(step))
    return tokens.chunk(ranks)[rank]


def cut_model_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train_words(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    rank: int,
    ranks: int,
    clip: Callable[[], Tensor] | None = None,
) -> list[Tensor]:
    norms = []
    for step in steps:
        cut_model_loss(model, cut_batch(step, rank, ranks)).backward()
        if clip is not None:
            norms.append(clip().detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def train_cut_words(model: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    rank, ranks = mesh.index(DATA), mesh.size(DATA)
    return train_words(model, optimizer, steps, rank, ranks, lambda: npuzero.clip_grad_norm_(model, 0.5))


@cache
def train_words_plain(steps: int) -> dict[str, Tensor]:
    """Return the model and the gradients' norms of one process."""
    model = build_seeded_model(make=CutWordsModel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = train_words(model, optimizer, range(steps), 0, 1, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    return {"norms": torch.stack(norms), **{name: value.detach() for name, value in model.state_dict().items()}}
