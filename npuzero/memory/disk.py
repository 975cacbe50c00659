"""Allocate file stores on disks. Data there is in no tensor; it is read to the host by extent."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from npuzero.config import Settings, nvme_folders
from npuzero.errors import StateError
from npuzero.memory.file import FileStore
from npuzero.memory.space import MemorySpace, TransientBuffer


class DiskSpace(MemorySpace):
    """Make file stores in the folders of the settings, and count their bytes by label."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(torch.device("cpu"))
        self._settings = settings

    def store(self, nbytes: int) -> FileStore:
        """Return a zeroed store of ``nbytes``.

        Raises:
            ConfigError: no folder is set, or a folder cannot be used.
            OutOfSpace: a disk has no room for its part.
        """
        folders = [Path(folder) for folder in nvme_folders(self._settings)]
        return FileStore(folders, nbytes, threads=self._settings.io_threads, verify=self._settings.verify)

    def transient(self, numel: int, dtype: torch.dtype, label: str) -> TransientBuffer:
        _refuse_allocation()

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        _refuse_allocation()


def _refuse_allocation() -> NoReturn:
    raise StateError(
        "memory of a disk", expected="stores alone", got="a tensor there", do="This is a fault of the engine."
    )
