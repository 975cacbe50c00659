"""Initialize a model's parameters, and read and write them unsharded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from npuzero.comm import World
from npuzero.comm.watchdog.call_names import collective_call, find_torch_call
from npuzero.config import explain_strict_refusal
from npuzero.errors import StateError
from npuzero.memory import MemorySpaces, allocate_zeros
from npuzero.plan import ENDS, STAGE
from npuzero.shard.layout.find_units import UnitSpec
from npuzero.shard.layout.flat_layout import intersect_ranges
from npuzero.shard.layout.tensor_slices import PIECE, gather_full_tensor
from npuzero.shard.layout.traffic_meter import CountingMesh
from npuzero.shard.modules.refuse_ddp import refuse_reader
from npuzero.shard.modules.sharded_tensor import INSTEAD
from npuzero.shard.offload.delayed_update import DelayedUpdate
from npuzero.shard.parameters.all_gather import ParameterGatherer
from npuzero.shard.parameters.all_gather_updated import UpdatedParameterGatherer
from npuzero.shard.parameters.user_writes import UserWrites, unit_digests
from npuzero.shard.state.flat_gradient import drop_rounding_errors
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.initial_values import InitialValues
from npuzero.shard.state.life_cycle import ParameterState
from npuzero.shard.state.tiered_tensor import TieredTensor
from npuzero.shard.state.unit import Unit


def _suggest_instead(call: str) -> str:
    """Return the advice for ``call``, a torch function that read a sharded parameter."""
    what = call.rpartition(".")[2]
    if what == "step":
        return f"Use {INSTEAD}."
    if what in ("state_dict", "save"):
        return "On every rank use npuzero.full_state_dict(model), npuzero.export or npuzero.checkpoint.save."
    return (
        "Read and write parameters within `with npuzero.gathered(model):`, on every rank, or take copies from "
        "npuzero.full_state_dict(model). If a forward reads it: run that module through the model's forward, or name "
        "it in units=. If a method beside forward does: npuzero.register_forward_method."
    )


class FullParameters:
    """Read and write the parameters of one model, unsharded or in shards. Its collectives run between steps.

    Attributes:
        opened: number of open :meth:`gathered` blocks.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        world: World,
        mesh: CountingMesh,
        gatherer: ParameterGatherer,
        restorer: UpdatedParameterGatherer,
        writes: UserWrites,
        lag: DelayedUpdate,
    ) -> None:
        self._units = units
        self._world = world
        self._mesh = mesh
        self._gatherer = gatherer
        self._restorer = restorer
        self._writes = writes
        self._lag = lag
        self.opened = 0

    # -- in --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_over(
        self,
        model: nn.Module,
        specs: Sequence[UnitSpec],
        origin: InitialValues,
        spaces: MemorySpaces,
        far: Callable[[FlatParameter, str], TieredTensor],
        claim: Callable[[Unit], None],
    ) -> None:
        """Move every parameter into its flat, with the values of ``origin``, and guard sharded parameters.

        Args:
            spaces: allocate parameters, gradients and states.
            far: returns the offloaded part of a flat's exact masters, or its parameters on a disk.
            claim: registers a unit's parameters with the engine; only then may they be read.
        """
        device = self._world.device
        first_values = partial(self._first_values, origin)
        origin.fill_buffers(model, device)
        for unit, spec in zip(self._units, specs, strict=True):
            origin.fill_unit(model, spec, device)
            for flat in unit.flats:
                # Other ranks read the local shard in place: in R1, or in R4 if parameters are unsharded between steps.
                rests = flat.rests
                group, purpose = (
                    (rests.parameters.group, "gather") if rests.parameters.cut else (rests.restored, "restore")
                )
                shared = group.many and not rests.parameters.far
                source = group.communicator(purpose).buffer if shared else None
                flat.materialize(spaces, source, first_values, far)
            claim(unit)
            if unit.guarded:
                unit.close()
        self.share(model.buffers())

    def _first_values(self, origin: InitialValues, flat: FlatParameter) -> None:
        """Fill a flat: read this rank's part of stored slots in pieces; broadcast the remaining slots from rank 0."""
        values = [parameter.detach() for parameter in flat.parameters]
        if not any(origin.has(slot.name) for slot in flat.layout.slots):
            self._fill(flat, values)
            return
        for i, slot in enumerate(flat.layout.slots):
            if not origin.has(slot.name):
                self._fill_slot(flat, i, values[i])
            else:
                for start, stored in _iter_stored_values(origin, flat, i):
                    flat.put(start, stored)

    def _fill(self, flat: FlatParameter, values: Sequence[Tensor]) -> None:
        """Fill a flat from full tensors, one per slot, with the first rank's values. Collective."""
        if not any(flat.portions):
            flat.fill(values, partial(_broadcast_from_first, flat))
            return
        for i, value in enumerate(values):
            self._fill_slot(flat, i, value)

    def _fill_slot(self, flat: FlatParameter, i: int, value: Tensor) -> None:
        portion, begin = flat.portions[i], flat.layout.slots[i].begin
        if portion is None:
            exact = value.reshape(-1).to(torch.float32, copy=True)
            _broadcast_from_first(flat, exact)
            flat.put(begin, exact)
            return
        axes = (ENDS, *STAGE) if flat.rests.tied else STAGE
        everyone, mine = self._mesh.communicator(axes, "control"), value.reshape(-1)
        for block in portion.blocks(PIECE):
            exact = allocate_zeros(block.end - block.begin, torch.float32, self._world.device)
            if everyone.rank == 0:
                exact.copy_(mine[block.begin : block.end])
            everyone.broadcast(exact, root=0, tag="weights").wait()
            first, last = portion.share_of(block)
            if first < last:
                flat.put(begin + first, portion.out_of(block, exact))

    def load(self, values: Mapping[int, Tensor]) -> None:
        """Replace parameters by rank 0's unsharded tensors, keyed by ``id(parameter)``. Others keep their values.

        Collective: every rank passes keys of the same parameters.
        """
        self.settle()
        self._lag.drop()
        for unit in self._units:
            for flat in unit.trainable:
                drop_rounding_errors(flat.gradient)
            for flat in unit.flats:
                given = {i: values[id(p)] for i, p in enumerate(flat.parameters) if id(p) in values}
                if len(given) == len(flat.parameters):
                    self._fill(flat, [*given.values()])
                    continue
                for i, value in given.items():
                    self._fill_slot(flat, i, value)

    def share(self, buffers: Iterable[Tensor]) -> None:
        """Broadcast buffers, of any dtype, from rank 0. Collective."""
        for buffer in buffers:
            raw = buffer.detach().clone().reshape(-1).view(torch.uint8)
            self._mesh.communicator(STAGE, "control").broadcast(raw, root=0, tag="buffers").wait()
            buffer.copy_(raw.view(buffer.dtype).view(buffer.shape))

    # -- out -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole(self, unit: Unit) -> Iterator[None]:
        """Unshard the parameters of ``unit`` within the block, readable on every rank. Collective.

        The values are exact, unless the unit is computing with quantized ones.
        """
        self._restorer.finish(unit)
        kept = unit.parameter_state is ParameterState.WHOLE
        if unit.rounded and not kept:
            self._gatherer.release(unit)
        self._gatherer.finish(unit, "unshard")  # another purpose than a forward's gather, so it never pairs with one
        try:
            yield
        finally:
            if not kept:
                self._gatherer.release(unit)

    @contextlib.contextmanager
    @collective_call("gathered")
    def gathered(self, write: bool) -> Iterator[None]:
        """Unshard all units within the block, on every rank, and keep the writes made there. Collective.

        Args:
            write: detect changes by value, so that writes invisible to torch are kept also.

        Raises:
            StateError: on every rank: ranks wrote different values.
        """
        with contextlib.ExitStack() as stack:
            for unit in self._units:
                stack.enter_context(self.whole(unit))
            before = {unit: unit_digests(unit) for unit in self._units if write}
            self.opened += 1
            try:
                yield
            finally:
                self.opened -= 1
            for unit in self._units:
                self._writes.look_closely(unit, before[unit]) if write else self._writes.look(unit)
        if any(self._world.exchange(self.written)):
            self.compare_written()

    def open(self, unit: Unit, name: str) -> None:
        """Open a guarded parameter to reads if it is unsharded between steps; raise a StateError if it is sharded."""
        self._restorer.check_here()
        if not unit.guarded:
            self._restorer.finish(unit)
            return
        call, line = find_torch_call()
        refuse_reader(call)
        resting = unit.plan.parameters
        why = f"keeps it on {resting.memory.value}" if resting.far else "shards it over the ranks"
        raise StateError(
            (call and f"{call} on ") + f"parameter {name}" + (line and f", called at {line}"),
            expected=f"to be read while unit {unit.name!r} computes",
            got=f"a read while it is {unit.parameter_state.value} (plan {unit.plan.name!r} {why})",
            do=_suggest_instead(call) + explain_strict_refusal(self._world.size, unit.strict),
        )

    def gather_states(self, flat: FlatParameter, own: Tensor | None) -> Tensor:
        """Return [n] float32: the all-gathered states shards of ``flat`` (zeros for ranks without ``own``)."""
        whole = torch.zeros(flat.layout.numel, device=self._world.device)
        shard = torch.zeros(flat.rests.states.numel, device=self._world.device) if own is None else own.to(whole.device)
        if not flat.rests.states.cut:
            return whole.copy_(shard)
        communicator = flat.rests.states.group.communicator("control")
        communicator.all_gather(whole, shard, tag="optimizer state").wait()
        return whole

    def whole_slot(self, flat: FlatParameter, i: int, values: Tensor) -> Tensor:
        """Return the full tensor of slot ``i`` from the unsharded ``values`` of its flat.

        Collective if the slot is a tensor-parallel part of a tensor.
        """
        slot, portion = flat.layout.slots[i], flat.portions[i]
        mine = values[slot.begin : slot.end].view(slot.shape)
        return mine if portion is None else gather_full_tensor(portion, self._mesh, mine)

    def check_here(self) -> None:
        """Raise a StateError if the model's training state is absent or incomplete."""
        self._restorer.check_here()

    # -- in shards -------------------------------------------------------------------------------------------------

    def bring_home(self, thoroughly: bool = False) -> None:
        """Wait for updates and R4, and reshard every unit as the plan requires between steps. Collective.

        Args:
            thoroughly: also check that every parameter is still a view of its flat.
        """
        for unit in self._units:
            self._restorer.finish(unit)
            self._gatherer.release(unit)
            if thoroughly:
                unit.check_views(thoroughly=True)

    def settle(self) -> None:
        """Reshard all units and wait for updates, so that masters and local shards may be accessed. Collective."""
        self.bring_home()
        self._lag.quiet()
        self.look_at_whole()

    def look_at_whole(self) -> None:
        """Find writes into units that stay unsharded. Sharded units are checked when they are released."""
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self._units:
                if not unit.guarded:
                    self._writes.look(unit)

    @property
    def written(self) -> bool:
        """Return whether this rank's program has written into parameters since the last comparison."""
        return bool(self._writes)

    def compare_written(self) -> None:
        """Compare the writes of all ranks; see :meth:`UserWrites.compare`. Collective."""
        self._writes.compare(self.whole)

    def refresh_masters(self) -> None:
        """Update masters from parameters that were written unsharded (``load_state_dict``)."""
        self._lag.drop()
        for unit in self._units:
            for flat in unit.trainable:
                drop_rounding_errors(flat.gradient)
                flat.refresh_master()

    def restore_parameters(self) -> None:
        """Run R4 at once after masters were written, so that parameters follow on every rank. Collective."""
        counted = self._mesh.restored.copy()
        for unit in self._units:
            self._restorer.start(unit)
            self._restorer.finish(unit)
        self._mesh.restored.clear()  # keep this traffic out of a step's count
        self._mesh.restored.update(counted)


def _iter_stored_values(origin: InitialValues, flat: FlatParameter, i: int) -> Iterator[tuple[int, Tensor]]:
    """Yield this rank's part of the stored values of slot ``i`` in pieces, as (first element in the flat, values).

    If the part is a column range, complete rows are read.
    """
    slot, portion, rests = flat.layout.slots[i], flat.portions[i], flat.rests.parameters
    if portion is None:
        begin, end = intersect_ranges((slot.begin, slot.end), rests.range)
        for start in range(begin, end, PIECE):
            stop = min(start + PIECE, end)
            yield start, origin.read(slot.name, start - slot.begin, stop - slot.begin)
        return
    for block in portion.blocks(PIECE):
        first, last = (slot.begin + at for at in portion.share_of(block))
        begin, end = intersect_ranges((first, last), rests.range)
        if begin < end and block.owner is None:
            yield first, portion.out_of(block, origin.read(slot.name, block.begin, block.end))
        elif begin < end:
            yield begin, origin.read(slot.name, block.begin + begin - first, block.begin + end - first)


def _broadcast_from_first(flat: FlatParameter, whole: Tensor) -> None:
    """Broadcast unsharded values of ``flat`` from the first of the ranks that hold the same elements. Collective."""
    flat.rests.alike.communicator("control").broadcast(whole, root=0, tag="weights").wait()
