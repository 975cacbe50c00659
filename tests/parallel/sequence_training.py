"""A decoder with wrapped attention, data with some ignored labels, and training over slices of sequences, compared with
one process that has the full sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import npuzero
from npuzero import parallel
from npuzero.comm import Communicator, CountingCommunicator, Mesh, World, run_threads
from npuzero.plan import DATA, Sent, sent_by_verb
from world.toy import build_seeded_model
from world.train import assert_same_bits, assert_states_close

VOCABULARY, DIM, HEADS, SEQUENCE, BATCH, LAYERS, STEPS = 29, 32, 8, 16, 2, 2, 3


class SequenceLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.attend: Callable[..., Tensor] = F.scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class SequenceDecoder(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Embedding(SEQUENCE, DIM)
        self.layers = nn.ModuleList(SequenceLayer() for _ in range(layers))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WatchedMesh(Mesh):
    """Count the bytes that functions over its communicators send."""

    def __init__(self, world: World, **sizes: Any) -> None:
        super().__init__(world, **sizes)
        self.sent = Sent()

    def communicator(self, axes: tuple[str, ...], purpose: str) -> Communicator:
        return CountingCommunicator(super().communicator(axes, purpose), self.sent, self.shape.sizes(axes))


def sequence_batch(step: int, group: int) -> dict[str, Tensor]:
    """Return the full sequences of the ``group`` of ranks that share them; later groups have fewer counted labels."""
    tokens = torch.randint(
        VOCABULARY - 1, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(100 * step + group)
    )
    labels = tokens.clone()
    labels[0, : 3 + 5 * (group + step) % 11] = -100
    return {"input_ids": tokens, "labels": labels}


@dataclass(frozen=True)
class SequenceRecipe:
    """Describe a training, for one process or many ranks."""

    optimizer: str = "sgd"
    steps: int = STEPS
    micro_batches: int = 1
    clip: float = 0.3


_KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-3}),
}


@cache
def train_sequence_plain(groups: int, recipe: SequenceRecipe) -> dict[str, Tensor]:
    """Train in one process: the loss is the mean over all counted labels of all groups and micro-batches of a step."""
    model = build_seeded_model(make=SequenceDecoder)
    kind, options = _KINDS[recipe.optimizer]
    optimizer = kind(model.parameters(), **options)
    norms = []
    for step in range(recipe.steps):
        whole = [
            sequence_batch(step * recipe.micro_batches + u, g)
            for u in range(recipe.micro_batches)
            for g in range(groups)
        ]
        tokens, labels = (torch.cat([each[name] for each in whole]) for name in ("input_ids", "labels"))
        logits = model(tokens, torch.arange(SEQUENCE).expand(tokens.shape))
        F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), recipe.clip))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": torch.stack(norms), **{name: value.detach() for name, value in model.state_dict().items()}}


def build_sequence_model(mesh: Mesh, layers: int = LAYERS) -> Any:
    model: Any = build_seeded_model(make=lambda: SequenceDecoder(layers))
    for layer in model.layers:
        layer.attend = parallel.attention(layer.attend, mesh)
    return model


def saved_bytes(compute: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """Return the result of ``compute``, and the bytes with a batch dimension that are saved for backward."""
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim() > 1 and tensor.shape[0] == BATCH:
            kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compute()
    return result, sum(kept)


def train_sequence_rank(
    world: World, plan: Any, sizes: dict[str, int], recipe: SequenceRecipe, layers: int = LAYERS, **more: Any
) -> dict[str, Any]:
    mesh = WatchedMesh(world, **sizes)
    group = mesh.index(DATA) // mesh.shape.sequence
    model = npuzero.zero(build_sequence_model(mesh, layers), plan=plan, mesh=mesh, **more)
    kind, options = _KINDS[recipe.optimizer]
    own = {"sgd": lambda *a, **o: npuzero.ZeroOptimizer(kind, *a, **o), "adamw": npuzero.AdamW}[recipe.optimizer]
    optimizer = own(model.parameters(), **options)
    norms, held, losses = [], [], []
    for step in range(recipe.steps):
        parts = [
            parallel.slice(sequence_batch(step * recipe.micro_batches + u, group), mesh)
            for u in range(recipe.micro_batches)
        ]
        count = torch.tensor(float(sum((part["labels"] != -100).sum() for part in parts)))
        mesh.world.communicator(range(world.size), "test").all_reduce(count.view(1)).wait()
        mesh.sent.clear()
        for part in parts:
            labels = part.pop("labels")
            logits, kept = saved_bytes(lambda part=part: model(**part))
            loss = parallel.token_loss(logits, labels, mesh, tokens=count if recipe.micro_batches > 1 else None)
            loss.backward()
            losses.append(loss.detach())
        norms.append(npuzero.clip_grad_norm_(model, recipe.clip))
        optimizer.step()
        optimizer.zero_grad()
        held.append(npuzero.report(model).bytes_held)
    report = npuzero.report(model)
    moments = {"sgd": 0, "adamw": 2}[recipe.optimizer]  # torch's optimizers have theirs to themselves
    facts = {"clip": True, "micro_batches": recipe.micro_batches, "moments": moments}
    predicted = npuzero.predict(model, plan, mesh, **facts, **more)
    assert report.bytes_sent == predicted.bytes_sent and report.bytes_held == predicted.bytes_held
    return {
        "state": {"norms": torch.stack(norms), **npuzero.full_state_dict(model, rank0_only=False)},
        "losses": torch.stack(losses),
        "sent": {verb: nbytes for verb, nbytes in sent_by_verb(mesh.sent, 0).items() if nbytes},
        "kept": kept,
        "held": held,
    }


def check_sequence_training(
    size: int, plan: Any, sizes: dict[str, int], recipe: SequenceRecipe = SequenceRecipe()
) -> None:
    """Ranks end with the same bits, equal to one process up to rounding; bytes match the formula."""
    found = run_threads(size, lambda world: train_sequence_rank(world, plan, sizes, recipe))
    ranks = sizes["sequence"]
    for each in found:
        assert_same_bits(each["state"], found[0]["state"])
        assert_same_bits({"losses": each["losses"]}, {"losses": found[0]["losses"]})
        slices = 4 * LAYERS * recipe.micro_batches * BATCH * SEQUENCE * DIM * 4 // ranks  # q, k, v and out
        expected = {"all_to_all": 2 * slices * (ranks - 1) // ranks}
        expected["all_reduce"] = recipe.micro_batches * (2 * 16 * (size - 1) // size)  # the loss and its label count
        assert each["sent"] == expected
    bound = 1e-6 if recipe.optimizer == "sgd" else 1e-4
    assert_states_close(found[0]["state"], train_sequence_plain(size // ranks, replace(recipe)), bound)
