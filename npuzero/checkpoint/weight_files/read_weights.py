"""Load weights from safetensors files into a model: each rank reads only the ranges that it keeps."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from npuzero import observe
from npuzero.arguments import as_path, parse_json, read_text
from npuzero.checkpoint.formats.safetensors import SafetensorsEntry, read_header, view_tensor_bytes
from npuzero.errors import CheckpointError, ConfigError, find_nearest_name, refuse_unknown_keywords
from npuzero.memory import allocate_zeros
from npuzero.shard.layout.tiled_linear import find_tile_rows
from npuzero.shard.state.extra_state import is_extra_state

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@refuse_unknown_keywords()
@dataclass(frozen=True)
class Weights:
    """Name the files with a model's values, for ``npuzero.zero(..., weights=)``.

    Attributes:
        path: a ``.safetensors`` file, an index (``.json``), or a folder with ``model.safetensors`` or its index.
        rename: maps a name in the model to the name in the files; None: the files have no values, and the tensor keeps
            its values or is initialised. Without ``rename`` the names are equal.
        partial: whether the files may hold tensors that the model does not have.

    Example::

        npuzero.export(model, "exported")
        with torch.device("meta"):
            empty = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        loaded = npuzero.zero(empty, weights=npuzero.Weights("exported", partial=True))
    """

    path: str | Path
    rename: Callable[[str], str | None] | None = None
    partial: bool = False


class StoredWeights:
    """Read the values of :class:`Weights`, by the names of a model."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._found: dict[str, SafetensorsEntry] = {}  # by the model's names
        self._files: dict[Path, int] = {}
        self._unknown: list[str] = []

    def check(self, model: nn.Module) -> str:
        """Find the model's tensors in the files; return a digest of the result.

        Raises:
            CheckpointError: a file is missing or truncated, or a tensor is missing, or of another shape or dtype.
        """
        self._found.clear()
        entries = find_weight_tensors(as_path("Weights.path", self._weights.path))
        rename = self._weights.rename or (lambda name: name)
        wanted: set[str] = set()
        for names, tensor in _get_named_tensors(model):
            theirs = [other for other in map(rename, names) if other is not None]
            wanted.update(theirs)
            there = [other for other in theirs if other in entries]
            if there:
                _check_tensor_fits(names[0], tensor, entries[there[0]])
                self._found |= dict.fromkeys(names, entries[there[0]])
            elif theirs:
                near = find_nearest_name(theirs[0], list(entries))
                got = "none; " + (f"there is {near!r}" if near else f"there are {', '.join(map(repr, [*entries][:5]))}")
                got += f" among {len(entries)} names"
                raise self._misfit(f"tensor {theirs[0]}", f"values of {names[0]}, {list(tensor.shape)}", got)
        self._unknown = [] if self._weights.partial else sorted(entries.keys() - wanted)
        for name, rows in find_tile_rows(model).items():  # a tile's parameter is read by its name in the model
            if rows.name in self._found:
                entry = self._found[rows.name]
                self._found[name] = replace(entry, begin=entry.begin + rows.begin * entry.dtype.itemsize)
        facts = [(name, str(e.dtype), e.shape, e.file.name, e.begin) for name, e in self._found.items()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def unknown(self) -> list[str]:
        """Return the names in the files that the model does not have; none with ``partial``."""
        return self._unknown

    def unknown_to(self, names: list[str]) -> CheckpointError:
        """Return the error that no stage of the model has ``names``."""
        got = f"{len(names)} that the model has not, such as {', '.join(names[:3])}"
        return self._misfit("tensors", "those of the model", got)

    def has(self, name: str) -> bool:
        """Tell whether the files have values of the model's tensor ``name``."""
        return name in self._found

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Read elements ``[begin, end)`` of the model's tensor ``name``, in the stored dtype: 1-D, on the CPU."""
        entry = self._found[name]
        if entry.file not in self._files:
            self._files[entry.file] = os.open(entry.file, os.O_RDONLY)
        return read_range(self._files[entry.file], entry, begin, end)

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _misfit(self, subject: str, expected: str, got: str) -> CheckpointError:
        return CheckpointError(
            f"{self._weights.path}: {subject}",
            expected=expected,
            got=got,
            do="Give the files of this model; npuzero.Weights(path, rename=..., partial=...) says what differs.",
        )


def find_weight_tensors(path: Path) -> dict[str, SafetensorsEntry]:
    """Return the tensors of a file, of the files of an index, or of a folder with either.

    Raises:
        CheckpointError: something is missing or truncated, or the index and the files disagree.
    """
    if os.path.isdir(path):
        path = next((path / name for name in (SINGLE, INDEX) if (path / name).exists()), path / SINGLE)
    if path.suffix != ".json":
        return read_header(path)
    places = read_index(path)
    headers = {name: read_header(path.parent / name) for name in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in headers[file]:
            raise CheckpointError(
                f"{path.parent / file}: tensor {name}",
                expected=f"to be there, as {path.name} says",
                got="no tensor of this name",
                do="Export or download the files again.",
            )
    return {name: headers[file][name] for name, file in places.items()}


def read_index(path: Path) -> dict[str, str]:
    """Read an index; return the file of each tensor.

    Raises:
        CheckpointError: it is no index, or names files in other folders.
    """
    try:
        index = parse_json(read_text(path))
    except OSError as error:
        raise CheckpointError(
            str(path),
            expected="an index of safetensors files",
            got=error.strerror or str(error),
            do="Give another path.",
        ) from error
    except ValueError as error:
        raise _bad_index_error(path, f"no JSON: {error}") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict):
        raise _bad_index_error(path, "no weight_map")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise _bad_index_error(path, f"{file!r} for {name}, which is no file beside it")
    return places


def _bad_index_error(path: Path, got: str) -> CheckpointError:
    return CheckpointError(str(path), expected="an index of safetensors files", got=got, do="Download it again.")


def read_range(descriptor: int, entry: SafetensorsEntry, begin: int, end: int) -> Tensor:
    """Read elements ``[begin, end)`` of ``entry`` from its open file.

    Raises:
        CheckpointError: the file has become shorter, or cannot be read.
    """
    size = entry.dtype.itemsize
    raw = allocate_zeros((end - begin) * size, torch.uint8, torch.device("cpu"))
    view, offset = view_tensor_bytes(raw), entry.begin + begin * size
    observe.instant("weights", "read", file=entry.file.name, tensor=entry.name, nbytes=len(view))
    while view:
        try:
            count = os.preadv(descriptor, [view], offset)
        except OSError as error:
            raise _unreadable_tensor_error(entry, str(error.strerror)) from error
        if not count:
            raise _unreadable_tensor_error(entry, "the file's end")
        view, offset = view[count:], offset + count
    return raw != 0 if entry.dtype is torch.bool else raw.view(entry.dtype)


def _unreadable_tensor_error(entry: SafetensorsEntry, got: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.file}: tensor {entry.name}", expected="its bytes", got=got, do="Export or download the file again."
    )


def _get_named_tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return the tensors in the state dict of ``model``: each once, with all its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not is_extra_state(name):
            found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def _check_tensor_fits(name: str, tensor: Tensor, entry: SafetensorsEntry) -> None:
    same = tensor.dtype == entry.dtype or (tensor.dtype.is_floating_point and entry.dtype.is_floating_point)
    if tuple(tensor.shape) != entry.shape or not same:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.name}",
            expected=f"{list(tensor.shape)} of {tensor.dtype}, as the model's {name}",
            got=f"{list(entry.shape)} of {entry.dtype}",
            do="Build the model with the sizes that its files have.",
        )


def parse_weights(weights: object) -> StoredWeights:
    """Return the values that the argument of ``npuzero.zero(weights=)`` names.

    Raises:
        ConfigError: it is neither a path nor :class:`Weights`.
    """
    if isinstance(weights, (str, Path)):
        weights = Weights(weights)
    if not isinstance(weights, Weights):
        raise ConfigError(
            "npuzero.zero(): weights",
            expected="a path, or npuzero.Weights(path, ...)",
            got=type(weights).__name__,
            do="Give the path of safetensors files; unsharded tensors go by npuzero.load_full_state_dict.",
        )
    return StoredWeights(weights)
