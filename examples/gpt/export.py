"""Weights to one safetensors file and back into a plain model; the model's shape travels in the file's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from model import GPT, GPTConfig
from safetensors import safe_open
from safetensors.torch import load_model, save_file
from torch import Tensor


def save_weights(path: Path, config: GPTConfig, state: Mapping[str, Tensor]) -> None:
    """Write ``state``, a full state dict. Tied weights are written once, under the name that the model lists first."""
    with torch.device("meta"):
        names = [name for name, _ in GPT(config).named_parameters()]
    weights = {name: state[name].contiguous() for name in names}
    save_file(weights, path, metadata={"format": "pt", "config": json.dumps(asdict(config))})


def load_weights(path: Path) -> GPT:
    """The plain model that ``save_weights`` wrote, on the CPU, in the dtype of its weights, ready to evaluate."""
    with safe_open(path, framework="pt") as file:
        config = GPTConfig(**json.loads(file.metadata()["config"]))
        dtype = file.get_tensor("embedding.weight").dtype
    model = GPT(config).to(dtype)  # ties head.weight to embedding.weight; load_model fills what is shared once
    load_model(model, path)
    return model.eval()
