"""Skew: what ranks that come late, and links that are slow, cost collectives and whole steps, to 16,384 ranks.

A synchronous collective on a fixed schedule is deterministic: a message starts when both its ranks are ready, and takes
the latency and the bytes of its link. So when each rank is done is a recurrence of maxima and sums, a max-plus product
for each round, and no queue of events is needed. Of a ring, with the link that leads from rank r - 1 to rank r::

    t[r] = max(t[r], t[r - 1]) + latency[r] + bytes / bandwidth[r]

A whole step under a plan is played for all ranks side by side: each computes by itself, and a collective begins when
the last of its group is there. What runs on other lanes hides what it can; contention, and what is copied to other
memories, are left out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from npuzero.errors import ConfigError
from npuzero.plan import AXES, Axes, MeshShape
from npuzero.plan.prediction.predict import iter_collectives
from npuzero.plan.table.step_moves import (
    CollectivePurpose,
    ComputePass,
    LaunchReduction,
    Move,
    PlannedCollective,
    RepeatMoves,
    StartCollective,
    WaitCollective,
)
from npuzero.planner.hardware.cluster import Cluster
from npuzero.planner.hardware.network import collective_bytes, collective_s

Seconds = NDArray[np.float64]

# -- collectives -------------------------------------------------------------------------------------------------------


def ring_ends(starts: Seconds, step_s: Seconds, rounds: int) -> Seconds:
    """Return when each rank of a ring is done.

    Args:
        starts: [..., n] seconds; several rings may stand side by side.
        step_s: [..., n] seconds of one message from rank r - 1 to rank r.
        rounds: n - 1 for a gather or a scatter, twice that for an all_reduce.

    Returns:
        [..., n] seconds.

    Example::

        import numpy as np
        from benchmarks.planning.skew import ring_ends

        late = np.array([0.0, 0.0, 0.5, 0.0])
        print(ring_ends(late, np.full(4, 1e-3), rounds=3))
    """
    ready = np.concatenate([starts[..., -1:], starts], axis=-1)  # the last rank stands before the first, too
    done: Seconds = ready[..., 1:]
    for _ in range(rounds):
        done[...] = np.maximum(done, ready[..., :-1]) + step_s
        ready[..., 0] = ready[..., -1]
    return done


def hierarchical_ends(starts: Seconds, local_s: Seconds, node_s: Seconds) -> Seconds:
    """Return when each rank is done with an all_reduce by level: a scatter on each node, an all_reduce between nodes of
    the ranks with one index, a gather on each node.

    Args:
        starts: [nodes, local] seconds.
        local_s: [nodes, local] seconds of one message from the rank before it on its node.
        node_s: [nodes, local] seconds of one message from the node before, of a node's part of the buffer.

    Returns:
        [nodes, local] seconds.
    """
    nodes, local = starts.shape
    scattered = ring_ends(starts, local_s, local - 1)
    summed = ring_ends(np.ascontiguousarray(scattered.T), np.ascontiguousarray(node_s.T), 2 * (nodes - 1))
    return ring_ends(np.ascontiguousarray(summed.T), local_s, local - 1)


def tree_ends(starts: Seconds, step_s: Seconds, chunks: int = 1) -> Seconds:
    """Return when each rank is done with an all_reduce on a binary tree: sums go up to rank 0, and the whole down.

    Rank r's parent is (r - 1) // 2. Chunks follow each other; a link carries one each way at a time.

    Args:
        starts: [n] seconds.
        step_s: [n] seconds of one chunk between a rank and its parent; rank 0's is not used.
        chunks: parts of the buffer.

    Returns:
        [n] seconds.
    """
    n = len(starts)
    summed = np.repeat(starts[:, None], chunks, axis=1)
    levels = [np.arange(2**depth - 1, min(2 ** (depth + 1) - 1, n)) for depth in range(1, n.bit_length())]
    levels = [ranks for ranks in levels if len(ranks)]
    for ranks in reversed(levels):
        np.maximum.at(summed, (ranks - 1) // 2, _link_finish_times(summed[ranks], step_s[ranks]))
    whole = summed
    for ranks in levels:
        whole[ranks] = _link_finish_times(whole[(ranks - 1) // 2], step_s[ranks])
    done: Seconds = whole[:, -1]
    return done


def _link_finish_times(ready: Seconds, step_s: Seconds) -> Seconds:
    """Return when chunks that are ready at [n, chunks] are through links that take [n] seconds for each."""
    done = np.empty_like(ready)
    free = np.full(len(ready), -np.inf)
    for chunk in range(ready.shape[1]):
        free = np.maximum(ready[:, chunk], free) + step_s
        done[:, chunk] = free
    return done


def ring_steps(cluster: Cluster, nbytes: int) -> Seconds:
    """Return the seconds of one message on each link of a ring over all ranks of a cluster, [ranks].

    A node's ranks are neighbours; between nodes the ring goes over the links of all ranks of a node side by side.

    Args:
        nbytes: of the whole buffer, of which a message is one rank's part.
    """
    part = nbytes / cluster.ranks
    crosses = (np.arange(cluster.ranks) % cluster.local == 0) & (cluster.nodes > 1)
    steps = np.zeros(cluster.ranks)
    for level, where, wires in (("local", ~crosses, 1), ("node", crosses, cluster.local)):
        if where.any():
            link = cluster.links[level]
            bytes_per_s = link.among(cluster.local) if level == "local" else link.bytes_per_s
            steps[where] = link.latency_s + part / (wires * bytes_per_s)
    return steps


# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlowLink:
    """Describe one link that has a part of its bandwidth: a rank's to its node, or to other nodes.

    Attributes:
        factor: by which it is slower.
        level: ``"local"`` or ``"node"``.
        rank: whose it is.
    """

    factor: float
    level: str = "node"
    rank: int = 0


@dataclass(frozen=True)
class LateRank:
    """Describe one rank that begins a step late: ``seconds`` later than it would."""

    seconds: float
    rank: int = 0


@dataclass(frozen=True)
class StepLoss:
    """Hold what a disturbance costs.

    Attributes:
        step_s: seconds of an undisturbed step.
        lost_s: how much longer it takes: each step with a slow link, one with a rank that is late.
        crossed: by purpose, how many collectives of a step go over the slow link.
    """

    step_s: float
    lost_s: float
    crossed: Counter[CollectivePurpose] = field(default_factory=Counter)

    @property
    def part(self) -> float:
        """Return what is lost as a part of the step."""
        return self.lost_s / self.step_s


def step_loss(
    cluster: Cluster,
    mesh: MeshShape,
    moves: Sequence[Move],
    compute_s: Callable[[int, bool], float],
    disturbance: SlowLink | LateRank,
    *,
    update_s: float = 0.0,
) -> StepLoss:
    """Return what one slow link, or one rank that is late, costs a step under a plan.

    Steps are played one behind another, since what one starts may end in the next.

    Args:
        moves: the plan's step: :func:`npuzero.plan.steady_step`.
        compute_s: seconds of a unit's forward, or, with True, of its backward.
        update_s: seconds of the optimizer's update.

    Raises:
        ConfigError: stages of a pipeline, which differ in what they do; a rank or level that there is not; a link that
            is faster, or a rank that is early.
    """
    _check_disturbance(cluster, mesh, disturbance)
    slow = disturbance if isinstance(disturbance, SlowLink) else None
    calm = _SkewReplay(cluster, mesh, compute_s, update_s)
    ends = [calm.play(moves) for _ in range(3)]
    step_s = ends[2] - ends[1]
    other = _SkewReplay(cluster, mesh, compute_s, update_s, slow)
    first = other.play(moves)
    if isinstance(disturbance, LateRank):
        other.hold(disturbance)
    second, third = other.play(moves), other.play(moves)
    lost_s = third - second - step_s if slow else third - ends[2]
    assert first >= ends[0]  # nothing that takes longer ends sooner
    return StepLoss(step_s, lost_s, count_crossing_collectives(cluster, mesh, moves, slow) if slow else Counter())


def count_crossing_collectives(
    cluster: Cluster, mesh: MeshShape, moves: Iterable[Move], slow: SlowLink
) -> Counter[CollectivePurpose]:
    """Return how many collectives of a step go over a rank's link, by what they are for."""
    found: Counter[CollectivePurpose] = Counter()
    for each, times in iter_collectives(moves):
        if slow.level in collective_bytes(cluster, mesh, each.verb, each.axes, each.nbytes):
            found[each.purpose] += times
    return found


def _check_disturbance(cluster: Cluster, mesh: MeshShape, disturbance: SlowLink | LateRank) -> None:
    if mesh.pipe > 1:
        raise ConfigError(
            "step_loss(mesh=)", expected="one stage", got=f"{mesh.pipe} stages", do="Ask for the ranks of one stage."
        )
    if mesh.world != cluster.ranks or disturbance.rank not in range(mesh.world):
        raise ConfigError(
            "step_loss()",
            expected=f"a mesh of the cluster's {cluster.ranks} ranks, and one of them",
            got=f"{mesh.world} ranks, rank {disturbance.rank}",
            do="Take cluster.with_ranks(mesh.world).",
        )
    if isinstance(disturbance, SlowLink) and (
        disturbance.level not in ("local", "node") or not disturbance.factor >= 1
    ):
        raise ConfigError(
            "SlowLink",
            expected="the level local or node, and a factor from 1 on",
            got=repr(disturbance),
            do="Say which.",
        )
    if isinstance(disturbance, LateRank) and not disturbance.seconds >= 0:
        raise ConfigError("Late.seconds", expected="0 or more", got=repr(disturbance.seconds), do="Say how late.")


class _SkewReplay:
    """Run steps for all ranks side by side.

    Attributes:
        now: when each rank's compute is free, by its place along the axes.
    """

    def __init__(
        self,
        cluster: Cluster,
        mesh: MeshShape,
        compute_s: Callable[[int, bool], float],
        update_s: float,
        slow: SlowLink | None = None,
    ) -> None:
        self.now = np.zeros([getattr(mesh, axis) for axis in AXES])
        self._cluster, self._mesh, self._compute_s, self._update_s = cluster, mesh, compute_s, update_s
        self._slow = slow
        self._free: dict[tuple[str, Axes], Seconds] = {}
        self._under_way: dict[tuple[CollectivePurpose, int], deque[tuple[Seconds, int]]] = {}
        self._lasts: dict[tuple[str, Axes, int], tuple[float, float]] = {}

    def play(self, moves: Sequence[Move]) -> float:
        """Run a step, and return when the last rank's compute is done with it."""
        last = max((i for i, move in enumerate(moves) if _comes_before_update(move)), default=-1) + 1
        self._moves(moves[:last])
        self.now = self.now + self._update_s
        self._moves(moves[last:])
        return float(self.now.max())

    def hold(self, late: LateRank) -> None:
        """Let a rank begin its next step late."""
        place = self._mesh.place(late.rank)
        self.now = self.now.copy()
        self.now[tuple(place[axis] for axis in AXES)] += late.seconds

    def _moves(self, moves: Iterable[Move]) -> None:
        for move in moves:
            if isinstance(move, ComputePass):
                self.now = self.now + self._compute_s(move.unit, move.backward)
            elif isinstance(move, StartCollective):
                self._start(move.collective, move.count)
            elif isinstance(move, WaitCollective):
                self._wait(move)
            elif isinstance(move, RepeatMoves):
                for _ in range(move.times):
                    self._moves(move.moves)

    def _start(self, collective: PlannedCollective, count: int) -> None:
        axes = tuple(axis for axis in AXES if axis in collective.axes)
        lane = collective.purpose.channel, axes
        ready = np.maximum(self.now, self._free[lane]) if lane in self._free else self.now
        begin = ready.max(axis=tuple(map(AXES.index, axes)), keepdims=True)
        seconds, slowed = self._seconds(collective)
        end = begin + count * seconds
        if self._slow is not None and slowed > seconds:
            place = self._mesh.place(self._slow.rank)
            here = tuple(0 if axis in axes else place[axis] for axis in AXES)
            end[here] = begin[here] + count * slowed
        self._free[lane] = end = np.broadcast_to(end, self.now.shape)
        self._under_way.setdefault((collective.purpose, collective.unit), deque()).append((end, count))

    def _seconds(self, collective: PlannedCollective) -> tuple[float, float]:
        """Return how long it takes, and how long where it goes over the slow link."""
        key = collective.verb, collective.axes, collective.nbytes
        if key not in self._lasts:
            seconds = slowed = collective_s(self._cluster, self._mesh, *key)
            slow = self._slow
            if slow is not None and slow.level in self._cluster.links:
                bytes_per_s = self._cluster.links[slow.level].bytes_per_s / slow.factor
                # Rings side by side have equal parts: the one over this link is as slow as if all were.
                slowed = collective_s(self._cluster.with_link(slow.level, bytes_per_s=bytes_per_s), self._mesh, *key)
            self._lasts[key] = seconds, slowed
        return self._lasts[key]

    def _wait(self, wait: WaitCollective) -> None:
        under_way, left = self._under_way.get((wait.purpose, wait.unit)), wait.count
        while under_way and left > 0:
            end, count = under_way.popleft()
            self.now, left = np.maximum(self.now, end), left - count


def _comes_before_update(move: Move) -> bool:
    """Tell whether the update comes after ``move``: the last such one is the last of the gradients."""
    if isinstance(move, StartCollective):
        return move.collective.purpose not in (CollectivePurpose.GATHER, CollectivePurpose.RESTORE)
    if isinstance(move, WaitCollective):
        return move.purpose not in (CollectivePurpose.GATHER, CollectivePurpose.RESTORE)
    return isinstance(move, (ComputePass, LaunchReduction)) or (
        isinstance(move, RepeatMoves) and any(isinstance(each, ComputePass) for each in move.moves)
    )
