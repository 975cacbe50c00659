"""Lanes: work that runs in order on each and side by side with the others; and when all of it is done.

A program is the steps of one rank. Its own lane is compute; what it starts runs on other lanes, each in the order in
which it was started, as soon as its lane and its link are free. Where traffic runs beside compute both take longer
together than the longer one alone, max(a, b) + contention * min(a, b), which is charged to compute. So every end is a
maximum of sums, and where anything takes less time nothing ends later.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from npuzero.observe import Span

#: Two states of all lanes are the same where no end differs by more than this part of a second.
_SAME_S = 1e-12
#: Chunks that go through alike before the others are taken to do so, too.
_ALIKE = 2


class UnitPass(NamedTuple):
    """Compute the forward of a unit, or its backward: as long as the player's table says."""

    unit: int
    backward: bool


class DeviceWork(NamedTuple):
    """Run something else on the device; ``kind``: what its seconds count for."""

    kind: str
    seconds: float


class LaneCollective(NamedTuple):
    """Start ``times`` collectives, which take ``seconds`` together, on a lane and over a link.

    Attributes:
        key: by which they are awaited.
        kind, unit: what they do for which unit, for people to read.
    """

    lane: str
    link: str
    key: Hashable
    seconds: float
    times: int
    kind: str
    unit: int


class AwaitCollectives(NamedTuple):
    """Have compute wait for the first ``times`` of what was started under a key."""

    key: Hashable
    times: int
    kind: str
    unit: int


class MemoryTransfer(NamedTuple):
    """Copy between two memories, on the link's lane; ``needed``: compute waits for it at its next wait of this step,
    and what is started next does.
    """

    lane: str
    seconds: float
    needed: bool


class ChunkPipeline(NamedTuple):
    """Take equal chunks through stages, each on a lane of its own, with at most ``slots`` of them on their way.

    Attributes:
        stages: lanes and seconds, in order.
        numel: elements of a chunk.
    """

    times: int
    slots: int
    stages: tuple[tuple[str, float], ...]
    numel: int


class AwaitChunks(NamedTuple):
    """Have compute wait until so many elements of the chunks last begun are through; None: all that is under way."""

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

#: Of a unit, for forward and for backward: seconds of compute, and seconds that it waits for what its layers send.
Acts = Sequence[tuple[tuple[float, float], tuple[float, float]]]


@dataclass
class ProgramPlayer:
    """Run a program.

    Attributes:
        acts: how long each unit's passes take.
        contention: see above.
        names: of units; where there are any spans are kept, and loops played to their end.
        now: when compute is free, in seconds.
        waited: seconds that compute waited, by what for.
        contended_s: by which traffic made compute longer.
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
        """Run the steps, behind those that were run before."""
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
        """Tell whether nothing is under way."""
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
        """Run something on the device, beside whatever traffic is there."""
        begin = self.now
        beside = max(self._links.values(), default=0.0) - begin
        contended = self.contention * min(seconds, beside) if beside > 0 else 0.0
        self.contended_s += contended
        self.now = begin + seconds + contended
        if self.names and seconds:
            self.spans.append(Span(category, name, begin, self.now, 0))

    def _send(self, send: LaneCollective) -> None:
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
        """Let compute wait until ``end``."""
        if end > self.now:
            self.waited[kind] += end - self.now
            if self.names:
                self.spans.append(Span(f"wait for {kind}", name, self.now, end, 0))
            self.now = end

    def _transfer(self, copy: MemoryTransfer) -> None:
        # What goes on comes after what came: from a disk, and then to the device.
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
        """Take chunks through; from where each does what the one before it did, all at once."""
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
        """Repeat steps; once all lanes are as they were a time before, at once."""
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
        """Return when all that is under way ends, from now on."""
        now = self.now
        ends = [*self._free.values(), *self._links.values(), self._copied]
        ends += [end for under_way in self._under_way.values() for end, _ in under_way]
        return [max(0.0, end - now) for end in ends]

    def _shift(self, seconds: float) -> None:
        """Let so much time pass in which all goes on as it did."""
        self.now += seconds
        self._copied += seconds
        for ends in (self._free, self._links):
            for each in ends:
                ends[each] += seconds
        for under_way in self._under_way.values():
            for i, (end, count) in enumerate(under_way):
                under_way[i] = end + seconds, count


def _is_same_state(before: Sequence[float], after: Sequence[float]) -> bool:
    """Tell whether two states of all lanes are the same."""
    pairs = itertools.zip_longest(before, after, fillvalue=float("inf"))
    return all(abs(a - b) < _SAME_S for a, b in pairs)
