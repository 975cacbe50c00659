"""R1: a unit's parameters are gathered (unsharded) before it computes, and released (resharded) after."""

from __future__ import annotations

from npuzero import observe
from npuzero.comm import Handle
from npuzero.shard.fetch import Fetcher
from npuzero.shard.states import ParameterState
from npuzero.shard.unit import Unit
from npuzero.shard.writes import Writes

_S = ParameterState


class Gatherer:
    """Start, finish and undo the gathering of units. A start must be followed by a finish on every rank."""

    def __init__(self, writes: Writes, fetcher: Fetcher) -> None:
        self._writes = writes
        self._fetcher = fetcher
        self._handles: dict[int, list[Handle]] = {}

    def start(self, unit: Unit, purpose: str = "gather") -> None:
        """Begin to gather ``unit`` unless it is unsharded or on its way; ``purpose``: the same on every rank."""
        if unit.parameter_state not in (_S.SHARDED, _S.HELD):
            return
        from_held = unit.parameter_state is _S.HELD
        unit.move(_S.GATHERING)
        handles = self._handles[unit.index] = []
        flats = [flat for flat in unit.flats if flat.apart and not flat.transient.here]
        tag = f"{purpose} {unit.name}"
        for flat in flats:
            flat.transient.restore()
        if unit.plan.parameters.far and not from_held:
            handles += self._fetcher.gather(unit, flats, tag) if flats else []
            return
        for flat in flats:
            # Where after_forward is cut as parameters are there is no second copy: the resting shard is held.
            shard = flat.held.tensor if from_held and flat.held is not None else flat.resting
            group = (flat.rests.after_forward if from_held else flat.rests.parameters).group
            handles.append(group.communicator("gather").all_gather(flat.whole, shard, tag=tag))

    def read_ahead(self, unit: Unit) -> None:
        """Begin to bring closer what of ``unit`` rests on disks, if its next gather reads it."""
        if unit.parameter_state is _S.SHARDED:
            self._fetcher.ahead(unit)

    def finish(self, unit: Unit, purpose: str = "gather") -> None:
        """Wait until ``unit`` is unsharded and open its parameters to reading; start the gather if nobody has."""
        if unit.parameter_state is not _S.WHOLE:
            self.start(unit, purpose)
            with observe.span("wait for gather", unit.name):
                for handle in self._handles.pop(unit.index, ()):
                    handle.wait()
            unit.move(_S.WHOLE)
        unit.reopen()
        unit.check_views()

    def hold(self, unit: Unit) -> None:
        """Keep after forward what the plan says, and release the rest."""
        self._release(unit, keep_held=True)

    def release(self, unit: Unit) -> None:
        """Keep the resting shards only."""
        if unit.parameter_state is _S.GATHERING and unit.guarded:  # prefetched, but never used
            self.finish(unit)
        self._release(unit, keep_held=False)

    def _release(self, unit: Unit, keep_held: bool) -> None:
        if not unit.guarded or unit.parameter_state in (_S.SHARDED, _S.GATHERING):
            return
        if keep_held and unit.parameter_state is _S.HELD:
            return
        if unit.parameter_state is _S.WHOLE:
            self._writes.look(unit)  # what the program wrote is in the unsharded flat alone, which is about to go
        unit.close()
        for flat in unit.flats:
            if keep_held and flat.rests.holds_all:
                continue
            if flat.held is not None and keep_held:
                flat.held.restore()
                flat.held.tensor.copy_(flat.whole[slice(*flat.rests.after_forward.range)])
            elif flat.held is not None:
                flat.held.release()
            if flat.apart:
                flat.transient.release()
        # Where after_forward equals the resting cut there is no second copy: the unit is simply sharded again.
        unit.move(_S.HELD if keep_held and unit.holds_more else _S.SHARDED)
