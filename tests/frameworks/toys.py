"""A small model and data for the tests of frameworks' doors, and what two trainings of it are compared by."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parents[2]
#: Within which weights equal those of DistributedDataParallel.
BOUND = 1e-5


def build_framework_net() -> nn.Sequential:
    """The same values wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)]
        return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), *blocks, nn.Linear(8, 2))


def regression_rows(count: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 2, generator=generator))


def build_regression_loader(batch: int = 4) -> DataLoader:
    return DataLoader(regression_rows(), batch_size=batch)


def max_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference of any element; the names are the same."""
    assert one.keys() == other.keys() and len(one) > 0
    return max((one[name].float() - other[name].float()).abs().max().item() for name in one)


def distance_from_start(state: Mapping[str, Tensor]) -> float:
    """How far training has come from where it began."""
    return max_difference(state, build_framework_net().state_dict())


def launch_torchrun(program: Path, *arguments: object, ranks: int = 2) -> str:
    """What the ranks print: `program` under torchrun, or by python alone; fails where one does."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    ended = subprocess.run(
        [sys.executable, *torchrun, str(program), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))},
        timeout=400,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    return ended.stdout
