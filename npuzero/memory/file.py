"""Store bytes of the training state in unnamed files on disks."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npuzero import _native
from npuzero.device.handle import AsyncHandle
from npuzero.errors import ConfigError, ContractError, NpuZeroError, OutOfSpace, StateError, StorageError

#: Offsets, lengths and addresses are multiples of it; every disk's sector size divides it.
BLOCK = 4096

_HUGE_PAGE = 2 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_A_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
_MAKE_ROOM = (
    "Make room there, name further folders on other disks, shard more of the state, or keep less of it on disk."
)
_OTHER_FOLDER = "Name a folder on a local disk that this process may write to."


class FileStore:
    """Store bytes in an unnamed file in each of the ``folders``, striped round-robin.

    The files have no names, so nothing remains when the process ends, even if it is killed. Requests run
    asynchronously, in any order. The caller must wait for a request before starting another on the same bytes, and must
    not touch its buffer until then. Any thread may call. A deleted store finishes its pending requests.

    Args:
        folders: on disks; each file allocates its part of the bytes at once, so that no later write runs out of space.
        nbytes: size, rounded up to a multiple of the block; initially zero.
        threads: per folder.
        verify: check reads against the checksums of the writes (CRC32C of each block).

    Attributes:
        direct: whether all folders bypass the page cache (O_DIRECT).
        moved: requested bytes so far, by "read" and "write".

    Raises:
        ConfigError: a folder does not exist, is not writable, or is in memory (tmpfs).
        OutOfSpace: a disk cannot hold its part.
        StorageError: a disk failed.
    """

    def __init__(self, folders: Sequence[Path], nbytes: int, *, threads: int = 4, verify: bool = True) -> None:
        self.folders = tuple(Path(folder) for folder in folders)
        self.nbytes = -(-nbytes // BLOCK) * BLOCK
        self.verify = verify
        self.moved: Counter[str] = Counter(read=0, write=0)
        check_folders(self.folders)
        _check_room(self.folders, self.nbytes)
        try:
            self._store = _native.io.Store([str(folder) for folder in self.folders], self.nbytes, threads, verify)
        except OSError as error:
            needed = _bytes_by_folder(self.folders, self.nbytes)
            raise _refused_store_error(error, self.folders, needed) from error
        self.direct: bool = self._store.direct
        self._lock = threading.Lock()
        self._under_way: list[tuple[Any, Tensor]] = []  # requests, and their buffers, kept alive until they end
        self._close = weakref.finalize(self, _close_store, self._store, self._under_way)

    def read(self, offset: int, buffer: Tensor) -> AsyncHandle:
        """Start to fill ``buffer`` with the bytes from ``offset`` on.

        Waiting for the handle raises a StorageError if the disk failed, or returned other bytes than were written.

        Raises:
            ContractError: the buffer is not like one of :meth:`aligned`, or the range is not within the store.
            StateError: the store is closed.
        """
        return self._start("read", offset, buffer)

    def write(self, offset: int, buffer: Tensor) -> AsyncHandle:
        """Start to write ``buffer`` at ``offset``; the same rules as for :meth:`read`."""
        return self._start("write", offset, buffer)

    @staticmethod
    def aligned(nbytes: int) -> Tensor:
        """Return a zeroed uint8 buffer [nbytes] on separate pages, for requests.

        A forked process does not have these pages.
        """
        pages = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A disk may write to a page while the process forks (a DataLoader). Copy-on-write could then move this
        # process to a copy that the disk does not write to.
        pages.madvise(mmap.MADV_DONTFORK)
        if nbytes >= _HUGE_PAGE:
            pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin per transfer
        return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]

    def close(self) -> None:
        """Wait for pending requests and free the disk space. May be called again."""
        self._close()

    def _start(self, verb: str, offset: int, buffer: Tensor) -> AsyncHandle:
        # O_DIRECT needs address, offset and length in multiples of a block. `_under_way` keeps the buffer alive until
        # the request ends, even if the caller drops both buffer and handle.
        nbytes = buffer.numel()
        plain = buffer.dtype == torch.uint8 and buffer.device.type == "cpu" and buffer.is_contiguous()
        whole = not (offset % BLOCK or nbytes % BLOCK or buffer.data_ptr() % BLOCK)
        if not (plain and whole and 0 <= offset <= self.nbytes - nbytes):
            raise ContractError(
                f"FileStore.{verb}",
                expected=f"contiguous uint8 of the host on whole blocks of {BLOCK} bytes, within {self.nbytes:,} bytes",
                got=f"{nbytes:,} bytes of {buffer.dtype} on {buffer.device} at address {buffer.data_ptr():#x}, "
                f"for offset {offset:,}",
                do="Take buffers from FileStore.aligned(), and offsets and lengths that are multiples of the block.",
            )
        with self._lock:
            request = self._store.submit(verb == "write", offset, buffer.data_ptr(), nbytes)
            if request is None:
                raise StateError(
                    f"FileStore.{verb}", expected="an open store", got="a closed one", do="Make another FileStore."
                )
            self.moved[verb] += nbytes
            self._under_way[:] = [entry for entry in self._under_way if not entry[0].done()]
            self._under_way.append((request, buffer))
        return _FileTransfer(request, verb, self.folders)


class _FileTransfer(AsyncHandle):
    """Wait for a request and raise its error."""

    def __init__(self, request: Any, verb: str, folders: Sequence[Path]) -> None:
        self._request = request
        self._verb = verb
        self._folders = folders

    def wait(self) -> None:
        """Wait for the bytes.

        Raises:
            StorageError: the disk failed, the file became shorter, or the bytes differ from those written.
            OutOfSpace: the disk has no room, although the file was allocated in full.
        """
        trouble = self._request.wait()
        if trouble is not None:
            kind, folder, offset, number = trouble
            raise _failed_request_error(self._verb, kind, self._folders[folder], offset, number)

    def done(self) -> bool:
        return bool(self._request.done())


def check_folders(folders: Sequence[Path]) -> None:
    """Raise a ConfigError unless there is a folder and all folders are on disks."""
    if not folders:
        raise ConfigError(
            "folders of a store", expected="one at least", got="none", do="Name folders on local disks: nvme_paths."
        )
    for folder in folders:
        try:
            in_memory = _native.io.is_memory(str(folder))
        except OSError as error:
            raise _refused_store_error(error, [folder], {}) from error
        if in_memory:
            raise ConfigError(
                f"folder {folder}",
                expected="one on a disk",
                got="one in memory (tmpfs)",
                do="Name a folder on a local disk; for states in memory there is the host's.",
            )
        if not folder.is_dir():
            raise ConfigError(f"folder {folder}", expected="a folder", got="something else", do=_OTHER_FOLDER)


def _close_store(store: Any, under_way: list[tuple[Any, Tensor]]) -> None:
    """Close the store, which ends all requests, before freeing their buffers."""
    store.close()
    under_way.clear()


def _bytes_by_folder(folders: Sequence[Path], nbytes: int) -> dict[Path, int]:
    """Return the bytes needed on each folder's disk: the sum over all folders on that disk."""
    disks = [os.stat(folder).st_dev for folder in folders]
    needs: Counter[int] = Counter()
    for index, disk in enumerate(disks):
        needs[disk] += _native.io.share(nbytes, len(folders), index)
    return {folder: needs[disk] for folder, disk in zip(folders, disks, strict=True)}


def _check_room(folders: Sequence[Path], nbytes: int) -> None:
    for folder, needed in _bytes_by_folder(folders, nbytes).items():
        free = _free_bytes(folder)
        if free is not None and needed > free:
            raise _out_of_space_error(folder, needed, "too little")


def _free_bytes(folder: Path) -> int | None:
    """Return the free bytes of the folder's disk; None if the folder is gone."""
    try:
        facts = os.statvfs(folder)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize


def _out_of_space_error(folder: Path, needed: int, why: str, do: str = _MAKE_ROOM) -> OutOfSpace:
    free = _free_bytes(folder)
    return OutOfSpace(
        f"disk of {folder}",
        expected=f"room for {needed:,} bytes",
        got=f"{'an unknown number of' if free is None else format(free, ',')} bytes free ({why})",
        do=do,
        folder=str(folder),
        needed=needed,
        free=free,
    )


def _refused_store_error(error: OSError, folders: Sequence[Path], needs: dict[Path, int]) -> NpuZeroError:
    """Return the error for a store that the system refuses to create."""
    folder = next((folder for folder in folders if str(error.strerror).startswith(f"{folder}: ")), folders[0])
    reason = os.strerror(error.errno or 0)
    if error.errno in _NO_ROOM:
        return _out_of_space_error(folder, needs[folder], reason)
    if error.errno in _NOT_A_FOLDER:
        return ConfigError(f"folder {folder}", expected="one to write to", got=reason, do=_OTHER_FOLDER)
    return StorageError(
        f"folder {folder}",
        expected="a file in it",
        got=reason,
        do="Look for the disk's errors (dmesg), or name another folder.",
        folder=str(folder),
        errno=error.errno,
    )


def _failed_request_error(verb: str, kind: Any, folder: Path, offset: int, number: int) -> NpuZeroError:
    """Return the error for a request that failed at ``offset`` of the folder's file."""
    kinds = _native.io.Kind
    if kind == kinds.failed and number in _NO_ROOM:
        why = f"{os.strerror(number)}, at offset {offset:,} of a file that had its room"
        do = "Make room there, or name a folder on another disk; go on from the last checkpoint."
        return _out_of_space_error(folder, BLOCK, why, do)
    expected, got, do = {
        kinds.failed: (
            f"a {verb} that succeeds",
            os.strerror(number),
            "Look for the disk's errors (dmesg); go on from the last checkpoint with a folder on another disk.",
        ),
        kinds.ended: (
            "as many bytes as were taken at the start",
            "the end of the file",
            "Somebody has shortened it, or the disk has failed; go on from the last checkpoint.",
        ),
        kinds.damaged: (
            "the bytes that were written",
            f"others (CRC32C of {BLOCK} bytes)",
            "The disk, its link or the memory damages data: go on from the last checkpoint with a folder on another "
            "disk, and replace what is broken.",
        ),
    }[kind]
    return StorageError(
        f"{verb} in {folder} at offset {offset:,}",
        expected=expected,
        got=got,
        do=do,
        folder=str(folder),
        offset=offset,
        errno=number or None,
    )
