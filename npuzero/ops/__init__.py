"""The ops: one function each, its contract in the docstring, arguments checked, dispatched by device.

Nothing falls back in silence: a device without a kernel raises KernelUnavailable. NPUZERO_BACKEND=reference makes every
op run its plain-torch reference instead (slow; for comparison).
"""

from __future__ import annotations

from npuzero.ops.cast import cast
from npuzero.ops.flat_adam import Line, Segment, flat_adam
from npuzero.ops.norm import norm
from npuzero.ops.pack import pack, unpack

__all__ = [
    "Line",
    "Segment",
    "cast",
    "flat_adam",
    "norm",
    "pack",
    "unpack",
]
