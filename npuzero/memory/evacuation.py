"""Offload an engine's device memory to the host, byte for byte, and bring it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from npuzero.memory.space import ReleasableBuffer
from npuzero.memory.spaces import MemorySpaces
from npuzero.plan import Memory


class SpaceOffload:
    """Hold copies on the host of an engine's device buffers. No code may use these buffers while offloaded."""

    def __init__(self, spaces: MemorySpaces) -> None:
        self._spaces = spaces
        self._away: list[tuple[ReleasableBuffer, Tensor]] = []
        self._fresh = False  # the host space was created for the offload

    @property
    def nbytes(self) -> int:
        """Return the number of offloaded bytes."""
        return sum(copy.nbytes for _, copy in self._away)

    @torch.no_grad()
    def leave(self, others: Sequence[ReleasableBuffer] = ()) -> list[Tensor]:
        """Copy the buffers of the device's space, and ``others``, to the host, and release their device memory.

        Returns:
            the host copies of ``others``, as bytes; writes into them are copied back.

        Raises:
            OutOfSpace: the host has no room; nothing has moved.
        """
        device, self._fresh = self._spaces.device, Memory.HOST not in list(self._spaces)
        blocks = [*others, *device.blocks()]
        host, mover = self._spaces.host, self._spaces.mover
        try:
            host.check_room(sum(block.raw.nbytes for block in blocks))
            for block in blocks:
                self._away.append((block, host.allocate(block.raw.nbytes, torch.uint8, block.label)))
            mover.follow()
            for block, copy in self._away:
                mover.to_host(copy, block.raw)
            mover.quiet()
        except BaseException:
            self._forget(len(self._away))
            raise
        for block in blocks:
            block.give()
        device.trim()
        return [copy for _, copy in self._away[: len(others)]]

    @torch.no_grad()
    def come_back(self) -> None:
        """Copy all buffers back to the device.

        Raises:
            OutOfSpace: the device has no room for all of them; the remaining ones are still on the host.
        """
        mover = self._spaces.mover
        while self._away:
            block, copy = self._away[0]
            block.take()
            mover.follow()
            mover.to_device(block.raw, copy).wait()
            self._forget(1)

    def _forget(self, n: int) -> None:
        """Delete the first ``n`` copies; close the host space after the last if the offload created it."""
        for block, copy in self._away[:n]:
            self._spaces.host.count(block.label, -copy.nbytes)
        del self._away[:n]
        if not self._away and self._fresh:
            self._spaces.close_host()


def find_foreign_buffers(tensors: Iterable[Tensor], label: str) -> Iterator[ReleasableBuffer]:
    """Yield the resizable storages of tensors that no space allocated, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    for storage in storages.values():
        nbytes = storage.nbytes()
        if nbytes and storage.resizable():
            raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,))  # type: ignore[call-overload]
            yield ReleasableBuffer(label, raw, partial(storage.resize_, 0), partial(storage.resize_, nbytes))
