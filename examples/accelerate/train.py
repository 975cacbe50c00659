"""Train a small Llama by accelerate's own loop, its training state sharded over the ranks.

    torchrun --standalone --nproc-per-node 2 examples/accelerate/train.py
    accelerate launch --multi_gpu --num_processes 2 examples/accelerate/train.py
    python examples/accelerate/train.py --resume --epochs 4

The line with ``ZeroAccelerator`` is what differs from a script of accelerate's. What is left in ``--out`` are weights
that ``from_pretrained`` loads, and the state that ``--resume`` goes on from, on any number of ranks.
"""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from npuzero.accelerate import ZeroAccelerator as Accelerator  # it was: from accelerate import Accelerator

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
STEPS = 40  # of the schedule

parser = argparse.ArgumentParser(description="Train a Llama by accelerate.")
parser.add_argument("--out", default="runs/accelerate", help="folder for weights and state")
parser.add_argument("--epochs", type=int, default=2, help="of this run")
parser.add_argument("--precision", default="no", help="accelerate's mixed_precision: no, bf16 or fp16")
parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
options = parser.parse_args()

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=options.precision)
torch.manual_seed(0)
rows = torch.randint(64, (64, 16))
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, use_cache=False, **SIZES))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
loader = DataLoader(rows, batch_size=4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
if options.resume:
    accelerator.load_state(f"{options.out}/state")
for _ in range(options.epochs):
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean'):.3f}")
accelerator.save_state(f"{options.out}/state")
accelerator.save_model(model, options.out)
if accelerator.is_main_process:
    accelerator.unwrap_model(model).config.save_pretrained(options.out)
