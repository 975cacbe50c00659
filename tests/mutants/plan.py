"""Mutants of the arithmetic of what rests off the device."""

from __future__ import annotations

from .mutant import Mutant

TIERS = "unit/test_tiers.py"

MUTANTS = (
    Mutant(
        "a share is cut through a block of moments",
        "plan/tiers.py",
        "// MOMENT_BLOCK * MOMENT_BLOCK",
        "// 1",
        ("unit/test_plan.py::test_a_share_keeps_whole_blocks_near_and_the_rest_far",),
    ),
    Mutant(
        "a chunk begins before the one before it is full, and takes more than the setting says",
        "plan/tiers.py",
        "if room < cost and parts:",
        "if room < 0 and parts:",
        (f"{TIERS}::test_chunks_cover_every_shard_in_order_and_none_is_too_large",),
    ),
    Mutant(
        "float32 masters are fetched with the parameters that they are rounded to",
        "plan/stream.py",
        "fetched, filed = 0 if rounded else taken.parameters, filed_bytes(kind, numel)",
        "fetched, filed = taken.parameters, filed_bytes(kind, numel)",
        (f"{TIERS}::test_what_is_moved_in_a_step[offload-1-bf16]",),
    ),
    Mutant(
        "gradients that rest on the host stay on the device until the last flat's are there",
        "plan/reductions.py",
        "stages[-1] = replace(stages[-1], ends=(*stages[-1].ends, *goes))",
        "stages[-1] = replace(stages[-1], ends=(*stages[-1].ends, *goes[:1]))",
        (f"{TIERS}::test_gradients_on_their_way_home_are_on_the_device_one_flat_at_a_time",),
    ),
    Mutant(
        "what has been added up does not come back before more is added",
        "plan/reductions.py",
        "comes, goes = _from_home(kind, again=not unit.first), _to_home(kind)",
        "comes, goes = _from_home(kind, again=False), _to_home(kind)",
        (f"{TIERS}::test_what_is_moved_in_a_step[offload3-4-fp32]",),
    ),
    Mutant(
        "extents on a disk are not whole pages",
        "plan/stream.py",
        "record = whole_pages(masters) + whole_pages(moments)",
        "record = masters + moments",
        (f"{TIERS}::test_seven_billion_parameters_on_eight_ranks_with_states_on_nvme_by_hand",),
    ),
    Mutant(
        "a plan lets gradients rest on the host beside states on the device",
        "plan/presets.py",
        "if self.gradients.far and not (self.states.far and self.gradients.axes == self.states.axes):",
        "if self.gradients.far and not self.gradients.axes == self.states.axes:",
        ("unit/test_plan.py::test_what_cannot_be_kept_is_no_plan",),
    ),
)
