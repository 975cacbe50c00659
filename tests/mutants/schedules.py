"""Mutants of a pipeline's schedules."""

from __future__ import annotations

from .mutant import PackageMutant

FILE = "parallel/test_schedule.py"
HAND = f"{FILE}::test_small_tables_by_hand"
SOURCE = "parallel/pipeline_parallel/schedule.py"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "ranks of 1f1b run as many forwards ahead as the ones at the other end should",
        SOURCE,
        '"1f1b": ranks - rank - 1,',
        '"1f1b": rank,',
        (HAND,),
    ),
    PackageMutant(
        "ranks of interleaved hurry one forward too few ahead for each rank behind them",
        SOURCE,
        '"interleaved": 2 * (ranks - rank - 1) +',
        '"interleaved": (ranks - rank - 1) +',
        (f"{FILE}::test_peaks_are_exact",),
    ),
    PackageMutant(
        "chunks go backward in the order in which they go forward",
        SOURCE,
        "for stage in reversed(stages) for micro",
        "for stage in stages for micro",
        (HAND,),
    ),
    PackageMutant(
        "no rank puts off gradients of weights, and the bubble is twice as long",
        SOURCE,
        "_split_backwards(row, late=rank)",
        "_split_backwards(row, late=0)",
        (HAND,),
    ),
    PackageMutant(
        "activations are taken to be free while gradients of weights still need them",
        SOURCE,
        '"I": 0, "W": -1}',
        '"I": -1, "W": 0}',
        (f"{FILE}::test_peaks_are_exact",),
    ),
    PackageMutant(
        "a backward is planned before the next stage's",
        SOURCE,
        "last = stage == self.stages - 1",
        "last = True",
        (f"{FILE}::test_a_deadlock_says_who_waits_for_what",),
    ),
    PackageMutant(
        "a schedule that no rank can run ends as if it had run",
        SOURCE,
        "    if any(left):\n",
        "    if not left:\n",
        (f"{FILE}::test_a_deadlock_says_who_waits_for_what",),
    ),
    PackageMutant(
        "interleaved takes micro-batches that its ranks do not divide",
        SOURCE,
        "chunks > 1 and micro_batches % ranks",
        "chunks > ranks and micro_batches % ranks",
        (f"{FILE}::test_what_cannot_be_is_refused_by_name",),
    ),
)
