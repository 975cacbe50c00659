"""Rules of the keys that decide the numbers of a step: batch, precision, optimizer, schedule."""

from __future__ import annotations

from typing import Any

import torch

from npuzero.compat.rules import (
    ABSENT,
    Decision,
    KeyRule,
    UnreadableValue,
    choice_reader,
    integer_reader,
    list_reader,
    number_reader,
    optional_reader,
    read_anything,
    read_flag,
    read_text_value,
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
dtype = choice_reader(**_DTYPES)


def read_rates(value: Any) -> Any:
    """Read a number, or a list with one number for each parameter group."""
    try:
        return list(list_reader(number_reader())(value)) if isinstance(value, (list, tuple)) else number_reader()(value)
    except UnreadableValue:
        raise UnreadableValue("a number, or a list of one for each group of parameters") from None


def read_names(value: Any) -> Any:
    """Read "auto" or a list of names."""
    return value if value == "auto" else list_reader(read_text_value)(value)


BATCH = (
    KeyRule(
        "train_batch_size",
        H,
        "Samples of a step, of all ranks together.",
        "Batch.total",
        optional_reader(integer_reader()),
        auto=None,
    ),
    KeyRule(
        "train_micro_batch_size_per_gpu",
        H,
        "Samples that a rank's forward sees.",
        "Batch.micro",
        optional_reader(integer_reader()),
    ),
    KeyRule(
        "gradient_accumulation_steps",
        H,
        "Passes between two updates; engine.backward() divides the loss by it.",
        "Batch.accumulation",
        optional_reader(integer_reader()),
        trap="Accumulating is not no_sync: where gradients are sharded each pass reduces its own, here as in "
        "DeepSpeed, and no byte is saved.",
    ),
    KeyRule(
        "managed_gradient_accumulation",
        H,
        "False: each engine.step() is an update, and the program counts passes.",
        "Engine.managed",
        read_flag,
    ),
    KeyRule(
        "gradient_clipping",
        T,
        "clip_grad_norm_ before each update; 0 leaves it out.",
        "Engine.clip",
        number_reader(least=0),
        absent=1.0,
        trap="Absent it is 1.0 since 0.19.3, and was 0, no clipping, before: write the one that you mean.",
    ),
    KeyRule("dataloader_drop_last", H, "The loader drops what does not fill a batch.", "Loader.drop_last", read_flag),
)

_AVERAGED = "Gradients are scaled by one over the ranks before they are sent, whatever this says: the mean is the same."
GRADIENTS = (
    KeyRule(
        "communication_data_type",
        T,
        "In which dtype gradients travel: Precision(wires=).",
        "Precision.wires",
        optional_reader(dtype),
    ),
    KeyRule("prescale_gradients", N, _AVERAGED, reads=read_flag),
    KeyRule("gradient_predivide_factor", N, _AVERAGED, reads=number_reader(above=0)),
    KeyRule(
        "gradient_allreduce_op",
        R,
        "Gradients are averaged: multiply the loss by the number of ranks for their sum.",
        reads=choice_reader("mean", "sum"),
        unless=("mean",),
    ),
    KeyRule(
        "seq_parallel_communication_data_type",
        N,
        "Sequences are shared by npuzero.parallel.sequence, which sums in float32.",
        reads=optional_reader(dtype),
    ),
    KeyRule("disable_allgather", N, "DeepSpeed 0.19.8 reads it and does nothing with it.", reads=read_flag),
    KeyRule(
        "data_types.param_dtype", N, "It has to say what bf16 and fp16 say; checked.", reads=optional_reader(dtype)
    ),
    KeyRule(
        "data_types.grad_accum_dtype",
        R,
        "Gradients are summed in float32, which loses less: say fp32, or leave it out.",
        reads=optional_reader(dtype),
        unless=(torch.float32, None),
        trap="Absent, DeepSpeed sums gradients of micro-batches in the parameters' 16 bits; npuzero in float32.",
    ),
    KeyRule(
        "data_types.buffer_dtype", H, "Floating buffers are converted to it.", "Engine.buffers", optional_reader(dtype)
    ),
    KeyRule("data_types.keep_in_fp32_modules", N, "Buffers keep the dtype that they have.", reads=read_names),
)


def _bf16_rules(section: str) -> tuple[KeyRule, ...]:
    """Return the rules of bf16; ``bfloat16`` is its older name."""
    on = f"{section}.enabled"
    masters = "Masters in bfloat16 are rounded stochastically here: say zero(precision='bf16-stochastic') in a program."
    return (
        KeyRule(
            on,
            T,
            "Parameters in bfloat16, masters and moments in float32.",
            "bf16.enabled",
            read_flag,
            trap='DeepSpeed takes "auto" for false where no other library has filled it in.'
            if section == "bf16"
            else "",
        ),
        KeyRule(
            f"{section}.check_grad_overflow",
            T,
            "An update from a gradient that is inf or NaN is skipped.",
            "bf16.check",
            read_flag,
            switch=on,
            absent=True if section == "bf16" else ABSENT,
            trap="Absent it is true since 0.19.3; before, such updates were made." if section == "bf16" else "",
        ),
        KeyRule(f"{section}.immediate_grad_update", N, "It moves no bit here.", reads=read_flag, switch=on),
        KeyRule(f"{section}.bf16_master_weights_and_grads", R, masters, reads=read_flag, unless=(False,), switch=on),
        KeyRule(
            f"{section}.bf16_optimizer_states",
            R,
            'Say zero(precision=Precision(torch.bfloat16, moments="bf16")) in a program of npuzero\'s own.',
            reads=read_flag,
            unless=(False,),
            switch=on,
        ),
    )


_FP16 = "fp16.enabled"
PRECISION = (
    *_bf16_rules("bf16"),
    *_bf16_rules("bfloat16"),
    KeyRule(
        _FP16,
        T,
        "Parameters in float16 under a loss scale, masters and moments in float32.",
        "fp16.enabled",
        read_flag,
        trap='DeepSpeed takes "auto" for false where no other library has filled it in.',
    ),
    KeyRule(
        "fp16.auto_cast",
        N,
        "Floating inputs of the model are converted, whatever this says.",
        reads=read_flag,
        switch=_FP16,
    ),
    KeyRule(
        "fp16.loss_scale",
        T,
        "0: the scale moves; else it stays so.",
        "LossScaler.static",
        number_reader(least=0),
        switch=_FP16,
        absent=0,
    ),
    KeyRule(
        "fp16.initial_scale_power",
        T,
        "The first scale is 2 to its power.",
        "LossScaler.power",
        integer_reader(0, 127),
        switch=_FP16,
        absent=16,
    ),
    KeyRule(
        "fp16.loss_scale_window",
        T,
        "After so many steps without an overflow the scale doubles.",
        "LossScaler.growth_interval",
        integer_reader(1),
        switch=_FP16,
        absent=1000,
    ),
    KeyRule(
        "fp16.hysteresis",
        H,
        "Overflows before the scale halves.",
        "LossScaler.hysteresis",
        integer_reader(1),
        switch=_FP16,
        absent=2,
    ),
    KeyRule(
        "fp16.consecutive_hysteresis",
        H,
        "Whether a step without an overflow begins their count anew.",
        "LossScaler.consecutive_hysteresis",
        read_flag,
        switch=_FP16,
        absent=False,
    ),
    KeyRule(
        "fp16.min_loss_scale",
        T,
        "The scale goes no lower; an overflow there ends the run, as in DeepSpeed.",
        "LossScaler.floor",
        number_reader(above=0),
        switch=_FP16,
        absent=1,
    ),
    KeyRule(
        "fp16.fp16_master_weights_and_grads",
        R,
        "Masters are float32: leave it out.",
        reads=read_flag,
        unless=(False,),
        switch=_FP16,
    ),
    KeyRule("torch_autocast.enabled", H, "engine(x) runs under torch.autocast.", "Autocast.enabled", read_flag),
    KeyRule(
        "torch_autocast.dtype",
        H,
        "The dtype of torch.autocast.",
        "Autocast.dtype",
        dtype,
        switch="torch_autocast.enabled",
    ),
    KeyRule(
        "torch_autocast.lower_precision_safe_modules",
        R,
        "Which operations are lowered is torch.autocast's choice: leave it out, or set bf16.enabled.",
        reads=optional_reader(list_reader(read_text_value)),
        unless=(None,),
        switch="torch_autocast.enabled",
    ),
)

_SCALE_OF_MEMORY = "Moments are float32 and rest where offload_optimizer says."
OPTIMIZER = (
    KeyRule(
        "optimizer.type",
        T,
        "npuzero's AdamW, Adam or Lion, or torch's class of the name over shards.",
        "Optimizer.type",
        read_text_value,
        trap="Adam means AdamW, with decoupled weight decay, unless adam_w_mode is false; and weight_decay absent is "
        "0.0 there, where torch's AdamW has 0.01.",
    ),
    KeyRule("optimizer.legacy_fusion", N, "It chooses among DeepSpeed's own kernels.", reads=read_flag),
    KeyRule("optimizer.params.lr", H, "As it is.", "optimizer.lr", number_reader(least=0)),
    KeyRule("optimizer.params.betas", H, "As they are.", "optimizer.betas", list_reader(number_reader(least=0), 2)),
    KeyRule("optimizer.params.eps", H, "As it is.", "optimizer.eps", number_reader(least=0)),
    KeyRule("optimizer.params.weight_decay", H, "As it is.", "optimizer.weight_decay", number_reader(least=0)),
    KeyRule(
        "optimizer.params.adam_w_mode",
        T,
        "Whether weight decay is decoupled: AdamW, or Adam.",
        "Adam.decoupled",
        read_flag,
    ),
    KeyRule(
        "optimizer.params.torch_adam",
        T,
        "The same update; but defaults are those of torch's class.",
        "Adam.torch",
        read_flag,
        trap="With torch_adam weight_decay absent is torch's: 0.01 of AdamW.",
    ),
    KeyRule("optimizer.params.bias_correction", H, "As it is.", "optimizer.bias_correction", read_flag),
    KeyRule(
        "optimizer.params.amsgrad", H, "As it is; DeepSpeed's own kernel refuses true.", "optimizer.amsgrad", read_flag
    ),
    KeyRule(
        "optimizer.params.fp32_optimizer_states",
        R,
        _SCALE_OF_MEMORY,
        reads=optional_reader(read_flag),
        unless=(True, None),
    ),
    KeyRule("optimizer.params.foreach", N, "npuzero has kernels of its own.", reads=optional_reader(read_flag)),
    KeyRule("optimizer.params.fused", N, "npuzero has kernels of its own.", reads=optional_reader(read_flag)),
    KeyRule("optimizer.params.set_grad_none", N, "Gradients take no memory after an update.", reads=read_flag),
    KeyRule("optimizer.params.adamw_mode", T, "As adam_w_mode.", "Adam.decoupled", read_flag),
    KeyRule(
        "optimizer.params.max_grad_norm",
        R,
        "It is no option of an optimizer: say gradient_clipping, as DeepSpeed asks as well.",
        reads=number_reader(),
    ),
    KeyRule("zero_allow_untested_optimizer", N, "Each optimizer is tried on a few elements first.", reads=read_flag),
    KeyRule(
        "zero_force_ds_cpu_optimizer",
        N,
        "What rests on the host is updated there by npuzero's kernels.",
        reads=read_flag,
    ),
)


def _schedule_rule(name: str, reads: Any, words: str = "As it is.") -> KeyRule:
    return KeyRule(f"scheduler.params.{name}", H, words, f"lr_scheduler.{name}", reads)


_COUNT = integer_reader(-1)
_STEPS = integer_reader(1)
SCHEDULER = (
    KeyRule("scheduler.type", H, "DeepSpeed's schedule of the name, or torch's.", "Scheduler.type", read_text_value),
    _schedule_rule("last_batch_iteration", integer_reader(-1)),
    _schedule_rule("warmup_min_lr", read_rates),
    _schedule_rule("warmup_max_lr", optional_reader(read_rates)),
    _schedule_rule("warmup_num_steps", _STEPS),
    _schedule_rule("warmup_type", choice_reader("log", "linear"), "Absent it is log, not linear."),
    _schedule_rule("total_num_steps", _STEPS),
    _schedule_rule("warmup_min_ratio", number_reader(least=0)),
    _schedule_rule("cos_min_ratio", number_reader(least=0)),
    _schedule_rule("lr_range_test_min_lr", read_rates),
    _schedule_rule("lr_range_test_step_size", _STEPS),
    _schedule_rule("lr_range_test_step_rate", number_reader()),
    _schedule_rule("lr_range_test_staircase", read_flag),
    _schedule_rule("cycle_min_lr", read_rates),
    _schedule_rule("cycle_max_lr", read_rates),
    _schedule_rule("decay_lr_rate", number_reader()),
    _schedule_rule("cycle_first_step_size", number_reader(least=1)),
    _schedule_rule("cycle_second_step_size", optional_reader(number_reader(least=0))),
    _schedule_rule("cycle_first_stair_count", _COUNT),
    _schedule_rule("cycle_second_stair_count", optional_reader(_COUNT)),
    _schedule_rule("decay_step_size", number_reader(least=0)),
    _schedule_rule("cycle_momentum", read_flag),
    _schedule_rule("cycle_min_mom", read_rates),
    _schedule_rule("cycle_max_mom", read_rates),
    _schedule_rule("decay_mom_rate", number_reader()),
)

TRAINING = (*BATCH, *GRADIENTS, *PRECISION, *OPTIMIZER, *SCHEDULER)


def torch_option_rule(path: str, owner: str, field: str) -> KeyRule:
    """Return the rule of an option of a torch class, which checks the value itself."""
    return KeyRule(path, H, "As it is, to torch's class.", f"{owner}.{field}", read_anything)
