"""Start offloaded updates inside backward, overlapped with the rest of the step's last pass.

An optimizer created with ``early`` promises that no code changes gradients or options between the last backward pass of
a step and ``step()``. So the offloaded update of a flat parameter can start once the ranks have summed its gradients,
with the options of that moment. ``step()`` updates the rest: flats that lack a gradient on this rank, and the near
parts. Each element is updated as without ``early``, in another order of chunks, so results are bitwise equal.

The last pass is recognized by the number of passes. If that was wrong, or if the program does anything else before
``step()``, it gets an error and only ``step()`` is accepted: a partial update is never taken for a complete one.

No update starts early if

    no optimizer promises it, overlap is off, or nothing is offloaded
    updates are delayed (lag=1)
    the pass is within no_sync()
    it is the first step, or options are on the device: step() updates everything
    the optimizer lacks some of the model's parameters
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
    """Describe the promise of an optimizer with ``early`` to an engine.

    Attributes:
        passes: backward passes per step; None: the maximum over the steps so far.
    """

    passes: int | None

    @property
    def holds(self) -> bool:
        """Return whether the optimizer still exists."""

    def is_of(self, worker: object) -> bool:
        """Return whether the promise is that of ``worker``."""

    def begin(self) -> tuple[Sequence[StateStore], Launch] | None:
        """Return the state stores and the launch of an update that starts now; None if it must wait for step()."""


class EarlyUpdate:
    """Start the offloaded updates of one model inside backward, if its optimizer has promised ``early``.

    Args:
        flats: all trainable flat parameters.
        overlap: False: no update starts before ``step()``, as when updates are delayed beyond it anyway.
    """

    def __init__(
        self, flats: Sequence[FlatParameter], update: OptimizerUpdate, device: torch.device, overlap: bool
    ) -> None:
        self._flats = {flat.gradient: flat for flat in flats if flat.far}
        self._update = update
        self._overlap = overlap
        self._scale = torch.ones(1, device=device)
        self._promise: EarlyUpdateRequest | None = None
        self._passes = 0  # backward passes of this step
        self._most = 0  # their maximum over the steps so far
        self._on = False  # the present pass is the step's last and starts updates
        self._begun: list[FlatParameter] = []

    def follow(self, promise: EarlyUpdateRequest | None) -> None:
        """Note the promise, or None, of the optimizer of the model's parameters; the last call counts."""
        self._promise = promise

    def refuse(self, call: str) -> None:
        """Refuse ``call`` if an optimizer may start its updates before ``call`` could change gradients.

        It does so even if no update starts early under the present plan: a program is valid under all plans or none.

        Raises:
            ConfigError: an optimizer has ``early``.
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
            alone: it is within ``no_sync``.
        """
        self._passes = self._passes + 1 if again else 1
        promise = self._promise
        expected = 0 if promise is None or not promise.holds else promise.passes or self._most
        self._on = self._overlap and not alone and 0 < expected <= self._passes

    def reduced(self, gradient: FlatGradient) -> None:
        """Start the update of the flat parameter of a final gradient."""
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
        # A later autograd node that needs one of these parameters sees the new version, and raises.
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
        """Return the flat parameters with an update that has started and no step has ended."""
        return self._begun

    @contextlib.contextmanager
    def step_begins(self, worker: object) -> Iterator[None]:
        """Run the rest of the update in the step of ``worker``; if that raises, restore the earlier state.

        Raises:
            NpuZeroError: the update has failed, or belongs to another optimizer.
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
        """Note that the step has started the rest of the update."""
        for flat in self._begun:
            flat.gradient.kept.lent = False
        self._begun = []
        self._most, self._passes = max(self._most, self._passes), 0

    def keep(self) -> None:
        """Refuse to add to or drop gradients of an update that has started.

        Raises:
            NpuZeroError: an update has started and no step has ended it.
        """
        if self._begun:
            self._update.stream.quiet()


def _is_gradient_final(gradient: FlatGradient) -> bool:
    """Return whether every slot has its gradient, summed over the ranks, provided that the present pass is the last."""
    at_once = gradient.state is GradientState.ACCUMULATED and not (gradient.cut or gradient.meets_at_boundary)
    return (at_once or gradient.state is GradientState.READY) and GradientContent.NOWHERE not in gradient.content
