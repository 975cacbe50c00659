"""Keys from which nothing follows for the engine, and rules of several keys at once."""

from __future__ import annotations

from npuzero.compat.rules import Decision, Reader, Rule, anything, flag, integer

NOTED, REFUSED = Decision.NOTED, Decision.REFUSED

#: Sections whose keys are arguments of something that a program brings itself, by what that is.
OWN = {
    "model": "your model's constructor",
    "data": "your loader",
    "hf": "your model's constructor",
    "generation": "your program's generation",
    "moe": "your model's expert layers",
}


def several(decision: Decision, section: str, words: str, *keys: str, reads: Reader = anything) -> tuple[Rule, ...]:
    """Return rules of several keys of which the same is to be said."""
    return tuple(Rule(f"{section}.{key}" if section else key, decision, words, reads=reads) for key in keys)


_SAVE = "npuzero.checkpoint.save(folder, model, optimizer.optim, step=n) and load are your loop's calls."
_ACTIVATIONS = (
    "Where activations rest moves no number. To have them on the host, call npuzero.zero yourself with "
    "replace(config.plan(ranks), activations=Placement(memory=Memory.HOST))."
)
_MONITOR = "npuzero sends nothing anywhere: npuzero.observe tells sinks of yours."
OTHERS = (
    *several(
        NOTED,
        "ckpt",
        _SAVE,
        "enable_save_ckpt",
        "save_ckpt_folder",
        "checkpoint_every",
        "oss_snapshot_freq",
        "snapshot_ckpt_folder",
        "stop_file_path",
        "auto_resume",
        "enable_internevo2hf_ckpt",
        "is_old_api",
        "need_metadata",
    ),
    *several(
        NOTED,
        "ckpt",
        "A Checkpointer saves beside training, to a folder; copy it to an object store from there.",
        "async_upload",
        "async_upload_tmp_folder",
    ),
    *several(
        NOTED,
        "ckpt",
        "InternEvo's own files are not read: export weights to safetensors, and give initialize(weights=).",
        "load_ckpt_folder",
        "load_model_only_folder",
        "load_given_ckpt",
        "load_optimizer",
    ),
    Rule(
        "ckpt.load_ckpt_info",
        NOTED,
        "InternEvo's own files are not read: export weights to safetensors, and give initialize(weights=).",
    ),
    *several(
        NOTED,
        "ckpt.load_ckpt_info",
        "InternEvo's own files are not read: export weights to safetensors, and give initialize(weights=).",
        "path",
        "content",
        "ckpt_type",
    ),
    *several(NOTED, "loss", "The loss is yours: F.cross_entropy(..., label_smoothing=).", "label_smoothing"),
    *several(NOTED, "loss", "The loss is yours.", "moe_loss_coeff", "mtp_loss_coeff", "op_type"),
    *several(
        NOTED,
        "monitor.alert",
        _MONITOR,
        "enable_feishu_alert",
        "feishu_alert_address",
        "light_monitor_address",
        "alert_file_path",
    ),
    *several(NOTED, "monitor.tensorboard", _MONITOR, "queue_max_length", "interval_step"),
    *several(NOTED, "tensorboard", _MONITOR, "queue_max_length", "interval_step"),
    *several(NOTED, "", _MONITOR, "enable_tb", "tensorboard_folder", "resume_tb_folder", "alert_address", "DO_ALERT"),
    *several(NOTED, "", "A flag of the process: set torch.backends.cudnn.benchmark.", "cudnn_benchmark", reads=flag),
    *several(
        NOTED, "", "A flag of the process: set torch.backends.cudnn.deterministic.", "cudnn_deterministic", reads=flag
    ),
    Rule(
        "use_fp32_norm",
        REFUSED,
        "The model decides: have its norms compute in float32 (x.float()), and leave it False.",
        reads=flag,
        unless=(False,),
    ),
    *several(
        NOTED,
        "",
        "What of a block runs again moves no number: whole blocks do, by model.checkpoint.",
        "selective_checkpoint",
        reads=flag,
    ),
    *several(NOTED, "", _ACTIVATIONS, "selective_checkpoint_offload", reads=flag),
    *several(NOTED, "cpu_offloading", _ACTIVATIONS, "enable", "offloading_activations", reads=flag),
    *several(NOTED, "cpu_offloading", _ACTIVATIONS, "num_layers", reads=integer(0)),
    Rule("fp8", REFUSED, "npuzero computes in bf16, fp16, fp32 and tf32: take model.dtype.", unless=(None,)),
    *several(NOTED, "", "AdamW is npuzero's, one kernel for all parameters.", "use_apex_adam", reads=flag),
    *several(NOTED, "", "The name of the run: your program's.", "JOB_NAME"),
    *several(NOTED, "", "The model is yours.", "model_type", "VOCAB_SIZE", "HIDDEN_SIZE"),
    *several(NOTED, "", "Metrics are your program's.", "metric_dtype"),
    *several(NOTED, "", "Steps are your loop's.", "batch_count"),
    *several(NOTED, "", "What is loaded is your program's.", "only_load_lr", reads=flag),
    *several(NOTED, "", "Gradients that stages have in common are summed by the engine.", "gradient_handler"),
    *several(NOTED, "", "Units are found: the blocks of the model.", "fsdp_wrap_cls"),
    *several(NOTED, "", "data.micro_num says it.", "NUM_MICRO_BATCHES"),
    *several(NOTED, "", "Stages ask each other for shapes.", "TENSOR_SHAPE"),
    *several(NOTED, "", "The padding is your loader's.", "pad_token_id"),
    *(Rule(f"{section}.*", NOTED, f"An argument of {OWN[section]}.") for section in ("hf", "generation", "moe")),
)
