"""Shapes of a model from its class in transformers, built on meta: no data, no network, only transformers' own code."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from npuzero.config import describe_value
from npuzero.errors import ConfigError, NpuZeroError
from npuzero.planner.models.keys import DEPTH, missing_size_error, refuse_unknown_keys

#: Keys about storage, loading and execution of a model, on which its shapes do not depend.
_PASSED_OVER = (
    "auto_map",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "attn_implementation",
    "_attn_implementation",
)
#: Tasks of the class that is used if the file names none: the first available one, complete models first.
_TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MASKED_LM",
    "CAUSAL_LM",
)
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def import_transformers() -> Any:
    """Return the package transformers; None if it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        return None


def build_meta_model(transformers: Any, values: Mapping[str, Any], name: str) -> nn.Module:
    """Return the model that a JSON describes, on meta.

    Raises:
        ConfigError: the class is not in transformers, or sizes are missing, mistyped or impossible.
    """
    _check_depth(values, name)
    try:
        config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(_shapes_only(values))
        _check_sizes(values, config, name)
        kind = _choose_model_class(transformers, values, config, name)
        _load_nothing(config)
        with torch.device("meta"):
            model: nn.Module = kind(config)
    except NpuZeroError:
        raise
    except Exception as error:  # any error of a transformers class about its sizes
        raise ConfigError(
            f"{name}: {values['model_type']}",
            expected=f"a model that transformers {transformers.__version__} can build",
            got=" ".join(f"{type(error).__name__}: {error}".split()),
            do="Correct the file, or install what the class asks for; or give --parameters instead.",
        ) from error
    return model


def _shapes_only(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _shapes_only(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in _PASSED_OVER
    }


def _check_depth(values: Mapping[str, Any], name: str) -> None:
    """Refuse a model of a million blocks, which would take hours to build, and one of none, which is a mistake."""
    for key, value in values.items():
        if isinstance(value, dict):
            _check_depth(value, f"{name}: {key}")
        elif type(value) is int and (key in _DEPTHS or (key.endswith(("layer", "layers", "depth")) and value > 0)):
            DEPTH.check(f"{name}: {key}", value)


def _check_sizes(values: Mapping[str, Any], config: Any, name: str) -> None:
    """Refuse to assume sizes that are not in the file, because of a default or a misspelt key.

    Parts of a composed model (text, vision) are exempt: transformers omits defaults when it writes them.
    """
    defaults = _get_default_config(config)
    if defaults is None:
        return
    names = config.attribute_map
    known = {*defaults.to_dict(), *names}
    others = [key for key in values if key not in known]
    # A missing size counts only if the config really took the default: a class may derive it from another key.
    for size in _SIZES:
        key = names.get(size, size)
        default = getattr(defaults, key, None)
        if default is not None and getattr(config, key) == default and not {size, key} & values.keys():
            raise missing_size_error(name, key, others, default)
    for part in config.sub_configs:
        made = getattr(config, part, None)
        if values.get(part) is None and hasattr(made, "num_hidden_layers") and made == getattr(defaults, part, None):
            raise missing_size_error(name, part, others)
    refuse_unknown_keys(values, known, name, () if config.sub_configs else _SIZES)


def _get_default_config(config: Any) -> Any:
    """Return the config of an empty file; None if such a file would be refused."""
    try:
        return type(config)()
    except Exception:
        return None


def _choose_model_class(transformers: Any, values: Mapping[str, Any], config: Any, name: str) -> Any:
    """Return the class named in the file, else the transformers class for this kind of model."""
    named = values.get("architectures")
    kinds = [getattr(transformers, str(each), None) for each in named or _usual_class_names(values["model_type"])]
    for kind in kinds:
        is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        if is_model and isinstance(config, kind.config_class):  # type: ignore[union-attr]
            return kind
    raise ConfigError(
        f"{name}: architectures",
        expected=f"a class that transformers {transformers.__version__} has for {values['model_type']!r}",
        got=describe_value(named) if named else "no such key, and no class that is usual for it",
        do="Its own code is not run: call npuzero.predict(model, ...) where it is built, or give --parameters.",
    )


def _usual_class_names(model_type: str) -> list[str]:
    """Return the names of the classes for this kind of model, by task."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    mappings = [getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in _TASKS]
    found = [mapping.get(model_type, ()) for mapping in (*mappings, auto.MODEL_MAPPING_NAMES)]
    return [name for names in found for name in ([names] if isinstance(names, str) else names)]


def _load_nothing(config: Any) -> None:
    """Keep models from downloading a backbone's weights when they are built; some do so even on meta."""
    for part in (config, *(getattr(config, part, None) for part in config.sub_configs)):
        if hasattr(part, "use_pretrained_backbone"):
            part.use_pretrained_backbone = False
