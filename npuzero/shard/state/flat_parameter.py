"""A flat parameter: one 1-D buffer for several parameters, with the shards and master weights of this rank.

Names used in this package, for a flat parameter of n elements and a plan that shards parameters, parameters after
forward, gradients and optimizer states into P, A, G and S shards::

    whole       [n]    parameter dtype; unsharded: every parameter is a view of it; no bytes while resharded (if apart)
    resting     [n/P]  parameter dtype; this rank's shard between steps (the same tensor as whole unless apart)
    held        [n/A]  parameter dtype; this rank's shard between forward and backward (only if 1 < A < P), or [n/B]
                       between micro-batches; never both
    master      [n/S]  the values that the optimizer updates: float32 for low-precision parameters, else own parameters
    remainder   [n/S]  int16; the lower halves of split master weights; the upper halves are own parameters
    exact       [n/S]  master or remainder, as a TieredTensor
    gradient    see :mod:`npuzero.shard.state.flat_gradient`
    own         [n/S]  this rank's states shard: elements with optimizer states here; a sub-range of all of the above
    apart       True if whole and resting are separate tensors: P > 1, or parameters are offloaded
    ahead       [n/S]  parameter dtype, on the host; own parameters after the last update, if the plan delays their copy
                       to the device; exact belongs to these values (see :mod:`npuzero.shard.offload.delayed_update`)
    near        the leading elements of the states shard, with optimizer states on the device: all, unless the plan
                offloads some to the host or to NVMe. The offloaded part of master and remainder is not one tensor, and
                parameters on NVMe are not either: all code but the update accesses them by ranges
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from npuzero.memory import MemorySpaces, Source, TransientBuffer, allocate_zeros
from npuzero.ops import storage
from npuzero.plan import Memory, Plan, TensorPortion
from npuzero.shard.layout.flat_layout import FlatLayout, intersect_ranges
from npuzero.shard.layout.shard_specs import ShardSpec, ShardSpecs
from npuzero.shard.layout.tensor_slices import set_portion
from npuzero.shard.modules import sharded_tensor as guard
from npuzero.shard.state.flat_gradient import FlatGradient
from npuzero.shard.state.initial_values import set_tensor_data
from npuzero.shard.state.snapshot import NOW, Later, StateSnapshot
from npuzero.shard.state.tiered_tensor import TieredTensor

#: Per kind of master weights: name and dtype of the tensor kept in addition to own parameters.
EXACT = {"fp32": ("master", torch.float32), "split": ("remainder", torch.int16)}
#: Names of own parameters among the states passed to an update: parameters on NVMe, and ``ahead``.
PARAMETERS, AHEAD = "parameters", "ahead"


class FlatParameter:
    """Hold one flat parameter of a unit: parameters of one dtype that are all trainable, or all frozen.

    Attributes:
        plan, rests: the plan it follows, and the shard specs derived from it on this rank.
        portions: per slot, its portion of a tensor that is cut over ranks; None: it is the full tensor.
        masters: kind of master weights: ``"own"`` if the float32 parameters serve, else ``precision.masters``.
        own_slots: per slot, its part of this rank's states shard, as a slice of that shard.
        offsets: per slot, its offset in the flat parameter, in bytes.
    """

    def __init__(
        self,
        name: str,
        layout: FlatLayout,
        parameters: list[nn.Parameter],
        plan: Plan,
        rests: ShardSpecs,
        portions: Sequence[TensorPortion | None],
    ) -> None:
        self.name = name
        self.layout = layout
        self.parameters = parameters
        self.dtype = layout.dtype
        self.plan = plan
        self.rests = rests
        self.portions = portions
        self.masters = "own" if layout.dtype == torch.float32 else plan.precision.masters
        self.trainable = parameters[0].requires_grad
        self.apart = rests.apart
        self.whole: Tensor
        self.transient: TransientBuffer  # the memory of whole; only if apart
        self.resting: Tensor  # unset if parameters are on NVMe
        self.shard: TieredTensor  # [n/P]: this rank's shard of the parameters, in any memory
        self.held: dict[ShardSpec, TransientBuffer] = {}  # by shard spec; only if apart
        self.exact: TieredTensor | None = None  # only if masters are "fp32" or "split"
        self.master: Tensor  # its near part
        self.remainder: Tensor | None = None
        # [n/S]: the range of the resting parameters that this rank updates. own_parameters is unset if it is on NVMe.
        self.own: TieredTensor
        self.own_parameters: Tensor
        self.ahead: Tensor | None = None
        self.gradient: FlatGradient  # only if trainable
        # Per slot: its version counter when last checked; and the alias that ``p.data`` returned.
        self._counts = [0] * len(parameters)
        self._aliases: dict[int, Tensor] = {}
        self.own_slots = [self._own_slot(i) for i in self.slots]
        self.offsets = [slot.begin * layout.dtype.itemsize for slot in layout.slots]

    @property
    def slots(self) -> range:
        """Return the slot indices."""
        return range(len(self.parameters))

    @property
    def own_gradient(self) -> Tensor:
        """Return [n/S] float32: this rank's shard of the gradient, summed over the ranks once it is READY."""
        return self.gradient.own

    def _own_slot(self, i: int) -> slice:
        slot, start = self.layout.slots[i], self.rests.states.begin
        begin, end = intersect_ranges((slot.begin, slot.end), self.rests.states.range)
        return slice(begin - start, end - start) if begin < end else slice(0, 0)

    def cut_like_own(self, i: int, whole: Tensor) -> Tensor:
        """Return the elements of ``whole``, shaped like slot ``i``, that belong to this rank's states shard; 1-D."""
        own = self.own_slots[i]
        if own.start == own.stop:
            return whole.reshape(-1)[:0]
        shift = self.rests.states.begin - self.layout.slots[i].begin
        return whole.reshape(-1)[own.start + shift : own.stop + shift]

    def place_of_own(self, i: int) -> int:
        """Return the index in slot ``i`` of the first element of this rank's states shard, if it has any."""
        return int(self.own_slots[i].start) + self.rests.states.begin - self.layout.slots[i].begin

    @property
    def far(self) -> bool:
        """Return whether any optimizer state of this rank's shard is offloaded."""
        return self.trainable and self.rests.states.near < self.rests.states.numel

    def materialize(
        self,
        spaces: MemorySpaces,
        source: Source | None,
        first_values: Callable[[FlatParameter], None],
        far: Callable[[FlatParameter, str], TieredTensor],
    ) -> None:
        """Allocate the buffers, fill them with ``first_values``, and make the parameters views of the flat buffer.

        Args:
            source: provides the memory of the resting parameters, which other ranks read in an all-gather.
            far: returns the offloaded part of ``exact``, and parameters on NVMe.
        """
        rests = self.rests
        resident = spaces[Memory.DEVICE]  # buffers that live within a step are on the compute device
        if rests.parameters.memory is Memory.NVME:
            self.shard = self.own = far(self, PARAMETERS)
        else:
            self.resting = spaces[rests.parameters.memory].allocate(
                rests.parameters.numel, self.dtype, "parameters", source
            )
            self.whole = self.resting
            self.own_parameters = self.resting[rests.states.within(rests.parameters)]
            self.shard = TieredTensor.whole(self.resting, rests.parameters.numel)
            self.own = TieredTensor.whole(self.own_parameters, rests.states.numel)
        if self.apart:
            self.transient = resident.transient(self.layout.numel, self.dtype, "buffers")
            self.whole = self.transient.tensor
            self.held = {
                kept: spaces[kept.memory].transient(kept.numel, self.dtype, "buffers") for kept in rests.copied
            }
        if self.trainable:
            self.gradient = FlatGradient(self.name, self.layout, rests, self.plan.precision, spaces)
            near = rests.states.near
            self.master = self.own_parameters[:near] if near else self.whole[:0]
            if self.masters in EXACT:
                name, dtype = EXACT[self.masters]
                setattr(self, name, resident.allocate(near, dtype, "states"))
                self.exact = TieredTensor.whole(getattr(self, name), near)
                if self.far:
                    self.exact = self.exact.extended(far(self, name))
        first_values(self)
        if self.apart:
            self.transient.restore()  # views can only be made while it has memory
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            parameter.grad = None
            set_tensor_data(parameter, self.whole[slot.begin : slot.end].view(slot.shape))
        for i, parameter in enumerate(self.parameters):
            parameter._npuzero_aliases = self._aliases, i  # type: ignore[attr-defined]
            set_portion(parameter, self.portions[i])
            guard.watch_parameter(parameter)
        self.written()  # records the version counters; earlier writes do not count
        if self.apart:
            self.transient.release()
        if self.trainable:
            self.gradient.memory.release()
            self.gradient.mark(self.parameters)

    def fill(self, values: Sequence[Tensor], share: Callable[[Tensor], None]) -> None:
        """Load unsharded values, one per slot. Peak extra memory: the unsharded flat parameter in float32.

        Args:
            values: tensors of the slots' shapes, any floating dtype and device.
            share: makes the unsharded float32 buffer the same on all ranks.
        """
        exact = allocate_zeros(self.layout.numel, torch.float32, self.whole.device)
        for slot, value in zip(self.layout.slots, values, strict=True):
            exact[slot.begin : slot.end].copy_(value.reshape(-1))
        share(exact)
        self.put(0, exact)

    def put(self, start: int, values: Tensor) -> None:
        """Load the elements that begin at ``start``: this rank's part into its shard and, unrounded, into masters.

        Args:
            values: [k], any floating dtype and device.
        """
        exact = values.to(self.whole.device, torch.float32)

        def shared(rest: ShardSpec) -> tuple[Tensor, slice]:
            begin, end = intersect_ranges((start, start + exact.numel()), rest.range)
            return exact[begin - start : end - start], slice(begin - rest.begin, end - rest.begin)

        here, shard = shared(self.rests.parameters)
        self.shard.round_in(shard, here)
        if self.trainable:
            here, own = shared(self.rests.states)
            self.write_master(own, here)

    # -- writes of the program's own -------------------------------------------------------------------------------

    def written(self) -> list[int]:
        """Return the slots that the program has written since the last call; they must be readable."""
        counts = [parameter._version for parameter in self.parameters]
        for i, alias in self._aliases.items():
            counts[i] += alias._version
        if counts == self._counts:
            return []
        before, self._counts = self._counts, counts
        return [i for i in self.slots if counts[i] != before[i]]

    def note_write(self) -> None:
        """Count a write by the engine, not by the program, in every parameter's version counter."""
        torch.autograd.graph.increment_version(self.parameters)
        self._counts = [count + 1 for count in self._counts]

    def take_written(self, slots: Sequence[int]) -> None:
        """Copy the program's writes into unsharded ``slots`` to this rank's shard and masters.

        A float32 master keeps its value if its rounded copy is unchanged. For split masters the lower halves, which
        belong to the earlier values, are zeroed: for the changed elements if the plan shards parameters, else for
        entire slots, since the changed elements are not known.
        """
        written = self.whole[slice(*self.rests.parameters.range)]
        own_written = written[self.rests.states.within(self.rests.parameters)]
        if self.apart:
            if self.masters == "split" and self.exact is not None:
                before = self.own.raw(self._all).to(written.device)
                # As bits: NaN equals nothing, and -0 equals 0.
                self.exact.clear(self._all, storage.view_bits(own_written) != storage.view_bits(before))
            self.shard.replace(slice(0, written.numel()), written)
        elif self.masters == "split" and self.exact is not None:
            for i in slots:
                self.exact.clear(self.own_slots[i])
        if self.masters == "fp32" and self.exact is not None:
            for own in (self.own_slots[i] for i in slots):
                for low, master in self.exact.beside(own, own_written[own]):
                    storage.copy_changed_low(master, low)
        _update_ahead(self, self._all)

    # -- masters ---------------------------------------------------------------------------------------------------

    @property
    def low(self) -> Tensor | None:
        """Return the near part of own parameters if they are rounded copies of float32 masters, else None."""
        return self.own_parameters[: self.rests.states.near] if self.masters == "fp32" else None

    @property
    def rounds_stochastically(self) -> bool:
        """Return whether there are no masters: the bfloat16 parameters are updated directly."""
        return self.masters == "none"

    def read_master(self, own: slice) -> Tensor:
        """Return the masters of a range of this rank's states shard as float32; may be a copy."""
        return snapshot_masters(self, own, NOW)()

    def write_master(self, own: slice, values: Tensor) -> None:
        """Replace the masters and own parameters of a range of this rank's states shard."""
        if self.masters == "split" and self.exact is not None:
            upper, remainder = storage.split_halves(values.float())
            self.own.replace(own, upper)
            self.exact.replace(own, remainder)
        else:
            if self.exact is not None:
                self.exact.replace(own, values)
            self.own.round_in(own, values)
        _update_ahead(self, own)

    def refresh_master(self) -> None:
        """Update masters from own parameters, after these were written."""
        _update_ahead(self, self._all)
        if self.exact is None:
            return
        if self.masters == "split":
            self.exact.clear(self._all)
        else:
            for low, master in self.exact.beside(self._all, self.own.raw(self._all)):
                master.copy_(low)

    def refresh_low(self) -> None:
        """Update own parameters from the masters, after these were written."""
        if self.masters == "fp32" and self.exact is not None:
            for reach in self.exact.over(self._all):
                self.own.round_in(reach.here, reach.stored[reach.there])

    @property
    def _all(self) -> slice:
        return slice(0, self.rests.states.numel)


def snapshot_masters(flat: FlatParameter, own: slice, snapshot: StateSnapshot) -> Later:
    """Return a function that later returns the present result of :meth:`FlatParameter.read_master`."""
    if flat.exact is not None and flat.masters == "fp32":
        return flat.exact.later(own, snapshot)
    upper = flat.own.later(own, snapshot, raw=True) if flat.ahead is None else snapshot.copied(flat.ahead[own])
    remainder = None if flat.exact is None else flat.exact.later(own, snapshot, raw=True)

    def masters() -> Tensor:
        high = upper()
        if remainder is None or not high.numel():
            return high.float()
        return storage.join_halves(high, remainder().to(high.device))

    return masters


def _update_ahead(flat: FlatParameter, own: slice) -> None:
    """Copy a range of own parameters, which were written, to ``ahead``."""
    if flat.ahead is not None:
        flat.ahead[own].copy_(flat.own_parameters[own])
