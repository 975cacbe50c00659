"""Real text that is on every machine: the source files of the Python standard library, as bytes.

Whole files are either trained on or held out, by a hash of their name. The batches of a step depend on the seed, the
step and the position in the global batch only: ranks never see the same window twice in an epoch, and 2 ranks x 8
windows train on what 4 ranks x 4 do.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

# Not the library's own code (packages of others), or not prose-like code (tests, character tables, long strings).
EXCLUDED = frozenset({
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"
})  # fmt: skip
HELD_OUT_IN = 20  # one file in this many is held out
END_OF_FILE = b"\0"


def source_files(root: Path) -> list[Path]:
    """The library's ``*.py`` files, sorted by their name below ``root``."""
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(name for name in names if EXCLUDED.isdisjoint(name.parts))


def is_held_out(name: Path) -> bool:
    """Whether this file is kept from training: a fixed hash of its name, the same on every machine."""
    return hashlib.sha256(name.as_posix().encode()).digest()[0] % HELD_OUT_IN == 0


@dataclass(frozen=True)
class Corpus:
    """Text to train on and text held out, each u8[n] with a zero byte after every file."""

    train: Tensor
    held_out: Tensor

    @classmethod
    def from_folder(cls, root: Path, limit_bytes: int = 32 << 20) -> Corpus:
        """Read the sources below ``root``, in order, until ``limit_bytes``."""
        train, held_out = bytearray(), bytearray()
        for name in source_files(root):
            text = (root / name).read_bytes() + END_OF_FILE
            if len(train) + len(held_out) + len(text) > limit_bytes:
                break
            (held_out if is_held_out(name) else train).extend(text)
        if not train or not held_out:
            raise FileNotFoundError(f"too few Python sources below {root} to train on and hold out")
        return cls(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8))

    @classmethod
    def standard_library(cls) -> Corpus:
        """The sources of the Python that runs this."""
        return cls.from_folder(Path(sysconfig.get_paths()["stdlib"]))


@lru_cache(maxsize=2)
def epoch_order(windows: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits its windows: int64[windows]."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(windows, generator=generator)


def train_batch(text: Tensor, *, seed: int, step: int, rank: int, ranks: int, batch: int, length: int) -> Tensor:
    """The windows that ``rank`` trains on in ``step``: u8[batch, length + 1], the last byte being only a target."""
    windows = (text.numel() - 1) // length
    first = (step * ranks + rank) * batch
    rows = []
    for place in range(first, first + batch):
        epoch, index = divmod(place, windows)
        begin = int(epoch_order(windows, seed, epoch)[index]) * length
        rows.append(text[begin : begin + length + 1])
    return torch.stack(rows)


def held_out_batches(text: Tensor, *, count: int, batch: int, length: int) -> Iterator[Tensor]:
    """``count`` batches u8[batch, length + 1] spread evenly over ``text``: the same ones in every run."""
    begins = torch.linspace(0, text.numel() - length - 1, count * batch, dtype=torch.float64).long().tolist()
    for index in range(0, count * batch, batch):
        yield torch.stack([text[begin : begin + length + 1] for begin in begins[index : index + batch]])
