"""Forward and backward passes: unshard and reshard units, and pass gradients on, at each event of the hooks.

The hooks call it (:class:`npuzero.shard.step.autograd_hooks.HookListener`), in the order documented there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from npuzero import observe
from npuzero.comm.watchdog.call_names import named_call
from npuzero.errors import ConfigError, StateError
from npuzero.shard.gradients.reduce_scatter import GradientReducer
from npuzero.shard.layout.traffic_meter import TrafficMeter
from npuzero.shard.modules.refuse_ddp import check_unwrapped
from npuzero.shard.modules.sharded_tensor import in_backward
from npuzero.shard.parameters.all_gather import ParameterGatherer
from npuzero.shard.parameters.all_gather_updated import UpdatedParameterGatherer
from npuzero.shard.parameters.model_parts import Group, ModelPart, find_part_indices, reduction_order
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.life_cycle import ParameterState
from npuzero.shard.state.micro_batch_gradient import BackwardRole
from npuzero.shard.state.unit import Unit
from npuzero.shard.step.autograd_hooks import second_derivative_error
from npuzero.shard.step.module_buffers import BufferSync
from npuzero.shard.step.nan_watch import NanWatch
from npuzero.shard.step.step_boundary import StepBoundary


class ForwardBackward:
    """Run the passes of one model's steps.

    Args:
        prefetch: number of units to prefetch.
        device: type of the device, which selects the autocast state.

    Attributes:
        inside: indices of the units in forward.
        board: records the passes that this rank left by an exception.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts that act in a pass, made and wired by the engine
        self,
        units: Sequence[Unit],
        gatherer: ParameterGatherer,
        reducer: GradientReducer,
        restorer: UpdatedParameterGatherer,
        boundary: StepBoundary,
        finite: NanWatch,
        meter: TrafficMeter,
        buffers: BufferSync | None,
        prefetch: int,
        device: str,
    ) -> None:
        self._units = units
        self._gatherer = gatherer
        self._reducer = reducer
        self._restorer = restorer
        self._boundary = boundary
        self.board = boundary.board
        self._finite = finite
        self._meter = meter
        self._buffers = buffers
        self._prefetch = prefetch
        self._ahead = prefetch and prefetch + 1  # the last one is not gathered: its shard is only read from NVMe
        self._device = device
        self._part = ModelPart(units)  # the part that the present passes belong to
        self._parts = self._all = [self._part]
        self._alone = False  # within no_sync
        self._training = False  # a forward for training has begun since the last update
        self._failed = False  # a pass of this step has raised
        self.inside: set[int] = set()

    # -- parts -----------------------------------------------------------------------------------------------------

    def divide(self, groups: Sequence[Group]) -> None:
        """Divide the model into parts with separate forward and backward passes (see :meth:`part`).

        Call it between steps. The root unit belongs to every part: each part calls its module, and each backward pass
        reduces its gradients.

        Args:
            groups: modules or names of each part; the same on all ranks.

        Raises:
            ConfigError: a unit is in no group.
        """
        divided = find_part_indices([(unit.name, unit.module()) for unit in self._units], groups)
        self._parts = [ModelPart([self._units[i] for i in each]) for each in divided]
        self._all = [ModelPart(self._units), *self._parts]
        self._part = self._all[0]

    @contextlib.contextmanager
    def part(self, number: int) -> Iterator[None]:
        """Run the forward or backward pass inside as one of part ``number``.

        Passes outside belong to the full model. All ranks run the same passes in the same order.
        """
        before, self._part = self._part, self._parts[number]
        try:
            yield
        finally:
            self._part = before

    @contextlib.contextmanager
    def unsharded(self, number: int) -> Iterator[None]:
        """Unshard part ``number`` inside. All ranks enter it at the same place.

        For work in autograd that may rerun the part's modules without reaching a hooked output first.
        """
        units = [unit for unit in self._parts[number].units if unit.guarded]
        try:
            for unit in units:
                self._gatherer.finish(unit)
            yield
        finally:
            for unit in units:
                self._gatherer.hold_between(unit)

    @named_call("backward")
    def take_gradients(self, number: int, gradients: Mapping[nn.Parameter, Tensor | None]) -> None:
        """Take gradients from ``torch.autograd.grad`` as those of a backward pass of part ``number``.

        Args:
            gradients: by parameter, in its shape and dtype; None: the outputs do not depend on it.

        Raises:
            ConfigError: a key is no trainable parameter of the part, or a gradient has another shape or dtype.
        """
        with self.part(number):
            units = reduction_order(self._part.units)
            slots = [(unit, flat, i) for unit in units for flat in unit.trainable for i in flat.slots]
            known = {id(flat.parameters[i]): flat.parameters[i] for _, flat, i in slots}
            for parameter, gradient in gradients.items():
                _check_taken_gradient(number, parameter, gradient, id(parameter) in known)
            for unit, flat, i in slots:
                gradient = gradients.get(flat.parameters[i])
                if gradient is not None:
                    self.gradient_arrives(unit, flat, i, gradient)
                    flat.parameters[i].grad = flat.gradient.markers[i]
            self.backward_ends()

    # -- forward ---------------------------------------------------------------------------------------------------

    @named_call("forward")
    def forward_begins(self, unit: Unit, inputs: Any) -> None:
        fresh = not in_backward()
        self._restorer.check_here()
        if not self.inside:
            self.board.clear_exit()
        self.inside.add(unit.index)
        if unit.index == 0 and fresh:
            self._model_begins(unit, inputs)
        self._restorer.finish(unit)
        if not unit.guarded:
            unit.check_views()
        else:
            self._gatherer.finish(unit)
            if fresh:
                self._part.trace.record(unit.index)
                self._start_gathers(self._part.trace.after(unit.index, self._ahead))

    def _model_begins(self, root: Unit, inputs: Any) -> None:
        check_unwrapped()
        self._finite.look()
        self.forget_backward()
        self._part.trace.begin()
        if torch.is_grad_enabled():
            self._meter.step_begins()
            self._boundary.accord.inputs.note(inputs)
            self._training = True
        model = root.module()
        if self._buffers is not None and model is not None:
            self._buffers.forward_begins(model)

    def forward_ends(self, unit: Unit, keep_whole: bool, backward_expected: bool) -> None:
        self.inside.discard(unit.index)
        unit.backward_expected = backward_expected
        unit.opaque = unit.opaque or keep_whole
        if unit.guarded and torch.is_autocast_enabled(self._device):
            torch.clear_autocast_cache()  # it would keep low-precision copies of resharded parameters
        if not unit.guarded:
            return
        if not in_backward():
            self._part.trace.record_end(unit.index)
        # A forward within backward (checkpointing) recomputes inputs that backward needs at once: the unit stays
        # unsharded. A tile does not: backward needs the tiles of a layer one after another.
        if keep_whole or (in_backward() and not unit.tile):
            return
        if backward_expected:
            self._gatherer.hold(unit)
        elif self._training:
            self._gatherer.hold_between(unit)
        else:
            self._gatherer.release(unit)

    def forward_fails(self, unit: Unit) -> None:
        """Release a unit after its forward raised, since no backward will; the program may catch the error."""
        self.inside.discard(unit.index)
        self._failed = self._failed or not in_backward()
        if not self.inside and not in_backward():
            self.board.record_exit("forward", sys.exc_info()[1])
        whole = unit.parameter_state is ParameterState.WHOLE
        # In backward, checkpointing stops its recomputation by raising.
        if unit.guarded and whole and not in_backward():
            self._gatherer.release(unit)

    # -- backward --------------------------------------------------------------------------------------------------

    @named_call("backward")
    def backward_reaches(self, unit: Unit) -> None:
        self._restorer.check_here()
        if not self._reducer.open:
            self._boundary.early.keep()
        if not unit.guarded:
            return
        if torch.is_grad_enabled():
            raise second_derivative_error(unit)
        unit.computing += 1
        # Reached again after all its gradients: reentrant checkpointing, which may reach it any number of times.
        unit.opaque = unit.opaque or (self._reducer.open and not unit.missing and bool(unit.trainable))
        self._gatherer.finish(unit)
        self._start_gathers(self._part.trace.before(unit.index, self._ahead))

    @named_call("backward")
    def backward_leaves(self, unit: Unit) -> None:
        unit.computing -= 1
        if unit.computing == 0 and self._reducer.open and not unit.missing and not unit.opaque:
            self._gatherer.hold_between(unit)

    @named_call("backward")
    def gradient_arrives(self, unit: Unit, flat: FlatParameter, i: int, gradient: Tensor) -> None:
        if unit not in self._part:
            raise _wrong_part_error(unit)
        if not self._reducer.open:
            self._begin_backward()
        if self._reducer.arrive(flat.gradient, i, gradient):
            unit.missing.discard(flat)
        # A node that needs a frozen parameter may run after the unit's last gradient: wait for the inputs' gradients.
        if unit.guarded and not unit.missing and not unit.opaque and (not unit.has_frozen or unit.computing == 0):
            self._gatherer.hold_between(unit)

    @named_call("backward")
    def backward_ends(self) -> None:
        if self._reducer.open:
            self._reducer.end()
        self._boundary.early.pass_ends()
        for unit in self._part.units:
            unit.computing, unit.opaque = 0, False
            self._gatherer.hold_between(unit)

    def _begin_backward(self) -> None:
        self.board.clear_exit()
        again = self._boundary.reopen()
        if self._failed and not again:  # after an error: the step is retried, and its passes are counted from 0
            self._failed = False
            for part in self._all:
                part.count = 0
        part = self._part
        part.count += 1
        self._boundary.early.pass_begins(again, self._alone)
        for unit in part.units:
            unit.missing = set(unit.trainable)
        order = ((unit, flat.gradient) for unit in reduction_order(part.units) for flat in reversed(unit.trainable))
        self._reducer.begin({gradient: self._role(unit) for unit, gradient in order})

    def _role(self, unit: Unit) -> BackwardRole:
        """Return the role of the present pass for a unit's gradients: LAST if no part with the unit has more passes."""
        if self._alone:
            return BackwardRole.ALONE
        ahead = sum(part.expected - part.count for part in self._all if unit in part)
        return BackwardRole.SUMMED if ahead else BackwardRole.LAST

    def forget_backward(self) -> None:
        """Drop a backward pass that raised; its gradients are incomplete until zero_grad()."""
        if not in_backward():
            if self._reducer.open:
                self._failed = self._boundary.incomplete = True
            self._reducer.abandon()
            self._boundary.early.pass_ends()
            for unit in self._units:
                unit.computing = 0

    def step_ends(self) -> None:
        """Note the end of the step's passes; the next step is expected to have as many, unless there were none."""
        some = any(part.count for part in self._all)
        for part in self._all:
            part.expected, part.count = part.count if some else part.expected, 0
        self._failed = False
        self._training = False

    def step_fails(self) -> None:
        """Note that a step has raised: the next backward pass retries it."""
        self._failed = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients on this rank alone inside; the next pass outside, or the step, reduces them."""
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def _start_gathers(self, indices: list[int]) -> None:
        for place, index in enumerate(indices):
            unit = self._units[index]
            # Backward has left this unit: a further all-gather would keep it unsharded until the end without use.
            done = self._reducer.open and unit.trainable and not unit.missing
            if not unit.guarded or done or not (unit.backward_expected or not in_backward()):
                continue
            if place == self._prefetch:
                self._gatherer.read_ahead(unit)
            else:
                observe.instant("prefetch", unit.name)
                self._restorer.finish(unit)
                self._gatherer.start(unit)


def _wrong_part_error(unit: Unit) -> StateError:
    return StateError(
        f"gradients of unit {unit.name!r}",
        expected="a backward pass of a part that it is in",
        got="one of another part",
        do="Detach what goes from one part into the next, and run each part's backward within passes.part() of it.",
    )


def _check_taken_gradient(number: int, parameter: Tensor, gradient: Tensor | None, known: bool) -> None:
    if known and (gradient is None or (gradient.shape, gradient.dtype) == (parameter.shape, parameter.dtype)):
        return
    raise ConfigError(
        f"take_gradients, part {number}",
        expected="gradients of the part's parameters that train, each in its parameter's shape and dtype",
        got=f"for a parameter {list(parameter.shape)} {parameter.dtype}"
        + (
            f" {list(gradient.shape)} {gradient.dtype}" if known and gradient is not None else " that is not among them"
        ),
        do="Give what torch.autograd.grad(outputs, parameters) returned, by parameter.",
    )
