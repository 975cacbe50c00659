"""The files of a checkpoint: writing them with checksums, and reading nothing whose checksum is wrong.

``__<rank>_0.distcp`` holds items one after the other without gaps, ``__<rank>_0.crc32`` the CRC-32 of each (4 bytes,
little-endian, in order), ``manifest.json`` the length and CRC-32 of every file, and in its last line its own.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npuzero.checkpoint.archive import chain, head_and_tail
from npuzero.errors import CheckpointError

MANIFEST, METADATA = "manifest.json", ".metadata"
FORMAT = 1

#: Bytes that are collected before they are written at once.
_BATCH_BYTES = 8 << 20
_BATCH_PIECES = 512

Buffer = bytes | memoryview


@dataclass(frozen=True)
class Facts:
    """What the manifest says of a file."""

    nbytes: int
    crc: int


def data_name(rank: int) -> str:
    """The file that ``rank`` writes; named as DCP names it."""
    return f"__{rank}_0.distcp"


def table_name(data: str) -> str:
    """The file with the checksums of the items of ``data``."""
    return str(Path(data).with_suffix(".crc32"))


class DataFile:
    """A file of items in the making, in a ``with`` block; at its end it is durable, with its table of checksums.

    Attributes:
        facts: of the file and of the table, after the block.
    """

    facts: tuple[Facts, Facts]

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        self._crcs: list[int] = []
        self._facts = Facts(0, 0)

    def add_tensor(self, dtype: torch.dtype, sizes: Sequence[int], elements: memoryview) -> None:
        """Append the item of a contiguous tensor, whose memory stays as it is until the block ends."""
        crc = zlib.crc32(elements)
        head, tail = head_and_tail(dtype, sizes, crc)
        self._append((head, elements, tail), zlib.crc32(tail, chain(zlib.crc32(head), crc, len(elements))))

    def add_object(self, raw: bytes) -> tuple[int, int]:
        """Append an item that is written already; where it lies: offset and length."""
        offset = self._facts.nbytes
        self._append((raw,), zlib.crc32(raw))
        return offset, len(raw)

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._flush()
                os.fsync(self._file.fileno())
        if kind is None:
            table = np.asarray(self._crcs, dtype="<u4").tobytes()
            self.facts = self._facts, write(self._path.with_name(table_name(self._path.name)), table)

    def _append(self, pieces: tuple[Buffer, ...], crc: int) -> None:
        nbytes = sum(map(len, pieces))
        self._crcs.append(crc)
        self._facts = Facts(self._facts.nbytes + nbytes, chain(self._facts.crc, crc, nbytes))
        self._pending.extend(pieces)
        self._pending_bytes += nbytes
        if self._pending_bytes >= _BATCH_BYTES or len(self._pending) >= _BATCH_PIECES:
            self._flush()

    def _flush(self) -> None:
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        while pending:
            written = os.writev(self._file.fileno(), pending)
            while pending and written >= len(pending[0]):
                written -= len(pending.pop(0))
            if pending:
                pending[0] = memoryview(pending[0])[written:]
        # The kernel begins to write at once, instead of when it must, and keeps memory for others.
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write(path: Path, raw: bytes) -> Facts:
    """A small file, durably."""
    with open(path, "xb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return Facts(len(raw), zlib.crc32(raw))


def write_manifest(folder: Path, content: Mapping[str, Any], files: Mapping[str, Facts]) -> None:
    """Say what belongs to a checkpoint; written last."""
    listed = {name: [facts.nbytes, facts.crc] for name, facts in files.items()}
    text = json.dumps({"format": FORMAT, **content, "files": listed}).encode()
    write(folder / MANIFEST, text + b"\n%08x\n" % zlib.crc32(text))


class Manifest:
    """What a checkpoint's manifest says, and the checks that follow from it.

    Attributes:
        folder: of the checkpoint.
        content: step, world, and what else :func:`write_manifest` was given.
        files: length and CRC-32 by name.
    """

    def __init__(self, folder: Path) -> None:
        """Read it, and compare the length of every file.

        Raises:
            CheckpointError: it, or a file, is damaged.
        """
        self.folder = folder
        path = folder / MANIFEST
        raw = read(path)
        text, _, check = raw[:-1].rpartition(b"\n")
        if raw[-1:] != b"\n" or check != b"%08x" % zlib.crc32(text):
            raise damaged(path, "a last line with the CRC-32 of the rest", repr(check[:16]))
        self.content: dict[str, Any] = json.loads(text)
        if self.content["format"] != FORMAT:
            raise CheckpointError(
                str(path),
                expected=f"format {FORMAT}",
                got=str(self.content["format"]),
                do="Load it with the version of npuzero that wrote it, or a newer one.",
            )
        self.files = {name: Facts(*facts) for name, facts in self.content["files"].items()}
        for name, facts in self.files.items():
            nbytes = size_of(folder / name)
            if nbytes != facts.nbytes:
                raise damaged(folder / name, f"{facts.nbytes:,} bytes", f"{nbytes:,}")

    def read(self, name: str) -> bytes:
        """A small file, its checksum verified."""
        raw = read(self.folder / name)
        crc = zlib.crc32(raw)
        if crc != self.files[name].crc:
            raise damaged(self.folder / name, f"CRC-32 {self.files[name].crc:08x}", f"{crc:08x}")
        return raw

    def checksums(self, data: str) -> list[int]:
        """Of the items of a data file, in order."""
        table: list[int] = np.frombuffer(self.read(table_name(data)), dtype="<u4").tolist()
        return table


def read(path: Path) -> bytes:
    """A whole file.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise missing(path, error) from error


def size_of(path: Path) -> int:
    """Bytes in a file.

    Raises:
        CheckpointError: it is not there.
    """
    try:
        return path.stat().st_size
    except OSError as error:
        raise missing(path, error) from error


def missing(path: Path, error: OSError) -> CheckpointError:
    """A file that cannot be read."""
    return CheckpointError(
        str(path), expected="a readable file", got=str(error), do="Choose a complete checkpoint.", file=path.name
    )


def damaged(path: Path, expected: str, got: str, item: str | None = None) -> CheckpointError:
    """A file, or an item in it, that is not what was written."""
    return CheckpointError(
        f"{path}, item {item}" if item else str(path),
        expected=expected,
        got=got,
        do="The file is damaged: load another checkpoint.",
        file=path.name,
        item=item,
    )


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def encode(name: str, value: object) -> bytes:
    """``value`` as torch.save writes it, if torch.load takes it back without running anybody's code.

    Raises:
        CheckpointError: it does not.
    """
    try:
        if isinstance(value, Tensor):
            return _encode_tensor(value.detach().cpu().contiguous())
        written = io.BytesIO()
        torch.save(value, written)
        decode(written.getvalue())
    except Exception as error:
        raise CheckpointError(
            f"save {name}",
            expected="tensors, numbers, texts, and containers of them, which load without running code",
            got=f"{type(value).__name__}: {error}",
            do="Save the facts that the object can be made of again.",
        ) from error
    return written.getvalue()


def _encode_tensor(tensor: Tensor) -> bytes:
    elements = as_bytes(tensor)
    head, tail = head_and_tail(tensor.dtype, tensor.shape, zlib.crc32(elements))
    return b"".join((head, elements, tail))


def decode(raw: bytes) -> Any:
    """What :func:`encode` wrote. Its checksum was verified."""
    return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
