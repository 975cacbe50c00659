"""Encode a tensor as torch.save does, with its elements at a fixed offset, and combine CRC-32 checksums.

An item of a checkpoint's file is ``HEAD`` bytes, the elements, ``TAIL`` bytes: together a zip archive that torch.load
(and DCP, and unzip) can read. So the length of an item follows from its number of bytes, and the offset of the next
item is known before any item is written.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

#: Bytes of an item before and after its elements.
HEAD = TAIL = 512

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_DATA = b"archive/data/0"


def item_bytes(nbytes: int) -> int:
    """Return the length of the item of a tensor of ``nbytes``."""
    return HEAD + nbytes + TAIL


def head_and_tail(dtype: torch.dtype, sizes: Sequence[int], crc: int) -> tuple[bytes, bytes]:
    """Return the head and tail of the item of a contiguous tensor; ``crc``: the CRC-32 of its elements."""
    head, tail, places = _item_template(dtype, tuple(sizes))
    summed = struct.pack("<I", crc)
    head, tail = (part[:place] + summed + part[place + 4 :] for part, place in zip((head, tail), places, strict=True))
    return head, tail


@lru_cache(maxsize=4096)
def _item_template(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes, tuple[int, int]]:
    """Return head, tail, and the offset of the elements' checksum in each."""
    nbytes = math.prod(sizes) * dtype.itemsize
    pickled = _pickle_tensor(dtype, sizes)
    first = _local_record(b"archive/data.pkl", pickled) + pickled
    local = _LOCAL.size + len(_DATA)
    padding = HEAD - len(first) - local
    if padding < 4:
        raise ValueError(f"a tensor of {len(sizes)} dimensions does not fit into a header of {HEAD} bytes")
    data = _record_fields(_DATA, 0, nbytes, padding)
    head = first + _LOCAL.pack(b"PK\3\4", *data) + _DATA + struct.pack("<2sH", b"FB", padding - 4) + bytes(padding - 4)
    names = {b"archive/version": b"3\n", b"archive/byteorder": b"little"}
    starts, tail = [], b""
    for name, content in names.items():
        starts.append(HEAD + nbytes + len(tail))
        tail += _local_record(name, content) + content
    directory = HEAD + nbytes + len(tail)
    tail += _central_record(
        b"archive/data.pkl", _record_fields(b"archive/data.pkl", zlib.crc32(pickled), len(pickled)), 0
    )
    place = len(tail) + 16  # offset of the checksum in a central record
    tail += _central_record(_DATA, _record_fields(_DATA, 0, nbytes), len(first))
    for start, (name, content) in zip(starts, names.items(), strict=True):
        tail += _central_record(name, _record_fields(name, zlib.crc32(content), len(content)), start)
    comment = TAIL - len(tail) - _END.size
    size = HEAD + nbytes + len(tail) - directory
    tail += _END.pack(b"PK\5\6", 0, 0, 4, 4, size, directory, comment) + bytes(comment)
    return head, tail, (len(first) + 14, place)


def _record_fields(name: bytes, crc: int, nbytes: int, extra: int = 0) -> tuple[int, ...]:
    """Return the fields common to both records: stored, no date, checksum, sizes, lengths of name and extra."""
    return 20, 0, 0, 0, 33, crc, nbytes, nbytes, len(name), extra


def _local_record(name: bytes, content: bytes) -> bytes:
    return _LOCAL.pack(b"PK\3\4", *_record_fields(name, zlib.crc32(content), len(content))) + name


def _central_record(name: bytes, fields: tuple[int, ...], start: int) -> bytes:
    return _CENTRAL.pack(b"PK\1\2", 20, *fields, 0, 0, 0, 0, start) + name


class _PickledStorage:
    """Represent the elements in the pickle; they are stored in a separate record."""

    def __init__(self, nbytes: int) -> None:
        self.key = ("storage", torch.UntypedStorage, "0", "cpu", nbytes)


class _PickledTensor:
    """Pickle like a contiguous tensor in torch.save."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        strides = [math.prod(max(1, size) for size in sizes[i + 1 :]) for i in range(len(sizes))]
        storage = _PickledStorage(math.prod(sizes) * dtype.itemsize)
        hooks: OrderedDict[str, object] = OrderedDict()
        self.parts = storage, 0, sizes, tuple(strides), False, hooks, dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v3, self.parts


class _TensorPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.key if isinstance(obj, _PickledStorage) else None


def _pickle_tensor(dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    written = io.BytesIO()
    _TensorPickler(written, protocol=2).dump(_PickledTensor(dtype, sizes))
    return written.getvalue()


# -- CRC-32 of concatenated parts (zlib's polynomial, bits reflected: x^0 is the highest bit) --------------------------

_POLYNOMIAL = 0xEDB88320


def combine_crc32(crc: int, crc_after: int, nbytes_after: int) -> int:
    """Return the CRC-32 of ``a + b`` from the CRC-32 of both and the length of ``b``."""
    return _gf2_multiply(_gf2_power(nbytes_after), crc) ^ crc_after


def _gf2_multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _gf2_power(nbytes: int) -> int:
    """Return x to the power of the number of bits."""
    power = 1 << 31
    for square in _gf2_squares(nbytes):
        power = _gf2_multiply(square, power)
    return power


def _gf2_squares(nbytes: int) -> Iterator[int]:
    square = 1 << 23  # x^8
    while nbytes:
        if nbytes & 1:
            yield square
        square = _gf2_multiply(square, square)
        nbytes >>= 1
