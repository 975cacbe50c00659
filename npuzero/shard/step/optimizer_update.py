"""Update a model: near shards on the device, chunk by chunk, and offloaded shards by :class:`OffloadedUpdate`.

Near shards are one chunk, unless ``Settings.chunk_bytes`` divides them. R4 of a unit starts when the last chunk that
contains any of it is updated, always in the order of units: within ``end()`` for near units; for an offloaded unit, and
the units after it, when the unit is awaited.

If several optimizers update a model in turn, R4 of a unit waits until all its parameters with a gradient
are updated, so that it runs once per step. It starts earlier if the unit is needed, as by the next forward, or if
unused gradients are dropped (``zero_grad()``).
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
    """Run the updates of one model, one at a time.

    Args:
        units: in forward order, which is the order of R4.
        lag: the delayed update, empty unless the plan delays updates.
        chunk_bytes: bytes of masters and moments per chunk of near shards; 0: one chunk.
        overlap: False: wait for each R4 at once.

    Attributes:
        stream: updates the offloaded shards.
        begun: whether the present step has changed the training state.
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
        self._waiting: deque[Unit] = deque()  # units with R4 still to start, in order
        self._sends: set[Unit] = set()  # units updated since their last R4
        self._trained = frozenset(id(p) for unit in units for flat in unit.trainable for p in flat.parameters)
        self._updated: frozenset[int] = frozenset()  # ids of the parameters of this step's optimizers so far
        self._left: set[int] = set()  # ids of the remaining parameters with a gradient
        self._holds = False  # units with parameters in _left keep waiting, even if they are needed
        self._lent: dict[
            int, list[TransientBuffer]
        ] = {}  # by unit, gradients to be released once its update has read them

    @contextlib.contextmanager
    def before_step(self, members: frozenset[int]) -> Iterator[None]:
        """Hold back, inside, R4 of units that another optimizer of this step has still to update.

        Args:
            members: ids of the parameters of the optimizer that steps next; parameters seen before begin a new step.
        """
        if not self._updated.isdisjoint(members):
            self._updated, self._left = frozenset(), set()
        with self.holding():
            yield

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Hold back, inside, R4 of units with gradients that no optimizer has used yet."""
        before, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = before

    def begin(self, members: frozenset[int], used: Mapping[FlatParameter, Sequence[bool]]) -> None:
        """Prepare for the update of an optimizer: mark the units that need R4.

        Args:
            members: ids of the optimizer's parameters.
            used: per slot of each flat, whether any rank has a gradient.

        Raises:
            NpuZeroError: the previous, delayed update has failed.
        """
        # begun is set before land(), which writes parameters of the delayed update: fail() cannot undo that.
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
        """Yield the near shards of ``flats`` chunk by chunk; the caller updates each before it requests the next.

        Args:
            flats: in order of their units.
            block_bytes: returns the bytes of masters and moments of MOMENT_BLOCK elements of a flat.
        """
        shards = [ShardPiece(flat, 0, flat.rests.states.near) for flat in flats]
        chunks = list(divide_into_chunks(shards, block_bytes, self._chunk_bytes))
        for i, chunk in enumerate(chunks):
            self.begun = True
            yield chunk
            self._restore_until(chunks[i + 1].pieces[0].flat if i + 1 < len(chunks) else None)

    def end(self) -> None:
        """Start R4 of the remaining near units, after the last chunk."""
        self._restore_until(None)
        for unit in self._waiting:  # for the offloaded or another update
            unit.close()
        self.begun = False
        if self._waiting:
            self._restorer.before = self._catch_up

    def fail(self, error: BaseException) -> None:
        """Undo :meth:`begin` after the step has raised ``error``.

        If the step has changed the training state, it cannot be undone: every later use of the model is refused, with
        the error of the offloaded update if that has failed.
        """
        if self.begun:
            self._restorer.refuse("optimizer.step", error, self.stream.check)
            for unit in self._units:
                unit.close()
        self.begun = False
        if self._restorer.before is None:
            self._waiting.clear()

    def proceed(self) -> None:
        """Start R4 of units that wait for no optimizer after gradients were dropped."""
        if self._left:
            self._advance(-1)

    def _restore_until(self, undone: FlatParameter | None) -> None:
        """Start R4, in order, of the units before that of ``undone`` and before the first in the offloaded update."""
        while self._waiting and undone not in self._waiting[0].trainable and not self.stream.has(self._waiting[0]):
            unit = self._waiting[0]
            if self._is_left(unit):
                return
            self._start(unit)
            self._waiting.popleft()
            if not self._overlap:
                self._restorer.wait(unit)  # not finish(), which would start R4 of units with chunks still to be updated

    def _start(self, unit: Unit) -> None:
        if unit in self._sends:
            self._restorer.start(unit)
            self._sends.discard(unit)

    def _is_left(self, unit: Unit) -> bool:
        """Return whether R4 would send parameters of ``unit`` that another optimizer may still update."""
        if not self._left or unit not in self._sends or not any(flat.rests.restored.many for flat in unit.trainable):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return any(id(p) in self._left and p.grad is not None for flat in unit.trainable for p in flat.parameters)

    # -- offloaded shards ------------------------------------------------------------------------------------------

    def run_far(self, *task: Any) -> None:
        """Start the offloaded update by :meth:`OffloadedUpdate.run`; from now on all uses of a unit wait for it."""
        try:
            self.stream.run(*task)
        except BaseException:
            self.begun = self.begun or self.stream.busy
            raise
        self.begun = True
        if self.stream.busy:
            self._restorer.before = self._catch_up

    def hold(self) -> None:
        """Close all units: an update that has begun inside backward waits for its step."""
        self._restorer.before = self._refuse
        for unit in self._units:
            if not unit.guarded and self.stream.has(unit):
                unit.close()

    def let_go(self) -> None:
        """Undo :meth:`hold` for the step."""
        self._restorer.before = None

    def _refuse(self, unit: Unit) -> None:
        self.stream.quiet()

    def _catch_up(self, unit: Unit) -> None:
        """Wait for the updates of the units up to ``unit`` and start their R4, and R4 of later ones already updated."""
        if not self._holds:  # parameters are needed: the step is over, even if an optimizer has not stepped
            self._left = set()
        self._advance(unit.index)

    def _advance(self, index: int) -> None:
        """Start R4, in order: wait for the updates of the units up to ``index``; include later ones already updated."""
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
            self._waiting.popleft()  # only now: if _start() raises, the next wait retries it
        if not self._waiting:
            self._restorer.before = None

    def spare_gradients(self, used: bool) -> None:
        """Wait until no update reads the gradients that are about to change.

        Args:
            used: whether the last step used these gradients; a delayed update does not read any others.

        Raises:
            NpuZeroError: the update has failed.
        """
        if used or not self._lag:
            self.settle()

    def settle(self) -> None:
        """Wait until all updates are done and all optimizer states are stored; start all pending R4.

        Raises:
            NpuZeroError: the update has failed.
        """
        self._restorer.check_here()
        if self._restorer.before is not None:
            self._restorer.before(self._units[-1])
        self.stream.quiet()

    def lend(self, unit: Unit, memory: TransientBuffer) -> None:
        """Release the memory of a gradient of ``unit``: at once, or after its update has been awaited."""
        if any(unit is waiting for waiting in self._waiting):
            self._lent.setdefault(unit.index, []).append(memory)
        else:
            memory.release()
