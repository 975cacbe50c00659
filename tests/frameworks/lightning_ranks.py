"""Ranks that train by Lightning, sharded and by DistributedDataParallel: FOLDER CASE...

For each case FOLDER gets CASE.pt: both weights and metrics, and what a second trainer got by resuming.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

import npuzero
from frameworks.toys import build_framework_net, build_regression_loader
from npuzero import adopt
from npuzero.lightning import ZeroStrategy

mse = nn.functional.mse_loss


class RegressionModule(lightning.LightningModule):
    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.net, self.lr = build_framework_net(), lr

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = mse(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("held_out", mse(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class ScaledRegression(RegressionModule):
    """Its step uses a parameter of its own, and its files have not all names."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.strict_loading = False

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.scale * mse(self(batch[0]), batch[1])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].pop("net.1.num_batches_tracked", None)


class ManualRegression(RegressionModule):
    """Two optimizers of halves of the model, stepped by hand."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], _: int) -> None:
        optimizers = self.optimizers()
        self.manual_backward(mse(self.net(batch[0]), batch[1]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.net[:2].parameters(), lr=0.1, momentum=0.9)
        second = torch.optim.AdamW(self.net[2:].parameters(), lr=self.lr)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (first, second)]


@dataclass
class LightningCase:
    """What is trained, and how."""

    trainer: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    module: type[RegressionModule] = RegressionModule
    half: bool = False
    lr: float = 1e-2


AUTOMATIC = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
CASES = {
    "folders": LightningCase(AUTOMATIC, {"zero": {"stage": 3}}),
    "files": LightningCase(AUTOMATIC, {"zero": {"stage": 1}, "full_checkpoints": True}),
    "value": LightningCase({"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}, {"zero": {"stage": 2}}),
    # In 16 bits a last place now and then rounds a product to its neighbour, and Adam makes steps of lr of it.
    "bf16": LightningCase({**AUTOMATIC, "precision": "bf16-mixed"}, lr=1e-3),
    "fp16": LightningCase(AUTOMATIC, half=True, lr=1e-3),
    "manual": LightningCase(module=ManualRegression),
    "scaled": LightningCase({"gradient_clip_val": 0.5}, {"full_checkpoints": True}, module=ScaledRegression),
}


def build_lightning_trainer(
    strategy: Any, case: LightningCase, folder: Path, epochs: int = 5, **more: Any
) -> lightning.Trainer:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if case.half else []
    options = {"devices": 2, "logger": False, "enable_progress_bar": False, "enable_model_summary": False, **more}
    return lightning.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=epochs,
        plugins=plugins,
        callbacks=[
            ModelCheckpoint(folder, monitor="held_out", save_last=True, save_top_k=-1, filename="{epoch}"),
            EarlyStopping("held_out", min_delta=10.0, patience=2),
        ],
        **{**case.trainer, **options},
    )


def lightning_weights(module: nn.Module) -> dict[str, Tensor]:
    state = npuzero.full_state_dict(module) if adopt.is_sharded(module) else module.state_dict()
    return {name.removeprefix("net."): value.clone() for name, value in state.items() if "tracked" not in name}


def fit_and_validate(
    trainer: lightning.Trainer, module: RegressionModule, checkpoint: str | None = None
) -> dict[str, Any]:
    trainer.fit(module, build_regression_loader(), build_regression_loader(), ckpt_path=checkpoint)
    told = {name: value.item() for name, value in trainer.callback_metrics.items()}
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    found = {"weights": lightning_weights(module), "told": told, "rates": rates, "epochs": trainer.current_epoch}
    return {**found, "validated": trainer.validate(module, build_regression_loader(), verbose=False)[0]["held_out"]}


def main() -> None:
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        case = CASES[name]

        def sharded(place: str, case: LightningCase = case, name: str = name) -> lightning.Trainer:
            return build_lightning_trainer(ZeroStrategy(**case.strategy), case, folder / f"{name}.{place}")

        trainers = {
            "ddp": build_lightning_trainer(DDPStrategy(process_group_backend="gloo"), case, folder / f"{name}.ddp"),
            "zero": sharded("zero"),
        }
        found = {kind: fit_and_validate(trainer, case.module(case.lr)) for kind, trainer in trainers.items()}
        for kind, origin in (("resumed", "zero"), ("taken over", "ddp")):
            found[kind] = fit_and_validate(
                sharded(kind), case.module(case.lr), str(folder / f"{name}.{origin}" / "epoch=0.ckpt")
            )
        if trainers["zero"].is_global_zero:
            torch.save(found, folder / f"{name}.pt")


if __name__ == "__main__":
    main()
