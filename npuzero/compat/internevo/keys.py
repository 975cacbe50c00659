"""One rule for each key of InternEvo's configurations.

Sources: InternLM/InternEvo, ``configs/*.py`` and ``configs/_base_``, ``internlm/initialize/launch.py`` (defaults of
missing keys, assertions), ``internlm/solver/optimizer/hybrid_zero_optim.py`` and ``utils.py`` (the scaler),
``internlm/solver/schedulers``, ``internlm/core/parallel/comm/isp.py``, ``doc/en/usage.md``.
"""

from __future__ import annotations

from typing import Any

import torch

from npuzero.compat.internevo.noted import OTHERS, OWN, rules_for_keys
from npuzero.compat.rules import (
    Decision,
    KeyRule,
    KeyRules,
    UnreadableValue,
    choice_reader,
    integer_reader,
    number_reader,
    optional_reader,
    read_anything,
    read_flag,
    read_text_value,
)

HONOURED, TRANSLATED, NOTED, REFUSED = Decision.HONOURED, Decision.TRANSLATED, Decision.NOTED, Decision.REFUSED


def _read_fraction(value: Any) -> float:
    """Read a fraction of the layers: True is all, False none."""
    if isinstance(value, (bool, int, float)) and 0 <= value <= 1:
        return float(value)
    raise UnreadableValue("True, False, or a number from 0 to 1")


def _read_below_one(value: Any) -> float:
    found: float = number_reader(above=0)(value)
    if found < 1:
        return found
    raise UnreadableValue("a number between 0 and 1")


def _read_beta(value: Any) -> float:
    """Read a beta of Adam."""
    found: float = number_reader(least=0)(value)
    if found < 1:
        return found
    raise UnreadableValue("a number from 0, below 1")


def _read_pipeline_mode(value: Any) -> str:
    known = {"1f1b": "1f1b", "zbh1": "zero-bubble"}
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise UnreadableValue("1F1B or ZBH1; of zero-bubble schedules npuzero has ZB-H1, and no ZB-V")


_SIZES = "Of the ranks: the axes multiply to the world, and data ranks are what the others leave."
_EXPERTS = (
    "Experts are parameters like all others: the plan shards them, and each rank runs those that its tokens ask for. "
    "The numbers are the same; where experts do not fit a rank, take parallel.fsdp=dict(enable=True)."
)
_GATHERS = "Gathers run a unit ahead (Settings.prefetch), whatever the module."
_POOL = "What is gathered comes from buffers that are kept, always."

PARALLEL = (
    KeyRule(
        "parallel.zero1.size",
        TRANSLATED,
        "Ranks that share states: all data ranks from 0 down, none at 1, else groups of so many; under isp, of "
        "those that have the same weights.",
        "Plan.states",
        integer_reader(),
        absent=-1,
    ),
    KeyRule("parallel.zero1.fsdp", TRANSLATED, "Parameters are sharded like states.", "Plan.parameters", read_flag),
    KeyRule("parallel.fsdp.enable", TRANSLATED, "Parameters are sharded over all data ranks.", "Plan.fsdp", read_flag),
    *rules_for_keys(NOTED, "parallel.fsdp", "The engine is npuzero's.", "mode", reads=choice_reader("v1", "v2")),
    *rules_for_keys(
        NOTED,
        "parallel.fsdp",
        "The model that you give says where it is: on the device, or on meta.",
        "init_method",
        reads=choice_reader("cuda", "meta", "cpu"),
    ),
    KeyRule("parallel.tensor.size", TRANSLATED, _SIZES, "mesh.tensor", integer_reader(1), absent=1),
    KeyRule(
        "parallel.tensor.mode",
        TRANSLATED,
        "mtp, msp and fsp divide layers (parallel.tensor), isp sequences (parallel.sequence).",
        "parallel.mode",
        optional_reader(choice_reader("mtp", "msp", "fsp", "isp")),
        absent="mtp",
    ),
    KeyRule("parallel.pipeline.size", TRANSLATED, _SIZES, "mesh.pipe", integer_reader(1), absent=1),
    KeyRule(
        "parallel.pipeline.interleaved_overlap",
        TRANSLATED,
        "Activations between chunks of a pipeline travel beside computing.",
        "Settings.overlap_activations",
        read_flag,
        trap="InternEvo refuses chunks without it; here it moves no bit.",
    ),
    KeyRule("parallel.pipeline.mode", TRANSLATED, "The schedule.", "pipeline.schedule", _read_pipeline_mode),
    KeyRule(
        "parallel.pipeline.zero_bubble", TRANSLATED, "True: the schedule ZB-H1.", "pipeline.zero_bubble", read_flag
    ),
    *(
        KeyRule(f"parallel.pipeline.{key}", REFUSED, words, reads=read_flag, unless=(False,))
        for key, words in (
            ("use_zeropp", "npuzero has no ZeroPP: take mode='ZBH1', or model.num_chunks for an interleaved schedule."),
            ("decouple_grad", "It is ZeroPP's: take mode='ZBH1', which computes weights' gradients by themselves."),
        )
    ),
    KeyRule(
        "parallel.weight.size",
        TRANSLATED,
        "Ranks that share the parameters, under isp: the mesh's local axis.",
        "mesh.local_size",
        integer_reader(),
        absent=1,
    ),
    KeyRule(
        "parallel.weight.overlap",
        TRANSLATED,
        "Gathers and reductions over weight ranks run beside computing.",
        "Settings.overlap_weights",
        read_flag,
        absent=False,
    ),
    *rules_for_keys(NOTED, "parallel.weight", _POOL, "memory_pool", reads=read_flag),
    *rules_for_keys(
        NOTED,
        "parallel.weight",
        _GATHERS,
        "launch_allgather_before",
        reads=choice_reader("wqkv", "attn", "wo", "w1"),
    ),
    *rules_for_keys(NOTED, "parallel.weight", _GATHERS, "forward_overlap_per", reads=choice_reader("module", "layer")),
    *rules_for_keys(
        NOTED, "parallel.weight", "A buffer is free once it is added.", "early_reduce_scatter_release", reads=read_flag
    ),
    *rules_for_keys(NOTED, "parallel.expert", _EXPERTS, "size", reads=integer_reader()),
    *rules_for_keys(NOTED, "parallel.expert", _EXPERTS, "no_tp", reads=read_flag),
    *rules_for_keys(NOTED, "parallel.expert_weight", _EXPERTS, "size", reads=integer_reader()),
    *rules_for_keys(
        NOTED,
        "parallel.expert_weight",
        _EXPERTS,
        "overlap",
        "memory_pool",
        "early_reduce_scatter_release",
        reads=read_flag,
    ),
    *rules_for_keys(
        NOTED,
        "parallel.expert_weight",
        _EXPERTS,
        "launch_allgather_before",
        "forward_overlap_per",
        reads=read_text_value,
    ),
    *rules_for_keys(NOTED, "parallel.expert_zero1", _EXPERTS, "size", reads=integer_reader()),
    *rules_for_keys(NOTED, "parallel.expert_zero1", _EXPERTS, "fsdp", reads=read_flag),
    KeyRule(
        "parallel.sequence_parallel",
        NOTED,
        "parallel.tensor.mode says it.",
        reads=read_flag,
        trap="InternEvo overwrites it: False under mtp, True under msp, fsp and isp.",
    ),
    KeyRule(
        "parallel.sequence_2D.enable",
        REFUSED,
        "npuzero has no context parallelism: take parallel.tensor=dict(size=head_size, mode='isp'), and leave the "
        "section out.",
        reads=read_flag,
        unless=(False,),
    ),
    *(
        KeyRule(f"parallel.sequence_2D.{key}", NOTED, "It is off.", reads=reads, switch="parallel.sequence_2D.enable")
        for key, reads in (
            ("head_size", integer_reader(1)),
            ("context_size", integer_reader(1)),
            ("window_size", integer_reader(1)),
            ("device_placement_strategy.head_first", read_flag),
            ("device_placement_strategy.interleaved", read_flag),
        )
    ),
    *rules_for_keys(NOTED, "parallel", "It makes groups for tests of the network.", "nettest", reads=read_anything),
    *rules_for_keys(NOTED, "parallel", "Key and value heads are divided as the mode needs it.", "gqa", reads=read_flag),
    *rules_for_keys(REFUSED, "parallel", "Data ranks are what the other axes leave: drop it.", "data"),
)

_OVERLAP = "Settings.overlap: what travels beside computing."
HYBRID_ZERO_OPTIMIZER = (
    KeyRule(
        "hybrid_zero_optimizer.overlap_sync_grad",
        TRANSLATED,
        f"{_OVERLAP} Reductions beside backward.",
        "Settings.overlap_gradients",
        read_flag,
        absent=False,
        trap="InternEvo overlaps them on a pipeline's first stage alone.",
    ),
    KeyRule(
        "hybrid_zero_optimizer.zero_overlap_communication",
        TRANSLATED,
        "The older name of overlap_sync_grad.",
        "Settings.overlap_gradients",
        read_flag,
    ),
    KeyRule(
        "hybrid_zero_optimizer.overlap_sync_param",
        TRANSLATED,
        f"{_OVERLAP} Updated parameters beside the next forward.",
        "Settings.overlap_parameters",
        read_flag,
        absent=False,
    ),
    KeyRule(
        "hybrid_zero_optimizer.reduce_bucket_size",
        TRANSLATED,
        "Elements there, bytes here: times those of an element of a gradient.",
        "Settings.bucket_bytes",
        integer_reader(1),
        trap="It counts elements, not bytes.",
    ),
    KeyRule(
        "hybrid_zero_optimizer.clip_grad_norm",
        HONOURED,
        "The norm is over all parameters; 0 clips nothing.",
        "clip_grad_norm_.max_norm",
        number_reader(0),
        absent=0.0,
        trap="InternEvo clips each of its parameter groups by its own norm, clips nothing in float32, and without "
        "clipping neither divides gradients by the scale nor looks for inf; here all of it is done whatever the dtype.",
    ),
    *rules_for_keys(
        NOTED,
        "hybrid_zero_optimizer",
        "States are sharded by elements here, always.",
        "use_split_tensor_optim",
        reads=read_flag,
    ),
    *rules_for_keys(
        NOTED, "hybrid_zero_optimizer", "Units are gathered whole.", "all_gather_size", reads=integer_reader(1)
    ),
)

GRAD_SCALER = (
    KeyRule(
        "grad_scaler.fp16.initial_scale",
        HONOURED,
        "To begin with.",
        "LossScaler.init_scale",
        number_reader(above=0),
        absent=2**16,
    ),
    KeyRule(
        "grad_scaler.fp16.min_scale",
        HONOURED,
        "The scale does not go below; None or 0: no bound.",
        "LossScaler.floor",
        optional_reader(number_reader(0)),
    ),
    KeyRule(
        "grad_scaler.fp16.growth_interval",
        HONOURED,
        "Steps without an overflow until it grows.",
        "LossScaler.growth_interval",
        integer_reader(1),
        absent=1000,
    ),
    KeyRule(
        "grad_scaler.growth_factor",
        HONOURED,
        "It grows so.",
        "LossScaler.growth_factor",
        number_reader(above=1),
        absent=2.0,
    ),
    KeyRule(
        "grad_scaler.backoff_factor", HONOURED, "It falls so.", "LossScaler.backoff_factor", _read_below_one, absent=0.5
    ),
    KeyRule(
        "grad_scaler.max_scale",
        HONOURED,
        "The scale does not go above; None or 0: no bound.",
        "LossScaler.ceiling",
        optional_reader(number_reader(0)),
    ),
    KeyRule(
        "grad_scaler.hysteresis",
        HONOURED,
        "Overflows since it last grew, from which on it falls; 0 is 1.",
        "LossScaler.hysteresis",
        integer_reader(0),
        absent=2,
        trap="InternEvo scales bfloat16's loss, too, counts a NaN as a good step of the scale, and an inf as an "
        "overflow; here both are overflows.",
    ),
)

ADAM = (
    KeyRule("adam.lr", HONOURED, "Before the schedule.", "AdamW.lr", number_reader(0)),
    KeyRule("adam.adam_beta1", HONOURED, "The first of betas.", "AdamW.beta1", _read_beta),
    KeyRule(
        "adam.adam_beta2",
        HONOURED,
        "The second of betas, until beta2_scheduler's first step.",
        "AdamW.beta2",
        _read_beta,
    ),
    *rules_for_keys(
        NOTED, "adam", "It counts where the file hands it to beta2_scheduler.c.", "adam_beta2_c", reads=number_reader()
    ),
    KeyRule("adam.adam_eps", HONOURED, "As it is.", "AdamW.eps", number_reader(0)),
    KeyRule("adam.weight_decay", HONOURED, "Decoupled, on all parameters.", "AdamW.weight_decay", number_reader(0)),
    *rules_for_keys(
        REFUSED,
        "adam",
        "InternEvo ignores it, and clips by hybrid_zero_optimizer.clip_grad_norm: drop it, and write it there if you "
        "mean it.",
        "clip_grad",
    ),
)

SCHEDULERS = (
    KeyRule(
        "lr_scheduler.total_steps", HONOURED, "The cosine ends there.", "lr_scheduler.total_steps", integer_reader(1)
    ),
    KeyRule(
        "lr_scheduler.init_steps",
        HONOURED,
        "Steps at a rate of 0 in front.",
        "lr_scheduler.init_steps",
        integer_reader(0),
        trap="Where no warmup follows them InternEvo's rate stays near 0; here the cosine begins at adam.lr.",
    ),
    KeyRule(
        "lr_scheduler.warmup_ratio",
        HONOURED,
        "Part of total_steps in which the rate rises.",
        "lr_scheduler.warmup_ratio",
        number_reader(0, 1),
    ),
    KeyRule("lr_scheduler.eta_min", HONOURED, "The rate at the end.", "lr_scheduler.eta_min", number_reader(0)),
    KeyRule(
        "lr_scheduler.last_epoch",
        REFUSED,
        "Leave it at -1: a checkpoint holds how far a schedule is; load its state_dict().",
        reads=integer_reader(-1),
        unless=(-1,),
    ),
    KeyRule(
        "beta2_scheduler.init_beta2",
        HONOURED,
        "AdamW's beta2 from the first step of the schedule on, and at least so much.",
        "beta2_scheduler.init_beta2",
        _read_beta,
        trap="It replaces adam.adam_beta2 after the first step, also with c = 0.",
    ),
    KeyRule(
        "beta2_scheduler.c",
        HONOURED,
        "beta2 is at least 1 - step ** -c; 0: as it is.",
        "beta2_scheduler.c",
        number_reader(),
    ),
    KeyRule(
        "beta2_scheduler.cur_iter",
        HONOURED,
        "Steps already taken; -1: none.",
        "beta2_scheduler.cur_iter",
        integer_reader(-1),
    ),
)

_DTYPES = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.half": "fp16",
    "torch.float32": "fp32",
    "torch.tf32": "tf32",
}


def _read_dtype(value: Any) -> str:
    """Read a dtype: a text in a file, possibly a ``torch.dtype`` in a program."""
    return str(choice_reader(**_DTYPES)(str(value) if isinstance(value, torch.dtype) else value))


MODEL = (
    KeyRule(
        "model.dtype",
        TRANSLATED,
        "zero(precision=): parameters are converted, masters and sums of gradients are float32.",
        "zero.precision",
        _read_dtype,
        absent="fp16",
        trap="Absent it is torch.float16.",
    ),
    KeyRule(
        "model.checkpoint",
        TRANSLATED,
        "So many of the first blocks run again in backward (torch.utils.checkpoint).",
        "checkpoint.fraction",
        _read_fraction,
    ),
    KeyRule("model.num_chunks", TRANSLATED, "Stages of each rank of a pipeline.", "pipeline.chunks", integer_reader(1)),
    KeyRule("model.*", NOTED, "The model is yours: an argument of its constructor."),
)

DATA = (
    KeyRule(
        "data.micro_num",
        TRANSLATED,
        "Micro-batches of a step: of a pipeline; else backward passes before step(), each of its loss divided by them.",
        "pipeline.micro_batches",
        integer_reader(1),
        absent=1,
    ),
    KeyRule(
        "data.gradient_accumulation",
        TRANSLATED,
        "Another name of micro_num.",
        "pipeline.micro_batches",
        integer_reader(1),
    ),
    KeyRule("data.micro_bsz", NOTED, "Rows of a micro-batch: your loader's.", reads=integer_reader(1)),
    KeyRule("data.seq_len", NOTED, "Tokens of a row: your loader's.", reads=integer_reader(1)),
    KeyRule(
        "data.packed_length",
        NOTED,
        "Your loader's.",
        reads=integer_reader(1),
        trap="InternEvo ignores it, and takes seq_len * micro_bsz.",
    ),
    KeyRule(
        "data.rampup_batch_size",
        REFUSED,
        "Your loop is what grows a batch: divide losses by the micro-batches of the step, and leave it empty.",
        unless=("", None),
    ),
    KeyRule("data.skip_batches", NOTED, "Your loader's: leave these batches out."),
    KeyRule(
        "data.total_steps", NOTED, "Your loop's; the schedule's is lr_scheduler.total_steps.", reads=integer_reader(1)
    ),
    *rules_for_keys(
        REFUSED,
        "data",
        "It is ZeroPP's: take parallel.pipeline.mode='ZBH1', or model.num_chunks.",
        "unit_schedule_size",
    ),
    KeyRule("data.*", NOTED, "The loader is yours."),
)

#: The rule of each key.
RULES = KeyRules((*PARALLEL, *HYBRID_ZERO_OPTIMIZER, *GRAD_SCALER, *ADAM, *SCHEDULERS, *MODEL, *DATA, *OTHERS))

#: Of the sections in OWN the keys that have an effect; a key with a similar name is refused as misspelt.
COUNTING = {
    section: tuple(
        path.rpartition(".")[2]
        for path in (rule.path for rule in RULES if rule.decision is not NOTED)
        if path.startswith(f"{section}.")
    )
    for section in OWN
}
#: Sections that may be a number, which is then their ``size``.
SHORT = (
    "parallel.zero1",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.weight",
    "parallel.expert",
    "parallel.expert_weight",
    "parallel.expert_zero1",
)
