"""R4: after the update every rank gets back the parameters that the plan lets it keep, beside the next forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from npuzero import observe
from npuzero.comm.watchdog.call_names import find_call_site
from npuzero.device import AsyncHandle, wait_quietly
from npuzero.errors import StateError
from npuzero.shard.state.unit import Unit


class UpdatedParameterGatherer:
    """Gather updated parameters over the axes of states beyond those of parameters, unit by unit in forward order.

    On a channel of its own: gathers of one unit may begin while another's restore is under way.

    Attributes:
        before: while units are updated beside the program, waits for the update of one and starts its R4.
        refusal: makes the error for who needs the training state, while it is absent or incomplete.
        half_loaded: the refusal that a failed load has left, which a load of as much ends; None where none has failed.
    """

    def __init__(self) -> None:
        self.before: Callable[[Unit], None] | None = None
        self.refusal: Callable[[], StateError] | None = None
        self.half_loaded: Callable[[], StateError] | None = None
        self._half_states = False  # optimizer states were among what the failed load has left
        self._handles: dict[int, list[AsyncHandle]] = {}

    def start(self, unit: Unit) -> None:
        """Begin to send this rank's updated shard of ``unit``; its parameters are closed to reading until finished.

        Where it raises, nothing is under way, and it may be called again.
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
        """Wait until the resting parameters of ``unit`` are up to date.

        Raises:
            StateError: they are absent or incomplete.
            NpuZeroError: their update has failed.
        """
        self.check_here()
        if self.before is not None:
            self.before(unit)
        self.wait(unit)

    def wait(self, unit: Unit) -> None:
        """Wait for the R4 of ``unit`` that is under way, if any, and start none."""
        handles = self._handles.get(unit.index)
        if handles:
            with observe.span("wait for restore", unit.name):
                for handle in handles:
                    handle.wait()
            del self._handles[unit.index]
            if not unit.guarded:
                unit.reopen()

    def refuse(self, what: str, error: BaseException, check: Callable[[], None] = lambda: None) -> None:
        """Refuse every use of the training state from now on: ``error`` has left it incomplete.

        Args:
            what: that failed, such as ``"optimizer.step"``.
            check: raises an error that says more than the refusal, if there is one.
        """
        self._refuse(what, error, check, "Call npuzero.zero() on a new model and load the last checkpoint.")

    def check_loadable(self, states: bool) -> None:
        """Raise a StateError where a load, with optimizer states if ``states``, leaves the model incomplete."""
        if self.refusal is not self.half_loaded or (self._half_states and not states):
            self.check_here()

    @contextlib.contextmanager
    def loading(self, what: str, states: bool) -> Iterator[None]:
        """Refuse every use of the training state from now on where the block, which loads it, raises.

        Args:
            what: the call that loads.
            states: whether optimizer states are among what is loaded.
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
        """Raise a StateError where the model's training state is absent or incomplete."""
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
