"""Rules of what stands around a step: activations, disks, checkpoints, other axes, logs, and what has been removed."""

from __future__ import annotations

from typing import Any

from npuzero.compat.rules import (
    Decision,
    Reader,
    Rule,
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


def _section(
    section: str, decision: Decision, words: str, keys: dict[str, Reader], switch: str = ""
) -> tuple[Rule, ...]:
    """Return rules of one decision for the keys of a section, which ``switch``, one of them, turns on."""
    on = f"{section}.{switch}" if switch else ""
    return tuple(
        Rule(
            f"{section}.{key}",
            decision,
            words,
            reads=reads,
            unless=(False, None) if key == switch else (),
            switch=on if key != switch else "",
        )
        for key, reads in keys.items()
    )


def _wanted(value: Any) -> Any:
    """Read a section of something removed: False where it says itself that it is off."""
    off = value in (None, False, {}) or (isinstance(value, dict) and value.get("enabled") is False)
    return False if off else value


_NO_CHECKPOINTING = "DeepSpeed's own checkpointing function reads it, and torch's is used here."
ACTIVATIONS = (
    Rule(
        "activation_checkpointing.cpu_checkpointing",
        T,
        "What torch's checkpointing keeps rests on the host: Plan(activations=).",
        "zero.host_activations",
        flag,
    ),
    *_section(
        "activation_checkpointing",
        N,
        _NO_CHECKPOINTING,
        {
            "partition_activations": flag,
            "contiguous_memory_optimization": flag,
            "number_checkpoints": optional(integer(1)),
            "profile": flag,
            "synchronize_checkpoint_boundary": flag,
        },
    ),
)

_OWN_FILES = "npuzero reads and writes files by threads of its own."
AIO = (
    Rule(
        "aio.intra_op_parallelism",
        T,
        "Threads that read and write: Settings(io_threads=).",
        "Settings.io_threads",
        integer(1, 256),
    ),
    *_section(
        "aio",
        N,
        _OWN_FILES,
        {"block_size": integer(1), "queue_depth": integer(1), "single_submit": flag, "overlap_events": flag},
    ),
    Rule("aio.use_gds", R, "Files go by the host's memory: leave it out.", reads=flag, unless=(False,)),
)

_OWN_CHECKPOINTS = "Checkpoints are npuzero's, which any plan on any number of ranks loads."
CHECKPOINT = (
    Rule(
        "checkpoint.tag_validation",
        N,
        "Ranks that save under other tags are an error, whatever this says.",
        reads=one_of("ignore", "warn", "fail"),
    ),
    Rule("checkpoint.load_universal", N, _OWN_CHECKPOINTS, reads=flag),
    Rule(
        "checkpoint.use_node_local_storage",
        R,
        "A checkpoint lies in a folder that all hosts share: give save_checkpoint() one.",
        reads=flag,
        unless=(False,),
    ),
    Rule("checkpoint.parallel_write.pipeline_stage", N, _OWN_CHECKPOINTS, reads=flag),
    Rule("checkpoint.checkpoint_serialization", N, _OWN_CHECKPOINTS, reads=flag),
    *_section(
        "checkpoint.writer",
        N,
        _OWN_CHECKPOINTS,
        {
            "type": text,
            "io_buffer_size": integer(1),
            "io_buffer_double": flag,
            "io_multiplier": integer(1),
            "show_statistics": flag,
            "data_parallel": optional(text),
            "decoupled": flag,
        },
    ),
    Rule(
        "datastates_ckpt",
        R,
        "For a save beside training call npuzero.checkpoint.save(..., asynchronous=True).",
        reads=_wanted,
        unless=(False,),
    ),
)

_TENSOR = "Cut layers by npuzero.parallel.tensor(model, npuzero.mesh(tensor=...)) before npuzero.zero()."
_PIPELINE = "It speaks of a PipelineModule; stages are npuzero.pipeline()'s."
_EXPERTS = "Experts are trained where they are; leave it out."
AXES = (
    Rule("tensor_parallel.autotp_size", R, _TENSOR, reads=integer(0), unless=(0, 1)),
    Rule("tensor_parallel.tensor_parallel.tp_size", R, _TENSOR, reads=integer(0), unless=(0, 1)),
    Rule("tensor_parallel.tp.tp_size", R, _TENSOR, reads=integer(0), unless=(0, 1)),
    *_section(
        "tensor_parallel",
        N,
        "Without effect, as no layer is cut.",
        {
            **dict.fromkeys(("tensor_parallel.tp_grain_size", "tp.tp_grain_size"), integer(1)),
            **dict.fromkeys(("tensor_parallel.mpu", "tp.mpu", "tensor_parallel.tp_group", "tp.tp_group"), anything),
            "dtype": text,
            "tp_overlap_comm": flag,
            "vocab_parallel_lm_head": optional(flag),
            "vocab_parallel_ce_backend": one_of("torch", "liger"),
            "injection_policy_tuple": optional(list_of(anything)),
            "partition_config": anything,
            "preset_model": optional(text),
            "keep_module_on_host": flag,
            "replace_with_kernel_inject": flag,
            "kernel_inject": flag,
        },
    ),
    Rule(
        "sequence_parallel_size",
        R,
        "Share sequences by npuzero.parallel.sequence(model, npuzero.mesh(sequence=...)) before npuzero.zero().",
        reads=integer(1),
        unless=(1,),
    ),
    Rule("data_parallel_size", N, "All ranks are data ranks.", reads=integer(1)),
    *_section(
        "pipeline",
        N,
        _PIPELINE,
        {
            "stages": anything,
            "partition": text,
            "seed_layers": flag,
            "activation_checkpoint_interval": integer(0),
            "pipe_partitioned": flag,
            "grad_partitioned": flag,
        },
    ),
    Rule("use_data_before_expert_parallelism", R, _EXPERTS, reads=flag, unless=(False,)),
    *_section(
        "expert_parallel",
        R,
        _EXPERTS,
        {
            "enabled": flag,
            **dict.fromkeys(
                (
                    "autoep_size",
                    "expert_tensor_parallel_size",
                    "validate_folding_routing",
                    "async_split_plan",
                    "preset_model",
                    "moe_layer_pattern",
                    "expert_pattern",
                    "router_pattern",
                    "use_grouped_mm",
                    "disable_triton_grouped_mm",
                    "route_norm",
                    "route_scale",
                    "score_apply",
                    "combine_impl",
                    "row_weighting_impl",
                    "gate_up_impl",
                    "comm_backend",
                    "comm_num_sm",
                    "comm_qp_margin",
                    "comm_max_tokens_per_rank",
                    "num_expert_groups",
                    "num_limited_groups",
                    "score_func",
                    "top_k",
                    "load_balance_coeff",
                    "routed_scaling_factor",
                    "expert_w1",
                    "expert_w2",
                    "expert_w3",
                    "num_experts_attr",
                    "top_k_attr",
                    "has_shared_experts",
                    "shared_experts_pattern",
                    "shared_experts_gate_pattern",
                    "expert_activation",
                ),
                anything,
            ),
        },
        "enabled",
    ),
    *_section(
        "hybrid_engine",
        R,
        "Generate between updates inside npuzero.gathered(model) or npuzero.offloaded(model).",
        {
            "enabled": flag,
            "max_out_tokens": integer(1),
            "inference_tp_size": integer(1),
            "release_inference_cache": flag,
            "pin_parameters": flag,
            "tp_gather_partition_size": integer(1),
            "enable_cuda_graph": flag,
        },
        "enabled",
    ),
)

_OWN_COMPILE = "The file compiles nothing: call torch.compile(engine.module), or its compile()."
_COMPILES = "Compile by torch.compile, whose graphs end at the units' gathers."
COMPILE = (
    *_section(
        "compile",
        R,
        _COMPILES,
        {
            "deepcompile": flag,
            **dict.fromkeys(
                (
                    "autoep_non_moe",
                    "free_activation",
                    "offload_activation",
                    "offload_activation_pin_memory",
                    "offload_opt_states",
                    "double_buffer",
                    "symmetric_memory",
                    "debug_log",
                    "offload_parameters",
                    "sync_before_reduce",
                    "sync_after_reduce",
                    "sync_before_allgather",
                    "sync_after_allgather",
                    "keep_int_input_tensors",
                    "keep_all_input_tensors",
                ),
                flag,
            ),
            "free_activation_threshold": integer(0),
            "passes": optional(list_of(text)),
        },
        "deepcompile",
    ),
    *(
        Rule(f"compile.{key}", N, _OWN_COMPILE, reads=reads, trap="0.19.8 refuses it; earlier versions took it.")
        for key, reads in {"disable": flag, "enabled": flag, "backend": text, "kwargs": anything}.items()
    ),
)

_NO_LOGS = "npuzero writes no logs: log what engine.get_lr() and get_global_grad_norm() give."
_MONITOR: dict[str, Reader] = {"enabled": flag, "output_path": text, "job_name": text}
LOGS = (
    *_section("tensorboard", N, _NO_LOGS, _MONITOR),
    *_section("csv_monitor", N, _NO_LOGS, _MONITOR),
    *_section(
        "wandb",
        N,
        _NO_LOGS,
        {"enabled": flag, "group": optional(text), "team": optional(text), "project": text},
    ),
    *_section(
        "comet",
        N,
        _NO_LOGS,
        {
            "enabled": flag,
            "samples_log_interval": integer(1),
            **dict.fromkeys(
                ("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"), optional(text)
            ),
            "online": optional(flag),
        },
    ),
    *_section(
        "flops_profiler",
        N,
        "For FLOPs and times of a step see npuzero plan --on, or torch.profiler.",
        {
            "enabled": flag,
            "recompute_fwd_factor": number(least=0),
            "profile_step": integer(0),
            "module_depth": integer(),
            "top_modules": integer(0),
            "detailed": flag,
            "output_file": optional(text),
        },
    ),
    *_section(
        "comms_logger",
        N,
        "npuzero.report(model) has the bytes of each collective of the last step.",
        {"enabled": flag, "prof_all": flag, "prof_ops": list_of(text), "verbose": flag, "debug": flag},
    ),
    *_section(
        "timers.throughput",
        N,
        "The engine keeps no clock.",
        {"enabled": flag, "synchronized": flag},
    ),
    Rule("steps_per_print", N, _NO_LOGS, reads=optional(integer(1))),
    Rule("wall_clock_breakdown", N, "Times of a step are torch.profiler's.", reads=flag),
    Rule("memory_breakdown", N, "npuzero.report(model) has what a rank held in the last step.", reads=flag),
    Rule("dump_state", N, "npuzero config explain says what became of each key.", reads=flag),
    Rule("log_level", N, _NO_LOGS, reads=optional(text)),
    Rule("disable_python_gc", N, "The program may call gc.disable() itself.", reads=flag),
    Rule("vocabulary_size", N, "DeepSpeed warns where it is no multiple of 8.", reads=optional(integer(1))),
    Rule("_comment", N, "A comment."),
)

_DATA = "Choose samples by a sampler of yours, and give initialize() no training_data."
_CURRICULUM = "data_efficiency.data_sampling.curriculum_learning"
_DYNAMIC = "data_efficiency.data_sampling.dynamic_batching"
_LTD = "data_efficiency.data_routing.random_ltd"
DATA = (
    *_section("data_efficiency", R, _DATA, {"enabled": flag, "seed": integer(0)}, "enabled"),
    *_section(
        "data_efficiency.data_sampling",
        R,
        _DATA,
        {"enabled": flag, "num_epochs": integer(1), "num_workers": integer(0), "pin_memory": flag},
        "enabled",
    ),
    *_section(
        _CURRICULUM, R, _DATA, {"enabled": flag, "data_cluster_path": text, "curriculum_metrics": anything}, "enabled"
    ),
    *_section(
        _DYNAMIC,
        R,
        _DATA,
        {
            "enabled": flag,
            "metrics_path": text,
            "lr_scaling_method": one_of("linear", "sqrt", "none"),
            "min_batch_size": integer(1),
            "max_batch_size": optional(integer(1)),
            "sequence_picking_order": one_of("random", "seqlen", "dataloader"),
            "max_tokens": integer(1),
            "verbose": flag,
        },
        "enabled",
    ),
    *_section("data_efficiency.data_routing", R, _DATA, {"enabled": flag}, "enabled"),
    *_section(
        _LTD,
        R,
        _DATA,
        {
            "enabled": flag,
            "total_layer_num": integer(1),
            "random_ltd_layer_num": integer(0),
            "random_ltd_layer_id": list_of(integer(0)),
            "model_mask_name": optional(text),
            "model_type": text,
            "hidden_state_order": text,
            "random_ltd_schedule": anything,
            "layer_token_lr_schedule": anything,
            "micro_batch_size": integer(1),
            "global_batch_size": integer(1),
        },
        "enabled",
    ),
)

_TUNING = "npuzero plan --on CLUSTER says which plan and batch are fastest; write that, and leave autotuning out."
TUNING = _section(
    "autotuning",
    R,
    _TUNING,
    {
        "enabled": flag,
        **dict.fromkeys(("fast", "overwrite"), flag),
        **dict.fromkeys(("results_dir", "exps_dir", "metric", "tuner_type"), text),
        **dict.fromkeys(("metric_path", "model_info_path"), optional(text)),
        **dict.fromkeys(
            (
                "start_profile_step",
                "end_profile_step",
                "start_step",
                "end_step",
                "tuner_early_stopping",
                "tuner_num_trials",
                "mp_size",
                "min_train_batch_size",
                "max_train_micro_batch_size_per_gpu",
                "min_train_micro_batch_size_per_gpu",
                "num_tuning_micro_batch_sizes",
            ),
            integer(),
        ),
        "max_train_batch_size": optional(integer(1)),
        **dict.fromkeys(("arg_mappings", "model_info"), anything),
    },
    "enabled",
)

_REMOVED = {
    "nebula": "checkpoints are npuzero's",
    "compression_training": "train with what quantizes or prunes the model itself",
    "amp": "say bf16, fp16 or torch_autocast",
    "quantize_training": "train with what quantizes the model itself",
    "sparse_gradients": "gradients are dense",
    "eigenvalue": "it belonged to quantize_training",
    "sparse_attention": "take the attention of the model's library",
    "elasticity": "torchrun's --nnodes=1:2 restarts on other ranks, and checkpoints load there",
    "graph_harvesting": "say AdamW(capturable=True) and capture the step",
    "curriculum_learning": "order the samples in the loader",
    "progressive_layer_drop": "drop layers in the model's forward",
}
REMOVED = (
    *(
        Rule(
            key,
            R,
            f"DeepSpeed 0.19.8 has removed it as well; {way}. Leave it out.",
            reads=_wanted,
            unless=(False,),
            trap="0.19.8 refuses the key wherever it stands; earlier versions took it.",
        )
        for key, way in _REMOVED.items()
    ),
    *_section(
        "weight_quantization",
        R,
        "It is of inference: leave it out.",
        {
            "enabled": flag,
            "num_bits": integer(1),
            "q_type": text,
            "q_groups": integer(1),
            "quantized_initialization": anything,
            "post_init_quant": anything,
        },
        "enabled",
    ),
)

TOOLS = (*ACTIVATIONS, *AIO, *CHECKPOINT, *AXES, *COMPILE, *LOGS, *DATA, *TUNING, *REMOVED)
