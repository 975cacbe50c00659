"""Optimizer arithmetic on flat buffers: buffers in, buffers out."""

from npuzero.optim.adam import AdamState, Range, dynamic_rows, segments

__all__ = ["AdamState", "Range", "dynamic_rows", "segments"]
