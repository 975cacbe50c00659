"""Manage the folder of a run's checkpoints: find complete ones, commit a new one, remove old ones.

A checkpoint is written into a hidden folder with a unique name, and one rename gives it the name of its step: a folder
with this name and a manifest is complete. Removal starts with a rename to a hidden name. The claim of the writing
process is stored next to the hidden folder, so that a job never mistakes another job's folder for a leftover, and can
name its owner to the user.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from pathlib import Path

from npuzero.arguments import as_path
from npuzero.checkpoint import owner
from npuzero.checkpoint.formats.item_files import MANIFEST
from npuzero.checkpoint.owner import ClaimFile, OwnerStatus
from npuzero.errors import CheckpointError

_PARTIAL, _OWNER, _OLD = ".partial-", ".owner", ".old-"
_NAME = re.compile(r"step-([0-9]{8,})")


def step_folder_name(step: int) -> str:
    """Return the name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def find_checkpoints(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the complete checkpoints in ``folder``, oldest first, and descriptions of incomplete ones.

    Raises:
        CheckpointError: the folder exists, and cannot be read.
    """
    complete, others = [], []
    try:
        named = [(int(match[1]), name) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
        for _, name in sorted(named):
            lacks = _find_lack(folder / name)
            if lacks is None:
                complete.append(folder / name)
            else:
                others.append(f"{name}, {lacks}")
    except FileNotFoundError:
        return [], []
    except NotADirectoryError as error:
        raise CheckpointError(
            f"look for checkpoints in {folder}",
            expected="a checkpoint, which is a folder, or the folder of a run",
            got="a file",
            do="What torch.save wrote is read by torch.load, and taken by npuzero.load_full_state_dict(model, state).",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"look for checkpoints in {folder}",
            expected="a folder that can be read",
            got=str(error),
            do="Give this user leave to read it, or name another folder.",
        ) from error
    return complete, others


def _find_lack(path: Path) -> str | None:
    """Return why ``path`` is not a complete checkpoint; None if it is one."""
    mode = _get_file_mode(path)
    if mode is None:
        return "a link to nothing"
    if not stat.S_ISDIR(mode):
        return "no folder"
    manifest = _get_file_mode(path / MANIFEST)
    return None if manifest is not None and stat.S_ISREG(manifest) else f"a folder without {MANIFEST}"


def _get_file_mode(path: Path) -> int | None:
    """Return the mode of the target of ``path``; None without a target."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the latest complete checkpoint in ``folder``; None without one.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    found, _ = find_checkpoints(as_path("checkpoint.latest: folder", folder))
    return found[-1] if found else None


class PartialCheckpoint:
    """Hold an unfinished checkpoint, which this process has claimed.

    Attributes:
        path: its hidden folder.
        claim: of this process.
    """

    def __init__(self, folder: Path, step: int) -> None:
        """Remove the leftovers of dead jobs, and make the hidden folder.

        Raises:
            CheckpointError: this step has a checkpoint, or another job is saving into this folder.
            OSError: the folder cannot be written.
        """
        _make_folders(folder)
        self._folder, self._target = folder, folder / step_folder_name(step)
        self._refuse_twice()
        _remove_leftovers(folder, self._target)
        self.path = folder / f"{_PARTIAL}{step_folder_name(step)}-{secrets.token_hex(8)}"
        self.claim = ClaimFile(self.path.with_name(self.path.name + _OWNER))
        try:
            self.path.mkdir()
        except OSError:
            self.drop()
            raise

    def commit(self) -> Path:
        """Give the folder its final name, durably, and return that. An incomplete folder of that name is moved aside.

        Raises:
            CheckpointError: another job has saved this step.
        """
        sync_folder(self.path)
        self._refuse_twice()
        if os.path.lexists(self._target):
            self._target.rename(self._folder / f"{self._target.name}.aside-{secrets.token_hex(4)}")
        self.path.rename(self._target)
        sync_folder(self._folder)
        return self._target

    def drop(self) -> None:
        """Release the claim, and remove the hidden folder if it was not committed. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.claim.release(forget=not self.path.exists())

    def _refuse_twice(self) -> None:
        if os.path.lexists(self._target) and _find_lack(self._target) is None:
            raise CheckpointError(
                f"save {self._target}",
                expected="a step that was not saved yet",
                got="a checkpoint of this step",
                do="Resume from it, remove it, or save into another folder.",
            )


def _make_folders(folder: Path) -> None:
    """Make the folder and its parents, durably."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        sync_folder(path.parent)


def _remove_leftovers(folder: Path, target: Path) -> None:
    """Remove leftovers of dead jobs. A folder stays if its owner may be alive."""
    for name in os.listdir(folder):
        path = folder / name
        if name.startswith(_OLD):
            shutil.rmtree(path, ignore_errors=True)
        elif name.startswith(_PARTIAL) and name.endswith(_OWNER):
            written = path.with_name(name.removesuffix(_OWNER))
            fate, who = owner.read_claim(path)
            if fate is OwnerStatus.ALIVE:
                raise CheckpointError(
                    f"save {target}",
                    expected="a folder that no other job is saving into",
                    got=f"a save under way by {who or 'a process that has not said its name'} ({written.name})",
                    do="Wait for that job or end it, or save into another folder.",
                    owner=str(who),
                )
            # If the owner's status is unknown, as on another host without locks, its folder stays: it may be writing.
            if fate is OwnerStatus.DEAD or (who is None and _is_empty_claim(path, written)):
                shutil.rmtree(written, ignore_errors=True)
                # The claim goes last: without it no later save would find a folder that could not be removed.
                if not written.exists():
                    path.unlink(missing_ok=True)


def _is_empty_claim(claim: Path, written: Path) -> bool:
    """Tell whether a claim is empty and has no folder: its process was killed as it made it.

    If the process is still making it, :class:`ClaimFile` makes another one.
    """
    try:
        return not os.path.lexists(written) and claim.lstat().st_size == 0
    except FileNotFoundError:
        return True


def remove_old_checkpoints(folder: Path, count: int, newest: Path) -> None:
    """Remove all complete checkpoints but ``newest`` and the last ``count - 1`` others. Links are left alone.

    Raises:
        CheckpointError: one cannot be removed.
    """
    others = [path for path in find_checkpoints(folder)[0] if path != newest and not path.is_symlink()]
    for path in others[: max(0, len(others) - count + 1)]:
        nameless = path.with_name(f"{_OLD}{path.name}-{secrets.token_hex(4)}")
        try:
            path.rename(nameless)
            shutil.rmtree(nameless)
        except FileNotFoundError:  # another process has removed it
            continue
        except OSError as error:
            raise CheckpointError(
                f"remove {path}, of which keep_last={count} is the last but {count}",
                expected="leave to remove it",
                got=str(error),
                do=f"Remove it by hand; {newest.name} is complete.",
            ) from error


def sync_folder(folder: Path) -> None:
    """Write the names in ``folder`` to disk, so that they survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
