"""Train a GPT on the source of a Python module, as scripts in the manner of nanoGPT do: one process, or torchrun."""

import argparse
import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from model import GPT
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("runs/nanogpt"))
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--eval-every", type=int, default=10)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()
checkpoint = options.out / "checkpoint.pt"
batch_size, length, accumulate, clip, lr = 4, 64, 4, 1.0, 1e-3

ddp = "RANK" in os.environ
if ddp:
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = (
    torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
)
accumulate //= size  # the same batch a step on any number of ranks
autocast = torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()

text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
train_text, held_out_text = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def get_batch(source, number):
    """Batch `number` of a source: other places for each number, the same on every run."""
    places = torch.randint(len(source) - length, (batch_size,), generator=torch.Generator().manual_seed(number))
    windows = torch.stack([source[place : place + length + 1] for place in places.tolist()]).to(device)
    return windows[:, :-1], windows[:, 1:]


torch.manual_seed(1337)
model = GPT(length).to(device)
matrices = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler(device.type, enabled=False)  # for float16
first = 0
if ddp:
    model = DDP(model)
if options.resume:
    saved = torch.load(checkpoint, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]


@torch.no_grad()
def evaluate():
    """The mean loss over held-out batches."""
    return sum(model(*get_batch(held_out_text, number)).item() for number in range(4)) / 4


options.out.mkdir(parents=True, exist_ok=True)
for step in range(first, options.steps):
    if step % options.eval_every == 0 and step > first:
        held_out = evaluate()
        if rank == 0:
            print(f"step {step}: held-out loss {held_out:.6f}")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, checkpoint)
    for group in optimizer.param_groups:
        group["lr"] = lr * min(1.0, (step + 1) / 10)
    total = torch.zeros((), device=device)
    for micro_step in range(accumulate):
        if ddp:
            model.require_backward_grad_sync = micro_step == accumulate - 1
        with autocast:
            loss = model(*get_batch(train_text, (step * accumulate + micro_step) * size + rank)) / accumulate
        scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if ddp:
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
    if rank == 0:
        print(f"step {step}: loss {total.item() / size:.6f}, norm {norm.item():.6f}")
if ddp:
    dist.destroy_process_group()
