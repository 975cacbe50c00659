"""Optimizer arithmetic on flat buffers: buffers in, buffers out."""

from npuzero.optim.adam import MOMENT_DTYPES, MOMENTS, AdamState, Range, Rows, dynamic_rows, lies_there, segments
from npuzero.optim.scaler import LossScale, TakenSteps

__all__ = [
    "MOMENTS",
    "MOMENT_DTYPES",
    "AdamState",
    "LossScale",
    "Range",
    "Rows",
    "TakenSteps",
    "dynamic_rows",
    "lies_there",
    "segments",
]
