"""The ops of the engine: each checks its arguments, then dispatches to the kernel of its device.

In: tensors in memory on one device. Out: the written tensors. The contract is each function's docstring; the formula
and bits are in the header in csrc/ops that its file names.

Read ``flat_adam.py`` (an optimizer update), ``_flat.py`` (the launch code that updates share) and
``reference/_flat.py`` (the same in plain torch) first. ``pack``, ``unpack``, ``cast`` and ``norm`` serve gradients and
parameters; ``quantize`` and ``dequantize_sum`` serve low-bit collectives.

No silent fallback: a device without a kernel raises KernelUnavailable. NPUZERO_BACKEND=reference runs every op's
plain-torch reference instead (slow; for comparison).
"""

from __future__ import annotations

from npuzero.ops.cast import cast
from npuzero.ops.dequantize_sum import dequantize_sum
from npuzero.ops.flat_adam import AdamLine, AdamSegment, flat_adam
from npuzero.ops.flat_lion import LionLine, LionSegment, flat_lion
from npuzero.ops.norm import norm
from npuzero.ops.pack import pack, unpack
from npuzero.ops.quantize import quantize

__all__ = [
    "AdamLine",
    "AdamSegment",
    "LionLine",
    "LionSegment",
    "cast",
    "dequantize_sum",
    "flat_adam",
    "flat_lion",
    "norm",
    "pack",
    "quantize",
    "unpack",
]
