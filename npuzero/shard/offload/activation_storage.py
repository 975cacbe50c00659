"""Store offloaded activations on the device, on the host or on NVMe between forward and backward."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from npuzero import device as devices
from npuzero.device import AsyncHandle, HostLane, WorkLane, make_lane
from npuzero.errors import NpuZeroError
from npuzero.memory import FileStore, HostCopier, MemorySpace, MemorySpaces, PagePool, PageRun
from npuzero.plan import FROM_DISK, TO_DEVICE, TO_DISK, TO_HOST, Memory, round_up_pages

#: The label of this memory in reports.
LABEL = "activations"
#: Bytes of one request to a disk.
PIECE_BYTES = 4 * 2**20
# Requests in flight at once.
_BUFFERS = 4
# Minimum size of a memory segment and of a file: otherwise sizes that grow from step to step would add one per step.
_SEGMENT_BYTES = 2**20
_FILE_BYTES = 64 * 2**20


class ActivationStorage(Protocol):
    """Store bytes of activations. Requests run asynchronously, in the order of the calls."""

    def store(self, source: Tensor) -> tuple[list[PageRun], AsyncHandle]:
        """Copy ``source``, uint8[n] on the device. It must not change before the handle has been waited for.

        Raises:
            OutOfSpace: there is no room for the copy.
        """

    def fetch(self, runs: list[PageRun], target: Tensor) -> AsyncHandle:
        """Write the stored bytes into ``target``, uint8[n] on the device."""

    def give(self, runs: list[PageRun]) -> None:
        """Free the pages, from any thread. Earlier requests on them may still be in flight."""


class MemoryActivationStorage:
    """Store activations in a memory space. Copies run on a lane and overlap with the computation.

    Args:
        space: holds the stored bytes.
        device: holds the activations.
        moved: counter of bytes by link between memories; this class adds to it.
        links: names of the link to the space and of the link back; empty if the bytes stay on the device.
    """

    def __init__(
        self, space: MemorySpace, device: torch.device, moved: Counter[str], links: Sequence[str] = ()
    ) -> None:
        self._moved = moved
        self._links = links
        segments = self._segments = list[Tensor]()

        def extend(lacking: int) -> int:
            segments.append(space.allocate(max(lacking, _SEGMENT_BYTES), torch.uint8, LABEL))
            return segments[-1].numel()

        self._pages = PagePool(extend)
        self._lane = make_lane(device, LABEL)
        weakref.finalize(self, _close_storage, self._lane)

    def store(self, source: Tensor) -> tuple[list[PageRun], AsyncHandle]:
        runs = self._pages.take(source.numel())
        pairs = self._pairs(runs, source)

        def copy() -> None:
            for there, here in pairs:
                there.copy_(here, non_blocking=True)

        self._count(0, source)
        return runs, self._lane.run(copy)

    def fetch(self, runs: list[PageRun], target: Tensor) -> AsyncHandle:
        pairs = self._pairs(runs, target)

        def copy() -> None:
            if target.device.type != "cpu":  # keeps the memory until the copy is done, even if no one waits for it
                target.record_stream(getattr(torch, target.device.type).current_stream())
            for there, here in pairs:
                here.copy_(there, non_blocking=True)

        self._count(1, target)
        return self._lane.run(copy)

    def give(self, runs: list[PageRun]) -> None:
        self._pages.give(runs)  # the lane keeps the order: the next write to these pages runs after pending copies

    def _pairs(self, runs: list[PageRun], flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = _iter_page_parts(runs, flat, flat.numel())
        return [(self._segments[part.segment][part.begin :][: part.here.numel()], part.here) for part in parts]

    def _count(self, way: int, flat: Tensor) -> None:
        if self._links:
            self._moved[self._links[way]] += flat.numel()


class FileActivationStorage:
    """Store activations in files, through buffers on the host, on a thread that overlaps with the computation.

    Args:
        open_store: returns a file store of the given number of bytes.
        buffers: at least two host buffers of PIECE_BYTES each, used in turn.
        device: holds the activations.
        moved: counter of bytes by link between memories; this class adds to it.
    """

    def __init__(
        self,
        open_store: Callable[[int], FileStore],
        buffers: Sequence[Tensor],
        device: torch.device,
        moved: Counter[str],
    ) -> None:
        self._device = devices.get(device)
        self._mover = HostCopier(device)
        self._buffers = buffers
        self._moved = moved
        stores = self._stores = list[FileStore]()

        def extend(lacking: int) -> int:
            # Each store has its files and threads. Each is at least as large as all before it, so there are few.
            nbytes = max(round_up_pages(lacking), _FILE_BYTES, sum(store.nbytes for store in stores))
            stores.append(open_store(nbytes))
            return nbytes

        self._pages = PagePool(extend)
        self._lane = HostLane(LABEL)
        weakref.finalize(self, _close_storage, self._lane, stores)

    def store(self, source: Tensor) -> tuple[list[PageRun], AsyncHandle]:
        runs = self._pages.take(source.numel())

        def begin(part: _PagePart, buffer: Tensor) -> Callable[[], object]:
            self._mover.to_host(buffer[: part.here.numel()], part.here).wait()
            return self._stores[part.segment].write(part.begin, buffer[: round_up_pages(part.here.numel())]).wait

        return runs, self._run(runs, source, begin, (TO_HOST, TO_DISK))

    def fetch(self, runs: list[PageRun], target: Tensor) -> AsyncHandle:
        def begin(part: _PagePart, buffer: Tensor) -> Callable[[], object]:
            reading = self._stores[part.segment].read(part.begin, buffer[: round_up_pages(part.here.numel())])

            def end() -> None:
                reading.wait()
                self._mover.to_device(part.here, buffer[: part.here.numel()]).wait()

            return end

        return self._run(runs, target, begin, (FROM_DISK, TO_DEVICE))

    def give(self, runs: list[PageRun]) -> None:
        self._pages.give(runs)  # the lane keeps the order, and each of its steps waits for the requests it started

    def _run(
        self,
        runs: list[PageRun],
        flat: Tensor,
        begin: Callable[[_PagePart, Tensor], Callable[[], object]],
        links: Sequence[str],
    ) -> AsyncHandle:
        """Queue the transfer of all parts of ``flat``.

        ``begin`` starts one part and returns a function that finishes it; that runs before its buffer is used again.
        """
        for link in links:
            self._moved[link] += flat.numel()
        reached = self._device.make_event()
        reached.record()

        def step() -> None:
            reached.synchronize()
            ends: deque[Callable[[], object]] = deque()
            try:
                for turn, part in enumerate(_iter_page_parts(runs, flat, PIECE_BYTES)):
                    if turn >= len(self._buffers):
                        ends.popleft()()
                    ends.append(begin(part, self._buffers[turn % len(self._buffers)]))
                while ends:
                    ends.popleft()()
            finally:
                for end in ends:  # after a failure the remaining transfers must not run on in the buffers
                    with contextlib.suppress(NpuZeroError):
                        end()

        return self._lane.run(step)


def device_activation_storage(spaces: MemorySpaces, device: torch.device) -> ActivationStorage:
    """Return activation storage on the device, for this rank's part of activations divided among their sharers."""
    return MemoryActivationStorage(spaces[Memory.DEVICE], device, spaces.mover.moved)


def host_activation_storage(spaces: MemorySpaces, device: torch.device) -> ActivationStorage:
    """Return activation storage in host memory."""
    return MemoryActivationStorage(spaces.host, device, spaces.mover.moved, (TO_HOST, TO_DEVICE))


def disk_activation_storage(spaces: MemorySpaces, device: torch.device) -> ActivationStorage:
    """Return activation storage in files."""
    host, disk = spaces.host, spaces.disk

    def open_store(nbytes: int) -> FileStore:
        store = disk.store(nbytes)
        disk.count(LABEL, nbytes)
        return store

    buffers = [host.allocate(PIECE_BYTES, torch.uint8, LABEL, host.pages) for _ in range(_BUFFERS)]
    return FileActivationStorage(open_store, buffers, device, spaces.mover.moved)


class _PagePart(NamedTuple):
    """Locate a part of a flat tensor: its view, and the segment and byte that store it."""

    segment: int
    begin: int
    here: Tensor


def _iter_page_parts(runs: list[PageRun], flat: Tensor, most: int) -> Iterator[_PagePart]:
    """Yield the parts of ``flat``, at most ``most`` bytes each. The last page of its runs may be partly used."""
    at = 0
    for run in runs:
        for begin in range(run.begin, run.end, most):
            here = flat[at : at + min(most, run.end - begin)]
            yield _PagePart(run.segment, begin, here)
            at += here.numel()


def _close_storage(lane: WorkLane, stores: Sequence[FileStore] = ()) -> None:
    """End the lane's thread with the model, and close its files once no request is in flight."""

    def close() -> None:
        for store in stores:
            store.close()

    if stores:
        lane.run(close)
    with contextlib.suppress(RuntimeError):  # the garbage collector may run this on the lane's thread
        lane.close(0.0)
