"""What is said of ranks that fail: where each of them was."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from npu.binding.ranks import run_npu_ranks


@pytest.mark.slow
def test_a_rank_that_dies_is_told_of_beside_the_one_that_waits_for_it(tmp_path: Path):
    begin = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_npu_ranks("rank_cases:dies_while_the_other_waits", 2, tmp_path)
    waiting, dead = str(caught.value).split("rank 1 ended with -11")
    assert waiting.startswith("rank 0 ran until it was ended")
    assert "in _waits_in_vain" in waiting
    assert "Segmentation fault" in dead and "in dies_while_the_other_waits" in dead
    assert time.monotonic() - begin < 60, "nobody waits as long as rank 0 would"
