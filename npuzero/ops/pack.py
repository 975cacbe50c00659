"""Pack many tensors into one flat communication buffer, and unpack them. Contract: csrc/ops/pack.h.

A step packs hundreds of small tensors, so the work per tensor is kept to about a microsecond: plain integers, one loop,
and text only for errors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npuzero import _native
from npuzero.errors import ContractError
from npuzero.ops import _check
from npuzero.ops.reference import pack as reference

_Scale = float | torch.Tensor | None


def pack(
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    wire: torch.Tensor,
    *,
    scale: _Scale = None,
    accumulate: bool = False,
) -> None:
    """Compute wire[offsets[i] : offsets[i] + tensors[i].numel()] = tensors[i] * scale, in float32, rounded once.

    With equal dtypes, no scale and no accumulation, bits are copied. Uncovered elements are untouched.

    Args:
        tensors: contiguous, any shape; float32, bfloat16 or float16; dtypes may differ.
        offsets: elements of the communication buffer ``wire``, one per tensor; the ranges are disjoint, in any order.
        wire: flat; float32, bfloat16 or float16.
        scale: a number, or float32[1] on the device, so that it may depend on data; None means no multiplication.
        accumulate: add to the target instead of replacing it.

    Raises:
        ContractError: wrong dtype, device or length, a range outside the wire, or shared memory.
        KernelUnavailable: no kernel for this device in this build.
    """
    spans = _check_wire_spans("pack", tensors, offsets, wire)
    _check_pack_scale("pack", scale, wire.device, [("wire", wire)])
    size = wire.element_size()
    begins, sizes = [at for _, at, _ in spans], [count * size for _, _, count in spans]
    _check.check_address_ranges("pack", begins, sizes, len(spans), "offsets[{}]".format)
    pack_unchecked(tensors, offsets, wire, scale=scale, accumulate=accumulate)


def pack_unchecked(
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    wire: torch.Tensor,
    *,
    scale: _Scale = None,
    accumulate: bool = False,
) -> None:
    """Run `pack` without checks, for arguments that fulfil its contract by construction, such as an engine's."""
    if _native.backend() == "reference":
        reference.reference_pack(tensors, _wire_ranges(tensors, offsets, wire), scale, accumulate)
        return
    dtypes, begin, size = _native.DTYPES, wire.data_ptr(), wire.element_size()
    kind = dtypes[wire.dtype]
    parts = [
        (tensor.data_ptr(), begin + offset * size, tensor.numel(), dtypes[tensor.dtype], kind)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]
    _launch_pack(parts, wire.device, scale, accumulate)


def unpack(
    wire: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    *,
    scale: _Scale = None,
    accumulate: bool = False,
) -> None:
    """Compute tensors[i] = wire[offsets[i] : offsets[i] + tensors[i].numel()] * scale: the reverse of `pack`.

    The contract is the same. The tensors are written and share no memory; the ranges of the wire are read and may
    overlap.
    """
    spans = _check_wire_spans("unpack", tensors, offsets, wire)
    _check_pack_scale("unpack", scale, wire.device, [(f"tensors[{i}]", tensor) for i, tensor in enumerate(tensors)])
    begins, sizes = [at for at, _, _ in spans], [tensor.nbytes for tensor in tensors]
    _check.check_address_ranges("unpack", begins, sizes, len(spans), "tensors[{}]".format)
    if _native.backend() == "reference":
        reference.reference_pack(_wire_ranges(tensors, offsets, wire), tensors, scale, accumulate)
        return
    kind = _native.DTYPES[wire.dtype]
    parts = [
        (at, tensor, count, kind, _native.DTYPES[target.dtype])
        for (tensor, at, count), target in zip(spans, tensors, strict=True)
    ]
    _launch_pack(parts, wire.device, scale, accumulate)


def _check_wire_spans(
    op: str, tensors: Sequence[torch.Tensor], offsets: Sequence[int], wire: torch.Tensor
) -> list[tuple[int, int, int]]:
    """Check the arguments; return each tensor's address, its range's address in the wire, and its elements."""
    _check.check_flat_tensor(op, "wire", wire, _check.FLOATS)
    if len(tensors) != len(offsets):
        raise ContractError(
            f"{op}: offsets", expected=f"{len(tensors)}, one per tensor", got=str(len(offsets)), do="Pair them."
        )
    device, length, size, begin = wire.device, wire.numel(), wire.element_size(), wire.data_ptr()
    end = begin + length * size
    _check.check_tensor_line(op, "tensors", tensors, _check.FLOATS, device)
    spans: list[tuple[int, int, int]] = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        count, address = tensor.numel(), tensor.data_ptr()
        if type(offset) is not int or not 0 <= offset <= length - count:
            raise ContractError(
                f"{op}: offsets[{len(spans)}]",
                expected=f"an integer from 0 to {length} - {count}, so that the range lies in the wire",
                got=repr(offset),
                do="Correct the layout, or pass a longer wire.",
            )
        if address < end and begin < address + count * tensor.element_size():
            raise ContractError(
                f"{op}: tensors[{len(spans)}]",
                expected="memory apart from the wire's",
                got="a view of the wire",
                do="Pack from, and unpack into, memory outside the wire.",
            )
        spans.append((address, begin + offset * size, count))
    return spans


def _check_pack_scale(op: str, scale: _Scale, device: torch.device, written: list[tuple[str, torch.Tensor]]) -> None:
    if isinstance(scale, torch.Tensor):
        _check.check_flat_tensor(op, "scale", scale, (torch.float32,), device, 1)
        _check.check_disjoint(op, written, [("scale", scale)])
    elif scale is not None and not isinstance(scale, (int, float)):
        raise ContractError(
            f"{op}: scale", expected="a number, float32[1] or None", got=type(scale).__name__, do="Pass one of these."
        )


def _wire_ranges(tensors: Sequence[torch.Tensor], offsets: Sequence[int], wire: torch.Tensor) -> list[torch.Tensor]:
    return [wire[offset : offset + tensor.numel()] for tensor, offset in zip(tensors, offsets, strict=True)]


def _launch_pack(
    parts: list[tuple[int, int, int, int, int]], device: torch.device, scale: _Scale, accumulate: bool
) -> None:
    """Launch for parts of: source address, target address, elements, source dtype, target dtype."""
    scale_at = scale if isinstance(scale, torch.Tensor) else None
    factor = float(scale) if isinstance(scale, (int, float)) else 1.0
    _native.pack(
        parts,
        factor,
        _native.optional_view(scale_at),
        scale is not None,
        accumulate,
        _native.device_kind(device),
        _native.current_stream_handle(device),
    )
