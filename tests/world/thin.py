"""The effect of thin wires on numbers, in plain torch and one process: the bit-exact oracle of the engine.

Every unit of its model is one matrix, so that a unit's flat parameter is that matrix and zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

import npuzero
from npuzero import Plan
from npuzero.comm import World
from npuzero.plan import MeshShape

from .parity_ranks import state_digest
from .toy import build_seeded_model

WIDTHS = (37, 41, 29, 37)  # divisible by no number of ranks


def round_to_wire(values: Tensor, bits: int) -> Tensor:
    """Return values [n], complete blocks of them, after a thin wire; float32."""
    block, largest = (256, 127) if bits == 8 else (128, 7)
    blocks = values.float().view(-1, block)
    top = blocks.abs().amax(1, keepdim=True)
    scale = (top * torch.tensor(1.0 / largest)).clamp(min=2.0**-120)
    upwards = ((scale.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    upwards = torch.where(top.isfinite(), upwards, torch.nan)
    codes = (blocks * (1.0 / upwards)).round().where(top.isfinite(), torch.zeros(()))
    return ((codes + 0.0) * upwards).view(-1)  # a code is an integer: none is -0


class RecordedProduct(torch.autograd.Function):
    """Compute x @ weight.T, and record the weights that forward and backward read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.seen = seen
        seen.append(weight.detach().clone())
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        ctx.seen.append(weight.clone())
        return grad @ weight, grad.T @ x, None


class MatrixLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        return torch.tanh(RecordedProduct.apply(x, self.weight, seen))


class MatrixChain(nn.Module):
    """Matrices one after the other.

    Attributes:
        seen: the weights that passes have read, in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MatrixLayer(a, b) for a, b in pairwise(WIDTHS))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.seen)
        return x


def is_matrix(_: str, module: nn.Module) -> bool:
    """Choose each matrix as a unit."""
    return isinstance(module, MatrixLayer)


def chain_batch(step: int, micro_batch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro_batch + rank)
    return torch.randn(5, WIDTHS[0], generator=generator)


def chain_loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x.to(next(model.parameters()).dtype)).float() - 0.3).square().mean()


@dataclass
class ThinOracle:
    """Compute the gradients of one plan over a mesh, for given weights."""

    plan: Plan
    mesh: MeshShape
    residuals: dict[tuple[int, str, int], Tensor] = field(default_factory=dict)  # by matrix, axis and rank

    @property
    def ranks(self) -> range:
        return range(self.mesh.world)

    def padded(self, values: Tensor) -> Tensor:
        precision = self.plan.precision
        line = max(
            512 // min(values.dtype.itemsize, precision.wire_of(values.dtype).itemsize), precision.shard_elements
        )
        numel = -(-values.numel() // (line * self.mesh.world)) * line * self.mesh.world
        return torch.cat([values.reshape(-1), values.new_zeros(numel - values.numel())])

    def computed_with(self, weight: Tensor) -> Tensor:
        """Return the matrix that a rank computes with."""
        thin = self.plan.precision.gathers and self.mesh.size(self.plan.parameters.axes) > 1
        if not thin:
            return weight
        return round_to_wire(self.padded(weight), 8)[: weight.numel()].to(weight.dtype).view(weight.shape)

    def gradients(self, weights: Sequence[Tensor], step: int, micro_batches: int) -> list[Tensor]:
        """Return the mean over ranks of each matrix's gradient in one step, float32."""
        computed = [self.computed_with(weight) for weight in weights]
        sums: list[list[Tensor]] = []
        for micro_batch in range(micro_batches):
            by_rank = [self._backward(computed, chain_batch(step, micro_batch, rank)) for rank in self.ranks]
            last = micro_batches == 1 and step > 0  # the first step cannot know which pass is the last
            sums.append([self._scattered(i, [grads[i] for grads in by_rank], last) for i in range(len(weights))])
        found = []
        for i, weight in enumerate(weights):
            shards = [sums[0][i][rank] for rank in self.ranks]
            for more in sums[1:]:
                shards = [shard + more[i][rank] for rank, shard in enumerate(shards)]
            found.append(self._whole(self._boundary(i, shards))[: weight.numel()].view(weight.shape))
        return found

    def reduced(self, by_rank: list[Tensor]) -> Tensor:
        """Return the mean over ranks of a matrix's gradients, one from each rank, float32."""
        shards = self._boundary(0, self._scattered(0, by_rank, False))
        return self._whole(shards)[: by_rank[0].numel()].view(by_rank[0].shape)

    def _backward(self, weights: Sequence[Tensor], x: Tensor) -> list[Tensor]:
        model = MatrixChain().to(weights[0].dtype)
        for layer, weight in zip(model.layers, weights, strict=True):
            layer.weight = nn.Parameter(weight.clone())
        return list(torch.autograd.grad(chain_loss(model, x), list(model.parameters())))

    # Unsharded gradients are packed in float32; gradients sent at once, in the communication dtype.
    def _scattered(self, i: int, gradients: list[Tensor], alone: bool) -> list[Tensor]:
        wire = self.plan.precision.wire_of(gradients[0].dtype)
        sent = self.mesh.size(self.plan.gradients.axes) > 1 or alone
        packed = [self.padded(g).float() * (1.0 / self.mesh.world) for g in gradients]
        packed = [values.to(wire).float() if sent else values for values in packed]
        return self._levels(i, packed, self.plan.gradients.axes)

    def _boundary(self, i: int, shards: list[Tensor]) -> list[Tensor]:
        shards = self._levels(i, shards, self.plan.deeper)
        beyond = self.plan.beyond
        thin = any(self.plan.precision.level_of(axis).bits for axis in beyond if self.mesh.size((axis,)) > 1)
        order = beyond[::-1] if thin else beyond
        parts = self._levels(i, shards, order)
        self.order = (*self.plan.gradients.axes, *self.plan.deeper, *order)
        if self.plan.precision.sums == "wire":
            wire = self.plan.precision.wire_of(self.plan.precision.parameters or torch.float32)
            parts = [part.to(wire).float() for part in parts] if self.mesh.size(order) > 1 else parts
        return parts

    def _levels(self, i: int, values: list[Tensor], axes: Sequence[str]) -> list[Tensor]:
        """Reduce-scatter over axes, one after another; return each rank's part."""
        alone = [axis for axis in axes if self.mesh.size((axis,)) > 1]
        thin = any(self.plan.precision.level_of(axis).bits for axis in alone)
        for group in [(axis,) for axis in alone] if thin else [tuple(alone)] * bool(alone):
            values = self._level(i, values, group)
        return values

    def _level(self, i: int, values: list[Tensor], axes: tuple[str, ...]) -> list[Tensor]:
        level = self.plan.precision.level_of(axes[0])
        size = self.mesh.size(axes)
        sent = []
        for rank, own in enumerate(values):
            if level.bits is None:
                wire = self.plan.precision.wire_of(self.plan.precision.parameters or torch.float32)
                sent.append(own.to(wire).float())
                continue
            key = (i, axes[0], rank)
            x = own + self.residuals.get(key, torch.zeros(())) if level.feedback else own
            sent.append(round_to_wire(x, level.bits))
            self.residuals[key] = x - sent[-1]
        found = []
        for rank in self.ranks:
            mine = self.mesh.index(axes, rank)
            parts = [sent[peer].chunk(size)[mine] for peer in self._group(axes, rank)]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            found.append(total)
        return found

    def _group(self, axes: tuple[str, ...], rank: int) -> list[int]:
        """Return the ranks that differ from one along these axes alone, ascending: the order of sums."""
        place = self.mesh.place(rank)
        places = product(*(range(self.mesh.size((axis,))) for axis in axes))
        return sorted(self.mesh.rank({**place, **dict(zip(axes, each, strict=True))}) for each in places)

    def _whole(self, parts: list[Tensor]) -> Tensor:
        by_place = sorted(self.ranks, key=lambda rank: self.mesh.index(self.order, rank))
        seen: dict[int, Tensor] = {}
        for rank in by_place:
            seen.setdefault(self.mesh.index(self.order, rank), parts[rank])
        return torch.cat([seen[index] for index in sorted(seen)])


def preset_digests(world: World, presets: Sequence[str], local_size: int) -> dict[str, str]:
    """Train a chain by each preset; return a digest of its bits by preset."""
    found = {}
    for preset in presets:
        model = npuzero.zero(
            build_seeded_model(0, MatrixChain),
            plan=preset,
            precision="bf16",
            world=world,
            local_size=local_size,
            units=is_matrix,
        )
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        for step in range(3):
            for micro_batch in range(2):
                chain_loss(model, chain_batch(step, micro_batch, world.rank)).backward()
            npuzero.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        state = npuzero.full_state_dict(model, rank0_only=False)
        found[preset] = state_digest({name: value.float() for name, value in state.items()})
    return found
