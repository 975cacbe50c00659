"""Mutants of what stays between the micro-batches of a step."""

from __future__ import annotations

from .mutant import PackageMutant

BETWEEN = "world/test_between.py"
FORETOLD = f"{BETWEEN}::test_no_bit_moves_and_bytes_are_as_foretold"
PLAN = "unit/test_plan.py"

MUTANTS = (
    PackageMutant(
        "parameters of before the update stay for the next step",
        "shard/parameters/all_gather.py",
        "self._release(unit, [flat.rests.parameters for flat in unit.flats])",
        "self._release(unit, [flat.rests.between for flat in unit.flats])",
        (f"{FORETOLD}[zero3-between0]",),
    ),
    PackageMutant(
        "nothing stays between micro-batches, whatever the plan says",
        "shard/parameters/all_gather.py",
        "self._release(unit, [flat.rests.between for flat in unit.flats])",
        "self._release(unit, [flat.rests.parameters for flat in unit.flats])",
        (f"{FORETOLD}[zero3-between0]",),
    ),
    PackageMutant(
        "a copy that is there is not gathered from",
        "shard/parameters/all_gather.py",
        "for rest, copy in flat.held.items() if copy.here)",
        "for rest, copy in flat.held.items() if not copy.here)",
        (f"{FORETOLD}[hpz-between4]",),
    ),
    PackageMutant(
        "a copy stays beside the unsharded parameters that are kept after forward",
        "shard/parameters/all_gather.py",
        "            if held is not rest:\n                copy.release()",
        "            if held is not rest:\n                pass",
        (f"{FORETOLD}[zero3-keep-between3]",),
    ),
    PackageMutant(
        "what an evaluation between steps has gathered stays until the next update",
        "shard/step/forward_backward.py",
        "        self._training = False\n\n    def step_fails",
        "        self._training = True\n\n    def step_fails",
        (f"{BETWEEN}::test_it_lasts_from_the_first_use_to_the_update",),
    ),
    PackageMutant(
        "what is kept between micro-batches is thrown away after forward",
        "plan/presets.py",
        "return between if len(between.axes) <= len(self.after_forward.axes) else self.after_forward",
        "return self.after_forward",
        (f"{PLAN}::test_what_stays_between_micro_batches_stays_after_forward_too",),
    ),
    PackageMutant(
        "parameters may be sharded further between micro-batches than between steps",
        "plan/presets.py",
        '    ("between", "parameters"),\n',
        "",
        (f"{PLAN}::test_between_micro_batches_parameters_are_sharded_over_the_first_of_their_axes",),
    ),
    PackageMutant(
        "what is kept between micro-batches is never given back in the schedule",
        "plan/prediction/step_schedule.py",
        "            self._release(unit, unit.rests)",
        "            pass",
        (f"{PLAN}::test_a_schedule_leaves_all_as_it_found_it",),
    ),
    PackageMutant(
        "shards that are kept on the device are read from where they rest in each micro-batch",
        "plan/sizes/flat_sizes.py",
        "more = not placement.far if resting.far else",
        "more = placement.axes != resting.axes if resting.far else",
        (f"{FORETOLD}[zero3+host+parameters-between11]",),
    ),
)
