"""Saving and loading, compared with torch.distributed.checkpoint and a plain write of as many bytes to the same disk.

    python -m benchmarks.checkpoint --folder /scratch --out runs/bench/checkpoint.json

A GPT in fp32 with AdamW's states, in a world of one: weights and two moments. ``beside training`` is the time that
training is blocked by an asynchronous save. Files are dropped from the page cache before they are read.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import npuzero
from benchmarks.step.workload import HYPER, GPTWorkload, gpt_loss
from npuzero import checkpoint
from npuzero.bench import (
    Benchmark,
    Contender,
    Effort,
    Record,
    check_equal,
    local_contender,
    machine_fingerprint,
    run_benchmark,
)
from npuzero.checkpoint.saving import get_saver
from npuzero.shard.find_engine import engine_of

PLAIN, DCP, OURS, BESIDE = "plain file", "torch.distributed.checkpoint", "npuzero", "npuzero, beside training"
_BLOCK_BYTES = 8 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary folder)")
    parser.add_argument("--out", type=Path, help="write the record there (JSON)")
    parser.add_argument("--seconds", type=float, default=20.0, help="for saving, and for loading, at the most")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch.distributed")  # about the missing process group
    npuzero.init("cpu")
    record = Record.begin("checkpoint", "python -m benchmarks.checkpoint", machine_fingerprint())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for benchmark in CheckpointDisk(Path(folder), options.dim, options.layers).benchmarks():
            result = run_benchmark(benchmark, Effort(most_s=options.seconds, least_rounds=5, visit_s=0.0, warm_up=1))
            record.results.append(result)
            for name in result.seconds:
                print(f"{benchmark.name}, {name}: {result.gb_per_s(name):.2f} GB/s")
    if options.out is not None:
        record.write(options.out)


class CheckpointDisk:
    """The same training state in both libraries, and a folder for it."""

    def __init__(self, folder: Path, dim: int, layers: int) -> None:
        sizes = GPTWorkload(dim=dim, layers=layers, heads=8, sequence=64, batch=1, precision="fp32")
        self._folder = folder
        self._model, self._plain = npuzero.zero(sizes.model(), plan="zero3"), sizes.model()
        self._optimizer = npuzero.AdamW(self._model.parameters(), **HYPER)
        self._theirs = torch.optim.AdamW(self._plain.parameters(), **HYPER)
        for model, optimizer in ((self._model, self._optimizer), (self._plain, self._theirs)):
            gpt_loss(model, sizes.tokens(0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        self._nbytes = 3 * sum(parameter.nbytes for parameter in self._plain.parameters())
        self._parameters = {"bytes": self._nbytes, "parameters": sum(p.numel() for p in self._plain.parameters())}
        self._steps = itertools.count(1)

    def benchmarks(self) -> list[Benchmark]:
        facts = self._parameters
        saving = {PLAIN: self._write_plain, DCP: self._save_theirs, OURS: self._save, BESIDE: self._save_beside}
        loading = {PLAIN: self._read_plain, DCP: self._load_theirs, OURS: self._load}
        done, cold = get_saver(engine_of(self._model)).finish, self._drop_cache
        return [
            Benchmark("checkpoint/save", "saving", self._contenders(saving, done), DCP, self._check, facts),
            Benchmark("checkpoint/load", "loading", self._contenders(loading, cold), DCP, self._check, facts),
        ]

    def _contenders(self, ways: Mapping[str, Callable[[], object]], prepare: Callable[[], object]) -> list[Contender]:
        return [local_contender(name, way, nbytes=self._nbytes, prepare=prepare) for name, way in ways.items()]

    def _check(self) -> str:
        """Check that all files exist, and that torch reads the model's weights from npuzero's."""
        self._write_plain()
        self._save_theirs()
        self._save()
        state: dict[str, Any] = {"model": self._plain.state_dict()}
        dcp.load(state, checkpoint_id=checkpoint.latest(self._folder))
        for name, value in npuzero.full_state_dict(self._model).items():
            check_equal(name, state["model"][name], value)
        return "weights that torch.distributed.checkpoint loads from ours, to the bit"

    def _write_plain(self) -> None:
        block = memoryview(bytearray(_BLOCK_BYTES))
        with open(self._folder / "plain", "wb", buffering=0) as file:
            for _ in range(-(-self._nbytes // _BLOCK_BYTES)):
                file.write(block)
            os.fsync(file.fileno())

    def _read_plain(self) -> None:
        block = bytearray(_BLOCK_BYTES)
        with open(self._folder / "plain", "rb", buffering=0) as file:
            while file.readinto(block):
                pass

    def _state(self) -> dict[str, Any]:
        return {"model": self._plain.state_dict(), "optim": self._theirs.state_dict()}

    def _save_theirs(self) -> None:
        dcp.save(self._state(), checkpoint_id=self._folder / "theirs")

    def _load_theirs(self) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=self._folder / "theirs")

    def _save(self, asynchronous: bool = False) -> None:
        step = next(self._steps)
        checkpoint.save(self._folder, self._model, self._optimizer, step=step, keep_last=1, asynchronous=asynchronous)

    def _save_beside(self) -> None:
        self._save(asynchronous=True)

    def _load(self) -> None:
        checkpoint.load(self._folder, self._model, self._optimizer)

    def _drop_cache(self) -> None:
        for path in self._folder.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
