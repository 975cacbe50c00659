"""Updates that begin inside backward: what rests far is updated as soon as its gradients are there, beside the rest of
the pass that is the step's last.

An optimizer that was made with ``early`` promises this: nobody changes gradients or options between the last backward
pass of a step and ``step()``. So a flat's update can begin once the ranks have summed its gradients, with the options
of that moment; ``step()`` brings what is left: flats of which this rank lacks a gradient, all that is near. Each
element is updated as it would be without, in another order of chunks, so no bit moves.

Which pass is the last is told by their number. Where that was wrong, or the program does anything else before
``step()``, there is an error, and ``step()`` is all that goes on: half of an update is never taken for the whole.

    no optimizer promises it, no overlap, nothing far       nothing begins
    updates are delayed (lag=1)                             nothing begins
    a pass within no_sync()                                 nothing begins
    the first step; options that the device knows           nothing begins: all goes with step()
    the optimizer lacks some of the model's parameters      nothing begins
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from npuzero.errors import ConfigError, StateError
from npuzero.shard.offload.host_states import StateStore
from npuzero.shard.offload.offloaded_update import Launch
from npuzero.shard.state.flat_gradient import FlatGradient, GradientContent
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.life_cycle import GradientState
from npuzero.shard.step.optimizer_update import OptimizerUpdate


class EarlyUpdateRequest(Protocol):
    """Describe what an optimizer has promised to an engine.

    Attributes:
        passes: backward passes that a step has; None: as many as any step has had so far.
    """

    passes: int | None

    @property
    def holds(self) -> bool:
        """Tell whether the optimizer is still there."""

    def is_of(self, worker: object) -> bool:
        """Tell whether ``worker`` is who has promised."""

    def begin(self) -> tuple[Sequence[StateStore], Launch] | None:
        """Return the banks and the launch of an update that begins now; None where it cannot begin before step()."""


class EarlyUpdate:
    """Begin the updates of one model inside backward, where its optimizer has promised what that needs.

    Args:
        flats: all that train.
        overlap: False: nothing begins before its step, as where updates are delayed beyond it anyway.
    """

    def __init__(
        self, flats: Sequence[FlatParameter], update: OptimizerUpdate, device: torch.device, overlap: bool
    ) -> None:
        self._flats = {flat.gradient: flat for flat in flats if flat.far}
        self._update = update
        self._overlap = overlap
        self._scale = torch.ones(1, device=device)
        self._promise: EarlyUpdateRequest | None = None
        self._passes = 0  # of this step
        self._most = 0  # that any step has had
        self._on = False  # the present pass is the step's last
        self._begun: list[FlatParameter] = []

    def follow(self, promise: EarlyUpdateRequest | None) -> None:
        """Note what the optimizer promises that has the model's parameters; the last one counts."""
        self._promise = promise

    def refuse(self, call: str) -> None:
        """Raise where an optimizer begins its updates before ``call`` could change gradients.

        Whether any update does begin early is another question, so that a program is right under all plans or none.

        Raises:
            ConfigError: there is such an optimizer.
        """
        if self._promise is not None and self._promise.holds:
            raise ConfigError(
                call,
                expected="an optimizer without early=True: it updates with gradients as they come out of backward",
                got="one with it, which has used some of them before all are there",
                do="Leave early=True out where gradients are clipped, unscaled or checked before the update.",
            )

    # -- backward --------------------------------------------------------------------------------------------------

    def pass_begins(self, again: bool, alone: bool) -> None:
        """Note a backward pass.

        Args:
            again: it adds to gradients of the same step.
            alone: within ``no_sync``.
        """
        self._passes = self._passes + 1 if again else 1
        promise = self._promise
        expected = 0 if promise is None or not promise.holds else promise.passes or self._most
        self._on = self._overlap and not alone and 0 < expected <= self._passes

    def reduced(self, gradient: FlatGradient) -> None:
        """Begin with the flat of a gradient that is final."""
        flat = self._flats.get(gradient)
        if not self._on or flat is None or not _is_gradient_final(gradient) or self._promise is None:
            return
        if not self._begun:
            task = self._promise.begin()
            if task is None:
                self._on = False
                return
            self._update.stream.open(*task, self._scale, None, None)
        self._begun.append(flat)
        gradient.kept.lent = True
        # A node of autograd's that needs one of them later finds out, and raises.
        flat.note_write()
        self._update.stream.add(flat)

    def pass_ends(self) -> None:
        """Note the end of a backward pass."""
        self._on = False
        if self._begun:
            self._update.hold()

    # -- between backward and the end of the step ------------------------------------------------------------------

    @property
    def begun(self) -> Sequence[FlatParameter]:
        """Return the flats whose update has begun, and that no step has ended."""
        return self._begun

    @contextlib.contextmanager
    def step_begins(self, worker: object) -> Iterator[None]:
        """Let the step of ``worker`` bring what is left; where that raises, all stays as it was.

        Raises:
            NpuZeroError: the update has failed, or is another's.
        """
        if not self._begun:
            yield
            return
        self._update.stream.check()
        if self._promise is None or not self._promise.is_of(worker):
            raise StateError(
                "step of an optimizer",
                expected="that of the one with early=True, whose update has begun inside backward",
                got="another's",
                do="Give early=True to no optimizer of a model that several take turns at.",
            )
        self._update.let_go()
        try:
            yield
        except BaseException:
            if self._update.stream.waits:
                self._update.hold()
            raise

    def step_ends(self) -> None:
        """Note that the step has all of the update under way."""
        for flat in self._begun:
            flat.gradient.kept.lent = False
        self._begun = []
        self._most, self._passes = max(self._most, self._passes), 0

    def keep(self) -> None:
        """Raise where gradients of an update that has begun would be added to, or dropped.

        Raises:
            NpuZeroError: there is one that no step has ended.
        """
        if self._begun:
            self._update.stream.quiet()


def _is_gradient_final(gradient: FlatGradient) -> bool:
    """Tell whether the present pass, if it is the last, has brought all that there will be: of every slot, summed."""
    at_once = gradient.state is GradientState.ACCUMULATED and not (gradient.cut or gradient.meets_at_boundary)
    return (at_once or gradient.state is GradientState.READY) and GradientContent.NOWHERE not in gradient.content
