"""Mutants of clipping by parts, and of gradients that are set to zeros."""

from __future__ import annotations

from .mutant import PackageMutant

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "clipping a part of the parameters clips, and counts, all of them",
        "shard/step/read_gradients.py",
        "every = len(present) == len(set(present)) == sum(map(sum, used.values()))",
        "every = True",
        ("world/test_clipping_parts.py::test_parts_of_a_model[zero1-2.0]",),
    ),
    PackageMutant(
        "a parameter that is given twice counts once, unlike in torch",
        "shard/step/read_gradients.py",
        "every = len(present) == len(set(present))",
        "every = len(set(present))",
        ("world/test_clipping_parts.py::test_frozen_for_the_moment_and_given_twice[zero1]",),
    ),
    PackageMutant(
        "gradients of plain parameters beside a sharded model do not count in the norm",
        "shard/step/clip_gradients.py",
        "if given.plain:\n        norms",
        "if False:\n        norms",
        ("world/test_clipping_parts.py::test_two_models_and_a_plain_one[zero2]",),
    ),
    PackageMutant(
        "an optimizer's zero_grad(set_to_none=False) drops gradients, and momentum moves nothing on",
        "optim/optimizer.py",
        "                    if set_to_none:",
        "                    if True:",
        ("world/test_zeros.py::test_zeros_update[zero1-AdamW-by_the_optimizers]",),
    ),
    PackageMutant(
        "a model's zero_grad(set_to_none=False) leaves the values of before",
        "shard/state/flat_gradient.py",
        "gradient.zeroed.add(i)",
        "pass",
        ("world/test_zeros.py::test_zeros_update[zero1-AdamW-by_the_model]",),
    ),
    PackageMutant(
        "gradients that are set to zeros between clipping and the step update as they were",
        "shard/step/step_boundary.py",
        " or any(flat.gradient.zeroed for flat in self._flats):",
        ":",
        ("world/test_zeros.py::test_zeros_update[zero1-SGD-by_the_model]",),
    ),
)
