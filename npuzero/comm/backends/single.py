"""Run collectives in a group of one rank: each is a copy, done at once on the device's current stream."""

from __future__ import annotations

import torch

from npuzero.comm.communicator import Communicator
from npuzero.comm.watchdog.hang_detector import CommunicatorFailure
from npuzero.device import AsyncHandle, ReadyHandle
from npuzero.errors import CollectiveError

_READY = ReadyHandle()


class SingleCommunicator(Communicator):
    """Run the collectives of a single rank."""

    def __init__(self, rank: int, name: str, device: torch.device) -> None:
        super().__init__((rank,), 0, name, device)
        self._broken: CollectiveError | None = None

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor, tag: str) -> AsyncHandle:
        return self._copy(whole, shard)

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, accumulate: bool, tag: str) -> AsyncHandle:
        if not accumulate:
            return self._copy(shard, whole)
        self._check_unbroken()
        with torch.no_grad():
            shard.add_(whole)
        return _READY

    def _all_reduce(self, buffer: torch.Tensor, tag: str) -> AsyncHandle:
        self._check_unbroken()
        return _READY

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: str) -> AsyncHandle:
        return self._copy(out, inp)

    def _broadcast(self, buffer: torch.Tensor, root: int, tag: str) -> AsyncHandle:
        self._check_unbroken()
        return _READY

    def _send(self, buffer: torch.Tensor, to: int, tag: str) -> AsyncHandle:
        raise AssertionError("refused at the door: there is nobody to send to")

    def _recv(self, buffer: torch.Tensor, from_: int, tag: str) -> AsyncHandle:
        raise AssertionError("refused at the door: there is nobody to receive from")

    def barrier(self) -> None:
        self._check_unbroken()

    def fail(self, failure: CommunicatorFailure) -> None:
        self._broken = self._broken or failure.error(f"{self.name!r} on rank {self.ranks[0]}")

    def close(self) -> None:
        return

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> AsyncHandle:
        self._check_unbroken()
        if to.data_ptr() != source.data_ptr():
            with torch.no_grad():
                to.copy_(source)
        return _READY

    def _check_unbroken(self) -> None:
        if self._broken is not None:
            raise self._broken
