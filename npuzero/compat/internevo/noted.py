"""InternEvo keys that have no effect on the engine, and a helper that makes rules for several keys at once."""

from __future__ import annotations

from npuzero.compat.rules import Decision, KeyRule, Reader, integer_reader, read_anything, read_flag

NOTED, REFUSED = Decision.NOTED, Decision.REFUSED

#: Sections with arguments of an object that the program makes itself, and the name of that object.
OWN = {
    "model": "your model's constructor",
    "data": "your loader",
    "hf": "your model's constructor",
    "generation": "your program's generation",
    "moe": "your model's expert layers",
}


def rules_for_keys(
    decision: Decision, section: str, words: str, *keys: str, reads: Reader = read_anything
) -> tuple[KeyRule, ...]:
    """Return rules with the same decision and words for several keys."""
    return tuple(KeyRule(f"{section}.{key}" if section else key, decision, words, reads=reads) for key in keys)


_SAVE = "npuzero.checkpoint.save(folder, model, optimizer.optim, step=n) and load are your loop's calls."
_ACTIVATIONS = (
    "Where activations rest moves no number. To have them on the host, call npuzero.zero yourself with "
    "replace(config.plan(ranks), activations=Placement(memory=Memory.HOST))."
)
_MONITOR = "npuzero sends nothing anywhere: npuzero.observe tells sinks of yours."
OTHERS = (
    *rules_for_keys(
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
    *rules_for_keys(
        NOTED,
        "ckpt",
        "A Checkpointer saves beside training, to a folder; copy it to an object store from there.",
        "async_upload",
        "async_upload_tmp_folder",
    ),
    *rules_for_keys(
        NOTED,
        "ckpt",
        "InternEvo's own files are not read: export weights to safetensors, and give initialize(weights=).",
        "load_ckpt_folder",
        "load_model_only_folder",
        "load_given_ckpt",
        "load_optimizer",
    ),
    KeyRule(
        "ckpt.load_ckpt_info",
        NOTED,
        "InternEvo's own files are not read: export weights to safetensors, and give initialize(weights=).",
    ),
    *rules_for_keys(
        NOTED,
        "ckpt.load_ckpt_info",
        "InternEvo's own files are not read: export weights to safetensors, and give initialize(weights=).",
        "path",
        "content",
        "ckpt_type",
    ),
    *rules_for_keys(NOTED, "loss", "The loss is yours: F.cross_entropy(..., label_smoothing=).", "label_smoothing"),
    *rules_for_keys(NOTED, "loss", "The loss is yours.", "moe_loss_coeff", "mtp_loss_coeff", "op_type"),
    *rules_for_keys(
        NOTED,
        "monitor.alert",
        _MONITOR,
        "enable_feishu_alert",
        "feishu_alert_address",
        "light_monitor_address",
        "alert_file_path",
    ),
    *rules_for_keys(NOTED, "monitor.tensorboard", _MONITOR, "queue_max_length", "interval_step"),
    *rules_for_keys(NOTED, "tensorboard", _MONITOR, "queue_max_length", "interval_step"),
    *rules_for_keys(
        NOTED, "", _MONITOR, "enable_tb", "tensorboard_folder", "resume_tb_folder", "alert_address", "DO_ALERT"
    ),
    *rules_for_keys(
        NOTED, "", "A flag of the process: set torch.backends.cudnn.benchmark.", "cudnn_benchmark", reads=read_flag
    ),
    *rules_for_keys(
        NOTED,
        "",
        "A flag of the process: set torch.backends.cudnn.deterministic.",
        "cudnn_deterministic",
        reads=read_flag,
    ),
    KeyRule(
        "use_fp32_norm",
        REFUSED,
        "The model decides: have its norms compute in float32 (x.float()), and leave it False.",
        reads=read_flag,
        unless=(False,),
    ),
    *rules_for_keys(
        NOTED,
        "",
        "What of a block runs again moves no number: whole blocks do, by model.checkpoint.",
        "selective_checkpoint",
        reads=read_flag,
    ),
    *rules_for_keys(NOTED, "", _ACTIVATIONS, "selective_checkpoint_offload", reads=read_flag),
    *rules_for_keys(NOTED, "cpu_offloading", _ACTIVATIONS, "enable", "offloading_activations", reads=read_flag),
    *rules_for_keys(NOTED, "cpu_offloading", _ACTIVATIONS, "num_layers", reads=integer_reader(0)),
    KeyRule("fp8", REFUSED, "npuzero computes in bf16, fp16, fp32 and tf32: take model.dtype.", unless=(None,)),
    *rules_for_keys(NOTED, "", "AdamW is npuzero's, one kernel for all parameters.", "use_apex_adam", reads=read_flag),
    *rules_for_keys(NOTED, "", "The name of the run: your program's.", "JOB_NAME"),
    *rules_for_keys(NOTED, "", "The model is yours.", "model_type", "VOCAB_SIZE", "HIDDEN_SIZE"),
    *rules_for_keys(NOTED, "", "Metrics are your program's.", "metric_dtype"),
    *rules_for_keys(NOTED, "", "Steps are your loop's.", "batch_count"),
    *rules_for_keys(NOTED, "", "What is loaded is your program's.", "only_load_lr", reads=read_flag),
    *rules_for_keys(NOTED, "", "Gradients that stages have in common are summed by the engine.", "gradient_handler"),
    *rules_for_keys(NOTED, "", "Units are found: the blocks of the model.", "fsdp_wrap_cls"),
    *rules_for_keys(NOTED, "", "data.micro_num says it.", "NUM_MICRO_BATCHES"),
    *rules_for_keys(NOTED, "", "Stages ask each other for shapes.", "TENSOR_SHAPE"),
    *rules_for_keys(NOTED, "", "The padding is your loader's.", "pad_token_id"),
    *(KeyRule(f"{section}.*", NOTED, f"An argument of {OWN[section]}.") for section in ("hf", "generation", "moe")),
)
