"""Schedules of the learning rate, and of betas, that DeepSpeed's and InternEvo's configurations name."""

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
