"""Train on while nodes come and go: the same batches in the same order, whatever ranks there are.

    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 9 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        examples/elastic/train.py --out SHARED
    python examples/elastic/train.py                            # one process, no launcher

The same command on each node; one that was lost comes back by the same command again. Nothing is downloaded: a small
network learns a function of random points.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

import npuzero

WIDTH = 64


def points(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random points f32[count, 8] and what the network learns to say of them, f32[count, 1]."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 8, generator=draw)
    return inputs, (inputs[:, :4] * inputs[:, 4:]).sum(1, keepdim=True).tanh()


@record
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train on while nodes come and go.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="points in a step, of all ranks together")
    parser.add_argument("--micro", type=int, default=16, help="points that a rank computes at a time, at most")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints: as many are lost at most")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps, to have time to end a node")
    parser.add_argument("--out", type=Path, default=Path("runs/elastic"), help="folder that all nodes share")
    options = parser.parse_args(arguments)

    world = npuzero.init()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)]
    model = npuzero.zero(nn.Sequential(nn.Linear(8, WIDTH), *layers, nn.Linear(WIDTH, 1)).to(world.device), stage=2)
    optimizer = npuzero.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.steps)
    inputs, targets = points(4096)
    batch = npuzero.GlobalBatch(len(inputs), options.batch, micro=options.micro)

    options.out.mkdir(parents=True, exist_ok=True)
    kept = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with npuzero.checkpoint.Checkpointer(
        options.out / "checkpoints", every=options.every, keep_last=3, **kept
    ) as saves:
        first = saves.resume()
        for step in range(first, options.steps):
            loss = torch.zeros((), device=world.device)
            for rows in batch.micro_batches(step):
                x, y = inputs[rows].to(world.device), targets[rows].to(world.device)
                part = nn.functional.mse_loss(model(x), y) / batch.accumulate
                part.backward()
                loss += part.detach()
            npuzero.clip_grad_norm_(model, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            mean = world.mean(loss).item()
            if world.rank == 0:
                line = {"step": step, "loss": mean, "ranks": world.size, "first": first}
                with (options.out / "steps.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
            saves.after(step + 1)
            time.sleep(options.pause)
    if world.rank == 0:
        print(f"{options.steps} steps, the last {options.steps - first} on {world.size} ranks")


if __name__ == "__main__":
    main()
