"""Write the files of a checkpoint with checksums, and read them only if the checksums match.

``__<rank>_0.distcp`` holds items back to back, ``__<rank>_0.crc32`` the CRC-32 of each item (4 bytes, little-endian, in
order). ``manifest.json`` holds the length and CRC-32 of every file, and in its last line its CRC-32.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npuzero.checkpoint.formats.torch_zip import combine_crc32, head_and_tail
from npuzero.errors import CheckpointError
from npuzero.ops.storage.lazy import materialize_lazy

MANIFEST, METADATA = "manifest.json", ".metadata"
FORMAT = 1

#: Bytes, and pieces, to collect before a write.
_BATCH_BYTES = 8 << 20
_BATCH_PIECES = 512

Buffer = bytes | memoryview


@dataclass(frozen=True)
class FileFacts:
    """Hold the manifest's entry of a file."""

    nbytes: int
    crc: int


def data_file_name(rank: int) -> str:
    """Return the name of the file of ``rank``, in DCP's form."""
    return f"__{rank}_0.distcp"


def checksum_file_name(data: str) -> str:
    """Return the name of the file with the checksums of the items of ``data``."""
    return str(Path(data).with_suffix(".crc32"))


class DataFile:
    """Write a file of items in a ``with`` block; at its end the file and its table of checksums are durable.

    Attributes:
        path: of the file.
        facts: of the file and of the table, after the block.
    """

    facts: tuple[FileFacts, FileFacts]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        self._crcs: list[int] = []
        self._facts = FileFacts(0, 0)

    def add_tensor(self, dtype: torch.dtype, sizes: Sequence[int], elements: memoryview) -> None:
        """Append the item of a contiguous tensor; its memory must not change until the block ends."""
        crc = zlib.crc32(elements)
        head, tail = head_and_tail(dtype, sizes, crc)
        self._append((head, elements, tail), zlib.crc32(tail, combine_crc32(zlib.crc32(head), crc, len(elements))))

    def add_object(self, raw: bytes) -> tuple[int, int]:
        """Append an encoded item; return its offset and length."""
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
            self.facts = self._facts, write_durably(self.path.with_name(checksum_file_name(self.path.name)), table)

    def _append(self, pieces: tuple[Buffer, ...], crc: int) -> None:
        nbytes = sum(map(len, pieces))
        self._crcs.append(crc)
        self._facts = FileFacts(self._facts.nbytes + nbytes, combine_crc32(self._facts.crc, crc, nbytes))
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
        # The kernel starts writing now instead of later under pressure, and its cache stays free for other data.
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_durably(path: Path, raw: bytes) -> FileFacts:
    """Write a small file, durably."""
    with open(path, "xb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(len(raw), zlib.crc32(raw))


def write_manifest(folder: Path, content: Mapping[str, Any], files: Mapping[str, FileFacts]) -> None:
    """Write the manifest, the last file of a checkpoint."""
    listed = {name: [facts.nbytes, facts.crc] for name, facts in files.items()}
    text = json.dumps({"format": FORMAT, **content, "files": listed}).encode()
    write_durably(folder / MANIFEST, text + b"\n%08x\n" % zlib.crc32(text))


class Manifest:
    """Read a checkpoint's manifest, and check files against it.

    Attributes:
        folder: of the checkpoint.
        content: step, world, and the further facts passed to :func:`write_manifest`.
        files: length and CRC-32 by name.
    """

    def __init__(self, folder: Path) -> None:
        """Read the manifest, and compare the length of every file.

        Raises:
            CheckpointError: it, or a file, is damaged, or it lists files that are not in the folder.
        """
        self.folder = folder
        path = folder / MANIFEST
        raw = read_file(path)
        text, _, check = raw[:-1].rpartition(b"\n")
        if raw[-1:] != b"\n" or check != b"%08x" % zlib.crc32(text):
            raise damaged_file_error(path, "a last line with the CRC-32 of the rest", repr(check[:16]))
        self.content = _parse_json(text, path)
        if self.content.get("format") != FORMAT:
            raise CheckpointError(
                str(path),
                expected=f"format {FORMAT}",
                got=str(self.content.get("format"))[:80],
                do="Load it with the version of npuzero that wrote it, or a newer one.",
            )
        self.files = _parse_file_list(self.content, path)
        for name, facts in self.files.items():
            nbytes = get_file_size(folder / name)
            if nbytes != facts.nbytes:
                raise damaged_file_error(folder / name, f"{facts.nbytes:,} bytes", f"{nbytes:,}")

    def read(self, name: str) -> bytes:
        """Read a small file, and verify its checksum."""
        if name not in self.files:
            raise damaged_file_error(self.folder / MANIFEST, f"the length and CRC-32 of {name}", "none")
        raw = read_file(self.folder / name)
        crc = zlib.crc32(raw)
        if crc != self.files[name].crc:
            raise damaged_file_error(self.folder / name, f"CRC-32 {self.files[name].crc:08x}", f"{crc:08x}")
        return raw

    def checksums(self, data: str) -> list[int]:
        """Return the checksums of the items of a data file, in order."""
        raw = self.read(checksum_file_name(data))
        table: list[int] = np.frombuffer(raw[: len(raw) // 4 * 4], dtype="<u4").tolist()
        return table


#: Types of the manifest's facts.
_FACTS = {"step": int, "world": int, "alike": list, "files": dict}


def _parse_json(text: bytes, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged_file_error(path, "JSON", str(error)) from error
    if not isinstance(content, dict):
        raise damaged_file_error(path, "a JSON object", type(content).__name__)
    return content


def _parse_file_list(content: Mapping[str, Any], path: Path) -> dict[str, FileFacts]:
    """Return the files in a manifest, after checking the types of its facts."""
    # Every rank of the world must have a data file and a checksum table: a manifest without one would hide missing
    # tensors. min() bounds the list when a damaged world is huge.
    for fact, kind in _FACTS.items():
        if type(content.get(fact)) is not kind:
            raise damaged_file_error(path, f"{fact}: {kind.__name__}", str(content.get(fact))[:80])
    found = {}
    for name, facts in content["files"].items():
        if not is_plain_name(name):
            raise damaged_file_error(path, "names of files in its folder", repr(name)[:200])
        if not isinstance(facts, list) or [type(fact) for fact in facts] != [int, int] or min(facts) < 0:
            raise damaged_file_error(path, f"length and CRC-32 of {name}", str(facts)[:80])
        found[name] = FileFacts(*facts)
    ranks = [data_file_name(rank) for rank in range(min(max(content["world"], 1), len(found)))]
    if len(ranks) != content["world"] or not found.keys() >= {METADATA, *ranks, *map(checksum_file_name, ranks)}:
        raise damaged_file_error(
            path, f"{METADATA}, and two files of each of {content['world']} ranks", str(sorted(found))[:200]
        )
    return found


def is_plain_name(name: object) -> bool:
    """Tell whether ``name`` is a file name without a folder."""
    return isinstance(name, str) and re.fullmatch(r"[^/\0]+", name) is not None and name not in (".", "..")


def read_file(path: Path) -> bytes:
    """Read all of a file.

    Raises:
        CheckpointError: it cannot be read, is no regular file, or is a link to another folder.
    """
    get_file_size(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable_file_error(path, error) from error


def get_file_size(path: Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        CheckpointError: it does not exist, is no regular file, or is a link to another folder.
    """
    try:
        found = path.stat()
        elsewhere = path.is_symlink() and path.resolve().parent != path.parent.resolve()
    except (OSError, RuntimeError) as error:
        raise unreadable_file_error(path, error) from error
    if elsewhere or not stat.S_ISREG(found.st_mode):
        raise CheckpointError(
            str(path),
            expected="a file in this folder",
            got=f"a link to {path.resolve()}" if elsewhere else "no regular file",
            do="Copy the files themselves into the checkpoint's folder.",
            file=path.name,
        )
    return found.st_size


def unreadable_file_error(path: Path, error: Exception) -> CheckpointError:
    """Make the error of a file that cannot be read."""
    return CheckpointError(
        str(path), expected="a readable file", got=str(error), do="Choose a complete checkpoint.", file=path.name
    )


def damaged_file_error(path: Path, expected: str, got: str, item: str | None = None) -> CheckpointError:
    """Make the error of a file, or of an item in it, with wrong content."""
    return CheckpointError(
        f"{path}, item {item}" if item else str(path),
        expected=expected,
        got=got,
        do="The file is damaged: load another checkpoint.",
        file=path.name,
        item=item,
    )


def host_tensor_memory(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def encode_object(name: str, value: object) -> bytes:
    """Encode ``value`` with torch.save, if torch.load can decode it without running code.

    Raises:
        CheckpointError: it cannot.
    """
    try:
        if isinstance(value, Tensor):
            return _encode_tensor(materialize_lazy(value.detach().cpu()))
        written = io.BytesIO()
        torch.save(value, written)
        decode_object(written.getvalue())
    except Exception as error:
        named = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))  # torch's text has a page on how to allow it
        raise CheckpointError(
            f"save {name}",
            expected="tensors, numbers, texts, and containers of them, which load without running code",
            got=f"{type(value).__name__}: {f'one that needs {named[1]}' if named else error}",
            do="Save what the object can be made of again: its state_dict(), or a dict of its fields.",
        ) from error
    return written.getvalue()


def _encode_tensor(tensor: Tensor) -> bytes:
    elements = host_tensor_memory(tensor)
    head, tail = head_and_tail(tensor.dtype, tensor.shape, zlib.crc32(elements))
    return b"".join((head, elements, tail))


def decode_object(raw: bytes) -> Any:
    """Decode an object of :func:`encode_object`, after its checksum was verified.

    Raises:
        ValueError: it has a bytearray, which torch would allocate at any length.
        Exception: any further error of torch.load for damaged bytes.
    """
    if b"\nbytearray\n" in raw:  # the type's name in a pickle
        raise ValueError("a bytearray, which could take any amount of memory; bytes may stand in its place")
    return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
