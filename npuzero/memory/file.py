"""A store of bytes in files without names: training state that rests on a disk."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

import torch
from torch import Tensor

from npuzero.device.handle import Handle
from npuzero.errors import ConfigError, ContractError, OutOfSpace, StorageError

#: Offsets, lengths and addresses are multiples of it: what every disk's sectors divide.
BLOCK = 4096
#: So many bytes lie in one folder before the next one's turn comes.
STRIPE = 4 << 20


class FileStore:
    """Keep ``nbytes`` bytes in a nameless file of each of the ``folders``, in stripes that go round among them.

    The files have no names: nothing is left of them when the process ends, however it ends. Requests run beside the
    caller, in any order; it waits for the one before it begins another of the same bytes, and leaves a buffer alone
    until its request is done. Any thread may call.

    Args:
        folders: on disks; each file takes its part of the bytes at once, so that no later write runs out of them.
        nbytes: what the store holds; zeros at first.
        threads: for each folder.
        verify: compare what is read with the checksums of what was written.

    Attributes:
        direct: whether bytes go past the page cache (O_DIRECT) in all folders.
        moved: payload bytes of the requests so far, by "read" and "write".

    Raises:
        ConfigError: a folder is not there, cannot be written, or is memory.
        OutOfSpace: a disk cannot hold its part.
    """

    def __init__(self, folders: Sequence[Path], nbytes: int, *, threads: int = 4, verify: bool = True) -> None:
        if not folders:
            raise ConfigError(
                "FileStore", expected="a folder at least", got="none", do="Name one: Settings.nvme_paths."
            )
        self.folders = tuple(Path(folder) for folder in folders)
        self.nbytes = -(-nbytes // BLOCK) * BLOCK
        self.verify = verify
        self.moved: Counter[str] = Counter(read=0, write=0)
        self.direct = True
        self._lock = threading.Lock()
        self._files = [self._open(folder) for folder in self.folders]
        self._pool = ThreadPoolExecutor(threads * len(self._files), "npuzero-file")

    def read(self, offset: int, buffer: Tensor) -> Handle:
        """Fill ``buffer`` with the bytes from ``offset`` on; it is the caller's again once the handle is done."""
        return self._start("read", offset, buffer)

    def write(self, offset: int, buffer: Tensor) -> Handle:
        """Put the bytes of ``buffer`` to ``offset``."""
        return self._start("write", offset, buffer)

    @staticmethod
    def aligned(nbytes: int) -> Tensor:
        """Return ``nbytes`` zeroed bytes [nbytes] on pages of their own, which requests may use."""
        whole = torch.zeros(nbytes + BLOCK, dtype=torch.uint8)
        first = -whole.data_ptr() % BLOCK
        return whole[first : first + nbytes]

    def close(self) -> None:
        """Wait for the requests under way and give the disk back; may be called again."""
        self._pool.shutdown()
        while self._files:
            os.close(self._files.pop())

    def _start(self, verb: str, offset: int, buffer: Tensor) -> Handle:
        count = buffer.numel()
        if offset % BLOCK or count % BLOCK or buffer.data_ptr() % BLOCK or not 0 <= offset <= self.nbytes - count:
            raise ContractError(
                f"FileStore.{verb}",
                expected=f"multiples of {BLOCK} within {self.nbytes} bytes",
                got=f"{count} bytes at {offset}",
                do="Take buffers from FileStore.aligned().",
            )
        memory = buffer.numpy().data
        pieces, done = [], 0
        while done < count:
            stripe, within = divmod(offset + done, STRIPE)
            length = min(STRIPE - within, count - done)
            row, at = divmod(stripe, len(self._files))
            place = self._files[at], row * STRIPE + within
            pieces.append(self._pool.submit(_move, verb, *place, memory[done : done + length], self.folders[at]))
            done += length
        with self._lock:
            self.moved[verb] += count
        return _Request(pieces)

    def _open(self, folder: Path) -> int:
        share = -(-self.nbytes // len(self.folders) // STRIPE) * STRIPE + STRIPE
        try:
            try:
                file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT, 0o600)
            except OSError:
                file, name = tempfile.mkstemp(dir=folder)
                os.unlink(name)
                self.direct = False
        except OSError as error:
            raise ConfigError(
                f"folder {folder}", expected="one to write to", got=str(error), do="Name another."
            ) from error
        try:
            os.posix_fallocate(file, 0, share)
        except OSError as error:
            raise OutOfSpace(f"folder {folder}", expected=f"{share} bytes", got=str(error), do="Make room.") from error
        return file


class _Request(Handle):
    def __init__(self, pieces: list[Future[None]]) -> None:
        self._pieces = pieces

    def wait(self) -> None:
        wait_for(self._pieces)
        for piece in self._pieces:
            piece.result()

    def done(self) -> bool:
        return all(piece.done() for piece in self._pieces)


def _move(verb: str, file: int, offset: int, memory: memoryview, folder: Path) -> None:
    move = os.preadv if verb == "read" else os.pwritev
    done = 0
    while done < len(memory):
        try:
            moved = move(file, [memory[done:]], offset + done)
        except OSError as error:
            raise StorageError(
                f"{verb} in {folder} at {offset}", expected="success", got=str(error), do="Look at the disk."
            ) from error
        if moved == 0:
            raise StorageError(
                f"{verb} in {folder} at {offset}", expected="bytes", got="the end", do="Look at the disk."
            )
        done += moved
