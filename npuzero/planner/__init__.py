"""The planner: whether a model fits on a cluster, how long a step takes, and which plan and batch are fastest.

In: a model (a module, a config.json or a size) and a Cluster, as a TrainingJob. Out: an Advice (advice.py) with the
fastest runs that fit, each an Estimate of memory and time; nothing is executed.

- ``models``: shapes of a model's units. ``model_work``: FLOPs, bytes and activations of units, measured on meta.
- ``hardware``: devices, links and the cost of collectives. ``timing``: time and memory of the engine's step schedule.

Read advice.py, search.py and timing/estimate.py first.
"""

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
