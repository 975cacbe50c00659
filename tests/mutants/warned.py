"""Mistakes in warnings: of one batch on all ranks, float16 without a scaler, states of another rule."""

from __future__ import annotations

from .mutant import PackageMutant

MUTANTS = (
    PackageMutant(
        "every rank tells that all data ranks have one batch",
        "shard/gradients/input_digests.py",
        "        if self._rank == 0:",
        "        if True:",
        ("world/test_warnings.py::test_one_batch_on_all_data_ranks_is_told_once[2-1]",),
    ),
    PackageMutant(
        "data ranks that have different batches are told that they have one",
        "shard/gradients/input_digests.py",
        "self._steps + 1 if self._said and not total else 0",
        "self._steps + 1 if self._said else 0",
        ("world/test_warnings.py::test_what_differs_or_says_nothing_is_not_told[different batches]",),
    ),
    PackageMutant(
        "one batch on all data ranks is told in a program of two steps",
        "shard/gradients/input_digests.py",
        "_REPEATED_STEPS = 3",
        "_REPEATED_STEPS = 2",
        ("world/test_warnings.py::test_what_differs_or_says_nothing_is_not_told[two steps]",),
    ),
    PackageMutant(
        "a model that is called without any elements is told that ranks have one batch",
        "shard/gradients/input_digests.py",
        "self._said if self._elements else 0",
        "self._said",
        ("world/test_warnings.py::test_what_differs_or_says_nothing_is_not_told[no elements]",),
    ),
    PackageMutant(
        "ranks that share a sequence are told that they have one batch",
        "shard/gradients/input_digests.py",
        "mesh.ranks(DATA)[:: mesh.size((SEQUENCE,))]",
        "mesh.ranks(DATA)",
        ("world/test_warnings.py::test_ranks_of_other_axes_share_a_batch_by_right[True]",),
    ),
    PackageMutant(
        "each step of data ranks makes a digest of its inputs",
        "shard/gradients/input_digests.py",
        "        self._votes -= 1\n",
        "",
        ("world/test_warnings.py::test_digests_are_of_the_first_steps_alone",),
    ),
    PackageMutant(
        "a loss scaler does not count, and float16 is told of",
        "shard/step/read_gradients.py",
        "        self._unscaled = False\n        boundary.early",
        "        boundary.early",
        ("world/test_warnings.py::test_float16_without_a_scaler_is_told_once",),
    ),
    PackageMutant(
        "each rank tells of float16 without a scaler",
        "shard/step/read_gradients.py",
        "observe.current_rank() == 0 and any(",
        "any(",
        ("world/test_warnings.py::test_float16_without_a_scaler_is_told_once",),
    ),
    PackageMutant(
        "bfloat16 without a scaler is told of",
        "shard/step/read_gradients.py",
        "flat.dtype is torch.float16",
        "flat.dtype is not torch.float32",
        ("world/test_warnings.py::test_float16_without_a_scaler_is_told_once",),
    ),
    PackageMutant(
        "a checkpoint of Adam's is loaded into Lion without a word",
        "checkpoint/loading.py",
        "self._optimizer.check_rule(saved, self._names.groups)",
        "pass",
        ("world/test_warnings.py::test_a_state_of_another_rule_is_told_once[Lion-checkpoint]",),
    ),
    PackageMutant(
        "each rank tells of a state of another rule",
        "optim/workers/torch_states.py",
        "if theirs == ours or observe.current_rank() != 0:",
        "if theirs == ours:",
        ("world/test_warnings.py::test_a_state_of_another_rule_is_told_once",),
    ),
    PackageMutant(
        "options that are loaded with a state do not count for what it is to have",
        "optim/workers/torch_states.py",
        "[{**group, **loaded, ",
        "[{**group, ",
        ("world/test_warnings.py::test_a_state_of_the_same_rule_is_loaded_without_a_word",),
    ),
    PackageMutant(
        "a step ends in a KeyError after a state was loaded that it cannot go on from",
        "optim/workers/torch_optimizer.py",
        "if not goes_on:",
        "if False:",
        ("world/test_warnings.py::test_a_state_that_no_step_goes_on_from_is_refused",),
    ),
)
