"""Train a small Llama by transformers' Trainer, its training state sharded over the ranks.

    torchrun --standalone --nproc-per-node 2 examples/trainer/train.py --out runs/trainer
    python examples/trainer/train.py --out runs/trainer --steps 24 --resume

The line with ``ZeroTrainer`` is what differs from a script of the Trainer's. What is left in ``--out`` is what
``from_pretrained`` loads, and checkpoints that ``--resume`` goes on from, on any number of ranks.
"""

import argparse

import torch
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, TrainingArguments

from npuzero.transformers import ZeroTrainer as Trainer  # it was: from transformers import Trainer

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}

parser = argparse.ArgumentParser(description="Train a Llama by transformers' Trainer.")
parser.add_argument("--out", default="runs/trainer", help="folder for checkpoints and weights")
parser.add_argument("--steps", type=int, default=12, help="in all")
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
options = parser.parse_args()

arguments = TrainingArguments(
    options.out,
    use_cpu=True,
    ddp_backend="gloo" if torch.distributed.is_torchelastic_launched() else None,
    max_steps=options.steps,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    max_grad_norm=1.0,
    bf16=options.bf16,
    warmup_steps=2,
    eval_strategy="steps",
    save_strategy="steps",
    eval_steps=4,
    save_steps=4,
    save_total_limit=2,
    load_best_model_at_end=True,
    report_to=[],
    disable_tqdm=True,
)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, use_cache=False, **SIZES))
rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (64, 16))]
stop = EarlyStoppingCallback(early_stopping_patience=3)
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=[stop])
trainer.train(resume_from_checkpoint=options.resume)
print("held-out loss", trainer.evaluate()["eval_loss"])
trainer.save_model()
