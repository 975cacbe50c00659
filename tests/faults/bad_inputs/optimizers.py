"""Bad inputs: optimizers."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import torch
from torch import nn

import npuzero
from npuzero import PRESETS, ConfigError, ContractError, StateError
from npuzero.comm import World
from world.toy import build_seeded_model

from .case import BadInputTable, backward_toy_loss, shard_toy

TABLE = BadInputTable()
bad, fine = TABLE.bad, TABLE.fine

for _stage in PRESETS:
    for _kind, _options in [
        ("AdamW", {"foreach": False}), ("AdamW", {"foreach": True}), ("AdamW", {"fused": True}),
        ("SGD", {"foreach": False}), ("SGD", {"foreach": True}), ("SGD", {"fused": True}), ("SGD", {"momentum": 0.9}),
        ("Adagrad", {}), ("RMSprop", {}), ("LBFGS", {}),
    ]:  # fmt: skip
        if _stage not in ("zero0", "zero1", "zero3") and (_kind, *_options) not in (
            ("AdamW", "fused"),
            ("SGD", "foreach"),
        ):
            continue
        _text = ", ".join(f"{key}={value}" for key, value in _options.items())

        @bad(f"torch {_kind}({_text}), {_stage}", StateError, "npuzero.AdamW|full_state_dict", ranks=2)
        def _(world: World, stage: str = _stage, kind: str = _kind, options: Any = _options) -> None:
            model = shard_toy(world, plan=stage)
            optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
            backward_toy_loss(model, world)
            optimizer.step((lambda: 0.0) if kind == "LBFGS" else None)


@bad("optimizer over a deleted model", StateError, "deleted", ranks=2)
def _(world: World) -> None:
    model = npuzero.zero(build_seeded_model(), world=world)
    optimizer = npuzero.AdamW(model.parameters())
    del model
    gc.collect()
    optimizer.step()


@bad("cut and plain parameters mixed", StateError, "beside", "zero", ranks=2)
def _(world: World) -> None:
    model, plain = shard_toy(world), nn.Linear(3, 3)
    optimizer = npuzero.AdamW([*model.parameters(), *plain.parameters()])
    backward_toy_loss(model, world)
    optimizer.step()


@bad("cut and deepcopied parameters mixed", StateError, "beside|deleted", "zero", ranks=2)
def _(world: World) -> None:
    plain = build_seeded_model()
    copied = copy.deepcopy(plain)
    model = shard_toy(world, model=plain)
    optimizer = npuzero.AdamW([*model.parameters(), *copied.parameters()])
    backward_toy_loss(model, world)
    optimizer.step()


P = lambda: [nn.Parameter(torch.ones(3))]  # noqa: E731
for _name, _make, _says in [
    ("ZeroOptimizer of LBFGS", lambda: npuzero.ZeroOptimizer(torch.optim.LBFGS, P()), ("LBFGS", "element-wise")),
    ("ZeroOptimizer of Adafactor", lambda: npuzero.ZeroOptimizer(torch.optim.Adafactor, P()), ("element-wise",)),
    ("ZeroOptimizer of SparseAdam", lambda: npuzero.ZeroOptimizer(torch.optim.SparseAdam, P()), ("SparseAdam",)),
    ("ZeroOptimizer of ours", lambda: npuzero.ZeroOptimizer(npuzero.AdamW, P()), ("AdamW",)),
    ("ZeroOptimizer of an instance", lambda: npuzero.ZeroOptimizer(torch.optim.SGD(P(), lr=1), P()), ("subclass",)),
    ("ZeroOptimizer of text", lambda: npuzero.ZeroOptimizer("SGD", P()), ("subclass", "SGD")),
    ("ZeroOptimizer, unknown keyword", lambda: npuzero.ZeroOptimizer(torch.optim.SGD, P(), nesterof=1), ("nesterof",)),
    ("ZeroOptimizer, bad value", lambda: npuzero.ZeroOptimizer(torch.optim.SGD, P(), lr=-0.1), ("SGD", "-0.1")),
    ("ZeroOptimizer, differentiable", lambda: npuzero.ZeroOptimizer(torch.optim.SGD, P(), differentiable=1), ("diff",)),
    ("Adam(differentiable=True)", lambda: npuzero.Adam(P(), differentiable=True), ("differentiable=False",)),
    ("lr -1", lambda: npuzero.AdamW(P(), lr=-1), ("-1", "learning rate|lr")),
    ("lr nan", lambda: npuzero.AdamW(P(), lr=math.nan), ("nan", "learning rate|lr")),
    ("lr is text", lambda: npuzero.AdamW(P(), lr="1e-3"), ("1e-3", "lr")),
    ("betas beyond 1", lambda: npuzero.AdamW(P(), betas=(0.9, 1.0)), ("1.0", "beta")),
    ("betas below 0", lambda: npuzero.Adam(P(), betas=(-0.1, 0.9)), ("-0.1", "beta")),
    ("one beta", lambda: npuzero.Adam(P(), betas=(0.9,)), ("beta",)),
    ("eps -1", lambda: npuzero.AdamW(P(), eps=-1), ("-1", "eps")),
    ("weight_decay -1", lambda: npuzero.AdamW(P(), weight_decay=-1), ("-1", "weight_decay")),
    ("group lr -1", lambda: npuzero.AdamW([{"params": P(), "lr": -1}]), ("-1",)),
    ("no parameters", lambda: npuzero.AdamW([]), ("empty",)),
    ("parameters are a module", lambda: npuzero.AdamW(nn.Linear(2, 2)), ("Linear",)),
    ("parameters are a tensor", lambda: npuzero.AdamW(torch.ones(3)), ("Tensor",)),
    ("parameter twice", lambda: npuzero.AdamW([{"params": (p := P())}, {"params": p}]), ("more than one|twice",)),
]:  # fmt: skip
    bad(_name, ConfigError, *_says)(lambda world, make=_make: make())


@bad("lr becomes nan", ContractError, "nan", ranks=2)
def _(world: World) -> None:
    model = shard_toy(world)
    optimizer = npuzero.AdamW(model.parameters())
    backward_toy_loss(model, world)
    optimizer.param_groups[0]["lr"] = math.nan
    optimizer.step()


@bad("amsgrad set after the first step", ContractError, "amsgrad", ranks=2)
def _(world: World) -> None:
    model = shard_toy(world)
    optimizer = npuzero.AdamW(model.parameters())
    for _ in range(2):
        backward_toy_loss(model, world)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["amsgrad"] = True


@bad("sparse gradients", ConfigError, "sparse", "weight", ranks=2)
def _(world: World) -> None:
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4))
    model = shard_toy(world, model=model)
    optimizer = npuzero.AdamW(model.parameters())
    model(torch.arange(3)).sum().backward()
    optimizer.step()


for _name, _stage in {"": "zero3", ", zero0": "zero0"}.items():

    @bad(f"frozen at zero(), trained later{_name}", StateError, "positions", "requires_grad", ranks=2)
    def _(world: World, stage: str = _stage) -> None:
        model = shard_toy(world, plan=stage)
        optimizer = npuzero.AdamW(model.parameters())
        model.positions.requires_grad_(True)
        backward_toy_loss(model, world)
        optimizer.step()


@fine("zero_grad(set_to_none=False)")
def _(world: World) -> None:
    model = shard_toy(world)
    optimizer = npuzero.AdamW(model.parameters())
    backward_toy_loss(model, world)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


@fine("zeros in the place of a gradient")
def _(world: World) -> None:
    model = shard_toy(world, 2)
    backward_toy_loss(model, world)
    model.scale.grad.zero_()
    assert npuzero.full_gradient(model.scale) == 0


@fine("a step without gradients")
def _(world: World) -> None:
    model = shard_toy(world)
    npuzero.AdamW(model.parameters()).step()


@fine("a second step without gradients")
def _(world: World) -> None:
    model = shard_toy(world)
    optimizer = npuzero.AdamW(model.parameters())
    backward_toy_loss(model, world)
    optimizer.step()
    optimizer.zero_grad()
    once = npuzero.full_state_dict(model, rank0_only=False)
    optimizer.step()
    twice = npuzero.full_state_dict(model, rank0_only=False)
    assert all(value.equal(twice[name]) for name, value in once.items())


@fine("frozen after zero()")
def _(world: World) -> None:
    model = shard_toy(world)
    optimizer = npuzero.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    model.norm.requires_grad_(False)
    backward_toy_loss(model, world)
    optimizer.step()
    assert npuzero.full_state_dict(model, rank0_only=False)["norm.weight"].equal(torch.ones(16))


@fine("ZeroOptimizer over frozen parameters")
def _(world: World) -> None:
    model = shard_toy(world)
    optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    backward_toy_loss(model, world)
    optimizer.step()


bad("an optimizer over the model itself", ConfigError, r"AdamW\(lr=0.001, betas=", r"\.parameters\(\), not the")(
    lambda world: npuzero.AdamW(shard_toy(world))
)
bad("learning_rate for lr", ConfigError, "Did you mean 'lr'")(
    lambda world: npuzero.AdamW(shard_toy(world).parameters(), learning_rate=0.1)  # type: ignore[call-arg]
)
