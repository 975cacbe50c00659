"""Homes: where bytes of activations rest between forward and backward, and how they get there and back."""

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

#: What reports count this memory under.
LABEL = "activations"
#: What goes to a disk, or comes from it, at a time.
PIECE_BYTES = 4 * 2**20
# Pieces under way at once.
_BUFFERS = 4
# Segments of memory, and files, are no smaller: sizes that creep up from step to step must not leave one each.
_SEGMENT_BYTES = 2**20
_FILE_BYTES = 64 * 2**20


class ActivationStorage(Protocol):
    """Keep bytes elsewhere. What is asked of it happens in the order of the calls, beside the caller."""

    def store(self, source: Tensor) -> tuple[list[PageRun], AsyncHandle]:
        """Take a copy of ``source``, uint8[n] on the device, which must not change until the handle was waited for.

        Raises:
            OutOfSpace: there is no room for it.
        """

    def fetch(self, runs: list[PageRun], target: Tensor) -> AsyncHandle:
        """Write what was stored into ``target``, uint8[n] on the device."""

    def give(self, runs: list[PageRun]) -> None:
        """Take the room back, from any thread; what was asked for before may still be under way."""


class MemoryActivationStorage:
    """Keep bytes in a memory space, copied on a lane beside the computation.

    Args:
        space: where they rest.
        device: where they come from.
        moved: bytes by link between memories, which it counts on.
        links: the names of the way there and the way back; none where bytes stay on the device.
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
            if target.device.type != "cpu":  # should nobody wait for it, its memory is not another's before it is done
                target.record_stream(getattr(torch, target.device.type).current_stream())
            for there, here in pairs:
                here.copy_(there, non_blocking=True)

        self._count(1, target)
        return self._lane.run(copy)

    def give(self, runs: list[PageRun]) -> None:
        self._pages.give(runs)  # the lane keeps the order: who takes them next writes after what is under way

    def _pairs(self, runs: list[PageRun], flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = _iter_page_parts(runs, flat, flat.numel())
        return [(self._segments[part.segment][part.begin :][: part.here.numel()], part.here) for part in parts]

    def _count(self, way: int, flat: Tensor) -> None:
        if self._links:
            self._moved[self._links[way]] += flat.numel()


class FileActivationStorage:
    """Keep bytes in files, by way of buffers on the host, on a thread beside the computation.

    Args:
        open_store: returns a store of so many bytes.
        buffers: on the host, of PIECE_BYTES each and at least two, through which pieces go in turn.
        device: where the bytes come from.
        moved: bytes by link between memories, which it counts on.
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
            # A store has files and threads of its own. Each is as large as all before it, so there are few.
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
        self._pages.give(runs)  # the lane keeps the order, and each of its steps waits for what it has begun

    def _run(
        self,
        runs: list[PageRun],
        flat: Tensor,
        begin: Callable[[_PagePart, Tensor], Callable[[], object]],
        links: Sequence[str],
    ) -> AsyncHandle:
        """Queue the way of all parts of ``flat``: what ``begin`` returns ends it, before the buffer is used again."""
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
                for end in ends:  # where one has failed, the others must not go on in the buffers
                    with contextlib.suppress(NpuZeroError):
                        end()

        return self._lane.run(step)


def device_activation_storage(spaces: MemorySpaces, device: torch.device) -> ActivationStorage:
    """Return a home on the device itself, for parts of what ranks hold alike."""
    return MemoryActivationStorage(spaces[Memory.DEVICE], device, spaces.mover.moved)


def host_activation_storage(spaces: MemorySpaces, device: torch.device) -> ActivationStorage:
    """Return a home in the host's memory."""
    return MemoryActivationStorage(spaces.host, device, spaces.mover.moved, (TO_HOST, TO_DEVICE))


def disk_activation_storage(spaces: MemorySpaces, device: torch.device) -> ActivationStorage:
    """Return a home in files."""
    host, disk = spaces.host, spaces.disk

    def open_store(nbytes: int) -> FileStore:
        store = disk.store(nbytes)
        disk.count(LABEL, nbytes)
        return store

    buffers = [host.allocate(PIECE_BYTES, torch.uint8, LABEL, host.pages) for _ in range(_BUFFERS)]
    return FileActivationStorage(open_store, buffers, device, spaces.mover.moved)


class _PagePart(NamedTuple):
    """Name a part of a flat tensor, and where it rests."""

    segment: int
    begin: int
    here: Tensor


def _iter_page_parts(runs: list[PageRun], flat: Tensor, most: int) -> Iterator[_PagePart]:
    """Yield the parts of ``flat``, of ``most`` bytes each at most; the last page of its runs may be used in part."""
    at = 0
    for run in runs:
        for begin in range(run.begin, run.end, most):
            here = flat[at : at + min(most, run.end - begin)]
            yield _PagePart(run.segment, begin, here)
            at += here.numel()


def _close_storage(lane: WorkLane, stores: Sequence[FileStore] = ()) -> None:
    """Let the lane's thread end with the model, and give its files back once nothing is under way."""

    def close() -> None:
        for store in stores:
            store.close()

    if stores:
        lane.run(close)
    with contextlib.suppress(RuntimeError):  # it is this thread, where the collector found the model
        lane.close(0.0)
