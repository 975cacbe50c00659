"""Lanes: a simulation of work that runs in order on each lane and in parallel across lanes.

A program is the steps of one rank. Compute runs on its own lane. The work it starts runs on other lanes, in start
order, as soon as the lane and its link are free. Traffic that overlaps compute slows both: together they take max(a, b)
+ contention * min(a, b), and the extra time is charged to compute. Every end time is a maximum of sums, so a shorter
duration never makes anything end later.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from npuzero.observe import Span

#: Tolerance in seconds when states of all lanes are compared.
_SAME_S = 1e-12
#: Number of equal chunks after which the remaining chunks are assumed to be equal.
_ALIKE = 2


class UnitPass(NamedTuple):
    """Compute the forward or backward of a unit, for the time in the player's table."""

    unit: int
    backward: bool


class DeviceWork(NamedTuple):
    """Run other work on the device; ``kind`` is the category that its seconds count for."""

    kind: str
    seconds: float


class LaneCollective(NamedTuple):
    """Start ``times`` collectives, which take ``seconds`` in total, on a lane and over a link.

    Attributes:
        key: key for :class:`AwaitCollectives`.
        kind, unit: purpose and unit, for display.
    """

    lane: str
    link: str
    key: Hashable
    seconds: float
    times: int
    kind: str
    unit: int


class AwaitCollectives(NamedTuple):
    """Wait in compute for the first ``times`` collectives started under a key."""

    key: Hashable
    times: int
    kind: str
    unit: int


class MemoryTransfer(NamedTuple):
    """Copy between two memories on the link's lane.

    If ``needed``, compute waits for it at the next wait of this step, and collectives started afterwards also wait.
    """

    lane: str
    seconds: float
    needed: bool


class ChunkPipeline(NamedTuple):
    """Run equal chunks through stages, each on its own lane, with at most ``slots`` chunks in flight.

    Attributes:
        stages: lanes and seconds, in order.
        numel: elements of a chunk.
    """

    times: int
    slots: int
    stages: tuple[tuple[str, float], ...]
    numel: int


class AwaitChunks(NamedTuple):
    """Wait in compute until ``numel`` elements of the latest chunks are done; None: all chunks in flight."""

    numel: int | None


class RepeatSteps(NamedTuple):
    """Repeat steps."""

    times: int
    steps: tuple[Any, ...]


Step = (
    UnitPass
    | DeviceWork
    | LaneCollective
    | AwaitCollectives
    | MemoryTransfer
    | ChunkPipeline
    | AwaitChunks
    | RepeatSteps
)

#: By unit, for forward and backward: seconds of compute, and seconds of waiting for its layers' collectives.
Acts = Sequence[tuple[tuple[float, float], tuple[float, float]]]


@dataclass
class ProgramPlayer:
    """Run a program.

    Attributes:
        acts: durations of each unit's passes.
        contention: see the module's docstring.
        names: names of units; if given, spans are recorded and loops are simulated in full.
        now: time at which compute is free, in seconds.
        waited: seconds that compute waited, by cause.
        contended_s: seconds that traffic added to compute.
    """

    acts: Acts
    contention: float
    names: Sequence[str] = ()
    now: float = 0.0
    waited: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    contended_s: float = 0.0
    spans: list[Span] = field(default_factory=list)
    _free: dict[str, float] = field(default_factory=dict)
    _links: dict[str, float] = field(default_factory=dict)
    _under_way: dict[Hashable, deque[tuple[float, int]]] = field(default_factory=dict)
    _copied: float = 0.0
    _through: list[tuple[int, float]] = field(default_factory=list)

    def play(self, steps: Sequence[Step]) -> None:
        """Run the steps after all earlier ones."""
        do: dict[type, Callable[[Any], None]] = {
            UnitPass: self._act,
            DeviceWork: self._work,
            LaneCollective: self._send,
            AwaitCollectives: self._await,
            MemoryTransfer: self._transfer,
            ChunkPipeline: self._chunks,
            AwaitChunks: self._settle,
            RepeatSteps: self._loop,
        }
        for step in steps:
            do[step.__class__](step)

    @property
    def quiet(self) -> bool:
        """Tell whether nothing is in flight."""
        return all(end <= self.now for end in self._free.values())

    def _act(self, act: UnitPass) -> None:
        seconds, blocked = self.acts[act.unit][act.backward]
        name = f"{'backward' if act.backward else 'forward'} {self.names[act.unit]}" if self.names else ""
        self._compute("compute", name, seconds)
        if blocked:
            self._until(self.now + blocked, "layers", name)

    def _work(self, work: DeviceWork) -> None:
        self._compute("compute", work.kind, work.seconds)

    def _compute(self, category: str, name: str, seconds: float) -> None:
        """Run work on the device, slowed by concurrent traffic."""
        begin = self.now
        beside = max(self._links.values(), default=0.0) - begin
        contended = self.contention * min(seconds, beside) if beside > 0 else 0.0
        self.contended_s += contended
        self.now = begin + seconds + contended
        if self.names and seconds:
            self.spans.append(Span(category, name, begin, self.now, 0))

    def _send(self, send: LaneCollective) -> None:
        # Lanes that share a link take turns on it: their bytes compete for one bandwidth.
        begin = max(self.now, self._free.get(send.lane, 0.0), self._links.get(send.link, 0.0), self._copied)
        end = begin + send.seconds
        self._free[send.lane] = self._links[send.link] = end
        self._under_way.setdefault(send.key, deque()).append((end, send.times))
        if self.names:
            name = f"{send.kind} {self.names[send.unit]}"
            self.spans.append(Span(f"comm {send.lane}", name, begin, end, 0, {"link": send.link}))

    def _await(self, wait: AwaitCollectives) -> None:
        under_way, left, end = self._under_way.get(wait.key), wait.times, self._copied
        while under_way and left > 0:
            done, count = under_way.popleft()
            end, left = max(end, done), left - count
        if end > self.now:
            self._until(end, wait.kind, self.names[wait.unit] if self.names else "")

    def _until(self, end: float, kind: str, name: str) -> None:
        """Make compute wait until ``end``."""
        if end > self.now:
            self.waited[kind] += end - self.now
            if self.names:
                self.spans.append(Span(f"wait for {kind}", name, self.now, end, 0))
            self.now = end

    def _transfer(self, copy: MemoryTransfer) -> None:
        # A needed copy starts after the previous one: from disk to host first, then to the device.
        end = self._stage(copy.lane, max(self.now, self._copied if copy.needed else 0.0), copy.seconds)
        if copy.needed:
            self._copied = end

    def _stage(self, lane: str, ready: float, seconds: float) -> float:
        begin = max(ready, self._free.get(lane, 0.0))
        end = self._free[lane] = begin + seconds
        if self.names:
            self.spans.append(Span(lane, lane, begin, end, 0))
        return end

    def _chunks(self, chunks: ChunkPipeline) -> None:
        """Run chunks through the stages; once they progress by equal steps, advance all remaining ones at once."""
        ends, numel = deque([self.now] * chunks.slots, chunks.slots), self._through[-1][0] if self._through else 0
        self._through.append((numel, self.now))
        lanes = [lane for lane, _ in chunks.stages]
        before: list[float] = []
        alike = 0
        for i in range(chunks.times):
            end = ends.popleft()
            for lane, seconds in chunks.stages:
                end = self._stage(lane, end, seconds)
            ends.append(end)
            at = [self._free[lane] for lane in lanes] + list(ends)
            steps = [b - a for a, b in zip(before, at, strict=False)]
            # In the steady state every lane and slot advances by the same time per chunk, the time of the slowest
            # stage.
            alike = alike + 1 if steps and max(steps) - min(steps) < _SAME_S else 0
            before = at
            if alike >= _ALIKE and not self.names:
                for lane in lanes:
                    self._free[lane] += (chunks.times - 1 - i) * steps[0]
                end += (chunks.times - 1 - i) * steps[0]
                break
        self._through.append((numel + chunks.times * chunks.numel, end))

    def _settle(self, settle: AwaitChunks) -> None:
        through = self._through
        if not through:
            return
        total = through[-1][0] if settle.numel is None else settle.numel
        end = through[-1][1]
        for (low, begin), (high, done) in itertools.pairwise(through):
            if low < total <= high:
                end = begin + (done - begin) * (total - low) / (high - low)
                break
        self._until(end, "update", "")
        if settle.numel is None:
            through.clear()

    def _loop(self, loop: RepeatSteps) -> None:
        """Repeat steps; once the state of all lanes repeats, advance all remaining iterations at once."""
        before: list[float] | None = None
        for i in range(loop.times):
            begin, contended, waited = self.now, self.contended_s, dict(self.waited)
            self.play(loop.steps)
            at = self._state()
            if before is not None and not self.names and _is_same_state(before, at):
                left = loop.times - 1 - i
                self.contended_s += left * (self.contended_s - contended)
                for kind, seconds in self.waited.items():
                    self.waited[kind] += left * (seconds - waited.get(kind, 0.0))
                self._shift(left * (self.now - begin))
                return
            before = at

    def _state(self) -> list[float]:
        """Return the end times of everything in flight, relative to now."""
        now = self.now
        ends = [*self._free.values(), *self._links.values(), self._copied]
        ends += [end for under_way in self._under_way.values() for end, _ in under_way]
        return [max(0.0, end - now) for end in ends]

    def _shift(self, seconds: float) -> None:
        """Move all times by ``seconds``, keeping the state of the lanes."""
        self.now += seconds
        self._copied += seconds
        for ends in (self._free, self._links):
            for each in ends:
                ends[each] += seconds
        for under_way in self._under_way.values():
            for i, (end, count) in enumerate(under_way):
                under_way[i] = end + seconds, count


def _is_same_state(before: Sequence[float], after: Sequence[float]) -> bool:
    """Tell whether two states of all lanes are equal."""
    pairs = itertools.zip_longest(before, after, fillvalue=float("inf"))
    return all(abs(a - b) < _SAME_S for a, b in pairs)
