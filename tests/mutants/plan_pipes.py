"""Mutants of what ``npuzero plan`` says of pipelines, and of the bridge to torch's."""

from __future__ import annotations

from .mutant import PackageMutant

FILE = "parallel/test_cli_pipeline.py"
SENT = f"{FILE}::test_ranks_hold_and_send_what_plan_says"
BRIDGE = "parallel/test_torch_stage.py::test_training_equals_plain_torch[2]"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "the emptiest rank of a pipeline stands for all",
        "cli/plan_options/pipes.py",
        "return max(found, key=held_bytes)",
        "return min(found, key=held_bytes)",
        (f"{SENT}[llama-1f1b-1-zero3]",),
    ),
    PackageMutant(
        "plan foretells what is kept between micro-batches, whatever memory there is",
        "planner/model_work/stages.py",
        "max(map(held_bytes, found.values())) <= BETWEEN_SHARE * memory_bytes",
        "True",
        (
            f"{FILE}::test_parameters_stay_unsharded_between_micro_batches_where_memory_allows",
            "planner/test_search_axes.py::test_a_pipeline_keeps_parameters_unsharded_where_it_would",
        ),
    ),
    PackageMutant(
        "what a size leaves over is on no rank of a pipeline",
        "planner/model_work/stages.py",
        'if "rest" in module._parameters:',
        "if False:",
        (f"{FILE}::test_a_size_alone_is_cut_as_well",),
    ),
    PackageMutant(
        "torch's schedules leave gradients undivided by the number of micro-batches",
        "parallel/pipeline_parallel/torch_stage.py",
        "1.0 / grad_scale_factor",
        "1.0",
        (BRIDGE,),
        slow=True,
    ),
)
