"""What is asked of gradients that are READY: norms, elements that are not finite, and a whole one.

Each rank has its own shard, whatever the plan. Sums over shards are taken in float64, where their order moves less than
float32 can hold: however the plan cuts the gradients, a norm rounded to float32 has the same bits, but for sums within
1e-15 of a rounding boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.linalg import vector_norm

from npuzero.ops.norm import norm_unchecked
from npuzero.plan import Plan
from npuzero.shard.counting import CountingMesh
from npuzero.shard.unit import Flat


class Gradients:
    """The present gradients of one model, over all ranks; what only reads them asks here.

    Args:
        flats: the trainable flats of the model.
    """

    def __init__(self, flats: Sequence[Flat], plan: Plan, mesh: CountingMesh, device: torch.device) -> None:
        self._flats = flats
        self._axes = plan.states.axes
        self._mesh = mesh
        self._device = device
        self._parts = torch.zeros(len(flats), 2, dtype=torch.float64, device=device)
        self._sums: Tensor | None = None

    @property
    def whole(self) -> bool:
        """Whether each rank has all of them."""
        return self._mesh.size(self._axes) == 1

    def forget(self) -> None:
        """They have changed: what was summed is no longer true."""
        self._sums = None

    def sum(self) -> Tensor:
        """[2] float64: sum of squares and number of non-finite elements, over unique elements of all gradients."""
        if self._sums is None:
            for flat, part in zip(self._flats, self._parts, strict=True):
                norm_unchecked(flat.own_gradient, part)
            self._sums = self._over_owners(self._parts.sum(0))
        return self._sums

    def norm(self, p: float) -> Tensor:
        """() float64: the p-norm over unique elements of all gradients."""
        if p == 2.0:
            return self.sum()[0].sqrt()
        shards = [flat.own_gradient for flat in self._flats if flat.own_gradient.numel()]
        return self._norm_of_parts(vector_norm(torch.stack([_norm(own, p) for own in shards]), p), p)

    def norms(self, places: Iterable[tuple[Flat, int]], p: float) -> Tensor:
        """[n] float64: the p-norm of each of ``n`` slots, by one collective for all."""
        mine = [_norm(flat.own_gradient[flat.own_slots[i]], p) for flat, i in places]
        return self._norm_of_parts(torch.stack(mine), p)

    def nonfinite(self, places: Iterable[tuple[Flat, int]]) -> Tensor:
        """() float64: the number of elements of these slots that are inf or NaN."""
        bad = torch.zeros(1, dtype=torch.float64, device=self._device)
        for flat, i in places:
            bad += (~flat.own_gradient[flat.own_slots[i]].isfinite()).sum()
        return self._over_owners(bad)[0]

    def _norm_of_parts(self, mine: Tensor, p: float) -> Tensor:
        """The p-norm of what the owners have norms of; ``mine`` is this rank's."""
        norms = torch.zeros(self._mesh.size(self._axes), *mine.shape, dtype=torch.float64, device=self._device)
        norms[self._mesh.index(self._axes)] = mine
        return cast(Tensor, vector_norm(self._over_owners(norms), p, dim=0))

    def _over_owners(self, sums: Tensor) -> Tensor:
        """``sums`` added up, in place, over the ranks that the states are cut over."""
        if not self.whole:
            self._mesh.communicator(self._axes, "control").all_reduce(sums.view(-1), tag="gradient norm").wait()
        return sums


def _norm(values: Tensor, p: float) -> Tensor:
    """() float64; 0 of nothing, of which torch has no largest."""
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    return cast(Tensor, vector_norm(values, p, dtype=torch.float64))
