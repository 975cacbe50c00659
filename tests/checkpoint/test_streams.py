"""Optimizer states on a disk are saved and loaded in pieces: memory for a few pieces, at any size of the states."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import npuzero
from npuzero import Settings, checkpoint, comm
from npuzero.checkpoint import loading
from npuzero.checkpoint.layout import parts

MIB = 2**20
ITEM = MIB // 2


def process_status_bytes(line: str) -> int:
    """Return the bytes on a line of this process's status."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(found.split()[1] for found in text.splitlines() if found.startswith(line)))


def measure_memory_growth(work: Callable[[], object]) -> int:
    """Return the peak of this process's memory during ``work``, in bytes above the memory before it."""
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current memory
    except OSError:
        pytest.skip("the system does not let the high water of memory begin anew")
    before = process_status_bytes("VmRSS")
    work()
    return process_status_bytes("VmHWM") - before


def train_offloaded_linear(width: int, offload: str, folder: Path) -> tuple[Any, Any]:
    """Build a model with 12 bytes of states on the disk for each bfloat16 parameter."""
    settings = Settings(nvme_paths=(str(folder),), chunk_bytes=MIB)
    model: Any = npuzero.zero(
        nn.Linear(width, width, bias=False), stage=3, precision="bf16", offload=offload, settings=settings,
        world=comm.SingleWorld(),
    )  # fmt: skip
    optimizer = npuzero.AdamW(model.parameters())
    model(torch.ones(1, width, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(
    ("width", "offload"),
    [(2048, "nvme"), *(pytest.param(4096, offload, marks=pytest.mark.slow) for offload in ("nvme", "nvme+parameters"))],
)
def test_no_more_than_a_few_pieces_are_in_memory(
    width: int, offload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "ITEM_BYTES", ITEM)
    monkeypatch.setattr(loading, "RANGE", ITEM // 4)
    model, optimizer = train_offloaded_linear(width, offload, tmp_path)
    states = 12 * width * width
    assert states >= 48 * MIB
    few = 24 * MIB  # writes are collected up to 8 MiB, reads are chunks; an allocator may keep as much again
    folder = tmp_path / "run"

    def save(step: int, asynchronous: bool) -> Callable[[], object]:
        return lambda: checkpoint.save(folder, model, optimizer, step=step, asynchronous=asynchronous).wait()

    # The least of three: the first run makes one-time objects, and other threads may allocate at any time.
    saving, loading_, beside = map(
        min,
        zip(
            *(
                (
                    measure_memory_growth(save(step, False)),
                    measure_memory_growth(lambda: checkpoint.load(folder, model, optimizer)),
                    measure_memory_growth(save(step + 1, True)),
                )
                for step in (1, 3, 5)
            ),
            strict=True,
        ),
    )
    assert (saving < few, loading_ < few, beside < few) == (True, True, True), (saving, loading_, beside)
