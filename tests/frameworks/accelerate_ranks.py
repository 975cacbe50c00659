"""Ranks that train by accelerate, sharded and by DistributedDataParallel: FOLDER CELL...

A cell is STAGE-PRECISION-ACCUMULATION. For each, FOLDER gets CELL.pt: both weights, losses of evaluation, last rates.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

import npuzero
from frameworks.toys import build_framework_net, build_regression_loader
from npuzero import adopt
from npuzero.accelerate import ZeroAccelerator

mse = nn.functional.mse_loss


class ReferenceAccelerator(Accelerator):
    """accelerate's, which on CPU ranks computes in float32 where it is asked for float16: here as on a GPU."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.mixed_precision == "fp16":
            self.native_amp = True
            self.scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)


def build_fresh_accelerator(kind: type[Accelerator], **options: Any) -> Accelerator:
    AcceleratorState._reset_state(False)
    GradientState._reset_state()
    return kind(cpu=True, **options)


class AccelerateTraining:
    """What a script of accelerate's has: a model, its optimizer, a scheduler and loaders."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        model = build_framework_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        self.model, self.optimizer, self.scheduler, self.loader = accelerator.prepare(
            model, optimizer, scheduler, build_regression_loader()
        )

    def epoch(self) -> None:
        self.model.train()
        for inputs, targets in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(mse(self.model(inputs), targets))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def evaluate(self) -> float:
        found: list[Tensor] = []
        self.model.eval()  # by the statistics of BatchNorm, which are rank 0's
        with torch.no_grad():
            for inputs, targets in self.loader:
                found.append(self.accelerator.gather_for_metrics(mse(self.model(inputs), targets)[None]))
        return torch.cat(found).mean().item()

    def result(self) -> dict[str, Any]:
        state = self.accelerator.get_state_dict(self.model)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        found = {"weights": state, "rates": rates, "last": self.scheduler.get_last_lr()}
        if adopt.is_sharded(self.model):
            found["sent"] = dict(npuzero.report(self.model).bytes_sent)
        return {**found, "loss": self.evaluate()}


def train_two_epochs(accelerator: Accelerator) -> dict[str, Any]:
    training = AccelerateTraining(accelerator)
    training.epoch()
    training.epoch()
    return training.result()


def train_resumed_epoch(folder: Path, **options: Any) -> dict[str, Any]:
    """The second epoch by another accelerator, from the state that the first left; each is saved twice."""
    first = AccelerateTraining(build_fresh_accelerator(ZeroAccelerator, **options))
    first.accelerator.save_state(str(folder))
    first.epoch()
    first.accelerator.save_state(str(folder))
    saved = first.accelerator.get_state_dict(first.model)
    second = AccelerateTraining(build_fresh_accelerator(ZeroAccelerator, **options))
    second.accelerator.load_state(str(folder))
    second.epoch()
    return {**second.result(), "saved": saved}


def main() -> None:
    folder = Path(sys.argv[1])
    for cell in sys.argv[2:]:
        stage, precision, accumulation = cell.split("-")
        options = {"mixed_precision": precision, "gradient_accumulation_steps": int(accumulation)}
        zero = {"stage": int(stage)}
        found = {
            "ddp": train_two_epochs(build_fresh_accelerator(ReferenceAccelerator, **options)),
            "zero": train_two_epochs(build_fresh_accelerator(ZeroAccelerator, zero=zero, **options)),
            "resumed": train_resumed_epoch(folder / f"{cell}.state", zero=zero, **options),
        }
        accelerator = Accelerator(cpu=True, **options)
        if accelerator.is_main_process:
            torch.save(found, folder / f"{cell}.pt")


if __name__ == "__main__":
    main()
