"""The engine of one model: build and connect the parts that apply the four rules."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from npuzero.comm import Mesh, World
from npuzero.comm.watchdog.call_names import collective_call
from npuzero.comm.watchdog.frozen_parameters import FrozenParameters, record_frozen
from npuzero.config import Settings, read_environment
from npuzero.memory import MemorySpaces
from npuzero.plan import AXES, PIPE, STAGE, TO_HOST, Report
from npuzero.shard.build import agree_on_plan, build_units, get_stage_world
from npuzero.shard.gradients.input_digests import RepeatedBatch, SharedInputs
from npuzero.shard.gradients.reduce_scatter import GradientReducer
from npuzero.shard.gradients.vote_stages import StageVote
from npuzero.shard.layout.find_units import UnitRule, find_root_callers
from npuzero.shard.layout.mesh_axes import find_shared_axes
from npuzero.shard.layout.traffic_meter import CountingMesh, TrafficMeter
from npuzero.shard.layout.unit_plans import UnitPlans
from npuzero.shard.modules.module_to import watch_conversions
from npuzero.shard.modules.refuse_ddp import refuse_wrappers
from npuzero.shard.modules.sharded_tensor import in_backward
from npuzero.shard.offload.load_parameters import ParameterLoader
from npuzero.shard.offload.offloaded_states import OffloadedStates
from npuzero.shard.offload_model import ModelOffload
from npuzero.shard.parameters.all_gather import ParameterGatherer
from npuzero.shard.parameters.all_gather_updated import UpdatedParameterGatherer
from npuzero.shard.parameters.full_parameters import FullParameters
from npuzero.shard.parameters.user_writes import UserWrites
from npuzero.shard.state.claim import EngineReference, claim_unit, refused_copy_error
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.initial_values import InitialValues
from npuzero.shard.step.activation_offload import make_activation_hook
from npuzero.shard.step.autograd_hooks import AutogradHooks
from npuzero.shard.step.check_parameters import ParameterCheck
from npuzero.shard.step.early_update import EarlyUpdate
from npuzero.shard.step.forward_backward import ForwardBackward
from npuzero.shard.step.module_buffers import BufferSync
from npuzero.shard.step.nan_watch import NanOriginWatcher, NanWatch
from npuzero.shard.step.optimizer_update import OptimizerUpdate
from npuzero.shard.step.read_gradients import ModelGradients
from npuzero.shard.step.step_boundary import StepBoundary


class Engine:
    """Train one model under one plan on this rank; single units may have separate plans.

    Attributes:
        plan, world, settings, mesh, spaces: the model's plan, its ranks, its settings and memory spaces.
        alone: whether this is the only rank, so that collectives may run at any time (False in strict mode).
        units: the root unit first, then the remaining units in registration order.
        passes: forward and backward passes, driven by the hooks.
        boundary: the present gradients between backward and the update.
        gradients: clipping, norms and reads of gradients by the program.
        finite: the watch for inf and NaN.
        values: reads and writes of unsharded parameters.
        restorer: R4; it also refuses uses of a model with an incomplete training state.
        update: the optimizer update, between begin_update and end_update.
        early: updates that start inside backward.
        far: offloaded optimizer states.
        lag: the delayed update, if the plan delays updates.
        meter: bytes held and sent in a step.
        absence: temporary offload of the entire training state.

    Raises:
        ConfigError: the model cannot be sharded, or the ranks disagree on it.
        StateError: the model is sharded already.
    """

    @collective_call("zero")
    def __init__(
        self,
        model: nn.Module,
        plans: UnitPlans,
        ranks: World | Mesh,
        settings: Settings,
        rule: UnitRule,
        origin: InitialValues,
        buffers: str | None = None,
    ) -> None:
        world = get_stage_world(ranks)
        self.plan, self.world, self.settings = plans.model, world, settings
        strict = world.size == 1 and (settings.strict or read_environment().strict == "1")
        specs, own, shape = agree_on_plan(model, plans, settings, rule, ranks, origin, buffers)
        mesh = Mesh.of(ranks.world if isinstance(ranks, Mesh) else world, shape)
        self.alone = mesh.world.size == 1 and not strict
        self.mesh = CountingMesh(mesh)
        self.spaces = MemorySpaces(world.device, settings)
        self.meter = TrafficMeter(self.plan, self.mesh, self.spaces)
        self.units = build_units(specs, own, settings, self.mesh, strict)
        self._flats = [flat for unit in self.units for flat in unit.trainable]
        self._places = {id(p): (flat, i) for flat in self._flats for i, p in enumerate(flat.parameters)}

        self.far = OffloadedStates(self.units, self.spaces, settings)
        self.lag = self.far.lag
        writes = UserWrites(self.units, world, self.lag)
        self.restorer = UpdatedParameterGatherer()
        fetcher = ParameterLoader(self.units, self.far.file, self.spaces, self.far.stream.done, self.restorer.refuse)
        gatherer = ParameterGatherer(writes, fetcher, self.spaces)
        overlap = settings.overlaps_parameters
        self.update = OptimizerUpdate(
            self.units, self.restorer, self.far.stream, self.lag, settings.chunk_bytes, overlap
        )
        self.values = FullParameters(self.units, world, self.mesh, gatherer, self.restorer, writes, self.lag)
        # Up to here the model is unchanged, and all checks have raised on all ranks.
        reference = EngineReference(self)
        self.values.take_over(
            model, specs, origin, self.spaces, self.far.spread, lambda unit: claim_unit(reference, unit)
        )
        self.meter.settle = self.far.stream.moved
        self.meter.reset()  # bytes of the initial values belong to no step

        self.early = EarlyUpdate(self._flats, self.update, world.device, overlap and not self.lag)
        reducer = GradientReducer(self.units, self.spaces, settings.overlaps_gradients)
        reducer.reduced = self.early.reduced
        frozen = [p for unit in self.units for flat in unit.flats if not flat.trainable for p in flat.parameters]
        census = ParameterCheck(model, [p for flat in self._flats for p in flat.parameters], frozen)
        pipe = StageVote(self._flats, self.mesh, mesh.part((PIPE,)))
        self.boundary = StepBoundary(
            *(self.units, world, self.mesh, pipe, reducer, self.update, self.early, self.values, census),
            SharedInputs(mesh, find_shared_axes(model, specs, mesh.shape), RepeatedBatch(mesh)),
            ignore_unused=settings.ignore_unused_parameters,
        )
        self.gradients = ModelGradients(self.units, world, pipe, self.boundary, self.values, self.alone)
        everyone = self.mesh.communicator(AXES, "control")
        stage = self.mesh.index((PIPE,))
        self.finite = NanWatch(
            lambda: NanOriginWatcher(self.units, mesh.world, stage, everyone), self.boundary, self._show
        )
        self.passes = ForwardBackward(
            self.units,
            gatherer,
            reducer,
            self.restorer,
            self.boundary,
            self.finite,
            self.meter,
            BufferSync(buffers, self.mesh.communicator(STAGE, "control")) if buffers else None,
            settings.prefetch if settings.overlaps_parameters else 0,
            world.device.type,
        )
        self.absence = ModelOffload(
            self.units, self.spaces, self.values, self.update, reducer, self.restorer, self.passes
        )
        flats = [flat for unit in self.units for flat in unit.flats]
        around = make_activation_hook(self.plan.activations, self.spaces, world.device, flats, self.mesh)
        self._hooks = AutogradHooks(
            self.passes, self.units, find_root_callers(model, specs[0]), self.plan.precision.parameters, around
        )
        watch_conversions(model)
        refuse_wrappers()
        world.board.watch_model(self.list_frozen)

    def list_frozen(self) -> FrozenParameters:
        """Return the parameters that the program has frozen since the model was sharded."""
        slots = [
            (slot.name, parameter)
            for flat in self._flats
            for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True)
        ]
        digest = hashlib.sha256("\0".join(name for name, _ in slots).encode()).hexdigest()[:16]
        with torch._C.DisableTorchFunctionSubclass():
            return record_frozen(digest, [name for name, parameter in slots if not parameter.requires_grad])

    @property
    def device(self) -> torch.device:
        """Return this rank's compute device; parts of the training state may be offloaded from it."""
        return self.world.device

    def flats(self) -> list[FlatParameter]:
        """Return the trainable flat parameters, in order."""
        return self._flats

    def place(self, parameter: nn.Parameter) -> tuple[FlatParameter, int] | None:
        """Return the flat parameter and slot of a parameter of this model; None if it is frozen."""
        return self._places.get(id(parameter))

    def _show(self, watch: NanOriginWatcher | None) -> None:
        self._hooks.watch_finite(watch)

    def register_forward_method(self, module: nn.Module, name: str, plain: Callable[..., Any]) -> None:
        """Unshard parameters during ``module``'s method ``name`` (function ``plain``), as during its forward."""
        # Unshard only units that the method may read: around the module, or in it, and with parameters of the module.
        own = {id(parameter) for parameter in module.parameters()}
        around = []
        for unit in self.units:
            outer = unit.module()
            inside = outer is not None and any(each is module for each in outer.modules())
            if unit.guarded and inside and any(id(parameter) in own for parameter in unit.parameters()):
                around.append(unit)
        self._hooks.watch_method(around, module, name, plain)

    def report(self) -> Report:
        """Return the bytes held and sent in the last step; during ``offloaded()``, the bytes held now."""
        return self.meter.now({TO_HOST: self.absence.nbytes}) if self.absence.away else self.meter.report()

    # -- the step --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, worker: object) -> Iterator[None]:
        """Run a step of ``worker`` inside. If it raises, it is undone, or every later use of the model is refused.

        Raises:
            NpuZeroError: the update that has begun inside backward has failed, or belongs to another optimizer.
        """
        with self.early.step_begins(worker):
            try:
                yield
            except BaseException as error:
                self.update.fail(error)
                self.passes.step_fails()
                raise

    def begin_update(self, members: frozenset[int]) -> bool:
        """Prepare for the update of an optimizer; return False if there are no gradients. Collective.

        Args:
            members: ids of the optimizer's parameters in this model.
        """
        with self.update.before_step(members):
            self.values.bring_home(thoroughly=True)
            if self.boundary.agreed:  # else finish() checks for writes
                self.values.look_at_whole()
            some = self.boundary.finish()
        if some:
            self.gradients.warn_unscaled()
            self.boundary.begin_update(members)
            self.update.begin(members, self.boundary.used_slots)
        else:
            self._apply_pending()
        return some

    @collective_call("apply_pending")
    def apply_pending(self) -> None:
        """Apply the pending delayed update to the parameters, if there is one. Collective."""
        self.values.settle()
        self._apply_pending()

    def _apply_pending(self) -> None:
        if self.lag.pending:
            self.lag.land()
            self.values.restore_parameters()

    def end_update(self, members: frozenset[int]) -> None:
        """Run R4, and end the step of the optimizer that has ``members``."""
        self.update.end()
        self.early.step_ends()
        self.passes.step_ends()
        self.meter.step_ends()
        self.boundary.step_ends(members)

    def zero_gradients(self, members: Iterable[int]) -> None:
        """Mark gradients as zero, by ids of their parameters, including gradients that only other ranks have."""
        for flat, i in (self._places[key] for key in members):
            flat.gradient.zeroed.add(i)

    def forget_gradients(self, lend: bool) -> None:
        """Drop the gradients, for zero_grad().

        Args:
            lend: release the gradients' memory until the next backward pass.
        """
        self.passes.forget_backward()
        if not in_backward():
            self._hooks.forget_backward()
        self.update.proceed()
        # A NaN watcher may still read the gradients; offloaded gradients have no memory to release.
        if lend and self.finite.watching is None and not self.absence.away:
            self.boundary.lend_memory()

    def __deepcopy__(self, memo: object) -> Engine:
        raise refused_copy_error("copied")

    def __reduce__(self) -> str:
        raise refused_copy_error("pickled")
