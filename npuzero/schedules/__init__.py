"""Schedules of learning rates and betas with the names of DeepSpeed's and InternEvo's configurations.

Each takes an optimizer and the keywords of its configuration, sets the groups' ``lr`` or ``betas`` at ``step()``, and
saves itself by ``state_dict()``. Read first: ``deepspeed.py``, ``internevo.py``, ``checks.py`` (argument checks).
"""

from npuzero.schedules.deepspeed import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from npuzero.schedules.internevo import Beta2Scheduler, CosineAnnealingWarmupLR, FineTuneCosineAnnealingWarmupLR

__all__ = [
    "Beta2Scheduler",
    "CosineAnnealingWarmupLR",
    "FineTuneCosineAnnealingWarmupLR",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]
