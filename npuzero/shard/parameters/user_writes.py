"""Carry a program's in-place writes into unsharded parameters to shards and masters, and check that ranks agree.

Examples: a forward that clamps its weight, ``nn.init``, averaged weights copied back. Each rank holds a shard and maybe
masters, so a write into unsharded parameters must be copied there. torch counts the writes into each tensor; the engine
checks the counts when a unit is released and when a step begins.

Each rank copies its writes without a collective, into its shard only. Only if all ranks write the same values is the
result the same as in one process. So a rank keeps a digest of its writes, and the vote that begins a step
(:meth:`StepBoundary.finish`) makes the ranks compare them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from npuzero.comm import World
from npuzero.errors import StateError
from npuzero.ops import storage
from npuzero.shard.offload.delayed_update import DelayedUpdate
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.unit import Unit

#: Elements per digest step, since each is widened to 8 bytes.
_PIECE = 2**20

#: Digests of values, by parameter name.
Digests = dict[str, list[int]]


class UserWrites:
    """Copy writes into a model's units to their shards, and keep digests until the ranks have compared them."""

    def __init__(self, units: Sequence[Unit], world: World, lag: DelayedUpdate) -> None:
        self._units = units
        self._world = world
        self._lag = lag
        self._written: dict[int, Digests] = {}  # digests of this rank's writes, by unit

    def __bool__(self) -> bool:
        return bool(self._written)

    def look(self, unit: Unit) -> None:
        """Copy the writes that torch counted in ``unit``, which is unsharded, to its shards."""
        for flat in unit.flats:
            slots = flat.written()
            if slots:
                self._take(unit, flat, slots)

    def look_closely(self, unit: Unit, before: Mapping[str, list[int]]) -> None:
        """Copy all changes in ``unit`` since the digests ``before`` to its shards, also those torch did not count."""
        for flat in unit.flats:
            flat.written()
            slots = [i for i in flat.slots if before[_slot_label(flat, i)] != _slot_digest(flat, i)]
            if slots:
                self._take(unit, flat, slots)

    @torch.no_grad()
    def _take(self, unit: Unit, flat: FlatParameter, slots: list[int]) -> None:
        _check_rounded(unit, flat, slots)
        self._lag.check_write(flat)
        flat.take_written(slots)
        if self._world.size > 1:
            self._written.setdefault(unit.index, {}).update(_slot_digests(flat, slots))

    def compare(self, whole: Callable[[Unit], AbstractContextManager[None]]) -> None:
        """Compare the writes of all ranks. Collective.

        Args:
            whole: unshards the parameters of a unit in a ``with`` block; collective.

        Raises:
            StateError: on every rank: ranks wrote different values.
        """
        said: list[list[int]] = self._world.exchange(list(self._written))
        mine, self._written = self._written, {}
        for index in sorted({index for rank in said for index in rank}):
            unit = self._units[index]
            with whole(unit):
                now = unit_digests(unit)
            written = mine.get(index, {})
            # A rank that wrote sends the digest of its writes, another rank that of the current values. For sharded
            # parameters it sends both: its writes, and the current values gathered from the other ranks' shards.
            claims = [written, now] if unit.guarded else [{**now, **written}]
            _check_same_writes(
                unit, self._world.exchange(claims), [rank for rank, theirs in enumerate(said) if index in theirs]
            )


def _check_rounded(unit: Unit, flat: FlatParameter, slots: Sequence[int]) -> None:
    """Raise a StateError for a write into quantized parameters: quantized values must never reach the shards."""
    if unit.rounded:
        names = ", ".join(flat.layout.slots[i].name for i in slots)
        raise StateError(
            f"parameters {names} of unit {unit.name!r}",
            expected="no write while it computes with rounded parameters (precision.gathers)",
            got="one, beside elements that travelled in 8 bits and would replace exact ones",
            do="Write between steps, within `with npuzero.gathered(model, write=True):`, or give the unit a plan that "
            "gathers parameters as they are.",
            unit=unit.name,
        )


def _check_same_writes(unit: Unit, claims: list[list[Digests]], writers: list[int]) -> None:
    for name in dict.fromkeys(name for rank in claims for name in rank[-1]):
        if len({tuple(claim[name]) for rank in claims for claim in rank if name in claim}) > 1:
            only = "" if len(writers) == len(claims) else f", by ranks {writers} alone"
            raise StateError(
                f"parameter {name} of unit {unit.name!r}",
                expected="the same values on every rank, where a program writes into a parameter",
                got=f"different ones, written since the last step{only}",
                do="Write the same on every rank, outside of forwards whose batches differ (nn.Embedding(max_norm=) "
                "writes what its batch uses): between steps, within `with npuzero.gathered(model, write=True):`.",
                unit=unit.name,
                parameter=name,
            )


def unit_digests(unit: Unit) -> Digests:
    """Return the digests of all parameters of an unsharded unit."""
    return {name: digest for flat in unit.flats for name, digest in _slot_digests(flat, flat.slots).items()}


def _slot_digests(flat: FlatParameter, slots: Sequence[int]) -> Digests:
    return {_slot_label(flat, i): _slot_digest(flat, i) for i in slots}


def _slot_label(flat: FlatParameter, i: int) -> str:
    """Return the name of slot ``i`` with this rank's part of it, so that only equal parts are compared."""
    name, parts = flat.layout.slots[i].name, flat.rests.divided
    return f"{name} (part {parts.index} along {', '.join(parts.axes)})" if parts.many else name


@torch.no_grad()
def _slot_digest(flat: FlatParameter, i: int) -> list[int]:
    slot = flat.layout.slots[i]
    return list(map(int, digest_integers(storage.view_bits(flat.whole[slot.begin : slot.end])).tolist()))


def digest_integers(bits: Tensor) -> Tensor:
    """Return a digest, [2] int64, of integers [n]: two sums, one depends on positions. Computed on their device."""
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), _PIECE):
        piece = bits[begin : begin + _PIECE].long()
        places = torch.arange(begin + 1, begin + 1 + piece.numel(), device=piece.device)
        sums += torch.stack([piece.sum(), (_mix_bits(piece) * places).sum()])
    return sums


def _mix_bits(values: Tensor) -> Tensor:
    """Return integers with a sum that changes if values swap places or cancel each other."""
    return values * values * 0x9E3779B1 + values
