"""The engine of one model: it owns the units, listens to the hooks, and applies the four rules."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from npuzero import observe
from npuzero.comm import Mesh, World
from npuzero.config import Settings
from npuzero.errors import StateError
from npuzero.memory import Spaces
from npuzero.plan import AXES, DIGEST_BITS, Memory, Plan, Report, sent_by_verb
from npuzero.shard.accord import Accord, Words
from npuzero.shard.buffers import Buffers
from npuzero.shard.build import agree, build_units
from npuzero.shard.census import Census
from npuzero.shard.conversion import watch_conversions
from npuzero.shard.counting import CountingMesh
from npuzero.shard.discover import UnitRule, UnitSpec, doors
from npuzero.shard.finite import Watch
from npuzero.shard.gather import Gatherer
from npuzero.shard.gradients import Gradients
from npuzero.shard.guard import INSTEAD, in_backward
from npuzero.shard.hooks import Hooks, second_derivatives
from npuzero.shard.layout import overlap
from npuzero.shard.origin import Origin
from npuzero.shard.prefetch import Trace
from npuzero.shard.reduce import Reducer
from npuzero.shard.restore import Restorer
from npuzero.shard.unit import Flat, ParameterState, Unit
from npuzero.shard.wrappers import check_unwrapped, refuse_wrappers
from npuzero.shard.writes import Writes, digests

#: Elements that are read, or sent to be written, at once.
PIECE = 2**20

# The gradients of a flat, from which on their memory is lent between steps: moving less is not worth the calls.
_LENT_BYTES = 2**20


class Engine:
    """One model under one plan on this rank.

    Attributes:
        units: the root unit first, then the others in the order they are registered.
        plan, world, settings, mesh, space: what it was made with.
        gradient_scale: [1] float32 on the device: what gradients are multiplied by at the update (clipping, unscaling).
        skip: [1] float32 on the device, or None: where it is not zero, the present step changes nothing.
        accord: what all ranks must say alike.

    Raises:
        ConfigError: the model cannot be cut, or the ranks disagree on it.
        StateError: it is cut already.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        world: World,
        settings: Settings,
        rule: UnitRule,
        origin: Origin,
        buffers: str | None = None,
    ) -> None:
        self.plan = plan
        self.world = world
        self.settings = settings
        specs, shape = agree(model, plan, settings, rule, world, origin, buffers)
        self.mesh = CountingMesh(Mesh(world, shape.local))
        self.spaces = Spaces(world.device)
        self.space = self.spaces[Memory.DEVICE]
        self.units = build_units(specs, plan, settings, self.mesh)
        self.gradient_scale = torch.ones(1, device=world.device)
        self.skip: Tensor | None = None
        self._writes = Writes(self.units, world, self.whole)
        self._gatherer = Gatherer(self.mesh, self._writes)
        self._reducer = Reducer(self.units, plan, self.mesh, self.space, settings.overlaps_gradients)
        self._restorer = Restorer(self.mesh, plan)
        self._buffers = Buffers(buffers, self.mesh.communicator(AXES, "control")) if buffers else None
        self._trace = Trace()
        self._prefetch = settings.prefetch if settings.overlaps_parameters else 0
        self._flats = [flat for unit in self.units for flat in unit.trainable]
        self.accord = Accord(self._flats, world)
        self._places = {id(p): (flat, i) for flat in self._flats for i, p in enumerate(flat.parameters)}
        frozen = [p for unit in self.units for flat in unit.flats if not flat.trainable for p in flat.parameters]
        self._census = Census(model, [p for flat in self._flats for p in flat.parameters], frozen)
        self._gradients = Gradients(self._flats, plan, self.mesh, world.device)
        self._used: dict[Flat, list[bool]] | None = None  # per slot, once agreed on for the present gradients
        self._scaled = False  # gradient_scale is not 1
        self._summed = False  # the present gradients are over all ranks
        self._brought = False  # a backward pass of this rank is in what the next step sums, whatever was dropped of it
        self._dropped = False  # the user has dropped some of the present gradients, while others stay
        self._reducing = False
        self._no_sync = False
        # Backward passes of this step so far, and of the last step: R3 overlaps with the last one, if it is foreseen.
        self._passes = 0
        self._expected_passes = 0
        self._step_begun = False
        self._last: Report | None = None
        self._watch: Watch | None = None
        self._take_over(model, specs, origin)
        self._hooks = Hooks(self, self.units, doors(model, specs[0]), plan.precision.parameters)
        watch_conversions(model)
        refuse_wrappers(model)

    @torch.no_grad()
    def _take_over(self, model: nn.Module, specs: Sequence[UnitSpec], origin: Origin) -> None:
        """Move every parameter into its flat, with the values of ``origin``, and guard what is cut."""
        cut = self.mesh.size(self.plan.states.axes) > 1
        source = self.mesh.communicator(self.plan.states.axes, "gather").buffer if cut else None
        first_values, reference = partial(self._first_values, origin), EngineReference(self)
        origin.fill_buffers(model, self.space.device)
        for unit, spec in zip(self.units, specs, strict=True):
            origin.fill_unit(model, spec, self.space.device)
            for flat in unit.flats:
                flat.materialize(self.space, source, first_values)
                for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
                    parameter._npuzero_engine = reference  # type: ignore[attr-defined]
                    parameter._npuzero_open = _opener(self, unit, slot.name)  # type: ignore[attr-defined]
                for i, marker in enumerate(flat.markers):
                    marker.whole = _reader(reference, flat, i)
            if unit.cut:
                unit.close()
        self.share(model.buffers())
        self.mesh.control.clear()
        self.space.reset_peak()

    def _first_values(self, origin: Origin, flat: Flat) -> None:
        """Slots that are stored are read where they rest, in pieces; the others have rank 0's values."""
        if not any(origin.has(slot.name) for slot in flat.layout.slots):
            flat.fill([parameter.detach() for parameter in flat.parameters], self._from_rank_0)
            return
        for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
            if origin.has(slot.name):
                begin, end = overlap((slot.begin, slot.end), flat.shard("parameters"))
                for start in range(begin, end, PIECE):
                    stop = min(start + PIECE, end)
                    flat.put(start, origin.read(slot.name, start - slot.begin, stop - slot.begin))
            else:
                exact = parameter.detach().reshape(-1).to(torch.float32, copy=True)
                self._from_rank_0(exact)
                flat.put(slot.begin, exact)

    def share(self, buffers: Iterable[Tensor]) -> None:
        """Buffers, of any dtype, become what they are on rank 0. Collective."""
        for buffer in buffers:
            raw = buffer.detach().clone().reshape(-1).view(torch.uint8)
            self._from_rank_0(raw)
            buffer.copy_(raw.view(buffer.dtype).view(buffer.shape))

    def _from_rank_0(self, whole: Tensor) -> None:
        self.mesh.communicator(AXES, "control").broadcast(whole, root=0, tag="weights").wait()

    # -- forward and backward (called by the hooks) ----------------------------------------------------------------

    def forward_begins(self, unit: Unit) -> None:
        fresh = not in_backward()
        if unit.index == 0 and fresh:
            check_unwrapped()
            self.look_finite()
            self.forget_backward()
            self._trace.begin()
            if torch.is_grad_enabled():
                self._begin_step()
            root = unit.module()
            if self._buffers is not None and root is not None:
                self._buffers.forward_begins(root)
        self._restorer.finish(unit)
        if not unit.cut:
            unit.check_views()
        else:
            self._gatherer.finish(unit)
            if fresh:
                self._trace.record(unit.index)
                self._start_gathers(self._trace.after(unit.index, self._prefetch), unit)

    def forward_ends(self, unit: Unit, keep_whole: bool, backward_expected: bool) -> None:
        unit.backward_expected = backward_expected
        unit.opaque = unit.opaque or keep_whole
        if unit.cut and torch.is_autocast_enabled(self.world.device.type):
            torch.clear_autocast_cache()  # it would keep low-precision copies of what is released here
        if not unit.cut or keep_whole or in_backward():
            return
        if backward_expected:
            self._gatherer.hold(unit)
        else:
            self._gatherer.release(unit)

    def backward_reaches(self, unit: Unit) -> None:
        if not unit.cut:
            return
        if torch.is_grad_enabled():
            raise second_derivatives(unit, self.plan)
        unit.computing += 1
        # Again, after all its gradients have come: reentrant checkpointing, and who knows whether for the last time.
        unit.opaque = unit.opaque or (self._reducing and not unit.missing and bool(unit.trainable))
        self._gatherer.finish(unit)
        self._start_gathers(self._trace.before(unit.index, self._prefetch), unit)

    def backward_leaves(self, unit: Unit) -> None:
        unit.computing -= 1
        if unit.computing == 0 and self._reducing and not unit.missing and not unit.opaque:
            self._gatherer.release(unit)

    def gradient_arrives(self, unit: Unit, flat: Flat, i: int, gradient: Tensor) -> None:
        if not self._reducing:
            self._begin_backward()
        if self._reducer.arrive(flat, i, gradient):
            unit.missing.discard(flat)
        if unit.cut and not unit.missing and not unit.opaque and (not unit.has_frozen or unit.computing == 0):
            self._gatherer.release(unit)

    def backward_ends(self) -> None:
        if self._reducing:
            self._reducer.end()
            self._reducing = False
        for unit in self.units:
            unit.computing, unit.opaque = 0, False
            self._gatherer.release(unit)

    def _start_gathers(self, indices: list[int], current: Unit) -> None:
        for index in indices:
            unit = self.units[index]
            done = self._reducing and unit.trainable and not unit.missing
            if unit.cut and not done and (unit.backward_expected or not in_backward()):
                observe.instant("prefetch", unit.name)
                self._restorer.finish(unit)
                self._gatherer.start(unit)

    def _begin_backward(self) -> None:
        self._reducing = True
        self._passes += 1
        present = self._present()
        if not _any(present):  # whoever zeroed the gradients, and however
            self._forget_gradients()
        elif self._scaled:  # more gradients come after clipping: scale what there is, as torch's clipping would have
            self._apply_scale()
        self._clear_dropped(present)
        self._used = None
        self._gradients.forget()
        self._summed = False
        self._brought = True
        self._reducer.synchronizing = not self._no_sync
        self._reducer.at_boundary = self._passes == self._expected_passes
        for unit in self.units:
            unit.missing = set(unit.trainable)
        self._reducer.begin()

    def forget_backward(self) -> None:
        """A backward pass that raised has no end: its gradients are in part there, and zero_grad() drops them."""
        if not in_backward():
            self._reducing = False
            self._reducer.begin()
            self._hooks.forget_backward()

    def forget_step(self) -> None:
        """zero_grad() was called: what the last step's gradients took may be used for other things until the next.

        What is under way stays, until the next backward pass sees that nobody wants it; and what is watched, which may
        yet be asked where it stopped being finite.
        """
        large = [flat for flat in self._flats if flat.gradient.nbytes >= _LENT_BYTES]
        done = self._used is None and self._watch is None and self._reducer.idle
        if large and done and not _any(self._present()):
            self._forget_gradients()
            for flat in large:
                flat.gradient_memory.release()

    def register_forward_method(self, module: nn.Module, name: str, plain: Callable[..., Any]) -> None:
        """Treat ``module``'s method ``name``, which is ``plain``, as its forward: what that may read is whole."""
        own = {id(parameter) for parameter in module.parameters()}
        around = []
        for unit in self.units:
            outer = unit.module()
            inside = outer is not None and any(each is module for each in outer.modules())
            if unit.cut and inside and any(id(parameter) in own for parameter in unit.parameters()):
                around.append(unit)
        self._hooks.watch_method(around, module, name, plain)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up on this rank alone; the next one outside (or the step) reduces them."""
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    # -- the step --------------------------------------------------------------------------------------------------

    def flats(self) -> list[Flat]:
        """The trainable flats, in order."""
        return self._flats

    def place(self, parameter: nn.Parameter) -> tuple[Flat, int] | None:
        """The flat and slot of a parameter of this model; None for a frozen one."""
        return self._places.get(id(parameter))

    def gather_states(self, flat: Flat, own: Tensor | None) -> Tensor:
        """[n] float32: every rank's states shard of ``flat`` side by side (zeros for a rank that has none)."""
        whole = torch.zeros(flat.layout.numel, device=self.space.device)
        shard = torch.zeros(flat.master.numel(), device=self.space.device) if own is None else own
        if self.mesh.size(self.plan.states.axes) == 1:
            return whole.copy_(shard)
        communicator = self.mesh.communicator(self.plan.states.axes, "control")
        communicator.all_gather(whole, shard, tag="optimizer state").wait()
        return whole

    def refresh_masters(self) -> None:
        """Somebody wrote into whole parameters (``load_state_dict``): masters follow."""
        for flat in self.flats():
            flat.refresh_master()

    def used(self, flat: Flat) -> list[bool]:
        """Per slot: has any rank a gradient in the present step (after :meth:`finish_gradients`)?"""
        assert self._used is not None
        return self._used[flat]

    def finish_gradients(self) -> bool:
        """R3: bring every gradient to READY on its owner. Collective; nothing to do the second time.

        Returns:
            False where no rank has any gradient (torch's optimizers then do nothing).
        """
        if self._reducing:
            raise StateError(
                "npuzero step",
                expected="a call after backward() has returned",
                got="a call inside a backward pass, or after one that raised",
                do="Call it after loss.backward(); after an exception call zero_grad() first.",
            )
        if self._used is None:
            root = self.units[0].module()
            if root is None:
                raise deleted("optimizer")
            self._census.check(root)
            present = self._present()
            self._clear_dropped(present)
            self._look_at_whole()
            if not _any(present) and not self._brought:
                self._forget_gradients()
                self._meet_in_gathers()
            # Before the vote: a rank that had no backward pass owes the others, who may be waiting, its zeros.
            self._reducer.finish()
            self._used = self._agree(present)
            with torch._C.DisableTorchFunctionSubclass():
                for flat, used in self._used.items():
                    for i, (anywhere, here) in enumerate(zip(used, present[flat], strict=True)):
                        if anywhere and not here:  # by another rank: then it has a gradient on all, as under DDP
                            flat.accumulated[i] = True
                            flat.parameters[i].grad = flat.markers[i]
        else:  # the program may have dropped some since, as it does on every rank
            present = self._present()
            if present != self._used:
                self._used = present
                self._gradients.forget()
                self._clear_dropped(present)
        self._summed = True
        some = _any(self._used)
        self._brought = self._brought and some
        return some

    def _clear_dropped(self, present: Mapping[Flat, list[bool]]) -> None:
        """Zero what the buffers hold of gradients that the user dropped while others stay."""
        for flat, here in present.items():
            if flat.accumulated != here:
                for i in flat.slots:
                    if flat.accumulated[i] and not here[i]:
                        self._reducer.drain()
                        flat.clear(i)
                        self._dropped = True

    def _meet_in_gathers(self) -> None:
        """Ranks that gather for a backward pass would wait for ever: let the two meet, which is an error at once."""
        if self.mesh.size(self.plan.parameters.axes) > 1:
            nothing = torch.empty(0, device=self.space.device)
            communicator = self.mesh.communicator(self.plan.parameters.axes, "gather")
            communicator.all_reduce(nothing, tag="a step without a backward pass").wait()

    def _present(self) -> dict[Flat, list[bool]]:
        """Per slot: does this rank have a gradient?"""
        with torch._C.DisableTorchFunctionSubclass():
            return {flat: flat.present() for flat in self._flats}

    def _forget_gradients(self) -> None:
        self._reducer.reset()
        self._dropped = self._summed = self._brought = False
        self.gradient_scale.fill_(1.0)
        self._scaled = False
        self.skip = None

    def _agree(self, present: dict[Flat, list[bool]]) -> dict[Flat, list[bool]]:
        """True where any rank says True; what any has dropped, and no rank has, is gone.

        Where ranks follow different rules, or any has written into parameters, all compare.
        """
        if self.mesh.shape.world == 1 or not present:
            return present
        flags = [flag for flat in self._flats for flag in present[flat]]
        ballot = [*flags, self._dropped, bool(self._writes), *self.accord.ballot(present)]
        votes = torch.tensor(ballot, dtype=torch.float32)
        self.mesh.host().all_reduce(votes, tag="parameters in use").wait()
        *used, dropped, written = (sums := votes.tolist())[:-DIGEST_BITS]
        self.accord.look(sums[-DIGEST_BITS:])
        if written:
            self._writes.compare()
        votes_of = iter(used)
        agreed = {flat: [next(votes_of) > 0 for _ in flat.slots] for flat in self._flats}
        if dropped:  # by whoever had brought it to the others
            for flat, i in self._places.values():
                if not agreed[flat][i]:
                    flat.clear(i)
            self._dropped = False
        return agreed

    @_disable_dynamo
    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Global norm of the gradients; has them scaled at the update so that it is at most ``max_norm``."""
        self.accord.call("clip_grad_norm_", {"max_norm": max_norm, "norm_type": norm_type})
        total = torch.zeros((), device=self.space.device)
        if self.finish_gradients():
            total = (self._gradients.norm(norm_type) * self.gradient_scale[0]).float()
            if error_if_nonfinite and not total.isfinite().item():
                raise StateError(
                    "clip_grad_norm_",
                    expected="finite gradients",
                    got=f"a norm of {total.item()}, here from units {self._nonfinite_units()}",
                    do="Lower the learning rate or look at the loss; zero_grad() drops these gradients.",
                )
            self._scale_gradients((max_norm / (total + 1e-6)).clamp(max=1.0))
        return total

    @_disable_dynamo
    def clip_values(self, limit: float) -> None:
        """Bring every element of the gradients into ``[-limit, limit]``. Collective."""
        self.accord.call("clip_grad_value_", {"clip_value": limit})
        if self.finish_gradients():
            self._apply_scale()
            for flat in self._flats:
                flat.own_gradient.clamp_(-limit, limit)
            self._gradients.forget()

    @_disable_dynamo
    def gradient_norms(self, p: float) -> dict[str, float]:
        """By name the p-norm of each whole gradient that any rank has. Collective."""
        self.accord.call("grad_norms", {"norm_type": p})
        if not self.finish_gradients():
            return {}
        places = [(flat, i) for flat, i in self._places.values() if self.used(flat)[i]]
        norms = (self._gradients.norms(places, p) * self.gradient_scale[0]).float()
        return dict(zip((flat.layout.slots[i].name for flat, i in places), norms.tolist(), strict=True))

    def full_gradient(self, flat: Flat, i: int) -> Tensor | None:
        """The whole gradient of a slot, float32; None where no rank has any. Collective."""
        if not self.finish_gradients() or not self.used(flat)[i]:
            return None
        slot = flat.layout.slots[i]
        whole = self.gather_states(flat, flat.own_gradient)[slot.begin : slot.end].view(slot.shape)
        return whole * self.gradient_scale[0]

    def read_gradient(self, flat: Flat, i: int) -> Tensor:
        """What ``p.grad`` is read as where the plan keeps it whole: a copy, float32. Not collective.

        Raises:
            StateError: no rank has all of it, or the ranks have not summed it yet.
        """
        if self.world.size == 1:
            self.finish_gradients()
        slot = flat.layout.slots[i]
        if not self._gradients.whole or not self._summed:
            cut = f"plan {self.plan.name!r}, which leaves each rank a part of the sum"
            raise StateError(
                f"reading the gradient of {slot.name}",
                expected="a gradient that this rank has whole, after the ranks have summed it",
                got="one that is not summed yet" if self._gradients.whole else cut,
                do="To look at it call npuzero.full_gradient(parameter) or npuzero.grad_norms(model) on every rank; "
                f"to train use {INSTEAD}.",
            )
        return flat.own_gradient[flat.own_slots[i]].view(slot.shape) * self.gradient_scale[0]

    def unscale(self, inverse: Tensor, rules: Words, parameters: Container[int]) -> Tensor | None:
        """Multiply the gradients of some parameters by ``inverse`` (float32, one element). Collective.

        Where these are all of the model's it happens at the update.

        Args:
            rules: what the loss scaler was told, the same on every rank.
            parameters: the ids of those that the optimizer at hand has.

        Returns:
            () float32 on the device, not zero where an element of these gradients is inf or NaN, on any rank; None
            where no rank has any.
        """
        self.accord.call("LossScaler", rules)
        if not self.finish_gradients():
            return None
        if all(key in parameters for key in self._places):
            self._scale_gradients(inverse)
            return (self._gradients.sum()[1] != 0).float()
        chosen = [place for key, place in self._places.items() if key in parameters]
        if not any(self.used(flat)[i] for flat, i in chosen):
            return None
        bad = self._gradients.nonfinite(chosen)
        for flat, i in chosen:
            flat.own_gradient[flat.own_slots[i]].mul_(inverse)
        self._gradients.forget()
        return (bad != 0).float()

    def skip_where(self, flag: Tensor) -> None:
        """Have the present step change nothing where ``flag`` ([1] float32) is not zero, or was before."""
        self.skip = flag if self.skip is None else torch.maximum(self.skip, flag)

    def watch(self, on: bool) -> None:
        """See what stops being finite, and where; or stop watching."""
        everyone = self.mesh.communicator(AXES, "control")
        self._watch = Watch(self.units, self.world, everyone) if on else None
        self._hooks.watch_finite(self._watch)

    @_disable_dynamo
    def check_finite(self, loss: Tensor | None, counts: Tensor | None) -> None:
        """Skip the present step where anything in it is inf or NaN; :meth:`look_finite` says. Collective.

        ``counts``: () bool, whether gradients do; None: yes.
        """
        self.look_finite()
        self.accord.call("FiniteGuard.check", {})
        if self._watch is not None:
            some = self.finish_gradients()
            bad = self._gradients.sum()[1] if some else torch.zeros((), device=self.space.device)
            self.skip_where(self._watch.conclude(loss, bad if counts is None else bad * counts))

    def look_finite(self) -> None:
        """Raises NonFiniteError where the last step checked was bad. Collective."""
        if self._watch is not None:
            self._watch.look()

    def _scale_gradients(self, by: Tensor) -> None:
        self.gradient_scale.mul_(by)
        self._scaled = True

    def _apply_scale(self) -> None:
        for flat in self._flats:
            flat.own_gradient.mul_(self.gradient_scale)
        self.gradient_scale.fill_(1.0)
        self._scaled = False

    def _nonfinite_units(self) -> list[str]:
        return [u.name for u in self.units if any(not flat.own_gradient.isfinite().all() for flat in u.trainable)]

    def begin_update(self) -> bool:
        """Before an optimizer writes masters and parameters; False where there is nothing to do. Collective."""
        for unit in self.units:
            self._restorer.finish(unit)
            self._gatherer.release(unit)
            unit.check_views(thoroughly=True)
        if self._used is not None:  # else it is about to be looked at
            self._look_at_whole()
        return self.finish_gradients()

    def _look_at_whole(self) -> None:
        """What was written into units that stay whole; into others, it was looked at as they were released."""
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self.units:
                if not unit.cut:
                    self._writes.look(unit)

    def end_update(self) -> None:
        """R4, and the end of the step."""
        for unit in self.units:
            self._restorer.start(unit)
            if not self.settings.overlaps_parameters:
                self._restorer.finish(unit)
        self._expected_passes, self._passes = self._passes or self._expected_passes, 0
        sent = sent_by_verb(self.mesh.sent, sum(self.mesh.control.values()))
        self._last = Report({Memory.DEVICE: dict(self.space.peak)}, sent, self.plan, self.mesh.shape.world)
        self._step_begun = False
        self._used = self.skip = None
        self._brought = False
        self._gradients.forget()

    def _begin_step(self) -> None:
        if not self._step_begun:
            self._step_begun = True
            self.mesh.sent.clear()
            self.mesh.control.clear()
            self.space.reset_peak()

    # -- looking at it ---------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """What the last step held and sent on this rank.

        Raises:
            StateError: no step has been taken.
        """
        if self._last is None:
            raise StateError(
                "npuzero.report",
                expected="a model that has taken a step",
                got="none yet",
                do="Call it after optimizer.step(); npuzero.predict says what to expect before.",
            )
        return self._last

    @contextlib.contextmanager
    def whole(self, unit: Unit) -> Iterator[None]:
        """The parameters of ``unit`` whole and readable, on every rank. Collective."""
        self._restorer.finish(unit)
        kept = unit.parameter_state is ParameterState.WHOLE
        self._gatherer.finish(unit)
        try:
            yield
        finally:
            if not kept:
                self._gatherer.release(unit)

    @contextlib.contextmanager
    def gathered(self, write: bool) -> Iterator[None]:
        """All units whole, on every rank; what is written inside lasts. Collective.

        Args:
            write: take over whatever is changed, also what torch does not see written.

        Raises:
            StateError: on every rank: they wrote different values.
        """
        with contextlib.ExitStack() as stack:
            for unit in self.units:
                stack.enter_context(self.whole(unit))
            before = {unit: digests(unit) for unit in self.units if write}
            yield
            for unit in self.units:
                self._writes.look_closely(unit, before[unit]) if write else self._writes.look(unit)
        if any(self.world.exchange(bool(self._writes))):
            self._writes.compare()

    def open(self, unit: Unit, name: str) -> None:
        """Somebody reads a guarded parameter: let them where it rests whole, say why not where it is cut."""
        if not unit.cut:
            self._restorer.finish(unit)
            return
        raise StateError(
            f"parameter {name}",
            expected=f"to be read while unit {unit.name!r} computes",
            got=f"a read while it is {unit.parameter_state.value} (plan {self.plan.name!r} cuts it over the ranks)",
            do="Use npuzero.full_state_dict(model), or `with npuzero.gathered(model):` on every rank; if a forward "
            "reads it, run that module through the model's forward or name it in units=; if a method does, see "
            "npuzero.register_forward_method. "
            "DistributedDataParallel, FSDP and the like do not belong around it.",
        )

    def load(self, values: Mapping[int, Tensor]) -> None:
        """Replace parameters by whole tensors, keyed by ``id(parameter)``; rank 0's values count. Collective."""
        self.settle()
        for unit in self.units:
            for flat in unit.flats:
                flat.fill([values[id(p)] for p in flat.parameters], self._from_rank_0)

    def settle(self) -> None:
        """Waits for what is under way, so that masters and resting parameters may be read and written. Collective."""
        for unit in self.units:
            self._restorer.finish(unit)
            self._gatherer.release(unit)
        self._look_at_whole()

    def restore_parameters(self) -> None:
        """R4, at once: masters were written, and every rank's resting parameters follow. Collective."""
        for unit in self.units:
            self._restorer.start(unit)
            self._restorer.finish(unit)

    def __deepcopy__(self, memo: object) -> Engine:
        raise self.uncopied("copied")

    def __reduce__(self) -> str:
        raise self.uncopied("pickled")

    def uncopied(self, verb: str) -> StateError:
        return StateError(
            "a model made by npuzero.zero()",
            expected=f"not to be {verb}: each rank holds a part of it",
            got="copy or pickle of it, or of its optimizer",
            do="Use npuzero.full_state_dict(model) and load it into a plain model.",
        )


def engine_of(model: nn.Module) -> Engine:
    """The engine of a model made by :func:`npuzero.zero`.

    Raises:
        StateError: there is none.
    """
    engine = getattr(model, "_npuzero", None)
    if engine is None:
        raise not_cut(model)
    return engine  # type: ignore[no-any-return]


def not_cut(model: nn.Module) -> StateError:
    """``model`` is a plain module, where one with an engine is needed."""
    return StateError(
        type(model).__name__,
        expected="a model made by npuzero.zero()",
        got="a plain module",
        do="Call npuzero.zero(model) first, and pass that same (outermost) module here.",
    )


def engine_behind(parameter: nn.Parameter) -> Engine | None:
    """The engine whose model owns ``parameter``; None for a plain one.

    Raises:
        StateError: that model is gone.
    """
    reference = parameter.__dict__.get("_npuzero_engine")
    if reference is None:
        return None
    engine = reference()
    if engine is None:
        raise deleted("optimizer")
    return cast(Engine, engine)


def owners(parameters: Iterable[nn.Parameter]) -> tuple[list[Engine], list[nn.Parameter]]:
    """The engines whose models own ``parameters``, each once, in order; and the plain ones among the parameters.

    Raises:
        StateError: one of those models is gone.
    """
    # Several times a step, so one parameter must cost next to nothing: an engine's own share one reference to it.
    seen: dict[int, nn.Parameter] = {}
    plain = []
    for parameter in parameters:
        reference = parameter.__dict__.get("_npuzero_engine")
        if reference is None:
            plain.append(parameter)
        else:
            seen[id(reference)] = parameter
    return [engine for engine in map(engine_behind, seen.values()) if engine is not None], plain


def _any(flags: Mapping[Flat, list[bool]]) -> bool:
    return any(map(any, flags.values()))


def deleted(subject: str) -> StateError:
    """Somebody holds parameters of a model that is gone."""
    return StateError(
        subject,
        expected="parameters of a living model",
        got="parameters whose model was deleted",
        do="Keep the model, and build the optimizer over the parameters of the one that is trained.",
    )


class EngineReference(weakref.ref[Engine]):
    """What a parameter knows of its engine; it keeps the model from being pickled in part."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        engine = self()
        raise engine.uncopied("pickled") if engine else TypeError("cannot pickle a parameter of a deleted model")


def _reader(engine_of: EngineReference, flat: Flat, i: int) -> Callable[[], Tensor]:
    flat_of, name = weakref.ref(flat), flat.layout.slots[i].name

    def read() -> Tensor:
        engine, flat = engine_of(), flat_of()
        if engine is None or flat is None:
            raise deleted(f"gradient of {name}")
        return engine.read_gradient(flat, i)

    return read


def _opener(engine: Engine, unit: Unit, name: str) -> Callable[[], None]:
    its_engine, its_unit = weakref.ref(engine), weakref.ref(unit)

    def open_() -> None:
        engine, unit = its_engine(), its_unit()
        if engine is None or unit is None:
            raise deleted(f"parameter {name}")
        engine.open(unit, name)

    return open_
