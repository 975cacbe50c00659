"""List the parts of a sharded model's checkpoint, and the rank that writes each: the same result on every rank.

A shard of a flat parameter has as many replicas as ranks hold it, and each of these ranks writes an equal part of it.
So each of N ranks writes one N-th of every flat parameter under any plan, and all places follow from the plan by
arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from npuzero.checkpoint.layout.across_stages import StageShare, digest_options
from npuzero.checkpoint.layout.boxes import TensorBox, boxes_of
from npuzero.errors import ConfigError
from npuzero.plan import ENDS, STAGE, MeshShape, TensorPortion, axes_beyond
from npuzero.shard.engine import Engine
from npuzero.shard.layout.axis_relations import is_tied
from npuzero.shard.layout.flat_layout import FlatSlot, intersect_ranges
from npuzero.shard.layout.shard_specs import ShardSpec
from npuzero.shard.layout.tiled_linear import TileRows, find_tile_rows
from npuzero.shard.state.flat_parameter import FlatParameter, snapshot_masters
from npuzero.shard.state.snapshot import Later, StateSnapshot

#: Prefixes of names, as in PyTorch's recipes.
MODEL, OPTIMIZER = "model", "optim"

#: Largest number of bytes of elements in an item of a file; bounds the memory of a write or a read.
ITEM_BYTES = 16 << 20

Path = tuple["str | int", ...]
#: For each slot of a flat parameter: numbers of the optimizer by name, None for a tensor sharded as the parameter.
SlotStates = list[dict[str, "float | None"]]


class CutOptimizer(Protocol):
    """Define the interface that checkpoints need of an npuzero optimizer."""

    param_groups: list[dict[str, Any]]

    def cut_state(self, flat: FlatParameter) -> SlotStates:
        """Return the state of each slot: numbers, and None for a tensor in the buffer of that name."""

    def cut_buffer(self, flat: FlatParameter, name: str, own: slice, snapshot: StateSnapshot) -> Later:
        """Return a function that gives a range of this rank's shard as float32."""

    def state_names(self) -> tuple[str, ...]:
        """Return the names of every parameter's states, as far as the class knows them before the first step."""

    def check_rule(self, saved: Collection[str], groups: Sequence[dict[str, Any]]) -> None:
        """Warn if states of these names, and groups of these options, belong to another rule."""

    def load_cut_state(self, engine: Engine, flat: FlatParameter, slots: SlotStates) -> Collection[str]:
        """Begin to load a state of :meth:`cut_state`; return the names that :meth:`write_cut_buffer` must write."""

    def write_cut_buffer(self, flat: FlatParameter, name: str, own: slice, values: Tensor) -> None:
        """Load a range of a buffer of :meth:`cut_buffer`. All ranges of a shard follow, in full blocks of moments."""


@dataclass(frozen=True)
class UnshardedEntry:
    """Hold a value of a checkpoint that is no sharded tensor, with its path in the nested state."""

    path: Path
    value: Any

    @property
    def key(self) -> str:
        return flatten_path(self.path)


@dataclass(frozen=True)
class BoxLocation:
    """Locate a box of a tensor in a flat parameter: a range of elements, viewed in some sizes.

    Attributes:
        box: of the tensor.
        begin: the range's first element.
        sizes: of the view.
        within: the box in that view; ``()``: all of it.
    """

    box: TensorBox
    begin: int
    sizes: tuple[int, ...]
    within: tuple[slice, ...] = ()

    @property
    def range(self) -> tuple[int, int]:
        return self.begin, self.begin + math.prod(self.sizes)

    def of(self, values: Tensor) -> Tensor:
        """Return a view of the box's elements, in its sizes; ``values``: the range's elements."""
        return values.view(self.sizes)[self.within]


@dataclass(frozen=True)
class SlotPiece:
    """Describe the part of a tensor that a slot holds: all of it, the rows of a tile, or this rank's portion.

    Attributes:
        whole: the tensor; for a tiled tensor, the rows of the slot.
        portion: for a cut tensor, this rank's portion.
    """

    slot: FlatSlot
    whole: TileRows
    portion: TensorPortion | None = None

    def of_rank(self, rank: int, shape: MeshShape) -> SlotPiece:
        """Return the slot's part of the tensor on another rank."""
        if self.portion is None:
            return self
        return replace(self, portion=self.portion.of(shape.index(self.portion.cut.axes, rank)))

    def sites(self, begin: int, end: int, limit: int | None = None) -> Iterator[BoxLocation]:
        """Yield the boxes of the tensor with elements ``[begin, end)`` of the flat parameter, all within the slot."""
        for box in boxes_of(self.slot.shape, begin - self.slot.begin, end - self.slot.begin, limit):
            if self.portion is None:
                yield BoxLocation(box.after(self.whole.first), begin, box.sizes)
            else:
                yield from _locate_box(box, begin, self.portion)
            begin += box.numel

    def sites_in(self, begin: int, end: int) -> Iterator[BoxLocation]:
        """Yield the boxes within a range of the flat parameter, which may exceed the slot."""
        yield from self.sites(*intersect_ranges((self.slot.begin, self.slot.end), (begin, end)))

    def own_boxes(self, begin: int, shard: Tensor) -> list[tuple[TensorBox, Tensor]]:
        """Return the boxes in a shard that begins at ``begin``, each with its elements."""
        sites = self.sites_in(begin, begin + shard.numel())
        return [(site.box, site.of(shard[slice(*(at - begin for at in site.range))])) for site in sites]


def _locate_box(box: TensorBox, begin: int, portion: TensorPortion) -> Iterator[BoxLocation]:
    """Yield the boxes of a cut tensor that make up ``box`` of a portion; its elements begin at ``begin``."""
    dim = portion.cut.dim
    first, last = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    inner = math.prod(box.sizes[dim + 1 :])
    had = 0  # elements of the portion so far, along the dimension
    for start, stop in portion.pieces:
        a, b = intersect_ranges((first, last), (had, had + stop - start))
        if a < b:
            offsets = (*box.offsets[:dim], start + a - had, *box.offsets[dim + 1 :])
            sizes = (*box.sizes[:dim], b - a, *box.sizes[dim + 1 :])
            found = TensorBox(offsets, sizes)
            if math.prod(box.sizes[:dim]) == 1:  # contiguous in the flat parameter
                yield BoxLocation(found, begin + (a - first) * inner, sizes)
            else:
                yield BoxLocation(
                    found, begin, box.sizes, (*(slice(None) for _ in range(dim)), slice(a - first, b - first))
                )
        had += stop - start


def slot_pieces(flat: FlatParameter, tiles: Mapping[str, TileRows]) -> list[SlotPiece]:
    """Return the part of a tensor in each slot of ``flat``; ``tiles``: by ``find_tile_rows``."""
    found = []
    for slot, portion in zip(flat.layout.slots, flat.portions, strict=True):
        shape = slot.shape if portion is None else portion.whole
        found.append(SlotPiece(slot, tiles.get(slot.name) or TileRows(slot.name, shape, 0), portion))
    return found


@dataclass(frozen=True)
class SavedTensor:
    """Describe a sharded tensor in one slot of a flat parameter: the parameter, or an optimizer state."""

    paths: tuple[Path, ...]  # several for a tied parameter
    piece: SlotPiece
    dtype: torch.dtype

    @property
    def slot(self) -> FlatSlot:
        return self.piece.slot

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the tensor."""
        return self.piece.whole.shape

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(map(flatten_path, self.paths))


@dataclass(frozen=True)
class SavedPart:
    """Describe one buffer of a flat parameter: its tensors, and a function that gives a slice of this rank's shard."""

    flat: FlatParameter
    rest: ShardSpec  # the shard spec: as states or as parameters
    cuts: tuple[SavedTensor, ...]
    later: Callable[[slice, StateSnapshot], Later]

    @property
    def dtype(self) -> torch.dtype:
        return self.cuts[0].dtype

    def written_by(self, rank: int, shape: MeshShape) -> tuple[int, int]:
        """Return the range of the flat parameter that ``rank`` writes."""
        plan, axes = self.flat.plan, self.rest.group.axes
        summed = tuple(axis for axis in plan.reduced if axis in STAGE)
        if not self.of_stage(rank, shape) or shape.index(axes_beyond(summed, plan.alike), rank):
            return 0, 0  # of ranks that replicate it the first one writes
        axes += axes_beyond(axes, summed)
        return self.flat.layout.shard(shape.index(axes, rank), shape.size(axes))

    def of_stage(self, rank: int, shape: MeshShape) -> bool:
        """Tell whether the stage of ``rank`` writes it; of tied stages the first one does."""
        return not self.flat.plan.tied or shape.index((ENDS,), rank) == 0

    def items(self, rank: int, shape: MeshShape) -> Iterator[SavedBox]:
        """Yield the boxes that ``rank`` writes, in order."""
        written = self.written_by(rank, shape)
        for cut in self.cuts:
            begin, end = intersect_ranges((cut.slot.begin, cut.slot.end), written)
            for site in cut.piece.of_rank(rank, shape).sites(begin, end, ITEM_BYTES // cut.dtype.itemsize):
                yield SavedBox(cut, site)


@dataclass(frozen=True)
class SavedBox:
    """Describe a box of a sharded tensor, and its location in the flat parameter."""

    cut: SavedTensor
    site: BoxLocation

    @property
    def box(self) -> TensorBox:
        return self.site.box

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.cut.dtype.itemsize


def flatten_path(path: Path) -> str:
    """Return the flat name of a value in a nested state, in DCP's form."""
    return ".".join(map(str, path))


def write_saved_part(part: SavedPart, own: slice, values: Tensor) -> None:
    """Replace a range of this rank's shard of a part of the model; parameters follow their masters."""
    if part.flat.trainable:
        part.flat.write_master(own, values)
    else:
        part.flat.shard.replace(own, values)


def model_parts(model: nn.Module, engine: Engine) -> list[SavedPart]:
    """Return the parameters of ``model``: trainable ones as float32 masters, frozen ones in their dtype."""
    check_portions_known(engine, "checkpoint")
    tiles = find_tile_rows(model)
    # Tiles share the name of their tensor, and a tied parameter has several names: DCP gets all of them.
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(tiles[name].name if name in tiles else name)
    parts = []
    for flat in (flat for unit in engine.units for flat in unit.flats):
        dtype = torch.float32 if flat.trainable else flat.dtype
        cuts = tuple(
            SavedTensor(tuple((MODEL, name) for name in names[id(parameter)]), piece, dtype)
            for piece, parameter in zip(slot_pieces(flat, tiles), flat.parameters, strict=True)
        )
        rests = flat.rests
        rest = rests.states if flat.trainable else rests.parameters
        parts.append(SavedPart(flat, rest, cuts, partial(snapshot_masters if flat.trainable else _frozen_later, flat)))
    return parts


def check_portions_known(engine: Engine, subject: str) -> None:
    """Check that the portion of every cut parameter is known.

    Raises:
        ConfigError: some parameter was built in parts, and its portion was not given.
    """
    for flat in (flat for unit in engine.units for flat in unit.flats):
        for slot, portion in zip(flat.layout.slots, flat.portions, strict=True):
            if portion is None and flat.rests.divided.many:
                raise ConfigError(
                    f"{subject}: parameter {slot.name}, cut along {'+'.join(flat.plan.divided)}",
                    expected="a part of a tensor that was cut as the model was sharded",
                    got="one that each rank has built for itself",
                    do="Build it whole on every rank, and let npuzero.zero() cut it.",
                )


def _frozen_later(flat: FlatParameter, own: slice, snapshot: StateSnapshot) -> Later:
    return flat.shard.later(own, snapshot, raw=True)


def model_entries(model: nn.Module) -> list[UnshardedEntry]:
    """Return buffers, and the extra states of modules."""
    named = model.state_dict(keep_vars=True)
    return [
        UnshardedEntry((MODEL, name), value) for name, value in named.items() if not isinstance(value, nn.Parameter)
    ]


def optimizer_parts(
    model: nn.Module, engine: Engine, optimizer: CutOptimizer
) -> tuple[list[SavedPart], list[UnshardedEntry]]:
    """Return the states of the optimizer, by the names of torch's get_optimizer_state_dict."""
    tiles = find_tile_rows(model)
    parts: list[SavedPart] = []
    entries: dict[Path, UnshardedEntry] = {}  # by path: the tiles of a tensor share their numbers, such as the step
    for flat in engine.flats():
        slots = optimizer.cut_state(flat)
        pieces = slot_pieces(flat, tiles)
        for name in sorted({name for state in slots for name, number in state.items() if number is None}):
            cuts = tuple(
                SavedTensor(((OPTIMIZER, "state", piece.whole.name, name),), piece, torch.float32)
                for piece, state in zip(pieces, slots, strict=True)
                if name in state and state[name] is None
            )
            parts.append(SavedPart(flat, flat.rests.states, cuts, partial(optimizer.cut_buffer, flat, name)))
        first = not flat.plan.tied or engine.mesh.index((ENDS,)) == 0
        for piece, state in zip(pieces, slots, strict=True):
            for name, number in state.items():
                if number is not None and first:
                    path = OPTIMIZER, "state", piece.whole.name, name
                    entries.setdefault(path, UnshardedEntry(path, torch.tensor(number)))
    return parts, [*entries.values()]


def describe_stage(model: nn.Module, optimizer: CutOptimizer | None) -> StageShare:
    """Return this stage's share of the names, for the remaining stages of a pipeline."""
    named = model.state_dict(keep_vars=True)
    aliases: dict[str, str] = {}
    tied: dict[int, str] = {}
    for name, value in named.items():
        if isinstance(value, nn.Parameter) and is_tied(value) and tied.setdefault(id(value), name) != name:
            aliases[name] = tied[id(value)]
    return StageShare(
        [*named],
        [entry.key for entry in model_entries(model)],
        aliases,
        None if optimizer is None else group_names(model, optimizer),
        [] if optimizer is None else [*map(digest_options, optimizer.param_groups)],
    )


def group_names(model: nn.Module, optimizer: CutOptimizer) -> list[list[str]]:
    """Return the names of the parameters of each group; the tiles of a tensor have one name."""
    tiles = find_tile_rows(model)
    names = {id(p): tiles[name].name if name in tiles else name for name, p in model.named_parameters()}
    return [[*dict.fromkeys(names[id(p)] for p in group["params"])] for group in optimizer.param_groups]


def get_cut_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> CutOptimizer | None:
    """Return ``optimizer`` if it is an npuzero optimizer over parameters of ``model``.

    Raises:
        ConfigError: it is not.
    """
    if optimizer is None:
        return None
    known = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if foreign or not hasattr(optimizer, "cut_state"):
        raise ConfigError(
            "checkpoint: optimizer",
            expected="an npuzero optimizer (AdamW, Adam, ZeroOptimizer) over parameters of the model",
            got=f"{foreign} parameters of others" if foreign else type(optimizer).__name__,
            do="Save each model with an npuzero optimizer of its own; it takes any torch optimizer's state.",
        )
    return cast(CutOptimizer, optimizer)
