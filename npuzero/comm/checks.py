"""Check the tensors of every collective before anything is sent. Each check raises a ContractError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from npuzero.errors import ContractError
from npuzero.ops.storage.lazy import is_lazy

#: Dtypes of reduce-scatter. all_reduce also takes INTEGERS and float64.
WIRES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64, torch.uint8)
SUMS = (*WIRES, torch.float64, *INTEGERS)


def check_flat(verb: str, name: str, tensor: object, device: torch.device) -> None:
    """Check that ``tensor`` is dense, 1-D, contiguous, on ``device``, and that its memory is allocated."""
    if not isinstance(tensor, torch.Tensor):
        _raise_contract_error(f"{verb}: {name}", "a tensor", type(tensor).__name__, "Hand over the flat buffer itself.")
    if tensor.device != device:
        got = f"one on {tensor.device}"
        _raise_contract_error(f"{verb}: {name}", f"a tensor on {device}", got, "Move it to the device of the group.")
    if tensor.layout is not torch.strided or tensor.dim() != 1 or not tensor.is_contiguous():
        got = f"{tensor.layout}, shape {tuple(tensor.shape)}"
        _raise_contract_error(
            f"{verb}: {name}", "a 1-D contiguous tensor", got, "Send the flat buffer, or tensor.view(-1)."
        )
    if is_lazy(tensor):
        got = f"a lazy {'negative' if tensor.is_neg() else 'conjugate'}"
        _raise_contract_error(
            f"{verb}: {name}", "memory that holds the values", got, "Call resolve_conj() and resolve_neg() first."
        )
    # A released buffer keeps its shape: only the storage shows it.
    needed = tensor.storage_offset() * tensor.element_size() + tensor.nbytes
    if tensor.untyped_storage().nbytes() < needed and tensor.nbytes:
        got = f"{tensor.untyped_storage().nbytes()} bytes: it was released"
        do = "Allocate the buffer before sending it."
        _raise_contract_error(f"{verb}: {name}", f"a storage of at least {needed} bytes", got, do)


def check_shard_sizes(verb: str, whole: torch.Tensor, shard: torch.Tensor, size: int) -> None:
    """Check that ``whole`` is as long as ``size`` shards."""
    if whole.numel() != size * shard.numel():
        got = f"{whole.numel()} elements"
        _raise_contract_error(
            verb, f"whole of {size} ranks * {shard.numel()} elements of shard", got, "Pad to equal shards."
        )


def check_dtype(subject: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Check that the dtype is one of ``allowed``."""
    if tensor.dtype not in allowed:
        names = ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in allowed))
        _raise_contract_error(
            subject, f"one of {names}", str(tensor.dtype).removeprefix("torch."), "Cast it first (npuzero.ops.cast)."
        )


def check_equal_dtypes(verb: str, **tensors: torch.Tensor) -> None:
    """Check that two tensors have one dtype."""
    a, b = tensors.values()
    if a.dtype != b.dtype:
        got = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items()).replace("torch.", "")
        _raise_contract_error(
            verb, f"{' and '.join(tensors)} of one dtype", got, "Cast one of them first (npuzero.ops.cast)."
        )


def check_peer(subject: str, peer: object, rank: int, size: int) -> None:
    """Check that ``peer`` is the index of another rank in a group of ``size`` ranks; this rank's index is ``rank``."""
    if size == 1:
        _raise_contract_error(
            subject, "a group of several ranks", "a rank alone: there is nobody else", "Ask for communicator.size."
        )
    if not isinstance(peer, int) or peer == rank or peer not in range(size):
        others = ", ".join(str(other) for other in range(size) if other != rank)
        do = "Give the position in communicator.ranks, not the global rank."
        _raise_contract_error(subject, f"the index in the group of another rank: {others}", repr(peer), do)


def check_no_aliasing(verb: str, part: int | None = None, **tensors: torch.Tensor) -> None:
    """Check that two tensors share no byte, or that the second is the memory of part ``part`` of the first."""
    (first, a), (second, b) = tensors.items()
    a_begin, b_begin = a.data_ptr(), b.data_ptr()
    a_end, b_end = a_begin + a.nbytes, b_begin + b.nbytes
    if a_begin >= b_end or b_begin >= a_end or not a.nbytes or not b.nbytes:
        return
    if part is None or a.dtype != b.dtype or b_begin != a_begin + part * b.nbytes:
        got = f"[{a_begin:#x}, {a_end:#x}) and [{b_begin:#x}, {b_end:#x})"
        _raise_contract_error(
            verb, f"{first} and {second} in memory apart from each other", got, "Use separate buffers."
        )


def _raise_contract_error(subject: str, expected: str, got: str, do: str) -> NoReturn:
    raise ContractError(subject, expected=expected, got=got, do=do)
