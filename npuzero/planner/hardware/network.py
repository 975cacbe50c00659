"""What a collective costs: bytes and seconds by level, within a node and between nodes.

Libraries of collectives build rings and trees that know nodes: of a ring over all ranks of n nodes, neighbours on one
node are neighbours in the ring, and it crosses between nodes n times. With L ranks a node it is L rings side by side,
each with its part of the bytes, which leave the node at another rank. So of the bytes that a rank sends in all, one in
L goes between nodes, whatever axes the ranks lie along. Both levels are busy at the same time::

    seconds = latency of the steps one after another + max over levels(bytes of a rank / bytes_per_s of a rank)

A report (:attr:`npuzero.plan.Report.sent_along`) tells bytes by axis instead, as if each axis had a collective of its
own, the inner one first; :func:`level_bytes` adds these up by level. Either way the sum of the levels is what
:func:`npuzero.predict` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from npuzero.errors import ConfigError, did_you_mean
from npuzero.plan import AXES, ENDS, PIPE, SEQUENCE, TENSOR, Axes, MeshShape, ring_bytes
from npuzero.plan.prediction.predict import iter_collectives
from npuzero.plan.table.step_moves import Move
from npuzero.planner.hardware.cluster import Cluster

#: How often a verb's ring goes around, less one step.
_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "barrier": 2}
#: Verbs that a tree may carry, in as many messages as it is deep. (NCCL's broadcast is a ring alone.)
_TREES = {"all_reduce": 2, "barrier": 2}
VERBS = (*_ROUNDS, "all_to_all", "send")


@dataclass(frozen=True)
class GroupPlacement:
    """Describe where the ranks of a group are.

    Attributes:
        size: ranks.
        within: how many of them one node has; of unlike nodes, the fewest.
    """

    size: int
    within: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.size / self.within)


def find_group_placement(cluster: Cluster, mesh: MeshShape, axes: Axes) -> GroupPlacement:
    """Return how the ranks along ``axes`` lie on nodes, which have ranks in their order, ``cluster.local`` each.

    Example::

        from npuzero import MeshShape
        from npuzero.planner import Cluster
        from npuzero.planner.hardware.network import group_of

        mesh = MeshShape(node=4, local=8, tensor=2)
        print(group_of(Cluster.named("64xa100-80g"), mesh, ("node", "local")))  # 32 ranks, 4 on each node
    """
    size = mesh.size(axes)
    if mesh.world <= cluster.local:
        return GroupPlacement(size, size)
    within = 1
    for axis, n in mesh.sizes(axes).items():
        stride = _stride(mesh, axis)
        within *= max(1, math.gcd(stride * n, cluster.local) // stride)
    return GroupPlacement(size, min(size, within))


def _stride(mesh: MeshShape, axis: str) -> int:
    """Return the distance of two neighbours along an axis, in ranks."""
    if axis == ENDS:  # the first and the last stage
        return _stride(mesh, PIPE) * (mesh.pipe - 1)
    if axis == SEQUENCE:  # neighbouring ranks of the data axes
        return mesh.size((TENSOR,))
    return mesh.size(AXES[AXES.index(axis) + 1 :])


def collective_bytes(cluster: Cluster, mesh: MeshShape, verb: str, axes: Axes, nbytes: int) -> dict[str, int]:
    """Return the bytes that one rank sends for one collective, by level: ``"local"`` and ``"node"``.

    Together they are :func:`npuzero.plan.ring_bytes`. Levels without any are left out.

    Args:
        verb, nbytes: as for :func:`~npuzero.plan.ring_bytes`.
        axes: along which its ranks lie; of a send, along which it goes.

    Raises:
        ConfigError: an unknown verb.
    """
    _check_verb(verb)
    group = find_group_placement(cluster, mesh, axes)
    total = ring_bytes(verb, nbytes, group.size) if group.size > 1 else 0
    if group.nodes == 1 or not total:
        between = 0
    elif verb == "send":
        between = total
    elif verb == "all_to_all":  # to each rank of other nodes its part
        between = total * (group.size - group.within) // (group.size - 1)
    else:
        between = -(-total // group.within)
    return {level: n for level, n in (("local", total - between), ("node", between)) if n}


def collective_s(cluster: Cluster, mesh: MeshShape, verb: str, axes: Axes, nbytes: int) -> float:
    """Return the seconds of one collective: 0 of a group of one rank.

    A ring, or where that is faster a tree, which sends a whole result in fewer steps.

    Args:
        verb, axes, nbytes: as for :func:`collective_bytes`.

    Raises:
        ConfigError: an unknown verb.

    Example::

        from npuzero import MeshShape
        from npuzero.planner import Cluster
        from npuzero.planner.hardware.network import collective_s

        mesh = MeshShape(node=8, local=8)
        print(collective_s(Cluster.named("64xa100-80g"), mesh, "all_gather", ("node", "local"), 1 << 30))
    """
    _check_verb(verb)
    group = find_group_placement(cluster, mesh, axes)
    if group.size == 1:
        return 0.0
    sent = collective_bytes(cluster, mesh, verb, axes, nbytes)
    seconds = _latency_s(cluster, verb, group) + _busy_s(cluster, sent, 2 if verb == "send" else group.within)
    if verb in _TREES:
        seconds = min(seconds, _tree_s(cluster, verb, group, nbytes))
    return seconds


def step_bytes_by_level(cluster: Cluster, mesh: MeshShape, moves: Iterable[Move]) -> dict[str, int]:
    """Return the bytes that one rank sends in a step, by level, the engine's own among them.

    Args:
        moves: the step: :func:`npuzero.plan.steady_step`.
    """
    levels = {"local": 0, "node": 0}
    for collective, times in iter_collectives(moves):
        for level, n in collective_bytes(cluster, mesh, collective.verb, collective.axes, collective.nbytes).items():
            levels[level] += times * n
    return levels


def level_bytes(along: Mapping[str, Mapping[str, int]], mesh: MeshShape, cluster: Cluster) -> dict[str, int]:
    """Return the bytes of a step that go within a node and between nodes, of those that a report counts by axis.

    Args:
        along: :attr:`npuzero.plan.Report.sent_along`, or the like. The engine's own, ``control``, are not among them.
    """
    levels = {"local": 0, "node": 0}
    for axis, verbs in along.items():
        group = find_group_placement(cluster, mesh, (axis,))
        for nbytes in verbs.values():
            between = -(-nbytes // group.within) if group.nodes > 1 else 0
            levels["node"] += between
            levels["local"] += nbytes - between
    return levels


def _check_verb(verb: str) -> None:
    if verb not in VERBS:
        raise ConfigError(
            f"collective {verb!r}",
            expected=f"one of {', '.join(VERBS)}",
            got=repr(verb),
            do=did_you_mean(verb, VERBS, "Name what is sent."),
        )


def _latency_s(cluster: Cluster, verb: str, group: GroupPlacement) -> float:
    """Return the latency of the messages that wait for each other."""
    local, node = (cluster.links[level].latency_s if level in cluster.links else 0.0 for level in ("local", "node"))
    if verb == "send":
        return node if group.nodes > 1 else local
    if verb == "broadcast":  # a chunk from rank to rank; as NCCL counts it (2.27, src/graph/tuning.cc), none is nearer
        return (group.size - 1) * (node if group.nodes > 1 else local)
    if verb == "all_to_all":  # each rank sends to each, one after another
        return (group.within - 1) * local + (group.size - group.within) * node
    return _ROUNDS[verb] * ((group.size - group.nodes) * local + (group.nodes - 1) * node)


def _busy_s(cluster: Cluster, sent: Mapping[str, int], ranks: int) -> float:
    """Return how long the busier level sends these bytes of a rank, on a node to ``ranks`` less one others."""
    seconds = 0.0
    for level, nbytes in sent.items():
        link = cluster.links[level]
        seconds = max(seconds, nbytes / (link.among(ranks) if level == "local" else link.bytes_per_s))
    return seconds


def _tree_s(cluster: Cluster, verb: str, group: GroupPlacement, nbytes: int) -> float:
    """Return the seconds of a binary tree over the nodes, and a chain on each, in which chunks follow each other."""
    rounds = _TREES[verb]
    depth = math.ceil(math.log2(group.nodes)), min(group.within, group.size) - 1
    seconds = 0.0
    for level, steps in zip(("node", "local"), depth, strict=True):
        if steps:
            seconds += rounds * steps * cluster.links[level].latency_s
    total = 0 if verb == "barrier" else rounds * nbytes
    sent = {"local": total if group.within > 1 else 0, "node": -(-total // group.within) if group.nodes > 1 else 0}
    return seconds + _busy_s(cluster, {level: n for level, n in sent.items() if n}, group.within)
