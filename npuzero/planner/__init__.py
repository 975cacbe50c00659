"""The planner: whether a model fits, how long a step takes, which plan, what batch."""

from npuzero.planner.cluster import Cluster, DevicePace, DeviceSpec, LinkSpec
from npuzero.planner.models import ModelShape, from_config, from_size
from npuzero.planner.run import TrainingJob, TrainingRun
from npuzero.planner.workload import ModelWorkload, UnitWork

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
