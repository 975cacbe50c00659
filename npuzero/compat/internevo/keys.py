"""Every key of InternEvo's configurations, and what becomes of it.

Sources: InternLM/InternEvo, ``configs/*.py`` and ``configs/_base_``, ``internlm/initialize/launch.py`` (what is assumed
of keys that are absent, and what is asserted), ``internlm/solver/optimizer/hybrid_zero_optim.py`` and ``utils.py`` (the
scaler), ``internlm/solver/schedulers``, ``internlm/core/parallel/comm/isp.py``, ``doc/en/usage.md``.
"""

from __future__ import annotations

from typing import Any

import torch

from npuzero.compat.internevo.noted import OTHERS, OWN, several
from npuzero.compat.rules import (
    Decision,
    Rule,
    Rules,
    Unreadable,
    anything,
    flag,
    integer,
    number,
    one_of,
    optional,
    text,
)

HONOURED, TRANSLATED, NOTED, REFUSED = Decision.HONOURED, Decision.TRANSLATED, Decision.NOTED, Decision.REFUSED


def _fraction(value: Any) -> float:
    """Read a part of the layers: True is all, False none."""
    if isinstance(value, (bool, int, float)) and 0 <= value <= 1:
        return float(value)
    raise Unreadable("True, False, or a number from 0 to 1")


def _below_one(value: Any) -> float:
    found: float = number(above=0)(value)
    if found < 1:
        return found
    raise Unreadable("a number between 0 and 1")


def _decay(value: Any) -> float:
    """Read a beta of Adam."""
    found: float = number(least=0)(value)
    if found < 1:
        return found
    raise Unreadable("a number from 0, below 1")


def _pipeline_mode(value: Any) -> str:
    known = {"1f1b": "1f1b", "zbh1": "zero-bubble"}
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise Unreadable("1F1B or ZBH1; of zero-bubble schedules npuzero has ZB-H1, and no ZB-V")


_SIZES = "Of the ranks: the axes multiply to the world, and data ranks are what the others leave."
_EXPERTS = (
    "Experts are parameters like all others: the plan shards them, and each rank runs those that its tokens ask for. "
    "The numbers are the same; where experts do not fit a rank, take parallel.fsdp=dict(enable=True)."
)
_GATHERS = "Gathers run a unit ahead (Settings.prefetch), whatever the module."
_POOL = "What is gathered comes from buffers that are kept, always."

PARALLEL = (
    Rule(
        "parallel.zero1.size",
        TRANSLATED,
        "Ranks that share states: all data ranks from 0 down, none at 1, else groups of so many; under isp, of "
        "those that have the same weights.",
        "Plan.states",
        integer(),
        absent=-1,
    ),
    Rule("parallel.zero1.fsdp", TRANSLATED, "Parameters are sharded like states.", "Plan.parameters", flag),
    Rule("parallel.fsdp.enable", TRANSLATED, "Parameters are sharded over all data ranks.", "Plan.fsdp", flag),
    *several(NOTED, "parallel.fsdp", "The engine is npuzero's.", "mode", reads=one_of("v1", "v2")),
    *several(
        NOTED,
        "parallel.fsdp",
        "The model that you give says where it is: on the device, or on meta.",
        "init_method",
        reads=one_of("cuda", "meta", "cpu"),
    ),
    Rule("parallel.tensor.size", TRANSLATED, _SIZES, "mesh.tensor", integer(1), absent=1),
    Rule(
        "parallel.tensor.mode",
        TRANSLATED,
        "mtp, msp and fsp divide layers (parallel.tensor), isp sequences (parallel.sequence).",
        "parallel.mode",
        optional(one_of("mtp", "msp", "fsp", "isp")),
        absent="mtp",
    ),
    Rule("parallel.pipeline.size", TRANSLATED, _SIZES, "mesh.pipe", integer(1), absent=1),
    Rule(
        "parallel.pipeline.interleaved_overlap",
        TRANSLATED,
        "Activations between chunks of a pipeline travel beside computing.",
        "Settings.overlap_activations",
        flag,
        trap="InternEvo refuses chunks without it; here it moves no bit.",
    ),
    Rule("parallel.pipeline.mode", TRANSLATED, "The schedule.", "pipeline.schedule", _pipeline_mode),
    Rule("parallel.pipeline.zero_bubble", TRANSLATED, "True: the schedule ZB-H1.", "pipeline.zero_bubble", flag),
    *(
        Rule(f"parallel.pipeline.{key}", REFUSED, words, reads=flag, unless=(False,))
        for key, words in (
            ("use_zeropp", "npuzero has no ZeroPP: take mode='ZBH1', or model.num_chunks for an interleaved schedule."),
            ("decouple_grad", "It is ZeroPP's: take mode='ZBH1', which computes weights' gradients by themselves."),
        )
    ),
    Rule(
        "parallel.weight.size",
        TRANSLATED,
        "Ranks that share the parameters, under isp: the mesh's local axis.",
        "mesh.local_size",
        integer(),
        absent=1,
    ),
    Rule(
        "parallel.weight.overlap",
        TRANSLATED,
        "Gathers and reductions over weight ranks run beside computing.",
        "Settings.overlap_weights",
        flag,
        absent=False,
    ),
    *several(NOTED, "parallel.weight", _POOL, "memory_pool", reads=flag),
    *several(
        NOTED,
        "parallel.weight",
        _GATHERS,
        "launch_allgather_before",
        reads=one_of("wqkv", "attn", "wo", "w1"),
    ),
    *several(NOTED, "parallel.weight", _GATHERS, "forward_overlap_per", reads=one_of("module", "layer")),
    *several(
        NOTED, "parallel.weight", "A buffer is free once it is added.", "early_reduce_scatter_release", reads=flag
    ),
    *several(NOTED, "parallel.expert", _EXPERTS, "size", reads=integer()),
    *several(NOTED, "parallel.expert", _EXPERTS, "no_tp", reads=flag),
    *several(NOTED, "parallel.expert_weight", _EXPERTS, "size", reads=integer()),
    *several(
        NOTED, "parallel.expert_weight", _EXPERTS, "overlap", "memory_pool", "early_reduce_scatter_release", reads=flag
    ),
    *several(NOTED, "parallel.expert_weight", _EXPERTS, "launch_allgather_before", "forward_overlap_per", reads=text),
    *several(NOTED, "parallel.expert_zero1", _EXPERTS, "size", reads=integer()),
    *several(NOTED, "parallel.expert_zero1", _EXPERTS, "fsdp", reads=flag),
    Rule(
        "parallel.sequence_parallel",
        NOTED,
        "parallel.tensor.mode says it.",
        reads=flag,
        trap="InternEvo overwrites it: False under mtp, True under msp, fsp and isp.",
    ),
    Rule(
        "parallel.sequence_2D.enable",
        REFUSED,
        "npuzero has no context parallelism: take parallel.tensor=dict(size=head_size, mode='isp'), and leave the "
        "section out.",
        reads=flag,
        unless=(False,),
    ),
    *(
        Rule(f"parallel.sequence_2D.{key}", NOTED, "It is off.", reads=reads, switch="parallel.sequence_2D.enable")
        for key, reads in (
            ("head_size", integer(1)),
            ("context_size", integer(1)),
            ("window_size", integer(1)),
            ("device_placement_strategy.head_first", flag),
            ("device_placement_strategy.interleaved", flag),
        )
    ),
    *several(NOTED, "parallel", "It makes groups for tests of the network.", "nettest", reads=anything),
    *several(NOTED, "parallel", "Key and value heads are divided as the mode needs it.", "gqa", reads=flag),
    *several(REFUSED, "parallel", "Data ranks are what the other axes leave: drop it.", "data"),
)

_OVERLAP = "Settings.overlap: what travels beside computing."
HYBRID_ZERO_OPTIMIZER = (
    Rule(
        "hybrid_zero_optimizer.overlap_sync_grad",
        TRANSLATED,
        f"{_OVERLAP} Reductions beside backward.",
        "Settings.overlap_gradients",
        flag,
        absent=False,
        trap="InternEvo overlaps them on a pipeline's first stage alone.",
    ),
    Rule(
        "hybrid_zero_optimizer.zero_overlap_communication",
        TRANSLATED,
        "The older name of overlap_sync_grad.",
        "Settings.overlap_gradients",
        flag,
    ),
    Rule(
        "hybrid_zero_optimizer.overlap_sync_param",
        TRANSLATED,
        f"{_OVERLAP} Updated parameters beside the next forward.",
        "Settings.overlap_parameters",
        flag,
        absent=False,
    ),
    Rule(
        "hybrid_zero_optimizer.reduce_bucket_size",
        TRANSLATED,
        "Elements there, bytes here: times those of an element of a gradient.",
        "Settings.bucket_bytes",
        integer(1),
        trap="It counts elements, not bytes.",
    ),
    Rule(
        "hybrid_zero_optimizer.clip_grad_norm",
        HONOURED,
        "The norm is over all parameters; 0 clips nothing.",
        "clip_grad_norm_.max_norm",
        number(0),
        absent=0.0,
        trap="InternEvo clips each of its parameter groups by its own norm, clips nothing in float32, and without "
        "clipping neither divides gradients by the scale nor looks for inf; here all of it is done whatever the dtype.",
    ),
    *several(
        NOTED,
        "hybrid_zero_optimizer",
        "States are sharded by elements here, always.",
        "use_split_tensor_optim",
        reads=flag,
    ),
    *several(NOTED, "hybrid_zero_optimizer", "Units are gathered whole.", "all_gather_size", reads=integer(1)),
)

GRAD_SCALER = (
    Rule(
        "grad_scaler.fp16.initial_scale",
        HONOURED,
        "To begin with.",
        "LossScaler.init_scale",
        number(above=0),
        absent=2**16,
    ),
    Rule(
        "grad_scaler.fp16.min_scale",
        HONOURED,
        "The scale does not go below; None or 0: no bound.",
        "LossScaler.floor",
        optional(number(0)),
    ),
    Rule(
        "grad_scaler.fp16.growth_interval",
        HONOURED,
        "Steps without an overflow until it grows.",
        "LossScaler.growth_interval",
        integer(1),
        absent=1000,
    ),
    Rule(
        "grad_scaler.growth_factor", HONOURED, "It grows so.", "LossScaler.growth_factor", number(above=1), absent=2.0
    ),
    Rule("grad_scaler.backoff_factor", HONOURED, "It falls so.", "LossScaler.backoff_factor", _below_one, absent=0.5),
    Rule(
        "grad_scaler.max_scale",
        HONOURED,
        "The scale does not go above; None or 0: no bound.",
        "LossScaler.ceiling",
        optional(number(0)),
    ),
    Rule(
        "grad_scaler.hysteresis",
        HONOURED,
        "Overflows since it last grew, from which on it falls; 0 is 1.",
        "LossScaler.hysteresis",
        integer(0),
        absent=2,
        trap="InternEvo scales bfloat16's loss, too, counts a NaN as a good step of the scale, and an inf as an "
        "overflow; here both are overflows.",
    ),
)

ADAM = (
    Rule("adam.lr", HONOURED, "Before the schedule.", "AdamW.lr", number(0)),
    Rule("adam.adam_beta1", HONOURED, "The first of betas.", "AdamW.beta1", _decay),
    Rule(
        "adam.adam_beta2", HONOURED, "The second of betas, until beta2_scheduler's first step.", "AdamW.beta2", _decay
    ),
    *several(NOTED, "adam", "It counts where the file hands it to beta2_scheduler.c.", "adam_beta2_c", reads=number()),
    Rule("adam.adam_eps", HONOURED, "As it is.", "AdamW.eps", number(0)),
    Rule("adam.weight_decay", HONOURED, "Decoupled, on all parameters.", "AdamW.weight_decay", number(0)),
    *several(
        REFUSED,
        "adam",
        "InternEvo ignores it, and clips by hybrid_zero_optimizer.clip_grad_norm: drop it, and write it there if you "
        "mean it.",
        "clip_grad",
    ),
)

SCHEDULERS = (
    Rule("lr_scheduler.total_steps", HONOURED, "The cosine ends there.", "lr_scheduler.total_steps", integer(1)),
    Rule(
        "lr_scheduler.init_steps",
        HONOURED,
        "Steps at a rate of 0 in front.",
        "lr_scheduler.init_steps",
        integer(0),
        trap="Where no warmup follows them InternEvo's rate stays near 0; here the cosine begins at adam.lr.",
    ),
    Rule(
        "lr_scheduler.warmup_ratio",
        HONOURED,
        "Part of total_steps in which the rate rises.",
        "lr_scheduler.warmup_ratio",
        number(0, 1),
    ),
    Rule("lr_scheduler.eta_min", HONOURED, "The rate at the end.", "lr_scheduler.eta_min", number(0)),
    Rule(
        "lr_scheduler.last_epoch",
        REFUSED,
        "Leave it at -1: a checkpoint holds how far a schedule is; load its state_dict().",
        reads=integer(-1),
        unless=(-1,),
    ),
    Rule(
        "beta2_scheduler.init_beta2",
        HONOURED,
        "AdamW's beta2 from the first step of the schedule on, and at least so much.",
        "beta2_scheduler.init_beta2",
        _decay,
        trap="It replaces adam.adam_beta2 after the first step, also with c = 0.",
    ),
    Rule(
        "beta2_scheduler.c", HONOURED, "beta2 is at least 1 - step ** -c; 0: as it is.", "beta2_scheduler.c", number()
    ),
    Rule(
        "beta2_scheduler.cur_iter", HONOURED, "Steps already taken; -1: none.", "beta2_scheduler.cur_iter", integer(-1)
    ),
)

_DTYPES = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.half": "fp16",
    "torch.float32": "fp32",
    "torch.tf32": "tf32",
}


def _dtype(value: Any) -> str:
    """Read a dtype, which a file has as a text, and a program perhaps as it is."""
    return str(one_of(**_DTYPES)(str(value) if isinstance(value, torch.dtype) else value))


MODEL = (
    Rule(
        "model.dtype",
        TRANSLATED,
        "zero(precision=): parameters are converted, masters and sums of gradients are float32.",
        "zero.precision",
        _dtype,
        absent="fp16",
        trap="Absent it is torch.float16.",
    ),
    Rule(
        "model.checkpoint",
        TRANSLATED,
        "So many of the first blocks run again in backward (torch.utils.checkpoint).",
        "checkpoint.fraction",
        _fraction,
    ),
    Rule("model.num_chunks", TRANSLATED, "Stages of each rank of a pipeline.", "pipeline.chunks", integer(1)),
    Rule("model.*", NOTED, "The model is yours: an argument of its constructor."),
)

DATA = (
    Rule(
        "data.micro_num",
        TRANSLATED,
        "Micro-batches of a step: of a pipeline; else backward passes before step(), each of its loss divided by them.",
        "pipeline.micro_batches",
        integer(1),
        absent=1,
    ),
    Rule("data.gradient_accumulation", TRANSLATED, "Another name of micro_num.", "pipeline.micro_batches", integer(1)),
    Rule("data.micro_bsz", NOTED, "Rows of a micro-batch: your loader's.", reads=integer(1)),
    Rule("data.seq_len", NOTED, "Tokens of a row: your loader's.", reads=integer(1)),
    Rule(
        "data.packed_length",
        NOTED,
        "Your loader's.",
        reads=integer(1),
        trap="InternEvo ignores it, and takes seq_len * micro_bsz.",
    ),
    Rule(
        "data.rampup_batch_size",
        REFUSED,
        "Your loop is what grows a batch: divide losses by the micro-batches of the step, and leave it empty.",
        unless=("", None),
    ),
    Rule("data.skip_batches", NOTED, "Your loader's: leave these batches out."),
    Rule("data.total_steps", NOTED, "Your loop's; the schedule's is lr_scheduler.total_steps.", reads=integer(1)),
    *several(
        REFUSED,
        "data",
        "It is ZeroPP's: take parallel.pipeline.mode='ZBH1', or model.num_chunks.",
        "unit_schedule_size",
    ),
    Rule("data.*", NOTED, "The loader is yours."),
)

#: What becomes of each key.
RULES = Rules((*PARALLEL, *HYBRID_ZERO_OPTIMIZER, *GRAD_SCALER, *ADAM, *SCHEDULERS, *MODEL, *DATA, *OTHERS))

#: Of the sections in OWN the keys from which something follows: what is nearly one of them is taken for a slip.
COUNTING = {
    section: tuple(
        path.rpartition(".")[2]
        for path in (rule.path for rule in RULES if rule.decision is not NOTED)
        if path.startswith(f"{section}.")
    )
    for section in OWN
}
#: Sections that may be a number: then it is their ``size``.
SHORT = (
    "parallel.zero1",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.weight",
    "parallel.expert",
    "parallel.expert_weight",
    "parallel.expert_zero1",
)
