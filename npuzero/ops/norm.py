"""Sum of squares and number of non-finite elements. Contract and order of the sum: csrc/ops/norm.h."""

from __future__ import annotations

import torch

from npuzero import _native
from npuzero.ops import _check
from npuzero.ops.reference import norm as reference


def norm(x: torch.Tensor, out: torch.Tensor) -> None:
    """Writes {sum of squares, number of infinite or NaN elements} of `x` in one pass.

    Every element takes part in the sum: it is infinite or NaN where the count is not zero. The result depends on the
    values and the length alone, not on the number of threads or the instruction set.

    Args:
        x: float32, bfloat16 or float16, flat; may be empty.
        out: float64[2].

    Raises:
        ContractError: wrong dtype, device, shape, or shared memory.
        KernelUnavailable: no kernel for this device in this build.
    """
    _check.flat("norm", "x", x, _check.FLOATS)
    _check.flat("norm", "out", out, (torch.float64,), x.device, 2)
    _check.disjoint("norm", [("out", out)], [("x", x)])
    if _native.backend() == "reference":
        reference.norm(x, out)
        return
    blocks = -(-x.numel() // _native.NORM_BLOCK)
    workspace = torch.empty(2 * blocks, dtype=torch.float64, device=x.device)
    _native.norm(_native.view(x), _native.view(out), _native.view(workspace), _native.stream(x.device))
