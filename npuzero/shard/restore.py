"""R4: after the update every rank gets back the parameters that the plan lets it keep, beside the next forward."""

from __future__ import annotations

from npuzero import observe
from npuzero.comm import Handle
from npuzero.plan import Plan, axes_between
from npuzero.shard.counting import CountingMesh
from npuzero.shard.unit import Unit


class Restorer:
    """all_gather over states - parameters, unit by unit in the order of forward."""

    def __init__(self, mesh: CountingMesh, plan: Plan) -> None:
        self._mesh = mesh
        self._axes = axes_between(plan.states.axes, plan.parameters.axes)
        self._handles: dict[int, list[Handle]] = {}

    def start(self, unit: Unit) -> None:
        """Begin to send this rank's updated shard of ``unit``; its parameters are closed to reading until finished."""
        if self._mesh.size(self._axes) == 1 or not unit.trainable:
            return
        communicator = self._mesh.communicator(self._axes, "gather")
        self._handles[unit.index] = [
            communicator.all_gather(flat.resting, flat.own_parameters, tag=f"restore {unit.name}")
            for flat in unit.trainable
        ]
        unit.close()

    def finish(self, unit: Unit) -> None:
        """Wait until the resting parameters of ``unit`` are up to date."""
        handles = self._handles.pop(unit.index, None)
        if handles:
            with observe.span("wait for restore", unit.name):
                for handle in handles:
                    handle.wait()
            if not unit.cut:
                unit.reopen()
