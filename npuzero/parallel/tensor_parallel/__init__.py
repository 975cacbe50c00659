"""Tensor parallelism: layers sharded over ranks by a plan of words."""
