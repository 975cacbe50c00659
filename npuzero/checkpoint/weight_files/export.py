"""Export unsharded weights of a sharded model into safetensors files, one piece of a tensor at a time.

The export is atomic: partial files are written next to their final places, and renamed when all are on disk, the index
last. If the process is killed earlier, the partial files stay under names that no reader uses, and the next export to
the same place overwrites them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from npuzero.arguments import as_path, check_callable, check_count
from npuzero.checkpoint.formats.safetensors import header_bytes, view_tensor_bytes
from npuzero.checkpoint.layout.parts import check_portions_known
from npuzero.checkpoint.weight_files.read_weights import INDEX, SINGLE, read_index
from npuzero.comm.watchdog.call_names import collective_call
from npuzero.errors import CheckpointError, ConfigError, StorageError, refuse_unknown_keywords
from npuzero.memory import allocate_zeros
from npuzero.ops.storage.lazy import materialize_lazy
from npuzero.plan import DTYPES, STAGE, axes_beyond
from npuzero.shard.engine import Engine
from npuzero.shard.find_engine import engine_of
from npuzero.shard.layout.flat_layout import intersect_ranges
from npuzero.shard.layout.shard_specs import ShardSpec
from npuzero.shard.layout.tensor_slices import PIECE, full_tensor_shape, gather_cut_blocks
from npuzero.shard.layout.tiled_linear import TiledTensor
from npuzero.shard.parameters.across_stages import StageRelay, exchange_or_raise, merge_state_names, pick_per_stage
from npuzero.shard.parameters.check_repeated import check_replicated
from npuzero.shard.state.extra_state import is_extra_state
from npuzero.shard.state.flat_parameter import FlatParameter

#: Largest size of a file, unless a single tensor is larger.
FILE_BYTES = 5 * 10**9
METADATA = {"format": "pt"}

#: A tensor to be written: its name in the files, dtype and shape.
Facts = tuple[str, torch.dtype, tuple[int, ...]]
Rename = Callable[[str], str | None]

#: A stage's description of a tensor: its name, its name in the files, dtype, shape, and all its wanted names.
_Described = tuple[str, str, str, list[int], list[str]]


class SafetensorsWriter:
    """Write safetensors files of ``tensors``, given their elements in this order; used in a ``with`` block.

    Args:
        path: a ``.safetensors`` file; or a folder, which gets ``model.safetensors``, or several files and an index if
            one file would exceed ``file_bytes``.

    Raises:
        StorageError: the files cannot be written.
    """

    def __init__(self, path: Path, tensors: Sequence[Facts], file_bytes: int = FILE_BYTES) -> None:
        single = path.suffix == ".safetensors"
        self._folder = path.parent if single else path
        parts = [list(tensors)] if single else _divide_into_files(tensors, file_bytes)
        self._index = [] if len(parts) == 1 else [INDEX]
        names = [path.name if single else SINGLE]
        if len(parts) > 1:
            stem, suffix = SINGLE.split(".")
            names = [f"{stem}-{i:05}-of-{len(parts):05}.{suffix}" for i in range(1, len(parts) + 1)]
        self._parts = dict(zip(names, parts, strict=True))
        self._whole_folder = not single
        self._new_folders: list[Path] = []
        self._waiting = iter(self._parts.items())
        self._file: BinaryIO | None = None
        self._missing = 0  # bytes missing in the current file

    def __enter__(self) -> SafetensorsWriter:
        return self

    def put(self, piece: Tensor, dtype: torch.dtype) -> None:
        """Write the next elements of one of ``tensors`` in ``dtype``, the dtype of that tensor."""
        piece = materialize_lazy(piece.to("cpu", dtype))
        if piece.numel():
            while not self._missing:
                self._next_file()
            assert self._file is not None
            with _storage_errors(Path(self._file.name)):
                self._file.write(view_tensor_bytes(piece))
            self._missing -= piece.nbytes

    def commit(self) -> None:
        """Give the files their final names. An older export in the same folder is replaced."""
        while self._next_file():
            pass
        with _storage_errors(self._folder):
            for name in self._index:
                self._write_index(self._partial(name))
            old = self._old_files() if self._whole_folder else set()
            if self._whole_folder:  # from here to the end a reader finds one export or none, never a mixture
                for name in {INDEX, SINGLE} - {*self._parts}:
                    (self._folder / name).unlink(missing_ok=True)
            self._replace([*self._parts, *self._index])
            for name in old - {*self._parts}:
                (self._folder / name).unlink(missing_ok=True)
            _sync_export(self._folder)
        self._new_folders = []

    def _replace(self, names: Sequence[str]) -> None:
        """Give the files their names: all, or none."""
        placed: list[Path] = []
        try:
            for name in names:
                os.replace(self._partial(name), self._folder / name)
                placed.append(self._folder / name)
        except OSError:
            for path in placed:
                path.unlink(missing_ok=True)
            raise

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a full disk fails again on close
            if self._file is not None:
                self._file.close()
        for name in [*self._parts, *self._index]:
            with suppress(OSError):
                self._partial(name).unlink(missing_ok=True)
        with suppress(OSError):
            for folder in self._new_folders:
                folder.rmdir()

    def _next_file(self) -> bool:
        """Finish the current file and begin the next; False without a next one."""
        assert not self._missing, "the tensors' elements have not all come"
        if self._file is not None:
            with _storage_errors(Path(self._file.name)):
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
        name, tensors = next(self._waiting, (None, None))
        if name is None or tensors is None:
            self._file = None
            return False
        with _storage_errors(self._partial(name)):
            self._new_folders += [path for path in (self._folder, *self._folder.parents) if not path.exists()]
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = self._partial(name).open("wb")
            self._file.write(header_bytes(tensors, METADATA))
        self._missing = sum(map(_tensor_nbytes, tensors))
        return True

    def _partial(self, name: str) -> Path:
        return self._folder / f".{name}.partial"

    def _old_files(self) -> set[str]:
        """Return the data files of the index in the folder."""
        try:
            return set(read_index(self._folder / INDEX).values())
        except CheckpointError:  # no index, or one that is not ours to clean up
            return set()

    def _write_index(self, partial: Path) -> None:
        places = {tensor: file for file, tensors in self._parts.items() for tensor, _, _ in tensors}
        total = sum(_tensor_nbytes(facts) for tensors in self._parts.values() for facts in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        with partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps(index, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _divide_into_files(tensors: Iterable[Facts], file_bytes: int) -> list[list[Facts]]:
    parts: list[list[Facts]] = [[]]
    filled = 0
    for facts in tensors:
        if parts[-1] and filled + _tensor_nbytes(facts) > file_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(facts)
        filled += _tensor_nbytes(facts)
    return parts


def _tensor_nbytes(facts: Facts) -> int:
    _, dtype, shape = facts
    return torch.Size(shape).numel() * dtype.itemsize


class _storage_errors:
    """Convert OSError to StorageError, naming the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageError(
                str(self._path),
                expected="room for the weights, and leave to write them",
                got=error.strerror or str(error),
                do="Make room there, or export to another place.",
            ) from error


def _sync_export(folder: Path) -> None:
    """Write the folder's new names to disk, so that they survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@refuse_unknown_keywords()
@collective_call("export")
def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    rename: Callable[[str], str | None] | None = None,
) -> None:
    """Write the unsharded weights of a model into safetensors files, for transformers and other readers. Collective.

    Rank 0 writes. It needs memory for one piece of a tensor in addition to its shards. The files appear when all are
    complete. Tied tensors are written once, under their first name; buffers have rank 0's values.

    Args:
        path: a folder, which gets ``model.safetensors``, or several files and ``model.safetensors.index.json`` if one
            file would exceed ``file_bytes``; or one file, named ``*.safetensors``.
        dtype: of the parameters: ``"fp32"``, ``"bf16"``, ``"fp16"``, or torch's; None keeps each parameter's dtype. If
            it has more bits than the parameters, the values are those of the masters.
        file_bytes: the largest size of a file, unless a single tensor is larger.
        rename: maps a name in the model to the name in the files; None leaves the tensor out.

    Raises:
        StateError: the model is not sharded, or tensor ranks hold different values of a replicated parameter.
        ConfigError: an argument that cannot work.
        StorageError: rank 0 cannot write there; raised on every rank.

    Example::

        npuzero.export(model, "exported", dtype="bf16")  # exported/model.safetensors
    """
    engine = engine_of(model)
    check_count("npuzero.export: file_bytes", file_bytes, "Give a size in bytes, such as 5 * 10**9.")
    if rename is not None:
        check_callable("npuzero.export: rename", rename, "Pass a function of a tensor's name, or None.")
    target, wanted, line = as_path("npuzero.export: path", path), _parse_export_dtype(dtype), StageRelay(engine.mesh)
    check_replicated(engine, "npuzero.export")
    slots = {id(p): (flat, i) for unit in engine.units for flat in unit.flats for i, p in enumerate(flat.parameters)}
    tensors: dict[str, Tensor] = {}
    here: list[_Described] = []
    problem: Exception | None = None
    try:
        check_portions_known(engine, "npuzero.export")
        for name, (theirs, tensor, names) in _tensors_to_export(model, rename or (lambda name: name)).items():
            kind = wanted if wanted is not None and id(_tiles_of(tensor)[0]) in slots else tensor.dtype
            tensors[theirs] = tensor
            here.append((name, theirs, str(kind).removeprefix("torch."), list(full_tensor_shape(tensor)), names))
    except Exception as error:
        if not line.many:
            raise
        problem = error
    every = [(line.stage, described) for described in here]
    if line.many:
        every = _exchange_tensor_names(engine, problem, here)
    engine.values.settle()
    facts: list[Facts] = [(theirs, getattr(torch, kind), tuple(shape)) for _, (_, theirs, kind, shape, _) in every]
    # All ranks walk the tensors in one order, since gathers are collective. After an error they keep gathering, and
    # raise in _agree_export_done.
    with _make_writer(engine, line, target, facts, file_bytes) as writer:
        for (theirs, kind, shape), (stage, _) in zip(facts, every, strict=True):
            if stage == line.stage:
                for member in _tiles_of(tensors[theirs]):
                    for piece in _gather_pieces(engine, slots.get(id(member)), member, kind):
                        problem = problem or _catch_error(writer.put, piece, kind)
            elif line.takes:
                for piece in _receive_elements(line, stage, kind, shape):
                    problem = problem or _catch_error(writer.put, piece, kind)
        problem = problem or _catch_error(writer.commit)
    _agree_export_done(engine, problem)


def _parse_export_dtype(dtype: object) -> torch.dtype | None:
    for name, value in DTYPES.items():
        if isinstance(dtype, (str, torch.dtype)) and dtype in (name, value):
            return value
    if dtype is None:
        return None
    raise ConfigError(
        "npuzero.export: dtype",
        expected=f"one of {', '.join(DTYPES)} or their torch dtypes",
        got=repr(dtype),
        do="Leave it out to keep each parameter's own.",
    )


def _catch_error(work: Callable[..., None], *arguments: Any) -> Exception | None:
    """Return the error of ``work``, if any: remaining ranks keep sending, and this one must keep receiving."""
    try:
        work(*arguments)
    except Exception as error:
        return error
    return None


def _exchange_tensor_names(
    engine: Engine, problem: Exception | None, here: list[_Described]
) -> list[tuple[int, _Described]]:
    """Return the stage of each tensor to write, in the order of the unsharded model. Collective."""
    said = exchange_or_raise(engine.mesh.world, "npuzero.export", problem, here)
    found: dict[str, tuple[int, _Described]] = {}
    seen: set[str] = set()
    for stage, its in enumerate(pick_per_stage(engine.mesh, said)):
        for name, theirs, kind, shape, names in its:
            if seen.isdisjoint(names):
                found[name] = stage, (name, theirs, kind, shape, names)
            seen.update(names)
    _check_names_unique([described[1] for _, described in found.values()])
    return [found[name] for name in merge_state_names(found)]


def _make_writer(
    engine: Engine, line: StageRelay, target: Path, facts: Sequence[Facts], file_bytes: int
) -> SafetensorsWriter:
    if engine.mesh.world.rank == 0:
        return SafetensorsWriter(target, facts, file_bytes)
    return _RelayWriter(line) if line.gives else _NullWriter()


def _receive_elements(line: StageRelay, stage: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield the elements of a tensor of another stage, on rank 0, in the pieces of its :class:`_RelayWriter`."""
    left = torch.Size(shape).numel()
    while left:
        piece = line.take(stage, dtype, (int(line.take(stage, torch.int64, (1,))),))
        left -= piece.numel()
        yield piece


class _NullWriter(SafetensorsWriter):
    """Replace the writer on a rank that writes nothing."""

    def __init__(self) -> None:
        return

    def __enter__(self) -> SafetensorsWriter:
        return self

    def put(self, piece: Tensor, dtype: torch.dtype) -> None:
        return

    def commit(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


class _RelayWriter(_NullWriter):
    """Send this stage's part of the files to rank 0."""

    def __init__(self, line: StageRelay) -> None:
        self._line = line

    def put(self, piece: Tensor, dtype: torch.dtype) -> None:
        if piece.numel():
            self._line.give(torch.tensor([piece.numel()]))
            self._line.give(materialize_lazy(piece.to("cpu", dtype)))


def _tensors_to_export(model: nn.Module, rename: Rename) -> dict[str, tuple[str, Tensor, list[str]]]:
    """Map the first wanted name of each tensor to (name in the files, tensor, all wanted names)."""
    found: dict[int, tuple[str, str, Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        theirs = rename(name)
        if theirs is None:
            continue
        if is_extra_state(name):
            raise ConfigError(
                f"npuzero.export: {name}",
                expected="parameters and buffers only, which is what such files are read into",
                got=f"the extra state of a module: {type(tensor).__name__}",
                do="Leave it out: rename=lambda name: None if ... else name; and keep it elsewhere.",
            )
        found.setdefault(id(tensor), (name, theirs, tensor, []))[3].append(name)
    _check_names_unique([theirs for _, theirs, _, _ in found.values()])
    return {name: (theirs, tensor, names) for name, theirs, tensor, names in found.values()}


def _check_names_unique(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            "npuzero.export: rename",
            expected="another name for each tensor",
            got=f"{twice!r} twice",
            do="Keep what tells the tensors apart.",
        )


def _tiles_of(tensor: Tensor) -> list[nn.Parameter] | list[Tensor]:
    """Return the parts of ``tensor`` in the order of its elements: its tiles, or the tensor itself."""
    return tensor.tiles if isinstance(tensor, TiledTensor) else [tensor]


def _gather_pieces(
    engine: Engine, place: tuple[FlatParameter, int] | None, tensor: Tensor, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield the elements of ``tensor`` in order, on rank 0. Collective."""
    if place is None:  # a buffer: every rank has it
        for begin in range(0, tensor.numel(), PIECE):
            yield tensor.detach().reshape(-1)[begin : begin + PIECE]
        return
    flat, i = place
    # A dtype with more bits than the parameters gets the masters' values.
    exact = flat.trainable and dtype.itemsize > flat.dtype.itemsize
    rests = flat.rests
    rest: ShardSpec
    read: Callable[[slice], Tensor]
    rest, read = (rests.states, flat.read_master) if exact else (rests.parameters, flat.shard.raw)
    if flat.ahead is not None and not exact:  # a pending delayed update counts
        rest, read = rests.states, flat.ahead.__getitem__
    slot, portion = flat.layout.slots[i], flat.portions[i]
    alike = tuple(axis for axis in flat.plan.alike if axis in STAGE)
    if engine.mesh.index(axes_beyond(rest.group.axes, alike)):
        return  # of the ranks that replicate the shards only the group of rank 0 gathers
    unsharded = partial(_gather_range, flat, rest, read)
    if portion is None:
        for start in range(slot.begin, slot.end, PIECE):
            yield unsharded(start, min(start + PIECE, slot.end))
    else:
        kind = read(slice(0, 0)).dtype
        part = gather_cut_blocks(
            portion, engine.mesh, kind, lambda begin, end: unsharded(slot.begin + begin, slot.begin + end)
        )
        yield from (values for _, values in part)


def _gather_range(
    flat: FlatParameter, rest: ShardSpec, read: Callable[[slice], Tensor], start: int, stop: int
) -> Tensor:
    """Return elements ``[start, stop)`` of ``flat``: each rank reads its shard of ``rest``. Collective."""
    communicator, count = rest.group.communicator("control"), rest.group.size
    piece = allocate_zeros(stop - start, read(slice(0, 0)).dtype, communicator.device)
    length = flat.layout.numel // count
    for owner in range(start // length, (stop - 1) // length + 1):
        begin, end = intersect_ranges((start, stop), flat.layout.shard(owner, count))
        sent = piece[begin - start : end - start]
        if owner == communicator.rank:
            sent.copy_(read(slice(begin - rest.begin, end - rest.begin)))
        communicator.broadcast(sent, root=owner, tag="export").wait()
    return piece


def _agree_export_done(engine: Engine, problem: Exception | None) -> None:
    """Wait until the files are complete; raise rank 0's error on every rank."""
    said = engine.mesh.world.exchange(problem and f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    if said[0] is not None:
        raise StorageError(
            "npuzero.export", expected="rank 0 to write the files", got=said[0], do="Mend it there.", rank=0
        )
