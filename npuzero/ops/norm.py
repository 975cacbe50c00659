"""Compute the sum of squares and the number of non-finite elements, in the pass that adds gradients.

Contract and order of the sum: csrc/ops/norm.h.
"""

from __future__ import annotations

import torch

from npuzero import _native
from npuzero.errors import ContractError
from npuzero.ops import _check
from npuzero.ops.reference import norm as reference


def norm(x: torch.Tensor, out: torch.Tensor, *, addend: torch.Tensor | None = None, scale: float = 1.0) -> None:
    """Write {sum of squares, number of infinite or NaN elements} of `x` in one pass, after adding `addend` to it.

    The sum covers every element, so it is infinite or NaN if the count is not zero. The result depends only on the
    values and the length, not on the number of threads or the instruction set.

    Args:
        x: float32, bfloat16 or float16, flat; may be empty. With an addend: float32, updated in place.
        out: float64[2].
        addend: float32, bfloat16 or float16, as long as x: first x = x + addend * scale, in float32.
        scale: factor of the addend.

    Raises:
        ContractError: wrong dtype, device, shape, or shared memory.
        KernelUnavailable: no kernel for this device in this build.
    """
    _check.check_flat_tensor("norm", "x", x, _check.FLOATS if addend is None else (torch.float32,))
    _check.check_flat_tensor("norm", "out", out, (torch.float64,), x.device, 2)
    written, read = [("out", out)], [("x", x)]
    if addend is not None:
        _check.check_flat_tensor("norm", "addend", addend, _check.FLOATS, x.device, x.numel())
        written, read = [("out", out), ("x", x)], [("addend", addend)]
    if not isinstance(scale, (int, float)):
        raise ContractError("norm: scale", expected="a number", got=type(scale).__name__, do="Pass a float.")
    _check.check_disjoint("norm", written, read)
    norm_unchecked(x, out, addend=addend, scale=scale)


def norm_unchecked(
    x: torch.Tensor, out: torch.Tensor, *, addend: torch.Tensor | None = None, scale: float = 1.0
) -> None:
    """Run `norm` without checks, for arguments that fulfil its contract by construction, such as an engine's."""
    if _native.backend() == "reference":
        reference.reference_norm(x, out, addend, scale)
        return
    blocks = -(-x.numel() // _native.NORM_BLOCK)
    workspace = torch.empty(2 * blocks, dtype=torch.float64, device=x.device)
    view = _native.tensor_view
    _native.norm(
        *(view(x), view(out), view(workspace), _native.optional_view(addend)),
        float(scale),
        _native.current_stream_handle(x.device),
    )
