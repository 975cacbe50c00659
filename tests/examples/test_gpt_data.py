"""The example's data: the same on every rank and in every run, and no window twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from data import Corpus, held_out_batches, is_held_out, source_files, train_batch

TEXT = torch.arange(10_001, dtype=torch.int64).remainder(251).to(torch.uint8)


def train_batch_rows(
    step: int, rank: int, ranks: int, batch: int, seed: int = 0, text: torch.Tensor = TEXT
) -> list[bytes]:
    batch_ = train_batch(text, seed=seed, step=step, rank=rank, ranks=ranks, batch=batch, length=20)
    assert batch_.shape == (batch, 21)
    assert batch_.dtype is torch.uint8
    return [bytes(row.tolist()) for row in batch_]


def test_batches_depend_on_seed_step_and_rank_only() -> None:
    assert train_batch_rows(3, 1, 2, 4) == train_batch_rows(3, 1, 2, 4)
    assert train_batch_rows(3, 1, 2, 4) != train_batch_rows(3, 0, 2, 4)
    assert train_batch_rows(3, 1, 2, 4) != train_batch_rows(4, 1, 2, 4)
    assert train_batch_rows(3, 1, 2, 4) != train_batch_rows(3, 1, 2, 4, seed=1)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    shared = [row for rank in range(ranks) for row in train_batch_rows(5, rank, ranks, 8 // ranks)]
    assert shared == train_batch_rows(5, 0, 1, 8)


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_epoch_visits_every_window_once(ranks: int) -> None:
    text = torch.arange(3 * 10 * 20 + 1).remainder(2**15)  # 30 windows, told apart by their first value
    windows = 30
    steps = windows // (ranks * 5)
    batches = [
        train_batch(text, seed=0, step=step, rank=rank, ranks=ranks, batch=5, length=20)
        for step in range(steps)
        for rank in range(ranks)
    ]
    firsts = torch.cat(batches)[:, 0]
    assert sorted(firsts.tolist()) == list(range(0, 20 * windows, 20))


def test_epochs_differ_in_order() -> None:
    steps = 500 // 10
    assert train_batch_rows(0, 0, 1, 10) != train_batch_rows(steps, 0, 1, 10)


def test_whole_files_are_trained_on_or_held_out(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"m{number:02}.py").write_text(f"x = {number}\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("other\n")
    corpus = Corpus.from_folder(tmp_path)
    names = [Path(f"m{number:02}.py") for number in range(60)]
    assert source_files(tmp_path) == names
    for text, wanted in ((corpus.train, False), (corpus.held_out, True)):
        expected = b"".join((tmp_path / name).read_bytes() + b"\0" for name in names if is_held_out(name) is wanted)
        assert bytes(text.tolist()) == expected


def test_size_is_bounded(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"m{number:02}.py").write_text("y" * 99)
    corpus = Corpus.from_folder(tmp_path, limit_bytes=4_000)
    assert corpus.train.numel() + corpus.held_out.numel() == 4_000


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="too few Python sources"):
        Corpus.from_folder(tmp_path)


def test_the_standard_library_is_there() -> None:
    corpus = Corpus.standard_library()
    assert corpus.train.numel() > 2_000_000
    assert corpus.held_out.numel() > 50_000


def test_held_out_batches_are_spread_and_the_same() -> None:
    first, again = (list(held_out_batches(TEXT, count=4, batch=2, length=20)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert [batch.shape for batch in first] == [(2, 21)] * 4
    assert torch.equal(first[0][0], TEXT[:21])
    assert torch.equal(first[-1][-1], TEXT[-21:])
