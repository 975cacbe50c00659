"""Norms and counts of non-finite elements of READY gradients.

Each rank sums its own shard under every plan. Sums over shards are in float64, where their order has less effect than
float32 can resolve: a norm rounded to float32 has the same bits for every sharding of gradients, except for sums within
1e-15 of a rounding boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.linalg import vector_norm

from npuzero.ops.norm import norm_unchecked
from npuzero.plan import PIPE, axes_over
from npuzero.shard.layout.shard_specs import RankGroup
from npuzero.shard.layout.traffic_meter import CountingMesh
from npuzero.shard.state.flat_parameter import FlatParameter

#: A flat parameter and a slot index.
Place = tuple[FlatParameter, int]


class GradientSums:
    """Sum over the present gradients of one model, counting each element once over all ranks.

    Each rank sums its own shards, and one all_reduce adds the sums of the ranks that own different elements. If flats
    differ in their number of owners, it runs over all ranks, and only the first rank of those with the same elements
    counts them: else a norm would count elements replicated over tensor ranks several times. It also runs over the
    stages of a pipeline: a rank without flats contributes zeros.

    Args:
        flats: the trainable flat parameters of the model.
    """

    def __init__(self, flats: Sequence[FlatParameter], mesh: CountingMesh, device: torch.device) -> None:
        self._flats = flats
        self._device = device
        self._parts = torch.zeros(len(flats), 2, dtype=torch.float64, device=device)
        self._total: Tensor | None = None
        self._owners = RankGroup(mesh, axes_over((flat.rests.owners.axes for flat in flats), mesh.size((PIPE,))))
        self._counted = {flat for flat in flats if _is_first_owner(flat.rests.owners, self._owners, mesh)}

    def forget(self) -> None:
        """Drop the cached sums, after the gradients changed."""
        self._total = None

    def total(self) -> Tensor:
        """Return [2] float64: sum of squares and number of non-finite elements, over unique elements of all gradients.

        Cached until :meth:`forget`.
        """
        if self._total is None:
            for flat, part in zip(self._flats, self._parts, strict=True):
                if flat in self._counted:  # remaining parts stay zero
                    _sum_squares_into(flat.own_gradient, part)
            self._total = self._over(self._parts.sum(0))
        return self._total

    def total_of(self, places: Iterable[Place]) -> Tensor:
        """Return the sums of :meth:`total` over some slots; a slot given twice counts twice."""
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        part = torch.empty_like(total)
        for own in local_gradient_ranges(place for place in places if place[0] in self._counted):
            _sum_squares_into(own, part)
            total += part
        return self._over(total)

    def norm(self, p: float, places: Iterable[Place] | None = None) -> Tensor:
        """Return () float64: the p-norm of the unique elements of all gradients, or of the slots ``places``."""
        if p == 2.0:  # from the pass that also counts non-finite elements, which may have run already
            return (self.total() if places is None else self.total_of(places))[0].sqrt()
        if places is None:
            shards = [flat.own_gradient for flat in self._flats if flat in self._counted]
        else:
            shards = local_gradient_ranges(place for place in places if place[0] in self._counted)
        mine = [_vector_norm(own, p).to(self._device) for own in shards if own.numel()]
        return self._norm_of_parts(_vector_norm(torch.stack(mine) if mine else self._parts.new_empty(0), p), p)

    def norms(self, places: Sequence[Place | None], p: float) -> Tensor:
        """Return [n] float64: the p-norm of each of ``n`` slots, by one all_reduce; None: a slot of another stage."""
        mine = torch.zeros(len(places), dtype=torch.float64, device=self._device)
        for n, place in enumerate(places):
            if place is not None and place[0] in self._counted:
                flat, i = place
                mine[n] = _vector_norm(flat.own_gradient[flat.own_slots[i]], p)
        return self._norm_of_parts(mine, p)

    def _norm_of_parts(self, mine: Tensor, p: float) -> Tensor:
        """Return the p-norm over all owners' parts; ``mine`` is the norm of this rank's part."""
        # An all_gather by all_reduce: each owner fills its row. Rows of ranks that count nothing stay zero.
        norms = torch.zeros(self._owners.size, *mine.shape, dtype=torch.float64, device=self._device)
        norms[self._owners.index] = mine
        return cast(Tensor, vector_norm(self._over(norms), p, dim=0))

    def _over(self, sums: Tensor) -> Tensor:
        """Sum in place over the ranks that own different elements, by one all_reduce."""
        if self._owners.many:
            self._owners.communicator("control").all_reduce(sums.view(-1), tag="gradient norm").wait()
        return sums


def local_gradient_ranges(places: Iterable[Place]) -> list[Tensor]:
    """Return this rank's parts of the gradients of some slots, with adjacent parts merged."""
    ranges: list[tuple[FlatParameter, int, int]] = []
    for flat, i in places:
        own = flat.own_slots[i]
        if own.start == own.stop:
            continue
        if ranges and ranges[-1][0] is flat and ranges[-1][2] == own.start:
            ranges[-1] = flat, ranges[-1][1], own.stop
        else:
            ranges.append((flat, own.start, own.stop))
    return [flat.own_gradient[begin:end] for flat, begin, end in ranges]


def _sum_squares_into(values: Tensor, out: Tensor) -> None:
    """Write the sum of squares and the number of non-finite elements of ``values`` to ``out``, on any devices."""
    here = out if out.device == values.device else torch.empty(2, dtype=out.dtype, device=values.device)
    norm_unchecked(values, here)
    if here is not out:
        out.copy_(here)


def _is_first_owner(owners: RankGroup, everyone: RankGroup, mesh: CountingMesh) -> bool:
    """Return whether this rank is the first in ``everyone`` among the owners of the same elements."""
    return mesh.index(tuple(axis for axis in everyone.axes if axis not in owners.axes)) == 0


def _vector_norm(values: Tensor, p: float) -> Tensor:
    """Return the p-norm, () float64; 0 of an empty tensor, for which torch's inf-norm raises."""
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    return cast(Tensor, vector_norm(values, p, dtype=torch.float64))
