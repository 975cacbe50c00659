"""The planner: whether a model fits, how long a step takes, which plan, what batch."""

from npuzero.planner.cluster import Cluster, Device, Link, Pace
from npuzero.planner.models import ModelShape, from_config, from_size
from npuzero.planner.run import Job, Run
from npuzero.planner.workload import UnitWork, Workload

__all__ = [
    "Cluster",
    "Device",
    "Job",
    "Link",
    "ModelShape",
    "Pace",
    "Run",
    "UnitWork",
    "Workload",
    "from_config",
    "from_size",
]
