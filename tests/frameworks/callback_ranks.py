"""Ranks that train with Lightning's callbacks that read, write or freeze parameters: FOLDER CASE...

For each case FOLDER gets CASE.pt: weights and metrics of DistributedDataParallel and of a sharded run, and of
each of them resumed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy

from frameworks.lightning_ranks import RegressionModule, lightning_weights
from frameworks.toys import build_regression_loader
from npuzero import adopt
from npuzero.lightning import ZeroStrategy

EPOCHS = 3


class Headed(RegressionModule):
    """Its optimizer has what trains when it is made, as Lightning's page of BaseFinetuning has it."""

    def on_after_backward(self) -> None:
        """Average what DistributedDataParallel leaves out: what was frozen when it was made, and has thawed since."""
        for parameter in self.parameters() if not adopt.is_sharded(self) else ():
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=self.lr)


class Thaw(BaseFinetuning):
    """Train the last layers alone, and all of them from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[:4])

    def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[:4], optimizer)


class Started(Callback):
    """Keep the weights that callbacks find when training starts."""

    def on_fit_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.begun = lightning_weights(module)


@dataclass
class Case:
    """What is trained, and how."""

    callback: Callable[[], Callback]
    strategy: Mapping[str, Any] = field(default_factory=dict)
    module: type[RegressionModule] = RegressionModule


CASES = {
    "thawed": Case(Thaw, module=Headed),
    "averaged": Case(lambda: EMAWeightAveraging(decay=0.8)),
    "averaged, files": Case(lambda: EMAWeightAveraging(decay=0.8), {"zero": {"stage": 2}, "full_checkpoints": True}),
    "swa": Case(lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2)),
    "thawed, files": Case(Thaw, {"zero": {"stage": 1}, "full_checkpoints": True}, Headed),
}


def trainer_of(case: Case, plain: bool, callbacks: list[Callback], folder: Path) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo") if plain else ZeroStrategy(**case.strategy),
        max_epochs=EPOCHS,
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def run(case: Case, plain: bool, folder: Path, checkpoint: str | None = None) -> dict[str, Any]:
    started, module = Started(), case.module()
    callbacks = [case.callback(), started, ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")]
    trainer = trainer_of(case, plain, callbacks, folder)
    trainer.fit(module, build_regression_loader(), build_regression_loader(), ckpt_path=checkpoint)
    found = {"weights": lightning_weights(module), "begun": started.begun}
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    other, last = trainer_of(case, plain, [], folder), str(folder / f"epoch={EPOCHS - 1}.ckpt")
    validated = [
        trainer.validate(module, build_regression_loader(), verbose=False),
        other.validate(case.module(), build_regression_loader(), ckpt_path=last, verbose=False),
    ]
    return {**found, "rates": rates, "validated": [metrics[0]["held_out"] for metrics in validated]}


def main() -> None:
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        case = CASES[name]
        found: dict[str, Any] = {}
        for kind, origin in (("ddp", ""), ("zero", ""), ("ddp resumed", "ddp"), ("resumed", "zero")):
            checkpoint = str(folder / f"{name}.{origin}" / "epoch=1.ckpt") if origin else None
            found[kind] = run(case, kind.startswith("ddp"), folder / f"{name}.{kind}", checkpoint)
        if torch.distributed.get_rank() == 0:
            torch.save(found, folder / f"{name}.pt")


if __name__ == "__main__":
    main()
