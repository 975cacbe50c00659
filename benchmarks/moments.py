"""The error of stored moments, on moments of a training run: ``python -m benchmarks.moments``.

The example's GPT trains for some steps in float32. Its moments are stored once in each format and read back. The error
is that of the update m / (sqrt(v) + eps): root mean square, relative to the update's own. For comparison with this
package's formats: the dynamic map of 8-bit optimizers (Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
ICLR 2022), a table of 256 values for blocks scaled by their maximum.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from npuzero.ops import storage
from npuzero.optim import MOMENT_DTYPES

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "gpt"))

from data import Corpus, train_batch
from model import GPT, GPTConfig, next_byte_loss

EPS = 1e-8
Store = Callable[[Tensor], Tensor]


def trained_moments(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return exp_avg and exp_avg_sq of every matrix after ``steps`` of AdamW with torch's default betas."""
    torch.set_num_threads(1)  # the model is small
    torch.manual_seed(0)
    model = GPT(GPTConfig(dim=64, layers=4, heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = Corpus.standard_library().train
    for step in range(steps):
        optimizer.zero_grad()
        next_byte_loss(model, train_batch(text, seed=0, step=step, rank=0, ranks=1, batch=8, length=128)).backward()
        optimizer.step()
    states = [optimizer.state[p] for p in model.parameters() if p.dim() == 2]
    return [(state["exp_avg"].flatten(), state["exp_avg_sq"].flatten()) for state in states]


def round_trip_moment(moments: str, *, signed: bool) -> Store:
    """Store with this package, rounding to nearest."""

    def store(x: Tensor) -> Tensor:
        kept = torch.zeros(storage.stored_numel(x.numel(), MOMENT_DTYPES[moments]), dtype=MOMENT_DTYPES[moments])
        storage.encode_moment(x, kept, signed=signed)
        return storage.decode_moment(kept, x.numel(), signed=signed)

    return store


def dynamic_map_store(block: int, *, signed: bool) -> Store:
    """Store with the published table: a decade per leading zero bit, divided evenly by the remaining bits."""
    bits = 7 if signed else 8
    decades = [torch.linspace(0.1, 1, 2 ** (bits - 1 - i) + 1, dtype=torch.float64) * 10.0**-i for i in range(7)]
    values = torch.cat([(edges[:-1] + edges[1:]) / 2 for edges in decades])
    values = torch.cat([values, -values] if signed else [values])
    table = torch.cat([values, torch.tensor([0.0, 1.0])]).sort().values.float()
    middles = (table[1:] + table[:-1]) / 2

    def store(x: Tensor) -> Tensor:
        blocks = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
        largest = blocks.abs().amax(1, keepdim=True).clamp(min=1e-38)
        return (table[torch.bucketize(blocks / largest, middles)] * largest).flatten()[: x.numel()]

    return store


def update_error(moments: list[tuple[Tensor, Tensor]], first: Store, second: Store) -> float:
    """Return the relative error of the update."""
    apart = whole = 0.0
    for m, v in moments:
        exact = (m / (v.sqrt() + EPS)).double()
        found = (first(m) / (second(v).sqrt() + EPS)).double()
        apart += (found - exact).square().sum().item()
        whole += exact.square().sum().item()
    return math.sqrt(apart / whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of training (200)")
    moments = trained_moments(parser.parse_args().steps)

    def same(x: Tensor) -> Tensor:
        return x

    print("error of the update        m stored   v stored   both")
    for name, signed, unsigned in (
        ("bf16", round_trip_moment("bf16", signed=True), round_trip_moment("bf16", signed=False)),
        ("int8, blocks of 64", round_trip_moment("int8", signed=True), round_trip_moment("int8", signed=False)),
        ("dynamic map, blocks of 256", dynamic_map_store(256, signed=True), dynamic_map_store(256, signed=False)),
        ("dynamic map, blocks of 64", dynamic_map_store(64, signed=True), dynamic_map_store(64, signed=False)),
    ):
        found = [update_error(moments, *pair) for pair in ((signed, same), (same, unsigned), (signed, unsigned))]
        print(f"{name:26}" + "".join(f"{value:9.2%}  " for value in found))


if __name__ == "__main__":
    main()
