"""Count the bytes that a rank sends, by the plan's arithmetic, and report each start of a collective."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from npuzero import observe
from npuzero.comm.communicator import Communicator
from npuzero.comm.watchdog.hang_detector import CommunicatorFailure
from npuzero.device import AsyncHandle
from npuzero.plan import Sent, axis_bytes


class CountingCommunicator(Communicator):
    """Wrap ``communicator``; each collective adds the bytes it sends to ``counter``, by axis and name.

    A collective is counted when it is issued, on the caller's thread, before it is passed on: a report after the call
    includes it, even if it runs later on a lane, or as several collectives. This must be the outermost wrapper: the
    parts of a composed communicator are not counted again.

    Args:
        sizes: of the group's axes, as :meth:`MeshShape.sizes` returns them; the bytes along each axis follow from
            plan.axis_bytes, independent of the implementation.
    """

    def __init__(self, communicator: Communicator, counter: Sent, sizes: Mapping[str, int]) -> None:
        super().__init__(communicator.ranks, communicator.rank, communicator.name, communicator.device)
        self.communicator = communicator
        self.counter = counter
        self.sizes = sizes

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.communicator.buffer(numel, dtype)

    def barrier(self) -> None:
        self.communicator.barrier()

    def fail(self, failure: CommunicatorFailure) -> None:
        self.communicator.fail(failure)

    def close(self) -> None:
        self.communicator.close()

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor, tag: str) -> AsyncHandle:
        self._count("all_gather", whole, tag)
        return self.communicator._all_gather(whole, shard, tag)

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, accumulate: bool, tag: str) -> AsyncHandle:
        self._count("reduce_scatter", whole, tag)
        return self.communicator._reduce_scatter(shard, whole, accumulate, tag)

    def _all_reduce(self, buffer: torch.Tensor, tag: str) -> AsyncHandle:
        self._count("all_reduce", buffer, tag)
        return self.communicator._all_reduce(buffer, tag)

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: str) -> AsyncHandle:
        self._count("all_to_all", inp, tag)
        return self.communicator._all_to_all(out, inp, tag)

    def _broadcast(self, buffer: torch.Tensor, root: int, tag: str) -> AsyncHandle:
        self._count("broadcast", buffer, tag)
        return self.communicator._broadcast(buffer, root, tag)

    def _send(self, buffer: torch.Tensor, to: int, tag: str) -> AsyncHandle:
        self._count("send", buffer, tag)
        return self.communicator._send(buffer, to, tag)

    def _recv(self, buffer: torch.Tensor, from_: int, tag: str) -> AsyncHandle:
        return self.communicator._recv(buffer, from_, tag)

    def _count(self, verb: str, whole: torch.Tensor, tag: str) -> None:
        nbytes = whole.nbytes
        for axis, sent in axis_bytes(verb, nbytes, self.sizes).items():
            self.counter[axis, verb] += sent
        if observe.enabled():  # starts are in the caller's order; the communicator reports the run times
            observe.instant("start", tag or verb, verb=verb, channel=self.name, ranks=self.ranks, nbytes=nbytes)
