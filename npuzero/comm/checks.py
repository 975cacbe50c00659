"""The checks of every collective's tensors before anything is sent. Each raises a ContractError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from npuzero.errors import ContractError
from npuzero.ops.storage.lazy import lazy

#: Dtypes a sum may travel in. all_reduce also takes those of INTEGERS, and float64.
WIRES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64, torch.uint8)


def check_flats(verb: str, device: torch.device, **tensors: torch.Tensor) -> None:
    """Check that each tensor is dense, 1-D, contiguous, on ``device``, and that its memory is there."""
    for name, tensor in tensors.items():
        _check_flat(f"{verb}: {name}", tensor, device)


def _check_flat(subject: str, tensor: object, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        _refuse(subject, "a tensor", type(tensor).__name__, "Hand over the flat buffer itself.")
    if tensor.device != device:
        _refuse(subject, f"a tensor on {device}", f"one on {tensor.device}", "Move it to the device of the group.")
    if tensor.layout != torch.strided or tensor.dim() != 1 or not tensor.is_contiguous():
        got = f"{tensor.layout}, shape {tuple(tensor.shape)}"
        _refuse(subject, "a 1-D contiguous tensor", got, "Send the flat buffer, or tensor.view(-1).")
    if lazy(tensor):
        got = f"a lazy {'negative' if tensor.is_neg() else 'conjugate'}"
        _refuse(subject, "memory that holds the values", got, "Call resolve_conj() and resolve_neg() first.")
    # A transient that is released keeps its shape: only the storage tells.
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.numel() and tensor.untyped_storage().nbytes() < needed:
        got = f"{tensor.untyped_storage().nbytes()} bytes: it was released"
        _refuse(subject, f"a storage of at least {needed} bytes", got, "Allocate the buffer before sending it.")


def check_parts(verb: str, whole: torch.Tensor, shard: torch.Tensor, size: int) -> None:
    """Check that ``whole`` is as long as ``size`` shards."""
    if whole.numel() != size * shard.numel():
        got = f"{whole.numel()} elements"
        _refuse(verb, f"whole of {size} ranks * {shard.numel()} elements of shard", got, "Pad to equal shards.")


def is_part(whole: torch.Tensor, shard: torch.Tensor, index: int) -> bool:
    """Return whether ``shard`` is the memory of part ``index`` of ``whole``."""
    own = whole.data_ptr() + index * shard.numel() * whole.element_size()
    return whole.dtype == shard.dtype and shard.data_ptr() == own


def check_dtype(subject: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Check that the dtype is one of those ``allowed``."""
    if tensor.dtype not in allowed:
        names = ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in allowed))
        _refuse(
            subject, f"one of {names}", str(tensor.dtype).removeprefix("torch."), "Cast it first (npuzero.ops.cast)."
        )


def check_equal_dtypes(verb: str, **tensors: torch.Tensor) -> None:
    """Check that the tensors have one dtype."""
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        got = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items()).replace("torch.", "")
        _refuse(verb, f"{' and '.join(tensors)} of one dtype", got, "Cast one of them first (npuzero.ops.cast).")


def check_peer(subject: str, peer: object, rank: int, size: int) -> None:
    """Check that ``peer`` is the index of another rank in a group of ``size``, in which this one is ``rank``."""
    if size == 1:
        _refuse(subject, "a group of several ranks", "a rank alone: there is nobody else", "Ask for communicator.size.")
    if not isinstance(peer, int) or peer == rank or peer not in range(size):
        others = ", ".join(str(other) for other in range(size) if other != rank)
        do = "Give the position in communicator.ranks, not the global rank."
        _refuse(subject, f"the index in the group of another rank: {others}", repr(peer), do)


def check_apart(verb: str, **tensors: torch.Tensor) -> None:
    """Check that two tensors share no byte."""
    (first, a), (second, b) = tensors.items()
    a_end = a.data_ptr() + a.numel() * a.element_size()
    b_end = b.data_ptr() + b.numel() * b.element_size()
    if a.numel() and b.numel() and a.data_ptr() < b_end and b.data_ptr() < a_end:
        got = f"[{a.data_ptr():#x}, {a_end:#x}) and [{b.data_ptr():#x}, {b_end:#x})"
        _refuse(verb, f"{first} and {second} in memory apart from each other", got, "Use separate buffers.")


def _refuse(subject: str, expected: str, got: str, do: str) -> NoReturn:
    raise ContractError(subject, expected=expected, got=got, do=do)
