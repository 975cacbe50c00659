"""Read and write safetensors: eight bytes of length, a JSON header, then the bytes of all tensors without gaps.

The header is checked against the size of the file before any tensor is read. Nothing is executed, no byte outside the
file is read, and any mismatch is a CheckpointError that names the file and the tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npuzero.arguments import open_regular, parse_json
from npuzero.errors import CheckpointError

#: Names of dtypes, by the format's specification.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The largest header that the format allows, in bytes.
_HEADER_LIMIT = 100_000_000
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class SafetensorsEntry:
    """Locate a tensor in a file.

    Attributes:
        begin: offset of its data, in bytes from the start of the file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    begin: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def read_header(path: Path) -> dict[str, SafetensorsEntry]:
    """Return the tensors of a file, by name.

    Raises:
        CheckpointError: it is no safetensors file, or a truncated one.
    """
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _HEADER_LIMIT):
                raise _torn_file_error(path, f"a header of {length:,} bytes in a file of {size:,}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(
            str(path), expected="a safetensors file", got=str(error.strerror or error), do="Give another path."
        ) from error
    try:
        header = parse_json(text)
    except ValueError as error:
        raise _torn_file_error(path, f"a header that is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise _torn_file_error(path, "a header that is no JSON object")
    header.pop("__metadata__", None)
    data = _LENGTH_BYTES + length
    return _parse_entries(path, header, data, size - data)


def _parse_entries(path: Path, header: Mapping[str, Any], data: int, size: int) -> dict[str, SafetensorsEntry]:
    placed = {name: _parse_entry(path, name, facts, data) for name, facts in header.items()}
    end = 0
    for entry, begin, stop in sorted(placed.values(), key=lambda place: place[1:]):
        if begin != end:
            raise _torn_file_error(
                path, f"data from byte {begin} on, where the tensor before ends at {end}", entry.name
            )
        end = stop
        if end > size:
            raise _torn_file_error(path, f"data up to byte {end:,} of {size:,} that are there", entry.name)
    if end != size:
        raise _torn_file_error(path, f"{size - end:,} bytes behind the last tensor")
    return {name: entry for name, (entry, _, _) in placed.items()}


def _parse_entry(path: Path, name: str, facts: Any, data: int) -> tuple[SafetensorsEntry, int, int]:
    """Return the tensor, and the begin and end of its bytes relative to the end of the header."""
    known = isinstance(facts, dict) and isinstance(facts.get("dtype"), str) and facts["dtype"] in DTYPES
    if not known or not _are_sizes(facts.get("shape")) or not _are_sizes(facts.get("data_offsets"), 2):
        raise _torn_file_error(path, f"{str(facts)[:200]}, which is no dtype, shape and range", name)
    begin, end = facts["data_offsets"]
    entry = SafetensorsEntry(name, DTYPES[facts["dtype"]], tuple(facts["shape"]), path, data + begin)
    if end - begin != entry.nbytes:
        raise _torn_file_error(path, f"{end - begin:,} bytes for {facts['dtype']} {list(entry.shape)}", name)
    return entry, begin, end


def _are_sizes(value: Any, count: int | None = None) -> bool:
    if not isinstance(value, list) or (count is not None and len(value) != count):
        return False
    return all(type(item) is int and 0 <= item < 2**63 for item in value)


def header_bytes(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return the length and header of a file with these tensors (name, dtype, shape), in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def view_tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _torn_file_error(path: Path, got: str, name: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"{path}" + (f": tensor {name}" if name is not None else ""),
        expected="a whole safetensors file",
        got=got,
        do="Export or download it again.",
        file=str(path),
    )
