"""Parallel axes beside ZeRO's own: functions over a communicator that cut a model's computation over ranks.

``functions`` has the collectives that autograd differentiates, each its partner's conjugate.
"""

from npuzero.parallel.relate import relate

__all__ = ["relate"]
