"""Many tensors to one flat wire buffer, and back. Contract: csrc/ops/pack.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npuzero import _native
from npuzero.errors import ContractError
from npuzero.ops import _check
from npuzero.ops.reference import pack as reference


def pack(
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    wire: torch.Tensor,
    *,
    scale: float | torch.Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """wire[offsets[i] : offsets[i] + tensors[i].numel()] = tensors[i] * scale, in float32, rounded once.

    Where dtypes agree and there is neither scale nor accumulation, bits are copied. What no tensor covers is untouched.

    Args:
        tensors: contiguous, any shape; float32, bfloat16 or float16, not necessarily all the same.
        offsets: elements of the wire, one per tensor; the ranges are disjoint, in any order.
        wire: flat; float32, bfloat16 or float16.
        scale: a number, or float32[1] on the device, so that it may depend on data; None means no multiplication.
        accumulate: add to the target instead of replacing it.

    Raises:
        ContractError: wrong dtype, device or length, a range outside the wire, or shared memory.
        KernelUnavailable: no kernel for this device in this build.
    """
    _check_wire("pack", tensors, offsets, wire, scale)
    _check_ranges(tensors, offsets)
    _check.disjoint("pack", [("wire", wire)], _named(tensors, scale))
    _run(tensors, _parts(tensors, offsets, wire), wire.device, scale, accumulate)


def unpack(
    wire: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    *,
    scale: float | torch.Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """tensors[i] = wire[offsets[i] : offsets[i] + tensors[i].numel()] * scale: `pack` the other way, same contract.

    The tensors are written and share no memory; the ranges of the wire are read and may overlap.
    """
    _check_wire("unpack", tensors, offsets, wire, scale)
    read = [("wire", wire)] + ([("scale", scale)] if isinstance(scale, torch.Tensor) else [])
    _check.disjoint("unpack", _named(tensors, None), read)
    _run(_parts(tensors, offsets, wire), tensors, wire.device, scale, accumulate)


def _check_wire(
    op: str,
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    wire: torch.Tensor,
    scale: float | torch.Tensor | None,
) -> None:
    _check.flat(op, "wire", wire, _check.FLOATS)
    if len(tensors) != len(offsets):
        raise ContractError(
            f"{op}: offsets", expected=f"{len(tensors)}, one per tensor", got=str(len(offsets)), do="Pair them."
        )
    for i, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        _check.tensor(op, f"tensors[{i}]", tensor, _check.FLOATS, wire.device)
        if type(offset) is not int or not 0 <= offset <= wire.numel() - tensor.numel():
            raise ContractError(
                f"{op}: offsets[{i}]",
                expected=f"an integer from 0 to {wire.numel()} - {tensor.numel()}, so that the range lies in the wire",
                got=repr(offset),
                do="Correct the layout, or pass a longer wire.",
            )
    if isinstance(scale, torch.Tensor):
        _check.flat(op, "scale", scale, (torch.float32,), wire.device, 1)
    elif scale is not None and not isinstance(scale, (int, float)):
        raise ContractError(
            f"{op}: scale", expected="a number, float32[1] or None", got=type(scale).__name__, do="Pass one of these."
        )


def _check_ranges(tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
    end, last = 0, -1
    for begin, count, i in sorted(
        (offset, tensor.numel(), i) for i, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True))
    ):
        if count and begin < end:
            raise ContractError(
                f"pack: offsets[{i}]",
                expected=f"at least {end}, where tensors[{last}]'s range ends",
                got=str(begin),
                do="Ranges of the wire must not overlap.",
            )
        if count:
            end, last = begin + count, i


def _named(tensors: Sequence[torch.Tensor], scale: float | torch.Tensor | None) -> list[tuple[str, torch.Tensor]]:
    named = [(f"tensors[{i}]", tensor) for i, tensor in enumerate(tensors)]
    return [*named, ("scale", scale)] if isinstance(scale, torch.Tensor) else named


def _parts(tensors: Sequence[torch.Tensor], offsets: Sequence[int], wire: torch.Tensor) -> list[torch.Tensor]:
    return [wire[offset : offset + tensor.numel()] for tensor, offset in zip(tensors, offsets, strict=True)]


def _run(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    device: torch.device,
    scale: float | torch.Tensor | None,
    accumulate: bool,
) -> None:
    if _native.backend() == "reference":
        reference.pack(sources, targets, scale, accumulate)
        return
    scale_at = scale if isinstance(scale, torch.Tensor) else None
    _native.pack(
        [_native.view(source) for source in sources],
        [_native.view(target) for target in targets],
        1.0 if scale is None or scale_at is not None else float(scale),
        _native.optional_view(scale_at),
        scale is not None,
        bool(accumulate),
        _native.device_kind(device),
        _native.stream(device),
    )
