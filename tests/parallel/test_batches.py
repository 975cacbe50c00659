"""GlobalBatch: on any number of ranks, each step has the same samples, in the same order, in equal micro-batches."""

from __future__ import annotations

import pytest
import torch

import npuzero
from npuzero import comm

SAMPLES = 100


def step_micro_batches(
    ranks: int, step: int, size: int = 24, micro: int = 4, **options: object
) -> list[list[list[int]]]:
    """Return the micro-batches of a step, by rank."""

    def each(world: comm.World) -> list[list[int]]:
        with comm.entered(world):
            batch = npuzero.GlobalBatch(SAMPLES, size, micro=micro, **options)
            parts = list(batch.micro_batches(step))
        assert len(parts) == batch.accumulate and {len(part) for part in parts} == {batch.micro}
        return parts

    return comm.run_threads(ranks, each)


def flatten_rows(parts: list[list[list[int]]]) -> list[int]:
    return [row for rank in parts for part in rank for row in part]


@pytest.mark.parametrize("step", [0, 3, 4, 1000])
def test_a_step_is_the_same_on_any_number_of_ranks(step):
    alone = flatten_rows(step_micro_batches(1, step))
    assert len(alone) == 24
    for ranks in (2, 3, 4, 6):
        assert flatten_rows(step_micro_batches(ranks, step)) == alone


def test_an_epoch_visits_each_sample_once_and_epochs_differ():
    rows = [row for step in range(50) for row in flatten_rows(step_micro_batches(1, step))]
    epochs = [rows[begin : begin + SAMPLES] for begin in range(0, len(rows), SAMPLES)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(SAMPLES))] * 12
    assert len({tuple(epoch) for epoch in epochs}) == 12
    assert flatten_rows(step_micro_batches(1, 4, seed=1)) != flatten_rows(step_micro_batches(1, 4)), (
        "step 4 lies in two epochs"
    )
    assert flatten_rows(step_micro_batches(2, 4, seed=None)) == [*range(96, 100), *range(20)]


@pytest.mark.parametrize(
    ("ranks", "micro", "parts"), [(1, 4, 6), (2, 4, 3), (3, 5, 2), (4, 4, 2), (6, 100, 1), (2, 1, 12)]
)
def test_micro_batches_are_equal_and_as_large_as_may_be(ranks, micro, parts):
    assert [len(each) for each in step_micro_batches(ranks, 0, micro=micro)] == [parts] * ranks


def test_ranks_that_share_a_batch_get_the_same():
    def each(world: comm.World) -> list[list[list[int]]]:
        meshes = (
            npuzero.mesh(tensor=2, world=world),
            npuzero.mesh(sequence=2, world=world),
            npuzero.mesh(pipe=4, world=world),
        )
        return [next(npuzero.GlobalBatch(SAMPLES, 8, micro=4, mesh=mesh).micro_batches(0)) for mesh in meshes]

    tensor, sequence, pipe = zip(*comm.run_threads(4, each), strict=True)
    for shared in (tensor, sequence):
        assert shared[0] == shared[1] != shared[2] == shared[3]
    assert len({tuple(rows) for rows in pipe}) == 1


def test_a_loader_takes_them():
    batch = npuzero.GlobalBatch(SAMPLES, 8, micro=4)
    rows = (rows for step in range(2, 4) for rows in batch.micro_batches(step))
    loader = torch.utils.data.DataLoader(torch.arange(SAMPLES), batch_sampler=rows)
    assert torch.cat(list(loader)).tolist() == flatten_rows(step_micro_batches(1, 2, 8)) + flatten_rows(
        step_micro_batches(1, 3, 8)
    )


def test_ranks_that_do_not_divide_it_are_told_which_do():
    with pytest.raises(npuzero.ConfigError, match=r"multiple of the 5 ranks .* got 24.*1, 2, 3, 4, 6, 8, 12, 24"):
        step_micro_batches(5, 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"samples": 0}, "samples"),
        ({"size": 2.0}, "size"),
        ({"micro": True}, "micro"),
        ({"seed": -1}, "seed"),
        ({"mesh": 3}, "mesh"),
        ({"train_batch_size": 8}, "size"),
    ],
)
def test_a_bad_argument_is_named(options, named):
    with pytest.raises(npuzero.ConfigError, match=named):
        npuzero.GlobalBatch(**{"samples": 8, "size": 4, "micro": 2} | options)


@pytest.mark.parametrize("step", [-1, 1.0, True])
def test_a_bad_step_is_named(step):
    with pytest.raises(npuzero.ConfigError, match="step"):
        npuzero.GlobalBatch(8, 4, micro=2).micro_batches(step)
