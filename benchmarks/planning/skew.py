"""Skew: the cost of late ranks and slow links for collectives and full steps, up to 16,384 ranks.

A synchronous collective on a fixed schedule is deterministic: a message starts when both its ranks are ready, and takes
its link's latency plus bytes over bandwidth. The finish time of each rank is therefore a recurrence of maxima and sums,
a max-plus product per round, without an event queue. For a ring, with the link from rank r - 1 to rank r::

    t[r] = max(t[r], t[r - 1]) + latency[r] + bytes / bandwidth[r]

A full step under a plan is replayed for all ranks in parallel: each computes independently, and a collective begins
when the last rank of its group arrives. Other lanes overlap; contention and copies to other memories are ignored.
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
    """Return the finish time of each rank of a ring.

    Args:
        starts: [..., n] seconds; leading dimensions are separate rings.
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
    ready = np.concatenate([starts[..., -1:], starts], axis=-1)  # the last rank also precedes the first
    done: Seconds = ready[..., 1:]
    for _ in range(rounds):
        done[...] = np.maximum(done, ready[..., :-1]) + step_s
        ready[..., 0] = ready[..., -1]
    return done


def hierarchical_ends(starts: Seconds, local_s: Seconds, node_s: Seconds) -> Seconds:
    """Return the finish time of each rank of a hierarchical all_reduce.

    It is a scatter on each node, an all_reduce between nodes for the ranks with the same index, and a gather on each
    node.

    Args:
        starts: [nodes, local] seconds.
        local_s: [nodes, local] seconds of one message from the previous rank on its node.
        node_s: [nodes, local] seconds of one message from the previous node, of a node's part of the buffer.

    Returns:
        [nodes, local] seconds.
    """
    nodes, local = starts.shape
    scattered = ring_ends(starts, local_s, local - 1)
    summed = ring_ends(np.ascontiguousarray(scattered.T), np.ascontiguousarray(node_s.T), 2 * (nodes - 1))
    return ring_ends(np.ascontiguousarray(summed.T), local_s, local - 1)


def tree_ends(starts: Seconds, step_s: Seconds, chunks: int = 1) -> Seconds:
    """Return the finish time of each rank of an all_reduce on a binary tree: sums up to rank 0, then results down.

    Rank r's parent is (r - 1) // 2. Chunks are pipelined; a link carries one chunk per direction at a time.

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
    """Return the arrival times of chunks ready at [n, chunks] through links that take [n] seconds per chunk."""
    done = np.empty_like(ready)
    free = np.full(len(ready), -np.inf)
    for chunk in range(ready.shape[1]):
        free = np.maximum(ready[:, chunk], free) + step_s
        done[:, chunk] = free
    return done


def ring_steps(cluster: Cluster, nbytes: int) -> Seconds:
    """Return the seconds of one message on each link of a ring over all ranks of a cluster, [ranks].

    A node's ranks are adjacent in the ring; between nodes the ring uses the links of all ranks of a node in parallel.

    Args:
        nbytes: of the unsharded buffer; a message is one rank's part.
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
    """Describe one link with reduced bandwidth: from a rank to its node, or to other nodes.

    Attributes:
        factor: slowdown.
        level: ``"local"`` or ``"node"``.
        rank: the rank at the link.
    """

    factor: float
    level: str = "node"
    rank: int = 0


@dataclass(frozen=True)
class LateRank:
    """Describe one rank that begins a step ``seconds`` late."""

    seconds: float
    rank: int = 0


@dataclass(frozen=True)
class StepLoss:
    """Hold the cost of a disturbance.

    Attributes:
        step_s: seconds of an undisturbed step.
        lost_s: additional seconds: per step for a slow link, once for a late rank.
        crossed: number of collectives per step over the slow link, by purpose.
    """

    step_s: float
    lost_s: float
    crossed: Counter[CollectivePurpose] = field(default_factory=Counter)

    @property
    def part(self) -> float:
        """Return the loss as a fraction of the step."""
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
    """Return the cost of one slow link, or of one late rank, for a step under a plan.

    Consecutive steps are replayed, because work started in one step may end in the next.

    Args:
        moves: the plan's step: :func:`npuzero.plan.steady_step`.
        compute_s: seconds of a unit's forward, or, with True, of its backward.
        update_s: seconds of the optimizer's update.

    Raises:
        ConfigError: the mesh has pipeline stages, which do different work; the rank or level does not exist; the link
            is faster, or the rank early.
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
    assert first >= ends[0]  # a disturbance never makes a step end sooner
    return StepLoss(step_s, lost_s, count_crossing_collectives(cluster, mesh, moves, slow) if slow else Counter())


def count_crossing_collectives(
    cluster: Cluster, mesh: MeshShape, moves: Iterable[Move], slow: SlowLink
) -> Counter[CollectivePurpose]:
    """Return the number of collectives of a step over a rank's link, by purpose."""
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
        raise ConfigError("LateRank.seconds", expected="0 or more", got=repr(disturbance.seconds), do="Say how late.")


class _SkewReplay:
    """Run steps for all ranks in parallel.

    Attributes:
        now: time at which each rank's compute is free, by its place along the axes.
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
        """Run a step, and return the time at which the last rank's compute has finished it."""
        last = max((i for i, move in enumerate(moves) if _comes_before_update(move)), default=-1) + 1
        self._moves(moves[:last])
        self.now = self.now + self._update_s
        self._moves(moves[last:])
        return float(self.now.max())

    def hold(self, late: LateRank) -> None:
        """Start a rank's next step late."""
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
        """Return the seconds of a collective, normal and over the slow link."""
        key = collective.verb, collective.axes, collective.nbytes
        if key not in self._lasts:
            seconds = slowed = collective_s(self._cluster, self._mesh, *key)
            slow = self._slow
            if slow is not None and slow.level in self._cluster.links:
                bytes_per_s = self._cluster.links[slow.level].bytes_per_s / slow.factor
                # Parallel rings have equal parts: the ring over this link is as slow as if all links were.
                slowed = collective_s(self._cluster.with_link(slow.level, bytes_per_s=bytes_per_s), self._mesh, *key)
            self._lasts[key] = seconds, slowed
        return self._lasts[key]

    def _wait(self, wait: WaitCollective) -> None:
        under_way, left = self._under_way.get((wait.purpose, wait.unit)), wait.count
        while under_way and left > 0:
            end, count = under_way.popleft()
            self.now, left = np.maximum(self.now, end), left - count


def _comes_before_update(move: Move) -> bool:
    """Return whether ``move`` precedes the update, which follows the last move of gradients."""
    if isinstance(move, StartCollective):
        return move.collective.purpose not in (CollectivePurpose.GATHER, CollectivePurpose.RESTORE)
    if isinstance(move, WaitCollective):
        return move.purpose not in (CollectivePurpose.GATHER, CollectivePurpose.RESTORE)
    return isinstance(move, (ComputePass, LaunchReduction)) or (
        isinstance(move, RepeatMoves) and any(isinstance(each, ComputePass) for each in move.moves)
    )
