"""Delay updates by one step: updated parameters stay on the host until the next step.

The update runs on its lane during the next step's forward and backward, so it must touch nothing that they use. It
reads gradients from separate buffers (:mod:`npuzero.shard.state.gradient_buffer`). It writes parameters into copies on
the host that are *ahead* of the device; with float32 masters it rounds the masters into these copies. A step begins by
copying them to the device. R4 then gathers them as usual, and the next update begins.

So masters and moments have the values after the pending update, and own parameters the values before it. Any other
thread waits for the update before it reads masters.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from npuzero.errors import ConfigError, StateError
from npuzero.memory import MemorySpaces
from npuzero.shard.layout.flat_layout import intersect_ranges
from npuzero.shard.offload.host_states import HostStateStore, StateStore
from npuzero.shard.offload.offloaded_update import OffloadedUpdate
from npuzero.shard.state.flat_parameter import AHEAD, FlatParameter

#: In checkpoints, the key in a slot's optimizer state for its own parameters from before the pending update.
LAGGING = "lagging"


class DelayedUpdate:
    """Hold the updated parameters of one model that are ahead of those on the device.

    Args:
        flats: flat parameters with delayed updates.
        stream: updates them.

    Attributes:
        pending: whether the device may have older parameters than the host; the same on all ranks.
        banks: stores of the parameters ahead; updates write there.
    """

    def __init__(self, flats: Sequence[FlatParameter], stream: OffloadedUpdate, spaces: MemorySpaces) -> None:
        self._ahead: dict[FlatParameter, Tensor] = {}
        self._stream = stream
        self._mover = spaces.mover
        self.pending = False
        self._by: weakref.ref[object] | None = None  # the optimizer of the pending update
        self._behind: dict[FlatParameter, list[slice]] = {}
        self.banks: list[StateStore] = []
        if flats:
            bank = HostStateStore(stream.chunks, {flat: {AHEAD: flat.dtype} for flat in flats}, stream.quiet, spaces)
            self.banks.append(bank)
            for flat in flats:
                flat.ahead = self._ahead[flat] = bank.whole(flat, AHEAD)

    def __bool__(self) -> bool:
        return bool(self._ahead)

    def check(self, optimizer: object, early: bool) -> None:
        """Check that ``optimizer`` also started the pending update, and may start the next one.

        Args:
            early: whether the optimizer begins updates before its steps.

        Raises:
            ConfigError: ``early`` is set, which a delayed plan cannot do.
            StateError: another optimizer's update is pending.
        """
        if self and early:
            raise ConfigError(
                f"{type(optimizer).__name__}(early=True)",
                expected="a plan without lag, whose updates can begin inside backward",
                got="lag=1, whose updates run beside the next step's",
                do="Leave early=True out, or take a plan without lag.",
            )
        if self.pending and self._by is not None and self._by() is not optimizer:
            raise StateError(
                f"{type(optimizer).__name__}.step under a plan with lag=1",
                expected="one optimizer of all parameters: its step ends the update of its step before",
                got="an update of another optimizer's that is pending",
                do="Give all parameters to one optimizer, in groups; or call npuzero.apply_pending(model) in between.",
            )

    def begin(self, optimizer: object) -> None:
        """Record that an update of ``optimizer`` has begun."""
        if self:
            self.pending, self._by = True, weakref.ref(optimizer)

    def quiet(self) -> None:
        """Wait until the parameters ahead may be read and written.

        Raises:
            NpuZeroError: the update has failed.
        """
        if self:
            self._stream.quiet()

    def land(self) -> None:
        """Copy the parameters ahead to the device if an update is pending.

        Raises:
            NpuZeroError: the update has failed.
        """
        if not self.pending:
            return
        self.quiet()
        self._mover.follow()
        for arrived in [self._mover.to_device(flat.own_parameters, ahead) for flat, ahead in self._ahead.items()]:
            arrived.wait()
        self.pending = False

    def take(self, flat: FlatParameter, own: slice, values: Tensor) -> None:
        """Set a range of the masters to ``values``. Own parameters keep their values, which are behind the masters."""
        behind = flat.own_parameters[own].clone()
        flat.write_master(own, values)
        flat.own_parameters[own].copy_(behind)
        self.pending, self._by = True, None

    def expect(self, flat: FlatParameter, states: Sequence[Mapping[str, object]]) -> bool:
        """Prepare to load own parameters of the slots with a :data:`LAGGING` state; return whether there are any.

        Without lag there are none: parameters equal their masters.
        """
        self._behind[flat] = [flat.own_slots[i] for i, state in enumerate(states) if self and LAGGING in state]
        return bool(self._behind[flat])

    def take_behind(self, flat: FlatParameter, own: slice, values: Tensor) -> None:
        """Set the expected slots within a range of own parameters to ``values``; the masters keep theirs."""
        for slot in self._behind[flat]:
            begin, end = intersect_ranges((own.start, own.stop), (slot.start, slot.stop))
            if begin < end:
                flat.own_parameters[begin:end].copy_(values[begin - own.start : end - own.start])
        self.pending, self._by = True, None

    # -- other values ----------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Prepare to load a complete training state: drop the pending update."""
        self.quiet()
        self.pending = False

    def drop(self) -> None:
        """Prepare to load new values of all parameters: warn that the pending update is dropped, and drop it."""
        if self.pending:
            warnings.warn(
                "The pending update of a delayed plan is dropped: other parameters were loaded. To keep it, call "
                "npuzero.apply_pending(model) before.",
                RuntimeWarning,
                stacklevel=2,
            )
        self.forget()

    def check_write(self, flat: FlatParameter) -> None:
        """Check that a program may write parameters of ``flat``.

        Raises:
            StateError: an update is pending that began before the write.
        """
        if self.pending and flat in self._ahead:
            raise StateError(
                f"writing into parameters of {flat.name}",
                expected="no update that is pending (the plan has lag=1): it began from the values of before",
                got="values written after it began",
                do="Call npuzero.apply_pending(model) on every rank before, or take a plan without lag.",
            )


def warn_of_delay(saved: Iterable[Mapping[str, object]], lag: DelayedUpdate) -> None:
    """Warn if a delayed plan saved these states (one per parameter) and this model's plan delays nothing."""
    if not lag and any(LAGGING in state or AHEAD in state for state in saved):
        warnings.warn(
            "A delayed plan saved this state, and the plan of this model delays nothing: the update that was pending "
            "then is applied at once.",
            RuntimeWarning,
            stacklevel=2,
        )
