"""Mistakes that torch allows: training continues, with one warning, on rank 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import Precision, checkpoint, comm
from npuzero.comm import Mesh, World
from npuzero.plan import DATA
from npuzero.shard.gradients import input_digests as inputs
from world.toy import build_seeded_model

#: The batch of a rank, by its mesh and the step.
Feed = Callable[[Mesh, int], Tensor]


def net() -> nn.Module:
    return build_seeded_model(make=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))


def told(size: int, rank: Callable[[World], Any], about: str) -> list[str]:
    """Return the warnings of all ranks that begin with ``about``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm.run_threads(size, rank, timeout_s=60)
    return [text for each in caught if (text := str(each.message)).startswith(about)]


# -- one batch on all data ranks ---------------------------------------------------------------------------------------


def random(seed: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def repeated(size: int, feed: Feed, steps: int = 6, stage: int = 1, **axes: int) -> list[str]:
    def rank(world: World) -> None:
        mesh = npuzero.mesh(world=world, **axes)
        model = npuzero.zero(net(), stage=stage, mesh=mesh)
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
        for step in range(steps):
            model(feed(mesh, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return told(size, rank, "Every data rank")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_one_batch_on_all_data_ranks_is_told_once(size: int, stage: int) -> None:
    (text,) = repeated(size, lambda _, step: random(step), stage=stage)
    assert f"on all {size}" in text and "DistributedSampler" in text and "filterwarnings" in text


def test_the_same_inputs_in_each_step_are_told_too() -> None:
    assert len(repeated(2, lambda *_: random(0))) == 1


@pytest.mark.parametrize(
    ("size", "feed", "steps"),
    [
        pytest.param(2, lambda mesh, step: random(10 * step + mesh.world.rank), 6, id="different batches"),
        pytest.param(4, lambda mesh, step: random(10 * step + mesh.world.rank // 2), 6, id="pairs alike"),
        pytest.param(4, lambda mesh, step: random(10 * step + (mesh.world.rank == 3)), 6, id="all but one alike"),
        pytest.param(2, lambda _, step: random(step), 2, id="two steps"),
        pytest.param(2, lambda mesh, step: random(step + step % 2 * mesh.world.rank), 8, id="every other step"),
        pytest.param(2, lambda *_: torch.zeros(0, 4), 6, id="no elements"),
        pytest.param(1, lambda _, step: random(step), 6, id="one rank"),
    ],
)
def test_what_differs_or_says_nothing_is_not_told(size: int, feed: Feed, steps: int) -> None:
    assert not repeated(size, feed, steps)


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_of_other_axes_share_a_batch_by_right(alike: bool) -> None:
    def feed(mesh: Mesh, step: int) -> Tensor:
        share = 1 if alike else mesh.shape.sequence
        return random(10 * step + (0 if alike else mesh.index(DATA) // share))

    assert not repeated(2, feed, sequence=2), "of one data rank"
    assert len(repeated(4, feed, sequence=2)) == alike


@pytest.mark.parametrize("alike", [True, False])
def test_pipelines_of_one_batch_are_told_once(alike: bool) -> None:
    def rank(world: World) -> None:
        mesh = npuzero.mesh(pipe=2, world=world)
        blocks = build_seeded_model(make=lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))))
        pipe = npuzero.pipeline(blocks, mesh, micro_batches=1, loss_fn=nn.functional.mse_loss)
        optimizer = npuzero.AdamW(pipe.parameters(), lr=1e-3)
        for step in range(5):
            batch = random(10 * step + (0 if alike else mesh.index(DATA)))
            pipe.step(batch, target=batch)
            optimizer.step()
            optimizer.zero_grad()

    assert len(told(4, rank, "Every data rank")) == alike


def test_digests_are_of_the_first_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    begin = inputs.begin_digest
    monkeypatch.setattr(inputs, "begin_digest", lambda *of: made.append(of) or begin(*of))
    repeated(2, lambda mesh, step: random(10 * step + mesh.world.rank), steps=10)
    assert 0 < len(made) <= 2 * 4


# -- float16 without a loss scaler -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "scaler", "warned"),
    [
        (torch.float16, None, True),
        (torch.float16, npuzero.LossScaler(enabled=False), True),
        (torch.float16, npuzero.LossScaler(init_scale=2.0), False),
        (torch.bfloat16, None, False),
        (None, None, False),
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_float16_without_a_scaler_is_told_once(stage: int, dtype: Any, scaler: Any, warned: bool) -> None:
    def rank(world: World) -> None:
        model = npuzero.zero(net(), stage=stage, world=world, precision=Precision(dtype))
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
        mine = scaler and npuzero.LossScaler(init_scale=2.0, enabled=scaler.is_enabled())
        for step in range(3):
            loss = model(random(10 * step + world.rank)).float().square().mean()
            (mine.scale(loss) if mine else loss).backward()
            if mine:
                mine.step(optimizer)
                mine.update()
            else:
                optimizer.step()
            optimizer.zero_grad()

    found = told(2, rank, "float16 gradients")
    assert len(found) == warned
    assert all("LossScaler" in text and "filterwarnings" in text for text in found)


# -- optimizer states of another rule ----------------------------------------------------------------------------------

Make = Callable[[Any], torch.optim.Optimizer]


def wrapped(kind: type[torch.optim.Optimizer], **options: Any) -> Make:
    return lambda params: npuzero.ZeroOptimizer(kind, params, lr=1e-3, **options)


ADAMS: dict[str, Make] = {"AdamW": npuzero.AdamW, "torch AdamW": wrapped(torch.optim.AdamW)}
OTHERS: list[tuple[str, Make, Make, tuple[str, ...]]] = [
    ("Lion", npuzero.AdamW, npuzero.Lion, ("Adam or AdamW", "Lion", "as they are: exp_avg;", "dropped: exp_avg_sq")),
    ("SGD", npuzero.AdamW, wrapped(torch.optim.SGD, momentum=0.9), ("SGD", "begun anew: momentum_buffer")),
    ("no momentum", npuzero.AdamW, wrapped(torch.optim.SGD), ("no moments", "dropped: exp_avg, exp_avg_sq")),
]
SAME: list[tuple[str, Make, Make]] = [
    *((f"{a} to {b}", ADAMS[a], ADAMS[b]) for a in ADAMS for b in ADAMS),
    ("SGD", wrapped(torch.optim.SGD, momentum=0.9), wrapped(torch.optim.SGD, momentum=0.9)),
    ("Lion", npuzero.Lion, npuzero.Lion),
    ("amsgrad", lambda params: npuzero.Adam(params, amsgrad=True), npuzero.Adam),
]


def loaded(first: Make, second: Make, folder: Path, way: str) -> list[str]:
    """Train by ``first``, load its state into ``second``, and take a step by that."""

    def rank(world: World) -> None:
        model = net() if way == "plain" else npuzero.zero(net(), stage=1, world=world)

        def step(optimizer: torch.optim.Optimizer) -> None:
            model(random(world.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step(before := first(model.parameters()))
        if way == "checkpoint":
            checkpoint.save(folder, model, before, step=1)
            after = second(model.parameters())
            checkpoint.load(folder, model, after)
        else:
            state = before.state_dict()
            after = second(model.parameters())
            after.load_state_dict(state)
        step(after)

    return told(1 if way == "plain" else 2, rank, "Optimizer state of another rule")


ways = pytest.mark.parametrize("way", ["checkpoint", "state_dict", "plain"])


@ways
@pytest.mark.parametrize(("first", "second", "words"), [pytest.param(*row[1:], id=row[0]) for row in OTHERS])
def test_a_state_of_another_rule_is_told_once(
    first: Make, second: Make, words: tuple[str, ...], way: str, tmp_path: Path
) -> None:
    (text,) = loaded(first, second, tmp_path, way)
    assert all(word in text for word in words), text


@ways
@pytest.mark.parametrize(("first", "second"), [pytest.param(*row[1:], id=row[0]) for row in SAME])
def test_a_state_of_the_same_rule_is_loaded_without_a_word(first: Make, second: Make, way: str, tmp_path: Path) -> None:
    assert not loaded(first, second, tmp_path, way)


@ways
@pytest.mark.parametrize(
    ("first", "second", "lacks"),
    [
        (npuzero.Lion, npuzero.AdamW, "exp_avg_sq"),
        (npuzero.Lion, wrapped(torch.optim.AdamW), "exp_avg_sq"),
        (wrapped(torch.optim.SGD, momentum=0.9), wrapped(torch.optim.RMSprop), "square_avg"),
    ],
)
def test_a_state_that_no_step_goes_on_from_is_refused(
    first: Make, second: Make, lacks: str, way: str, tmp_path: Path
) -> None:
    with pytest.raises(npuzero.CheckpointError, match=lacks):
        loaded(first, second, tmp_path, way)
