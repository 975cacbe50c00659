"""DCP's ``.metadata``: made without asking anybody, and read without trusting anybody."""

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

from npuzero.checkpoint import files, safe_pickle
from npuzero.checkpoint.boxes import Box, misfit
from npuzero.checkpoint.parts import Cut, key_of
from npuzero.checkpoint.parts import Path as StatePath
from npuzero.checkpoint.safe_pickle import Function, Kind, Refused
from npuzero.errors import CheckpointError

Tensors, Bytes, Chunk, Index = (
    dcp.TensorStorageMetadata,
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.MetadataIndex,
)

_NONE = type(None)
_KINDS = (
    Kind(Tensors, properties=(dcp.TensorProperties,), size=(torch.Size,), chunks=(list,)),
    Kind(Bytes),
    Kind(Chunk, offsets=(torch.Size,), sizes=(torch.Size,)),
    Kind(Index, key=True, fqn=(str,), offset=(torch.Size, _NONE), index=(int, _NONE)),
    Kind(dcp.Metadata, state_dict_metadata=(dict,), planner_data=(dict, _NONE), storage_data=(dict,)),
    Kind(
        dcp.TensorProperties,
        ordered=True,
        dtype=(torch.dtype,),
        layout=(torch.layout,),
        requires_grad=(bool,),
        memory_format=(dcp._MEM_FORMAT_ENCODING,),
        pin_memory=(bool,),
    ),
    Kind(dcp.StorageMeta),
    Kind(_StorageInfo, relative_path=(str,), offset=(int,), length=(int,)),
)

#: More dimensions than a tensor of a checkpoint has.
_DIMENSIONS = 64


def _size(values: Any) -> torch.Size:
    if type(values) not in (tuple, list) or len(values) > _DIMENSIONS:
        raise Refused(f"a size that is a {type(values).__name__}")
    return torch.Size(values)


def _layout(name: Any) -> torch.layout:
    if type(name) is not str:
        raise Refused(f"a layout that is a {type(name).__name__}")
    found: torch.layout = torch.serialization._get_layout(name)
    return found


def _memory_format(value: Any) -> Any:
    if type(value) is not int:
        raise Refused(f"a memory format that is a {type(value).__name__}")
    return dcp._MEM_FORMAT_ENCODING(value)


def _member(function: Any, name: Any) -> Any:
    """Stand for ``getattr``, with which some Pythons name a member of an enum."""
    if function is not ALLOWED[dcp.__name__, "_MEM_FORMAT_ENCODING"] or type(name) is not str:
        raise Refused("getattr of what is no enum")
    return dcp._MEM_FORMAT_ENCODING[name]


def ordered_dict() -> dict[Any, Any]:
    """Stand for ``OrderedDict``; its items come later."""
    return {}


def _nowhere(*_: object) -> None:
    """Stand for paths: where a checkpoint was when it was written does not matter."""


_PATHS = (("pathlib", "Path"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"))

DTYPES = {("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
ALLOWED: dict[tuple[str, str], Any] = {
    **DTYPES,
    ("torch", "Size"): Function(_size),
    ("torch.serialization", "_get_layout"): Function(_layout),
    ("collections", "OrderedDict"): Function(ordered_dict),
    **{(module, "getattr"): Function(_member) for module in ("builtins", "__builtin__")},  # by protocol
    **{(module, name): Function(_nowhere) for module, name in _PATHS},
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): Function(_memory_format),
    **{(kind.made.__module__, kind.made.__name__): kind for kind in _KINDS},
}


def properties(dtype: torch.dtype) -> Any:
    """Return what DCP says of a tensor beside its shape."""
    return dcp.TensorProperties(dtype)


@dataclass
class Draft:
    """Draw up a ``.metadata``."""

    tensors: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, StatePath] = field(default_factory=dict)
    stored: dict[Any, _StorageInfo] = field(default_factory=dict)

    def add_cut(self, cut: Cut) -> None:
        """Add a tensor whose boxes are to come, once for all its tiles."""
        for path in cut.paths:
            if key_of(path) not in self.tensors:
                self._add_tensor(path, cut.dtype, cut.shape)

    def add_box(self, cut: Cut, box: Box, file: str, offset: int, nbytes: int) -> None:
        """Add where a box of it lies; all its names share it."""
        chunk = Chunk(torch.Size(box.offsets), torch.Size(box.sizes))
        for key in cut.keys:
            self._add_chunk(key, chunk, _StorageInfo(file, offset, nbytes))

    def add_object(self, path: StatePath, value: object, file: str, offset: int, nbytes: int) -> None:
        """Add where anything else lies; a tensor is one box."""
        key = key_of(path)
        if isinstance(value, torch.Tensor):
            self._add_tensor(path, value.dtype, value.shape)
            chunk = Chunk(torch.Size([0] * value.dim()), value.shape)
            self._add_chunk(key, chunk, _StorageInfo(file, offset, nbytes))
        else:
            self.tensors[key] = Bytes()
            self.paths[key] = path
            self.stored[Index(key)] = _StorageInfo(file, offset, nbytes)

    def add_draft(self, other: Any) -> None:
        """Add what another stage has; ``other``: its ``Metadata``."""
        self.tensors |= other.state_dict_metadata
        self.paths |= other.planner_data
        self.stored |= other.storage_data

    def add_alias(self, path: StatePath, of: StatePath) -> None:
        """Add another name of a tensor that is here."""
        found = self.tensors[key_of(of)]
        if key_of(path) not in self.tensors:
            self._add_tensor(path, found.properties.dtype, found.size)
            for chunk in found.chunks:
                self._add_chunk(key_of(path), chunk, self.stored[Index(key_of(of), chunk.offsets)])

    def dump(self) -> bytes:
        """Return the content of the file."""
        made = dcp.Metadata(self.tensors, self.paths, self.stored, dcp.StorageMeta(), CURRENT_DCP_VERSION)
        return pickle.dumps(made, protocol=4)

    def _add_tensor(self, path: StatePath, dtype: torch.dtype, shape: torch.Size) -> None:
        self.tensors[key_of(path)] = Tensors(properties(dtype), shape, [])
        self.paths[key_of(path)] = path

    def _add_chunk(self, key: str, chunk: Any, info: _StorageInfo) -> None:
        chunks = self.tensors[key].chunks
        self.stored[Index(key, chunk.offsets, len(chunks))] = info
        chunks.append(chunk)


def load(raw: bytes, path: Path) -> Any:
    """Return the ``Metadata`` in ``raw``, known to be one: types, shapes, boxes, and where they lie.

    Args:
        path: where ``raw`` is from.

    Raises:
        CheckpointError: it is something else, or contradicts itself or the files beside it.
    """
    try:
        found = safe_pickle.loads(raw, ALLOWED)
    except safe_pickle.Refused as error:
        raise _broken(path, str(error)) from error
    try:
        _check(found, path)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise _broken(path, f"{type(error).__name__}: {error}") from error
    return found


def _broken(path: Path, got: str, item: str | None = None) -> CheckpointError:
    return files.damaged(path, "the metadata of a checkpoint written by torch.distributed.checkpoint", got, item)


def _check(found: Any, path: Path) -> None:
    if type(found) is not dcp.Metadata:
        raise _broken(path, type(found).__name__)
    if found.planner_data is not None and type(found.planner_data) is not dict:
        raise _broken(path, f"planner data that is a {type(found.planner_data).__name__}")
    _check_described(found.state_dict_metadata, found.storage_data, path)
    _check_places(found.storage_data, path)


def _check_described(described_by_name: Mapping[Any, Any], where: Mapping[Any, Any], path: Path) -> None:
    """Check that every item is a tensor, whose parts lie somewhere and cover it, or bytes that do."""
    parts = 0
    for key, described in described_by_name.items():
        if type(key) is not str:
            raise _broken(path, f"a name that is a {type(key).__name__}")
        if type(described) is Tensors:
            parts += len(described.chunks)
            if parts > len(where):  # before going through a list that may be many tensors'
                raise _broken(path, "more parts than lie anywhere", key)
            _check_tensor(key, described, where, path)
        elif type(described) is not Bytes:
            raise _broken(path, type(described).__name__, key)
        elif type(where.get(Index(key))) is not _StorageInfo:
            raise _broken(path, "a part that lies nowhere", key)


def _check_places(where: Mapping[Any, Any], path: Path) -> None:
    """Check that every part lies within a file beside the index."""
    sizes: dict[str, int] = {}  # one stat a file, not one a part
    for index, info in where.items():
        name = info.relative_path
        if type(index) is not Index or not files.is_plain(name):
            raise _broken(path, f"{index} in {name!r}"[:200])
        if name not in sizes:
            sizes[name] = files.size_of(path.with_name(name))
        if not (_is_count(info.offset) and _is_count(info.length)) or info.offset + info.length > sizes[name]:
            raise _broken(path, f"bytes {info.offset} + {info.length} of {name}, which has {sizes[name]}", index.fqn)
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                str(path),
                expected="items as they are",
                got="some that an extension has transformed",
                do="Save it without extensions.",
            )


def _check_tensor(key: str, described: Any, where: Mapping[Any, Any], path: Path) -> None:
    # The fields of what was unpickled have the types of _KINDS, but a list may hold anything; and what has no fields,
    # since nobody gave it any, is an AttributeError, which load() expects.
    shape = described.size
    if type(shape) is not torch.Size or type(described.properties.dtype) is not torch.dtype:
        raise _broken(path, f"shape {shape}, {described.properties}", key)
    covered = 0
    for chunk in described.chunks:
        if type(chunk) is not Chunk or type(chunk.offsets) is not torch.Size or type(chunk.sizes) is not torch.Size:
            raise _broken(path, f"a part {chunk}", key)
        if not len(shape) == len(chunk.offsets) == len(chunk.sizes) or any(
            begin < 0 or size < 0 or begin + size > limit
            for begin, size, limit in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        ):
            raise _broken(path, f"a part {chunk} of shape {tuple(shape)}", key)
        numel = math.prod(chunk.sizes)
        info = where.get(Index(key, chunk.offsets))
        if type(info) is not _StorageInfo or not _is_count(info.length):
            raise _broken(path, "a part that lies nowhere", key)
        if numel * described.properties.dtype.itemsize > info.length:
            raise _broken(path, f"{info.length} bytes for a part of sizes {tuple(chunk.sizes)}", key)
        covered += numel
    if covered != math.prod(shape):
        raise _broken(path, f"parts of {covered} elements in all for shape {tuple(shape)}", key)
    _check_once(key, tuple(shape), [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described.chunks], path)


def _check_once(key: str, shape: tuple[int, ...], boxes: list[Box], path: Path) -> None:
    """Check that parts that have as many elements as their tensor have each of it: no two overlap, so no hole is left.

    Raises:
        CheckpointError: it names the elements that two parts have, or one that none has.
    """
    try:
        place = misfit(shape, boxes)
    except ValueError as error:
        raise _broken(path, str(error), key) from error
    if place is None:
        return
    both = [box for box in boxes if box.numel and place in box][:2]
    if not both:
        raise _broken(path, f"parts of shape {shape} of which none has element {list(place)}, others overlap", key)
    begins = [max(offsets) for offsets in zip(*(box.offsets for box in both), strict=True)]
    ends = [min(end) for end in zip(*(map(sum, zip(b.offsets, b.sizes, strict=True)) for b in both), strict=True)]
    named = ", ".join(f"{begin}:{end}" for begin, end in zip(begins, ends, strict=True))
    raise _broken(path, f"parts of shape {shape} of which two have elements [{named}], so that others are missing", key)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
