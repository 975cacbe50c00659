"""Read checkpoints: npuzero's after verifying checksums, any other by a reader that runs no code of it."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from npuzero.checkpoint.formats import safe_pickle
from npuzero.checkpoint.formats.item_files import (
    MANIFEST,
    METADATA,
    Manifest,
    damaged_file_error,
    decode_object,
    host_tensor_memory,
    read_file,
    unreadable_file_error,
)
from npuzero.checkpoint.formats.torch_zip import HEAD, TAIL
from npuzero.checkpoint.layout import dcp_metadata as metadata
from npuzero.checkpoint.layout.boxes import TensorBox
from npuzero.checkpoint.layout.dcp_metadata import Chunk, Index, Tensors
from npuzero.errors import CheckpointError
from npuzero.ops.storage.lazy import is_lazy


@dataclass(frozen=True)
class ReadRequest:
    """Describe a box of a tensor to read, and the target of its elements.

    Attributes:
        target: called when the first elements have been read; returns a tensor of the box's sizes, of any dtype.
        landed: called when all elements have been written.
    """

    key: str
    box: TensorBox
    target: Callable[[], Tensor]
    landed: Callable[[], None] = lambda: None

    @staticmethod
    def all_of(key: str, target: Tensor) -> ReadRequest:
        """Return a request for all of tensor ``key``."""
        return ReadRequest(key, TensorBox((0,) * target.dim(), tuple(target.shape)), lambda: target)


@dataclass(frozen=True)
class _ItemCopy:
    """Describe a copy from one stored item to one request; ``wanted`` is the request's number."""

    item: Any  # DCP's index: name and offset
    sizes: torch.Size
    source: tuple[slice, ...]
    wanted: int
    there: tuple[slice, ...]


class CheckpointReader:
    """Read a checkpoint.

    Attributes:
        path: its folder.
        tensors: DCP's descriptions of the values, by key.
        manifest: npuzero's manifest; None if another program wrote the checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest(path) if os.path.lexists(path / MANIFEST) else None
        raw = self.manifest.read(METADATA) if self.manifest else read_file(path / METADATA)
        found = metadata.parse_metadata(raw, path / METADATA)
        self.tensors: dict[str, Any] = found.state_dict_metadata
        self._stored: dict[Any, Any] = found.storage_data
        self._checksums: dict[str, dict[int, int]] = {}
        self._begins: dict[str, set[int]] = defaultdict(set)
        self._objects: dict[tuple[str, int], Any] = {}

    def read_object(self, key: str) -> Any:
        """Return the value of ``key``, unsharded."""
        described = self.tensors[key]
        if type(described) is Tensors:
            whole = torch.empty(described.size, dtype=described.properties.dtype)
            self.fill([ReadRequest.all_of(key, whole)])
            return whole
        info = self._stored[Index(key)]
        place = info.relative_path, info.offset
        if place not in self._objects:
            with self._open(info.relative_path) as file:
                raw = self._raw(file, Index(key))
            try:
                self._objects[place] = decode_object(raw)
            except Exception as error:  # damaged bytes can raise anything
                raise self._damaged(Index(key), "what torch.load takes with weights_only=True", str(error)) from error
        return self._objects[place]

    def fill(self, wanted: Sequence[ReadRequest]) -> None:
        """Read the requested boxes: each item of a file once, in the order of the first request that needs it.

        Raises:
            CheckpointError: an item is damaged.
        """
        copies: dict[tuple[str, int], list[_ItemCopy]] = defaultdict(list)
        left = [0] * len(wanted)
        for copy in self._copies(wanted):
            info = self._stored[copy.item]
            copies[info.relative_path, info.offset].append(copy)
            left[copy.wanted] += 1
        file: BinaryIO | None = None
        try:
            for (name, _), some in sorted(copies.items(), key=lambda one: (min(c.wanted for c in one[1]), one[0])):
                if file is None or Path(file.name).name != name:
                    if file is not None:
                        file.close()
                    file = self._open(name)
                self._read_item(file, some, wanted)
                for copy in some:
                    left[copy.wanted] -= 1
                    if not left[copy.wanted]:
                        wanted[copy.wanted].landed()
        finally:
            if file is not None:
                file.close()

    def places(self, key: str) -> tuple[tuple[str, int], ...]:
        """Return file and offset of each box of a tensor. Names of a tied tensor share them."""
        found = (self._stored[Index(key, chunk.offsets)] for chunk in self.tensors[key].chunks)
        return tuple((info.relative_path, info.offset) for info in found)

    def verify(self) -> None:
        """Read every item.

        Raises:
            CheckpointError: one is damaged.
        """
        for key, described in self.tensors.items():
            if type(described) is Tensors:
                for chunk in described.chunks:
                    target = torch.empty(chunk.sizes, dtype=described.properties.dtype)
                    self.fill(
                        [
                            ReadRequest(
                                key, TensorBox(tuple(chunk.offsets), tuple(chunk.sizes)), partial(_whole_target, target)
                            )
                        ]
                    )
            else:
                self.read_object(key)

    def _copies(self, wanted: Sequence[ReadRequest]) -> Iterator[_ItemCopy]:
        # DCP's planner intersects the requested boxes of a key with its stored chunks; an empty box needs no item.
        by_key: dict[str, list[int]] = defaultdict(list)
        for number, want in enumerate(wanted):
            if want.box.numel:
                by_key[want.key].append(number)
        for key, numbers in by_key.items():
            described = self.tensors[key]
            sizes = {chunk.offsets: chunk.sizes for chunk in described.chunks}
            boxes = [wanted[number].box for number in numbers]
            chunks = [Chunk(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
            for item in create_read_items_for_chunk_list(key, described, chunks):
                i = item.dest_index.index
                assert i is not None
                place = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                there = tuple(slice(o, o + n) for o, n in zip(item.dest_offsets, item.lengths, strict=True))
                stored = item.storage_index
                yield _ItemCopy(stored, sizes[stored.offset], place, numbers[i], there)

    def _read_item(self, file: BinaryIO, copies: Sequence[_ItemCopy], wanted: Sequence[ReadRequest]) -> None:
        first = copies[0]
        targets = [wanted[copy.wanted].target()[copy.there] for copy in copies]
        described = self.tensors[first.item.fqn]
        if self.manifest is None:
            tensor = self._foreign(file, first.item, described.properties.dtype, first.sizes)
        else:
            # An item that fills one request exactly is read into its target, without a copy.
            only = targets[0]
            plain = only.is_cpu and only.is_contiguous() and not is_lazy(only)
            whole = plain and only.shape == first.sizes
            direct = whole and len(copies) == 1 and only.dtype == described.properties.dtype
            tensor = only if direct else torch.empty(first.sizes, dtype=described.properties.dtype)
            self._read_ours(file, first.item, tensor)
            if direct:
                return
        for copy, target in zip(copies, targets, strict=True):
            target.copy_(tensor[copy.source])

    def _read_ours(self, file: BinaryIO, index: Any, tensor: Tensor) -> None:
        """Read an item that npuzero wrote into ``tensor``; its length gives the offsets of its elements."""
        info = self._stored[index]
        if info.length != HEAD + tensor.nbytes + TAIL:
            raise self._damaged(index, f"{HEAD + tensor.nbytes + TAIL} bytes", str(info.length))
        head, elements, tail = bytearray(HEAD), host_tensor_memory(tensor), bytearray(TAIL)
        self._read_into(file, index, [head, elements, tail])
        self._check(index, zlib.crc32(tail, zlib.crc32(elements, zlib.crc32(head))))

    def _raw(self, file: BinaryIO, index: Any) -> bytes:
        """Return all bytes of an item."""
        raw = bytearray(self._stored[index].length)
        self._read_into(file, index, [raw])
        if self.manifest is not None:
            self._check(index, zlib.crc32(raw))
        self._check_archive(index, raw)
        return bytes(raw)

    def _read_into(self, file: BinaryIO, index: Any, buffers: list[Any]) -> None:
        info = self._stored[index]
        pieces = [memoryview(buffer) for buffer in buffers if len(buffer)]
        offset = info.offset
        while pieces:
            try:
                count = os.preadv(file.fileno(), pieces, offset)
            except OSError as error:
                raise self._damaged(index, "a readable item", str(error)) from error
            if not count:
                raise self._damaged(index, f"{info.length} bytes", f"the file's end at {offset}")
            offset += count
            while pieces and count >= len(pieces[0]):
                count -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][count:]

    def _check(self, index: Any, crc: int) -> None:
        assert self.manifest is not None
        info = self._stored[index]
        name = info.relative_path
        if name not in self._checksums:
            offsets = sorted(self._offsets()[name])
            table = self.manifest.checksums(name)
            if len(table) != len(offsets):
                raise self._damaged(index, f"{len(offsets)} checksums in the table of {name}", str(len(table)))
            self._checksums[name] = dict(zip(offsets, table, strict=True))
        expected = self._checksums[name][info.offset]
        if crc != expected:
            raise self._damaged(index, f"CRC-32 {expected:08x}", f"{crc:08x}")

    def _offsets(self) -> dict[str, set[int]]:
        """Return where items begin, by file."""
        if not self._begins:
            for info in self._stored.values():
                self._begins[info.relative_path].add(info.offset)
        return self._begins

    def _check_archive(self, index: Any, raw: bytes | bytearray) -> zipfile.ZipFile:
        """Check that an item is an uncompressed archive; without a manifest also the CRC of its records."""
        try:
            archive = zipfile.ZipFile(io.BytesIO(raw))
            records = archive.infolist()
            stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
            stored = stored and sum(record.file_size for record in records) <= len(raw)
            bad = "compressed" if not stored else None if self.manifest is not None else archive.testzip()
        except Exception as error:  # damaged bytes can raise anything
            raise self._damaged(
                index, "an archive written by torch.save", f"{type(error).__name__}: {error}"
            ) from error
        if bad is not None:
            raise self._damaged(index, "an archive written by torch.save", f"record {bad} is damaged or compressed")
        return archive

    def _foreign(self, file: BinaryIO, index: Any, dtype: torch.dtype, sizes: torch.Size) -> Tensor:
        """Return a tensor that torch.save wrote."""
        # The pickle is read by safe_pickle. Each storage is a view of its record's bytes, made once for all tensors
        # over it.
        archive = self._check_archive(index, self._raw(file, index))
        records = {name.partition("/")[2]: name for name in archive.namelist()}

        @cache
        def elements(name: str) -> Tensor:
            raw = bytearray(archive.read(records[f"data/{name}"]))
            return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)

        def storage(pid: Any) -> Tensor:
            if type(pid) is not tuple or len(pid) != 5 or type(pid[2]) is not str:
                raise safe_pickle.PickleRefused("a persistent id that is no storage's")
            return elements(pid[2])

        try:
            if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
                raise safe_pickle.PickleRefused("bytes in big-endian order")
            tensor = safe_pickle.load_pickle(archive.read(records["data.pkl"]), _tensor_globals(dtype), storage)
        except (safe_pickle.PickleRefused, KeyError) as error:
            raise self._damaged(index, f"a {dtype} of shape {tuple(sizes)}", str(error)) from error
        if not isinstance(tensor, Tensor) or tensor.shape != sizes:
            raise self._damaged(index, f"a {dtype} of shape {tuple(sizes)}", f"{getattr(tensor, 'shape', tensor)}")
        return tensor

    def _open(self, name: str) -> BinaryIO:
        try:
            return open(self.path / name, "rb", buffering=0)
        except OSError as error:
            raise unreadable_file_error(self.path / name, error) from error

    def _damaged(self, index: Any, expected: str, got: str) -> CheckpointError:
        info = self._stored.get(index)
        at = f"{index.fqn}{list(index.offset) if index.offset is not None else ''}"
        return damaged_file_error(self.path / (METADATA if info is None else info.relative_path), expected, got, at)


def _whole_target(target: Tensor) -> Tensor:
    return target


def _tensor_globals(dtype: torch.dtype) -> dict[tuple[str, str], Any]:
    """Return the names that the pickle of a tensor of ``dtype`` may use; they make a tensor over the given bytes."""

    def rebuild(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
        if type(storage) is not Tensor or any(type(sizes) is not tuple or len(sizes) > 64 for sizes in (size, stride)):
            raise safe_pickle.PickleRefused("a tensor of something else than a storage, sizes and strides")
        if not all(type(n) is int and n >= 0 for n in (offset, *size, *stride)):
            raise safe_pickle.PickleRefused("a tensor of sizes and strides that are no counts")
        return torch.as_strided(storage, size, stride, offset)  # checks that the tensor stays within the bytes

    kinds = {name: None for name in vars(torch) if name.endswith("Storage")}
    return {
        ("torch._utils", "_rebuild_tensor_v2"): safe_pickle.PickleFunction(rebuild),
        ("torch._utils", "_rebuild_tensor_v3"): safe_pickle.PickleFunction(rebuild),
        ("collections", "OrderedDict"): safe_pickle.PickleFunction(metadata.make_ordered_dict),
        **{("torch", name): kind for name, kind in kinds.items()},
        **{("torch.storage", name): kind for name, kind in kinds.items()},
        **metadata.DTYPES,
    }
