"""Convert between torch's tensors of any shape and the flat buffers that communicators take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from npuzero.errors import ContractError
from npuzero.ops.storage.lazy import materialize_lazy

NAME = "shm"

#: A function to call once operations are done.
After = Callable[[], object]


def flatten_tensor(tensor: Tensor) -> Tensor:
    """Return the elements as [n]: a view if possible, else a copy."""
    if tensor.layout != torch.strided:
        raise ContractError(
            f"tensor for {NAME}", expected="a dense tensor", got=str(tensor.layout), do="Call to_dense(), or use gloo."
        )
    return materialize_lazy(tensor.detach()).view(-1)


def make_flat_buffers(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[After]]:
    """Return 1-D buffers with the tensors' values, and functions that copy results back if a buffer is a copy."""
    flats = [flatten_tensor(tensor) for tensor in tensors]
    copies = [(f, t) for f, t in zip(flats, tensors, strict=True) if f.numel() and f.data_ptr() != t.data_ptr()]
    return flats, [functools.partial(copy_flat_to_tensors, flat, [tensor]) for flat, tensor in copies]


def copy_flat_to_tensors(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy ``flat`` into the tensors, one after another."""
    begin = 0
    for tensor in tensors:
        tensor.copy_(flat[begin : begin + tensor.numel()].view(tensor.shape))
        begin += tensor.numel()


def concatenate_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Copy the tensors, one after another, into one [n]."""
    return torch.cat([flatten_tensor(tensor) for tensor in tensors])


def split_first_dimension(tensor: Tensor, sizes: list[int], into: int) -> list[Tensor]:
    """Split ``tensor`` along its first dimension; without sizes into ``into`` equal parts."""
    if not sizes:
        return list(tensor.chunk(into)) if tensor.numel() else [tensor] * into
    return list(tensor.split(sizes))
