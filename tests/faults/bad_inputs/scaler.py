"""Bad inputs: loss scaling."""

from __future__ import annotations

import math
import pickle
from typing import Any

import torch

import npuzero
from npuzero import CheckpointError, ConfigError, StateError
from npuzero.comm import World

from .case import BadInputTable, bad_input_loss, shard_toy

TABLE = BadInputTable()
bad = TABLE.bad

for _name, _options, _says in [
    ("floor 0", {"floor": 0.0}, ("floor", "positive", "0.0")),
    ("init_scale below the floor", {"init_scale": 0.5}, ("init_scale", "floor=1.0", "0.5")),
    ("init_scale inf", {"init_scale": math.inf}, ("init_scale", "inf")),
    ("growth_factor 1", {"growth_factor": 1.0}, ("growth_factor", "more than 1")),
    ("backoff_factor 1", {"backoff_factor": 1.0}, ("backoff_factor", "between 0 and 1")),
    ("growth_interval 0", {"growth_interval": 0}, ("growth_interval", "at least 1")),
    ("hysteresis 0", {"hysteresis": 0}, ("hysteresis", "at least 1")),
    ("ceiling below the floor", {"ceiling": 0.5}, ("ceiling", "floor=1.0", "0.5")),
    ("init_scale above the ceiling", {"ceiling": 2.0**10}, ("init_scale", "ceiling=1024.0", "16777216.0")),
    ("growth_delay below 0", {"growth_delay": -1}, ("growth_delay", "at least 0")),
    ("min_scale", {"min_scale": 2.0}, ("min_scale", "Did you mean 'floor'")),
]:
    bad(f"LossScaler {_name}", ConfigError, "LossScaler", *_says)(
        lambda world, options=_options: npuzero.LossScaler(**options)
    )


def scaled_backward_optimizer(world: World, scaler: Any) -> Any:
    """Return the optimizer of a sharded model after a scaled backward pass."""
    model = shard_toy(world, 3)
    optimizer = npuzero.AdamW(model.parameters())
    scaler.scale(bad_input_loss(model, world.rank)).backward()
    return optimizer


@bad("torch's GradScaler on a sharded model", StateError, "gradient of scale", r"npuzero\.LossScaler", ranks=2)
def _(world: World) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.step(scaled_backward_optimizer(world, scaler))


@bad("unscale_ twice", StateError, r"LossScaler\.unscale_", "once", "unscaled", ranks=2)
def _(world: World) -> None:
    scaler = npuzero.LossScaler()
    optimizer = scaled_backward_optimizer(world, scaler)
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


@bad("scaler stepped twice", StateError, r"LossScaler\.step", "once", "stepped", ranks=2)
def _(world: World) -> None:
    scaler = npuzero.LossScaler()
    optimizer = scaled_backward_optimizer(world, scaler)
    scaler.step(optimizer)
    scaler.step(optimizer)


@bad("unscale_ without gradients", StateError, r"LossScaler\.unscale_", "none on any rank", ranks=2)
def _(world: World) -> None:
    scaler = npuzero.LossScaler()
    optimizer = scaled_backward_optimizer(world, scaler)
    optimizer.zero_grad()
    scaler.unscale_(optimizer)


@bad("scaler updated without a step", StateError, r"LossScaler\.update", "none since")
def _(world: World) -> None:
    scaler = npuzero.LossScaler()
    scaler.scale(torch.ones(()))
    scaler.update()


@bad("scaler updated before a loss", StateError, r"LossScaler\.update", "none yet")
def _(world: World) -> None:
    npuzero.LossScaler().update()


@bad("scaler steps with a closure", StateError, r"LossScaler\.step", "closure")
def _(world: World) -> None:
    scaler = npuzero.LossScaler()
    scaler.step(scaled_backward_optimizer(world, scaler), lambda: None)


@bad("scaler pickled within a step", StateError, "update")
def _(world: World) -> None:
    scaler = npuzero.LossScaler()
    scaler.unscale_(scaled_backward_optimizer(world, scaler))
    pickle.dumps(scaler)


@bad("scaling a number", ConfigError, r"LossScaler\.scale", "tensor", "3")
def _(world: World) -> None:
    npuzero.LossScaler().scale(3)


@bad("loading a disabled scaler's state", CheckpointError, "loss scaler state", "growth_factor")
def _(world: World) -> None:
    npuzero.LossScaler().load_state_dict({})
