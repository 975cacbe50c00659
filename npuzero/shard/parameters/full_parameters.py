"""The values of a model's parameters: the first ones, and how unsharded values go in and out."""

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
    """Return what to do in place of ``call``, a function of torch that read a parameter where it is sharded."""
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
    """Read and write the parameters of one model, unsharded or in shards; the collectives here run between steps.

    Attributes:
        opened: how many blocks of :meth:`gathered` are open.
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
        """Move every parameter into its flat, with the values of ``origin``, and guard what is sharded.

        Args:
            spaces: where parameters, gradients and states rest.
            far: gives what rests far of a flat's exact masters, and parameters that rest on a disk.
            claim: lets the parameters of a unit know whose they are; they may be read only from then on.
        """
        device = self._world.device
        first_values = partial(self._first_values, origin)
        origin.fill_buffers(model, device)
        for unit, spec in zip(self._units, specs, strict=True):
            origin.fill_unit(model, spec, device)
            for flat in unit.flats:
                # The resting shard is what others read: in R1 or, where parameters rest unsharded, in R4.
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
        """Read stored slots where they rest, in pieces; take rank 0's values for the others."""
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
        """Take whole tensors, one per slot, as the first rank has them. Collective."""
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
        """Replace parameters by unsharded tensors, keyed by ``id(parameter)``; rank 0's values count, and what is not
        there stays. Collective: the keys are of the same parameters on every rank.
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
        """Set buffers, of any dtype, to what they are on rank 0. Collective."""
        for buffer in buffers:
            raw = buffer.detach().clone().reshape(-1).view(torch.uint8)
            self._mesh.communicator(STAGE, "control").broadcast(raw, root=0, tag="buffers").wait()
            buffer.copy_(raw.view(buffer.dtype).view(buffer.shape))

    # -- out -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole(self, unit: Unit) -> Iterator[None]:
        """Unshard the parameters of ``unit`` inside, readable on every rank: as they rest, unless it computes with
        others just now. Collective.
        """
        self._restorer.finish(unit)
        kept = unit.parameter_state is ParameterState.WHOLE
        if unit.rounded and not kept:
            self._gatherer.release(unit)
        self._gatherer.finish(unit, "unshard")  # so that it does not meet a gather of a forward
        try:
            yield
        finally:
            if not kept:
                self._gatherer.release(unit)

    @contextlib.contextmanager
    @collective_call("gathered")
    def gathered(self, write: bool) -> Iterator[None]:
        """Unshard all units inside, on every rank; what is written there lasts. Collective.

        Args:
            write: take over whatever is changed, also what torch does not see written.

        Raises:
            StateError: on every rank: they wrote different values.
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
        """Let a guarded parameter be read where it rests unsharded; raise why not where it is sharded."""
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
        """Return [n] float32: every rank's states shard of ``flat`` side by side (zeros for a rank without)."""
        whole = torch.zeros(flat.layout.numel, device=self._world.device)
        shard = torch.zeros(flat.rests.states.numel, device=self._world.device) if own is None else own.to(whole.device)
        if not flat.rests.states.cut:
            return whole.copy_(shard)
        communicator = flat.rests.states.group.communicator("control")
        communicator.all_gather(whole, shard, tag="optimizer state").wait()
        return whole

    def whole_slot(self, flat: FlatParameter, i: int, values: Tensor) -> Tensor:
        """Return the tensor that slot ``i`` is, or is a part of, among the unsharded ``values`` of its flat.

        Collective where it is cut.
        """
        slot, portion = flat.layout.slots[i], flat.portions[i]
        mine = values[slot.begin : slot.end].view(slot.shape)
        return mine if portion is None else gather_full_tensor(portion, self._mesh, mine)

    def check_here(self) -> None:
        """Raise a StateError where the model's training state is absent."""
        self._restorer.check_here()

    # -- as they lie -----------------------------------------------------------------------------------------------

    def bring_home(self, thoroughly: bool = False) -> None:
        """Wait for what is under way and release what the plan does not keep unsharded. Collective.

        Args:
            thoroughly: also see that every parameter still lies in its flat.
        """
        for unit in self._units:
            self._restorer.finish(unit)
            self._gatherer.release(unit)
            if thoroughly:
                unit.check_views(thoroughly=True)

    def settle(self) -> None:
        """Bring all home, so that masters and resting parameters may be read and written. Collective."""
        self.bring_home()
        self._lag.quiet()
        self.look_at_whole()

    def look_at_whole(self) -> None:
        """Look at what was written into units that stay unsharded; others were looked at when released."""
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self._units:
                if not unit.guarded:
                    self._writes.look(unit)

    @property
    def written(self) -> bool:
        """Return whether this rank's program has written into parameters since the ranks compared."""
        return bool(self._writes)

    def compare_written(self) -> None:
        """Have all ranks compare what any of them wrote; see :meth:`UserWrites.compare`. Collective."""
        self._writes.compare(self.whole)

    def refresh_masters(self) -> None:
        """Update masters from parameters that somebody wrote unsharded (``load_state_dict``)."""
        self._lag.drop()
        for unit in self._units:
            for flat in unit.trainable:
                drop_rounding_errors(flat.gradient)
                flat.refresh_master()

    def restore_parameters(self) -> None:
        """Run R4 at once: masters were written, and every rank's resting parameters follow. Collective."""
        counted = self._mesh.restored.copy()
        for unit in self._units:
            self._restorer.start(unit)
            self._restorer.finish(unit)
        self._mesh.restored.clear()  # these are no step's
        self._mesh.restored.update(counted)


def _iter_stored_values(origin: InitialValues, flat: FlatParameter, i: int) -> Iterator[tuple[int, Tensor]]:
    """Yield what is stored of slot ``i`` and rests here, in pieces: the element of the flat that a piece begins with,
    and its values.

    Of a part that is no range of what is stored, but some of each row, rows are read whole.
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
    """Make unsharded values of ``flat`` what they are on the first rank that has the same elements. Collective."""
    flat.rests.alike.communicator("control").broadcast(whole, root=0, tag="weights").wait()
