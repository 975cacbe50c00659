"""Optimizer arithmetic on flat buffers: buffers in, buffers out."""

from npuzero.optim.adam import AdamState, Range, update

__all__ = ["AdamState", "Range", "update"]
