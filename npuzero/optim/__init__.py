"""Optimizers: fused rules and torch's own, over sharded models and plain parameters;
loss scaling and the finite guard.
"""

from npuzero.optim.adam import Adam, AdamW, dynamic_rows
from npuzero.optim.lion import Lion
from npuzero.optim.optimizer import ZeroOptimizer
from npuzero.optim.rules.moments import MOMENT_DTYPES
from npuzero.optim.rules.step_counts import TakenSteps
from npuzero.optim.scaling.finite_guard import FiniteGuard
from npuzero.optim.scaling.loss_scale import LossScale
from npuzero.optim.scaling.loss_scaler import LossScaler

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
