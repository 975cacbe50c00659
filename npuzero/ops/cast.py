"""Cast one flat buffer into another dtype. Contract: csrc/ops/cast.h."""

from __future__ import annotations

import torch

from npuzero import _native
from npuzero.errors import ContractError
from npuzero.ops import _check
from npuzero.ops.reference import cast as reference

_ROUNDINGS = {"nearest": 0, "stochastic": 1, "tf32": 2, "away": 3}  # csrc/ops/cast.h
_TARGETS = {
    "nearest": _check.FLOATS,
    "stochastic": (torch.bfloat16,),
    "tf32": (torch.float32,),
    "away": (torch.bfloat16,),
}


def cast(src: torch.Tensor, dst: torch.Tensor, *, rounding: str = "nearest", seed: int = 0, offset: int = 0) -> None:
    """Write `src` into `dst`, rounded to `dst`'s dtype.

    NaN stays NaN and infinity stays infinity; denormals are kept. A number beyond the target's largest finite value
    becomes infinity.

    Args:
        src: flat; float32, bfloat16 or float16 (only float32 unless rounding is "nearest").
        dst: flat, as long as src; any of the three for "nearest", float32 for "tf32", else bfloat16.
        rounding: "nearest" (ties to even; between bfloat16 and float16 via float32); "away" (to nearest, ties
            away from zero, as flat_adam's copies of masters); "tf32" (10 bits of mantissa, to nearest, ties away from
            zero, as PTX's cvt.rna.tf32.f32; may be in place); "stochastic" (up or down with probabilities that preserve
            the mean).
        seed: "stochastic" only, 0 to 2^64 - 1: key of the Philox4x32-10 (Salmon et al., SC 2011) that makes the draws.
        offset: "stochastic" only: place of src[0] in the stream. An element's 16 random bits depend only on seed and
            place: they combine a word of its row (2048 places) and a word of its column. The bits of any three elements
            are independent (csrc/ops/cast.h).

    Raises:
        ContractError: wrong dtype, device, length or range, or shared memory.
        KernelUnavailable: no kernel for this device in this build.
    """
    if rounding not in _ROUNDINGS:
        raise ContractError(
            "cast: rounding", expected=f"one of {', '.join(_ROUNDINGS)}", got=repr(rounding), do="Name one of these."
        )
    nearest = rounding == "nearest"
    _check.check_flat_tensor("cast", "src", src, _check.FLOATS if nearest else (torch.float32,))
    _check.check_flat_tensor("cast", "dst", dst, _TARGETS[rounding], src.device, src.numel())
    _check.check_integer("cast", "seed", seed, 0, 2**64 - 1)
    _check.check_integer("cast", "offset", offset, 0, 2**63 - 1 - src.numel())
    if not (rounding == "tf32" and src.data_ptr() == dst.data_ptr()):
        _check.check_disjoint("cast", [("dst", dst)], [("src", src)])
    if _native.backend() == "reference":
        reference.reference_cast(src, dst, rounding, seed, offset)
        return
    _native.cast(
        _native.tensor_view(src),
        _native.tensor_view(dst),
        _ROUNDINGS[rounding],
        seed,
        offset,
        _native.current_stream_handle(src.device),
    )
