"""A shard with elements on device, host and NVMe, read and written by range."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from npuzero import ops
from npuzero.ops import storage
from npuzero.ops.storage.lazy import materialize_lazy
from npuzero.shard.layout.flat_layout import intersect_ranges
from npuzero.shard.state.snapshot import KeptPart, Later, StateSnapshot


class TierRange(NamedTuple):
    """Describe the elements ``[begin, end)`` of the shard, which are stored in one place.

    Attributes:
        open: returns them as stored, in a tensor that begins with the part's first element. Writes to it last if the
            argument is True. It is valid until another part is opened.
        keep: keeps the part unchanged in its place until it is released; returns None if a copy is needed instead.
    """

    begin: int
    end: int
    open: Callable[[bool], Tensor]
    keep: Callable[[], KeptPart | None] = lambda: None


class TierOverlap(NamedTuple):
    """Describe the overlap of a part and a range.

    Attributes:
        here: the overlap as a slice of the range.
        stored, numel: the part, and its number of elements.
        there: the overlap as a slice of the part.
    """

    here: slice
    stored: Tensor
    numel: int
    there: slice


class TieredTensor:
    """Hold one shard in parts; each but the last is a multiple of the block size of quantized moments.

    Args:
        dtype: the stored dtype.
        parts: contiguous, in ascending order.
    """

    def __init__(self, dtype: torch.dtype, parts: list[TierRange]) -> None:
        self.dtype = dtype
        self._parts = parts
        self._one: Tensor | None = None  # all elements, if they are one resident tensor

    @staticmethod
    def whole(tensor: Tensor, numel: int) -> TieredTensor:
        """Return a tiered tensor of ``numel`` elements over one resident tensor."""
        spread = TieredTensor(tensor.dtype, [TierRange(0, numel, lambda _: tensor)])
        spread._one = tensor
        return spread

    def extended(self, further: TieredTensor) -> TieredTensor:
        """Return this tensor extended by the parts of ``further``, which follow it."""
        return TieredTensor(self.dtype, [part for part in (*self._parts, *further._parts) if part.begin < part.end])

    def over(self, own: slice, write: bool = False) -> Iterator[TierOverlap]:
        """Yield the overlaps with the range ``own``, part by part; use each before requesting the next."""
        for part, here, there in self._within(own):
            yield TierOverlap(here, part.open(write), part.end - part.begin, there)

    def _within(self, own: slice) -> Iterator[tuple[TierRange, slice, slice]]:
        """Yield each part that overlaps a range, with the overlap as a slice of the range and of the part."""
        for part in self._parts:
            begin, end = intersect_ranges((own.start, own.stop), (part.begin, part.end))
            if begin < end:
                yield part, slice(begin - own.start, end - own.start), slice(begin - part.begin, end - part.begin)

    def later(self, own: slice, snapshot: StateSnapshot, *, signed: bool = True, raw: bool = False) -> Later:
        """Return a function that later returns the present values of a range as float32; may be a copy.

        A range of quantized values must begin with a block.

        Args:
            raw: return the stored dtype; only for values that are not quantized.
        """
        if self._one is not None and (raw or self.dtype == torch.float32):
            return snapshot.copied(self._one[own])

        def read(stored: Tensor, numel: int, there: slice) -> Tensor:
            return stored[there].clone() if raw else storage.read_moment(stored, numel, there, signed=signed)

        found: list[tuple[slice, Later]] = []
        for part, here, there in self._within(own):
            numel, kept = part.end - part.begin, snapshot.kept(part.keep)
            if kept is None:
                found.append((here, snapshot.copied(read(part.open(False), numel, there))))
            else:
                found.append((here, partial(_read_and_release, kept, read, numel, there)))
        return partial(_join_ranges, own.stop - own.start, found)

    def write(self, own: slice, values: Tensor, *, signed: bool = True) -> None:
        """Replace a range, block-aligned except at its end, by float32 ``values``, the inverse of :meth:`later`."""
        for reach in self.over(own, write=True):
            mine = values[reach.here].to(reach.stored.device)
            storage.write_moment(mine, reach.stored, reach.numel, reach.there, signed=signed)

    def raw(self, own: slice) -> Tensor:
        """Return a range in its stored dtype, which must not be quantized; may be a copy."""
        if self._one is not None:
            return self._one[own]
        parts = [reach.stored[reach.there].clone() for reach in self.over(own)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)

    def round_in(self, own: slice, values: Tensor) -> None:
        """Replace a range by ``values``, rounded as updates round copies of masters."""
        for reach in self.over(own, write=True):
            copy_rounded(values[reach.here], reach.stored[reach.there])

    def replace(self, own: slice, values: Tensor) -> None:
        """Replace a range by ``values``, bit by bit."""
        for reach in self.over(own, write=True):
            reach.stored[reach.there].copy_(values[reach.here])

    def beside(self, own: slice, others: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each part of a range, the elements of ``others`` moved to its device, and the stored elements.

        ``others`` has as many elements as the range. The stored elements, not quantized, may be read and written.
        """
        for reach in self.over(own, write=True):
            yield others[reach.here].to(reach.stored.device), reach.stored[reach.there]

    def clear(self, own: slice, where: Tensor | None = None) -> None:
        """Zero a range, or its elements for which ``where`` is true."""
        for reach in self.over(own, write=True):
            part = reach.stored[reach.there]
            part.zero_() if where is None else part.masked_fill_(where[reach.here].to(part.device), 0)


def _read_and_release(kept: KeptPart, read: Callable[[Tensor, int, slice], Tensor], numel: int, there: slice) -> Tensor:
    """Return the slice ``there`` of a kept part, and release the part."""
    values = read(kept.read(), numel, there)
    kept.release()
    return values


def _join_ranges(numel: int, parts: Sequence[tuple[slice, Later]]) -> Tensor:
    """Return the joined values, [numel], on the device of the first part."""
    found = torch.empty(0)
    for here, later in parts:
        values = later()
        if values.numel() == numel:
            return values
        if not found.numel():
            found = torch.empty(numel, dtype=values.dtype, device=values.device)
        found[here].copy_(values)
    return found


def copy_rounded(values: Tensor, target: Tensor) -> None:
    """Copy ``values`` into the 1-D ``target``, rounded as flat_adam rounds the copies of masters."""
    if target.dtype == torch.bfloat16:
        ops.cast(materialize_lazy(values.to(target.device, torch.float32)), target, rounding="away")
    else:
        target.copy_(values)
