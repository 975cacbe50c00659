"""States streamed through the host in chunks, compared with plain reads and writes of the same bytes on the same disk.

    python -m benchmarks.disk --folder /mnt/nvme0 --out runs/bench/disk.json

Every contender reads the full file and writes it back. ``raw`` is the disk's limit: as many threads as the store has,
each with pread and pwrite bypassing the page cache, piece by piece, each waiting only for itself.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from npuzero.bench import (
    Benchmark,
    Contender,
    Effort,
    Record,
    check_equal,
    local_contender,
    machine_fingerprint,
    run_benchmark,
)
from npuzero.bench.suites.disk import SLOTS, stream_store
from npuzero.memory.file import FileStore
from npuzero.plan import FAR_CHUNK_BYTES as CHUNK_BYTES

RAW, PLAIN, VERIFIED = "raw", "npuzero, without verify", "npuzero"
#: Part of a chunk that a thread transfers at once.
PIECE_BYTES = 2 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure (default: this one)")
    parser.add_argument("--out", type=Path, help="write the record there (JSON)")
    parser.add_argument("--seconds", type=float, default=60.0, help="at the most")
    parser.add_argument("--chunks", type=int, default=32, help=f"of {CHUNK_BYTES >> 20} MiB")
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()
    record = Record.begin("disk", "python -m benchmarks.disk", machine_fingerprint())
    result = run_benchmark(
        measure_folder(options.folder, options.chunks * CHUNK_BYTES, options.threads),
        Effort(most_s=options.seconds, least_rounds=9, visit_s=0.0, warm_up=1),
    )
    record.results.append(result)
    for name in result.seconds:
        print(f"{name}: {result.gb_per_s(name):.2f} GB/s, {result.share(name, RAW).median:.3f} of raw")
    if options.out is not None:
        record.write(options.out)


def measure_folder(folder: Path, nbytes: int, threads: int) -> Benchmark:
    """Compare reads and writes of ``nbytes``, there and back."""
    ring = [FileStore.aligned(CHUNK_BYTES) for _ in range(SLOTS)]
    stores = {name: FileStore([folder], nbytes, threads=threads, verify=name == VERIFIED) for name in (PLAIN, VERIFIED)}
    raw = RawFile(folder, nbytes, threads)
    data = torch.randint(256, (nbytes,), dtype=torch.uint8)
    for first in range(0, nbytes, CHUNK_BYTES):
        ring[0].copy_(data[first : first + CHUNK_BYTES])
        for store in stores.values():
            store.write(first, ring[0]).wait()

    def check() -> str:
        for name, store in stores.items():
            stream_store(store, ring)
            for first in range(0, nbytes, CHUNK_BYTES):
                store.read(first, ring[0]).wait()
                check_equal(name, ring[0], data[first : first + CHUNK_BYTES])
        raw.run()
        return "the bytes that come back, to the bit"

    ways: dict[str, Callable[[], object]] = {RAW: raw.run}
    ways |= {name: lambda store=store: stream_store(store, ring) for name, store in stores.items()}  # type: ignore[misc]
    contenders: list[Contender] = [local_contender(name, way, nbytes=2 * nbytes) for name, way in ways.items()]
    facts = {
        "bytes": nbytes,
        "chunk_bytes": CHUNK_BYTES,
        "slots": SLOTS,
        "threads": threads,
        "direct": stores[VERIFIED].direct,
    }
    return Benchmark("disk/stream", "reading and writing back", contenders, RAW, check, facts)


class RawFile:
    """System calls on a separate file; each thread has its pieces and a buffer."""

    def __init__(self, folder: Path, nbytes: int, threads: int) -> None:
        self._file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, nbytes)
        self._pool = ThreadPoolExecutor(threads)
        self._offsets = [range(i * PIECE_BYTES, nbytes, threads * PIECE_BYTES) for i in range(threads)]
        self._buffers = [FileStore.aligned(PIECE_BYTES) for _ in range(threads)]

    def run(self) -> None:
        for done in [self._pool.submit(self._move, *part) for part in zip(self._offsets, self._buffers, strict=True)]:
            done.result()

    def _move(self, offsets: range, buffer: torch.Tensor) -> None:
        piece = [buffer.numpy().data]
        for offset in offsets:
            if os.preadv(self._file, piece, offset) + os.pwritev(self._file, piece, offset) != 2 * PIECE_BYTES:
                raise OSError("a short transfer")


if __name__ == "__main__":
    main()
