"""Rules of ``zero_optimization``: sharding, offload and communication."""

from __future__ import annotations

from typing import Any

from npuzero.compat.rules import (
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

_ELEMENTS = integer_reader(0)
_OWN_BUCKETS = "A flat is the bucket here: Settings(bucket_bytes=)."
_OWN_GATHERS = "A unit is gathered as one, and so many ahead: Settings(prefetch=)."
_KEEPS_NO_BIT = "It moves no bit, and npuzero has a way of its own."


def _read_texts(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else list_reader(read_text_value)(value)


def _switch_rule(word: str, **more: Any) -> KeyRule:
    return KeyRule(f"zero_optimization.{word}", N, _KEEPS_NO_BIT, reads=read_flag, **more)


def _alias_rules(name: str, words: str, reads: Any, decision: Decision = N, **more: Any) -> tuple[KeyRule, KeyRule]:
    """Return the rules of a stage-3 key under its two names; DeepSpeed accepts either."""
    return tuple(  # type: ignore[return-value]
        KeyRule(f"zero_optimization.{prefix}{name}", decision, words, reads=reads, **more) for prefix in ("stage3_", "")
    )


def _read_stage(value: Any) -> int:
    """Read the old form of ``zero_optimization``: true or false."""
    return int(read_flag(value))


def _read_overlap(value: Any) -> bool | str:
    """Read whether reductions overlap backward. Null is DeepSpeed's choice by stage, which changes no bit."""
    return "parameters" if optional_reader(read_flag)(value) is False else True


def _read_offload_device(value: Any) -> str | None:
    """Read the memory that a part is offloaded to; None is the device."""
    return choice_reader(none=None, cpu="host", nvme="nvme")(value)  # type: ignore[no-any-return]


def _read_old_offload(value: Any) -> str | None:
    return "host" if optional_reader(read_flag)(value) else None


STAGES = (
    KeyRule(
        "zero_optimization",
        T,
        "The old form: true is stage 1, false stage 0.",
        "zero.stage",
        _read_stage,
    ),
    KeyRule("zero_optimization.stage", H, "npuzero.zero(stage=).", "zero.stage", integer_reader(0, 3)),
    KeyRule(
        "zero_optimization.overlap_comm",
        T,
        "False: each reduction ends before backward goes on.",
        "Settings.overlap",
        _read_overlap,
    ),
    KeyRule(
        "zero_optimization.reduce_bucket_size",
        T,
        "Elements times the bytes of one.",
        "zero.bucket_elements",
        integer_reader(1),
        auto=None,
        trap="Buckets count elements, not bytes: 5e8 are 1 GB in bfloat16.",
    ),
    KeyRule("zero_optimization.allgather_bucket_size", N, _OWN_BUCKETS, reads=_ELEMENTS, auto=0),
    KeyRule("allgather_size", N, _OWN_BUCKETS, reads=_ELEMENTS),
    *_alias_rules("prefetch_bucket_size", _OWN_GATHERS, _ELEMENTS, auto=0),
    *_alias_rules("param_persistence_threshold", "Small parameters travel with their unit.", _ELEMENTS, auto=0),
    *_alias_rules("model_persistence_threshold", "Small parameters travel with their unit.", _ELEMENTS, auto=0),
    *_alias_rules("max_live_parameters", _OWN_GATHERS, _ELEMENTS, auto=0),
    *_alias_rules("max_reuse_distance", _OWN_GATHERS, _ELEMENTS, auto=0),
    *_alias_rules("module_granularity_threshold", _OWN_GATHERS, integer_reader(), auto=0),
    *_alias_rules("use_all_reduce_for_fetch_params", _OWN_GATHERS, read_flag, auto=False),
    *_alias_rules("allgather_sequential", _OWN_GATHERS, read_flag, auto=False),
    *_alias_rules(
        "gather_16bit_weights_on_model_save",
        "Whether save_16bit_model() gathers what is sharded; false: it saves nothing, and returns False.",
        read_flag,
        H,
        target="Engine.gathers_on_save",
        auto=True,
    ),
    KeyRule(
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        H,
        "The old name of stage3_gather_16bit_weights_on_model_save.",
        "Engine.gathers_on_save",
        read_flag,
        auto=True,
    ),
    KeyRule(
        "zero_optimization.sub_group_size", N, "Updates go by chunks: Settings(chunk_bytes=).", reads=_ELEMENTS, auto=0
    ),
    KeyRule(
        "zero_optimization.ignore_unused_parameters",
        H,
        "False: a parameter without a gradient is an error.",
        "Settings.ignore_unused_parameters",
        read_flag,
    ),
    KeyRule(
        "zero_optimization.compute_grad_norm",
        H,
        "False: get_global_grad_norm() is None.",
        "Engine.measures_norm",
        read_flag,
    ),
    KeyRule(
        "zero_optimization.zero_hpz_partition_size",
        T,
        "So many ranks share a second copy of the parameters between forward and backward.",
        "zero.group",
        integer_reader(0),
    ),
    KeyRule(
        "zero_optimization.zero_quantized_weights",
        T,
        'Parameters are gathered in 8 bits: Precision(gathers="int8"), whose blocks are its own.',
        "zero.thin_gathers",
        read_flag,
    ),
    KeyRule(
        "zero_optimization.zero_quantized_gradients",
        T,
        'Gradients travel in 4 bits: Precision(wires={"node": "int4", "local": "int4"}), whose blocks are its own.',
        "zero.thin_gradients",
        read_flag,
    ),
    KeyRule(
        "zero_optimization.zero_quantized_nontrainable_weights",
        R,
        "Parameters rest in the dtype of the model: leave it out, or quantize them before with the model's library.",
        reads=read_flag,
        unless=(False,),
    ),
    KeyRule(
        "zero_optimization.mics_shard_size",
        T,
        "Everything is sharded within groups of so many ranks: zero(local_size=).",
        "zero.shard_group",
        integer_reader(-1),
        trap="0.19.8 has removed it, and refuses it.",
    ),
    KeyRule(
        "zero_optimization.mics_hierarchical_params_gather",
        N,
        _KEEPS_NO_BIT,
        reads=read_flag,
        trap="0.19.8 has removed it, and refuses it.",
    ),
    KeyRule(
        "zero_optimization.zeropp_loco_param",
        R,
        'DeepSpeed has removed it; for error feedback say Precision(feedback="node").',
        reads=read_anything,
        unless=(None,),
    ),
    KeyRule(
        "zero_optimization.zenflow",
        R,
        "Updates of a part of the gradients are not there; a whole update beside the next step is the plan 'delayed'.",
        reads=read_anything,
        unless=(None,),
    ),
    KeyRule(
        "zero_optimization.legacy_stage1",
        R,
        "DeepSpeed has removed it: leave it out.",
        reads=read_flag,
        unless=(False,),
    ),
    KeyRule(
        "zero_optimization.elastic_checkpoint",
        N,
        "A checkpoint loads on any number of ranks, whatever this says.",
        reads=read_flag,
    ),
    KeyRule(
        "zero_optimization.load_from_fp32_weights",
        N,
        "Checkpoints have the masters' float32 values, which are loaded.",
        reads=read_flag,
    ),
    *(
        _switch_rule(word)
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
        KeyRule(f"zero_optimization.leaf_module.{what}", N, "A block is gathered as one anyway.", reads=_read_texts)
        for what in ("classes", "names", "name_suffixes")
    ),
)

_HOST = "npuzero has buffers of its own: Settings(host_bytes=) says how much of the host it may take."


#: Words to add for a part that is offloaded.
_ALONG = {"optimizer": "", "param": " States go along: to the host, where offload_optimizer says nothing."}


def _offload_rules(part: str) -> tuple[KeyRule, ...]:
    """Return the rules that both offload sections share."""
    section = f"zero_optimization.offload_{part}"
    return (
        KeyRule(section, N, "Nothing rests off the device.", reads=optional_reader(_refuse_null)),
        KeyRule(
            f"{section}.device",
            T,
            f"cpu: in the host's memory; nvme: in files; none: on the device.{_ALONG[part]}",
            f"offload.{part}",
            _read_offload_device,
        ),
        KeyRule(
            f"{section}.nvme_path",
            T,
            "The folder of files: Settings(nvme_paths=).",
            f"offload.{part}_path",
            optional_reader(read_text_value),
        ),
        KeyRule(f"{section}.pin_memory", N, "What is copied to a device beside computing is pinned.", reads=read_flag),
        KeyRule(f"{section}.buffer_count", N, _HOST, reads=_ELEMENTS),
    )


def _refuse_null(value: Any) -> None:
    raise UnreadableValue("a section with device")


OFFLOAD = (
    *_offload_rules("optimizer"),
    *(
        KeyRule(
            f"zero_optimization.offload_optimizer.{word}",
            N,
            "Reading, updating and writing overlap anyway.",
            reads=read_flag,
        )
        for word in ("pipeline_read", "pipeline_write", "fast_init")
    ),
    KeyRule(
        "zero_optimization.offload_optimizer.ratio",
        T,
        "The share of the states that rests off the device: Placement(share=).",
        "offload.ratio",
        number_reader(0, 1),
    ),
    KeyRule(
        "zero_optimization.offload_optimizer.super_offload",
        R,
        'It is for one kind of host: leave it out, or say Settings(update_on="device").',
        reads=read_flag,
        unless=(False,),
    ),
    KeyRule(
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        N,
        "OMP_NUM_THREADS says how many threads update.",
        reads=number_reader(0, 1),
    ),
    *_offload_rules("param"),
    KeyRule("zero_optimization.offload_param.buffer_size", N, _HOST, reads=_ELEMENTS),
    KeyRule("zero_optimization.offload_param.max_in_cpu", N, _HOST, reads=_ELEMENTS),
    KeyRule(
        "zero_optimization.cpu_offload",
        T,
        "The old form of offload_optimizer with device cpu.",
        "offload.optimizer",
        _read_old_offload,
    ),
    KeyRule(
        "zero_optimization.cpu_offload_param",
        T,
        "The old form of offload_param with device cpu.",
        "offload.param",
        _read_old_offload,
    ),
    KeyRule(
        "zero_optimization.cpu_offload_use_pin_memory",
        N,
        "What is copied to a device beside computing is pinned.",
        reads=optional_reader(read_flag),
    ),
)

ZERO = (*STAGES, *OFFLOAD)
