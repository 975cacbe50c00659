"""The ops: one function each, its contract in the docstring, arguments checked, dispatched by device.

Nothing falls back in silence: a device without a kernel raises KernelUnavailable. NPUZERO_BACKEND=reference makes every
op run its plain-torch reference instead (slow; for comparison).
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
