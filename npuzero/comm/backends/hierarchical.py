"""Compose a group in permuted order of one communicator per axis, for backends that need ascending ranks.

A shard's place in the group is (outer place, inner place), outermost first. An all-gather runs over the inner axis,
then over the outer one; a reduce-scatter in reverse. Neither needs reordering, and both steps send as much as one flat
collective. A sum in two levels is ordered and rounded twice: it equals the flat sum up to rounding, and exactly if
every partial sum is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npuzero.comm.communicator import Communicator
from npuzero.comm.watchdog import fork
from npuzero.comm.watchdog.hang_detector import CommunicatorFailure
from npuzero.device import AsyncHandle, make_lane


def find_transposed_size(ranks: Sequence[int]) -> int | None:
    """Return the inner size ``a`` if ``ranks`` are ascending ranks, seen as [a, b], transposed to [b, a]; else None."""
    size, ascending = len(ranks), sorted(ranks)
    for inner in range(2, size // 2 + 1):
        outer = size // inner
        if size % inner == 0 and list(ranks) == [ascending[a * outer + b] for b in range(outer) for a in range(inner)]:
            return inner
    return None


class HierarchicalCommunicator(Communicator):
    """Compose a group of outer.size * inner.size ranks; a rank's place is outer.rank * inner.size + inner.rank.

    Args:
        outer, inner: communicators along the two axes.
        flat: a communicator of the same ranks in ascending order, for collectives with a result that has no order.
    """

    def __init__(self, outer: Communicator, inner: Communicator, flat: Communicator, ranks: Sequence[int], name: str):
        super().__init__(ranks, outer.rank * inner.size + inner.rank, name, flat.device)
        self.outer, self.inner, self.flat = outer, inner, flat
        self._lane = make_lane(flat.device, name, fork.make_fork_check(name))
        self._places = torch.tensor([self.ranks.index(member) for member in flat.ranks])

    def barrier(self) -> None:
        self._lane.run(self.flat.barrier).wait()

    def fail(self, failure: CommunicatorFailure) -> None:
        for part in (self.outer, self.inner, self.flat):
            part.fail(failure)

    def close(self) -> None:
        for part in (self.outer, self.inner, self.flat):
            part.close()
        self._lane.close(timeout_s=1.0)

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor, tag: str) -> AsyncHandle:
        block = whole.view(self.outer.size, -1)[self.outer.rank]

        def step() -> None:
            self.inner.all_gather(block, shard, tag=tag).wait()
            self.outer.all_gather(whole, block, tag=tag).wait()

        return self._lane.run(step)

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, accumulate: bool, tag: str) -> AsyncHandle:
        def step() -> None:
            block = whole.new_empty(whole.numel() // self.outer.size)
            self.outer.reduce_scatter(block, whole, tag=tag).wait()
            self.inner.reduce_scatter(shard, block, accumulate=accumulate, tag=tag).wait()

        return self._lane.run(step)

    def _all_reduce(self, buffer: torch.Tensor, tag: str) -> AsyncHandle:
        return self._lane.run(lambda: self.flat.all_reduce(buffer, tag=tag).wait())

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: str) -> AsyncHandle:
        def step() -> None:
            sent = inp.view(self.size, -1)[self._places].view(-1)
            received = torch.empty_like(sent)
            self.flat.all_to_all(received, sent, tag=tag).wait()
            out.view(self.size, -1)[self._places] = received.view(self.size, -1)

        return self._lane.run(step)

    def _broadcast(self, buffer: torch.Tensor, root: int, tag: str) -> AsyncHandle:
        place = self._place_of(root)
        return self._lane.run(lambda: self.flat.broadcast(buffer, root=place, tag=tag).wait())

    def _send(self, buffer: torch.Tensor, to: int, tag: str) -> AsyncHandle:
        return self.flat.send(buffer, self._place_of(to), tag)

    def _recv(self, buffer: torch.Tensor, from_: int, tag: str) -> AsyncHandle:
        return self.flat.recv(buffer, self._place_of(from_), tag)

    def _place_of(self, member: int) -> int:
        """Return the index in the flat group of ``member``, an index in this group."""
        return self.flat.ranks.index(self.ranks[member])
