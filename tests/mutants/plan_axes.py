"""Mutants of what ``npuzero plan`` says of tensor, sequence and pod axes."""

from __future__ import annotations

from .mutant import PackageMutant

FILE = "parallel/test_cli_axes.py"
SENT = f"{FILE}::test_ranks_send_and_hold_what_plan_says"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "tensor ranks are taken to hold all of each parameter",
        "planner/model_work/axes.py",
        "    mark_parameters(module, build_tensor_division(module, None, ranks, MODES[mode].sliced))\n",
        "",
        (f"{SENT}[llama-mtp-zero1]",),
    ),
    PackageMutant(
        "fsp is taken for msp",
        "planner/model_work/axes.py",
        '*["all_gather"] * (sliced and mode.thrifty)',
        '*["all_gather"] * False',
        (f"{SENT}[tied-fsp-zero2]",),
    ),
    PackageMutant(
        "what the blocks get and give as slices is taken to be free",
        "planner/model_work/axes.py",
        'yield from (("", "all_gather", width) for _ in range(2))',
        "yield from ()",
        (f"{SENT}[qwen3-msp-zero3]",),
    ),
    PackageMutant(
        "logits that are gathered are forgotten",
        "planner/model_work/axes.py",
        '            if division.words[path].whole:\n                yield path, "all_gather"',
        '            if False:\n                yield path, "all_gather"',
        (f"{SENT}[llama-mtp-zero1]",),
    ),
    PackageMutant(
        "layers send as much in each step as in one micro-batch",
        "planner/model_work/axes.py",
        "Counter())[verb] += micro_batches * sent",
        "Counter())[verb] += sent",
        (f"{FILE}::test_key_heads_are_repeated_where_more_ranks_share_sequences",),
    ),
    PackageMutant(
        "key heads go once, however often ranks repeat them",
        "planner/model_work/axes.py",
        "repeated = keys * (ranks // math.gcd(keys, ranks))",
        "repeated = keys",
        (f"{FILE}::test_key_heads_are_repeated_where_more_ranks_share_sequences",),
    ),
    PackageMutant(
        "tensor ranks on a host are taken to have data of their own",
        "planner/model_work/axes.py",
        "math.gcd(max(1, host // tensor), rest)",
        "math.gcd(host, rest)",
        (f"{FILE}::test_plan_says_what_predict_says_of_the_divided_model",),
    ),
    PackageMutant(
        "bytes along an axis are those of the last collective alone",
        "plan/prediction/predict.py",
        "counter[axis, collective.verb] += times * nbytes",
        "counter[axis, collective.verb] = times * nbytes",
        ("world/test_axes_bytes.py::test_a_rank_sends_along_each_axis_what_was_foretold[2-2-zero3-bf16]",),
    ),
    PackageMutant(
        "norms of heads in a model that was counted without transformers go their own ways",
        "planner/models/modules.py",
        '"replicated_with_grad_allreduce"',
        '"replicate"',
        (f"{FILE}::test_plan_says_what_predict_says_of_the_divided_model",),
    ),
    PackageMutant(
        "ranks that share a sequence are taken to have one each",
        "planner/timing/estimate.py",
        "return mesh.data // mesh.sequence",
        "return mesh.data",
        ("planner/test_search_axes.py::test_each_size_of_each_axis_is_looked_at_beside_each_other",),
    ),
    PackageMutant(
        "the first rank of a pipeline is taken to have one micro-batch under way",
        "planner/timing/memory.py",
        "under_way = min(ranks - rank, run.micro_batches)",
        "under_way = 1",
        ("planner/test_activations_held.py::test_a_stage_of_a_pipeline_holds_the_micro_batches_under_way",),
    ),
    PackageMutant(
        "a pipeline is taken to wait longer than it does before any run is timed",
        "planner/timing/estimate.py",
        "return (run.micro_batches + mesh.pipe - 1) * each",
        "return (run.micro_batches + 2 * mesh.pipe) * each",
        ("planner/test_search_axes.py::test_what_fits_does_and_nothing_faster_is_passed_over",),
    ),
)
