"""Mutants of what stages of a pipeline have in common, and agree on."""

from __future__ import annotations

from .mutant import PackageMutant

WORLD = "world/test_ends.py::"
BOTH = f"{WORLD}test_a_parameter_of_both_ends_is_one"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "what both ends of a pipeline sum is averaged over them",
        "shard/state/flat_gradient.py",
        "self.scale = 1.0 / rests.averaged.size",
        "self.scale = 1.0 / rests.averaged.size / (1 + rests.tied)",
        (f"{BOTH}[2-2-zero1-False-0.5]",),
    ),
    PackageMutant(
        "the norm counts both copies of what the ends have in common",
        "shard/gradients/norms.py",
        "tuple(axis for axis in everyone.axes if axis not in owners.axes)",
        'tuple(axis for axis in everyone.axes if axis not in owners.axes and axis != "pipe")',
        (f"{BOTH}[2-1-zero3-True-0.5]",),
    ),
    PackageMutant(
        "stages between the ends are to sum what they have not",
        "plan/table/axis_relations.py",
        "ENDS if axis == PIPE and uncut else axis",
        "axis",
        (f"{BOTH}[3-1-zero2-False-0.5]",),
    ),
    PackageMutant(
        "each end begins with values of its own",
        "plan/presets.py",
        "return axes_with(self.relations, Relation.AVERAGED, Relation.SUMMED, Relation.REPEATED)",
        "return tuple(axis for axis in STAGE if axis not in self.divided)",
        (f"{BOTH}[2-2-zero1-False-0.5]",),
    ),
    PackageMutant(
        "flats that the ends have in common have another name at each",
        "shard/build.py",
        "key=lambda group: PIPE not in dict(group[0][2])",
        "key=lambda group: 0",
        (f"{BOTH}[2-1-zero0-False-0.5]",),
    ),
    PackageMutant(
        "an end waits within backward for the other, which waits for it",
        "shard/gradients/reduce_scatter.py",
        "boundary = role is BackwardRole.LAST and gradient.meets_in_pass",
        "boundary = role is BackwardRole.LAST and gradient.meets_at_boundary",
        (f"{WORLD}test_neither_end_waits_for_the_other_within_a_pass",),
    ),
    PackageMutant(
        "an end that has not used a parameter leaves it as it was",
        "shard/step/step_boundary.py",
        "self._used = self._pipe.tie(in_use)",
        "self._used = in_use",
        (f"{WORLD}test_an_end_that_does_not_use_it_takes_the_others_gradient",),
    ),
    PackageMutant(
        "both ends round by random bits of their own",
        "optim/workers/sharded_parameters.py",
        "if flat.rests.tied:",
        "if not flat.layout.slots:",
        (f"{WORLD}test_both_ends_round_alike",),
    ),
    PackageMutant(
        "a frozen stage takes no part in norms",
        "plan/table/placement.py",
        "if stages > 1 or len(different) > 1:",
        "if len(different) > 1:",
        (f"{WORLD}test_stages_may_be_frozen[2-1-zero1-False-blocks.2]",),
    ),
    PackageMutant(
        "what one stage alone calls goes unnoticed",
        "shard/gradients/vote_rules.py",
        "if self._world.size > 1 or self._stages.size > 1:",
        "if self._world.size > 1:",
        (f"{WORLD}test_what_one_stage_alone_calls_is_told_on_every_rank",),
    ),
    PackageMutant(
        "a stage without gradients takes no step, and clips by itself",
        "shard/gradients/vote_stages.py",
        "return anywhere > 0",
        "return some",
        (f"{WORLD}test_stages_may_be_frozen[2-1-zero1-False-blocks.2]",),
    ),
)
