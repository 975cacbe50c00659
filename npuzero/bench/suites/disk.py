"""How fast a disk reads and writes what a step takes from it, and what checksums cost."""

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

#: Chunks in memory: one comes, one is there, one goes, and one more so that none waits for another.
SLOTS = 4
_PLAN = "infinity-states"


@dataclass(frozen=True)
class DiskSpeeds:
    """Say what folders can do; GB are 1e9 bytes.

    Attributes:
        direct: whether their bytes go past the page cache.
        free: bytes on each disk.
        gbs: by "write", "read" and "read + write", both at once, of which all bytes count.
        crc_gbs: of checksums, on one thread.
    """

    direct: bool
    free: dict[str, int]
    gbs: dict[str, float]
    crc_gbs: float


def stream_store(store: FileStore, ring: Sequence[Tensor]) -> None:
    """Read all that the store holds and write it back by chunks, as an update does: reads ahead, writes behind."""
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
    """Measure what the folders can do, and tell how it goes.

    Args:
        threads, verify: of :class:`~npuzero.memory.file.FileStore`.
        seconds: for each kind of transfer, about.
        nbytes: of the file, at the most; half of what is free, at the most.
        say: is told what was measured.

    Raises:
        ConfigError: a folder is not there, cannot be written, or is memory.
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
    ways["write"][1]()  # the first time a disk has to find the place
    gbs: dict[str, float] = {}
    for name, (times, way) in ways.items():
        gbs[name] = times * store.nbytes / median(list(_time_repeats(way, seconds))) / 1e9
        say(f"{name}: {gbs[name]:.2f} GB/s")
    store.close()
    return DiskSpeeds(store.direct, free, gbs, crc_gbs)


def disk_step_seconds(parameters: int, gbs: float) -> dict[str, float]:
    """Return by precision the seconds that a disk takes to give and take all states of a model in a step.

    Args:
        parameters: of the model.
        gbs: of reads and writes at once.
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
    """Yield the seconds of each run, three at least, until as many have passed."""
    end, runs = time.perf_counter() + seconds, 0
    while runs < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        way()
        yield time.perf_counter() - begin
        runs += 1


def _transfer_all(store: FileStore, ring: Sequence[Tensor], transfer: Callable[[int, Tensor], AsyncHandle]) -> None:
    """Move the whole store one way, as many chunks at a time as there are slots."""
    under_way: list[AsyncHandle] = []
    for turn in range(math.ceil(store.nbytes / FAR_CHUNK_BYTES)):
        if turn >= len(ring):
            under_way[turn - len(ring)].wait()
        under_way.append(transfer(turn * FAR_CHUNK_BYTES, ring[turn % len(ring)]))
    for handle in under_way:
        handle.wait()
