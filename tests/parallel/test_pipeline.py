"""A pipeline trains as one process does, whatever the schedule, the plan and the number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import npuzero

from .pipeline_training import Run, assert_like_plain, piped

SGD = Run()
ADAM = Run(kind="adamw")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_stages_train_as_one_process_does(schedule: str, stage: int):
    assert_like_plain(SGD, piped(SGD, 2, stage, schedule=schedule), 1e-6)
