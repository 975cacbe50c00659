"""Forward and backward passes: the fate of units as modules are called and gradients leave autograd.

Called by the hooks (:class:`npuzero.shard.hooks.Events`), in the order that is written down there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from npuzero import observe
from npuzero.comm.calls import collective
from npuzero.shard.boundary import Boundary
from npuzero.shard.buffers import Buffers
from npuzero.shard.contribution import Pass
from npuzero.shard.counting import Meter
from npuzero.shard.finite import Finite
from npuzero.shard.flat import Flat
from npuzero.shard.gather import Gatherer
from npuzero.shard.guard import in_backward
from npuzero.shard.hooks import second_derivatives
from npuzero.shard.prefetch import Trace
from npuzero.shard.reduce import Reducer
from npuzero.shard.restore import Restorer
from npuzero.shard.states import ParameterState
from npuzero.shard.unit import Unit
from npuzero.shard.wrappers import check_unwrapped


class Passes:
    """Run the passes of one model's steps.

    Args:
        prefetch: how many units to gather ahead.
        device: type of the device, by which autocast goes.

    Attributes:
        inside: the units whose forward runs.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts that act in a pass, made and wired by the engine
        self,
        units: Sequence[Unit],
        gatherer: Gatherer,
        reducer: Reducer,
        restorer: Restorer,
        boundary: Boundary,
        finite: Finite,
        meter: Meter,
        buffers: Buffers | None,
        prefetch: int,
        device: str,
    ) -> None:
        self._units = units
        self._gatherer = gatherer
        self._reducer = reducer
        self._restorer = restorer
        self._boundary = boundary
        self._finite = finite
        self._meter = meter
        self._buffers = buffers
        self._prefetch = prefetch
        self._ahead = prefetch and prefetch + 1  # of which the last is read from where it rests, if that is slow
        self._device = device
        self._trace = Trace()
        self._alone = False  # within no_sync
        self._training = False  # a forward for training has begun since the last update
        self.inside: set[int] = set()
        # Backward passes of this step so far, and of the last step: R3 overlaps with the last one, if it is foreseen.
        self._count = 0
        self._expected = 0

    # -- forward ---------------------------------------------------------------------------------------------------

    @collective("forward")
    def forward_begins(self, unit: Unit) -> None:
        fresh = not in_backward()
        self._restorer.check_here()
        self.inside.add(unit.index)
        if unit.index == 0 and fresh:
            self._model_begins(unit)
        self._restorer.finish(unit)
        if not unit.guarded:
            unit.check_views()
        else:
            self._gatherer.finish(unit)
            if fresh:
                self._trace.record(unit.index)
                self._start_gathers(self._trace.after(unit.index, self._ahead))

    def _model_begins(self, root: Unit) -> None:
        check_unwrapped()
        self._finite.look()
        self.forget_backward()
        self._trace.begin()
        if torch.is_grad_enabled():
            self._meter.step_begins()
            self._training = True
        model = root.module()
        if self._buffers is not None and model is not None:
            self._buffers.forward_begins(model)

    def forward_ends(self, unit: Unit, keep_whole: bool, backward_expected: bool) -> None:
        self.inside.discard(unit.index)
        unit.backward_expected = backward_expected
        unit.opaque = unit.opaque or keep_whole
        if unit.guarded and torch.is_autocast_enabled(self._device):
            torch.clear_autocast_cache()  # it would keep low-precision copies of what is released here
        if not unit.guarded:
            return
        if not in_backward():
            self._trace.record_end(unit.index)
        # A forward within backward (checkpointing) recomputes what backward needs at once: the unit stays unsharded.
        # But not a tile: of its layer's tiles backward needs one after another.
        if keep_whole or (in_backward() and not unit.tile):
            return
        if backward_expected:
            self._gatherer.hold(unit)
        elif self._training:
            self._gatherer.hold_between(unit)
        else:
            self._gatherer.release(unit)

    def forward_fails(self, unit: Unit) -> None:
        """Release the unit: its forward raised, and no backward comes that would, though the program may go on."""
        self.inside.discard(unit.index)
        whole = unit.parameter_state is ParameterState.WHOLE
        # In backward, checkpointing ends what it runs again by raising.
        if unit.guarded and whole and not in_backward():
            self._gatherer.release(unit)

    # -- backward --------------------------------------------------------------------------------------------------

    @collective("backward")
    def backward_reaches(self, unit: Unit) -> None:
        self._restorer.check_here()
        if not self._reducer.open:
            self._boundary.early.keep()
        if not unit.guarded:
            return
        if torch.is_grad_enabled():
            raise second_derivatives(unit)
        unit.computing += 1
        # Again, after all its gradients have come: reentrant checkpointing, and who knows whether for the last time.
        unit.opaque = unit.opaque or (self._reducer.open and not unit.missing and bool(unit.trainable))
        self._gatherer.finish(unit)
        self._start_gathers(self._trace.before(unit.index, self._ahead))

    @collective("backward")
    def backward_leaves(self, unit: Unit) -> None:
        unit.computing -= 1
        if unit.computing == 0 and self._reducer.open and not unit.missing and not unit.opaque:
            self._gatherer.hold_between(unit)

    @collective("backward")
    def gradient_arrives(self, unit: Unit, flat: Flat, i: int, gradient: Tensor) -> None:
        if not self._reducer.open:
            self._begin_backward()
        if self._reducer.arrive(flat.gradient, i, gradient):
            unit.missing.discard(flat)
        # A node that needs a frozen parameter may run after the unit's last gradient: then it waits for its inputs'.
        if unit.guarded and not unit.missing and not unit.opaque and (not unit.has_frozen or unit.computing == 0):
            self._gatherer.hold_between(unit)

    @collective("backward")
    def backward_ends(self) -> None:
        if self._reducer.open:
            self._reducer.end()
        self._boundary.early.pass_ends()
        for unit in self._units:
            unit.computing, unit.opaque = 0, False
            self._gatherer.hold_between(unit)

    def _begin_backward(self) -> None:
        self._count += 1
        again = self._boundary.reopen()
        self._boundary.early.pass_begins(again, self._alone)
        for unit in self._units:
            unit.missing = set(unit.trainable)
        last = self._count == self._expected
        self._reducer.begin(Pass.ALONE if self._alone else Pass.LAST if last else Pass.SUMMED)

    def forget_backward(self) -> None:
        """Drop a backward pass that raised: its gradients are in part there, and zero_grad() drops them."""
        if not in_backward():
            self._reducer.abandon()
            self._boundary.early.pass_ends()

    def step_ends(self) -> None:
        """Note that the step's passes are over; the next step is expected to have as many."""
        self._expected, self._count = self._count or self._expected, 0
        self._training = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up backward passes inside on this rank alone; the next one outside (or the step) reduces them."""
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def _start_gathers(self, indices: list[int]) -> None:
        for place, index in enumerate(indices):
            unit = self._units[index]
            # Backward has left it: gathered again, it would stay to the end for nothing.
            done = self._reducer.open and unit.trainable and not unit.missing
            if not unit.guarded or done or not (unit.backward_expected or not in_backward()):
                continue
            if place == self._prefetch:
                self._gatherer.read_ahead(unit)
            else:
                observe.instant("prefetch", unit.name)
                self._restorer.finish(unit)
                self._gatherer.start(unit)
