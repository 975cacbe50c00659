"""Train a small Llama by Lightning, its training state sharded over the ranks.

    torchrun --standalone --nproc-per-node 2 examples/lightning/train.py --out runs/lightning
    python examples/lightning/train.py --ranks 2 --out runs/lightning --epochs 4 --resume

The strategy is what differs from a script of Lightning's. What is left in ``--out`` are checkpoints that ``--resume``
goes on from, on any number of ranks, and weights that ``from_pretrained`` loads.
"""

import argparse
import os

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import npuzero.lightning  # registers the strategy

STRATEGY = "npuzero"  # it was: "ddp"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


class Llama(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, use_cache=False, **SIZES))

    def training_step(self, tokens, _):
        return self.model(input_ids=tokens, labels=tokens).loss

    def validation_step(self, tokens, _):
        self.log("held_out", self.model(input_ids=tokens, labels=tokens).loss, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)]


parser = argparse.ArgumentParser(description="Train a Llama by Lightning.")
parser.add_argument("--out", default="runs/lightning", help="folder for checkpoints and weights")
parser.add_argument("--epochs", type=int, default=2, help="in all")
parser.add_argument("--precision", default="32-true", help="Lightning's precision, such as bf16-mixed")
parser.add_argument("--ranks", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), help="on this host")
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
options = parser.parse_args()

torch.manual_seed(0)
rows = torch.randint(64, (64, 16))
module = Llama()
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy=STRATEGY,
    devices=options.ranks,
    max_epochs=options.epochs,
    precision=options.precision,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=[
        ModelCheckpoint(options.out, monitor="held_out", save_last=True),
        EarlyStopping("held_out", patience=3),
    ],
    logger=False,
    enable_progress_bar=False,
)
last = f"{options.out}/last.ckpt" if options.resume else None
trainer.fit(module, DataLoader(rows, batch_size=4), DataLoader(rows[:8], batch_size=4), ckpt_path=last)
print("held-out loss", trainer.callback_metrics["held_out"].item())
if trainer.is_global_zero:
    module.model.config.save_pretrained(options.out)
if STRATEGY == "npuzero":
    npuzero.export(module, options.out, rename=lambda name: name.removeprefix("model."))
elif trainer.is_global_zero:
    module.model.save_pretrained(options.out)
