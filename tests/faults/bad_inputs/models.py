"""Bad inputs: the arguments of zero(): models, their units, ranks that disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import npuzero
from npuzero import ConfigError, Settings, StateError
from npuzero.comm import World
from world.toy import ToyBlock, ToyGPT, build_seeded_model

from .case import BadInputTable, shard_toy

TABLE = BadInputTable()
bad = TABLE.bad


for _tiles, _error, *_says in (
    (None, ConfigError, "tiles", "lm_head"),
    ({}, ConfigError, "tiles", "lm_head"),
    ({"blocks.*.qvk": 2}, ConfigError, "no module's name", r"blocks\.\d\.qkv"),
    ({"blocks.0": 2}, ConfigError, "that of ToyBlock", "blocks.0.qkv"),
    ({"blocks.0.qkv": 49}, ConfigError, "1 to 48", "49"),
    ({"blocks.0.qkv": 0}, ConfigError, "1 to 48", "0"),
    ({"blocks.0.qkv": True}, ConfigError, "1 to 48", "True"),
    ({"blocks.0.qkv": 2.0}, ConfigError, "1 to 48", "2.0"),
    ({"blocks.*.qkv": 2, "blocks.0.*": 4}, ConfigError, "one number of tiles", "2 and 4"),
    ({"head": 2}, ConfigError, "tied", "tokens.weight, head.weight", "Untie"),
):
    bad(f"tiled(model, {_tiles})", _error, *_says)(
        lambda world, tiles=_tiles: npuzero.tiled(build_seeded_model(), tiles)
    )


@bad("tiled() of no module", ConfigError, "nn.Module", "NoneType|None")
def _(world: World) -> None:
    npuzero.tiled(None, {"head": 2})  # type: ignore[type-var]


@bad("tiled() after zero()", StateError, "sharded already", "first", ranks=2)
def _(world: World) -> None:
    npuzero.tiled(shard_toy(world), {"blocks.0.qkv": 2})


@bad("zero() twice", StateError, "sharded already", "once", ranks=2)
def _(world: World) -> None:
    shard_toy(world, model=shard_toy(world))


@bad("zero() of a submodule of a sharded model", StateError, "sharded already", "outermost", ranks=2)
def _(world: World) -> None:
    npuzero.zero(shard_toy(world, "zero1").blocks[0], world=world)


@bad("zero() around a sharded model", StateError, "sharded already", ranks=2)
def _(world: World) -> None:
    npuzero.zero(nn.Sequential(shard_toy(world, 0), nn.Linear(3, 3)), world=world)


for _name, _thing in {
    "parameters": lambda: build_seeded_model().parameters(),
    "None": lambda: None,
    "a class": lambda: ToyGPT,
}.items():
    bad(f"zero() of {_name}", ConfigError, "Module")(lambda world, make=_thing: npuzero.zero(make(), 3, world=world))


@bad("model on meta", ConfigError, "parameter positions|parameter scale", "meta", ranks=2)
def _(world: World) -> None:
    with torch.device("meta"):
        model = ToyGPT()
    shard_toy(world, model=model)


@bad("one parameter on meta", ConfigError, "qkv.weight", "meta", ranks=2)
def _(world: World) -> None:
    model = build_seeded_model()
    model.blocks[1].qkv.to("meta")
    shard_toy(world, model=model)


@bad("lazy parameter", ConfigError, "uninitialized|Lazy", ranks=2)
def _(world: World) -> None:
    shard_toy(world, model=nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)))


@bad("float64 parameter", ConfigError, "norm.weight", "float64", ranks=2)
def _(world: World) -> None:
    model = build_seeded_model()
    model.norm.double()
    shard_toy(world, model=model)


for _dtype in (torch.int32, torch.complex64, torch.float8_e4m3fn, torch.bool):

    @bad(f"{_dtype} parameter".replace("torch.", ""), ConfigError, "scale", str(_dtype), ranks=2)
    def _(world: World, dtype: torch.dtype = _dtype) -> None:
        model = build_seeded_model()
        model.scale = nn.Parameter(torch.ones(2).to(dtype), requires_grad=False)
        shard_toy(world, model=model)


@bad("float64 parameter on one rank", ConfigError, "norm.weight", "float64", ranks=3)
def _(world: World) -> None:
    model = build_seeded_model()
    if world.rank == 1:
        model.norm.double()
    shard_toy(world, model=model)


class UserParameter(nn.Parameter):
    """A subclass of Parameter defined by a user."""


@bad("cut parameter of a class of one's own", StateError, "norm.weight", "full_state_dict", ranks=2)
def _(world: World) -> None:
    model = build_seeded_model()
    model.norm.weight = UserParameter(torch.ones(16))
    shard_toy(world, model=model)
    assert isinstance(model.norm.weight, UserParameter)
    model.norm.weight.sum()


class WrappedTensor(Tensor):
    """A tensor subclass that differs from its data, as distributed and quantized tensors do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.detach.default else NotImplemented


@bad("wrapped parameter", ConfigError, "norm.weight", "Wrapped", ranks=2)
def _(world: World) -> None:
    model = build_seeded_model()
    model.norm.weight = nn.Parameter(WrappedTensor(torch.ones(16)))
    shard_toy(world, model=model)


@bad("parameters that share memory", ConfigError, "memory", "norm.weight", ranks=2)
def _(world: World) -> None:
    model = build_seeded_model()
    model.norm.weight = nn.Parameter(model.norm.bias.data)
    shard_toy(world, model=model)


@bad("meta buffer", ConfigError, "buffer", "seen", "meta", ranks=2)
def _(world: World) -> None:
    model = build_seeded_model()
    model.seen = torch.zeros((), device="meta")
    shard_toy(world, model=model)


# -- units ---------------------------------------------------------------------------------------------------------


for _name, _rule, _says in [
    ("units match nothing", nn.Conv2d, ("Conv2d", "none")),
    ("units predicate matches nothing", lambda name, module: False, ("none",)),
    ("units is text", "Block", ("module classes or a predicate", "'Block'")),
    ("units is a list", [ToyBlock], ("module classes or a predicate",)),
    ("units is an empty tuple", (), ("module classes|none",)),
    ("units names something else", (ToyBlock, 3), ("module classes", "3")),
    ("units is a tensor class", Tensor, ("module classes", "Tensor")),
    ("units name a ModuleList", nn.ModuleList, ("blocks", "forward", "ModuleList")),
    ("units predicate of one argument", lambda module: True, ("name, module",)),
    ("units predicate raises", lambda name, module: 1 / 0, ("ZeroDivisionError",)),
]:
    bad(_name, ConfigError, *_says, ranks=2)(lambda world, rule=_rule: shard_toy(world, units=rule))


@bad("units match nothing on one rank", ConfigError, "Conv2d", ranks=2)
def _(world: World) -> None:
    shard_toy(world, units=nn.Conv2d if world.rank else ToyBlock)


# -- ranks that disagree -------------------------------------------------------------------------------------------


def zero_one_rank_differs(world: World, change: Callable[[Any], None]) -> None:
    model = build_seeded_model()
    if world.rank == 1:
        change(model)
    shard_toy(world, model=model)


def _replace_norm(model: Any) -> None:
    model.norm = nn.LayerNorm(17)


def _rename_scale(model: Any) -> None:
    model.scaled = model.scale
    del model.scale


for _name, _change, _says in [
    ("shape", _replace_norm, (r"norm\.weight.*16.*norm\.weight.*17",)),
    ("name", _rename_scale, ("scale of unit root", "no scale")),
    ("dtype", lambda model: model.norm.bfloat16(), (r"norm\.weight.*float32.*bfloat16",)),
    ("requires_grad", lambda model: model.norm.requires_grad_(False), (r"norm\.weight.*True.*False",)),
    ("one parameter more", lambda model: model.register_parameter("zulu", nn.Parameter(torch.ones(1))), ("zulu",)),
    ("one block less", lambda model: model.blocks.__delitem__(2), ("blocks",)),
    ("ties", lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(37, 16))), ("head.weight",)),
    ("a buffer's shape", lambda model: model.register_buffer("seen", torch.zeros(2)), ("seen",)),
    ("one buffer more", lambda model: model.register_buffer("also", torch.zeros(2)), ("also",)),
]:
    bad(f"ranks disagree on {_name}", ConfigError, "rank 0", "rank 1", *_says, ranks=3)(
        lambda world, change=_change: zero_one_rank_differs(world, change)
    )


@bad("ranks disagree on the plan", ConfigError, "plan", "zero2", "zero3", "rank 1", ranks=2)
def _(world: World) -> None:
    shard_toy(world, 2 + world.rank)


@bad("ranks disagree on precision", ConfigError, "plan", "bfloat16", "rank 1", ranks=2)
def _(world: World) -> None:
    shard_toy(world, 3, precision="bf16" if world.rank else None)


@bad("ranks disagree on settings", ConfigError, r"settings\.prefetch", "rank 0: 1", "rank 1: 2", ranks=2)
def _(world: World) -> None:
    shard_toy(world, settings=Settings(prefetch=1 + world.rank))


@bad("ranks disagree on local_size", ConfigError, "local_size", ranks=4)
def _(world: World) -> None:
    shard_toy(world, plan="hsdp", local_size=2 if world.rank else 4)


@bad("ranks disagree on units", ConfigError, "model", "rank 1", ranks=2)
def _(world: World) -> None:
    shard_toy(world, units=nn.Linear if world.rank else ToyBlock)
