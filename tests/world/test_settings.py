"""No setting changes a bit, for any grouping into flats, scales, exponents or random streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import npuzero
from npuzero import Plan, Precision, Settings
from world.toy import ToyGPT
from world.train import Session, assert_same_bits, run_cut

PRECISIONS = {
    "bf16": Precision(torch.bfloat16),
    "wires in fp32": Precision(torch.bfloat16, wires=torch.float32),
    "8-bit moments": Precision(torch.bfloat16, masters="split", moments="int8"),
    "stochastic": Precision(torch.bfloat16, masters="none", moments="bf16"),
    "int8": Precision(torch.bfloat16, gathers="int8", wires="int8", feedback="all"),
    "int4": Precision(torch.bfloat16, wires={"node": "int4"}, feedback="node"),
    "levels": Precision(torch.float32, gathers="int8", wires={"node": "int4", "local": "int8"}, sums="wire"),
    "int4, stochastic": Precision(torch.bfloat16, gathers="int8", wires="int4", masters="none", moments="int8"),
}
SETTINGS = [
    {"bucket_bytes": 1},
    {"bucket_bytes": 300, "prefetch": 3},
    {"bucket_bytes": 2048, "overlap": False},
    {"overlap": "gradients", "chunk_bytes": 100},
    {"prefetch": 0, "chunk_bytes": 5000, "bucket_bytes": 700},
]
#: Settings for states off the device.
FAR_SETTINGS = [
    {"update_on": "host", "bucket_bytes": 300},
    {"update_on": "host", "chunk_bytes": 1000, "overlap": False},
    {"chunk_bytes": 3000, "verify": False, "io_threads": 1, "prefetch": 2},
]
FAR_ROWS = [
    *((preset, offload) for preset in ("zero1", "zero3", "hpz") for offload in ("host", "nvme")),
    *((preset, offload) for preset in ("zero3", "hpz") for offload in ("host+parameters", "nvme+parameters")),
]


class SkippingGPT(ToyGPT):
    """Leave its last block out of some forwards."""

    skips = False

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks[: -1 if self.skips else None]:
            x = block(x)
        return x


def train_skipping_model(session: Session) -> None:
    """Two groups, micro-batches of which some leave a block out, a clipped step."""
    odd, even = list(session.model.parameters())[::2], list(session.model.parameters())[1::2]
    groups = [{"params": odd}, {"params": even, "weight_decay": 0.0, "betas": (0.8, 0.99)}]
    optimizer = session.optimizer(torch.optim.AdamW, groups, lr=1e-2, amsgrad=True)
    for step in range(3):
        for micro_batch in range(2):
            session.model.skips = step == 2 or (step == 1 and micro_batch == 0)
            (session.loss(step, micro_batch) / 2).backward()
        if step == 1:
            session.clip(0.5)
        optimizer.step()
        optimizer.zero_grad()


def assert_no_bit_moves(
    preset: str,
    precision: Precision,
    grid: list[dict[str, Any]],
    offload: str | None = None,
    common: dict[str, Any] | None = None,
) -> None:
    plan = Plan.preset(preset, precision=precision, local_size=2)
    if offload:
        plan = plan.offloaded(offload)
    default, *others = (
        run_cut(train_skipping_model, 4, SkippingGPT, plan=plan, settings=Settings(**settings, **(common or {})))[0]
        for settings in ({}, *grid)
    )
    for other in others:
        assert_same_bits(other, default)


@pytest.mark.parametrize("preset", npuzero.THINNED)
def test_a_setting_moves_no_bit_of_thin_presets(preset: str) -> None:
    assert_no_bit_moves(preset, PRECISIONS["bf16"], SETTINGS[:3])


@pytest.mark.slow
@pytest.mark.parametrize("preset", npuzero.PRESETS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_setting_moves_no_bit(preset: str, precision: str) -> None:
    assert_no_bit_moves(preset, PRECISIONS[precision], SETTINGS)


@pytest.mark.parametrize("precision", ["8-bit moments", "int4, stochastic"])
def test_buckets_move_no_bit_of_few_bits(precision: str) -> None:
    assert_no_bit_moves("zero1.5", PRECISIONS[precision], SETTINGS[1:3])


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "offload"), FAR_ROWS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_setting_moves_no_bit_off_the_device(preset: str, precision: str, offload: str, tmp_path: Path) -> None:
    assert_no_bit_moves(preset, PRECISIONS[precision], FAR_SETTINGS, offload, {"nvme_paths": (str(tmp_path),)})
