"""Training steps on a device under zero0 to zero3: each rank's losses compared with plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from npuzero import api
from npuzero.bench.checks.check_ops import CheckFinding
from npuzero.bench.team import Team, python_worker
from npuzero.comm import process_world
from npuzero.errors import NpuZeroError

#: By name: stage, precision, and the allowed relative difference from the CPU's float32 losses.
RUNS: dict[str, tuple[int, str | None, float]] = {
    **{f"zero{stage}": (stage, None, 1e-3) for stage in range(4)},
    "zero3 in bf16": (3, "bf16", 0.05),
}
STEPS = 5
_FEATURES = 64
_LR, _MAX_NORM = 1e-2, 0.5


def check_training(device: str, ranks: int) -> Iterator[tuple[CheckFinding, dict[str, list[float]]]]:
    """Run each of RUNS on `ranks` processes. Yield its finding, and rank 0's losses on the device and on the CPU."""
    with ExitStack() as stack:
        team = None
        for name in RUNS:
            try:
                command = python_worker(__name__)
                team = team or stack.enter_context(
                    Team("training", command, ranks, options={"device": device}, timeout_s=600.0)
                )
                answers = team.ask("train", name=name)
            except NpuZeroError as error:
                team = None  # an error ends the team
                yield CheckFinding(name, 1, 1, [f"{type(error).__name__}: {error}"]), {}
                continue
            yield compare_training(name, answers), {f"{name}, {where}": losses for where, losses in answers[0].items()}


def compare_training(name: str, answers: list[dict[str, list[float]]]) -> CheckFinding:
    """Compare every step of every rank."""
    finding, tolerance = CheckFinding(f"{name}, losses to {RUNS[name][2]:g} of the CPU's"), RUNS[name][2]
    for rank, answer in enumerate(answers):
        for step, (found, expected) in enumerate(zip(answer["device"], answer["cpu"], strict=True)):
            near = abs(found - expected) <= tolerance * abs(expected)
            finding.count(None if near else f"rank {rank}, step {step}: {found:.6g} instead of {expected:.6g}")
    return finding


def make(rank: int, size: int, options: Mapping[str, Any]) -> TrainingCheckRank:
    """Make this rank's work for worker.py."""
    return TrainingCheckRank(options["device"])


class TrainingCheckRank:
    """Run one rank of ``check_training``."""

    def __init__(self, device: str) -> None:
        self.world = process_world(device, timeout_s=300.0)

    def train(self, name: str) -> dict[str, list[float]]:
        """Return this rank's losses with npuzero on its device and with torch on the CPU."""
        stage, precision, _ = RUNS[name]
        model = api.zero(
            _build_check_model().to(self.world.device),
            stage=stage,
            precision=precision,
            units=nn.Linear,
            world=self.world,
        )
        optimizer = api.AdamW(model.parameters(), lr=_LR)
        losses = []
        for step in range(STEPS):
            loss = _compute_check_loss(model, _make_check_batch(step, self.world.rank).to(self.world.device))
            loss.backward()
            api.clip_grad_norm_(model, _MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return {"device": losses, "cpu": self._expected()}

    def _expected(self) -> list[float]:
        """Return this rank's losses when torch trains on all ranks' batches at once: the loss is their mean."""
        model = _build_check_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
        losses = []
        for step in range(STEPS):
            ranks = [_compute_check_loss(model, _make_check_batch(step, rank)) for rank in range(self.world.size)]
            torch.stack(ranks).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(ranks[self.world.rank].item())
        return losses

    def close(self) -> None:
        """End the world."""
        self.world.drain()


def _build_check_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = (nn.Linear(_FEATURES, 2 * _FEATURES), nn.GELU(), nn.LayerNorm(2 * _FEATURES))
    return nn.Sequential(*sizes, nn.Linear(2 * _FEATURES, _FEATURES), nn.GELU(), nn.Linear(_FEATURES, 10))


def _make_check_batch(step: int, rank: int) -> Tensor:
    return torch.randn(16, _FEATURES, generator=torch.Generator().manual_seed(1000 * step + rank))


def _compute_check_loss(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).float()
    return (found - batch[:, :10]).square().mean()
