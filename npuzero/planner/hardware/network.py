"""Cost of a collective: bytes and seconds by level, within a node and between nodes.

Collective libraries build rings and trees that follow the nodes: in a ring over all ranks of n nodes, neighbours on a
node are neighbours in the ring, and it crosses between nodes n times. With L ranks per node there are L parallel rings,
each with a part of the bytes, which leave the node at different ranks. So one in L bytes that a rank sends goes between
nodes, independent of the axes of the ranks. Both levels are busy at the same time::

    seconds = latency of the steps one after another + max over levels(bytes of a rank / bytes_per_s of a rank)

A report (:attr:`npuzero.plan.Report.sent_along`) counts bytes by axis instead, as if each axis had a separate
collective, the inner one first; :func:`level_bytes` adds these up by level. In both cases the sum over levels equals
the bytes of :func:`npuzero.predict`.
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

#: Number of rounds of a verb's ring, less one step.
_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "barrier": 2}
#: Verbs that may use a tree, with as many messages as its depth. (NCCL's broadcast is only a ring.)
_TREES = {"all_reduce": 2, "barrier": 2}
VERBS = (*_ROUNDS, "all_to_all", "send")


@dataclass(frozen=True)
class GroupPlacement:
    """Describe how the ranks of a group are distributed over nodes.

    Attributes:
        size: number of ranks.
        within: ranks per node; the smallest number if nodes differ.
    """

    size: int
    within: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.size / self.within)


def find_group_placement(cluster: Cluster, mesh: MeshShape, axes: Axes) -> GroupPlacement:
    """Return the distribution over nodes of the ranks along ``axes``; nodes have ``cluster.local`` consecutive ranks.

    Example::

        from npuzero import MeshShape
        from npuzero.planner import Cluster
        from npuzero.planner.hardware.network import find_group_placement

        mesh = MeshShape(node=4, local=8, tensor=2)
        print(find_group_placement(Cluster.named("64xa100-80g"), mesh, ("node", "local")))  # 32 ranks, 4 on each node
    """
    size = mesh.size(axes)
    if mesh.world <= cluster.local:
        return GroupPlacement(size, size)
    within = 1
    for axis, n in mesh.sizes(axes).items():
        stride = _stride(mesh, axis)
        # Nodes have consecutive ranks: along an axis, as many neighbours share a node as its stride fits into one.
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

    They add up to :func:`npuzero.plan.ring_bytes`. Levels without traffic are left out.

    Args:
        verb, nbytes: as for :func:`~npuzero.plan.ring_bytes`.
        axes: axes of the group; of a send, the axis along which it goes.

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
    elif verb == "all_to_all":  # sends each rank of other nodes its part
        between = total * (group.size - group.within) // (group.size - 1)
    else:
        between = -(-total // group.within)
    return {level: n for level, n in (("local", total - between), ("node", between)) if n}


def collective_s(cluster: Cluster, mesh: MeshShape, verb: str, axes: Axes, nbytes: int) -> float:
    """Return the seconds of one collective; 0 for a group of one rank.

    The faster of a ring and, where supported, a tree, which sends the full result in fewer steps.

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
    """Return the bytes that one rank sends in a step, by level, control traffic included.

    Args:
        moves: moves of the step, from :func:`npuzero.plan.steady_step`.
    """
    levels = {"local": 0, "node": 0}
    for collective, times in iter_collectives(moves):
        for level, n in collective_bytes(cluster, mesh, collective.verb, collective.axes, collective.nbytes).items():
            levels[level] += times * n
    return levels


def level_bytes(along: Mapping[str, Mapping[str, int]], mesh: MeshShape, cluster: Cluster) -> dict[str, int]:
    """Return the bytes of a step within a node and between nodes, from a report's bytes by axis.

    Args:
        along: :attr:`npuzero.plan.Report.sent_along`, or similar. ``control`` traffic is not included.
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
    # Chunks go from rank to rank. NCCL (2.27, src/graph/tuning.cc) counts each hop at the outer level.
    if verb == "broadcast":
        return (group.size - 1) * (node if group.nodes > 1 else local)
    if verb == "all_to_all":  # each rank sends to each, in turn
        return (group.within - 1) * local + (group.size - group.within) * node
    return _ROUNDS[verb] * ((group.size - group.nodes) * local + (group.nodes - 1) * node)


def _busy_s(cluster: Cluster, sent: Mapping[str, int], ranks: int) -> float:
    """Return the seconds of the busier level for these bytes of a rank; ``ranks``: ranks of the group on a node."""
    seconds = 0.0
    for level, nbytes in sent.items():
        link = cluster.links[level]
        seconds = max(seconds, nbytes / (link.among(ranks) if level == "local" else link.bytes_per_s))
    return seconds


def _tree_s(cluster: Cluster, verb: str, group: GroupPlacement, nbytes: int) -> float:
    """Return the seconds of a binary tree over the nodes and a chain within each, with pipelined chunks."""
    rounds = _TREES[verb]
    depth = math.ceil(math.log2(group.nodes)), min(group.within, group.size) - 1
    seconds = 0.0
    for level, steps in zip(("node", "local"), depth, strict=True):
        if steps:
            seconds += rounds * steps * cluster.links[level].latency_s
    total = 0 if verb == "barrier" else rounds * nbytes
    sent = {"local": total if group.within > 1 else 0, "node": -(-total // group.within) if group.nodes > 1 else 0}
    return seconds + _busy_s(cluster, {level: n for level, n in sent.items() if n}, group.within)
