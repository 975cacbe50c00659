"""Stages, dtypes, accumulation and clipping through npuzero.initialize, against plain torch and real DeepSpeed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compat.deepspeed.reference import DenseGPT, GridCase, largest_relative_difference, train_by_engine, train_reference
from npuzero.compat.deepspeed import VERSION

BOUND = 1e-6
QUICK = {
    GridCase(0, "fp32", 1, 0.05),
    GridCase(1, "bf16", 4, 0.05),
    GridCase(2, "fp32", 4, 0.05),
    GridCase(2, "fp16", 1, 0.0),
    GridCase(3, "bf16", 4, 0.05),
    GridCase(3, "fp16", 4, 0.05),
}
GRID = [
    GridCase(stage, dtype, accumulation, clip)
    for stage in range(4)
    for dtype in ("fp32", "bf16", "fp16")
    for accumulation in (1, 4)
    for clip in (0.0, 0.05)
]


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=() if case in QUICK else pytest.mark.slow) for case in GRID]
)
def test_the_numbers_are_plain_torchs(case):
    """After each of three updates; in 16 bits each from the parameters that the one before has left."""
    found, norms = train_by_engine(case)
    expected, plain = train_reference(case, follow=found)
    assert max(map(largest_relative_difference, found, expected)) <= BOUND
    assert norms == pytest.approx(plain, rel=1e-5)


#: DeepSpeed's CPU accelerator has no float16, and its stage 0 no float32 gradients beside bfloat16. In the first update
#: its stages 1 and 2 have our bits; its stage 3 differs from them by about a rounding of the gradients to bfloat16,
#: which is allowed there.
REAL = {
    **{
        GridCase(stage, "fp32", passes, 0.05, make=DenseGPT, wide=True): BOUND
        for stage in range(4)
        for passes in (1, 4)
    },
    **{GridCase(stage, "bf16", passes, 0.05, make=DenseGPT, wide=True): BOUND for stage in (1, 2) for passes in (1, 4)},
    GridCase(3, "bf16", 4, 0.05, make=DenseGPT, wide=True): 2.0**-5,
}


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("case", REAL, ids=str)
def test_the_numbers_are_deepspeeds(case, tmp_path):
    deepspeed = pytest.importorskip("deepspeed", exc_type=ImportError)
    if deepspeed.__version__ != VERSION:
        pytest.skip(f"of DeepSpeed {deepspeed.__version__}, not {VERSION}")
    masters, _ = train_by_deepspeed(case, tmp_path)
    assert largest_relative_difference(train_by_engine(case)[0][-1], masters) <= REAL[case]


def train_by_deepspeed(case: GridCase, folder: Path) -> tuple[dict[str, torch.Tensor], list[object]]:
    """The masters in the end and the norms on the way, by DeepSpeed in processes of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    out, script = folder / "masters.pt", Path(__file__).with_name("deepspeed_ranks.py")
    command = [sys.executable, str(script), *map(str, (case.stage, case.dtype, case.accumulation, case.clip, out))]
    common = {"WORLD_SIZE": case.world, "LOCAL_SIZE": case.world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path), **common}
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ
            | {key: str(value) for key, value in {**variables, "RANK": rank, "LOCAL_RANK": rank}.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(case.world)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * case.world, outputs[0][-3000:]
    return torch.load(out)
