"""Every preset equals torch's DDP with torch's AdamW, on real processes: one job per number of ranks checks all."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import npuzero
from npuzero import comm
from world.comm_ranks import rank_results, run_comm_ranks
from world.parity_ranks import CLIPPED, FOUR, ONE, STAGES, check_equals_ddp
from world.thin import preset_digests as digests_of_thin
from world.toy import TrainingRecipe

pytestmark = pytest.mark.world

#: Ranks, and how many of them share a group.
LOCAL_SIZE = {2: 1, 3: 3, 4: 2}
WORK = {ONE: npuzero.PRESETS, CLIPPED: STAGES, FOUR: npuzero.PRESETS}
OVER_GLOO = {ONE: ("zero3", "hsdp"), FOUR: ("zero3", "hsdp")}

Digests = dict[tuple[TrainingRecipe, str], str]


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Digests]:
    """Return the outcomes' bits over shared memory, by number of ranks; check parity."""

    @cache
    def run(size: int) -> Digests:
        folder = tmp_path_factory.mktemp(f"ranks-{size}")
        return rank_results(
            run_comm_ranks(size, check_equals_ddp, WORK, LOCAL_SIZE[size], folder=folder, limit_s=150.0)
        )[0]

    return run


@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=() if size == 2 else pytest.mark.slow) for size in LOCAL_SIZE]
)
def test_every_preset_equals_ddp(size: int, digests: Callable[[int], Digests]) -> None:
    assert len(digests(size)) == 2 * len(npuzero.PRESETS) + len(STAGES)


@pytest.mark.slow
def test_gloo_gives_the_bits_of_shared_memory(digests: Callable[[int], Digests], tmp_path: Path) -> None:
    arguments = (OVER_GLOO, LOCAL_SIZE[4])
    over_gloo = rank_results(
        run_comm_ranks(4, check_equals_ddp, *arguments, folder=tmp_path, backend="gloo", limit_s=90.0)
    )[0]
    assert over_gloo == {key: digests(4)[key] for key in over_gloo}


@pytest.mark.slow
def test_gloo_without_a_flat_group_equals_ddp(tmp_path: Path) -> None:
    """torch's groups cannot have hpz's order of ranks: two levels, another order of the sum."""
    rank_results(run_comm_ranks(4, check_equals_ddp, {ONE: ["hpz"]}, 2, folder=tmp_path, backend="gloo", limit_s=90.0))


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_thin_wires_have_the_bits_of_threads(backend: str, tmp_path: Path) -> None:
    """Codes, and sums of the decoded values, over real processes; over gloo (local, node) has two levels."""
    expected = comm.run_threads(4, lambda world: digests_of_thin(world, npuzero.THINNED, 2))
    found = rank_results(
        run_comm_ranks(4, digests_of_thin, npuzero.THINNED, 2, folder=tmp_path, backend=backend, limit_s=90.0)
    )
    assert found == expected == expected[:1] * 4
