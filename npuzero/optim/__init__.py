"""Optimizers: fused rules and torch's own, over sharded models and plain parameters;
loss scaling and the finite guard.
"""

from npuzero.optim.adam import Adam, AdamW, dynamic_rows
from npuzero.optim.counts import TakenSteps
from npuzero.optim.guard import FiniteGuard
from npuzero.optim.lion import Lion
from npuzero.optim.loss_scale import LossScale
from npuzero.optim.moments import MOMENT_DTYPES
from npuzero.optim.optimizer import ZeroOptimizer
from npuzero.optim.scaler import LossScaler

__all__ = [
    "MOMENT_DTYPES",
    "Adam",
    "AdamW",
    "FiniteGuard",
    "Lion",
    "LossScale",
    "LossScaler",
    "TakenSteps",
    "ZeroOptimizer",
    "dynamic_rows",
]
