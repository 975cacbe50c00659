"""Collectives by level: bytes sum up to what predict says, seconds to what a ring and its slowest level take."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npuzero import MeshShape
from npuzero.errors import ConfigError
from npuzero.plan import PRESETS, FlatSize, Plan, StepSpec, axis_bytes, predict_bytes, ring_bytes, steady_step
from npuzero.planner import Cluster
from npuzero.planner.hardware.network import (
    VERBS,
    collective_bytes,
    collective_s,
    find_group_placement,
    level_bytes,
    step_bytes_by_level,
)

AXES = ("pipe", "pod", "node", "local", "tensor")
A100 = Cluster.named("64xa100-80g")
LOCAL, NODE = A100.links["local"], A100.links["node"]


@st.composite
def draw_mesh_cluster(draw, most: int = 1 << 15) -> tuple[Cluster, MeshShape, tuple[str, ...]]:
    """A mesh of at most so many ranks, its cluster, and some of its axes."""
    sizes: dict[str, int] = {}
    for axis in draw(st.permutations(AXES)):
        left = most // math.prod(sizes.values())
        sizes[axis] = draw(st.sampled_from([n for n in (1, 1, 2, 3, 4, 8) if n <= left]))
    mesh = MeshShape(**sizes)
    local = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8, 16, mesh.world) if mesh.world % n == 0]))
    chosen = draw(st.lists(st.sampled_from(AXES), unique=True, min_size=1))
    return A100.with_ranks(mesh.world, local), mesh, tuple(chosen)


def axis_rank_groups(mesh: MeshShape, axes: tuple[str, ...]) -> list[list[int]]:
    """The ranks of each group along these axes."""
    found = defaultdict(list)
    for rank in range(mesh.world):
        place = mesh.place(rank)
        found[tuple(place[axis] for axis in AXES if axis not in axes)].append(rank)
    return list(found.values())


@given(draw_mesh_cluster(most=1024))
@settings(max_examples=150, deadline=None)
def test_a_group_has_on_a_node_as_many_ranks_as_counting_finds(drawn):
    cluster, mesh, axes = drawn
    group = find_group_placement(cluster, mesh, axes)
    counted = [
        [sum(rank // cluster.local == node for rank in ranks) for node in {rank // cluster.local for rank in ranks}]
        for ranks in axis_rank_groups(mesh, axes)
    ]
    assert group.size == mesh.size(axes)
    assert group.within <= min(max(of_one) for of_one in counted)  # never more than a group has
    if all(size & (size - 1) == 0 for size in (*mesh.sizes(AXES).values(), cluster.local)):
        assert {n for of_one in counted for n in of_one} == {group.within}  # whole nodes: exactly so many
    assert group.nodes > 1 or all(len(of_one) == 1 for of_one in counted)


@given(draw_mesh_cluster(), st.sampled_from(sorted(set(VERBS) - {"send"})), st.integers(0, 1 << 40))
@settings(max_examples=200, deadline=None)
def test_levels_together_are_the_bytes_of_the_collective(drawn, verb: str, nbytes: int):
    cluster, mesh, axes = drawn
    sent = collective_bytes(cluster, mesh, verb, axes, nbytes)
    assert sum(sent.values()) == ring_bytes(verb, nbytes, mesh.size(axes))
    assert sum(sent.values()) == sum(axis_bytes(verb, nbytes, mesh.sizes(axes)).values())
    assert all(n > 0 for n in sent.values())
    assert ("node" not in sent) or find_group_placement(cluster, mesh, axes).nodes > 1


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("world", "local"), [(1, 1), (8, 8), (16, 4), (64, 8)])
def test_levels_of_a_step_together_are_what_predict_says(preset: str, world: int, local: int):
    flats = [FlatSize(unit, numel, torch.bfloat16) for unit, numel in enumerate((1 << 20, 3 << 20, 3 << 20))]
    mesh, plan = MeshShape(world // local, local), Plan.preset(preset, precision="bf16")
    step, cluster = StepSpec(9, clip=True), A100.with_ranks(world, local)
    report = predict_bytes(plan, flats, mesh, step)
    by_axis, by_ring = (
        level_bytes(report.sent_along, mesh, cluster),
        step_bytes_by_level(cluster, mesh, steady_step(flats, plan, mesh, step)),
    )
    assert sum(by_axis.values()) == sum(report.bytes_sent.values()) - report.bytes_sent["control"]
    assert sum(by_ring.values()) == sum(report.bytes_sent.values())
    if world == 1:
        assert by_axis == by_ring == {"local": 0, "node": 0}
    if world == local:
        assert by_ring["node"] == by_axis["node"] == 0


@pytest.mark.parametrize("verb", VERBS)
def test_a_world_of_one_sends_nothing_and_takes_no_time(verb: str):
    one, mesh = A100.with_ranks(1), MeshShape(1, 1)
    assert collective_bytes(one, mesh, verb, ("node", "local"), 1 << 30) == {}
    assert collective_s(one, mesh, verb, ("node", "local"), 1 << 30) == 0


@pytest.mark.parametrize(("verb", "rounds"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_a_ring_on_one_node(verb: str, rounds: int):
    nbytes = 1 << 30
    seconds = collective_s(A100, MeshShape(8, 8), verb, ("local",), nbytes)
    assert seconds == pytest.approx(rounds * 7 * (LOCAL.latency_s + nbytes / 8 / LOCAL.bytes_per_s), rel=1e-9)


def test_a_ring_between_nodes_of_ranks_with_a_link_each():
    nbytes = 1 << 30
    seconds = collective_s(A100, MeshShape(8, 8), "all_gather", ("node",), nbytes)
    assert seconds == pytest.approx(7 * (NODE.latency_s + nbytes / 8 / NODE.bytes_per_s), rel=1e-9)


def test_a_ring_over_nodes_is_as_fast_as_measured():
    """All_reduce_perf between DGX A100 shows 192 GB/s of bus bandwidth (NVIDIA/nccl#812): the nodes' links are what
    bounds it, an eighth of the bytes on each.
    """
    nbytes = 8 << 30
    seconds = collective_s(A100, MeshShape(8, 8), "all_reduce", ("node", "local"), nbytes)
    assert 2 * 63 / 64 * nbytes / seconds == pytest.approx(192e9, rel=0.02)


def test_few_bytes_go_by_a_tree():
    """A ring of 1,024 ranks has 2,046 steps one after another; a scalar is there in fewer."""
    cluster, mesh = A100.with_ranks(1024), MeshShape(128, 8)
    ring = 2 * (896 * LOCAL.latency_s + 127 * NODE.latency_s)
    scalar = collective_s(cluster, mesh, "all_reduce", ("node", "local"), 8)
    assert scalar == pytest.approx(2 * (7 * LOCAL.latency_s + 7 * NODE.latency_s), rel=1e-4)
    assert scalar < ring / 20
    assert collective_s(cluster, mesh, "barrier", ("node", "local"), 0) == pytest.approx(scalar, rel=1e-4)


def test_all_to_all_sends_to_other_nodes_what_is_theirs():
    mesh, nbytes = MeshShape(8, 8), 64 << 20
    assert collective_bytes(A100, mesh, "all_to_all", ("node", "local"), nbytes) == {"local": 7 << 20, "node": 56 << 20}
    seconds = collective_s(A100, mesh, "all_to_all", ("node", "local"), nbytes)
    assert seconds == pytest.approx(7 * LOCAL.latency_s + 56 * NODE.latency_s + (56 << 20) / NODE.bytes_per_s)


@pytest.mark.parametrize(("local", "level"), [(16, "local"), (4, "node")])
def test_a_send_goes_over_the_link_between_stages(local: int, level: str):
    cluster, mesh = A100.with_ranks(16, local), MeshShape(1, 4, pipe=4)
    link = cluster.links[level]
    assert collective_bytes(cluster, mesh, "send", ("pipe",), 1000) == {level: 1000}
    assert collective_s(cluster, mesh, "send", ("pipe",), 1000) == pytest.approx(
        link.latency_s + 1000 / link.bytes_per_s
    )


def test_views_of_axes_have_their_place():
    mesh = MeshShape(node=2, local=8, tensor=2, pipe=2, sequence=4)
    cluster = A100.with_ranks(64)
    assert find_group_placement(cluster, mesh, ("sequence",)).nodes == 1  # eight neighbouring ranks
    assert find_group_placement(cluster, mesh, ("ends",)).nodes == 2
    assert find_group_placement(cluster, mesh, ("local",)).within == 4  # every other rank
    assert find_group_placement(cluster, mesh, ("node", "local")).within == 4


def test_two_of_a_full_mesh_have_one_wire_of_seven():
    npu, mesh = Cluster.named("8x910b-64g"), MeshShape(4, 2)
    link, nbytes = npu.links["local"], 1 << 30
    two = collective_s(npu, mesh, "all_gather", ("local",), nbytes)
    assert two == pytest.approx(link.latency_s + nbytes / 2 / (link.bytes_per_s / 7))
    all_eight = collective_s(npu, mesh, "all_gather", ("node", "local"), nbytes)
    assert all_eight == pytest.approx(7 * link.latency_s + nbytes * 7 / 8 / link.bytes_per_s)


@given(
    draw_mesh_cluster(),
    st.sampled_from(VERBS),
    st.integers(1, 1 << 36),
    st.sampled_from(["local", "node"]),
    st.floats(1.01, 100),
)
@settings(max_examples=200, deadline=None)
def test_more_bandwidth_or_less_latency_never_takes_longer(drawn, verb: str, nbytes: int, level: str, factor: float):
    cluster, mesh, axes = drawn
    link = cluster.links[level]
    before = collective_s(cluster, mesh, verb, axes, nbytes)
    assert (
        collective_s(cluster.with_link(level, bytes_per_s=link.bytes_per_s * factor), mesh, verb, axes, nbytes)
        <= before
    )
    assert collective_s(cluster.with_link(level, latency_s=link.latency_s / factor), mesh, verb, axes, nbytes) <= before
    assert collective_s(cluster, mesh, verb, axes, 2 * nbytes) >= before >= 0
    assert math.isfinite(before)


def test_an_unknown_verb_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'all_gather'"):
        collective_s(A100, MeshShape(8, 8), "allgather", ("local",), 1)
    with pytest.raises(ConfigError, match="Did you mean 'all_gather'"):
        collective_bytes(A100, MeshShape(8, 8), "allgather", ("local",), 1)
