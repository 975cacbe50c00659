"""Mutants of the arithmetic of what rests off the device."""

from __future__ import annotations

from .mutant import PackageMutant

TIERS = "unit/test_tiers.py"

MUTANTS = (
    PackageMutant(
        "a share is cut through a block of moments",
        "plan/sizes/memory_tiers.py",
        "// MOMENT_BLOCK * MOMENT_BLOCK",
        "// 1",
        ("unit/test_plan.py::test_a_share_keeps_whole_blocks_near_and_the_rest_far",),
    ),
    PackageMutant(
        "a chunk begins before the one before it is full, and takes more than the setting says",
        "plan/sizes/memory_tiers.py",
        "if room < cost and parts:",
        "if room < 0 and parts:",
        (f"{TIERS}::test_chunks_cover_every_shard_in_order_and_none_is_too_large",),
    ),
    PackageMutant(
        "float32 masters are fetched with the parameters that they are rounded to",
        "plan/prediction/offloaded_update.py",
        "fetched, filed = 0 if rounded else taken.parameters, nvme_shard_bytes(kind, numel)",
        "fetched, filed = taken.parameters, nvme_shard_bytes(kind, numel)",
        (f"{TIERS}::test_what_is_moved_in_a_step[offload-1-bf16]",),
    ),
    PackageMutant(
        "gradients that rest on the host stay on the device until the last flat's are there",
        "plan/prediction/gradient_reductions.py",
        "stages[-1] = replace(stages[-1], ends=(*stages[-1].ends, *goes))",
        "stages[-1] = replace(stages[-1], ends=(*stages[-1].ends, *goes[:1]))",
        (f"{TIERS}::test_gradients_on_their_way_home_are_on_the_device_one_flat_at_a_time",),
    ),
    PackageMutant(
        "what has been added up does not come back before more is added",
        "plan/prediction/gradient_reductions.py",
        "comes, goes = _load_gradient_moves(kind, again=not unit.first), _offload_gradient_moves(kind)",
        "comes, goes = _load_gradient_moves(kind, again=False), _offload_gradient_moves(kind)",
        (f"{TIERS}::test_what_is_moved_in_a_step[offload3-4-fp32]",),
    ),
    PackageMutant(
        "extents on a disk are not whole pages",
        "plan/prediction/offloaded_update.py",
        "record = round_up_pages(masters) + round_up_pages(moments)",
        "record = masters + moments",
        (f"{TIERS}::test_seven_billion_parameters_on_eight_ranks_with_states_on_nvme_by_hand",),
    ),
    PackageMutant(
        "a plan lets gradients rest on the host beside states on the device",
        "plan/presets.py",
        "if self.gradients.far and not (self.states.far and self.gradients.axes == self.states.axes):",
        "if self.gradients.far and not self.gradients.axes == self.states.axes:",
        ("unit/test_plan.py::test_what_cannot_be_kept_is_no_plan",),
    ),
)
