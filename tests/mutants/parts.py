"""Mistakes in parts of a model that run by themselves."""

from __future__ import annotations

from .mutant import PackageMutant

PARTS = "world/test_parts.py"
LAST = f"{PARTS}::test_the_last_pass_of_a_part_sums_its_gradients_and_the_last_of_all_the_roots"
FORETOLD = f"{PARTS}::test_what_is_sent_and_held_is_foretold"

MUTANTS = (
    PackageMutant(
        "what several parts share is summed over the ranks in one part's last pass",
        "shard/step/forward_backward.py",
        "sum(part.expected - part.count for part in self._all if unit in part)",
        "self._part.expected - self._part.count",
        (f"{LAST}[Runner]",),
    ),
    PackageMutant(
        "a part's backward pass reduces all parts' gradients",
        "shard/step/forward_backward.py",
        "for unit in reduction_order(part.units) for flat",
        "for unit in reduction_order(self._units) for flat",
        (f"{FORETOLD}[two parts interleaved]",),
    ),
    PackageMutant(
        "a part's backward pass lets go of what other parts hold for theirs",
        "shard/step/forward_backward.py",
        "        for unit in self._part.units:\n            unit.computing",
        "        for unit in self._units:\n            unit.computing",
        (f"{FORETOLD}[two parts, all forwards first]",),
    ),
    PackageMutant(
        "passes of a step that raised count for the one after it",
        "shard/step/forward_backward.py",
        "if self._failed and not again:",
        "if False:",
        (f"{LAST}[FailsInBackward]",),
    ),
    PackageMutant(
        "gradients that were taken end no pass",
        "shard/step/forward_backward.py",
        "                    flat.parameters[i].grad = flat.gradient.markers[i]\n            self.backward_ends()\n",
        "                    flat.parameters[i].grad = flat.gradient.markers[i]\n",
        (f"{PARTS}::test_gradients_that_were_taken_are_those_of_backward[zero2-build_tied_chain]",),
    ),
    PackageMutant(
        "backward goes from one part into the next unnoticed",
        "shard/step/forward_backward.py",
        "if unit not in self._part:",
        "if False:",
        (f"{PARTS}::test_what_does_not_fit_is_refused",),
    ),
    PackageMutant(
        "the root's output counts as it comes for the first part",
        "shard/step/nan_watch.py",
        "            self._order.pop(0, None)",
        "            pass",
        (f"{PARTS}::test_a_finite_guard_names_the_stage",),
    ),
    PackageMutant(
        "the schedule takes every unit for every part's",
        "plan/prediction/step_schedule.py",
        "[UnitPart([units[i] for i in each], self._spans) for each in step.parts]",
        "[UnitPart(units, self._spans) for each in step.parts]",
        (f"{FORETOLD}[two parts interleaved]",),
    ),
)
