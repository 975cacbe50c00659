"""Claim a checkpoint for the process that writes it: a file names the process, which keeps it locked as it writes.

A process that ended without cleanup is recognised by its lock, which the kernel frees, or by its process id, which is
unused then. Neither proves much about a process on another host: some shared file systems do not carry locks between
hosts.
"""

from __future__ import annotations

import enum
import fcntl
import json
import os
import socket
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_WORDS_BYTES = 4096


@dataclass(frozen=True)
class ProcessIdentity:
    """Identify a process.

    Attributes:
        host: host name, for messages.
        boot: boot id of the kernel, for comparison: equal for all processes that see each other's locks.
        namespace: of process ids.
        started: start time, in the kernel's ticks; a later process with the same id has another one.
        since: start of the write, in UTC, for messages.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: str
    since: str

    @staticmethod
    def here() -> ProcessIdentity:
        """Return the identity of this process."""
        boot = _read_text("/proc/sys/kernel/random/boot_id") or f"unknown-{socket.gethostname()}"
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return ProcessIdentity(
            socket.gethostname(), boot, _pid_namespace(), os.getpid(), _process_start_time(os.getpid()), since
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def is_gone(self) -> bool:
        """Tell whether this process has ended for sure: it ran on this kernel, and no process has its id and start."""
        here = ProcessIdentity.here()
        if (self.boot, self.namespace) != (here.boot, here.namespace) or not here.started:
            return False
        return _process_start_time(self.pid) != self.started


class OwnerStatus(enum.Enum):
    """Tell whether the owner of a claim still runs."""

    ALIVE = enum.auto()
    DEAD = enum.auto()
    UNKNOWN = enum.auto()


class ClaimFile:
    """Hold a file that names this process, locked until :meth:`release`.

    Raises:
        OSError: the file exists, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        words = json.dumps(asdict(ProcessIdentity.here())).encode()
        self._make(words)
        while not self._is_there():  # another process removed the still empty file as a leftover
            self.release(forget=False)
            self._make(words)

    def _make(self, words: bytes) -> None:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        _held.add(str(self.path))
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # another process may hold it for a short check
            os.write(self._descriptor, words)
        except OSError:
            self.release()
            raise

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def release(self, *, forget: bool = True) -> None:
        """Release the lock; ``forget`` removes the file, else it stays as the claim of an ended process. Idempotent."""
        if str(self.path) not in _held:
            return
        if forget:
            self.path.unlink(missing_ok=True)
        _held.discard(str(self.path))
        with suppress(OSError):  # forked children share the descriptor: they must not keep the lock
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


#: Claims of this process, for file systems without locks.
_held: set[str] = set()


def read_claim(path: Path) -> tuple[OwnerStatus, ProcessIdentity | None]:
    """Return the status of the owner of the claim ``path``, and its identity if it can be read."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return OwnerStatus.DEAD, None
    except OSError:
        return OwnerStatus.UNKNOWN, None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return OwnerStatus.UNKNOWN, None
        owner = _parse_identity(os.read(descriptor, _WORDS_BYTES))
        if owner is not None and owner.is_gone():
            return OwnerStatus.DEAD, owner
        # A lock ends with its process: a free lock means that the owner is gone. None: the file system has no locks.
        free = _try_lock(descriptor)
    finally:
        os.close(descriptor)
    if free is None and owner is not None and owner.pid == os.getpid() and owner.boot == ProcessIdentity.here().boot:
        free = str(path) not in _held
    # Locks may be local to a host: a free lock is proof only for processes of this boot.
    if free is None or (free and (owner is None or owner.boot != ProcessIdentity.here().boot)):
        return OwnerStatus.UNKNOWN, owner
    return OwnerStatus.DEAD if free else OwnerStatus.ALIVE, owner


def _parse_identity(raw: bytes) -> ProcessIdentity | None:
    try:
        owner = ProcessIdentity(**json.loads(raw))
    except (ValueError, TypeError, RecursionError):
        return None
    known = all(type(value).__name__ == kind for value, kind in zip(asdict(owner).values(), _KINDS, strict=True))
    return owner if known else None


_KINDS = tuple(ProcessIdentity.__annotations__.values())


def _try_lock(descriptor: int) -> bool | None:
    """Tell whether the lock was free, and take it; None on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


def _process_start_time(pid: int) -> str:
    """Return field 22 of proc(5)'s stat; empty if the process does not exist, or has ended and was not reaped."""
    fields = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
