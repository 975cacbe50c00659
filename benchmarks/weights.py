"""Memory and time of loading and exporting weights of a sharded model. From the repository's root, or installed::

    torchrun --standalone --nproc-per-node 2 -m benchmarks.weights --out build/weights.json

A stack of equal matrices under stage 3 is initialised on meta, exported, and loaded from its files on meta again.
Figures are rank 0's, in bytes: peak memory beyond the memory held at the end, compared with the size of one tensor and
of the full model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import npuzero
from benchmarks.step import memory
from npuzero.bench import machine_fingerprint
from npuzero.comm import World

Figures = dict[str, Any]


def measure_weights(world: World, folder: Path, width: int, layers: int) -> Figures:
    """Measure ``layers`` float32 matrices of ``width`` x ``width``. Collective. Files stay in ``folder``."""
    # Allocate what does not depend on the size first: communicators, buffers of slots.
    warm = npuzero.zero(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), 3, world=world)
    npuzero.export(warm, folder / "warm.safetensors")
    made, read = (_meta_linears(width, layers) for _ in range(2))
    tensor = width * width * 4
    return {
        "ranks": world.size,
        "tensor_bytes": tensor,
        "model_bytes": layers * tensor,
        "initialise": _measure_peak(world, lambda: npuzero.zero(made, 3, world=world)),
        "export": _measure_peak(world, lambda: npuzero.export(made, folder)),
        "import": _measure_peak(world, lambda: npuzero.zero(read, 3, world=world, weights=folder)),
    }


def _meta_linears(width: int, layers: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def _measure_peak(world: World, work: Callable[[], Any]) -> Figures:
    """Return the memory that ``work`` left, and its peak beyond that."""
    device = world.device
    memory.reset_peak_bytes(device)
    begin_s, before = time.perf_counter(), memory.current_resident_bytes(device)
    world.exchange(None)
    work()
    world.exchange(None)
    seconds, peak = time.perf_counter() - begin_s, memory.peak_resident_bytes(device)
    memory.reset_peak_bytes(device)  # returns free memory to the system
    after = memory.current_resident_bytes(device)
    return {"seconds": seconds, "kept_bytes": after - before, "beyond_bytes": peak - after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--out", type=Path, help="write the figures there (JSON)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = npuzero.init("cpu")
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world.exchange(own)[0])
        figures = measure_weights(world, folder, options.width, options.layers) | {"machine": machine_fingerprint()}
        world.exchange(None)
    if world.rank == 0:
        text = json.dumps(figures, indent=1)
        print(text)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
