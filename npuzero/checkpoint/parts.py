"""What a sharded model's checkpoint consists of, and which rank writes which part of it: the same answer on every rank.

A flat's shard lies on as many ranks as there are replicas of it; each writes an equal part of it. So with N ranks each
writes one N-th of every flat, whatever the plan, and where everything goes follows from the plan by arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from npuzero.checkpoint.boxes import Box, boxes_of
from npuzero.checkpoint.stages import Share, digest_of
from npuzero.errors import ConfigError
from npuzero.plan import ENDS, STAGE, MeshShape, Portion, axes_beyond
from npuzero.shard.engine import Engine
from npuzero.shard.flat import Flat, masters_later
from npuzero.shard.layout import Slot, overlap
from npuzero.shard.relations import is_tied
from npuzero.shard.rest import Rest
from npuzero.shard.snapshot import Later, Snapshot
from npuzero.shard.tiles import Rows, rows_of

#: What names begin with, as in PyTorch's own recipes.
MODEL, OPTIMIZER = "model", "optim"

#: An item of a file has at most so many bytes of elements, so that writing or reading one takes little memory.
ITEM_BYTES = 16 << 20

Path = tuple["str | int", ...]
#: Per slot of a flat: the optimizer's numbers by name, None for each tensor that is sharded like the parameter.
SlotStates = list[dict[str, "float | None"]]


class CutOptimizer(Protocol):
    """Name what is needed of an npuzero optimizer."""

    param_groups: list[dict[str, Any]]

    def cut_state(self, flat: Flat) -> SlotStates:
        """Return what each slot has: numbers, and None for what is in the buffer of that name."""

    def cut_buffer(self, flat: Flat, name: str, own: slice, snapshot: Snapshot) -> Later:
        """Return, for later, a range of this rank's shard as float32."""

    def state_names(self) -> tuple[str, ...]:
        """Return what the state of every parameter will consist of, as far as the class says it beforehand."""

    def check_rule(self, saved: Collection[str], groups: Sequence[dict[str, Any]]) -> None:
        """Warn where states of these names, and groups of these options, are another rule's."""

    def load_cut_state(self, engine: Engine, flat: Flat, slots: SlotStates) -> Collection[str]:
        """Begin to load what :meth:`cut_state` has given; return the names that :meth:`write_cut_buffer` waits for."""

    def write_cut_buffer(self, flat: Flat, name: str, own: slice, values: Tensor) -> None:
        """Load a range of what :meth:`cut_buffer` has given; all of a shard is to come, in whole blocks of moments."""


@dataclass(frozen=True)
class Entry:
    """Hold one value of a checkpoint that is no sharded tensor: its path in the nested state, and itself."""

    path: Path
    value: Any

    @property
    def key(self) -> str:
        return key_of(self.path)


@dataclass(frozen=True)
class Site:
    """Say where a box of a tensor lies in a flat: in a range of elements, viewed in some sizes.

    Attributes:
        box: of the tensor.
        begin: the range's first element.
        sizes: in which it is viewed.
        within: what of that view is the box; ``()``: all of it.
    """

    box: Box
    begin: int
    sizes: tuple[int, ...]
    within: tuple[slice, ...] = ()

    @property
    def range(self) -> tuple[int, int]:
        return self.begin, self.begin + math.prod(self.sizes)

    def of(self, values: Tensor) -> Tensor:
        """Return the box's elements among those of the range, in its sizes; a view."""
        return values.view(self.sizes)[self.within]


@dataclass(frozen=True)
class Piece:
    """Describe what a slot of a flat has of a tensor: all of it, the rows of a tile, or this rank's part of it.

    Attributes:
        whole: the tensor; where it is tiled, the rows that the slot has.
        portion: where the tensor is cut, what this rank has of it.
    """

    slot: Slot
    whole: Rows
    portion: Portion | None = None

    def of_rank(self, rank: int, shape: MeshShape) -> Piece:
        """Return what the slot has on another rank."""
        if self.portion is None:
            return self
        return replace(self, portion=self.portion.of(shape.index(self.portion.cut.axes, rank)))

    def sites(self, begin: int, end: int, limit: int | None = None) -> Iterator[Site]:
        """Yield where boxes of the tensor lie that have the elements ``[begin, end)`` of the flat, all the slot's."""
        for box in boxes_of(self.slot.shape, begin - self.slot.begin, end - self.slot.begin, limit):
            if self.portion is None:
                yield Site(box.after(self.whole.first), begin, box.sizes)
            else:
                yield from _sites(box, begin, self.portion)
            begin += box.numel

    def sites_in(self, begin: int, end: int) -> Iterator[Site]:
        """Yield those in a range of the flat, whosever it is."""
        yield from self.sites(*overlap((self.slot.begin, self.slot.end), (begin, end)))

    def own_boxes(self, begin: int, shard: Tensor) -> list[tuple[Box, Tensor]]:
        """Return its boxes in a shard of its flat that begins at ``begin``, each with its elements."""
        sites = self.sites_in(begin, begin + shard.numel())
        return [(site.box, site.of(shard[slice(*(at - begin for at in site.range))])) for site in sites]


def _sites(box: Box, begin: int, portion: Portion) -> Iterator[Site]:
    """Yield where boxes of a cut tensor lie that are ``box`` of one part of it, whose elements begin at ``begin``."""
    dim = portion.cut.dim
    first, last = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    inner = math.prod(box.sizes[dim + 1 :])
    had = 0  # of the part, along the dimension
    for start, stop in portion.pieces:
        a, b = overlap((first, last), (had, had + stop - start))
        if a < b:
            offsets = (*box.offsets[:dim], start + a - had, *box.offsets[dim + 1 :])
            sizes = (*box.sizes[:dim], b - a, *box.sizes[dim + 1 :])
            found = Box(offsets, sizes)
            if math.prod(box.sizes[:dim]) == 1:  # a range by itself
                yield Site(found, begin + (a - first) * inner, sizes)
            else:
                yield Site(found, begin, box.sizes, (*(slice(None) for _ in range(dim)), slice(a - first, b - first)))
        had += stop - start


def pieces_of(flat: Flat, tiles: Mapping[str, Rows]) -> list[Piece]:
    """Return what each slot of ``flat`` has; ``tiles``: see :func:`npuzero.shard.tiles.rows_of`."""
    found = []
    for slot, portion in zip(flat.layout.slots, flat.portions, strict=True):
        shape = slot.shape if portion is None else portion.whole
        found.append(Piece(slot, tiles.get(slot.name) or Rows(slot.name, shape, 0), portion))
    return found


@dataclass(frozen=True)
class Cut:
    """Describe a sharded tensor: what one slot of a flat has of it, or of one of the optimizer's states for it."""

    paths: tuple[Path, ...]  # several for a parameter that has several names
    piece: Piece
    dtype: torch.dtype

    @property
    def slot(self) -> Slot:
        return self.piece.slot

    @property
    def shape(self) -> torch.Size:
        """Return the tensor's."""
        return self.piece.whole.shape

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(map(key_of, self.paths))


@dataclass(frozen=True)
class Part:
    """Describe one buffer of a flat: the tensors in it, and how this rank has a range of its shard (a slice of it)
    later.
    """

    flat: Flat
    rest: Rest  # as which part of the flat it is sharded
    cuts: tuple[Cut, ...]
    later: Callable[[slice, Snapshot], Later]

    @property
    def dtype(self) -> torch.dtype:
        return self.cuts[0].dtype

    def written_by(self, rank: int, shape: MeshShape) -> tuple[int, int]:
        """Return the range of the flat that ``rank`` writes."""
        plan, axes = self.flat.plan, self.rest.group.axes
        summed = tuple(axis for axis in plan.reduced if axis in STAGE)
        if not self.of_stage(rank, shape) or shape.index(axes_beyond(summed, plan.alike), rank):
            return 0, 0  # of those that repeat it the first one does
        axes += axes_beyond(axes, summed)
        return self.flat.layout.shard(shape.index(axes, rank), shape.size(axes))

    def of_stage(self, rank: int, shape: MeshShape) -> bool:
        """Tell whether the stage of ``rank`` writes it: of both ends of a pipeline that have the same, the first."""
        return not self.flat.plan.tied or shape.index((ENDS,), rank) == 0

    def items(self, rank: int, shape: MeshShape) -> Iterator[Item]:
        """Yield what ``rank`` writes of it, in order."""
        written = self.written_by(rank, shape)
        for cut in self.cuts:
            begin, end = overlap((cut.slot.begin, cut.slot.end), written)
            for site in cut.piece.of_rank(rank, shape).sites(begin, end, ITEM_BYTES // cut.dtype.itemsize):
                yield Item(cut, site)


@dataclass(frozen=True)
class Item:
    """Describe a box of a sharded tensor, and where it lies in its flat."""

    cut: Cut
    site: Site

    @property
    def box(self) -> Box:
        return self.site.box

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.cut.dtype.itemsize


def key_of(path: Path) -> str:
    """Return the flat name of a value in a nested state, as DCP makes it."""
    return ".".join(map(str, path))


def write(part: Part, own: slice, values: Tensor) -> None:
    """Replace a range of this rank's shard of a part of the model; parameters follow their masters."""
    if part.flat.trainable:
        part.flat.write_master(own, values)
    else:
        part.flat.shard.replace(own, values)


def model_parts(model: nn.Module, engine: Engine) -> list[Part]:
    """Return the parameters of ``model``: trainable ones as float32 masters, frozen ones as they are."""
    check_known(engine, "checkpoint")
    tiles = rows_of(model)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(tiles[name].name if name in tiles else name)
    parts = []
    for flat in (flat for unit in engine.units for flat in unit.flats):
        dtype = torch.float32 if flat.trainable else flat.dtype
        cuts = tuple(
            Cut(tuple((MODEL, name) for name in names[id(parameter)]), piece, dtype)
            for piece, parameter in zip(pieces_of(flat, tiles), flat.parameters, strict=True)
        )
        rests = flat.rests
        rest = rests.states if flat.trainable else rests.parameters
        parts.append(Part(flat, rest, cuts, partial(masters_later if flat.trainable else _frozen_later, flat)))
    return parts


def check_known(engine: Engine, subject: str) -> None:
    """Check that of what ranks have different elements it is known which.

    Raises:
        ConfigError: of some parameter nobody has said it.
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


def _frozen_later(flat: Flat, own: slice, snapshot: Snapshot) -> Later:
    return flat.shard.later(own, snapshot, raw=True)


def model_entries(model: nn.Module) -> list[Entry]:
    """Return buffers, and whatever modules give as their extra state."""
    named = model.state_dict(keep_vars=True)
    return [Entry((MODEL, name), value) for name, value in named.items() if not isinstance(value, nn.Parameter)]


def optimizer_parts(model: nn.Module, engine: Engine, optimizer: CutOptimizer) -> tuple[list[Part], list[Entry]]:
    """Return the states of the optimizer, by the names that torch's get_optimizer_state_dict gives them."""
    tiles = rows_of(model)
    parts: list[Part] = []
    entries: dict[Path, Entry] = {}  # by path: the tiles of a tensor have their numbers, such as the step, in common
    for flat in engine.flats():
        slots = optimizer.cut_state(flat)
        pieces = pieces_of(flat, tiles)
        for name in sorted({name for state in slots for name, number in state.items() if number is None}):
            cuts = tuple(
                Cut(((OPTIMIZER, "state", piece.whole.name, name),), piece, torch.float32)
                for piece, state in zip(pieces, slots, strict=True)
                if name in state and state[name] is None
            )
            parts.append(Part(flat, flat.rests.states, cuts, partial(optimizer.cut_buffer, flat, name)))
        first = not flat.plan.tied or engine.mesh.index((ENDS,)) == 0
        for piece, state in zip(pieces, slots, strict=True):
            for name, number in state.items():
                if number is not None and first:
                    path = OPTIMIZER, "state", piece.whole.name, name
                    entries.setdefault(path, Entry(path, torch.tensor(number)))
    return parts, [*entries.values()]


def share_of(model: nn.Module, optimizer: CutOptimizer | None) -> Share:
    """Return what this stage tells the others of a pipeline."""
    named = model.state_dict(keep_vars=True)
    aliases: dict[str, str] = {}
    tied: dict[int, str] = {}
    for name, value in named.items():
        if isinstance(value, nn.Parameter) and is_tied(value) and tied.setdefault(id(value), name) != name:
            aliases[name] = tied[id(value)]
    return Share(
        [*named],
        [entry.key for entry in model_entries(model)],
        aliases,
        None if optimizer is None else group_names(model, optimizer),
        [] if optimizer is None else [*map(digest_of, optimizer.param_groups)],
    )


def group_names(model: nn.Module, optimizer: CutOptimizer) -> list[list[str]]:
    """Return the names of the parameters of each group; tiles together have one."""
    tiles = rows_of(model)
    names = {id(p): tiles[name].name if name in tiles else name for name, p in model.named_parameters()}
    return [[*dict.fromkeys(names[id(p)] for p in group["params"])] for group in optimizer.param_groups]


def optimizer_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> CutOptimizer | None:
    """Return ``optimizer``, if it is one of npuzero's over parameters of ``model``.

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
