"""Mutants of pipelines: edges, the runner, and the halves of a backward pass."""

from __future__ import annotations

from .mutant import PackageMutant

PIPE = "parallel/test_pipeline.py::"
FAULTS = "parallel/test_pipeline_faults.py::"
TRAINS = f"{PIPE}test_two_ranks_train_as_one_process_does"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "micro-batches' losses are summed, not averaged",
        "parallel/pipeline_parallel/runner.py",
        "loss = loss / self._schedule.micro_batches",
        "loss = loss / 1",
        (f"{TRAINS}[1f1b-1-2]",),
    ),
    PackageMutant(
        "the loss that is told is not averaged over data ranks",
        "parallel/pipeline_parallel/runner.py",
        "self._schedule.micro_batches * self._mesh.shape.data",
        "self._schedule.micro_batches",
        (f"{PIPE}test_a_rank_holds_and_sends_what_was_foretold", f"{PIPE}test_the_loss_is_the_mean_over_data_ranks"),
    ),
    PackageMutant(
        "gradients of frozen activations travel as well",
        "parallel/pipeline_parallel/send_recv.py",
        "return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)",
        "return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.is_floating_point())",
        (f"{PIPE}test_no_gradient_crosses_an_edge_that_needs_none",),
    ),
    PackageMutant(
        "a stage that has raised leaves its row",
        "parallel/pipeline_parallel/send_recv.py",
        "self._back.send(micro, self._zeros(self._returning) if gradients is None else gradients)",
        "self._back.send(micro, () if gradients is None else gradients)",
        (f"{FAULTS}test_a_stage_that_raises_is_named_on_every_rank_and_training_goes_on",),
    ),
    PackageMutant(
        "shapes are those of the last step",
        "parallel/pipeline_parallel/send_recv.py",
        "self.layout, self.closed = None, False",
        "self.closed = False",
        (f"{PIPE}test_batches_of_other_lengths_follow_each_other",),
    ),
    PackageMutant(
        "micro-batches of other shapes are sent",
        "parallel/pipeline_parallel/send_recv.py",
        "if outputs is not None and outputs.layout != self.layout:",
        "if outputs is not None and outputs.bare != self.layout.bare:",
        (f"{FAULTS}test_micro_batches_of_unequal_shapes",),
    ),
    PackageMutant(
        "parameters are gathered for each micro-batch under presets, too",
        "parallel/pipeline_parallel/keep_between.py",
        "return kept if all(",
        "return plan if all(",
        (f"{PIPE}test_presets_keep_parameters_between_micro_batches",),
    ),
    PackageMutant(
        "what a schedule calls alive is let go at once",
        "parallel/pipeline_parallel/runner.py",
        "len(self._live) + len(self._owed)",
        "len(self._live)",
        (f"{TRAINS}[zero-bubble-1-2]",),
    ),
    PackageMutant(
        "a weight that several nodes lead to gets some of its gradient twice",
        "parallel/pipeline_parallel/split_backward.py",
        "for node in group.nodes[1:] and group.nodes\n",
        "for node in group.nodes[:0]\n",
        ("parallel/test_split_backward.py::test_a_weight_used_twice",),
    ),
    PackageMutant(
        "tensor ranks that hold the same send all of it each",
        "parallel/pipeline_parallel/send_recv.py",
        "return flat.chunk(group.size)[group.rank]",
        "return flat",
        ("parallel/test_pipeline_models.py::test_tensor_ranks_send_a_part_each",),
    ),
)
