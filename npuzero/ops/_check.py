"""What the doors check. Each function returns nothing and raises ContractError naming the op and the argument."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from npuzero import _native
from npuzero.errors import ContractError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def tensor(op: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...], device: torch.device | None = None) -> None:
    """A dense, contiguous tensor in memory, of one of `dtypes`, on `device` where given."""
    if not (
        isinstance(value, torch.Tensor)
        and value.dtype in dtypes
        and (device is None or value.device == device)
        and value.layout is torch.strided
        and value.is_contiguous()
        and not released(value)
    ):
        _refuse_tensor(f"{op}: {name}", value, dtypes, device)


def released(value: torch.Tensor) -> bool:
    """Whether the storage was resized to nothing under the tensor, as a cut unit's is: its base address is then 0."""
    return value.data_ptr() == value.storage_offset() * value.element_size() and value.numel() > 0


def _refuse_tensor(subject: str, value: Any, dtypes: tuple[torch.dtype, ...], device: torch.device | None) -> NoReturn:
    if not isinstance(value, torch.Tensor):
        raise ContractError(subject, expected="a tensor", got=type(value).__name__, do="Pass a torch.Tensor.")
    if value.dtype not in dtypes:
        names = " or ".join(map(short, dtypes))
        raise ContractError(subject, expected=names, got=short(value.dtype), do="Cast it with ops.cast or .to().")
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
    _native.device_kind(value.device)  # a meta tensor has no memory either, for another reason
    raise ContractError(
        subject,
        expected="a tensor in memory",
        got="one whose storage was released",
        do="Gather the unit before using it.",
    )


def flat(
    op: str,
    name: str,
    value: Any,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
    count: int | None = None,
) -> None:
    """`tensor`, and one-dimensional, of `count` elements where given."""
    tensor(op, name, value, dtypes, device)
    if value.dim() != 1:
        raise ContractError(
            f"{op}: {name}", expected="one dimension", got=f"shape {tuple(value.shape)}", do="Pass the flat buffer."
        )
    if count is not None and value.numel() != count:
        raise ContractError(
            f"{op}: {name}",
            expected=f"{count} element{'s' * (count != 1)}",
            got=str(value.numel()),
            do="All flat buffers of one call have the same length.",
        )


def disjoint(
    op: str, written: Iterable[tuple[str, torch.Tensor]], read: Iterable[tuple[str, torch.Tensor]] = ()
) -> None:
    """No written tensor shares memory with any other tensor of the call; read ones may with each other."""
    spans = [(t.data_ptr(), name, t, True) for name, t in written if t.numel()]
    spans += [(t.data_ptr(), name, t, False) for name, t in read if t.numel()]
    spans.sort(key=lambda span: span[0])
    # Sweep upwards, remembering which span reaches farthest, among all and among the written.
    reach, reach_written = (0, ""), (0, "")
    for begin, name, span, is_written in spans:
        end, other = reach if is_written else reach_written
        if begin < end:
            raise ContractError(
                f"{op}: {name}",
                expected=f"memory apart from {other}'s",
                got=f"{end - begin} bytes shared",
                do="Give each written buffer memory of its own.",
            )
        mine = (begin + span.numel() * span.element_size(), name)
        reach = max(reach, mine)
        if is_written:
            reach_written = max(reach_written, mine)


def integer(op: str, name: str, value: Any, least: int, most: int) -> None:
    """An int in [least, most]."""
    if type(value) is not int or not least <= value <= most:
        raise ContractError(
            f"{op}: {name}",
            expected=f"an integer from {least} to {most}",
            got=repr(value),
            do="Pass one in that range.",
        )


def short(dtype: torch.dtype) -> str:
    """``float32`` instead of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
