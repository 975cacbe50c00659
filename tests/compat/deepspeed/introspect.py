"""The keys that the installed DeepSpeed's own models of its configuration have."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

#: Section of a configuration, and the model that reads it: file and class in the package.
MODELS = {
    "zero_optimization": ("runtime.zero.config", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": ("runtime.zero.offload_config", "DeepSpeedZeroOffloadOptimizerConfig"),
    "zero_optimization.leaf_module": ("runtime.zero.leaf_module_config", "DeepSpeedZeroLeafModuleConfig"),
    "bf16": ("runtime.precision_config", "DeepSpeedBF16Config"),
    "bfloat16": ("runtime.precision_config", "DeepSpeedBF16Config"),
    "fp16": ("runtime.precision_config", "DeepSpeedFP16Config"),
    "hybrid_engine": ("runtime.config", "HybridEngineConfig"),
    "comms_logger": ("comm.config", "CommsLoggerConfig"),
    "tensorboard": ("monitor.config", "TensorBoardConfig"),
    "wandb": ("monitor.config", "WandbConfig"),
    "csv_monitor": ("monitor.config", "CSVConfig"),
    "comet": ("monitor.config", "CometConfig"),
    "compile": ("compile.config", "CompileConfig"),
    "weight_quantization": ("inference.config", "WeightQuantConfig"),
    "tensor_parallel": ("runtime.tensor_parallel.config", "TPTrainingConfig"),
    "tensor_parallel.tensor_parallel": ("runtime.tensor_parallel.config", "TPConfig"),
    "tensor_parallel.tp": ("runtime.tensor_parallel.config", "TPConfig"),
    "timers.throughput": ("utils.config", "DeepSpeedThroughputTimerConfig"),
}


def pydantic_keys() -> Iterator[tuple[str, str]]:
    """Each key of a section that a model reads, under its name and its alias, and the file."""
    for section, (module, name) in MODELS.items():
        fields: dict[str, Any] = getattr(import_module(f"deepspeed.{module}"), name).model_fields
        for key, field in fields.items():
            for spelling in filter(None, (key, field.alias)):
                path = f"{section}.{spelling}"
                yield path, module.replace(".", "/") + ".py"
