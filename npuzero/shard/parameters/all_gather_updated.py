"""R4: all-gather updated parameters after the update; it overlaps with the next forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from npuzero import observe
from npuzero.comm.watchdog.call_names import find_call_site
from npuzero.device import AsyncHandle, wait_quietly
from npuzero.errors import StateError
from npuzero.shard.state.unit import Unit


class UpdatedParameterGatherer:
    """Gather updated parameters over the axes "states - parameters", unit by unit in forward order.

    It uses a separate channel: R1 of one unit may start while R4 of another is in flight.

    Attributes:
        before: set while an update overlaps with the program; waits for the update of a unit and starts its R4.
        refusal: makes the error for uses of the training state; set while the state is absent or incomplete.
        half_loaded: the refusal that a failed load set; a later load of the same parts clears it. None: no load failed.
    """

    def __init__(self) -> None:
        self.before: Callable[[Unit], None] | None = None
        self.refusal: Callable[[], StateError] | None = None
        self.half_loaded: Callable[[], StateError] | None = None
        self._half_states = False  # the failed load included optimizer states
        self._handles: dict[int, list[AsyncHandle]] = {}

    def start(self, unit: Unit) -> None:
        """Start R4 of ``unit``; its parameters are closed to reads until :meth:`finish`.

        If it raises, nothing is in flight, and it may be called again.
        """
        handles: list[AsyncHandle] = []
        try:
            for flat in unit.trainable:
                if flat.rests.restored.many:
                    communicator = flat.rests.restored.communicator("restore")
                    handles.append(
                        communicator.all_gather(flat.resting, flat.own_parameters, tag=f"restore {unit.name}")
                    )
        except BaseException:
            wait_quietly(handles)
            raise
        if handles:
            self._handles[unit.index] = handles
            unit.close()

    def finish(self, unit: Unit) -> None:
        """Wait until the local parameters of ``unit`` are up to date.

        Raises:
            StateError: the training state is absent or incomplete.
            NpuZeroError: the update failed.
        """
        self.check_here()
        if self.before is not None:
            self.before(unit)
        self.wait(unit)

    def wait(self, unit: Unit) -> None:
        """Wait for R4 of ``unit`` if it is in flight; do not start it."""
        handles = self._handles.get(unit.index)
        if handles:
            with observe.span("wait for restore", unit.name):
                for handle in handles:
                    handle.wait()
            del self._handles[unit.index]
            if not unit.guarded:
                unit.reopen()

    def refuse(self, what: str, error: BaseException, check: Callable[[], None] = lambda: None) -> None:
        """Make every later use of the training state an error, because ``error`` left it incomplete.

        Args:
            what: the call that failed, such as ``"optimizer.step"``.
            check: raises a more specific error than the refusal, if there is one.
        """
        self._refuse(what, error, check, "Call npuzero.zero() on a new model and load the last checkpoint.")

    def check_loadable(self, states: bool) -> None:
        """Raise a StateError if a load, with optimizer states if ``states``, would leave the model incomplete."""
        if self.refusal is not self.half_loaded or (self._half_states and not states):
            self.check_here()

    @contextlib.contextmanager
    def loading(self, what: str, states: bool) -> Iterator[None]:
        """Make every later use of the training state an error if the block, which loads it, raises.

        Args:
            what: the call that loads.
            states: whether optimizer states are loaded.
        """
        self._half_states = self._half_states or states
        self.refusal = self.half_loaded = None
        try:
            yield
        except BaseException as error:
            self.half_loaded = self._refuse(what, error, lambda: None, "Load another checkpoint, as completely.")
            raise
        self._half_states = False

    def _refuse(self, what: str, error: BaseException, check: Callable[[], None], do: str) -> Callable[[], StateError]:
        # No reference to the error: its traceback has frames that hold the model.
        why = f"one that is incomplete: {what} has failed before ({type(error).__name__}: {error})"

        def refusal() -> StateError:
            check()
            return _incomplete_state_error(why, do)

        self.refusal = refusal
        return refusal

    def check_here(self) -> None:
        """Raise a StateError if the model's training state is absent or incomplete."""
        if self.refusal is not None:
            raise self.refusal()


def _incomplete_state_error(why: str, do: str) -> StateError:
    call = find_call_site().call
    return StateError(
        f"{call} of this model" if call else "reading or writing this model",
        expected="a training state of which all parts are of the same step",
        got=why,
        do=do,
    )
