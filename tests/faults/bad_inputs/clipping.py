"""Bad inputs: clipping, and calls with a plain model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import npuzero
from npuzero import PRESETS, ConfigError, StateError
from npuzero.comm import World
from world.toy import build_seeded_model

from .case import BadInputTable, backward_toy_loss, bad_input_loss, shard_toy

TABLE = BadInputTable()
bad, fine = TABLE.bad, TABLE.fine

for _name, _norm in {"0": 0, "-1": -1.0, "text": "1", "nan": math.nan, "True": True, "None": None}.items():
    bad(f"max_norm {_name}", ConfigError, "max_norm", "positive", re.escape(repr(_norm)))(
        lambda world, norm=_norm: npuzero.clip_grad_norm_(shard_toy(world), norm)
    )

    bad(f"norm_type {_name}", ConfigError, "norm_type", "positive", re.escape(repr(_norm)))(
        lambda world, norm=_norm: npuzero.clip_grad_norm_(shard_toy(world), 1.0, norm)
    )

for _name, _call in {
    "clip_grad_norm_": lambda model: npuzero.clip_grad_norm_(model, 1.0),
    "report": npuzero.report,
    "no_sync": lambda model: npuzero.no_sync(model).__enter__(),
    "gathered": lambda model: npuzero.gathered(model).__enter__(),
    "full_state_dict": npuzero.full_state_dict,
    "load_full_state_dict": lambda model: npuzero.load_full_state_dict(model, {}),
}.items():
    bad(f"{_name} of a plain model", StateError, "ToyGPT", r"npuzero\.zero")(
        lambda world, call=_call: call(build_seeded_model())
    )


_WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "parameters()": lambda model: model.parameters(),
    "a list": lambda model: list(model.parameters()),
    "those that train": lambda model: (p for p in model.parameters() if p.requires_grad),
}
for _name, _way in _WAYS.items():

    @fine(f"clipping of {_name}")
    def _(world: World, way: Callable[[nn.Module], Any] = _way) -> None:
        model = shard_toy(world)
        backward_toy_loss(model, world)
        norms = npuzero.grad_norms(way(model))
        norm = npuzero.clip_grad_norm_(way(model), 1)
        assert norm > 1
        torch.testing.assert_close(norm.item(), math.hypot(*norms.values()))
        torch.testing.assert_close(npuzero.clip_grad_norm_(model, 1.0).item(), 1.0)
        npuzero.clip_grad_value_(way(model), 0.5)


@fine("clipping of some parameters")
def _(world: World) -> None:
    model = shard_toy(world)
    backward_toy_loss(model, world)
    assert npuzero.clip_grad_norm_(list(model.parameters())[:4], 1e-3) > 1e-3
    torch.testing.assert_close(npuzero.clip_grad_norm_(list(model.parameters())[:4], 1.0).item(), 1e-3)
    assert npuzero.clip_grad_norm_(model.norm.weight, 1.0) > 0


for _name, _some, _says in [
    (
        "parameters of another model",
        lambda model: build_seeded_model().parameters(),
        r"\d+ that no model made by npuzero\.zero",
    ),
    ("nothing", lambda model: [], "list"),
    ("a number", lambda model: 3, "int"),
]:
    bad(f"clip_grad_norm_ of {_name}", StateError, "npuzero.clip_grad_norm_", "Pass the model", _says, ranks=2)(
        lambda world, some=_some: npuzero.clip_grad_norm_(some(shard_toy(world)), 1.0)
    )


@bad("clip_grad_norm_ of a part of a model", StateError, "Block", "a part of one", "outermost", ranks=2)
def _(world: World) -> None:
    npuzero.clip_grad_norm_(shard_toy(world).blocks[0], 1.0)


@bad("report before a step", StateError, "step", ranks=2)
def _(world: World) -> None:
    npuzero.report(shard_toy(world))


@bad("NaN gradients", StateError, "finite", "nan", "root", "zero_grad", ranks=2)
def _(world: World) -> None:
    model = shard_toy(world)
    loss = bad_input_loss(model, world.rank)
    (loss * math.nan if world.rank == 1 else loss).backward()
    npuzero.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


for _stage in PRESETS:
    for _foreach in (False, True):

        @bad(f"torch's clip_grad_norm_, {_stage}, foreach={_foreach}", StateError, r"npuzero\.clip_grad_norm_", ranks=2)
        def _(world: World, stage: str = _stage, foreach: bool = _foreach) -> None:
            model = shard_toy(world, plan=stage)
            backward_toy_loss(model, world)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)


@bad("torch's clip_grad_value_", StateError, "npuzero", ranks=2)
def _(world: World) -> None:
    model = shard_toy(world)
    backward_toy_loss(model, world)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)


@bad("torch's GradScaler", StateError, "npuzero", ranks=2)
def _(world: World) -> None:
    model = shard_toy(world, "zero1")
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(bad_input_loss(model)).backward()
    scaler.step(optimizer)


@fine("clipping without gradients")
def _(world: World) -> None:
    assert npuzero.clip_grad_norm_(shard_toy(world), 1.0) == 0


@fine("NaN gradients that are not asked about")
def _(world: World) -> None:
    model = shard_toy(world)
    (bad_input_loss(model) * math.nan).backward()
    assert npuzero.clip_grad_norm_(model, 1.0).isnan()


bad("clip_grad_norm_ with its arguments swapped", ConfigError, r"got ToyGPT\( .{,60} \(ToyGPT\)\.", "after the model")(
    lambda world: npuzero.clip_grad_norm_(1.0, shard_toy(world))  # type: ignore[arg-type]
)
bad("full_gradient by name", StateError, r"got 'norm.weight' \(str\)")(
    lambda world: npuzero.full_gradient("norm.weight")  # type: ignore[arg-type]
)
