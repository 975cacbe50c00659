"""Extents in files: of those that somebody keeps, new contents go to a second place, and the old ones stay.

So what a disk holds can be saved as it was at one moment while training writes on, without a copy in memory and without
waiting: each extent that is written before it was read has its next contents in a second store. When nobody keeps the
first place any more the extent goes back there as it is written again; the second store is given back when all have.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from npuzero.device import AsyncHandle, ReadyHandle
from npuzero.memory import FileStore
from npuzero.memory.disk import DiskSpace
from npuzero.memory.file import BLOCK
from npuzero.shard.state.snapshot import KeptPart


class ExtentLocation(NamedTuple):
    """Name an extent in the first store (0) or the second (1)."""

    k: int
    store: int


class FileExtents:
    """Hold extents of ``lengths`` bytes each, whole pages, zeros at first.

    An update's thread reads and writes; another may keep extents, and read those.
    """

    def __init__(self, space: DiskSpace, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self._begins = [sum(lengths[:k]) for k in range(len(lengths))]
        self._space = space
        self._stores = [space.store(sum(lengths))]
        self._lock = threading.Lock()
        self._away: set[int] = set()  # those whose contents are in the second store
        self._keepers = Counter[ExtentLocation]()

    def read(self, k: int, buffer: Tensor) -> AsyncHandle:
        """Begin to read extent ``k`` as it is."""
        if not self.lengths[k]:
            return ReadyHandle()
        return self._stores[int(k in self._away)].read(self._begins[k], buffer[: self.lengths[k]])

    def read_part(self, k: int, begin: int, buffer: Tensor) -> AsyncHandle:
        """Begin to read extent ``k``, as it is, from byte ``begin`` on; whole blocks."""
        return self._stores[int(k in self._away)].read(self._begins[k] + begin, buffer)

    def write(self, k: int, buffer: Tensor) -> AsyncHandle:
        """Begin to write extent ``k``: to its first place, unless that is kept."""
        if not self.lengths[k]:
            return ReadyHandle()
        with self._lock:
            away = self._keepers[ExtentLocation(k, 0)] > 0
            (self._away.add if away else self._away.discard)(k)
        return self._stores[int(away)].write(self._begins[k], buffer[: self.lengths[k]])

    def settle(self) -> None:
        """Give the second store back, if nothing is there and nobody keeps anything; nothing is under way."""
        with self._lock:
            needed = self._away or self._keepers.total()
        if len(self._stores) > 1 and not needed:
            second = self._stores.pop()
            second.close()
            self._space.count("buffers", -second.nbytes)

    # -- as they were ----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Take room for what is written while others are kept.

        Raises:
            OutOfSpace: a disk has none.
        """
        if len(self._stores) == 1:
            second: FileStore = self._space.store(self._stores[0].nbytes)
            self._stores.append(second)
            self._space.count("buffers", second.nbytes)

    def keep(self, k: int) -> ExtentLocation:
        """Keep extent ``k`` as it is, until the place is released as often as this was called."""
        place = ExtentLocation(k, int(k in self._away))
        with self._lock:
            self._keepers[place] += 1
        return place

    def release(self, place: ExtentLocation) -> None:
        """Keep it no longer."""
        with self._lock:
            self._keepers[place] -= 1

    def read_kept(self, place: ExtentLocation, begin: int, buffer: Tensor) -> None:
        """Read a kept extent from byte ``begin`` on, whole blocks."""
        self._stores[place.store].read(self._begins[place.k] + begin, buffer).wait()


class ExtentSnapshot:
    """Keep parts of extents for one save, which reads them one after the other through one buffer."""

    def __init__(self, extents: FileExtents) -> None:
        extents.prepare()
        self._extents = extents
        self._left = 0
        self._buffer: Tensor | None = None
        self._inside: tuple[ExtentLocation, int, int] | None = None

    @property
    def over(self) -> bool:
        """Return whether all that was kept has been released."""
        return not self._left

    def keep(self, k: int, begin: int, end: int, dtype: torch.dtype) -> KeptPart:
        """Keep the bytes ``[begin, end)`` of extent ``k``."""
        self._left += 1
        return _KeptRange(self, self._extents.keep(k), begin, end, dtype)

    def read(self, place: ExtentLocation, begin: int, end: int) -> Tensor:
        """Return bytes of a kept extent, until others are read."""
        first = begin // BLOCK * BLOCK
        if self._buffer is None:
            self._buffer = FileStore.aligned(max(self._extents.lengths))
        if self._inside != (place, begin, end):
            self._inside = None
            self._extents.read_kept(place, first, self._buffer[: -(-end // BLOCK) * BLOCK - first])
            self._inside = place, begin, end
        return self._buffer[begin - first : end - first]

    def release(self, place: ExtentLocation) -> None:
        """Keep an extent for one reader less; without any there is no buffer."""
        self._extents.release(place)
        self._left -= 1
        if self.over:
            self._buffer = self._inside = None


class _KeptRange(KeptPart):
    def __init__(
        self, keeping: ExtentSnapshot, place: ExtentLocation, begin: int, end: int, dtype: torch.dtype
    ) -> None:
        self._keeping: ExtentSnapshot | None = keeping
        self._where = place, begin, end
        self._dtype = dtype

    def read(self) -> Tensor:
        assert self._keeping is not None, "released"
        return self._keeping.read(*self._where).view(self._dtype)

    def release(self) -> None:
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.release(self._where[0])
