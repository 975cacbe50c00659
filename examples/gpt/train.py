"""Train a byte-level GPT on the Python standard library, under any preset, on any number of ranks.

    torchrun --standalone --nproc-per-node 2 examples/gpt/train.py --preset zero3 --out runs/gpt
    python examples/gpt/train.py --steps 50                     # one process, no launcher
    python examples/gpt/train.py --checkpoint-dir runs/gpt/checkpoints --resume    # goes on where it was stopped

The loop is torch's own; npuzero's are ``init``, ``zero``, ``AdamW``, ``clip_grad_norm_``, ``LossScaler`` (at work in
float16 only) and ``Checkpointer``. It leaves in ``--out``:

    steps.jsonl          a line for each step: step, loss, norm of the gradients, whether it was skipped
    result.json          losses by step, tokens/s, bytes held and sent (measured and predicted), held-out losses
    model.safetensors    whole weights, which load into the plain model of model.py
    tensorboard/         with --tensorboard: loss and norm
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
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
from npuzero.checkpoint import Checkpointer, latest
from npuzero.comm import World

PROMPT = b"def "
FLUSH_EVERY = 10  # steps for which losses stay on the device; then the line on a terminal is brought up to date
LINE_EVERY = 50  # steps between lines where the output is no terminal
HELD_OUT_BATCHES = 32
WEIGHT_DECAY = 0.1


def option(default: Any, help: str, kind: type | None = None) -> Any:
    """A field of Options that is a command line option as well; a bool is a switch."""
    how = {"action": "store_true"} if isinstance(default, bool) else {"type": kind or type(default)}
    return field(default=default, metadata={"help": help, **how})


@dataclass(frozen=True)
class Options:
    """The command line."""

    preset: str = option(
        "zero3",
        f"where the training state rests: {', '.join((*npuzero.PRESETS, *npuzero.OFFLOADED, *npuzero.THINNED))}",
    )
    local_size: int | None = option(None, "ranks in a group for presets with two levels; None: those of a host", int)
    precision: str = option("fp32", f"of the training state: {', '.join(npuzero.PRECISIONS)}")
    states: str = option("device", "where optimizer states rest: device, host or nvme (folders: NPUZERO_NVME_PATHS)")
    chunk_bytes: int = option(0, "of states that are updated at a time; 0: npuzero's choice")
    host_bytes: int = option(0, "that npuzero may hold on the host beside the device; 0: as many as there are")
    steps: int = option(360, "optimizer steps")
    batch: int = option(4, "sequences per rank and micro-batch")
    accumulate: int = option(1, "micro-batches per step")
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
    checkpoint_dir: str | None = option(None, "folder for checkpoints; None: none are kept", str)
    checkpoint_every: int = option(100, "steps between checkpoints")
    resume: bool = option(False, "go on from the last checkpoint in --checkpoint-dir, if there is one")
    no_export: bool = option(False, "end without exporting the weights")
    tensorboard: bool = option(False, "write loss and norm for TensorBoard as well (needs the package tensorboard)")
    out: str = option("runs/gpt", "folder for the result")

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(dim=self.dim, layers=self.layers, heads=self.heads)

    @property
    def plan(self) -> npuzero.Plan:
        plan = npuzero.Plan.preset(self.preset, precision=self.precision, local_size=self.local_size)
        return replace(plan, states=replace(plan.states, memory=npuzero.Memory(self.states)))

    @property
    def settings(self) -> npuzero.Settings:
        # strict: one rank refuses what several would
        return npuzero.Settings(strict=True, chunk_bytes=self.chunk_bytes, host_bytes=self.host_bytes)

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None) -> Options:
        parser = argparse.ArgumentParser(
            description="Train a byte-level GPT under ZeRO.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        for item in fields(cls):
            parser.add_argument(f"--{item.name.replace('_', '-')}", default=item.default, **item.metadata)
        return cls(**vars(parser.parse_args(arguments)))


class StepLog:
    """What each step came to, as lines of JSON in the folder of the run and, if asked for, for TensorBoard; by rank 0.

    A run that resumes after ``first`` steps keeps the lines of these.

    Raises:
        npuzero.ConfigError: TensorBoard is asked for and not installed.
    """

    def __init__(self, options: Options, first: int) -> None:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "steps.jsonl"
        kept = path.read_text().splitlines()[:first] if first else []
        self.losses = [float(json.loads(line)["loss"]) for line in kept]
        path.write_text("".join(f"{line}\n" for line in kept))
        self._file = path.open("a")
        self._board = tensorboard_writer(folder / "tensorboard") if options.tensorboard else None

    def write(self, step: int, loss: float, norm: float) -> None:
        """``step`` counts from 1. A step is skipped where the gradients overflowed, which their norm shows."""
        skipped = not math.isfinite(norm)
        line = {"step": step, "loss": loss, "norm": None if skipped else norm, "skipped": skipped}
        self._file.write(json.dumps(line) + "\n")
        if self._board is not None:
            self._board.add_scalar("loss", loss, step)
            self._board.add_scalar("norm", norm, step)

    def flush(self) -> None:
        self._file.flush()
        if self._board is not None:
            self._board.flush()


def tensorboard_writer(folder: Path) -> Any:
    """torch's SummaryWriter.

    Raises:
        npuzero.ConfigError: the package tensorboard is missing.
    """
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))
    except ImportError as error:
        raise npuzero.ConfigError(
            "--tensorboard", expected="the package tensorboard", got=str(error), do="pip install tensorboard"
        ) from error


class Progress:
    """Mean losses over all ranks, the speed, and the line that shows them (by rank 0; in place on a terminal).

    Args:
        first: steps that were taken before this run.
    """

    def __init__(self, model: nn.Module, options: Options, world: World, first: int) -> None:
        self.tokens_per_s = 0.0  # of all ranks together, without the first step
        self._model, self._options, self._world = model, options, world
        self._log = StepLog(options, first) if world.rank == 0 else None
        self.losses: list[float] = world.exchange(self._log.losses if self._log else None)[0]
        self._first = first
        self._pending: list[Tensor] = []
        self._started_s = 0.0

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """Take note of this rank's loss; collective, and in step with the device, every few steps only."""
        self._pending.append(torch.stack([loss.detach().float(), norm.detach()]))
        step = len(self.losses) + len(self._pending)
        saved = self._options.checkpoint_dir is not None and step % self._options.checkpoint_every == 0
        if saved or step == self._first + 1 or step % FLUSH_EVERY == 0 or step == self._options.steps:
            self._flush()

    def _flush(self) -> None:
        by_rank = self._world.exchange(torch.stack(self._pending).tolist())
        for ranks in zip(*by_rank, strict=True):
            self.losses.append(sum(loss for loss, _ in ranks) / len(ranks))
            if self._log is not None:
                self._log.write(len(self.losses), self.losses[-1], norm=ranks[0][1])
        if self._log is not None:
            self._log.flush()
        self._pending.clear()
        taken = len(self.losses) - self._first
        if taken == 1:
            self._started_s = time.perf_counter()
            return
        sequences = (taken - 1) * self._world.size * self._options.batch * self._options.accumulate
        self.tokens_per_s = sequences * self._options.seq / (time.perf_counter() - self._started_s)
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


def train(model: nn.Module, text: Tensor, options: Options, world: World) -> Progress | None:
    """The loop. ``text`` u8[n] is the same on all ranks. None: the run that is resumed is finished."""
    optimizer, scheduler = build_optimizer(model, options)
    half = npuzero.PRECISIONS[options.precision].parameters is torch.float16
    scaler = npuzero.LossScaler(enabled=half)
    with contextlib.ExitStack() as stack:
        checkpoints: Checkpointer | None = None
        if options.checkpoint_dir is not None:
            kept: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            kept["scaler"] = scaler if half else None
            checkpoints = Checkpointer(options.checkpoint_dir, every=options.checkpoint_every, **kept)
            stack.enter_context(checkpoints)
        first = checkpoints.resume() if checkpoints and options.resume else 0
        if first and first >= options.steps:
            return None
        progress = Progress(model, options, world, first)
        for step in range(first, options.steps):
            total = torch.zeros((), device=world.device)
            for micro_batch in range(options.accumulate):
                window = train_batch(
                    text,
                    seed=options.seed,
                    step=step * options.accumulate + micro_batch,
                    rank=world.rank,
                    ranks=world.size,
                    batch=options.batch,
                    length=options.seq,
                )
                loss = next_byte_loss(model, window.to(world.device)) / options.accumulate
                scaler.scale(loss).backward()
                total += loss.detach()
            scaler.unscale_(optimizer)
            norm = npuzero.clip_grad_norm_(model, options.clip)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            progress.add(total, norm)
            if checkpoints is not None:
                checkpoints.after(step + 1)
    return progress


def check(options: Options) -> None:
    """What the parser cannot see.

    Raises:
        npuzero.ConfigError: options that contradict each other, or what is there.
    """
    if options.precision not in npuzero.PRECISIONS:
        expected = f"one of {', '.join(npuzero.PRECISIONS)}"
        raise npuzero.ConfigError("--precision", expected=expected, got=options.precision, do="Choose one of them.")
    memories = [memory.value for memory in npuzero.Memory]
    if options.states not in memories:
        expected = f"one of {', '.join(memories)}"
        raise npuzero.ConfigError("--states", expected=expected, got=options.states, do="Choose one of them.")
    if options.resume and options.checkpoint_dir is None:
        do = "Say where the checkpoints are."
        raise npuzero.ConfigError("--resume", expected="--checkpoint-dir beside it", got="none", do=do)
    if not options.resume and options.checkpoint_dir is not None and latest(options.checkpoint_dir) is not None:
        raise npuzero.ConfigError(
            "--checkpoint-dir",
            expected="a folder without checkpoints, or --resume",
            got=f"{latest(options.checkpoint_dir)}, of another run",
            do="Resume that run, or give another folder.",
        )


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


def export(options: Options, result: dict[str, Any], state: Mapping[str, Tensor], text: Tensor) -> None:
    """Export the weights, load them into a plain model, and see that they do what the sharded ones did.

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
    print(f"held-out loss {loss:.4f} nats per byte; of the exported weights in a plain model {reloaded:.4f}")
    if not math.isclose(loss, reloaded, rel_tol=1e-5):
        raise RuntimeError(f"the exported weights have another held-out loss: {reloaded} instead of {loss}")


@record
def main(arguments: Sequence[str] | None = None) -> None:
    options = Options.parse(arguments)
    check(options)
    world = npuzero.init(None if options.device == "auto" else options.device)
    corpus = Corpus.standard_library()
    torch.manual_seed(options.seed)  # the same first weights on every rank, under every preset
    model = GPT(options.model).to(world.device)
    predicted = npuzero.predict(
        model, options.plan, world.size, clip=True, micro_batches=options.accumulate, settings=options.settings
    )

    npuzero.zero(model, plan=options.plan, settings=options.settings)
    progress = train(model, corpus.train, options, world)
    if progress is None:
        if world.rank == 0:
            print(f"The run in {options.checkpoint_dir} is finished: --steps {options.steps} were taken before.")
        return
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
    if not options.no_export:
        state = npuzero.full_state_dict(model)  # collective: every rank takes part, rank 0 gets it
        if world.rank == 0:
            export(options, result, state, corpus.held_out)
    if world.rank == 0:
        out = Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
