"""Compute the layout of a checkpoint: boxes of tensors, DCP metadata, and the parts that each rank saves."""
