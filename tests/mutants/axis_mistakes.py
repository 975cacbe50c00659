"""Mutants of what is said of axes that nothing uses, and of ranks that are fed different batches."""

from __future__ import annotations

from .mutant import PackageMutant

TESTS = "parallel/test_axis_mistakes.py"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "tensor ranks all train the whole model, and nobody is told",
        "shard/build.py",
        "check_tensor_axis(shape.tensor, staged or uses_tensor_axis(specs))",
        "check_tensor_axis(shape.tensor, True)",
        (f"{TESTS}::test_a_tensor_axis_without_divided_layers[2]",),
    ),
    PackageMutant(
        "each stage of a pipeline trains the whole model, and nobody is told",
        "shard/layout/check_ranks_agree.py",
        "if len(stages) > 1), None)",
        "if len(stages) > 2), None)",
        (f"{TESTS}::test_a_whole_model_on_every_stage[1]",),
    ),
    PackageMutant(
        "divided layers are trained as if all ranks were data ranks, where zero() is given no mesh",
        "shard/layout/mesh_axes.py",
        "    if not bound:\n        return given\n",
        "    return given\n",
        (f"{TESTS}::test_the_mesh_that_layers_were_divided_over_is_taken[nothing]",),
    ),
    PackageMutant(
        "layers of one's own that are cut are trained without their mesh",
        "shard/layout/mesh_axes.py",
        "if axis is not None and ranks.size > 1:",
        "if axis is not None and ranks.size > 99:",
        (f"{TESTS}::test_layers_of_ones_own_without_a_mesh",),
    ),
    PackageMutant(
        "tensor ranks are fed different batches, and nobody is told",
        "shard/step/forward_backward.py",
        "self._boundary.accord.inputs.note(inputs)",
        "self._boundary.accord.inputs.note(None)",
        (f"{TESTS}::test_tensor_ranks_with_different_batches[2-3]",),
    ),
    PackageMutant(
        "two groups with the same two batches, the other way round, are not told",
        "shard/gradients/input_digests.py",
        'f"{self._first} {self._said}"',
        'f"{self._said}"',
        (f"{TESTS}::test_batches_the_other_way_round_in_another_group",),
    ),
    PackageMutant(
        "batches whose samples are in another order count as the same",
        "shard/gradients/input_digests.py",
        "digest_integers(sample.view(_INTEGERS.get(sample.element_size(), torch.int64)))",
        "digest_integers(sample.view(_INTEGERS.get(sample.element_size(), torch.int64)).sort().values)",
        (f"{TESTS}::test_whatever_inputs_are[order]",),
    ),
    PackageMutant(
        "a program that divides the tokens itself is refused",
        "shard/layout/mesh_axes.py",
        "if shape.pipe == 1 and (ours or not divides) else ()",
        "if shape.pipe == 1 else ()",
        (f"{TESTS}::test_a_program_may_divide_the_tokens_itself",),
    ),
    PackageMutant(
        "ranks of one pipeline are fed different batches, and nobody is told",
        "parallel/pipeline_parallel/runner.py",
        "self._inputs.note(batch)",
        "self._inputs.note(None)",
        (f"{TESTS}::test_stages_with_different_batches[inputs-2]",),
    ),
    PackageMutant(
        "a checkpoint keeps one tensor rank's view of what has drifted apart",
        "shard/parameters/check_repeated.py",
        "if theirs[name] != said[first].get(name)",
        "if name not in said[first]",
        (f"{TESTS}::test_ranks_that_have_drifted_apart_are_told_as_they_save[1-save]",),
    ),
    PackageMutant(
        "a stage that raises on one data rank alone is told as ranks that wait for each other",
        "parallel/pipeline_parallel/runner.py",
        "set_failure(self._cause_in_words())",
        'set_failure("")',
        ("parallel/test_pipeline_faults.py::test_one_data_rank_alone_raises",),
    ),
    PackageMutant(
        "an adapter that comes into a divided layer is whole on each rank",
        "shard/layout/mesh_axes.py",
        "if _DIVIDED not in vars(module):",
        "if _DIVIDED in vars(module):",
        (f"{TESTS}::test_adapters_in_divided_layers[after]",),
    ),
    PackageMutant(
        "a zero-bubble pipeline reads sharded parameters where checkpointing runs a block again",
        "shard/step/forward_backward.py",
        "units = [unit for unit in self._parts[number].units if unit.guarded]",
        "units = list[Unit]()",
        ("parallel/test_pipeline_checkpointing.py::test_zero_bubble_trains_as_1f1b[zero3-False-False]",),
    ),
)
