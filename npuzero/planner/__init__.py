"""The planner: whether a model fits, how long a step takes, which plan, what batch."""

from npuzero.planner.hardware.cluster import Cluster, DevicePace, DeviceSpec, LinkSpec
from npuzero.planner.model_work.job import TrainingJob, TrainingRun
from npuzero.planner.model_work.units import ModelWorkload, UnitWork
from npuzero.planner.models import ModelShape, from_config, from_size

__all__ = [
    "Cluster",
    "DevicePace",
    "DeviceSpec",
    "LinkSpec",
    "ModelShape",
    "ModelWorkload",
    "TrainingJob",
    "TrainingRun",
    "UnitWork",
    "from_config",
    "from_size",
]
