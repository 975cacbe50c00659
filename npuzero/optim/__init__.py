"""Optimizer arithmetic on flat buffers: buffers in, buffers out."""

from npuzero.optim.adam import AdamState, Range, segments

__all__ = ["AdamState", "Range", "segments"]
