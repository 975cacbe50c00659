"""The folder of a run's checkpoints: which are complete, how one becomes so, and how old ones go.

A checkpoint is written into a hidden folder and gets its name by one rename, so what has a name is complete. One that
is removed loses its name first.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from npuzero.errors import CheckpointError

_PARTIAL = ".partial-"
_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    """The name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest first; none where there is no such folder."""
    if not folder.is_dir():
        return []
    named = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named)]


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The last complete checkpoint in ``folder``; None where there is none."""
    found = complete(Path(folder))
    return found[-1] if found else None


def begin(folder: Path, step: int) -> Path:
    """A fresh place to write the checkpoint of ``step`` in; what unfinished saves have left is removed.

    Raises:
        CheckpointError: there is a checkpoint of this step.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / name_of(step)).exists():
        raise CheckpointError(
            f"save {folder / name_of(step)}",
            expected="a step that was not saved yet",
            got="a checkpoint of this step",
            do="Resume from it, remove it, or save into another folder.",
        )
    for path in folder.iterdir():
        if path.name.startswith(_PARTIAL):
            shutil.rmtree(path)
    partial(folder, step).mkdir()
    return partial(folder, step)


def partial(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is written before it has its name."""
    return folder / f"{_PARTIAL}{name_of(step)}"


def commit(folder: Path, step: int) -> None:
    """Give what was written its name, durably."""
    sync(partial(folder, step))
    partial(folder, step).rename(folder / name_of(step))
    sync(folder)


def keep_last(folder: Path, count: int) -> None:
    """Remove all complete checkpoints but the last ``count``, which is at least 1."""
    for path in complete(folder)[:-count]:
        nameless = path.with_name(f"{_PARTIAL}{path.name}")
        path.rename(nameless)
        shutil.rmtree(nameless)


def sync(folder: Path) -> None:
    """Names in ``folder`` outlast a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
