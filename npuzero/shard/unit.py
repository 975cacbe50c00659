"""A unit: the parameters that travel together, their flat buffers, and the states both may be in.

Names used in this package, for a flat of n elements and a plan that cuts parameters, held, gradients and states into
P, H, G and S shards::

    whole       [n]    parameter dtype; every parameter is a view of it; no bytes while released (only where P > 1)
    resting     [n/P]  parameter dtype; what this rank keeps between steps (the same tensor as whole where P = 1)
    held        [n/H]  parameter dtype; what it keeps between forward and backward (only where 1 < H < P)
    gradient    [n/G]  float32; accumulates over micro-batches; no bytes after zero_grad()
    unsynced    [n]    float32; what accumulates under no_sync where G > 1
    carry       [n/S]  float32; an already reduced gradient that further micro-batches are added to (rare)
    wire        [n]    the precision's wire dtype; what a reduction sends
    own         [n/S]  this rank's states shard, a sub-range of all of the above
    master      [n/S]  what the optimizer updates: float32 beside low-precision parameters, else own parameters
    remainder   [n/S]  int16; the lower halves of split masters, whose upper halves are own parameters
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import TypeVar

import torch
from torch import Tensor, nn

from npuzero import ops
from npuzero.errors import StateError
from npuzero.memory import Source, Space, Transient, zeros
from npuzero.ops import storage
from npuzero.ops.storage.lazy import settled
from npuzero.plan import Plan
from npuzero.shard import guard
from npuzero.shard.discover import UnitSpec
from npuzero.shard.layout import Layout, overlap
from npuzero.shard.origin import give_data


class ParameterState(enum.Enum):
    """Who holds a unit's parameters."""

    SHARDED = "sharded"  # resting only
    GATHERING = "gathering"  # a gather writes into whole
    WHOLE = "whole"  # whole may be read
    HELD = "held"  # resting and the held copy


class GradientState(enum.Enum):
    """Who holds a unit's gradients."""

    EMPTY = "empty"
    PARTIAL = "partial"  # some have left autograd
    REDUCING = "reducing"  # a reduction is under way
    ACCUMULATED = "accumulated"  # this backward's are in the accumulator
    READY = "ready"  # summed over all ranks, this rank's own shard


_P, _G = ParameterState, GradientState
_MOVES: dict[enum.Enum, tuple[enum.Enum, ...]] = {
    _P.SHARDED: (_P.GATHERING,),
    _P.GATHERING: (_P.WHOLE,),
    _P.WHOLE: (_P.SHARDED, _P.HELD, _P.GATHERING),
    _P.HELD: (_P.GATHERING, _P.SHARDED),
    _G.EMPTY: (_G.PARTIAL, _G.REDUCING, _G.ACCUMULATED),
    _G.PARTIAL: (_G.REDUCING, _G.ACCUMULATED, _G.EMPTY),
    _G.REDUCING: (_G.ACCUMULATED, _G.READY),
    _G.ACCUMULATED: (_G.PARTIAL, _G.REDUCING, _G.READY, _G.EMPTY),
    _G.READY: (_G.ACCUMULATED, _G.EMPTY),
}


_State = TypeVar("_State", ParameterState, GradientState)


def _moved(subject: str, now: _State, to: _State) -> _State:
    """``to``, if the life-cycle lets it follow ``now``; else a StateError naming both."""
    if to is not now and to not in _MOVES[now]:
        allowed = ", ".join(state.name for state in _MOVES[now])
        raise StateError(
            subject,
            expected=f"a move from {now.name} to one of {allowed}",
            got=to.name,
            do="This is a fault of the engine; please report it with the model's structure.",
        )
    return to


@dataclass(frozen=True)
class Ranks:
    """How this rank's shards lie: for each part of the plan the number of shards, and which is this rank's."""

    plan: Plan
    world: int
    count: Mapping[str, int]
    index: Mapping[str, int]


class Flat:
    """One flat buffer of a unit: parameters of one dtype that are all trainable, or all frozen."""

    def __init__(self, name: str, layout: Layout, parameters: list[nn.Parameter], ranks: Ranks) -> None:
        self.name = name
        self.layout = layout
        self.parameters = parameters
        self.dtype = layout.dtype
        self.wire = ranks.plan.precision.wire_of(layout.dtype)
        self.sums = ranks.plan.precision.sums_of(layout.dtype)
        self.ranks = ranks
        self.trainable = parameters[0].requires_grad
        self.cut = ranks.count["parameters"] > 1
        self.whole: Tensor
        self.transient: Transient  # the memory of whole; only where cut
        self.resting: Tensor
        self.held: Transient | None = None  # only where held is cut, and less than parameters are
        self.master: Tensor
        self.remainder: Tensor | None = None
        self.gradient_memory: Transient
        self.gradient: Tensor
        self.own_gradient: Tensor  # [n/S] float32: this rank's shard of the gradient (summed over ranks once READY)
        self.own_parameters: Tensor  # [n/S]: the range of the resting parameters that this rank updates
        self.unsynced: Tensor | None = None
        self.carry: Tensor | None = None
        self.gradient_state = _G.EMPTY
        # Gradients of the present backward pass: by slot number what autograd made.
        self.pending: dict[int, Tensor] = {}
        # Is there anything of this step in a cut accumulator? If not, the next reduction overwrites it.
        self.valid = False
        # Per slot: is there anything of it in the whole gradients this rank has summed alone (gradient or unsynced)?
        self.local_held = [False] * len(parameters)
        # Per slot: has anything been added to any buffer since the last reset?
        self.accumulated = [False] * len(parameters)
        # Per slot: what p.grad is while the gradient lives in these buffers.
        self.markers: list[guard.CutGradient] = []
        # Per slot: how often torch has seen it written, when it was looked at last; and what ``p.data`` is an alias of.
        self._counts: list[int] = []
        self._aliases: dict[int, Tensor] = {}
        # Per slot: its part of this rank's states shard, as a slice of that shard.
        self.own_slots = [self._own_slot(i) for i in self.slots]
        # Per slot: where it begins in the flat, in bytes.
        self.offsets = [slot.begin * layout.dtype.itemsize for slot in layout.slots]

    def shard(self, part: str) -> tuple[int, int]:
        """This rank's range of the flat for ``part`` of the plan."""
        return self.layout.shard(self.ranks.index[part], self.ranks.count[part])

    def own_within(self, part: str) -> slice:
        """This rank's states shard as a slice of its shard for ``part``: a deeper cut is a contiguous sub-range."""
        begin = self.shard(part)[0]
        own = self.shard("states")
        return slice(own[0] - begin, own[1] - begin)

    def move(self, to: GradientState) -> None:
        """Change the gradients' state, as their life-cycle allows; where there were none they get memory."""
        self.gradient_state = _moved(f"gradients of {self.name}", self.gradient_state, to)
        if not self.gradient_memory.here:
            self.gradient_memory.restore()
            if self.ranks.count["gradients"] == 1:  # else a reduction writes all of it
                for begin, end in self.layout.gaps:
                    self.gradient[begin:end].zero_()

    @property
    def all_pending(self) -> bool:
        """Whether every gradient of the present backward pass has arrived."""
        return len(self.pending) >= len(self.parameters)

    def forget(self) -> None:
        """No slot has a gradient any more."""
        nothing = [False] * len(self.parameters)
        self.local_held, self.accumulated = nothing[:], nothing[:]
        self.valid = False
        self.pending.clear()
        self.gradient_state = _G.EMPTY

    @property
    def slots(self) -> range:
        """Numbers of the slots."""
        return range(len(self.parameters))

    def _own_slot(self, i: int) -> slice:
        slot, (start, stop) = self.layout.slots[i], self.shard("states")
        begin, end = overlap((slot.begin, slot.end), (start, stop))
        return slice(begin - start, end - start) if begin < end else slice(0, 0)

    def cut_like_own(self, i: int, whole: Tensor) -> Tensor:
        """Of a tensor shaped like slot ``i``, the elements that lie in this rank's states shard; 1-D."""
        own, slot, start = self.own_slots[i], self.layout.slots[i], self.shard("states")[0]
        if own.start == own.stop:
            return whole.reshape(-1)[:0]
        return whole.reshape(-1)[own.start + start - slot.begin : own.stop + start - slot.begin]

    def materialize(self, space: Space, source: Source | None, first_values: Callable[[Flat], None]) -> None:
        """Allocate what rests here, have ``first_values`` fill it, and let the parameters be views of the flat buffer.

        ``source``: who provides the memory of the resting parameters, which other ranks read when they gather.
        """
        self.resting = space.allocate(self._length("parameters"), self.dtype, "parameters", source)
        self.whole = self.resting
        if self.cut:
            self.transient = space.transient(self.layout.numel, self.dtype, "buffers")
            self.whole = self.transient.tensor
            if 1 < self.ranks.count["held"] < self.ranks.count["parameters"]:
                self.held = space.transient(self._length("held"), self.dtype, "buffers")
        self.own_parameters = self.resting[self.own_within("parameters")]
        if self.trainable:
            self.gradient_memory = space.transient(self._length("gradients"), torch.float32, "gradients")
            self.gradient_memory.restore()
            self.gradient = self.gradient_memory.tensor
            self.own_gradient = self.gradient[self.own_within("gradients")]
            self.master = self.own_parameters
            masters = self.ranks.plan.precision.masters
            if self.dtype != torch.float32 and masters == "fp32":
                self.master = space.allocate(self._length("states"), torch.float32, "states")
            elif self.dtype != torch.float32 and masters == "split":
                self.remainder = space.allocate(self._length("states"), torch.int16, "states")
        first_values(self)
        if self.cut:
            self.transient.restore()  # views can only be made of what has memory
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            parameter.grad = None
            give_data(parameter, self.whole[slot.begin : slot.end].view(slot.shape))
        for i, parameter in enumerate(self.parameters):
            parameter._npuzero_aliases = self._aliases, i  # type: ignore[attr-defined]
            guard.reopen(parameter)
        self._counts = self._count_writes()
        if self.cut:
            self.transient.release()
        if self.trainable:
            self.gradient_memory.release()
            flat_of = weakref.ref(self)
            self.markers = [
                guard.CutGradient(parameter, partial(_parameter_of, flat_of, i))
                for i, parameter in enumerate(self.parameters)
            ]

    def fill(self, values: Sequence[Tensor], share: Callable[[Tensor], None]) -> None:
        """Take whole values, one per slot. The peak beyond what rests is the whole flat in float32.

        Args:
            values: tensors of the slots' shapes, any floating dtype and device.
            share: makes the whole flat (float32) the same on all ranks.
        """
        exact = zeros(self.layout.numel, torch.float32, self.resting.device)
        for slot, value in zip(self.layout.slots, values, strict=True):
            exact[slot.begin : slot.end].copy_(value.reshape(-1))
        share(exact)
        self.put(0, exact)

    def put(self, start: int, values: Tensor) -> None:
        """Take the elements from ``start`` of the flat on into what rests here of them, and, unrounded, into masters.

        Args:
            values: [k] of any floating dtype and device.
        """
        exact = values.to(self.resting.device, torch.float32)
        for part in ("parameters", "states") if self.trainable else ("parameters",):
            first, stop = self.shard(part)
            begin, end = overlap((start, start + exact.numel()), (first, stop))
            here, own = exact[begin - start : end - start], slice(begin - first, end - first)
            if part == "parameters":
                _copy_rounded(here, self.resting[own])
            else:
                self.write_master(own, here)

    @property
    def low(self) -> Tensor | None:
        """[n/S]: own parameters, where they are rounded copies of masters that lie elsewhere."""
        return None if self.master is self.own_parameters else self.own_parameters

    def written(self) -> list[int]:
        """The slots that somebody has written since this was asked last; they must be readable."""
        counts = self._count_writes()
        if counts == self._counts:
            return []
        before, self._counts = self._counts, counts
        return [i for i in self.slots if counts[i] != before[i]]

    def _count_writes(self) -> list[int]:
        counts = [parameter._version for parameter in self.parameters]
        for i, alias in self._aliases.items():
            counts[i] += alias._version
        return counts

    def take_written(self, slots: Sequence[int]) -> None:
        """Carry what was written into the whole parameters of ``slots`` to where it lasts: the resting shard, masters.

        A float32 master keeps its value where its rounded copy is unchanged. Of split masters the lower halves, which
        belonged to the values of before, become zero: where the plan cuts parameters those of the elements that
        changed, else, since nothing tells which did, those of the slots.
        """
        if self.cut:
            new = self.whole[slice(*self.shard("parameters"))]
            if self.remainder is not None:
                own = self.own_within("parameters")
                changed = storage.bits(new[own]) != storage.bits(self.own_parameters)
                self.remainder.masked_fill_(changed, 0)
            self.resting.copy_(new)
        elif self.remainder is not None:
            for i in slots:
                self.remainder[self.own_slots[i]].zero_()
        if self.trainable and self.low is not None:
            for own in (self.own_slots[i] for i in slots):
                storage.follow(self.master[own], self.low[own])

    @property
    def rounds_stochastically(self) -> bool:
        """Whether masters are bfloat16 alone."""
        return self.master.dtype == torch.bfloat16 and self.remainder is None

    def place_of_own(self, i: int) -> int:
        """Which element of slot ``i`` is the first of this rank's states shard, if any is."""
        return int(self.own_slots[i].start) + self.shard("states")[0] - self.layout.slots[i].begin

    def read_master(self, own: slice) -> Tensor:
        """float32: the masters of a range of this rank's states shard, however they are kept; maybe a copy."""
        if self.remainder is not None:
            return storage.join(self.master[own], self.remainder[own])
        return self.master[own].float()

    def write_master(self, own: slice, values: Tensor) -> None:
        """Replace the masters of a range of this rank's states shard, and own parameters with them."""
        if self.remainder is not None:
            upper, remainder = storage.split(values.float())
            self.master[own].copy_(upper)
            self.remainder[own].copy_(remainder)
        else:
            _copy_rounded(values, self.master[own])
            if self.low is not None:
                _copy_rounded(values, self.low[own])

    def refresh_master(self) -> None:
        """Somebody wrote the parameters: masters follow them."""
        if self.remainder is not None:
            self.remainder.zero_()
        elif self.low is not None:
            self.master.copy_(self.low)

    def refresh_low(self) -> None:
        """Somebody wrote the masters: own parameters follow them."""
        if self.low is not None:
            _copy_rounded(self.master, self.low)

    def _length(self, part: str) -> int:
        return self.layout.numel // self.ranks.count[part]

    def present(self) -> list[bool]:
        """Per slot: is there a gradient, as far as this rank's user is concerned? (Under DisableTorchFunctionSubclass.)

        Raises:
            StateError: somebody else put a gradient there.
        """
        found = [parameter.grad for parameter in self.parameters]
        if all(map(is_, found, self.markers)):  # as nearly always; asked several times a step
            return [True] * len(found)
        for i, (gradient, marker) in enumerate(zip(found, self.markers, strict=True)):
            if gradient is not None and gradient is not marker:
                raise StateError(
                    f"gradient of {self.layout.slots[i].name}",
                    expected="None, or what the engine put there",
                    got="a tensor set from outside, which no rank would reduce",
                    do="Let backward() make gradients; change them through the loss, or use torch.autograd.grad.",
                )
        return [gradient is not None for gradient in found]

    def clear(self, i: int) -> None:
        """Zero whatever the buffers hold of slot i: its user dropped the gradient (``p.grad = None``)."""
        self.local_held[i] = self.accumulated[i] = False
        slot = self.layout.slots[i]
        for buffer, part in ((self.gradient, "gradients"), (self.carry, "states")):
            if buffer is not None:
                start = self.shard(part)[0]
                begin, end = overlap((slot.begin, slot.end), self.shard(part))
                buffer[begin - start : end - start].zero_()


def _parameter_of(flat_of: weakref.ref[Flat], i: int) -> Tensor | None:
    flat = flat_of()
    return None if flat is None else flat.parameters[i]


def _copy_rounded(values: Tensor, target: Tensor) -> None:
    """``values`` into the 1-D ``target``, rounded as flat_adam rounds the copies of masters."""
    if target.dtype == torch.bfloat16:
        ops.cast(settled(values.to(target.device, torch.float32)), target, rounding="away")
    else:
        target.copy_(values)


class Unit:
    """A module, the flats of the parameters it owns, and the states they are in."""

    def __init__(self, spec: UnitSpec, index: int, flats: list[Flat]) -> None:
        self.name = spec.name
        self.index = index
        self.module = weakref.ref(spec.module)
        self.flats = flats
        self.trainable = [flat for flat in flats if flat.trainable]
        self.has_frozen = len(self.trainable) < len(flats)
        self.cut = any(flat.cut for flat in flats)
        self.parameter_state = _P.SHARDED if self.cut else _P.WHOLE
        # Forward passes whose backward is to come or under way (see Hooks).
        self.backward_expected = False
        self.computing = 0
        # May backward need it whenever it likes, as where a forward's outputs hide tensors? Then it stays whole until
        # backward ends.
        self.opaque = False
        # Flats whose gradients the present backward pass has still to bring.
        self.missing = set(self.trainable)

    def parameters(self) -> Iterator[nn.Parameter]:
        for flat in self.flats:
            yield from flat.parameters

    def move(self, to: ParameterState) -> None:
        """Change the parameters' state, as their life-cycle allows."""
        self.parameter_state = _moved(f"parameters of unit {self.name!r}", self.parameter_state, to)

    def close(self) -> None:
        """Guard the parameters against reading."""
        for parameter in self.parameters():
            guard.close(parameter)

    def reopen(self) -> None:
        """Let the parameters be read, and watch writes into them."""
        for parameter in self.parameters():
            guard.reopen(parameter)

    def check_views(self, thoroughly: bool = False) -> None:
        """Every parameter must still be a view of its flat: another engine around the model replaces the data.

        It replaces that of all, so before a forward a look at the first of each flat is enough.

        Raises:
            StateError: a parameter's data lies elsewhere.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for flat in self.flats:
                base = flat.whole.data_ptr()
                for parameter, offset in zip(flat.parameters, flat.offsets, strict=True):
                    if parameter.data_ptr() != base + offset and parameter.numel():
                        self._complain(flat, parameter)
                    if not thoroughly:
                        break

    def _complain(self, flat: Flat, parameter: nn.Parameter) -> None:
        slot = next(s for s, p in zip(flat.layout.slots, flat.parameters, strict=True) if p is parameter)
        raise StateError(
            f"parameter {slot.name}",
            expected=f"a view of the flat buffer of unit {self.name!r}",
            got="data elsewhere: replaced after npuzero.zero(), e.g. by FSDP around it or p.data = ...",
            do="Convert and move the model first, then call npuzero.zero(); "
            "load weights with npuzero.load_full_state_dict.",
        )
