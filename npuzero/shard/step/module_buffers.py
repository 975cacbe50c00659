"""Synchronize a model's buffers, such as BatchNorm's statistics, which each rank's forward writes separately."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from npuzero.comm import Communicator

#: Rules for buffers at the start of a forward that follows a training forward.
BUFFER_RULES = ("broadcast", "average")


class BufferSync:
    """Apply one rule to a model's buffers: ``"broadcast"`` (from rank 0, as in DDP) or ``"average"``.

    Only floating-point buffers are averaged; all others, such as counters, are broadcast from rank 0.
    """

    def __init__(self, rule: str, everyone: Communicator) -> None:
        self._averaged = rule == "average"
        self._everyone = everyone
        self._stale = False

    @torch.no_grad()
    def forward_begins(self, model: nn.Module) -> None:
        """Make the buffers equal on all ranks, if a training forward may have written them. Collective."""
        if self._stale and self._everyone.size > 1:
            # Write through data: an earlier forward's graph may have saved the buffers, but does not need the values.
            tensors = [buffer.data for buffer in model.buffers() if buffer.numel()]
            means = [tensor for tensor in tensors if self._averaged and tensor.is_floating_point()]
            self._average(means)
            self._broadcast([tensor for tensor in tensors if not any(tensor is mean for mean in means)])
        self._stale = model.training

    def _average(self, tensors: Sequence[Tensor]) -> None:
        if tensors:
            wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
            sums = torch.cat([tensor.reshape(-1).to(wide) for tensor in tensors])
            self._everyone.all_reduce(sums, tag="buffers").wait()
            _unpack_into(sums.div_(self._everyone.size), tensors)

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        if tensors:
            # As bytes: one broadcast for buffers of all dtypes.
            raw = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
            self._everyone.broadcast(raw, root=0, tag="buffers").wait()
            sizes = [tensor.nbytes for tensor in tensors]
            for tensor, piece in zip(tensors, raw.split(sizes), strict=True):
                tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))  # a clone is aligned


def _unpack_into(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    pieces = packed.split([tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view(tensor.shape))
