"""Rules of ``zero_optimization``: what is sharded, where it rests, how it travels."""

from __future__ import annotations

from typing import Any

from npuzero.compat.rules import (
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

_ELEMENTS = integer(0)
_OWN_BUCKETS = "A flat is the bucket here: Settings(bucket_bytes=)."
_OWN_GATHERS = "A unit is gathered as one, and so many ahead: Settings(prefetch=)."
_KEEPS_NO_BIT = "It moves no bit, and npuzero has a way of its own."


def _texts(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else list_of(text)(value)


def _switched(word: str, **more: Any) -> Rule:
    return Rule(f"zero_optimization.{word}", N, _KEEPS_NO_BIT, reads=flag, **more)


def _alias(name: str, words: str, reads: Any, decision: Decision = N, **more: Any) -> tuple[Rule, Rule]:
    """Return the rules of a key of stage 3 under its two names, of which DeepSpeed takes either."""
    return tuple(  # type: ignore[return-value]
        Rule(f"zero_optimization.{prefix}{name}", decision, words, reads=reads, **more) for prefix in ("stage3_", "")
    )


def _stage(value: Any) -> int:
    """Read the old form, true or false."""
    return int(flag(value))


def _overlap(value: Any) -> bool | str:
    """Read whether reductions run beside backward; null is DeepSpeed's choice by stage, which moves no bit."""
    return "parameters" if optional(flag)(value) is False else True


def _device(value: Any) -> str | None:
    """Read where something rests; the device itself is None."""
    return one_of(none=None, cpu="host", nvme="nvme")(value)  # type: ignore[no-any-return]


def _old_offload(value: Any) -> str | None:
    return "host" if optional(flag)(value) else None


STAGES = (
    Rule(
        "zero_optimization",
        T,
        "The old form: true is stage 1, false stage 0.",
        "zero.stage",
        _stage,
    ),
    Rule("zero_optimization.stage", H, "npuzero.zero(stage=).", "zero.stage", integer(0, 3)),
    Rule(
        "zero_optimization.overlap_comm",
        T,
        "False: each reduction ends before backward goes on.",
        "Settings.overlap",
        _overlap,
    ),
    Rule(
        "zero_optimization.reduce_bucket_size",
        T,
        "Elements times the bytes of one.",
        "zero.bucket_elements",
        integer(1),
        auto=None,
        trap="Buckets count elements, not bytes: 5e8 are 1 GB in bfloat16.",
    ),
    Rule("zero_optimization.allgather_bucket_size", N, _OWN_BUCKETS, reads=_ELEMENTS, auto=0),
    Rule("allgather_size", N, _OWN_BUCKETS, reads=_ELEMENTS),
    *_alias("prefetch_bucket_size", _OWN_GATHERS, _ELEMENTS, auto=0),
    *_alias("param_persistence_threshold", "Small parameters travel with their unit.", _ELEMENTS, auto=0),
    *_alias("model_persistence_threshold", "Small parameters travel with their unit.", _ELEMENTS, auto=0),
    *_alias("max_live_parameters", _OWN_GATHERS, _ELEMENTS, auto=0),
    *_alias("max_reuse_distance", _OWN_GATHERS, _ELEMENTS, auto=0),
    *_alias("module_granularity_threshold", _OWN_GATHERS, integer(), auto=0),
    *_alias("use_all_reduce_for_fetch_params", _OWN_GATHERS, flag, auto=False),
    *_alias("allgather_sequential", _OWN_GATHERS, flag, auto=False),
    *_alias(
        "gather_16bit_weights_on_model_save",
        "Whether save_16bit_model() gathers what is sharded; false: it saves nothing, and returns False.",
        flag,
        H,
        target="Engine.gathers_on_save",
        auto=True,
    ),
    Rule(
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        H,
        "The old name of stage3_gather_16bit_weights_on_model_save.",
        "Engine.gathers_on_save",
        flag,
        auto=True,
    ),
    Rule(
        "zero_optimization.sub_group_size", N, "Updates go by chunks: Settings(chunk_bytes=).", reads=_ELEMENTS, auto=0
    ),
    Rule(
        "zero_optimization.ignore_unused_parameters",
        H,
        "False: a parameter without a gradient is an error.",
        "Engine.ignores_unused",
        flag,
    ),
    Rule(
        "zero_optimization.compute_grad_norm",
        H,
        "False: get_global_grad_norm() is None.",
        "Engine.measures_norm",
        flag,
    ),
    Rule(
        "zero_optimization.zero_hpz_partition_size",
        T,
        "So many ranks share a second copy of the parameters between forward and backward.",
        "zero.group",
        integer(0),
    ),
    Rule(
        "zero_optimization.zero_quantized_weights",
        T,
        'Parameters are gathered in 8 bits: Precision(gathers="int8"), whose blocks are its own.',
        "zero.thin_gathers",
        flag,
    ),
    Rule(
        "zero_optimization.zero_quantized_gradients",
        T,
        'Gradients travel in 4 bits: Precision(wires={"node": "int4", "local": "int4"}), whose blocks are its own.',
        "zero.thin_gradients",
        flag,
    ),
    Rule(
        "zero_optimization.zero_quantized_nontrainable_weights",
        R,
        "Parameters rest in the dtype of the model: leave it out, or quantize them before with the model's library.",
        reads=flag,
        unless=(False,),
    ),
    Rule(
        "zero_optimization.mics_shard_size",
        T,
        "Everything is sharded within groups of so many ranks: zero(local_size=).",
        "zero.shard_group",
        integer(-1),
        trap="0.19.8 has removed it, and refuses it.",
    ),
    Rule(
        "zero_optimization.mics_hierarchical_params_gather",
        N,
        _KEEPS_NO_BIT,
        reads=flag,
        trap="0.19.8 has removed it, and refuses it.",
    ),
    Rule(
        "zero_optimization.zeropp_loco_param",
        R,
        'DeepSpeed has removed it; for error feedback say Precision(feedback="node").',
        reads=anything,
        unless=(None,),
    ),
    Rule(
        "zero_optimization.zenflow",
        R,
        "Updates of a part of the gradients are not there; a whole update beside the next step is the plan 'delayed'.",
        reads=anything,
        unless=(None,),
    ),
    Rule(
        "zero_optimization.legacy_stage1",
        R,
        "DeepSpeed has removed it: leave it out.",
        reads=flag,
        unless=(False,),
    ),
    Rule(
        "zero_optimization.elastic_checkpoint",
        N,
        "A checkpoint loads on any number of ranks, whatever this says.",
        reads=flag,
    ),
    Rule(
        "zero_optimization.load_from_fp32_weights",
        N,
        "Checkpoints have the masters' float32 values, which are loaded.",
        reads=flag,
    ),
    *(
        _switched(word)
        for word in (
            "contiguous_gradients",
            "reduce_scatter",
            "allgather_partitions",
            "use_multi_rank_bucket_allreduce",
            "round_robin_gradients",
            "parameter_alignment",
            "memory_efficient_linear",
            "pipeline_loading_checkpoint",
            "override_module_apply",
            "log_trace_cache_warnings",
            "enable_sanity_checks",
            "save_muon_momentum_buffer_in_memory",
        )
    ),
    *(
        Rule(f"zero_optimization.leaf_module.{what}", N, "A block is gathered as one anyway.", reads=_texts)
        for what in ("classes", "names", "name_suffixes")
    ),
)

_HOST = "npuzero has buffers of its own: Settings(host_bytes=) says how much of the host it may take."


#: What goes along with a part that rests off the device.
_ALONG = {"optimizer": "", "param": " States go along: to the host, where offload_optimizer says nothing."}


def _offload(part: str) -> tuple[Rule, ...]:
    """Return the rules that both sections of offload share."""
    section = f"zero_optimization.offload_{part}"
    return (
        Rule(section, N, "Nothing rests off the device.", reads=optional(_none)),
        Rule(
            f"{section}.device",
            T,
            f"cpu: in the host's memory; nvme: in files; none: on the device.{_ALONG[part]}",
            f"offload.{part}",
            _device,
        ),
        Rule(
            f"{section}.nvme_path",
            T,
            "The folder of files: Settings(nvme_paths=).",
            f"offload.{part}_path",
            optional(text),
        ),
        Rule(f"{section}.pin_memory", N, "What is copied to a device beside computing is pinned.", reads=flag),
        Rule(f"{section}.buffer_count", N, _HOST, reads=_ELEMENTS),
    )


def _none(value: Any) -> None:
    raise Unreadable("a section with device")


OFFLOAD = (
    *_offload("optimizer"),
    *(
        Rule(
            f"zero_optimization.offload_optimizer.{word}",
            N,
            "Reading, updating and writing overlap anyway.",
            reads=flag,
        )
        for word in ("pipeline_read", "pipeline_write", "fast_init")
    ),
    Rule(
        "zero_optimization.offload_optimizer.ratio",
        T,
        "The share of the states that rests off the device: Placement(share=).",
        "offload.ratio",
        number(0, 1),
    ),
    Rule(
        "zero_optimization.offload_optimizer.super_offload",
        R,
        'It is for one kind of host: leave it out, or say Settings(update_on="device").',
        reads=flag,
        unless=(False,),
    ),
    Rule(
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        N,
        "OMP_NUM_THREADS says how many threads update.",
        reads=number(0, 1),
    ),
    *_offload("param"),
    Rule("zero_optimization.offload_param.buffer_size", N, _HOST, reads=_ELEMENTS),
    Rule("zero_optimization.offload_param.max_in_cpu", N, _HOST, reads=_ELEMENTS),
    Rule(
        "zero_optimization.cpu_offload",
        T,
        "The old form of offload_optimizer with device cpu.",
        "offload.optimizer",
        _old_offload,
    ),
    Rule(
        "zero_optimization.cpu_offload_param",
        T,
        "The old form of offload_param with device cpu.",
        "offload.param",
        _old_offload,
    ),
    Rule(
        "zero_optimization.cpu_offload_use_pin_memory",
        N,
        "What is copied to a device beside computing is pinned.",
        reads=optional(flag),
    ),
)

ZERO = (*STAGES, *OFFLOAD)
