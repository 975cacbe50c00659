"""Sums over gradients that are READY: norms, and elements that are not finite.

Each rank has its own shard, whatever the plan. Sums over shards are taken in float64, where their order moves less than
float32 can hold: however the plan shards gradients, a norm rounded to float32 has the same bits, but for sums within
1e-15 of a rounding boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.linalg import vector_norm

from npuzero.ops.norm import norm_unchecked
from npuzero.plan import Axes
from npuzero.shard.flat import Flat
from npuzero.shard.rest import Group


class Sums:
    """Sum over the present gradients of one model: each element once, of all ranks.

    A rank adds up its own shards, and the ranks that a flat is sharded over add up theirs: one collective for all flats
    that are sharded over the same ranks. Only units with plans of their own make that more than one.

    Args:
        flats: the trainable flats of the model.
    """

    def __init__(self, flats: Sequence[Flat], device: torch.device) -> None:
        self._flats = flats
        self._device = device
        self._parts = torch.zeros(len(flats), 2, dtype=torch.float64, device=device)
        self._total: Tensor | None = None
        self._owners: dict[Axes, Group] = {}  # by the axes that states are cut over
        rows: dict[Axes, list[int]] = {}
        for row, flat in enumerate(flats):
            axes = flat.rests.states.group.axes
            self._owners.setdefault(axes, flat.rests.states.group)
            rows.setdefault(axes, []).append(row)
        # By the same axes, the rows of their flats; neighbours as a slice, which copies nothing.
        self._rows = {axes: slice(r[0], r[-1] + 1) if len(r) == r[-1] + 1 - r[0] else r for axes, r in rows.items()}

    def forget(self) -> None:
        """Drop the sums: the gradients have changed."""
        self._total = None

    def total(self) -> Tensor:
        """Return [2] float64: sum of squares and number of non-finite elements, of unique elements of all gradients."""
        if self._total is None:
            for flat, part in zip(self._flats, self._parts, strict=True):
                _sum_into(flat.own_gradient, part)
            self._total = _added(_over(self._owners[axes], self._parts[at].sum(0)) for axes, at in self._rows.items())
        return self._total

    def norm(self, p: float) -> Tensor:
        """Return () float64: the p-norm of the unique elements of all gradients."""
        if p == 2.0:  # of the pass that also counts what is not finite, and may have run already
            return self.total()[0].sqrt()
        norms = []
        for axes, group in self._owners.items():
            flats = [flat for flat in self._flats if flat.rests.states.group.axes == axes]
            shards = [flat.own_gradient for flat in flats if flat.own_gradient.numel()]
            mine = vector_norm(torch.stack([_norm(own, p).to(self._device) for own in shards]), p)
            norms.append(self._norm_of_parts(group, mine, p))
        return norms[0] if len(norms) == 1 else cast(Tensor, vector_norm(torch.stack(norms), p))

    def norms(self, places: Sequence[tuple[Flat, int]], p: float) -> Tensor:
        """Return [n] float64: the p-norm of each of ``n`` slots, by one collective for all that are sharded alike."""
        found = torch.zeros(len(places), dtype=torch.float64, device=self._device)
        for axes, group in self._owners.items():
            here = [n for n, (flat, _) in enumerate(places) if flat.rests.states.group.axes == axes]
            if here:
                mine = [_norm(flat.own_gradient[flat.own_slots[i]], p) for flat, i in (places[n] for n in here)]
                found[here] = self._norm_of_parts(group, torch.stack([norm.to(self._device) for norm in mine]), p)
        return found

    def nonfinite(self, places: Iterable[tuple[Flat, int]]) -> Tensor:
        """Return () float64: the number of elements of these slots that are inf or NaN."""
        bad = {axes: torch.zeros(1, dtype=torch.float64, device=self._device) for axes in self._owners}
        for flat, i in places:
            count = (~flat.own_gradient[flat.own_slots[i]].isfinite()).sum()
            bad[flat.rests.states.group.axes] += count.to(self._device)
        return _added(_over(self._owners[axes], count) for axes, count in bad.items())[0]

    def _norm_of_parts(self, owners: Group, mine: Tensor, p: float) -> Tensor:
        """Return the p-norm over all owners' parts; ``mine`` is the norm of this rank's."""
        norms = torch.zeros(owners.size, *mine.shape, dtype=torch.float64, device=self._device)
        norms[owners.index] = mine
        return cast(Tensor, vector_norm(_over(owners, norms), p, dim=0))


def _sum_into(values: Tensor, out: Tensor) -> None:
    """Write the sum of squares and the number of non-finite elements of ``values`` into ``out``, wherever each lies."""
    here = out if out.device == values.device else torch.empty(2, dtype=out.dtype, device=values.device)
    norm_unchecked(values, here)
    if here is not out:
        out.copy_(here)


def _added(parts: Iterable[Tensor]) -> Tensor:
    first, *others = parts
    for other in others:
        first = first + other
    return first


def _over(owners: Group, sums: Tensor) -> Tensor:
    """Add up ``sums``, in place, over the ranks that the states are sharded over."""
    if owners.many:
        owners.communicator("control").all_reduce(sums.view(-1), tag="gradient norm").wait()
    return sums


def _norm(values: Tensor, p: float) -> Tensor:
    """Return the p-norm, () float64; 0 of nothing, of which torch has no largest."""
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    return cast(Tensor, vector_norm(values, p, dtype=torch.float64))
