"""Control groups: memory limits for processes, enforced by the kernel, page cache included."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

#: Control group roots (versions 2 and 1) and the files to write; None stands for the cap.
GROUPS: tuple[tuple[Path, Mapping[str, int | None]], ...] = (
    (Path("/sys/fs/cgroup"), {"memory.max": None, "memory.swap.max": 0}),
    (Path("/sys/fs/cgroup/memory"), {"memory.limit_in_bytes": None, "memory.memsw.limit_in_bytes": None}),
)
#: The cap of a group without a limit.
NO_CAP = 1 << 50


@dataclass(frozen=True)
class ControlGroup:
    """Refer to a control group: its folder, and the files that set its cap."""

    folder: Path
    limits: Mapping[str, int | None]

    def limit(self, cap: int) -> None:
        """Set the memory limit of the group's processes to ``cap`` bytes, at most the previous limit.

        Raises:
            OSError: they use more and the kernel cannot reclaim it; or the folder is not a control group.
        """
        for name, limit in self.limits.items():
            with (self.folder / name).open("r+") as file:  # the kernel creates it; a plain folder has none
                file.write(str(cap if limit is None else limit))

    def used(self) -> int:
        """Return the bytes that count toward the cap now: of the processes, of the kernel for them, and page cache."""
        names = ("memory.current", "memory.usage_in_bytes")
        return int(next(path for name in names if (path := self.folder / name).exists()).read_text())

    def command(self, command: list[str]) -> list[str]:
        """Return a command that joins the group and then executes ``command``."""
        return ["sh", "-c", f'echo 0 > "{self.folder}/cgroup.procs" && exec "$@"', "sh", *command]


@contextlib.contextmanager
def open_control_group(cap: int = NO_CAP) -> Iterator[ControlGroup | None]:
    """Create a control group for the block, with ``cap`` bytes of memory; None if this process may not create one."""
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
