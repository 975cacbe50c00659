"""The public functions of npuzero, assembled from all other packages. No other package imports every part.

In: a model, a plan, a mesh. Out: the sharded model, its optimizers, reports and exports. Read ``model`` (``init``,
``zero``, ``predict``), ``gradients`` (clipping and norms) and ``pipeline`` first.
"""

from npuzero.api.gradients import clip_grad_norm_, clip_grad_value_, full_gradient, grad_norms, skip_nonfinite_
from npuzero.api.model import apply_pending, gathered, init, no_sync, predict, register_forward_method, report, zero
from npuzero.api.pipeline import pipeline
from npuzero.checkpoint.weight_files.export import export
from npuzero.optim import Adam, AdamW, FiniteGuard, Lion, LossScaler, ZeroOptimizer
from npuzero.shard.offload_model import offloaded
from npuzero.shard.state_dict import full_state_dict, load_full_state_dict

__all__ = [
    "Adam",
    "AdamW",
    "FiniteGuard",
    "Lion",
    "LossScaler",
    "ZeroOptimizer",
    "apply_pending",
    "clip_grad_norm_",
    "clip_grad_value_",
    "export",
    "full_gradient",
    "full_state_dict",
    "gathered",
    "grad_norms",
    "init",
    "load_full_state_dict",
    "no_sync",
    "offloaded",
    "pipeline",
    "predict",
    "register_forward_method",
    "report",
    "skip_nonfinite_",
    "zero",
]
