"""Channels: how what one rank sends another travels, apart from the collectives of a group and from other ranks.

A channel is a communicator of the sender and the receiver, in this order: one for each direction between two ranks of a
group, made when it is first used. So neighbours that both send first do not wait for each other, each queue runs in the
order of the calls, and both ends count their operations alike, whatever the others do.

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
        of: of a channel: the communicator whose sends it carries.
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
        """Return the channel from one rank of the group to another, of which this is one."""
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
        """Return a new communicator of two ranks of the group, this one among them; nobody waits for the other."""

    @abstractmethod
    def _carry(self, verb: str, buffer: torch.Tensor, tag: str) -> AsyncHandle:
        """Start this rank's end of a send over this channel; ``verb``: "send" or "recv"."""
