"""Control groups: a cap on the memory of processes that the kernel holds them to, their page cache included."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

#: Where control groups are, of version 2 and 1, and what they are told; None: the cap.
GROUPS: tuple[tuple[Path, Mapping[str, int | None]], ...] = (
    (Path("/sys/fs/cgroup"), {"memory.max": None, "memory.swap.max": 0}),
    (Path("/sys/fs/cgroup/memory"), {"memory.limit_in_bytes": None, "memory.memsw.limit_in_bytes": None}),
)
#: What a group takes that has no cap yet.
NO_CAP = 1 << 50


@dataclass(frozen=True)
class ControlGroup:
    """Name a control group: its folder, and what it is told to have a cap."""

    folder: Path
    limits: Mapping[str, int | None]

    def limit(self, cap: int) -> None:
        """Hold the group's processes to ``cap`` bytes of memory from now on, which is no more than before.

        Raises:
            OSError: they have more, which the kernel cannot take from them; or the folder is no control group.
        """
        for name, limit in self.limits.items():
            with (self.folder / name).open("r+") as file:  # the kernel puts it there; what has none is a plain folder
                file.write(str(cap if limit is None else limit))

    def used(self) -> int:
        """Return the bytes that count for the cap now: of the processes, of the kernel for them, and page cache."""
        names = ("memory.current", "memory.usage_in_bytes")
        return int(next(path for name in names if (path := self.folder / name).exists()).read_text())

    def command(self, command: list[str]) -> list[str]:
        """Return a command that joins the group, and becomes ``command``."""
        return ["sh", "-c", f'echo 0 > "{self.folder}/cgroup.procs" && exec "$@"', "sh", *command]


@contextlib.contextmanager
def open_control_group(cap: int = NO_CAP) -> Iterator[ControlGroup | None]:
    """Make a control group for the block, with ``cap`` bytes of memory; None where this process may make none."""
    made = next(filter(None, (_make_control_group(folder, limits, cap) for folder, limits in GROUPS)), None)
    try:
        yield made
    finally:
        if made is not None:
            with contextlib.suppress(OSError):
                made.folder.rmdir()


def _make_control_group(parent: Path, limits: Mapping[str, int | None], cap: int) -> ControlGroup | None:
    made = ControlGroup(parent / f"npuzero-{os.getpid()}-{next(_NUMBERS)}", limits)
    try:
        made.folder.mkdir()
    except OSError:
        return None
    try:
        made.limit(cap)
    except OSError:
        made.folder.rmdir()
        return None
    return made


_NUMBERS = itertools.count()
