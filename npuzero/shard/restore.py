"""R4: after the update every rank gets back the parameters that the plan lets it keep, beside the next forward."""

from __future__ import annotations

from collections.abc import Callable

from npuzero import observe
from npuzero.comm import Handle
from npuzero.errors import StateError
from npuzero.shard.unit import Unit


class Restorer:
    """Gather updated parameters over the axes of states beyond those of parameters, unit by unit in forward order.

    On a channel of its own: gathers of one unit may begin while another's restore is under way.

    Attributes:
        before: while units are updated beside the program, waits for the update of one and starts its R4.
        absent: while what rests is not where it rests, makes the error for who needs it.
    """

    def __init__(self) -> None:
        self.before: Callable[[Unit], None] | None = None
        self.absent: Callable[[], StateError] | None = None
        self._handles: dict[int, list[Handle]] = {}

    def start(self, unit: Unit) -> None:
        """Begin to send this rank's updated shard of ``unit``; its parameters are closed to reading until finished."""
        handles = [
            flat.rests.restored.communicator("restore").all_gather(
                flat.resting, flat.own_parameters, tag=f"restore {unit.name}"
            )
            for flat in unit.trainable
            if flat.rests.restored.many
        ]
        if handles:
            self._handles[unit.index] = handles
            unit.close()

    def finish(self, unit: Unit) -> None:
        """Wait until the resting parameters of ``unit`` are up to date.

        Raises:
            StateError: they are absent.
        """
        self.check_here()
        if self.before is not None:
            self.before(unit)
        handles = self._handles.pop(unit.index, None)
        if handles:
            with observe.span("wait for restore", unit.name):
                for handle in handles:
                    handle.wait()
            if not unit.guarded:
                unit.reopen()

    def check_here(self) -> None:
        """Raise a StateError where the model's training state is absent."""
        if self.absent is not None:
            raise self.absent()
