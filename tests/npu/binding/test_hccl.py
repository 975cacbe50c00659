"""Process groups of 2 to 4 processes through the real ProcessGroupHCCL, over the fake hccl."""

from __future__ import annotations

import pytest

from npu.binding.ranks import run_npu_ranks


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_communicators(size, tmp_path):
    for rank, facts in enumerate(run_npu_ranks("hccl_cases:run_hccl_cases", size, tmp_path)):
        assert facts["backend"] == "hccl" and facts["device"] == f"npu:{rank}"
        assert facts["before"] == facts["after_host"] == []
        assert facts["sizes"] == ["200", "200", "8"]


def test_results_are_late_and_still_right(tmp_path):
    """Every piece of work on a stream comes 2 ms late: who reads without waiting reads what was there before."""
    run_npu_ranks("hccl_cases:check_stream_order", 2, tmp_path, FAKE_NPU_DELAY_US="2000")


@pytest.mark.slow
def test_who_does_not_connect_is_named_with_the_remedy(tmp_path):
    text = run_npu_ranks("hccl_cases:a_rank_that_does_not_connect", 2, tmp_path, HCCL_CONNECT_TIMEOUT="2")[0]
    assert text is not None and "raise HCCL_CONNECT_TIMEOUT" in text
