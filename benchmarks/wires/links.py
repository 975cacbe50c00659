"""Simulated links of limited rate between nodes, for ranks that share this host as threads or processes.

A world's ranks are assigned to nodes in equal consecutive groups. Between two nodes there is one link per direction,
shared by all ranks of a node. It carries one collective's bytes after another; later ones wait while it is busy. The
collective itself runs normally; its handle then completes when its bytes have crossed. No thread spins: compute and
other links continue.

The bytes that cross are those that npuzero's groups on accelerators send. A group with members in node order is a ring:
one of its edges leads to the next node, and carries the bytes that every rank sends. A group with neighbours on other
nodes (its first axis is the inner one) is composed of a ring along the nodes for each rank of a node, and one within
them: the fewest possible bytes cross. An all_to_all and a send go directly to their destinations.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npuzero.comm import AsyncHandle, Communicator, World
from npuzero.comm.watchdog.hang_detector import CommunicatorFailure
from npuzero.device import HostLane
from npuzero.plan import ring_bytes

GBIT = 1e9 / 8
#: The environment variable of ranks on nodes: the links' file.
VARIABLE = "WIRES_LINKS"

#: Bytes that cross, by source and destination node.
Crossing = Mapping[tuple[int, int], float]


def crossing_bytes(verb: str, nodes: Sequence[int], nbytes: int) -> Crossing:
    """Return the bytes that cross between nodes in a collective.

    Args:
        verb: as of ``plan.ring_bytes``; a send is from the first of ``nodes`` to the last.
        nodes: the node of each member of the group, in the group's order.
        nbytes: bytes of the unsharded buffer.
    """
    if verb == "send":
        return {(nodes[0], nodes[-1]): nbytes} if nodes[0] != nodes[-1] else {}
    if verb == "all_to_all":
        pairs = Counter((here, there) for here in nodes for there in nodes if here != there)
        return {pair: count * nbytes / len(nodes) for pair, count in pairs.items()}
    # Members in node order form one ring; interleaved ones are composed by level, so fewer bytes cross.
    ring = list(dict.fromkeys(nodes))
    if len(ring) == 1:
        return {}
    node_by_node = [node for node, _ in groupby(nodes)] == ring
    across = ring_bytes(verb, nbytes, len(nodes) if node_by_node else len(ring))
    return dict.fromkeys(zip(ring, [*ring[1:], ring[0]], strict=True), across)


class NodeLinks:
    """Share the links among all ranks through a mapped file with the rate, and each link's byte count and clock.

    Args:
        path: of the file; :meth:`make` creates it.
        clock: seconds, the same for all users of the file.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._file = os.open(path, os.O_RDWR)  # a separate descriptor each: its lock also excludes threads
        weakref.finalize(self, os.close, self._file)
        state: Any = np.memmap(path, np.float64, "r+")
        self.nodes = math.isqrt((len(state) - 1) // 2)
        self._rate = state[:1]  # bytes per second
        self._free_s, self._carried = state[1:].reshape(2, self.nodes, self.nodes)

    @classmethod
    def make(cls, path: Path, nodes: int, clock: Callable[[], float] = time.monotonic) -> NodeLinks:
        """Create the file for ``nodes`` nodes, with unlimited links."""
        np.zeros(1 + 2 * nodes * nodes).tofile(path)
        links = cls(path, clock)
        links.limit(None)
        return links

    def limit(self, gbit_per_s: float | None) -> None:
        """Set the rate of every link from now on; None: unlimited."""
        self._rate[0] = math.inf if gbit_per_s is None else gbit_per_s * GBIT

    def carry(self, across: Crossing) -> float:
        """Send the bytes over the links; return the time at which all have arrived."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            arrived_s = now_s = self.clock()
            for link, nbytes in across.items():
                self._carried[link] += nbytes
                self._free_s[link] = max(now_s, self._free_s[link]) + nbytes / self._rate[0]
                arrived_s = max(arrived_s, float(self._free_s[link]))
            return arrived_s
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def carried(self) -> float:
        """Return the bytes carried by the link that has carried most."""
        return float(self._carried.max())


class SharedLinks:
    """Links between the nodes of a benchmark's teams; their ranks find them by ``variables``."""

    def __init__(self, path: Path, nodes: int) -> None:
        self._links = NodeLinks.make(path, nodes)
        self.variables = {VARIABLE: str(path)}
        self.limit, self.carried = self._links.limit, self._links.carried

    def command(self, command: Sequence[str]) -> list[str]:
        """Return ``command`` for the node of its rank."""
        return list(command)


class LinkedCommunicator(Communicator):
    """Delay the handles of ``communicator`` until the bytes between nodes have arrived.

    Rank 0 of the group books the transfer and broadcasts its arrival over ``clock``, which connects the same ranks. A
    send completes on the sender once the receiver has it, even if the link is still carrying it.

    Args:
        nodes: the node of each member.
    """

    def __init__(self, communicator: Communicator, clock: Communicator, links: NodeLinks, nodes: Sequence[int]) -> None:
        super().__init__(communicator.ranks, communicator.rank, communicator.name, communicator.device)
        self.communicator = communicator
        self._clock = clock
        self._links = links
        self._nodes = nodes
        self._lane = HostLane(self.name)
        self._arrivals: dict[int, HostLane] = {}  # by sender: a receive waits for no collective

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.communicator.buffer(numel, dtype)

    def barrier(self) -> None:
        self._lane.run(self.communicator.barrier).wait()

    def fail(self, failure: CommunicatorFailure) -> None:
        self.communicator.fail(failure)
        self._clock.fail(failure)

    def close(self) -> None:
        self.communicator.close()
        self._clock.close()
        for lane in (self._lane, *self._arrivals.values()):
            lane.close(timeout_s=1.0)

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor, tag: str) -> AsyncHandle:
        return self._held("all_gather", whole, lambda: self.communicator._all_gather(whole, shard, tag))

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, accumulate: bool, tag: str) -> AsyncHandle:
        return self._held(
            "reduce_scatter", whole, lambda: self.communicator._reduce_scatter(shard, whole, accumulate, tag)
        )

    def _all_reduce(self, buffer: torch.Tensor, tag: str) -> AsyncHandle:
        return self._held("all_reduce", buffer, lambda: self.communicator._all_reduce(buffer, tag))

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: str) -> AsyncHandle:
        return self._held("all_to_all", inp, lambda: self.communicator._all_to_all(out, inp, tag))

    def _broadcast(self, buffer: torch.Tensor, root: int, tag: str) -> AsyncHandle:
        return self._held("broadcast", buffer, lambda: self.communicator._broadcast(buffer, root, tag))

    def _send(self, buffer: torch.Tensor, to: int, tag: str) -> AsyncHandle:
        return self.communicator._send(buffer, to, tag)

    def _recv(self, buffer: torch.Tensor, from_: int, tag: str) -> AsyncHandle:
        across = crossing_bytes("send", (self._nodes[from_], self._nodes[self.rank]), buffer.nbytes)
        received = self.communicator._recv(buffer, from_, tag)  # at once: the sender waits only for it

        def step() -> None:
            received.wait()
            self._wait_until(self._links.carry(across))

        return self._arrivals.setdefault(from_, HostLane(f"{self.name} from {from_}")).run(step)

    def _held(self, verb: str, whole: torch.Tensor, start: Callable[[], AsyncHandle]) -> AsyncHandle:
        across = crossing_bytes(verb, self._nodes, whole.nbytes)
        arrived_s = torch.empty(1, dtype=torch.float64)

        def step() -> None:
            start().wait()  # all ranks have arrived
            if self.rank == 0:
                arrived_s.fill_(self._links.carry(across))
            self._clock.broadcast(arrived_s, root=0).wait()
            self._wait_until(arrived_s.item())

        return self._lane.run(step)

    def _wait_until(self, then_s: float) -> None:
        time.sleep(max(0.0, then_s - self._links.clock()))


class LinkedWorld(World):
    """Place the ranks of ``world`` on the nodes of ``links``.

    Ranks of a node are ``local`` to each other, so that meshes treat them as one node; their groups are the world's
    own.
    """

    def __init__(self, world: World, links: NodeLinks) -> None:
        self._each = world.size // links.nodes
        begin = world.rank // self._each * self._each
        super().__init__(world.rank, world.size, world.device, range(begin, begin + self._each), world.timeout_s)
        self.board = world.board
        self._of = world
        self._links = links
        self._made: list[LinkedCommunicator] = []

    def fail(self, failure: CommunicatorFailure) -> None:
        self._of.fail(failure)

    def close(self) -> None:
        """Close its communicators; the underlying world stays open."""
        self.closed = True
        for communicator in self._made:
            communicator.close()

    def _exchange(self, value: object, channel: str, group: tuple[int, ...]) -> list[Any]:
        return self._of._exchange(value, channel, group)

    def _make(self, ranks: tuple[int, ...], name: str) -> Communicator:
        inner = self._of.communicator(ranks, name)
        nodes = [rank // self._each for rank in ranks]
        if len(set(nodes)) == 1:
            return inner
        self._made.append(LinkedCommunicator(inner, self._of.communicator(ranks, f"{name}@clock"), self._links, nodes))
        return self._made[-1]
