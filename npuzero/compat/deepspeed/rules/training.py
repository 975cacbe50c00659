"""Rules of what a step computes: batch, precision, optimizer, schedule."""

from __future__ import annotations

from typing import Any

import torch

from npuzero.compat.rules import (
    ABSENT,
    Decision,
    Rule,
    Unreadable,
    anything,
    flag,
    integer,
    list_of,
    number,
    one_of,
    optional,
    text,
)

H, T, N, R = Decision.HONOURED, Decision.TRANSLATED, Decision.NOTED, Decision.REFUSED

_DTYPES = {
    name: dtype
    for dtype, names in {
        torch.float32: ("fp32", "float32", "float", "torch.float32"),
        torch.bfloat16: ("bf16", "bfloat16", "torch.bfloat16"),
        torch.float16: ("fp16", "float16", "half", "torch.float16"),
    }.items()
    for name in names
}
dtype = one_of(**_DTYPES)


def rates(value: Any) -> Any:
    """Read a number, or a list of one for each group of parameters."""
    try:
        return list(list_of(number())(value)) if isinstance(value, (list, tuple)) else number()(value)
    except Unreadable:
        raise Unreadable("a number, or a list of one for each group of parameters") from None


def names(value: Any) -> Any:
    """Read "auto" or a list of names."""
    return value if value == "auto" else list_of(text)(value)


BATCH = (
    Rule(
        "train_batch_size",
        H,
        "Samples of a step, of all ranks together.",
        "Batch.total",
        optional(integer()),
        auto=None,
    ),
    Rule(
        "train_micro_batch_size_per_gpu",
        H,
        "Samples that a rank's forward sees.",
        "Batch.micro",
        optional(integer()),
    ),
    Rule(
        "gradient_accumulation_steps",
        H,
        "Passes between two updates; engine.backward() divides the loss by it.",
        "Batch.accumulation",
        optional(integer()),
        trap="Accumulating is not no_sync: where gradients are sharded each pass reduces its own, here as in "
        "DeepSpeed, and no byte is saved.",
    ),
    Rule(
        "managed_gradient_accumulation",
        H,
        "False: each engine.step() is an update, and the program counts passes.",
        "Engine.managed",
        flag,
    ),
    Rule(
        "gradient_clipping",
        T,
        "clip_grad_norm_ before each update; 0 leaves it out.",
        "Engine.clip",
        number(least=0),
        absent=1.0,
        trap="Absent it is 1.0 since 0.19.3, and was 0, no clipping, before: write the one that you mean.",
    ),
    Rule("dataloader_drop_last", H, "The loader drops what does not fill a batch.", "Loader.drop_last", flag),
)

_AVERAGED = "Gradients are scaled by one over the ranks before they are sent, whatever this says: the mean is the same."
GRADIENTS = (
    Rule(
        "communication_data_type",
        T,
        "In which dtype gradients travel: Precision(wires=).",
        "Precision.wires",
        optional(dtype),
    ),
    Rule("prescale_gradients", N, _AVERAGED, reads=flag),
    Rule("gradient_predivide_factor", N, _AVERAGED, reads=number(above=0)),
    Rule(
        "gradient_allreduce_op",
        R,
        "Gradients are averaged: multiply the loss by the number of ranks for their sum.",
        reads=one_of("mean", "sum"),
        unless=("mean",),
    ),
    Rule(
        "seq_parallel_communication_data_type",
        N,
        "Sequences are shared by npuzero.parallel.sequence, which sums in float32.",
        reads=optional(dtype),
    ),
    Rule("disable_allgather", N, "DeepSpeed 0.19.8 reads it and does nothing with it.", reads=flag),
    Rule("data_types.param_dtype", N, "It has to say what bf16 and fp16 say; checked.", reads=optional(dtype)),
    Rule(
        "data_types.grad_accum_dtype",
        R,
        "Gradients are summed in float32, which loses less: say fp32, or leave it out.",
        reads=optional(dtype),
        unless=(torch.float32, None),
        trap="Absent, DeepSpeed sums gradients of micro-batches in the parameters' 16 bits; npuzero in float32.",
    ),
    Rule("data_types.buffer_dtype", H, "Floating buffers are converted to it.", "Engine.buffers", optional(dtype)),
    Rule("data_types.keep_in_fp32_modules", N, "Buffers keep the dtype that they have.", reads=names),
)


def _bf16(section: str) -> tuple[Rule, ...]:
    """Return the rules of bf16, which has an older name, too."""
    on = f"{section}.enabled"
    masters = "Masters in bfloat16 are rounded stochastically here: say zero(precision='bf16-stochastic') in a program."
    return (
        Rule(
            on,
            T,
            "Parameters in bfloat16, masters and moments in float32.",
            "bf16.enabled",
            flag,
            trap='DeepSpeed takes "auto" for false where no other library has filled it in.'
            if section == "bf16"
            else "",
        ),
        Rule(
            f"{section}.check_grad_overflow",
            T,
            "An update from a gradient that is inf or NaN is skipped.",
            "bf16.check",
            flag,
            switch=on,
            absent=True if section == "bf16" else ABSENT,
            trap="Absent it is true since 0.19.3; before, such updates were made." if section == "bf16" else "",
        ),
        Rule(f"{section}.immediate_grad_update", N, "It moves no bit here.", reads=flag, switch=on),
        Rule(f"{section}.bf16_master_weights_and_grads", R, masters, reads=flag, unless=(False,), switch=on),
        Rule(
            f"{section}.bf16_optimizer_states",
            R,
            'Say zero(precision=Precision(torch.bfloat16, moments="bf16")) in a program of npuzero\'s own.',
            reads=flag,
            unless=(False,),
            switch=on,
        ),
    )


_FP16 = "fp16.enabled"
PRECISION = (
    *_bf16("bf16"),
    *_bf16("bfloat16"),
    Rule(
        _FP16,
        T,
        "Parameters in float16 under a loss scale, masters and moments in float32.",
        "fp16.enabled",
        flag,
        trap='DeepSpeed takes "auto" for false where no other library has filled it in.',
    ),
    Rule(
        "fp16.auto_cast", N, "Floating inputs of the model are converted, whatever this says.", reads=flag, switch=_FP16
    ),
    Rule(
        "fp16.loss_scale",
        T,
        "0: the scale moves; else it stays so.",
        "LossScaler.static",
        number(least=0),
        switch=_FP16,
        absent=0,
    ),
    Rule(
        "fp16.initial_scale_power",
        T,
        "The first scale is 2 to its power.",
        "LossScaler.power",
        integer(0, 127),
        switch=_FP16,
        absent=16,
    ),
    Rule(
        "fp16.loss_scale_window",
        T,
        "After so many steps without an overflow the scale doubles.",
        "LossScaler.growth_interval",
        integer(1),
        switch=_FP16,
        absent=1000,
    ),
    Rule(
        "fp16.hysteresis",
        H,
        "Overflows before the scale halves.",
        "LossScaler.hysteresis",
        integer(1),
        switch=_FP16,
        absent=2,
    ),
    Rule(
        "fp16.consecutive_hysteresis",
        H,
        "Whether a step without an overflow begins their count anew.",
        "LossScaler.consecutive_hysteresis",
        flag,
        switch=_FP16,
        absent=False,
    ),
    Rule(
        "fp16.min_loss_scale",
        T,
        "The scale goes no lower; an overflow there ends the run, as in DeepSpeed.",
        "LossScaler.floor",
        number(above=0),
        switch=_FP16,
        absent=1,
    ),
    Rule(
        "fp16.fp16_master_weights_and_grads",
        R,
        "Masters are float32: leave it out.",
        reads=flag,
        unless=(False,),
        switch=_FP16,
    ),
    Rule("torch_autocast.enabled", H, "engine(x) runs under torch.autocast.", "Autocast.enabled", flag),
    Rule(
        "torch_autocast.dtype",
        H,
        "The dtype of torch.autocast.",
        "Autocast.dtype",
        dtype,
        switch="torch_autocast.enabled",
    ),
    Rule(
        "torch_autocast.lower_precision_safe_modules",
        R,
        "Which operations are lowered is torch.autocast's choice: leave it out, or set bf16.enabled.",
        reads=optional(list_of(text)),
        unless=(None,),
        switch="torch_autocast.enabled",
    ),
)

_SCALE_OF_MEMORY = "Moments are float32 and rest where offload_optimizer says."
OPTIMIZER = (
    Rule(
        "optimizer.type",
        T,
        "npuzero's AdamW, Adam or Lion, or torch's class of the name over shards.",
        "Optimizer.type",
        text,
        trap="Adam means AdamW, with decoupled weight decay, unless adam_w_mode is false; and weight_decay absent is "
        "0.0 there, where torch's AdamW has 0.01.",
    ),
    Rule("optimizer.legacy_fusion", N, "It chooses among DeepSpeed's own kernels.", reads=flag),
    Rule("optimizer.params.lr", H, "As it is.", "optimizer.lr", number(least=0)),
    Rule("optimizer.params.betas", H, "As they are.", "optimizer.betas", list_of(number(least=0), 2)),
    Rule("optimizer.params.eps", H, "As it is.", "optimizer.eps", number(least=0)),
    Rule("optimizer.params.weight_decay", H, "As it is.", "optimizer.weight_decay", number(least=0)),
    Rule(
        "optimizer.params.adam_w_mode",
        T,
        "Whether weight decay is decoupled: AdamW, or Adam.",
        "Adam.decoupled",
        flag,
    ),
    Rule(
        "optimizer.params.torch_adam",
        T,
        "The same update; but defaults are those of torch's class.",
        "Adam.torch",
        flag,
        trap="With torch_adam weight_decay absent is torch's: 0.01 of AdamW.",
    ),
    Rule("optimizer.params.bias_correction", H, "As it is.", "optimizer.bias_correction", flag),
    Rule("optimizer.params.amsgrad", H, "As it is; DeepSpeed's own kernel refuses true.", "optimizer.amsgrad", flag),
    Rule("optimizer.params.fp32_optimizer_states", R, _SCALE_OF_MEMORY, reads=optional(flag), unless=(True, None)),
    Rule("optimizer.params.foreach", N, "npuzero has kernels of its own.", reads=optional(flag)),
    Rule("optimizer.params.fused", N, "npuzero has kernels of its own.", reads=optional(flag)),
    Rule("optimizer.params.set_grad_none", N, "Gradients take no memory after an update.", reads=flag),
    Rule("optimizer.params.adamw_mode", T, "As adam_w_mode.", "Adam.decoupled", flag),
    Rule(
        "optimizer.params.max_grad_norm",
        R,
        "It is no option of an optimizer: say gradient_clipping, as DeepSpeed asks as well.",
        reads=number(),
    ),
    Rule("zero_allow_untested_optimizer", N, "Each optimizer is tried on a few elements first.", reads=flag),
    Rule("zero_force_ds_cpu_optimizer", N, "What rests on the host is updated there by npuzero's kernels.", reads=flag),
)


def _schedule(name: str, reads: Any, words: str = "As it is.") -> Rule:
    return Rule(f"scheduler.params.{name}", H, words, f"lr_scheduler.{name}", reads)


_COUNT = integer(0)
_STEPS = integer(1)
SCHEDULER = (
    Rule("scheduler.type", H, "DeepSpeed's schedule of the name, or torch's.", "Scheduler.type", text),
    _schedule("last_batch_iteration", integer(-1)),
    _schedule("warmup_min_lr", rates),
    _schedule("warmup_max_lr", optional(rates)),
    _schedule("warmup_num_steps", _STEPS),
    _schedule("warmup_type", one_of("log", "linear"), "Absent it is log, not linear."),
    _schedule("total_num_steps", _STEPS),
    _schedule("warmup_min_ratio", number(least=0)),
    _schedule("cos_min_ratio", number(least=0)),
    _schedule("lr_range_test_min_lr", rates),
    _schedule("lr_range_test_step_size", _STEPS),
    _schedule("lr_range_test_step_rate", number()),
    _schedule("lr_range_test_staircase", flag),
    _schedule("cycle_min_lr", rates),
    _schedule("cycle_max_lr", rates),
    _schedule("decay_lr_rate", number()),
    _schedule("cycle_first_step_size", number(above=0)),
    _schedule("cycle_second_step_size", optional(number(least=0))),
    _schedule("cycle_first_stair_count", _COUNT),
    _schedule("cycle_second_stair_count", optional(_COUNT)),
    _schedule("decay_step_size", number(least=0)),
    _schedule("cycle_momentum", flag),
    _schedule("cycle_min_mom", rates),
    _schedule("cycle_max_mom", rates),
    _schedule("decay_mom_rate", number()),
)

TRAINING = (*BATCH, *GRADIENTS, *PRECISION, *OPTIMIZER, *SCHEDULER)


def open_rule(path: str, owner: str, field: str) -> Rule:
    """Return the rule of an option of a class of torch's, whose own checks it meets."""
    return Rule(path, H, "As it is, to torch's class.", f"{owner}.{field}", anything)
