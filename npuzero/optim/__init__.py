"""Optimizers for sharded models and plain parameters, loss scaling, and the finite guard.

In: parameters of models made by ``npuzero.zero()``, or plain ones. Out: updated masters and parameters, optimizer
states in torch's shape. ``optimizer`` has torch's interface, and a worker (``workers``) does the updates: npuzero's
fused rules (``adam``, ``lion``, ``rules``) or a torch optimizer over shards.

Read ``optimizer``, ``adam`` and ``workers/sharded_parameters`` first.
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
