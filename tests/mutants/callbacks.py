"""Mutants of Lightning's callbacks over sharded parameters."""

from __future__ import annotations

from .mutant import PackageMutant

TESTS = "frameworks/test_callbacks.py::"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "what a callback freezes has no room for gradients when it thaws",
        "lightning.py",
        "parameter.requires_grad_(True)",
        "parameter.requires_grad_(False)",
        (f"{TESTS}test_they_do_what_they_do_under_ddp[thawed]",),
    ),
    PackageMutant(
        "a checkpoint of averaged weights is validated with those that are trained",
        "lightning.py",
        "if self._shards is None or _CURRENT in checkpoint else {}",
        "if self._shards is None else {}",
        (f"{TESTS}test_they_do_what_they_do_under_ddp[averaged]",),
    ),
    PackageMutant(
        "a swap for validation rounds the masters",
        "lightning.py",
        "swapped and any(flat.exact for flat in flats)",
        "False",
        (f"{TESTS}test_plans_that_round_or_lag_are_refused_and_a_late_average_begins_at_the_checkpoint",),
    ),
)
