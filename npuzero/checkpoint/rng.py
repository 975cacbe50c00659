"""Save and restore the random number generators of a rank: torch's, the device's, numpy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

State = dict[str, Any]


def capture_rng_state(device: torch.device) -> State:
    """Return the states of all generators, as tensors and numbers, which load safely."""
    kind, keys, *rest = np.random.get_state()
    state: State = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }
    if device.type != "cpu":
        state["device"] = getattr(torch, device.type).get_rng_state(device)
    return state


def load_rng_state(state: State, device: torch.device) -> None:
    """Restore ``state``; skip the device's generator if the state is from another kind of device."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if device.type != "cpu" and "device" in state:
        getattr(torch, device.type).set_rng_state(state["device"], device)


def set_derived_rng(state: State, device: torch.device, turn: int) -> None:
    """Derive generators from ``state`` and ``turn``, for a rank without a saved state."""
    load_rng_state(state, device)
    seeds = torch.randint(2**31, (turn,)).tolist()
    torch.manual_seed(seeds[-1])
    random.seed(seeds[-1])
    np.random.seed(seeds[-1])
