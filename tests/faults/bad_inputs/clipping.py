"""Bad inputs: clipping, and calls with a plain model."""

from __future__ import annotations

import math
import re

import torch

import npuzero
from npuzero import PRESETS, ConfigError, StateError
from npuzero.comm import World
from world.toy import build

from .case import Table, backward, cut, loss_of

TABLE = Table()
bad, fine = TABLE.bad, TABLE.fine

for _name, _norm in {"0": 0, "-1": -1.0, "text": "1", "nan": math.nan, "True": True, "None": None}.items():
    bad(f"max_norm {_name}", ConfigError, "max_norm", "positive", re.escape(repr(_norm)))(
        lambda world, norm=_norm: npuzero.clip_grad_norm_(cut(world), norm)
    )

    bad(f"norm_type {_name}", ConfigError, "norm_type", "positive", re.escape(repr(_norm)))(
        lambda world, norm=_norm: npuzero.clip_grad_norm_(cut(world), 1.0, norm)
    )

for _name, _call in {
    "clip_grad_norm_": lambda model: npuzero.clip_grad_norm_(model, 1.0),
    "report": npuzero.report,
    "no_sync": lambda model: npuzero.no_sync(model).__enter__(),
    "gathered": lambda model: npuzero.gathered(model).__enter__(),
    "full_state_dict": npuzero.full_state_dict,
    "load_full_state_dict": lambda model: npuzero.load_full_state_dict(model, {}),
}.items():
    bad(f"{_name} of a plain model", StateError, "ToyGPT", r"npuzero\.zero")(lambda world, call=_call: call(build()))


@bad("clip_grad_norm_ of parameters", StateError, "npuzero.zero", "module|model", ranks=2)
def _(world: World) -> None:
    npuzero.clip_grad_norm_(cut(world).parameters(), 1.0)


@bad("report before a step", StateError, "step", ranks=2)
def _(world: World) -> None:
    npuzero.report(cut(world))


@bad("NaN gradients", StateError, "finite", "nan", "root", "zero_grad", ranks=2)
def _(world: World) -> None:
    model = cut(world)
    loss = loss_of(model, world.rank)
    (loss * math.nan if world.rank == 1 else loss).backward()
    npuzero.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


for _stage in PRESETS:
    for _foreach in (False, True):

        @bad(f"torch's clip_grad_norm_, {_stage}, foreach={_foreach}", StateError, r"npuzero\.clip_grad_norm_", ranks=2)
        def _(world: World, stage: str = _stage, foreach: bool = _foreach) -> None:
            model = cut(world, plan=stage)
            backward(model, world)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)


@bad("torch's clip_grad_value_", StateError, "npuzero", ranks=2)
def _(world: World) -> None:
    model = cut(world)
    backward(model, world)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)


@bad("torch's GradScaler", StateError, "npuzero", ranks=2)
def _(world: World) -> None:
    model = cut(world, "zero1")
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)


@fine("clipping without gradients")
def _(world: World) -> None:
    assert npuzero.clip_grad_norm_(cut(world), 1.0) == 0


@fine("NaN gradients that are not asked about")
def _(world: World) -> None:
    model = cut(world)
    (loss_of(model) * math.nan).backward()
    assert npuzero.clip_grad_norm_(model, 1.0).isnan()
