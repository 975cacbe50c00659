"""Train a byte-level GPT on the Python standard library, under any preset, on any number of ranks.

    torchrun --standalone --nproc-per-node 2 examples/gpt/train.py --preset zero3 --out runs/gpt
    python examples/gpt/train.py --steps 50                     # one process, no launcher

The loop is torch's own; npuzero's are ``init``, ``zero``, ``AdamW`` and ``clip_grad_norm_``. It leaves in ``--out``:

    result.json          losses by step, tokens/s, bytes held and sent (measured and predicted), held-out losses
    model.safetensors    whole weights, which load into the plain model of model.py
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from data import Corpus, held_out_batches, train_batch
from export import load_weights, save_weights
from model import GPT, GPTConfig, generate, next_byte_loss
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.optim.lr_scheduler import LambdaLR

import npuzero
from npuzero.comm import World

PROMPT = b"def "
FLUSH_EVERY = 10  # steps for which losses stay on the device; then the line on a terminal is brought up to date
LINE_EVERY = 50  # steps between lines where the output is no terminal
HELD_OUT_BATCHES = 32
WEIGHT_DECAY = 0.1


def option(default: Any, help: str, kind: type | None = None) -> Any:
    """A field of Options that is a command line option as well."""
    return field(default=default, metadata={"help": help, "type": kind or type(default)})


@dataclass(frozen=True)
class Options:
    """The command line."""

    preset: str = option("zero3", f"where the training state rests: {', '.join(npuzero.PRESETS)}")
    local_size: int | None = option(None, "ranks in a group for presets with two levels; None: those of a host", int)
    precision: str = option("fp32", "of parameters and wires: fp32 or bf16 (masters and moments are fp32)")
    steps: int = option(360, "optimizer steps")
    batch: int = option(4, "sequences per rank and step")
    seq: int = option(128, "bytes per sequence")
    dim: int = option(96, "model width")
    layers: int = option(6, "blocks")
    heads: int = option(3, "attention heads")
    lr: float = option(4e-3, "highest learning rate")
    warmup: int = option(20, "steps until it is reached; a cosine brings it down to a twentieth")
    clip: float = option(1.0, "largest gradient norm")
    seed: int = option(0, "of weights, batches and sampling")
    sample: int = option(300, "bytes to continue the prompt by at the end; 0: none")
    device: str = option("auto", "auto, cpu, cuda or npu")
    out: str = option("runs/gpt", "folder for the result")

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(dim=self.dim, layers=self.layers, heads=self.heads)

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None) -> Options:
        parser = argparse.ArgumentParser(
            description="Train a byte-level GPT under ZeRO.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        for item in fields(cls):
            parser.add_argument(f"--{item.name.replace('_', '-')}", default=item.default, **item.metadata)
        return cls(**vars(parser.parse_args(arguments)))


class Progress:
    """Mean losses over all ranks, the speed, and the line that shows them (by rank 0; in place on a terminal)."""

    def __init__(self, model: nn.Module, options: Options, world: World) -> None:
        self.losses: list[float] = []
        self.tokens_per_s = 0.0  # of all ranks together, without the first step
        self._model, self._options, self._world = model, options, world
        self._pending: list[Tensor] = []
        self._started_s = 0.0

    def add(self, loss: Tensor) -> None:
        """Take note of this rank's loss; collective, and in step with the device, every few steps only."""
        self._pending.append(loss.detach())
        step = len(self.losses) + len(self._pending)
        if step == 1 or step % FLUSH_EVERY == 0 or step == self._options.steps:
            self._flush()

    def _flush(self) -> None:
        by_rank = self._world.exchange(torch.stack(self._pending).tolist())
        self.losses += [sum(losses) / len(losses) for losses in zip(*by_rank, strict=True)]
        self._pending.clear()
        if len(self.losses) == 1:
            self._started_s = time.perf_counter()
            return
        tokens = (len(self.losses) - 1) * self._world.size * self._options.batch * self._options.seq
        self.tokens_per_s = tokens / (time.perf_counter() - self._started_s)
        if self._world.rank == 0:
            self._show(len(self.losses), self._options.steps)

    def _show(self, step: int, steps: int) -> None:
        terminal, last = sys.stdout.isatty(), step == steps
        if not (terminal or last or step % LINE_EVERY == 0):
            return
        report = npuzero.report(self._model)
        held_mb, sent_mb = (sum(part.values()) / 1e6 for part in (report.bytes_held, report.bytes_sent))
        line = (
            f"{self._options.preset}  step {step:{len(str(steps))}}/{steps}  loss {self.losses[-1]:.3f}  "
            f"{self.tokens_per_s:6,.0f} tokens/s  {held_mb:.1f} MB held per rank  {sent_mb:.1f} MB sent per step"
        )
        print(f"\r\x1b[K{line}" if terminal else line, end="" if terminal and not last else "\n", flush=True)


def build_optimizer(model: nn.Module, options: Options) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """AdamW with weight decay on matrices only, and a warm-up followed by a cosine."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = npuzero.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))

    def factor(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / options.steps))
        return min(1.0, (step + 1) / options.warmup) * (0.05 + 0.95 * cosine)

    return optimizer, LambdaLR(optimizer, factor)


def train(model: nn.Module, text: Tensor, options: Options, world: World) -> Progress:
    """The loop. ``text`` u8[n] is the same on all ranks."""
    optimizer, scheduler = build_optimizer(model, options)
    progress = Progress(model, options, world)
    for step in range(options.steps):
        window = train_batch(
            text,
            seed=options.seed,
            step=step,
            rank=world.rank,
            ranks=world.size,
            batch=options.batch,
            length=options.seq,
        )
        loss = next_byte_loss(model, window.to(world.device))
        loss.backward()
        npuzero.clip_grad_norm_(model, options.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.add(loss)
    return progress


@torch.no_grad()
def held_out_loss(
    model: nn.Module, text: Tensor, options: Options, device: torch.device, world: World | None = None
) -> float:
    """Mean loss over the held-out batches, in the same order for any number of ranks.

    With a world it is collective: the batches are shared out, and every rank runs equally many.
    """
    rank, ranks = (world.rank, world.size) if world else (0, 1)
    batches = list(held_out_batches(text, count=HELD_OUT_BATCHES, batch=options.batch, length=options.seq))
    rounds = -(-len(batches) // ranks)
    mine = [(place * ranks + rank) % len(batches) for place in range(rounds)]
    losses = [(index, next_byte_loss(model, batches[index].to(device)).item()) for index in mine]
    shared = world.exchange(losses) if world else [losses]
    by_index = {int(index): float(loss) for part in shared for index, loss in part}
    return sum(by_index[index] for index in range(len(batches))) / len(batches)


def finish(options: Options, result: dict[str, Any], state: Mapping[str, Tensor], text: Tensor) -> None:
    """Export the weights, load them into a plain model, see that they do what the cut ones did; write result.json.

    Raises:
        RuntimeError: the exported weights have another held-out loss.
    """
    out, device = Path(options.out), torch.device(result["device"])
    out.mkdir(parents=True, exist_ok=True)
    save_weights(out / "model.safetensors", options.model, state)
    plain = load_weights(out / "model.safetensors").to(device)
    if options.sample:
        text_bytes = generate(plain, PROMPT, options.sample, context=options.seq, seed=options.seed)
        result["sample"] = text_bytes.decode(errors="replace")
        print(result["sample"])
    loss, reloaded = result["held_out_loss"], held_out_loss(plain, text, options, device)
    result["held_out_loss_reloaded"] = reloaded
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"held-out loss {loss:.4f} nats per byte; of the exported weights in a plain model {reloaded:.4f}")
    if not math.isclose(loss, reloaded, rel_tol=1e-5):
        raise RuntimeError(f"the exported weights have another held-out loss: {reloaded} instead of {loss}")


@record
def main(arguments: Sequence[str] | None = None) -> None:
    options = Options.parse(arguments)
    world = npuzero.init(None if options.device == "auto" else options.device)
    corpus = Corpus.standard_library()
    torch.manual_seed(options.seed)  # the same first weights on every rank, under every preset
    model = GPT(options.model).to(world.device)
    plan = npuzero.Plan.preset(options.preset, precision=options.precision, local_size=options.local_size)
    predicted = npuzero.predict(model, plan, world.size, clip=True)

    npuzero.zero(model, plan=plan)
    progress = train(model, corpus.train, options, world)
    measured = npuzero.report(model)
    result = {
        "options": asdict(options),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "ranks": world.size,
        "device": str(world.device),
        "losses": progress.losses,
        "tokens_per_s": progress.tokens_per_s,
        "bytes_held": {"measured": measured.bytes_held, "predicted": predicted.bytes_held},
        "bytes_sent": {"measured": measured.bytes_sent, "predicted": predicted.bytes_sent},
        "held_out_loss": held_out_loss(model, corpus.held_out, options, world.device, world),
    }
    state = npuzero.full_state_dict(model)  # collective: every rank takes part, rank 0 gets it
    if world.rank == 0:
        finish(options, result, state, corpus.held_out)


if __name__ == "__main__":
    main()
