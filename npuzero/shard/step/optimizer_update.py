"""The update of a model: chunks of what rests on the device, one after the other, and the stream of what rests far.

What is near is one chunk, unless ``Settings.chunk_bytes`` divides it. R4 of a unit starts when the last chunk with
anything of it is updated, always in the order of the units: within ``end()`` for those that are near, and for a unit
that is far, and those behind it, when it is waited for.

Where several optimizers update a model one after the other, R4 of a unit waits until all of its parameters that have a
gradient are updated: so it is sent once a step. It starts sooner where somebody needs the unit, such as the next
forward, or where the gradients that no optimizer has used are dropped (``zero_grad()``).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from npuzero.memory import TransientBuffer
from npuzero.shard.offload.chunks import ShardPiece, UpdateChunk, divide_into_chunks
from npuzero.shard.offload.delayed_update import DelayedUpdate
from npuzero.shard.offload.offloaded_update import OffloadedUpdate
from npuzero.shard.parameters.all_gather_updated import UpdatedParameterGatherer
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.unit import Unit


class OptimizerUpdate:
    """Run the updates of one model, one after the other.

    Args:
        units: in forward order, in which R4 starts.
        lag: what updates are ahead of the parameters, if anything.
        chunk_bytes: of masters and moments in a chunk of what is near; 0: all in one.
        overlap: False ends each R4 at once.

    Attributes:
        stream: updates what is far.
        begun: whether the present step has changed anything of the training state.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        restorer: UpdatedParameterGatherer,
        stream: OffloadedUpdate,
        lag: DelayedUpdate,
        chunk_bytes: int,
        overlap: bool,
    ) -> None:
        self._units = units
        self._restorer = restorer
        self.stream = stream
        self._lag = lag
        self._chunk_bytes = chunk_bytes
        self._overlap = overlap
        self.begun = False
        self._waiting: deque[Unit] = deque()  # for their R4 to start, in order
        self._sends: set[Unit] = set()  # of which anything was updated since their last R4
        self._trained = frozenset(id(p) for unit in units for flat in unit.trainable for p in flat.parameters)
        self._updated: frozenset[int] = frozenset()  # ids of the parameters that optimizers have had in this step
        self._left: set[int] = set()  # ids of those beside them that had a gradient
        self._holds = False  # units with any of these wait on, whoever finishes them
        self._lent: dict[
            int, list[TransientBuffer]
        ] = {}  # by unit, gradients to be released once its update has read them

    @contextlib.contextmanager
    def before_step(self, members: frozenset[int]) -> Iterator[None]:
        """Start no R4, inside, of a unit that another optimizer of this step is still to update.

        Args:
            members: ids of the parameters of the optimizer that steps next; one that comes again begins a new step.
        """
        if not self._updated.isdisjoint(members):
            self._updated, self._left = frozenset(), set()
        with self.holding():
            yield

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Start no R4, inside, of a unit with gradients that no optimizer has used yet."""
        before, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = before

    def begin(self, members: frozenset[int], used: Mapping[FlatParameter, Sequence[bool]]) -> None:
        """Prepare for an optimizer that writes masters and parameters: each unit with any of them has an R4 to come.

        Args:
            members: ids of its parameters.
            used: per slot of each flat, whether any rank has a gradient.

        Raises:
            NpuZeroError: the update before was delayed until now, and has failed.
        """
        self._lag.quiet()
        self.begun = self._lag.pending
        self._lag.land()
        self._updated |= members
        if self._lag:
            self._sends.update(self._units)
        elif len(members) == len(self._trained):
            self._left = set()
            self._sends.update(u for u in self._units if any(map(any, map(used.__getitem__, u.trainable))))
        else:
            flats = ((unit, flat) for unit in self._units for flat in unit.trainable)
            slots = [(unit, id(p)) for unit, flat in flats for p in itertools.compress(flat.parameters, used[flat])]
            self._left = {key for _, key in slots if key not in self._updated}
            self._sends.update(unit for unit, key in slots if key in members)
        self._waiting = deque(self._units)

    def chunks(
        self, flats: Sequence[FlatParameter], block_bytes: Callable[[FlatParameter], int]
    ) -> Iterator[UpdateChunk]:
        """Yield what is near of ``flats`` chunk by chunk; when the next one is asked for, the last one is updated.

        Args:
            flats: in order of their units.
            block_bytes: what MOMENT_BLOCK elements of a flat's masters and moments take.
        """
        shards = [ShardPiece(flat, 0, flat.rests.states.near) for flat in flats]
        chunks = list(divide_into_chunks(shards, block_bytes, self._chunk_bytes))
        for i, chunk in enumerate(chunks):
            self.begun = True
            yield chunk
            self._restore_until(chunks[i + 1].pieces[0].flat if i + 1 < len(chunks) else None)

    def end(self) -> None:
        """Start R4 of the units that still wait: nothing near is written any more."""
        self._restore_until(None)
        for unit in self._waiting:  # for the stream, or for another optimizer
            unit.close()
        self.begun = False
        if self._waiting:
            self._restorer.before = self._catch_up

    def fail(self, error: BaseException) -> None:
        """Undo what :meth:`begin` did, since the step has raised ``error``.

        Where the step has changed anything, that cannot be undone: every later use of the model is refused, by the
        error of the update of what is far where that has failed.
        """
        if self.begun:
            self._restorer.refuse("optimizer.step", error, self.stream.check)
            for unit in self._units:
                unit.close()
        self.begun = False
        if self._restorer.before is None:
            self._waiting.clear()

    def proceed(self) -> None:
        """Start R4 of the units that wait for no optimizer any more, since gradients were dropped."""
        if self._left:
            self._advance(-1)

    def _restore_until(self, undone: FlatParameter | None) -> None:
        """Start R4, in order, of the units before that of ``undone``, and before the first that the stream has."""
        while self._waiting and undone not in self._waiting[0].trainable and not self.stream.has(self._waiting[0]):
            unit = self._waiting[0]
            if self._is_left(unit):
                return
            self._start(unit)
            self._waiting.popleft()
            if not self._overlap:
                self._restorer.wait(unit)  # finish() would start R4 of units whose chunks are yet to be updated

    def _start(self, unit: Unit) -> None:
        if unit in self._sends:
            self._restorer.start(unit)
            self._sends.discard(unit)

    def _is_left(self, unit: Unit) -> bool:
        """Tell whether R4 would send anything of ``unit`` that another optimizer may be about to update."""
        if not self._left or unit not in self._sends or not any(flat.rests.restored.many for flat in unit.trainable):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return any(id(p) in self._left and p.grad is not None for flat in unit.trainable for p in flat.parameters)

    # -- what is far -----------------------------------------------------------------------------------------------

    def run_far(self, *task: Any) -> None:
        """Begin to update what is far, as :meth:`OffloadedUpdate.run` does; from now on who needs a unit waits for
        it.
        """
        try:
            self.stream.run(*task)
        except BaseException:
            self.begun = self.begun or self.stream.busy
            raise
        self.begun = True
        if self.stream.busy:
            self._restorer.before = self._catch_up

    def hold(self) -> None:
        """Let nobody have a unit: an update that has begun inside backward waits for its step."""
        self._restorer.before = self._refuse
        for unit in self._units:
            if not unit.guarded and self.stream.has(unit):
                unit.close()

    def let_go(self) -> None:
        """Let the step have the units that :meth:`hold` has kept."""
        self._restorer.before = None

    def _refuse(self, unit: Unit) -> None:
        self.stream.quiet()

    def _catch_up(self, unit: Unit) -> None:
        """Wait for the update of ``unit`` and of those before it, and start their R4; and of those behind, if done."""
        if not self._holds:  # somebody needs parameters: the step is over, whatever optimizer has taken none
            self._left = set()
        self._advance(unit.index)

    def _advance(self, index: int) -> None:
        """Start R4, in order, of the units up to ``index``, waiting for their update, and of those behind, if done."""
        while self._waiting and (index >= self._waiting[0].index or self.stream.done(self._waiting[0])):
            first = self._waiting[0]
            if self._is_left(first):
                return
            self.stream.wait(first)
            for memory in self._lent.pop(first.index, ()):
                memory.release()
            if not first.guarded:
                first.reopen()
            self._start(first)
            self._waiting.popleft()  # not before: where it raises, whoever waits next starts it
        if not self._waiting:
            self._restorer.before = None

    def spare_gradients(self, used: bool) -> None:
        """Wait until no update reads gradients that are about to change: those ``used`` by the last step, or others.

        Raises:
            NpuZeroError: the update has failed.
        """
        if used or not self._lag:
            self.settle()

    def settle(self) -> None:
        """Wait until nothing is updated any more, and all states are where they rest; start what R4 still waits.

        Raises:
            NpuZeroError: the update has failed.
        """
        self._restorer.check_here()
        if self._restorer.before is not None:
            self._restorer.before(self._units[-1])
        self.stream.quiet()

    def lend(self, unit: Unit, memory: TransientBuffer) -> None:
        """Release the memory of a gradient of ``unit``: at once, or when its update has been waited for."""
        if any(unit is waiting for waiting in self._waiting):
            self._lent.setdefault(unit.index, []).append(memory)
        else:
            memory.release()
