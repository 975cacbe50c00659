"""Guard against forks: a child of ``os.fork`` has its parent's memory, but not its threads, and is no rank.

Objects of a rank remember the process that made them. In a child, such as a DataLoader's worker, closing them does
nothing, so that the child can exit normally; any operation that would reach other ranks raises a :class:`StateError`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from npuzero.errors import StateError


class CreatingProcess:
    """Remember the process that made an object."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def left(self) -> bool:
        """Return whether this process is a forked child of that process."""
        return self._pid != os.getpid()


def make_fork_check(subject: str) -> Callable[[], None]:
    """Return a check that raises a StateError about ``subject`` in a forked child of this process."""
    birthplace = CreatingProcess()

    def check() -> None:
        if birthplace.left():
            raise forked_world_error(subject)

    return check


def forked_world_error(subject: str) -> StateError:
    """Return the error for a child that uses its parent's world."""
    return StateError(
        subject,
        expected="the process that joined the world",
        got="a forked child of that process",
        do="A world does not survive a fork: compute in a world of one there (npuzero.comm.SingleWorld()), or let the "
        "launcher start the process.",
    )


def has_inherited_group() -> bool:
    """Return whether this process has torch.distributed's default group only by a fork."""
    return dist.is_available() and dist.is_initialized() and dist.group.WORLD is _inherited


_inherited: Any = None


def _keep_groups() -> None:
    # torch's groups join threads at their end. A child does not have these threads, and would hang or crash. So the
    # groups and their stores are never freed in it.
    global _inherited
    if not (dist.is_available() and dist.is_initialized()):
        return
    _inherited = dist.group.WORLD
    for group, (_, store) in dist.distributed_c10d._world.pg_map.items():
        for kept in (group, store):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


os.register_at_fork(after_in_child=_keep_groups)
