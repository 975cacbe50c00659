"""Build DCP's ``.metadata`` without communication, and parse it without trusting its content."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from npuzero.checkpoint.formats import item_files as files
from npuzero.checkpoint.formats import safe_pickle
from npuzero.checkpoint.formats.safe_pickle import PickleDataclass, PickleFunction, PickleRefused
from npuzero.checkpoint.layout.boxes import TensorBox, find_coverage_error
from npuzero.checkpoint.layout.parts import Path as StatePath
from npuzero.checkpoint.layout.parts import SavedTensor, flatten_path
from npuzero.errors import CheckpointError

Tensors, Bytes, Chunk, Index = (
    dcp.TensorStorageMetadata,
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.MetadataIndex,
)

_NONE = type(None)
_KINDS = (
    PickleDataclass(Tensors, properties=(dcp.TensorProperties,), size=(torch.Size,), chunks=(list,)),
    PickleDataclass(Bytes),
    PickleDataclass(Chunk, offsets=(torch.Size,), sizes=(torch.Size,)),
    PickleDataclass(Index, key=True, fqn=(str,), offset=(torch.Size, _NONE), index=(int, _NONE)),
    PickleDataclass(dcp.Metadata, state_dict_metadata=(dict,), planner_data=(dict, _NONE), storage_data=(dict,)),
    PickleDataclass(
        dcp.TensorProperties,
        ordered=True,
        dtype=(torch.dtype,),
        layout=(torch.layout,),
        requires_grad=(bool,),
        memory_format=(dcp._MEM_FORMAT_ENCODING,),
        pin_memory=(bool,),
    ),
    PickleDataclass(dcp.StorageMeta),
    PickleDataclass(_StorageInfo, relative_path=(str,), offset=(int,), length=(int,)),
)

#: Upper bound of the number of dimensions of a tensor in a checkpoint.
_DIMENSIONS = 64


def _load_size(values: Any) -> torch.Size:
    if type(values) not in (tuple, list) or len(values) > _DIMENSIONS:
        raise PickleRefused(f"a size that is a {type(values).__name__}")
    return torch.Size(values)


def _load_layout(name: Any) -> torch.layout:
    if type(name) is not str:
        raise PickleRefused(f"a layout that is a {type(name).__name__}")
    found: torch.layout = torch.serialization._get_layout(name)
    return found


def _load_memory_format(value: Any) -> Any:
    if type(value) is not int:
        raise PickleRefused(f"a memory format that is a {type(value).__name__}")
    return dcp._MEM_FORMAT_ENCODING(value)


def _load_enum_member(function: Any, name: Any) -> Any:
    """Replace ``getattr``, which some Python versions pickle for a member of an enum."""
    if function is not ALLOWED[dcp.__name__, "_MEM_FORMAT_ENCODING"] or type(name) is not str:
        raise PickleRefused("getattr of what is no enum")
    return dcp._MEM_FORMAT_ENCODING[name]


def make_ordered_dict() -> dict[Any, Any]:
    """Replace ``OrderedDict``; its items are added later."""
    return {}


def _drop_path(*_: object) -> None:
    """Drop a path: the original folder of a checkpoint does not matter."""


_PATHS = (("pathlib", "Path"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"))

DTYPES = {("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
ALLOWED: dict[tuple[str, str], Any] = {
    **DTYPES,
    ("torch", "Size"): PickleFunction(_load_size),
    ("torch.serialization", "_get_layout"): PickleFunction(_load_layout),
    ("collections", "OrderedDict"): PickleFunction(make_ordered_dict),
    **{(module, "getattr"): PickleFunction(_load_enum_member) for module in ("builtins", "__builtin__")},  # by protocol
    **{(module, name): PickleFunction(_drop_path) for module, name in _PATHS},
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): PickleFunction(_load_memory_format),
    **{(kind.made.__module__, kind.made.__name__): kind for kind in _KINDS},
}


def tensor_properties(dtype: torch.dtype) -> Any:
    """Return DCP's properties of a tensor of ``dtype``."""
    return dcp.TensorProperties(dtype)


@dataclass
class MetadataBuilder:
    """Build a ``.metadata``."""

    tensors: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, StatePath] = field(default_factory=dict)
    stored: dict[Any, _StorageInfo] = field(default_factory=dict)

    def add_cut(self, cut: SavedTensor) -> None:
        """Add a tensor without boxes, once for all its tiles."""
        for path in cut.paths:
            if flatten_path(path) not in self.tensors:
                self._add_tensor(path, cut.dtype, cut.shape)

    def add_box(self, cut: SavedTensor, box: TensorBox, file: str, offset: int, nbytes: int) -> None:
        """Add the place of a box of ``cut``, under all names of the tensor."""
        chunk = Chunk(torch.Size(box.offsets), torch.Size(box.sizes))
        for key in cut.keys:
            self._add_chunk(key, chunk, _StorageInfo(file, offset, nbytes))

    def add_object(self, path: StatePath, value: object, file: str, offset: int, nbytes: int) -> None:
        """Add the place of an unsharded value; a tensor is one box."""
        key = flatten_path(path)
        if isinstance(value, torch.Tensor):
            self._add_tensor(path, value.dtype, value.shape)
            chunk = Chunk(torch.Size([0] * value.dim()), value.shape)
            self._add_chunk(key, chunk, _StorageInfo(file, offset, nbytes))
        else:
            self.tensors[key] = Bytes()
            self.paths[key] = path
            self.stored[Index(key)] = _StorageInfo(file, offset, nbytes)

    def add_draft(self, other: Any) -> None:
        """Add ``other``, the ``Metadata`` of another stage."""
        self.tensors |= other.state_dict_metadata
        self.paths |= other.planner_data
        self.stored |= other.storage_data

    def add_alias(self, path: StatePath, of: StatePath) -> None:
        """Add another name of a tensor that has been added."""
        found = self.tensors[flatten_path(of)]
        if flatten_path(path) not in self.tensors:
            self._add_tensor(path, found.properties.dtype, found.size)
            for chunk in found.chunks:
                self._add_chunk(flatten_path(path), chunk, self.stored[Index(flatten_path(of), chunk.offsets)])

    def dump(self) -> bytes:
        """Return the content of the file."""
        made = dcp.Metadata(self.tensors, self.paths, self.stored, dcp.StorageMeta(), CURRENT_DCP_VERSION)
        return pickle.dumps(made, protocol=4)

    def _add_tensor(self, path: StatePath, dtype: torch.dtype, shape: torch.Size) -> None:
        self.tensors[flatten_path(path)] = Tensors(tensor_properties(dtype), shape, [])
        self.paths[flatten_path(path)] = path

    def _add_chunk(self, key: str, chunk: Any, info: _StorageInfo) -> None:
        chunks = self.tensors[key].chunks
        self.stored[Index(key, chunk.offsets, len(chunks))] = info
        chunks.append(chunk)


def parse_metadata(raw: bytes, path: Path) -> Any:
    """Return the ``Metadata`` in ``raw``, after checking its types, shapes, boxes and places.

    Args:
        path: of the file that ``raw`` is from.

    Raises:
        CheckpointError: it is something else, or contradicts itself or the files next to it.
    """
    try:
        found = safe_pickle.load_pickle(raw, ALLOWED)
    except safe_pickle.PickleRefused as error:
        raise _broken_metadata_error(path, str(error)) from error
    try:
        _check_metadata(found, path)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise _broken_metadata_error(path, f"{type(error).__name__}: {error}") from error
    return found


def _broken_metadata_error(path: Path, got: str, item: str | None = None) -> CheckpointError:
    return files.damaged_file_error(
        path, "the metadata of a checkpoint written by torch.distributed.checkpoint", got, item
    )


def _check_metadata(found: Any, path: Path) -> None:
    if type(found) is not dcp.Metadata:
        raise _broken_metadata_error(path, type(found).__name__)
    if found.planner_data is not None and type(found.planner_data) is not dict:
        raise _broken_metadata_error(path, f"planner data that is a {type(found.planner_data).__name__}")
    _check_items(found.state_dict_metadata, found.storage_data, path)
    _check_item_places(found.storage_data, path)


def _check_items(described_by_name: Mapping[Any, Any], where: Mapping[Any, Any], path: Path) -> None:
    """Check that every item is a tensor with stored parts that cover it, or stored bytes."""
    parts = 0
    for key, described in described_by_name.items():
        if type(key) is not str:
            raise _broken_metadata_error(path, f"a name that is a {type(key).__name__}")
        if type(described) is Tensors:
            parts += len(described.chunks)
            if parts > len(where):  # before the loop over a list that many tensors may share
                raise _broken_metadata_error(path, "more parts than lie anywhere", key)
            _check_tensor_boxes(key, described, where, path)
        elif type(described) is not Bytes:
            raise _broken_metadata_error(path, type(described).__name__, key)
        elif type(where.get(Index(key))) is not _StorageInfo:
            raise _broken_metadata_error(path, "a part that lies nowhere", key)


def _check_item_places(where: Mapping[Any, Any], path: Path) -> None:
    """Check that every part is within a file next to the index."""
    sizes: dict[str, int] = {}  # one stat per file, not per part
    for index, info in where.items():
        name = info.relative_path
        if type(index) is not Index or not files.is_plain_name(name):
            raise _broken_metadata_error(path, f"{index} in {name!r}"[:200])
        if name not in sizes:
            sizes[name] = files.get_file_size(path.with_name(name))
        if not (_is_count(info.offset) and _is_count(info.length)) or info.offset + info.length > sizes[name]:
            raise _broken_metadata_error(
                path, f"bytes {info.offset} + {info.length} of {name}, which has {sizes[name]}", index.fqn
            )
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                str(path),
                expected="items as they are",
                got="some that an extension has transformed",
                do="Save it without extensions.",
            )


def _check_tensor_boxes(key: str, described: Any, where: Mapping[Any, Any], path: Path) -> None:
    # Fields of unpickled objects have the types of _KINDS, but a list may hold anything. A missing field is an
    # AttributeError, which the caller expects.
    shape = described.size
    if type(shape) is not torch.Size or type(described.properties.dtype) is not torch.dtype:
        raise _broken_metadata_error(path, f"shape {shape}, {described.properties}", key)
    covered = 0
    for chunk in described.chunks:
        if type(chunk) is not Chunk or type(chunk.offsets) is not torch.Size or type(chunk.sizes) is not torch.Size:
            raise _broken_metadata_error(path, f"a part {chunk}", key)
        if not len(shape) == len(chunk.offsets) == len(chunk.sizes) or any(
            begin < 0 or size < 0 or begin + size > limit
            for begin, size, limit in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        ):
            raise _broken_metadata_error(path, f"a part {chunk} of shape {tuple(shape)}", key)
        numel = math.prod(chunk.sizes)
        info = where.get(Index(key, chunk.offsets))
        if type(info) is not _StorageInfo or not _is_count(info.length):
            raise _broken_metadata_error(path, "a part that lies nowhere", key)
        if numel * described.properties.dtype.itemsize > info.length:
            raise _broken_metadata_error(path, f"{info.length} bytes for a part of sizes {tuple(chunk.sizes)}", key)
        covered += numel
    if covered != math.prod(shape):
        raise _broken_metadata_error(path, f"parts of {covered} elements in all for shape {tuple(shape)}", key)
    _check_covered_once(
        key, tuple(shape), [TensorBox(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described.chunks], path
    )


def _check_covered_once(key: str, shape: tuple[int, ...], boxes: list[TensorBox], path: Path) -> None:
    """Check that parts with as many elements as their tensor cover each element once: without overlap there is no hole.

    Raises:
        CheckpointError: it names the elements that two parts have, or one that no part has.
    """
    # The element may be in two parts, and their overlap is reported, or in no part.
    try:
        place = find_coverage_error(shape, boxes)
    except ValueError as error:
        raise _broken_metadata_error(path, str(error), key) from error
    if place is None:
        return
    both = [box for box in boxes if box.numel and place in box][:2]
    if not both:
        raise _broken_metadata_error(
            path, f"parts of shape {shape} of which none has element {list(place)}, others overlap", key
        )
    begins = [max(offsets) for offsets in zip(*(box.offsets for box in both), strict=True)]
    ends = [min(end) for end in zip(*(map(sum, zip(b.offsets, b.sizes, strict=True)) for b in both), strict=True)]
    named = ", ".join(f"{begin}:{end}" for begin, end in zip(begins, ends, strict=True))
    raise _broken_metadata_error(
        path, f"parts of shape {shape} of which two have elements [{named}], so that others are missing", key
    )


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
