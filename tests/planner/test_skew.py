"""Stragglers and slow links: recurrences against a queue of events, and what they cost steps under plans."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict, deque

import numpy as np
import pytest
import torch

from benchmarks.planning.skew import (
    LateRank,
    SlowLink,
    count_crossing_collectives,
    hierarchical_ends,
    ring_ends,
    ring_steps,
    step_loss,
    tree_ends,
)
from npuzero import MeshShape
from npuzero.errors import ConfigError
from npuzero.plan import FlatSize, Plan, StepSpec, flatten_moves, steady_step
from npuzero.plan.table.step_moves import CollectivePurpose, ComputePass, StartCollective, WaitCollective
from npuzero.planner import Cluster
from npuzero.planner.hardware.network import collective_s

SAME = 1e-12


def random_links(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts with stragglers, and links of which one is seven times slower."""
    rng = np.random.default_rng(seed)
    steps = rng.uniform(1e-4, 2e-4, n)
    steps[n // 2] *= 7
    return rng.exponential(1e-3, n), steps


# -- an event simulation: messages with what they wait for, in the order of a queue of times ------------------------


class MessageQueue:
    """Play messages: each starts when all that it waits for is there, and arrives after so many seconds."""

    def __init__(self) -> None:
        self._takes: dict[object, float] = {}
        self._missing: dict[object, set[object]] = {}
        self._then: dict[object, list[object]] = defaultdict(list)
        self.done: dict[object, float] = {}

    def add(self, name: object, seconds: float, after: list[object]) -> None:
        self._takes[name] = seconds
        self._missing[name] = set(after)
        for each in set(after):
            self._then[each].append(name)

    def run(self) -> dict[object, float]:
        queue = [(self._takes[name], repr(name), name) for name, missing in self._missing.items() if not missing]
        heapq.heapify(queue)
        while queue:
            now, _, name = heapq.heappop(queue)
            self.done[name] = now
            for later in self._then[name]:
                self._missing[later].discard(name)
                if not self._missing[later]:
                    heapq.heappush(queue, (now + self._takes[later], repr(later), later))
        assert len(self.done) == len(self._takes), "something waits forever"
        return self.done


def add_ring(
    events: MessageQueue, ranks: list[int], steps: dict[int, float], rounds: int, name: str, after: str
) -> None:
    """A ring in the order of ``ranks``: a message of a round waits for both its ends to have had the one before."""
    for round_ in range(rounds):
        for at, rank in enumerate(ranks):
            before = (after, rank), (after, ranks[at - 1])
            if round_:
                before = (name, rank, round_ - 1), (name, ranks[at - 1], round_ - 1)
            events.add((name, rank, round_), steps[rank], list(before))
    for rank in ranks:
        events.add((name, rank), 0.0, [(name, rank, rounds - 1)] if rounds else [(after, rank)])


@pytest.mark.parametrize("n", [2, 8, 128])
@pytest.mark.parametrize("turns", [1, 2])
def test_a_ring_is_what_events_say(n: int, turns: int):
    starts, steps = random_links(n, n)
    events = MessageQueue()
    for rank in range(n):
        events.add(("start", rank), starts[rank], [])
    add_ring(events, list(range(n)), dict(enumerate(steps)), turns * (n - 1), "ring", "start")
    done = events.run()
    expected = [done["ring", rank] for rank in range(n)]
    np.testing.assert_allclose(ring_ends(starts, steps, turns * (n - 1)), expected, rtol=SAME)


@pytest.mark.parametrize(("nodes", "local"), [(1, 8), (16, 1), (16, 8)])
def test_levels_are_what_events_say(nodes: int, local: int):
    starts, steps = random_links(nodes * local, 1)
    _, between = random_links(nodes * local, 2)
    ranks = np.arange(nodes * local).reshape(nodes, local)
    events = MessageQueue()
    for rank in ranks.flat:
        events.add(("start", rank), starts[rank], [])
    for row in ranks:
        add_ring(events, list(row), dict(enumerate(steps)), local - 1, "scatter", "start")
    for column in ranks.T:
        add_ring(events, list(column), dict(enumerate(between)), 2 * (nodes - 1), "sum", "scatter")
    for row in ranks:
        add_ring(events, list(row), dict(enumerate(steps)), local - 1, "gather", "sum")
    done = events.run()
    ends = hierarchical_ends(*(each.reshape(nodes, local) for each in (starts, steps, between)))
    np.testing.assert_allclose(ends.ravel(), [done["gather", rank] for rank in ranks.flat], rtol=SAME)


@pytest.mark.parametrize("n", [1, 2, 7, 100, 128])
@pytest.mark.parametrize("chunks", [1, 5])
def test_a_tree_is_what_events_say(n: int, chunks: int):
    starts, steps = random_links(n, 3)
    events = MessageQueue()
    children = {rank: [kid for kid in (2 * rank + 1, 2 * rank + 2) if kid < n] for rank in range(n)}
    for rank in range(n):
        events.add(("start", rank), starts[rank], [])
        for chunk in range(chunks):
            sums = [("start", rank), *(("up", kid, chunk) for kid in children[rank])]
            if rank == 0:
                events.add(("down", rank, chunk), 0.0, sums)
                continue
            events.add(("up", rank, chunk), steps[rank], sums + ([("up", rank, chunk - 1)] if chunk else []))
            above = [("down", (rank - 1) // 2, chunk), *([("down", rank, chunk - 1)] if chunk else [])]
            events.add(("down", rank, chunk), steps[rank], above)
    done = events.run()
    expected = [done["down", rank, chunks - 1] for rank in range(n)]
    np.testing.assert_allclose(tree_ends(starts, steps, chunks), expected, rtol=SAME)


def test_a_ring_without_skew_takes_what_the_network_says():
    cluster, nbytes = Cluster.named("a100-80g"), 1 << 30
    ends = ring_ends(np.zeros(8), ring_steps(cluster, nbytes), 7)
    assert (
        ends.max()
        == ends.min()
        == pytest.approx(collective_s(cluster, MeshShape(1, 8), "all_gather", ("local",), nbytes))
    )


def test_a_late_rank_makes_all_late_and_a_slow_link_holds_each_round():
    steps = np.full(64, 1e-3)
    late = np.zeros(64)
    late[17] = 0.5
    assert ring_ends(late, steps, 63).max() == pytest.approx(0.5 + 63e-3)
    steps[17] = 4e-3
    assert ring_ends(np.zeros(64), steps, 63).max() == pytest.approx(63 * 4e-3)


def test_16384_ranks_take_less_than_five_seconds():
    cluster = Cluster.named("16384xa100-80g")
    starts = np.random.default_rng(0).exponential(1e-3, cluster.ranks)
    begin = time.process_time()
    ring = ring_ends(starts, ring_steps(cluster, 14 << 30), 2 * (cluster.ranks - 1))
    levels = np.full((cluster.nodes, cluster.local), 1e-4)
    hierarchical = hierarchical_ends(starts.reshape(levels.shape), levels, levels)
    tree = tree_ends(starts, np.full(cluster.ranks, 1e-4), chunks=64)
    assert time.process_time() - begin < 5
    assert ring.max() > hierarchical.max() > tree.max() > starts.max()


# -- steps under plans -------------------------------------------------------------------------------------------------

FLATS = [FlatSize(unit, 1 << 24, torch.bfloat16) for unit in range(4)]
CLUSTER, MESH = Cluster.named("128xa100-80g"), MeshShape(16, 8)


def moves_of(preset: str, mesh: MeshShape = MESH, **facts: int) -> list:
    return steady_step(FLATS, Plan.preset(preset, precision="bf16"), mesh, StepSpec(9, **facts))


def compute_s(unit: int, backward: bool) -> float:
    return (1 + backward) * (1e-3 + 2e-4 * unit)


class RankSimulation:
    """Play each rank by itself, a move at a time; a collective's end is known once all of its group have started it."""

    def __init__(self, slow: SlowLink | None) -> None:
        self.slow = slow
        self.now = [0.0] * MESH.world
        self.started: dict[object, dict[int, float]] = defaultdict(dict)
        self.ends: dict[object, float] = {}
        self.counts = [defaultdict(int) for _ in range(MESH.world)]
        self.waiting = [defaultdict(deque) for _ in range(MESH.world)]
        self.lane_end: dict[object, float] = defaultdict(float)

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        place = MESH.place(rank)
        return tuple(place[axis] for axis in ("node", "local") if axis not in axes)

    def seconds(self, collective, rank: int) -> float:
        cluster = CLUSTER
        if self.slow and self.group(rank, collective.axes) == self.group(self.slow.rank, collective.axes):
            link = cluster.links[self.slow.level]
            cluster = cluster.with_link(self.slow.level, bytes_per_s=link.bytes_per_s / self.slow.factor)
        return collective_s(cluster, MESH, collective.verb, collective.axes, collective.nbytes)

    def play(self, moves: list) -> float:
        at = [0] * MESH.world
        queue = [(now, rank) for rank, now in enumerate(self.now)]
        heapq.heapify(queue)
        stuck: dict[object, list[int]] = defaultdict(list)
        while queue:
            _, rank = heapq.heappop(queue)
            waits_for = self.one(rank, moves[at[rank]]) if at[rank] < len(moves) else None
            if waits_for is not None and waits_for not in self.ends:
                stuck[waits_for].append(rank)
                continue
            at[rank] += 1
            if at[rank] <= len(moves):
                heapq.heappush(queue, (self.now[rank], rank))
            for key in [key for key in stuck if key in self.ends]:
                for each in stuck.pop(key):
                    heapq.heappush(queue, (self.now[each], each))
        assert not stuck
        return max(self.now)

    def one(self, rank: int, move) -> object:
        if isinstance(move, ComputePass):
            self.now[rank] += compute_s(move.unit, move.backward)
        elif isinstance(move, StartCollective):
            self.start(rank, move)
        elif isinstance(move, WaitCollective):
            return self.wait(rank, move)
        return None

    def start(self, rank: int, move: StartCollective) -> None:
        each = move.collective
        lane = each.purpose.channel, each.axes, self.group(rank, each.axes)
        key = (*lane, self.counts[rank][lane])
        self.counts[rank][lane] += 1
        self.started[key][rank] = self.now[rank]
        self.waiting[rank][each.purpose, each.unit].append((key, move.count))
        if len(self.started[key]) == each.size:
            begin = max(*self.started[key].values(), self.lane_end[lane])
            self.ends[key] = self.lane_end[lane] = begin + move.count * self.seconds(each, rank)

    def wait(self, rank: int, move: WaitCollective) -> object:
        under_way, left, taken = self.waiting[rank][move.purpose, move.unit], move.count, 0
        for key, count in under_way:
            if left <= 0:
                break
            if key not in self.ends:
                return key
            left, taken = left - count, taken + 1
        for _ in range(taken):
            self.now[rank] = max(self.now[rank], self.ends[under_way.popleft()[0]])
        return None


@pytest.mark.parametrize("preset", ["zero0", "zero2", "zero3", "hpz"])
@pytest.mark.parametrize("disturbance", [SlowLink(8.0, "node", 21), SlowLink(30.0, "local", 5), LateRank(0.02, 70)])
def test_a_step_of_128_ranks_is_what_playing_each_rank_says(preset: str, disturbance: SlowLink | LateRank):
    moves = moves_of(preset, clip=True)
    loss = step_loss(CLUSTER, MESH, moves, compute_s, disturbance)
    single = list(flatten_moves(moves))
    calm, other = RankSimulation(None), RankSimulation(disturbance if isinstance(disturbance, SlowLink) else None)
    calm_ends = [calm.play(single) for _ in range(3)]
    other_ends = [other.play(single)]
    if isinstance(disturbance, LateRank):
        other.now[disturbance.rank] += disturbance.seconds
    other_ends += [other.play(single) for _ in range(2)]
    step_s = calm_ends[2] - calm_ends[1]
    lost_s = other_ends[2] - (calm_ends[2] if isinstance(disturbance, LateRank) else other_ends[1] + step_s)
    assert loss.step_s == pytest.approx(step_s, rel=1e-9)
    assert loss.lost_s == pytest.approx(lost_s, rel=1e-9, abs=1e-12)
    assert loss.part == loss.lost_s / loss.step_s


def test_who_gathers_on_a_node_loses_less_to_a_slow_link_between_nodes():
    """Groups of MiCS shard within a node; what crosses is one sum of gradients."""
    slow = SlowLink(16.0, "node", 3)
    lost = {preset: step_loss(CLUSTER, MESH, moves_of(preset), compute_s, slow).lost_s for preset in ("zero3", "hpz")}
    assert 0 < lost["hpz"] < lost["zero3"]
    crosses = {preset: count_crossing_collectives(CLUSTER, MESH, moves_of(preset), slow) for preset in ("zero3", "hpz")}
    assert crosses["hpz"][CollectivePurpose.GATHER] < crosses["zero3"][CollectivePurpose.GATHER]


def test_a_late_rank_costs_no_more_than_it_is_late_and_hides_behind_nothing_where_all_wait():
    for preset in ("zero0", "zero3"):
        lost_s = step_loss(CLUSTER, MESH, moves_of(preset, clip=True), compute_s, LateRank(0.5, 9)).lost_s
        assert 0.4 < lost_s <= 0.5 + 1e-9


def test_a_link_as_fast_as_ever_and_a_rank_in_time_cost_nothing():
    for calm in (SlowLink(1.0), LateRank(0.0)):
        assert step_loss(CLUSTER, MESH, moves_of("zero3"), compute_s, calm).lost_s == pytest.approx(0, abs=1e-12)


def test_the_update_makes_the_step_longer():
    plain, longer = (
        step_loss(CLUSTER, MESH, moves_of("zero2"), compute_s, LateRank(0.0), update_s=seconds).step_s
        for seconds in (0.0, 0.1)
    )
    assert longer == pytest.approx(plain + 0.1, rel=0.2)


def test_a_step_of_16384_ranks_takes_less_than_five_seconds():
    mesh = MeshShape(2048, 8)
    flats = [FlatSize(unit, 1 << 26, torch.bfloat16) for unit in range(33)]
    moves = steady_step(flats, Plan.preset("zero3", precision="bf16"), mesh, StepSpec(300, micro_batches=2))
    begin = time.process_time()
    loss = step_loss(Cluster.named("16384xa100-80g"), mesh, moves, compute_s, SlowLink(4.0))
    assert time.process_time() - begin < 5
    assert loss.lost_s > 0


@pytest.mark.parametrize(
    ("mesh", "disturbance", "words"),
    [
        (MeshShape(8, 8, pipe=2), LateRank(1.0), "one stage"),
        (MeshShape(8, 8), LateRank(1.0), "128 ranks"),
        (MESH, LateRank(1.0, 128), "rank 128"),
        (MESH, LateRank(-1.0), "0 or more"),
        (MESH, SlowLink(0.5), "factor from 1"),
        (MESH, SlowLink(2.0, "host"), "local or node"),
    ],
)
def test_what_cannot_be_is_refused(mesh: MeshShape, disturbance: SlowLink | LateRank, words: str):
    with pytest.raises(ConfigError, match=words):
        step_loss(CLUSTER, mesh, [], compute_s, disturbance)
