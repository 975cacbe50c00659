"""Rules of the keys around a step: activations, files, checkpoints, other axes, logs, data, and removed features."""

from __future__ import annotations

from typing import Any

from npuzero.compat.rules import (
    Decision,
    KeyRule,
    Reader,
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


def _section_rules(
    section: str, decision: Decision, words: str, keys: dict[str, Reader], switch: str = ""
) -> tuple[KeyRule, ...]:
    """Return rules of one decision for the keys of a section. ``switch``, one of the keys, turns the section on."""
    on = f"{section}.{switch}" if switch else ""
    return tuple(
        KeyRule(
            f"{section}.{key}",
            decision,
            words,
            reads=reads,
            unless=(False, None) if key == switch else (),
            switch=on if key != switch else "",
        )
        for key, reads in keys.items()
    )


def _read_enabled(value: Any) -> Any:
    """Read a section of a removed feature; one that disables itself reads as False."""
    off = value in (None, False, {}) or (isinstance(value, dict) and value.get("enabled") is False)
    return False if off else value


_NO_CHECKPOINTING = "DeepSpeed's own checkpointing function reads it, and torch's is used here."
ACTIVATIONS = (
    KeyRule(
        "activation_checkpointing.cpu_checkpointing",
        T,
        "What torch's checkpointing keeps rests on the host: Plan(activations=).",
        "zero.host_activations",
        read_flag,
    ),
    *_section_rules(
        "activation_checkpointing",
        N,
        _NO_CHECKPOINTING,
        {
            "partition_activations": read_flag,
            "contiguous_memory_optimization": read_flag,
            "number_checkpoints": optional_reader(integer_reader(1)),
            "profile": read_flag,
            "synchronize_checkpoint_boundary": read_flag,
        },
    ),
)
_OWN_FILES = "npuzero reads and writes files by threads of its own."
AIO = (
    KeyRule(
        "aio.intra_op_parallelism",
        T,
        "Threads that read and write: Settings(io_threads=).",
        "Settings.io_threads",
        integer_reader(1, 256),
    ),
    *_section_rules(
        "aio",
        N,
        _OWN_FILES,
        {
            "block_size": integer_reader(1),
            "queue_depth": integer_reader(1),
            "single_submit": read_flag,
            "overlap_events": read_flag,
        },
    ),
    KeyRule("aio.use_gds", R, "Files go by the host's memory: leave it out.", reads=read_flag, unless=(False,)),
)
_OWN_CHECKPOINTS = "Checkpoints are npuzero's, which any plan on any number of ranks loads."
CHECKPOINT = (
    KeyRule(
        "checkpoint.tag_validation",
        N,
        "Ranks that save under other tags are an error, whatever this says.",
        reads=choice_reader("ignore", "warn", "fail"),
    ),
    KeyRule("checkpoint.load_universal", N, _OWN_CHECKPOINTS, reads=read_flag),
    KeyRule(
        "checkpoint.use_node_local_storage",
        R,
        "A checkpoint lies in a folder that all hosts share: give save_checkpoint() one.",
        reads=read_flag,
        unless=(False,),
    ),
    KeyRule("checkpoint.parallel_write.pipeline_stage", N, _OWN_CHECKPOINTS, reads=read_flag),
    KeyRule("checkpoint.checkpoint_serialization", N, _OWN_CHECKPOINTS, reads=read_flag),
    *_section_rules(
        "checkpoint.writer",
        N,
        _OWN_CHECKPOINTS,
        {
            "type": read_text_value,
            "io_buffer_size": integer_reader(1),
            "io_buffer_double": read_flag,
            "io_multiplier": integer_reader(1),
            "show_statistics": read_flag,
            "data_parallel": optional_reader(read_text_value),
            "decoupled": read_flag,
        },
    ),
    KeyRule(
        "datastates_ckpt",
        R,
        "For a save beside training call npuzero.checkpoint.save(..., asynchronous=True).",
        reads=_read_enabled,
        unless=(False,),
    ),
)
_TENSOR = "Cut layers by npuzero.parallel.tensor(model, npuzero.mesh(tensor=...)) before npuzero.zero()."
_PIPELINE = "It speaks of a PipelineModule; stages are npuzero.pipeline()'s."
_EXPERTS = "Experts are trained where they are; leave it out."
AXES = (
    KeyRule("tensor_parallel.autotp_size", R, _TENSOR, reads=integer_reader(0), unless=(0, 1)),
    KeyRule("tensor_parallel.tensor_parallel.tp_size", R, _TENSOR, reads=integer_reader(0), unless=(0, 1)),
    KeyRule("tensor_parallel.tp.tp_size", R, _TENSOR, reads=integer_reader(0), unless=(0, 1)),
    *_section_rules(
        "tensor_parallel",
        N,
        "Without effect, as no layer is cut.",
        {
            **dict.fromkeys(("tensor_parallel.tp_grain_size", "tp.tp_grain_size"), integer_reader(1)),
            **dict.fromkeys(
                ("tensor_parallel.mpu", "tp.mpu", "tensor_parallel.tp_group", "tp.tp_group"), read_anything
            ),
            "dtype": read_text_value,
            "tp_overlap_comm": read_flag,
            "vocab_parallel_lm_head": optional_reader(read_flag),
            "vocab_parallel_ce_backend": choice_reader("torch", "liger"),
            "injection_policy_tuple": optional_reader(list_reader(read_anything)),
            "partition_config": read_anything,
            "preset_model": optional_reader(read_text_value),
            "keep_module_on_host": read_flag,
            "replace_with_kernel_inject": read_flag,
            "kernel_inject": read_flag,
        },
    ),
    KeyRule(
        "sequence_parallel_size",
        R,
        "Share sequences by npuzero.parallel.sequence(model, npuzero.mesh(sequence=...)) before npuzero.zero().",
        reads=integer_reader(1),
        unless=(1,),
    ),
    KeyRule("data_parallel_size", N, "All ranks are data ranks.", reads=integer_reader(1)),
    *_section_rules(
        "pipeline",
        N,
        _PIPELINE,
        {
            "stages": read_anything,
            "partition": read_text_value,
            "seed_layers": read_flag,
            "activation_checkpoint_interval": integer_reader(0),
            "pipe_partitioned": read_flag,
            "grad_partitioned": read_flag,
        },
    ),
    KeyRule("use_data_before_expert_parallelism", R, _EXPERTS, reads=read_flag, unless=(False,)),
    *_section_rules(
        "expert_parallel",
        R,
        _EXPERTS,
        {
            "enabled": read_flag,
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
                read_anything,
            ),
        },
        "enabled",
    ),
    *_section_rules(
        "hybrid_engine",
        R,
        "Generate between updates inside npuzero.gathered(model) or npuzero.offloaded(model).",
        {
            "enabled": read_flag,
            "max_out_tokens": integer_reader(1),
            "inference_tp_size": integer_reader(1),
            "release_inference_cache": read_flag,
            "pin_parameters": read_flag,
            "tp_gather_partition_size": integer_reader(1),
            "enable_cuda_graph": read_flag,
        },
        "enabled",
    ),
)

_OWN_COMPILE = "The file compiles nothing: call torch.compile(engine.module), or its compile()."
_COMPILES = "Compile by torch.compile, whose graphs end at the units' gathers."
COMPILE = (
    *_section_rules(
        "compile",
        R,
        _COMPILES,
        {
            "deepcompile": read_flag,
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
                read_flag,
            ),
            "free_activation_threshold": integer_reader(0),
            "passes": optional_reader(list_reader(read_text_value)),
        },
        "deepcompile",
    ),
    *(
        KeyRule(f"compile.{key}", N, _OWN_COMPILE, reads=reads, trap="0.19.8 refuses it; earlier versions took it.")
        for key, reads in {
            "disable": read_flag,
            "enabled": read_flag,
            "backend": read_text_value,
            "kwargs": read_anything,
        }.items()
    ),
)

_NO_LOGS = "npuzero writes no logs: log what engine.get_lr() and get_global_grad_norm() give."
_MONITOR: dict[str, Reader] = {"enabled": read_flag, "output_path": read_text_value, "job_name": read_text_value}
LOGS = (
    *_section_rules("tensorboard", N, _NO_LOGS, _MONITOR),
    *_section_rules("csv_monitor", N, _NO_LOGS, _MONITOR),
    *_section_rules(
        "wandb",
        N,
        _NO_LOGS,
        {
            "enabled": read_flag,
            "group": optional_reader(read_text_value),
            "team": optional_reader(read_text_value),
            "project": read_text_value,
        },
    ),
    *_section_rules(
        "comet",
        N,
        _NO_LOGS,
        {
            "enabled": read_flag,
            "samples_log_interval": integer_reader(1),
            **dict.fromkeys(
                ("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"),
                optional_reader(read_text_value),
            ),
            "online": optional_reader(read_flag),
        },
    ),
    *_section_rules(
        "flops_profiler",
        N,
        "For FLOPs and times of a step see npuzero plan --on, or torch.profiler.",
        {
            "enabled": read_flag,
            "recompute_fwd_factor": number_reader(least=0),
            "profile_step": integer_reader(0),
            "module_depth": integer_reader(),
            "top_modules": integer_reader(0),
            "detailed": read_flag,
            "output_file": optional_reader(read_text_value),
        },
    ),
    *_section_rules(
        "comms_logger",
        N,
        "npuzero.report(model) has the bytes of each collective of the last step.",
        {
            "enabled": read_flag,
            "prof_all": read_flag,
            "prof_ops": list_reader(read_text_value),
            "verbose": read_flag,
            "debug": read_flag,
        },
    ),
    *_section_rules(
        "timers.throughput", N, "The engine keeps no clock.", {"enabled": read_flag, "synchronized": read_flag}
    ),
    KeyRule("steps_per_print", N, _NO_LOGS, reads=optional_reader(integer_reader(1))),
    KeyRule("wall_clock_breakdown", N, "Times of a step are torch.profiler's.", reads=read_flag),
    KeyRule("memory_breakdown", N, "npuzero.report(model) has what a rank held in the last step.", reads=read_flag),
    KeyRule("dump_state", N, "npuzero config explain says what became of each key.", reads=read_flag),
    KeyRule("log_level", N, _NO_LOGS, reads=optional_reader(read_text_value)),
    KeyRule("disable_python_gc", N, "The program may call gc.disable() itself.", reads=read_flag),
    KeyRule(
        "vocabulary_size", N, "DeepSpeed warns where it is no multiple of 8.", reads=optional_reader(integer_reader(1))
    ),
    KeyRule("_comment", N, "A comment."),
)

_DATA = "Choose samples by a sampler of yours, and give initialize() no training_data."
_CURRICULUM = "data_efficiency.data_sampling.curriculum_learning"
_DYNAMIC = "data_efficiency.data_sampling.dynamic_batching"
_LTD = "data_efficiency.data_routing.random_ltd"
DATA = (
    *_section_rules("data_efficiency", R, _DATA, {"enabled": read_flag, "seed": integer_reader(0)}, "enabled"),
    *_section_rules(
        "data_efficiency.data_sampling",
        R,
        _DATA,
        {
            "enabled": read_flag,
            "num_epochs": integer_reader(1),
            "num_workers": integer_reader(0),
            "pin_memory": read_flag,
        },
        "enabled",
    ),
    *_section_rules(
        _CURRICULUM,
        R,
        _DATA,
        {"enabled": read_flag, "data_cluster_path": read_text_value, "curriculum_metrics": read_anything},
        "enabled",
    ),
    *_section_rules(
        _DYNAMIC,
        R,
        _DATA,
        {
            "enabled": read_flag,
            "metrics_path": read_text_value,
            "lr_scaling_method": choice_reader("linear", "sqrt", "none"),
            "min_batch_size": integer_reader(1),
            "max_batch_size": optional_reader(integer_reader(1)),
            "sequence_picking_order": choice_reader("random", "seqlen", "dataloader"),
            "max_tokens": integer_reader(1),
            "verbose": read_flag,
        },
        "enabled",
    ),
    *_section_rules("data_efficiency.data_routing", R, _DATA, {"enabled": read_flag}, "enabled"),
    *_section_rules(
        _LTD,
        R,
        _DATA,
        {
            "enabled": read_flag,
            "total_layer_num": integer_reader(1),
            "random_ltd_layer_num": integer_reader(0),
            "random_ltd_layer_id": list_reader(integer_reader(0)),
            "model_mask_name": optional_reader(read_text_value),
            "model_type": read_text_value,
            "hidden_state_order": read_text_value,
            "random_ltd_schedule": read_anything,
            "layer_token_lr_schedule": read_anything,
            "micro_batch_size": integer_reader(1),
            "global_batch_size": integer_reader(1),
        },
        "enabled",
    ),
)

_TUNING = "npuzero plan --on CLUSTER says which plan and batch are fastest; write that, and leave autotuning out."
TUNING = _section_rules(
    "autotuning",
    R,
    _TUNING,
    {
        "enabled": read_flag,
        **dict.fromkeys(("fast", "overwrite"), read_flag),
        **dict.fromkeys(("results_dir", "exps_dir", "metric", "tuner_type"), read_text_value),
        **dict.fromkeys(("metric_path", "model_info_path"), optional_reader(read_text_value)),
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
            integer_reader(),
        ),
        "max_train_batch_size": optional_reader(integer_reader(1)),
        **dict.fromkeys(("arg_mappings", "model_info"), read_anything),
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
        KeyRule(
            key,
            R,
            f"DeepSpeed 0.19.8 has removed it as well; {way}. Leave it out.",
            reads=_read_enabled,
            unless=(False,),
            trap="0.19.8 refuses the key wherever it stands; earlier versions took it.",
        )
        for key, way in _REMOVED.items()
    ),
    *_section_rules(
        "weight_quantization",
        R,
        "It is of inference: leave it out.",
        {
            "enabled": read_flag,
            "num_bits": integer_reader(1),
            "q_type": read_text_value,
            "q_groups": integer_reader(1),
            "quantized_initialization": read_anything,
            "post_init_quant": read_anything,
        },
        "enabled",
    ),
)

TOOLS = (*ACTIVATIONS, *AIO, *CHECKPOINT, *AXES, *COMPILE, *LOGS, *DATA, *TUNING, *REMOVED)
