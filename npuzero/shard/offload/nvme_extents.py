"""Store extents in files with copy-on-write snapshots.

A save reads the state of one moment while training writes on, without a copy in memory and without waiting. A write to
a kept extent goes to a second store, and the old contents stay in the first. Once the first is released, the next write
of the extent returns there. The second store is freed when no extent is in it or kept.
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
    """Identify an extent in the first store (0) or the second (1)."""

    k: int
    store: int


class FileExtents:
    """Store extents of ``lengths`` bytes, multiples of a page, initially zero.

    The update's thread reads and writes. Another thread may keep extents and read the kept ones.
    """

    def __init__(self, space: DiskSpace, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self._begins = [sum(lengths[:k]) for k in range(len(lengths))]
        self._space = space
        self._stores = [space.store(sum(lengths))]
        self._lock = threading.Lock()
        self._away: set[int] = set()  # extents with their current contents in the second store
        self._keepers = Counter[ExtentLocation]()

    def read(self, k: int, buffer: Tensor) -> AsyncHandle:
        """Start to read the current contents of extent ``k``."""
        if not self.lengths[k]:
            return ReadyHandle()
        return self._stores[int(k in self._away)].read(self._begins[k], buffer[: self.lengths[k]])

    def read_part(self, k: int, begin: int, buffer: Tensor) -> AsyncHandle:
        """Start to read the current contents of extent ``k`` from byte ``begin`` on, in multiples of a block."""
        return self._stores[int(k in self._away)].read(self._begins[k] + begin, buffer)

    def write(self, k: int, buffer: Tensor) -> AsyncHandle:
        """Start to write extent ``k``: to the first store, unless its contents there are kept."""
        if not self.lengths[k]:
            return ReadyHandle()
        with self._lock:
            away = self._keepers[ExtentLocation(k, 0)] > 0
            (self._away.add if away else self._away.discard)(k)
        return self._stores[int(away)].write(self._begins[k], buffer[: self.lengths[k]])

    def settle(self) -> None:
        """Free the second store if no extent is in it and none is kept. No request may be in flight."""
        with self._lock:
            needed = self._away or self._keepers.total()
        if len(self._stores) > 1 and not needed:
            second = self._stores.pop()
            second.close()
            self._space.count("buffers", -second.nbytes)

    # -- snapshots -------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Allocate the second store, for writes to kept extents.

        Raises:
            OutOfSpace: a disk has no room.
        """
        if len(self._stores) == 1:
            second: FileStore = self._space.store(self._stores[0].nbytes)
            self._stores.append(second)
            self._space.count("buffers", second.nbytes)

    def keep(self, k: int) -> ExtentLocation:
        """Keep the contents of extent ``k`` until the location is released as often as it was kept."""
        place = ExtentLocation(k, int(k in self._away))
        with self._lock:
            self._keepers[place] += 1
        return place

    def release(self, place: ExtentLocation) -> None:
        """Release one keep of an extent."""
        with self._lock:
            self._keepers[place] -= 1

    def read_kept(self, place: ExtentLocation, begin: int, buffer: Tensor) -> None:
        """Read a kept extent from byte ``begin`` on, in multiples of a block."""
        self._stores[place.store].read(self._begins[place.k] + begin, buffer).wait()


class ExtentSnapshot:
    """Keep parts of extents for one save, which reads them in sequence through one buffer."""

    def __init__(self, extents: FileExtents) -> None:
        extents.prepare()
        self._extents = extents
        self._left = 0
        self._buffer: Tensor | None = None
        self._inside: tuple[ExtentLocation, int, int] | None = None

    @property
    def over(self) -> bool:
        """Return whether all kept parts have been released."""
        return not self._left

    def keep(self, k: int, begin: int, end: int, dtype: torch.dtype) -> KeptPart:
        """Keep the bytes ``[begin, end)`` of extent ``k``."""
        self._left += 1
        return _KeptRange(self, self._extents.keep(k), begin, end, dtype)

    def read(self, place: ExtentLocation, begin: int, end: int) -> Tensor:
        """Return bytes of a kept extent; valid until the next read."""
        first = begin // BLOCK * BLOCK
        if self._buffer is None:
            self._buffer = FileStore.aligned(max(self._extents.lengths))
        if self._inside != (place, begin, end):
            self._inside = None
            self._extents.read_kept(place, first, self._buffer[: -(-end // BLOCK) * BLOCK - first])
            self._inside = place, begin, end
        return self._buffer[begin - first : end - first]

    def release(self, place: ExtentLocation) -> None:
        """Release an extent for one part; free the buffer after the last."""
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
