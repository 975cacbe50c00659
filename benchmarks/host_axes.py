"""Host time of a pair of collectives around divided Linears. From the repository's root, or installed::

    python -m benchmarks.host_axes --out runs/bench/host_axes.json       # about a minute

Perceptrons with negligible kernel times, each with two Linears cut by columns that share an input, followed by one cut
by rows, divided by ``npuzero.parallel.tensor`` over two ranks. This process is both of them: during timing its
collectives send nothing, which leaves hooks, autograd functions, checks and buffers. The baseline is the same
perceptrons without them. A pair is the collectives before and after one perceptron, in forward and backward: under mtp
``copy`` and ``total``, under msp ``gather`` and ``scatter``. Goal: 15 us.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import npuzero
from npuzero.bench import (
    Benchmark,
    Effort,
    Record,
    check_close,
    format_command,
    local_contender,
    machine_fingerprint,
    median,
    run_benchmark,
)
from npuzero.comm import Communicator, World
from npuzero.comm.watchdog.hang_detector import CommunicatorFailure
from npuzero.device import AsyncHandle, ReadyHandle

GOAL_S = 15e-6
PLAIN = "plain"
MODES = ("mtp", "msp", "fsp")
WORDS = {"blocks.*.gate": "colwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
DIM, POSITIONS = 8, 4

Step = Callable[[], list[Tensor]]


class AlikeCommunicator(Communicator):
    """A group of this process and a second rank that has the same slices and adds nothing to sums.

    Perceptrons with unsharded parameters therefore compute the same values as without it.

    Attributes:
        moves: whether collectives write their results; else they do nothing.
    """

    moves = True
    ready = ReadyHandle()

    def _all_reduce(self, buffer: Tensor, tag: str) -> AsyncHandle:
        return self.ready

    def _all_gather(self, whole: Tensor, shard: Tensor, tag: str) -> AsyncHandle:
        if self.moves:
            whole.view(self.size, -1).copy_(shard)
        return self.ready

    def _reduce_scatter(self, shard: Tensor, whole: Tensor, accumulate: bool, tag: str) -> AsyncHandle:
        if self.moves:
            shard.copy_(whole[: shard.numel()])
        return self.ready

    def _unused(self, *_: Any) -> AsyncHandle:
        raise NotImplementedError("perceptrons have no use for it")

    _all_to_all = _broadcast = _send = _recv = _unused

    def barrier(self) -> None:
        return

    def fail(self, failure: CommunicatorFailure) -> None:
        return

    def close(self) -> None:
        return


class TwoAlikeWorld(World):
    """A world of two ranks: this one and an identical one."""

    def __init__(self) -> None:
        super().__init__(0, 2, torch.device("cpu"), (0, 1))

    def _exchange(self, value: object, channel: str, group: tuple[int, ...]) -> list[Any]:
        return [value, value]

    def _make(self, ranks: tuple[int, ...], name: str) -> Communicator:
        return AlikeCommunicator(ranks, 0, name, self.device)


class PerceptronBlock(nn.Module):
    """Two Linears with one input, followed by a third."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class PerceptronStack(nn.Module):
    """A sequence of perceptron blocks."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PerceptronBlock() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def perceptron_step(mode: str, layers: int) -> Step:
    """Forward and backward of divided or plain perceptrons; returns their output and the input's gradient."""
    torch.manual_seed(0)
    model = PerceptronStack(layers)
    for weight in model.parameters():
        nn.init.orthogonal_(weight)
    if mode != PLAIN:
        npuzero.parallel.tensor(model, npuzero.mesh(tensor=2, world=TwoAlikeWorld()), mode=mode, plan=WORDS)
    half = torch.randn(1, POSITIONS // 2, DIM)
    x = torch.cat((half, half), 1).requires_grad_()  # the ranks' slices of a sequence are equal

    def step() -> list[Tensor]:
        x.grad = None
        y = model(x)
        y.backward(torch.ones_like(y))
        return [y.detach(), x.grad]

    return step


def mode_benchmark(mode: str, layers: int) -> Benchmark:
    """Build the benchmark of one mode against no collectives."""
    steps = {name: perceptron_step(name, layers) for name in (PLAIN, mode)}

    def check() -> str:
        AlikeCommunicator.moves = True
        results = [step() for step in steps.values()]
        for what, want, got in zip(("output", "gradient"), *results, strict=True):
            check_close(f"{mode}: {what}", got, want, tolerance=1e-5)
        AlikeCommunicator.moves = False
        return "output and the input's gradient, within 1e-5 of the plain perceptrons'"

    contenders = [local_contender(name, step) for name, step in steps.items()]
    facts = {"pairs": layers, "positions": POSITIONS, "dim": DIM}
    return Benchmark(f"host_axes/{mode}", f"host's work of {layers} pairs, {mode}", contenders, PLAIN, check, facts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record there (JSON)")
    parser.add_argument("--layers", type=int, default=32, help="perceptrons; what is done at their ends counts, too")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each mode, at the most")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record = Record.begin("host_axes", format_command(), machine_fingerprint())
    for mode in MODES:
        print(f"measuring {mode}", flush=True)
        record.results.append(
            result := run_benchmark(mode_benchmark(mode, options.layers), Effort(most_s=options.seconds))
        )
        more = [own - plain for own, plain in zip(result.seconds[mode], result.seconds[PLAIN], strict=True)]
        result.values[mode]["pair_s"] = pair_s = median(more) / options.layers
        print(f"{mode}: {pair_s * 1e6:.2f} us a pair; goal {GOAL_S * 1e6:.0f}", flush=True)
    if options.out is not None:
        record.write(options.out)


if __name__ == "__main__":
    main()
