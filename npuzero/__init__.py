"""npuzero: ZeRO training for Ascend NPUs, CUDA and CPUs.

    import npuzero
    npuzero.init()
    model = npuzero.zero(model, stage=3)
    optimizer = npuzero.AdamW(model.parameters(), lr=3e-4)

Importing touches no device and starts no compiler.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from npuzero import checkpoint as checkpoint
from npuzero import schedules as schedules
from npuzero.api import (
    Adam,
    AdamW,
    FiniteGuard,
    Lion,
    LossScaler,
    ZeroOptimizer,
    apply_pending,
    clip_grad_norm_,
    clip_grad_value_,
    export,
    full_gradient,
    full_state_dict,
    gathered,
    grad_norms,
    init,
    load_full_state_dict,
    no_sync,
    offloaded,
    pipeline,
    predict,
    register_forward_method,
    report,
    skip_nonfinite_,
    zero,
)
from npuzero.checkpoint.weight_files.read_weights import Weights
from npuzero.comm import Mesh
from npuzero.config import Settings
from npuzero.errors import (
    BenchmarkError,
    CheckpointError,
    CollectiveError,
    ConfigError,
    ContractError,
    CoreMissing,
    KernelUnavailable,
    NonFiniteError,
    NpuZeroError,
    OutOfSpace,
    PackageMissing,
    StateError,
    StorageError,
)
from npuzero.info import info
from npuzero.parallel.batches import GlobalBatch
from npuzero.parallel.mesh import mesh
from npuzero.plan import OFFLOADED, PRECISIONS, PRESETS, THINNED, Memory, MeshShape, Placement, Plan, Precision, Report
from npuzero.shard.layout.tiled_linear import tiled

if TYPE_CHECKING:
    from npuzero.compat.deepspeed import initialize
    from npuzero.planner.advice import advise

__version__ = "0.1.0"


__all__ = [
    "OFFLOADED",
    "PRECISIONS",
    "PRESETS",
    "THINNED",
    "Adam",
    "AdamW",
    "BenchmarkError",
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "ContractError",
    "CoreMissing",
    "FiniteGuard",
    "GlobalBatch",
    "KernelUnavailable",
    "Lion",
    "LossScaler",
    "Memory",
    "Mesh",
    "MeshShape",
    "NonFiniteError",
    "NpuZeroError",
    "OutOfSpace",
    "PackageMissing",
    "Placement",
    "Plan",
    "Precision",
    "Report",
    "Settings",
    "StateError",
    "StorageError",
    "Weights",
    "ZeroOptimizer",
    "advise",
    "apply_pending",
    "clip_grad_norm_",
    "clip_grad_value_",
    "export",
    "full_gradient",
    "full_state_dict",
    "gathered",
    "grad_norms",
    "info",
    "init",
    "initialize",
    "load_full_state_dict",
    "mesh",
    "no_sync",
    "offloaded",
    "pipeline",
    "predict",
    "register_forward_method",
    "report",
    "skip_nonfinite_",
    "tiled",
    "zero",
]


#: Imported on first access: programs that only train do not need them.
_LATER = {"advise": "npuzero.planner.advice", "initialize": "npuzero.compat.deepspeed"}

if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        """Import and return an attribute that needs parts of the package that most programs do not use."""
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_LATER[name]), name)
        return value
