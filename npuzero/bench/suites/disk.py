"""Disk bandwidths for offloaded training state, and the cost of checksums."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from npuzero import _native
from npuzero.bench.spread import median
from npuzero.device.handle import AsyncHandle
from npuzero.memory.file import FileStore, check_folders
from npuzero.plan import FAR_CHUNK_BYTES, FROM_DISK, PRECISIONS, FlatSize, MeshShape, Plan, StepSpec, predict_bytes

#: Chunks in memory: one being read, one in use, one being written, and a spare so that none waits for another.
SLOTS = 4
_PLAN = "infinity-states"


@dataclass(frozen=True)
class DiskSpeeds:
    """Hold the measured speeds of folders; GB are 1e9 bytes.

    Attributes:
        direct: whether transfers bypass the page cache.
        free: free bytes on each disk.
        gbs: by "write", "read" and "read + write" (both at once, all bytes count).
        crc_gbs: of checksums, on one thread.
    """

    direct: bool
    free: dict[str, int]
    gbs: dict[str, float]
    crc_gbs: float


def stream_store(store: FileStore, ring: Sequence[Tensor]) -> None:
    """Read the full store and write it back in chunks, as an update does: prefetch reads, write behind."""
    chunk, slots, ahead = ring[0].numel(), len(ring), len(ring) // 2
    count = store.nbytes // chunk
    reads: dict[int, AsyncHandle] = {}
    writes: dict[int, AsyncHandle] = {}
    for turn in range(count + ahead):
        if turn < count:
            if turn >= slots:
                writes.pop(turn - slots).wait()
            reads[turn] = store.read(turn * chunk, ring[turn % slots])
        due = turn - ahead
        if due >= 0:
            reads.pop(due).wait()
            writes[due] = store.write(due * chunk, ring[due % slots])
    for write in writes.values():
        write.wait()


def measure_disk_speeds(
    folders: Sequence[Path], *, threads: int, verify: bool, seconds: float, nbytes: int, say: Callable[[str], None]
) -> DiskSpeeds:
    """Measure the folders' speeds and report progress.

    Args:
        threads, verify: of :class:`~npuzero.memory.file.FileStore`.
        seconds: approximate duration of each kind of transfer.
        nbytes: maximum size of the file; also at most half of the free space.
        say: receives the measurements.

    Raises:
        ConfigError: a folder does not exist, cannot be written, or is in memory.
        OutOfSpace: there is no room for four chunks.
        StorageError: the disk failed.
    """
    check_folders(folders)
    free = {str(folder): shutil.disk_usage(folder).free for folder in folders}
    chunks = max(SLOTS, min(nbytes, min(free.values()) // 2) // FAR_CHUNK_BYTES)
    say(f"checksums: {(crc_gbs := _checksum_gb_per_s()):.1f} GB/s on one thread")
    store = FileStore(folders, chunks * FAR_CHUNK_BYTES, threads=threads, verify=verify)
    say(f"a file of {store.nbytes:,} bytes, {'past' if store.direct else 'through'} the page cache")
    ring = [store.aligned(FAR_CHUNK_BYTES) for _ in range(SLOTS)]
    for slot in ring:
        slot.view(torch.int64).random_()
    ways: dict[str, tuple[int, Callable[[], None]]] = {
        "write": (1, lambda: _transfer_all(store, ring, store.write)),
        "read": (1, lambda: _transfer_all(store, ring, store.read)),
        "read + write": (2, lambda: stream_store(store, ring)),
    }
    ways["write"][1]()  # the first write has to allocate disk space
    gbs: dict[str, float] = {}
    for name, (times, way) in ways.items():
        gbs[name] = times * store.nbytes / median(list(_time_repeats(way, seconds))) / 1e9
        say(f"{name}: {gbs[name]:.2f} GB/s")
    store.close()
    return DiskSpeeds(store.direct, free, gbs, crc_gbs)


def disk_step_seconds(parameters: int, gbs: float) -> dict[str, float]:
    """Return by precision the seconds per step to read and write all optimizer states of a model.

    Args:
        parameters: of the model.
        gbs: bandwidth of simultaneous reads and writes.
    """
    seconds = {}
    for name, precision in PRECISIONS.items():
        plan = Plan.preset(_PLAN, precision=precision)
        flat = FlatSize(0, parameters, precision.parameter_of(torch.float32))
        moved = predict_bytes(plan, [flat], MeshShape(1, 1), StepSpec(1)).bytes_moved
        seconds[name] = 2 * moved[FROM_DISK] / gbs / 1e9
    return seconds


def _checksum_gb_per_s() -> float:
    data = memoryview(os.urandom(1 << 20) * 16)
    return len(data) / median(list(_time_repeats(lambda: _native.io.crc32c(data), 0.2))) / 1e9


def _time_repeats(way: Callable[[], object], seconds: float) -> Iterator[float]:
    """Yield the seconds of each run, at least three, until ``seconds`` have passed."""
    end, runs = time.perf_counter() + seconds, 0
    while runs < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        way()
        yield time.perf_counter() - begin
        runs += 1


def _transfer_all(store: FileStore, ring: Sequence[Tensor], transfer: Callable[[int, Tensor], AsyncHandle]) -> None:
    """Move the full store in one direction, with one chunk in flight per slot."""
    under_way: list[AsyncHandle] = []
    for turn in range(math.ceil(store.nbytes / FAR_CHUNK_BYTES)):
        if turn >= len(ring):
            under_way[turn - len(ring)].wait()
        under_way.append(transfer(turn * FAR_CHUNK_BYTES, ring[turn % len(ring)]))
    for handle in under_way:
        handle.wait()
