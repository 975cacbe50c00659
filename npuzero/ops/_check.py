"""Checks of the ops' arguments: ContractErrors that name the op and the argument.

A step passes hundreds of tensors through them, so the work per tensor is kept to about a microsecond: text is made only
for errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from npuzero import _native
from npuzero.errors import ContractError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    op: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...], device: torch.device | None = None
) -> None:
    """Check for a dense, contiguous tensor in memory, of one of `dtypes`, on `device` if given."""
    if not _is_usable(value, dtypes, device):
        _refuse_tensor(f"{op}: {name}", value, dtypes, device)


def check_tensor_line(
    op: str,
    name: str,
    buffer: Any,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
    counts: Sequence[int] | None = None,
    optional: bool = False,
) -> Sequence[Any]:
    """Check a tensor, or a sequence of tensors, as `check_tensor` does, on one device, each of `counts[i]` elements.

    Returns the sequence, of length one for a tensor. If `optional`, any entry may be None; None alone means all.
    """
    lone = buffer is None or isinstance(buffer, torch.Tensor)
    values = (buffer,) if lone else buffer
    if counts is not None and len(values) != len(counts):
        if optional and buffer is None:
            return (None,) * len(counts)
        raise ContractError(
            f"{op}: {name}", expected=f"{len(counts)} tensors", got=str(len(values)), do="Pass one for each master."
        )
    present = [i for i, value in enumerate(values) if value is not None] if optional else range(len(values))
    chosen = [values[i] for i in present] if optional else values
    if not _all_usable(chosen, dtypes, device):
        # The fast check found a fault: check one by one to name the tensor at fault.
        for i in present:
            one = device or getattr(values[0], "device", None)
            if not _is_usable(values[i], dtypes, one):
                _refuse_tensor(f"{op}: {name}" if lone else f"{op}: {name}[{i}]", values[i], dtypes, one)
    if counts is not None and [value.numel() for value in chosen] != [counts[i] for i in present]:
        i = next(i for i in present if values[i].numel() != counts[i])
        _refuse_count(f"{op}: {name}" if lone else f"{op}: {name}[{i}]", counts[i], values[i])
    return values


def _all_usable(values: Sequence[Any], dtypes: tuple[torch.dtype, ...], device: torch.device | None) -> bool:
    """Return whether all values pass `_is_usable`, on one device.

    One property at a time for all values takes a quarter of the time.
    """
    if not {isinstance(value, torch.Tensor) for value in values} <= {True}:
        return False
    # Types are checked first: a value of another type has no dtype. An empty sequence passes.
    devices = {value.device for value in values}
    return (
        {value.dtype for value in values} <= {*dtypes}
        and (devices <= {device} if device else len(devices) <= 1)
        and {value.layout for value in values} <= {torch.strided}
        and {value.is_contiguous() for value in values} <= {True}
        and {value.is_neg() for value in values} <= {False}
        and True not in {value.data_ptr() < _LOW_ADDRESS and is_storage_released(value) for value in values}
    )


# A released tensor's address is its offset in bytes; addresses in memory are higher than any offset.
_LOW_ADDRESS = 1 << 40


def _is_usable(value: Any, dtypes: tuple[torch.dtype, ...], device: torch.device | None) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in dtypes
        and (device is None or value.device == device)
        and value.layout is torch.strided
        and value.is_contiguous()
        and not value.is_neg()  # is_conj() is only true of complex tensors, which no op takes
        and not is_storage_released(value)
    )


def is_storage_released(value: torch.Tensor) -> bool:
    """Return whether the tensor's storage was resized to 0, as a resharded unit's: its base address is then 0."""
    return value.data_ptr() == value.storage_offset() * value.element_size() and value.numel() > 0


def _refuse_tensor(subject: str, value: Any, dtypes: tuple[torch.dtype, ...], device: torch.device | None) -> NoReturn:
    if not isinstance(value, torch.Tensor):
        raise ContractError(subject, expected="a tensor", got=type(value).__name__, do="Pass a torch.Tensor.")
    if value.dtype not in dtypes:
        names = " or ".join(map(dtype_name, dtypes))
        raise ContractError(subject, expected=names, got=dtype_name(value.dtype), do="Cast it with ops.cast or .to().")
    if device is not None and value.device != device:
        raise ContractError(
            subject, expected=f"on {device}", got=f"on {value.device}", do="Keep the tensors of one call together."
        )
    if value.layout is not torch.strided:
        raise ContractError(subject, expected="a dense tensor", got=str(value.layout), do="Call .to_dense() first.")
    if not value.is_contiguous():
        raise ContractError(
            subject,
            expected="contiguous elements",
            got=f"shape {tuple(value.shape)} with strides {value.stride()}",
            do="Pass .contiguous(), or the flat buffer itself.",
        )
    if value.is_neg():
        raise ContractError(
            subject,
            expected="memory that holds the values",
            got="a lazy negative (is_neg())",
            do="Call resolve_neg(), and resolve_conj() on complex tensors before their parts are taken.",
        )
    _native.device_kind(value.device)  # a meta tensor has no memory either: raise its own error
    raise ContractError(
        subject,
        expected="a tensor in memory",
        got="one whose storage was released",
        do="Gather the unit before using it.",
    )


def check_flat_tensor(
    op: str,
    name: str,
    value: Any,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
    count: int | None = None,
) -> None:
    """Check as `check_tensor` does, and for one dimension, of `count` elements if given."""
    check_tensor(op, name, value, dtypes, device)
    if value.dim() != 1:
        raise ContractError(
            f"{op}: {name}", expected="one dimension", got=f"shape {tuple(value.shape)}", do="Pass the flat buffer."
        )
    if count is not None and value.numel() != count:
        _refuse_count(f"{op}: {name}", count, value)


def check_coefficient_rows(
    op: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...], device: torch.device | None, columns: int
) -> None:
    """Check as `check_tensor` does, and for rows of `columns` elements."""
    check_tensor(op, name, value, dtypes, device)
    if value.dim() != 2 or value.shape[1] != columns:
        raise ContractError(
            f"{op}: {name}",
            expected=f"rows of {columns}",
            got=f"shape {tuple(value.shape)}",
            do="Give one row for each set of coefficients.",
        )


def _refuse_count(subject: str, count: int, value: torch.Tensor) -> NoReturn:
    raise ContractError(
        subject,
        expected=f"{count} element{'s' * (count != 1)}",
        got=str(value.numel()),
        do="The buffers of one call have the same length.",
    )


def check_disjoint(
    op: str, written: Sequence[tuple[str, torch.Tensor]], read: Sequence[tuple[str, torch.Tensor]]
) -> None:
    """Check that no written tensor shares memory with any other of the call; read tensors may share."""
    named = [*written, *read]
    begins = [tensor.data_ptr() for _, tensor in named]
    sizes = [tensor.nbytes for _, tensor in named]
    check_address_ranges(op, begins, sizes, len(written), lambda i: named[i][0])


def check_address_ranges(
    op: str, begins: Sequence[int], sizes: Sequence[int], written: int, name: Callable[[int], str]
) -> None:
    """Check as `check_disjoint` does, by addresses and sizes in bytes, the written ones first.

    `name(i)` names the buffer at fault.
    """
    found = _native.overlap(begins, sizes, written)
    if found is not None:
        below, above = found
        raise ContractError(
            f"{op}: {name(above)}",
            expected=f"memory apart from {name(below)}'s",
            got=f"{begins[below] + sizes[below] - begins[above]} bytes shared",
            do="Give each written buffer memory of its own.",
        )


def check_integer(op: str, name: str, value: Any, least: int, most: int) -> None:
    """Check for an int in [least, most]."""
    if type(value) is not int or not least <= value <= most:
        raise ContractError(
            f"{op}: {name}",
            expected=f"an integer from {least} to {most}",
            got=repr(value),
            do="Pass one in that range.",
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name: ``float32`` instead of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
