"""Carry sends between two ranks over channels, separate from the collectives of a group and from other pairs.

A channel is a communicator of the sender and the receiver, in this order: one for each direction between two ranks of a
group, made at its first use. So neighbours that both send first do not deadlock, each queue runs in the order of the
calls, and both ends number their operations equally, independent of other ranks.

Invariant: a communicator and its channels are broken together.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from npuzero.comm.communicator import Communicator
from npuzero.comm.watchdog import fork
from npuzero.device import AsyncHandle

if TYPE_CHECKING:
    from typing_extensions import Self


class ChannelCommunicator(Communicator):
    """Send and receive over channels.

    Attributes:
        of: in a channel: the communicator that it carries sends for.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str, device: torch.device) -> None:
        super().__init__(ranks, rank, name, device)
        self.of: Self | None = None
        self._door = fork.make_fork_check(f"{name!r} on rank {self.ranks[rank]}")
        self._channels: dict[tuple[int, int], Self] = {}
        self._opening = threading.Lock()

    def arrived(self) -> dict[str, int]:
        return super().arrived() | {channel.place: channel.started for channel in self._open()}

    def drain(self) -> None:
        for channel in self._open():
            channel.drain()

    def close(self) -> None:
        for channel in self._open():
            channel.close()

    def _send(self, buffer: torch.Tensor, to: int, tag: str) -> AsyncHandle:
        return self._channel(self.rank, to)._carry("send", buffer, tag)

    def _recv(self, buffer: torch.Tensor, from_: int, tag: str) -> AsyncHandle:
        return self._channel(from_, self.rank)._carry("recv", buffer, tag)

    def _channel(self, sender: int, receiver: int) -> Self:
        """Return the channel from one rank of the group to another; one of them is this rank."""
        self._door()
        with self._opening:
            if (sender, receiver) not in self._channels:
                name = f"{self.name}@sends among {'-'.join(map(str, self.ranks))}"
                made = self._make_channel((self.ranks[sender], self.ranks[receiver]), name)
                made.of, made.board, made.name = self, self.board, self.name
                self._channels[sender, receiver] = made
            return self._channels[sender, receiver]

    def _open(self) -> list[Self]:
        return list(self._channels.values())

    @abstractmethod
    def _make_channel(self, ranks: tuple[int, int], name: str) -> Self:
        """Return a new communicator of two ranks of the group, this one included; does not wait for the other rank."""

    @abstractmethod
    def _carry(self, verb: str, buffer: torch.Tensor, tag: str) -> AsyncHandle:
        """Start this rank's end of a send over this channel; ``verb``: "send" or "recv"."""
