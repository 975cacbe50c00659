"""Read values for "auto" keys from the arguments of transformers' Trainer."""

from __future__ import annotations

from typing import Any

from npuzero.compat.translation import fill_auto_values

#: Maps a key to the Trainer argument with its value.
ARGUMENTS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}
_BETAS = ("adam_beta1", "adam_beta2")
_ZERO_IS_UNSAID = ("scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps")


def read_trainer_arguments(args: Any, world: int) -> dict[str, Any]:
    """Return values by path from the attributes of ``args``; {} if it has none of them.

    Steps that the Trainer computes later (0 or less) are left out.
    """
    found = {
        path: value
        for path, value in fill_auto_values(ARGUMENTS, args).items()
        if path not in _ZERO_IS_UNSAID or (isinstance(value, int) and value > 0)
    }
    if all(hasattr(args, name) for name in _BETAS):
        found["optimizer.params.betas"] = [getattr(args, name) for name in _BETAS]
    # The Trainer's schedules warm up from 0.
    if "optimizer.params.lr" in found:
        found["scheduler.params.warmup_min_lr"] = 0
    micro, passes = (found.get(f"{key}") for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    if micro and passes:
        found["train_batch_size"] = micro * passes * world
    return found
