"""THE TABLE of bad inputs: how each is provoked, which error all ranks get, and what its text says."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import npuzero
from npuzero import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    ContractError,
    Memory,
    NpuZeroError,
    Placement,
    Plan,
    Precision,
    Settings,
    StateError,
    config,
    ops,
)
from npuzero.comm import World
from world.toy import Block, ToyGPT, build

D = ("node", "local")
F32 = torch.float32
STATES = Placement(D)
PRESETS = npuzero.PRESETS


@dataclass(frozen=True)
class Case:
    """One row: how it is provoked, on how many ranks, which error each gets (None: none), and what its text says."""

    name: str
    provoke: Callable[[World], object]
    error: type[NpuZeroError] | None
    says: tuple[str, ...]
    ranks: int = 1


CASES: dict[str, Case] = {}


def bad(name: str, error: type[NpuZeroError], *says: str, ranks: int = 1) -> Callable[[Any], Any]:
    """Puts the decorated function into the table."""

    def add(function: Callable[[World], object]) -> Callable[[World], object]:
        assert name not in CASES, name
        CASES[name] = Case(name, function, error, says, ranks)
        return function

    return add


class Integers(nn.Module):
    """A parameter that cannot train."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)


def cut(world: World, stage: Any = None, model: Any = None, **options: Any) -> Any:
    """A toy model cut over the ranks, zero3 unless told; it lives as long as ``world``, whatever a row keeps of it."""
    world.model = npuzero.zero(build() if model is None else model, stage, world=world, **options)  # type: ignore[attr-defined]
    return world.model  # type: ignore[attr-defined]


def loss_of(model: nn.Module, rank: int = 0) -> Tensor:
    return model(torch.arange(rank, rank + 12)[None]).square().mean()


def backward(model: nn.Module, world: World) -> None:
    loss_of(model, world.rank).backward()


# -- plans ---------------------------------------------------------------------------------------------------------

for _name, _stage in {
    "unknown preset": "zero9",
    "stage 4": 4,
    "stage True": True,
    'stage "3"': "3",
    "stage -1": -1,
    "stage nan": math.nan,
    "stage is a list": [3],
    "stage is a tensor": torch.tensor(3),
}.items():
    bad(_name, ConfigError, "zero1.5", re.escape(repr(_stage)))(
        lambda world, stage=_stage: cut(world, plan=stage) if isinstance(stage, str) else cut(world, stage)
    )

for _name, _make, _says in [
    ("law broken", lambda: Plan(parameters=Placement(D)), ("prefix", r"gradients\.axes=\(\)", "parameters.axes")),
    ("law broken by order", lambda: Plan(gradients=Placement(D[::-1]), states=STATES), ("prefix",)),
    ("axis unknown", lambda: Plan(states=Placement(("rack",))), ("rack", "node.*local")),
    ("axis twice", lambda: Plan(states=Placement(("local", "local"))), ("distinct", "local")),
    ("axes are text", lambda: Plan(states=Placement("local")), ("local",)),
    ("axes are None", lambda: Plan(states=Placement(None)), ("None",)),
    ("axes are a list", lambda: Plan(states=Placement(["local"])), ("local",)),
    ("offload to host", lambda: Plan(states=Placement(D, Memory.HOST)), ("states.memory", "not in this version")),
    ("offload to nvme", lambda: Plan(held=Placement(memory=Memory.NVME)), ("held.memory", "not in this version")),
    ("memory is text", lambda: Plan(states=Placement(D, "device")), ("memory",)),
    ("accumulation in fp16", lambda: Precision(accumulation=torch.float16), (r"\.accumulation", "float32")),
    ("parameters in int8", lambda: Precision(torch.int8), (r"precision\.parameters", "int8")),
    ("dtype is text", lambda: Precision("bf16"), (r"precision\.parameters", "'bf16'")),
    ("wires in float64", lambda: Precision(wires=torch.float64), (r"precision\.wires", "float64")),
    ("masters unknown", lambda: Precision(masters="bf16"), (r"precision\.masters", "fp32, split, none", "'bf16'")),
    ("moments by number", lambda: Precision(moments=8), (r"precision\.moments", "fp32, bf16, int8", "8")),
    ("moments in a list", lambda: Precision(moments=["int8"]), (r"precision\.moments", "int8")),
    ("matmul unknown", lambda: Precision(matmul="hf32"), (r"precision\.matmul", "ieee, tf32", "hf32")),
    ("sums in bf16", lambda: Precision(sums="bf16"), (r"precision\.sums", "fp32, wire", "'bf16'")),
    ("sums by dtype", lambda: Precision(sums=torch.bfloat16), (r"precision\.sums", "fp32, wire", "bfloat16")),
    ("split fp16", lambda: Precision(torch.float16, masters="split"), ("masters='split'", "bfloat16", "float16")),
    ("split as they come", lambda: Precision(masters="split"), ("masters='split'", "parameters=None")),
    ("fp32 without masters", lambda: Precision(F32, masters="none"), ("masters='none'", "float32")),
    ("fp16 wires of bf16", lambda: Precision(torch.bfloat16, wires=torch.float16), ("float16", "loss scale")),
    ("precision of a plan is text", lambda: Plan(precision="bf16"), ("precision", "Precision", "'bf16'")),
    ("placement is text", lambda: Plan(states="zero3"), ("states", "zero3")),
    ("local_size is text", lambda: Plan.preset("hsdp", local_size="8"), ("local_size", "'8'")),
    ("local_size is a float", lambda: Plan.preset("hsdp", local_size=2.0), ("local_size", "2.0")),
    ("local_size is True", lambda: Plan.preset("hsdp", local_size=True), ("local_size", "True")),
    ("precision unknown", lambda: Plan.preset(3, precision="int4"), ("fp32, tf32, bf16, fp16", "int4")),
    ("precision float64", lambda: Plan.preset(3, precision=torch.float64), ("precision", "float64")),
    ("precision 16", lambda: Plan.preset(3, precision=16), ("precision", "16")),
    ("predict over no ranks", lambda: npuzero.predict(ToyGPT(), 3, 0), ("positive", "0")),
    ("predict over '8' ranks", lambda: npuzero.predict(ToyGPT(), 3, "8"), ("positive", "'8'")),
    ("predict indivisible", lambda: npuzero.predict(ToyGPT(), "hsdp", 8, local_size=3), ("divides", "8", "3")),
    ("predict no module", lambda: npuzero.predict([3], 3, 8), ("Module", "list")),
    ("predict micro_batches 0", lambda: npuzero.predict(ToyGPT(), 3, 8, micro_batches=0), ("micro_batches", "0")),
    ("predict int parameters", lambda: npuzero.predict(Integers(), 3, 8), ("numbers", "int32")),
]:  # fmt: skip
    bad(_name, ConfigError, *_says)(lambda world, make=_make: make())


@bad("world not divisible by local_size", ConfigError, "divides the world of 3", "2", ranks=3)
def _(world: World) -> None:
    cut(world, plan="hsdp", local_size=2)


@bad("stage and plan together", ConfigError, "stage=3", "zero2")
def _(world: World) -> None:
    cut(world, 3, plan="zero2")


for _name, _options, _says in [
    ("floor 0", {"floor": 0.0}, ("floor", "positive", "0.0")),
    ("init_scale below the floor", {"init_scale": 0.5}, ("init_scale", "floor=1.0", "0.5")),
    ("init_scale inf", {"init_scale": math.inf}, ("init_scale", "inf")),
    ("growth_factor 1", {"growth_factor": 1.0}, ("growth_factor", "more than 1")),
    ("backoff_factor 1", {"backoff_factor": 1.0}, ("backoff_factor", "between 0 and 1")),
    ("growth_interval 0", {"growth_interval": 0}, ("growth_interval", "at least 1")),
    ("hysteresis 0", {"hysteresis": 0}, ("hysteresis", "at least 1")),
]:
    bad(f"LossScaler {_name}", ConfigError, "LossScaler", *_says)(
        lambda world, options=_options: npuzero.LossScaler(**options)
    )


def scaled(world: World, scaler: Any) -> Any:
    """After a scaled backward pass of a cut model: its optimizer."""
    model = cut(world, 3)
    optimizer = npuzero.AdamW(model.parameters())
    scaler.scale(loss_of(model, world.rank)).backward()
    return optimizer


@bad("torch's GradScaler on a cut model", StateError, "cut gradient", r"npuzero\.LossScaler", ranks=2)
def _(world: World) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.step(scaled(world, scaler))


@bad("zeros in the place of a gradient", StateError, "zero_", "cut gradient")
def _(world: World) -> None:
    model = cut(world, 2)
    backward(model, world)
    model.scale.grad.zero_()  # not a zero_grad(): torch would update by them


@bad("unscale_ twice", StateError, r"LossScaler\.unscale_", "once", "unscaled", ranks=2)
def _(world: World) -> None:
    scaler = npuzero.LossScaler()
    optimizer = scaled(world, scaler)
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


@bad("scaler stepped twice", StateError, r"LossScaler\.step", "once", "stepped", ranks=2)
def _(world: World) -> None:
    scaler = npuzero.LossScaler()
    optimizer = scaled(world, scaler)
    scaler.step(optimizer)
    scaler.step(optimizer)


@bad("unscale_ without gradients", StateError, r"LossScaler\.unscale_", "none on any rank", ranks=2)
def _(world: World) -> None:
    scaler = npuzero.LossScaler()
    optimizer = scaled(world, scaler)
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
    scaler.step(scaled(world, scaler), lambda: None)


@bad("scaler pickled within a step", StateError, "update")
def _(world: World) -> None:
    scaler = npuzero.LossScaler()
    scaler.unscale_(scaled(world, scaler))
    pickle.dumps(scaler)


@bad("scaling a number", ConfigError, r"LossScaler\.scale", "tensor", "3")
def _(world: World) -> None:
    npuzero.LossScaler().scale(3)


@bad("loading a disabled scaler's state", CheckpointError, "loss scaler state", "growth_factor")
def _(world: World) -> None:
    npuzero.LossScaler().load_state_dict({})


@bad("tf32 on the CPU", ConfigError, "precision.matmul on cpu", "ieee", "'tf32'", ranks=2)
def _(world: World) -> None:
    cut(world, 3, precision="tf32")


@bad("Plan and precision together", ConfigError, "precision")
def _(world: World) -> None:
    cut(world, plan=Plan.preset(3), precision="bf16")


@bad("Plan and local_size together", ConfigError, "local_size")
def _(world: World) -> None:
    cut(world, plan=Plan.preset(3), local_size=2)


@bad("world is a number", ConfigError, "World", "2")
def _(world: World) -> None:
    npuzero.zero(build(), 3, world=2)  # type: ignore[arg-type]


# -- settings and environment --------------------------------------------------------------------------------------

for _name, _make, _says in [
    ("unknown setting", lambda: Settings.from_dict({"prefech": 1}), ("prefech", "Did you mean 'prefetch'")),
    ("setting is text", lambda: Settings(prefetch="1"), ("prefetch", "integer", "'1'")),
    ("setting is 1 for True", lambda: Settings(overlap=1), ("overlap", "True or False")),
    ("prefetch -1", lambda: Settings(prefetch=-1), ("prefetch", "from 0", "-1")),
    ("prefetch True", lambda: Settings(prefetch=True), ("prefetch", "True")),
    ("bucket 0", lambda: Settings(bucket_bytes=0), ("bucket_bytes", "from 1")),
    ("settings is a list", lambda: Settings.from_dict([1]), ("mapping",)),
    ("settings replaced by unknown", lambda: Settings().replace(overlapp=True), ("overlapp", "'overlap'")),
    ("variable unknown", lambda: config.environment({"NPUZERO_BACKENDS": "native"}), ("BACKENDS", "NPUZERO_BACKEND'")),
    ("variable's value unknown", lambda: config.environment({"NPUZERO_BACKEND": "fast"}), ("native, refer", "fast")),
    ("instruction set unknown", lambda: config.environment({"NPUZERO_ISA": "sse9"}), ("NPUZERO_ISA", "avx2", "sse9")),
    ("variable no number", lambda: config.environment({"NPUZERO_TIMEOUT_S": "soon"}), ("TIMEOUT_S", "number", "soon")),
    ("init timeout is text", lambda: npuzero.init("cpu", timeout_s="10"), ("timeout_s", "'10'")),
    ("init timeout -1", lambda: npuzero.init("cpu", timeout_s=-1), ("timeout_s", "-1")),
    ("device unknown", lambda: npuzero.init("tpu"), ("npu, cuda, cpu", "tpu")),
    ("device is a number", lambda: npuzero.init(0), ("npu, cuda, cpu", "0")),
    ("device npu without torch_npu", lambda: npuzero.init("npu"), ("torch_npu", "Install")),
    ("device cuda without it", lambda: npuzero.init("cuda:0"), ("CUDA", "Install")),
    ("backend unknown", lambda: npuzero.init("cpu", backend="mpi"), ("shm, gloo, nccl, hccl", "mpi")),
    ("backend of another device", lambda: npuzero.init("cpu", backend="hccl"), ("shm, gloo", "hccl")),
]:  # fmt: skip
    bad(_name, ConfigError, *_says)(lambda world, make=_make: make())


for _name, _variables, _says in [
    ("RANK without WORLD_SIZE", {"RANK": "0"}, ("WORLD_SIZE", "torchrun")),
    ("WORLD_SIZE without RANK", {"WORLD_SIZE": "2"}, ("RANK", "torchrun")),
    ("RANK beyond WORLD_SIZE", {"RANK": "2", "WORLD_SIZE": "2"}, ("RANK", "less than WORLD_SIZE = 2")),
    ("RANK no number", {"RANK": "first", "WORLD_SIZE": "2"}, ("RANK", "integer", "first")),
    ("WORLD_SIZE 0", {"RANK": "0", "WORLD_SIZE": "0"}, ("WORLD_SIZE", "from 1")),
    ("no MASTER_ADDR", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, ("MASTER_ADDR", "torchrun")),
]:  # fmt: skip

    @bad(_name, ConfigError, *_says)
    def _(world: World, variables: dict[str, str] = _variables) -> None:
        os.environ.update(variables)
        npuzero.init("cpu")


@bad("MASTER_PORT no number", CollectiveError, "localhost:x", "ValueError")
def _(world: World) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="x")
    npuzero.init("cpu")


@bad("unknown NPUZERO_ variable at init", ConfigError, "NPUZERO_BAKEND", "NPUZERO_BACKEND'")
def _(world: World) -> None:
    os.environ["NPUZERO_BAKEND"] = "native"
    npuzero.init("cpu")


@bad("settings is a dict", ConfigError, "Settings", "dict")
def _(world: World) -> None:
    cut(world, settings={"overlap": True})


# -- models --------------------------------------------------------------------------------------------------------


@bad("zero() twice", StateError, "cut already", "once", ranks=2)
def _(world: World) -> None:
    cut(world, model=cut(world))


@bad("zero() of a submodule of a cut model", StateError, "cut already", "outermost", ranks=2)
def _(world: World) -> None:
    npuzero.zero(cut(world, "zero1").blocks[0], world=world)


@bad("zero() around a cut model", StateError, "cut already", ranks=2)
def _(world: World) -> None:
    npuzero.zero(nn.Sequential(cut(world, 0), nn.Linear(3, 3)), world=world)


for _name, _thing in {
    "parameters": lambda: build().parameters(),
    "None": lambda: None,
    "a class": lambda: ToyGPT,
}.items():
    bad(f"zero() of {_name}", ConfigError, "Module")(lambda world, make=_thing: npuzero.zero(make(), 3, world=world))


@bad("model on meta", ConfigError, "parameter positions|parameter scale", "meta", ranks=2)
def _(world: World) -> None:
    with torch.device("meta"):
        model = ToyGPT()
    cut(world, model=model)


@bad("one parameter on meta", ConfigError, "qkv.weight", "meta", ranks=2)
def _(world: World) -> None:
    model = build()
    model.blocks[1].qkv.to("meta")
    cut(world, model=model)


@bad("lazy parameter", ConfigError, "uninitialized|Lazy", ranks=2)
def _(world: World) -> None:
    cut(world, model=nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)))


@bad("float64 parameter", ConfigError, "norm.weight", "float64", ranks=2)
def _(world: World) -> None:
    model = build()
    model.norm.double()
    cut(world, model=model)


for _dtype in (torch.int32, torch.complex64, torch.float8_e4m3fn, torch.bool):

    @bad(f"{_dtype} parameter".replace("torch.", ""), ConfigError, "scale", str(_dtype), ranks=2)
    def _(world: World, dtype: torch.dtype = _dtype) -> None:
        model = build()
        model.scale = nn.Parameter(torch.ones(2).to(dtype), requires_grad=False)
        cut(world, model=model)


@bad("float64 parameter on one rank", ConfigError, "norm.weight", "float64", ranks=3)
def _(world: World) -> None:
    model = build()
    if world.rank == 1:
        model.norm.double()
    cut(world, model=model)


class Own(nn.Parameter):
    """A user's own kind of parameter."""


@bad("cut parameter of a class of one's own", StateError, "norm.weight", "full_state_dict", ranks=2)
def _(world: World) -> None:
    model = build()
    model.norm.weight = Own(torch.ones(16))
    cut(world, model=model)
    assert isinstance(model.norm.weight, Own)
    model.norm.weight.sum()


class Wrapped(Tensor):
    """A tensor that is not its own data, as distributed and quantized ones are."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.detach.default else NotImplemented


@bad("wrapped parameter", ConfigError, "norm.weight", "Wrapped", ranks=2)
def _(world: World) -> None:
    model = build()
    model.norm.weight = nn.Parameter(Wrapped(torch.ones(16)))
    cut(world, model=model)


@bad("parameters that share memory", ConfigError, "memory", "norm.weight", ranks=2)
def _(world: World) -> None:
    model = build()
    model.norm.weight = nn.Parameter(model.norm.bias.data)
    cut(world, model=model)


@bad("meta buffer", ConfigError, "buffer", "seen", "meta", ranks=2)
def _(world: World) -> None:
    model = build()
    model.seen = torch.zeros((), device="meta")
    cut(world, model=model)


# -- units ---------------------------------------------------------------------------------------------------------

for _name, _rule, _says in [
    ("units match nothing", nn.Conv2d, ("Conv2d", "none")),
    ("units predicate matches nothing", lambda name, module: False, ("none",)),
    ("units is text", "Block", ("module classes or a predicate", "'Block'")),
    ("units is a list", [Block], ("module classes or a predicate",)),
    ("units is an empty tuple", (), ("module classes|none",)),
    ("units names something else", (Block, 3), ("module classes", "3")),
    ("units is a tensor class", Tensor, ("module classes", "Tensor")),
    ("units name a ModuleList", nn.ModuleList, ("blocks", "forward", "ModuleList")),
    ("units predicate of one argument", lambda module: True, ("name, module",)),
    ("units predicate raises", lambda name, module: 1 / 0, ("ZeroDivisionError",)),
]:
    bad(_name, ConfigError, *_says, ranks=2)(lambda world, rule=_rule: cut(world, units=rule))


@bad("units match nothing on one rank", ConfigError, "Conv2d", ranks=2)
def _(world: World) -> None:
    cut(world, units=nn.Conv2d if world.rank else Block)


# -- ranks that disagree -------------------------------------------------------------------------------------------


def one_differs(world: World, change: Callable[[Any], None]) -> None:
    model = build()
    if world.rank == 1:
        change(model)
    cut(world, model=model)


def _replace_norm(model: Any) -> None:
    model.norm = nn.LayerNorm(17)


def _rename(model: Any) -> None:
    model.scaled = model._parameters.pop("scale")


for _name, _change, _says in [
    ("shape", _replace_norm, (r"norm\.weight.*16.*norm\.weight.*17",)),
    ("name", _rename, ("scale of unit root", "no scale")),
    ("dtype", lambda model: model.norm.bfloat16(), (r"norm\.weight.*float32.*bfloat16",)),
    ("requires_grad", lambda model: model.norm.requires_grad_(False), (r"norm\.weight.*True.*False",)),
    ("one parameter more", lambda model: model.register_parameter("zulu", nn.Parameter(torch.ones(1))), ("zulu",)),
    ("one block less", lambda model: model.blocks.__delitem__(2), ("blocks",)),
    ("ties", lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(37, 16))), ("head.weight",)),
    ("a buffer's shape", lambda model: model.register_buffer("seen", torch.zeros(2)), ("seen",)),
    ("one buffer more", lambda model: model.register_buffer("also", torch.zeros(2)), ("also",)),
]:
    bad(f"ranks disagree on {_name}", ConfigError, "rank 0", "rank 1", *_says, ranks=3)(
        lambda world, change=_change: one_differs(world, change)
    )


@bad("ranks disagree on the plan", ConfigError, "plan", "zero2", "zero3", "rank 1", ranks=2)
def _(world: World) -> None:
    cut(world, 2 + world.rank)


@bad("ranks disagree on precision", ConfigError, "plan", "bfloat16", "rank 1", ranks=2)
def _(world: World) -> None:
    cut(world, 3, precision="bf16" if world.rank else None)


@bad("ranks disagree on settings", ConfigError, "settings", "prefetch=1", "prefetch=2", "rank 1", ranks=2)
def _(world: World) -> None:
    cut(world, settings=Settings(prefetch=1 + world.rank))


@bad("ranks disagree on local_size", ConfigError, "local_size", ranks=4)
def _(world: World) -> None:
    cut(world, plan="hsdp", local_size=2 if world.rank else 4)


@bad("ranks disagree on units", ConfigError, "model", "rank 1", ranks=2)
def _(world: World) -> None:
    cut(world, units=nn.Linear if world.rank else Block)


# -- clipping ------------------------------------------------------------------------------------------------------

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


# -- plain optimizers over cut models ------------------------------------------------------------------------------

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
            model = cut(world, plan=stage)
            optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
            backward(model, world)
            optimizer.step((lambda: 0.0) if kind == "LBFGS" else None)


# -- data of cut parameters ----------------------------------------------------------------------------------------


def _write_data(p: Any) -> None:
    p.data = torch.zeros(16)


def _add_(p: Any) -> None:
    with torch.no_grad():
        p.add_(1)


READS: dict[str, Callable[[Any], object]] = {
    "sum": lambda p: p.sum(),
    "data": lambda p: p.data.sum(),
    "detach": lambda p: p.detach(),
    "item": lambda p: p[0].item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(force=True),
    "array": lambda p: __import__("numpy").asarray(p),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "typed storage": lambda p: p.storage(),
    "clone": lambda p: p.clone(),
    "plus": lambda p: p + 1,
    "rplus": lambda p: 1 + p,
    "linear": lambda p: nn.functional.layer_norm(torch.ones(16), (16,), weight=p),
    "stack": lambda p: torch.stack([p]),
    "iterate": lambda p: list(p),
    "equal": lambda p: torch.equal(p, p),
    "bool": lambda p: bool(p[0]),
    "float": lambda p: float(p[0]),
    "to": lambda p: p.to(torch.float64),
    "half": lambda p: p.half(),
    "view": lambda p: p.view(4, 4),
    "zeros_like": lambda p: torch.zeros_like(p),
    "dlpack": lambda p: torch.from_dlpack(p),
    "format": lambda p: f"{p[0]:.3f}",
    "write": _add_,
    "write data": _write_data,
    "init": lambda p: nn.init.normal_(p),
    "copy into": lambda p: torch.zeros(16).copy_(p),
    "set item": lambda p: p.__setitem__(0, 1.0),
    "out=": lambda p: torch.add(torch.ones(16), 1, out=p.requires_grad_(False)),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "copy": lambda p: copy.copy(p),
    "pickle": pickle.dumps,
    "share_memory_": lambda p: p.share_memory_(),
    "backward": lambda p: p.sum().backward(),
    "isnan": lambda p: torch.isnan(p),
    "foreach": lambda p: torch._foreach_add([p], 1.0),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "new": lambda p: p.new_zeros(3) + p[:3],
    "pin": lambda p: p.pin_memory(),
    "set_": lambda p: p.data.set_(torch.zeros(1)),
    "as_subclass": lambda p: p.as_subclass(Tensor).sum(),
    "Parameter of it": lambda p: nn.Parameter(p).sum(),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "functional_call": lambda p: torch.func.functional_call(nn.LayerNorm(16), {"weight": p}, (torch.ones(16),)),
}
for _name, _read in READS.items():
    bad(f"cut parameter: {_name}", StateError, "norm.weight", "full_state_dict", ranks=2)(
        lambda world, read=_read: read(cut(world).norm.weight)
    )

GRADIENT_READS: dict[str, Callable[[Any], object]] = {
    "sum": lambda p: p.grad.sum(),
    "norm": lambda p: p.grad.norm(),
    "data": lambda p: p.grad.data.sum(),
    "mul_": lambda p: p.grad.mul_(2),
    "clone": lambda p: p.grad.clone(),
    "isnan": lambda p: torch.isnan(p.grad),
    "numpy": lambda p: p.grad.numpy(),
    "data_ptr": lambda p: p.grad.data_ptr(),
    "storage": lambda p: p.grad.untyped_storage()[0],
    "item": lambda p: p.grad[0].item(),
    "to": lambda p: p.grad.to(torch.float64),
    "copy_": lambda p: p.grad.copy_(torch.zeros(16)),
    "save": lambda p: torch.save(p.grad, io.BytesIO()),
    "deepcopy": lambda p: copy.deepcopy(p.grad),
    "all_reduce": lambda p: torch._foreach_mul_([p.grad], 2),
    "tolist": lambda p: p.grad.tolist(),
    "format": lambda p: f"{p.grad[0]:.3f}",
    "dlpack": lambda p: torch.from_dlpack(p.grad),
}
for _stage in ("zero0", "zero3"):
    for _name, _read in GRADIENT_READS.items():

        @bad(f"cut gradient, {_stage}: {_name}", StateError, "gradient", ranks=2)
        def _(world: World, stage: str = _stage, read: Any = _read) -> None:
            model = cut(world, plan=stage)
            backward(model, world)
            read(model.norm.weight)


def _step(world: World, change: Callable[[Any], object], stage: str, before: bool) -> None:
    """A step after ``change(model)``, which comes before or after the backward pass."""
    model = cut(world, plan=stage)
    optimizer = npuzero.AdamW(model.parameters())
    backward(model, world)
    optimizer.step()
    optimizer.zero_grad()
    if before:
        change(model)
    backward(model, world)
    if not before:
        change(model)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, world)


def _set_grad(model: Any) -> None:
    model.norm.weight.grad = torch.ones(16)


def _new_data(model: Any) -> None:
    model.norm.weight.data = torch.ones(16)


def _new_parameter(model: Any) -> None:
    model.norm.weight = nn.Parameter(torch.ones(16))


for _stage in ("zero0", "zero1", "zero2", "zero3", "zero3-keep"):
    for _name, _change, _before, _says in [
        ("to bfloat16", lambda model: model.to(torch.bfloat16), True, ("parameter", "zero")),
        ("half", lambda model: model.half(), True, ("parameter", "zero")),
        ("double", lambda model: model.double(), False, ("cut gradient|parameter", "zero")),
        ("to meta", lambda model: model.to("meta"), True, ("parameter", "zero")),
        ("to_empty", lambda model: model.to_empty(device="cpu"), True, ("parameter", "zero")),
        ("p.data = ...", _new_data, True, ("norm.weight",)),
        ("p.data = ... after backward", _new_data, False, ("norm.weight",)),
        ("another parameter", _new_parameter, True, ("norm.weight",)),
        ("p.grad = ...", _set_grad, False, ("norm.weight", "grad")),
        ("p.grad = ... before backward", _set_grad, True, ("norm.weight", "grad")),
    ]:
        bad(f"{_name} after zero(), {_stage}", StateError, *_says, ranks=2)(
            lambda world, change=_change, stage=_stage, before=_before: _step(world, change, stage, before)
        )

for _name, _call in {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
}.items():
    for _stage in ("zero0", "zero3"):
        bad(f"{_name} of a cut model, {_stage}", StateError, "full_state_dict", ranks=2)(
            lambda world, call=_call, stage=_stage: call(cut(world, plan=stage))
        )

for _name, _call in {
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict(build().state_dict()),
    "share_memory": lambda model: model.share_memory(),
    "copy.copy then sum": lambda model: copy.copy(model).norm.weight.sum(),
    "apply init": lambda model: model.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None),
}.items():
    bad(f"{_name} of a cut model", StateError, "full_state_dict", ranks=2)(lambda world, call=_call: call(cut(world)))


class Encoder(ToyGPT):
    def encode(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions


@bad("a method outside forward", StateError, "tokens.weight|positions", "forward", ranks=2)
def _(world: World) -> None:
    cut(world, model=build(make=Encoder)).encode(torch.zeros(1, 12, dtype=torch.int64))


@bad("a part of a unit outside forward", StateError, r"blocks\.0", "forward", ranks=2)
def _(world: World) -> None:
    cut(world).blocks[0].qkv(torch.zeros(1, 16))


# -- order of calls ------------------------------------------------------------------------------------------------


@bad("step inside backward", StateError, "inside a backward", "after", ranks=2)
def _(world: World) -> None:
    model = cut(world)
    optimizer = npuzero.AdamW(model.parameters())
    model.blocks[1].register_full_backward_hook(lambda *_: optimizer.step())
    backward(model, world)


@bad("clip inside backward", StateError, "inside a backward", "after", ranks=2)
def _(world: World) -> None:
    model = cut(world)
    model.blocks[1].register_full_backward_hook(lambda *_: npuzero.clip_grad_norm_(model, 1.0) and None)
    backward(model, world)


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("boom")


class Choosy(ToyGPT):
    """Leaves a block out."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in (self.blocks[0], self.blocks[2]):
            x = block(x)
        return self.head(self.norm(x)) * self.scale


class Exploding(ToyGPT):
    explode = True

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 0 and self.explode:
                x = Explode.apply(x)
        return self.head(self.norm(x)) * self.scale


@bad("step after a backward that raised", StateError, "zero_grad", ranks=2)
def _(world: World) -> None:
    model = cut(world, model=build(make=Exploding))
    optimizer = npuzero.AdamW(model.parameters())
    with contextlib.suppress(ArithmeticError):
        backward(model, world)
    optimizer.step()


# -- optimizers ----------------------------------------------------------------------------------------------------


@bad("optimizer over a deleted model", StateError, "deleted", ranks=2)
def _(world: World) -> None:
    model = npuzero.zero(build(), world=world)
    optimizer = npuzero.AdamW(model.parameters())
    del model
    gc.collect()
    optimizer.step()


@bad("cut and plain parameters mixed", StateError, "beside", "zero", ranks=2)
def _(world: World) -> None:
    model, plain = cut(world), nn.Linear(3, 3)
    optimizer = npuzero.AdamW([*model.parameters(), *plain.parameters()])
    backward(model, world)
    optimizer.step()


@bad("cut and deepcopied parameters mixed", StateError, "beside|deleted", "zero", ranks=2)
def _(world: World) -> None:
    plain = build()
    copied = copy.deepcopy(plain)
    model = cut(world, model=plain)
    optimizer = npuzero.AdamW([*model.parameters(), *copied.parameters()])
    backward(model, world)
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
    model = cut(world)
    optimizer = npuzero.AdamW(model.parameters())
    backward(model, world)
    optimizer.param_groups[0]["lr"] = math.nan
    optimizer.step()


@bad("amsgrad set after the first step", ContractError, "amsgrad", ranks=2)
def _(world: World) -> None:
    model = cut(world)
    optimizer = npuzero.AdamW(model.parameters())
    for _ in range(2):
        backward(model, world)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["amsgrad"] = True


@bad("sparse gradients", ConfigError, "sparse", "weight", ranks=2)
def _(world: World) -> None:
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4))
    model = cut(world, model=model)
    optimizer = npuzero.AdamW(model.parameters())
    model(torch.arange(3)).sum().backward()
    optimizer.step()


@bad("frozen at zero(), trained later", StateError, "positions", "requires_grad", ranks=2)
def _(world: World) -> None:
    model = cut(world)
    optimizer = npuzero.AdamW(model.parameters())
    model.positions.requires_grad_(True)
    backward(model, world)
    optimizer.step()


@bad("frozen at zero(), trained later, zero0", StateError, "positions", "requires_grad", ranks=2)
def _(world: World) -> None:
    model = cut(world, 0)
    optimizer = npuzero.AdamW(model.parameters())
    model.positions.requires_grad_(True)
    backward(model, world)
    optimizer.step()


# -- saved states --------------------------------------------------------------------------------------------------


def _load(world: World, change: Callable[[dict[str, Any]], object]) -> None:
    state = build().state_dict()
    model = cut(world)
    npuzero.load_full_state_dict(model, change(state) or state)  # type: ignore[arg-type]


for _name, _change, _says in [
    ("name missing", lambda state: state.pop("scale") and None, (r"missing \['scale'\]",)),
    ("name unknown", lambda state: state.update(scaled=torch.ones(())), (r"unknown \['scaled'\]",)),
    ("wrong shape", lambda state: state.update({"norm.weight": torch.ones(17)}), ("norm.weight", "16", "17")),
    ("wrong shape of a buffer", lambda state: state.update(seen=torch.ones(2)), ("seen", "2")),
    ("no tensor", lambda state: state.update(scale=1.0), ("scale", "float")),
    ("no mapping", lambda state: [1], ("list",)),
    ("on meta", lambda state: state.update({"norm.weight": torch.ones(16, device="meta")}), ("norm.weight", "meta")),
]:
    bad(f"load_full_state_dict: {_name}", CheckpointError, *_says, ranks=2)(
        lambda world, change=_change: _load(world, change)
    )


@bad("load_full_state_dict: name missing on one rank", CheckpointError, "scale", ranks=2)
def _(world: World) -> None:
    _load(world, lambda state: state.pop("scale") and None if world.rank else None)


def _load_optimizer(world: World, change: Callable[[Any], object], kind: Any = torch.optim.AdamW) -> None:
    plain = build()
    optimizer = kind(plain.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    loss_of(plain).backward()
    optimizer.step()
    state = optimizer.state_dict()
    state = change(state) or state
    npuzero.AdamW(cut(world).parameters()).load_state_dict(state)


def _first(state: Any) -> Any:
    return next(iter(state["state"].values()))


def _last(state: Any) -> Any:
    return list(state["state"].values())[-1]


def _group(state: Any) -> None:
    state["param_groups"][0]["params"].pop()


def _two_groups(state: Any) -> None:
    state["param_groups"].append({**state["param_groups"][0], "params": []})


for _name, _change, _says in [
    ("a parameter fewer", _group, ("groups of", "groups")),
    ("a group more", _two_groups, ("groups",)),
    ("wrong shape", lambda state: _first(state).update(exp_avg=torch.ones(3)), ("exp_avg", "3")),
    ("wrong shape of a vector", lambda state: _last(state).update(exp_avg=torch.ones(())), ("exp_avg",)),
    ("moment missing", lambda state: _first(state).pop("exp_avg_sq") and None, ("exp_avg_sq",)),
    ("step missing", lambda state: _first(state).pop("step") and None, ("step",)),
    ("no groups", lambda state: state.pop("param_groups") and None, ("param_groups",)),
    ("no mapping", lambda state: [state], ("list",)),
]:
    bad(f"optimizer's load_state_dict: {_name}", CheckpointError, *_says, ranks=2)(
        lambda world, change=_change: _load_optimizer(world, change)
    )


@bad("optimizer's load_state_dict: SGD's into AdamW", CheckpointError, "exp_avg|step", ranks=2)
def _(world: World) -> None:
    _load_optimizer(world, lambda state: None, torch.optim.SGD)


# -- ops and communicators (tests/ops and tests/world have the rest) -----------------------------------------------


def _adam(**changed: Any) -> None:
    arguments: dict[str, Any] = {
        "master": torch.ones(8),
        "exp_avg": torch.zeros(8),
        "exp_avg_sq": torch.zeros(8),
        "grad": torch.ones(8),
    }
    segment = ops.Segment(0, 8, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, True, False, False)
    segments = [replace(segment, **s) for s in changed.pop("segments", [{}])]
    arguments.update(changed)
    ops.flat_adam(
        arguments.pop("master"),
        arguments.pop("exp_avg"),
        arguments.pop("exp_avg_sq"),
        arguments.pop("grad"),
        segments,
        **arguments,
    )


_SHARED = torch.ones(12)
for _name, _make, _says in [
    ("flat_adam: moment of another dtype", lambda: _adam(exp_avg=torch.zeros(8).half()), ("exp_avg", "float16")),
    ("flat_adam: gradient of another size", lambda: _adam(grad=torch.ones(9)), ("grad", "8", "9")),
    ("flat_adam: gradient on meta", lambda: _adam(grad=torch.ones(8, device="meta")), ("grad", "meta")),
    ("flat_adam: overlap", lambda: _adam(master=_SHARED[:8], grad=_SHARED[4:]), ("overlap|apart",)),
    ("flat_adam: segment beyond the end", lambda: _adam(segments=[{"end": 9}]), ("9",)),
    ("flat_adam: segments overlap", lambda: _adam(segments=[{"end": 5}, {"begin": 4}]), ("ascending|overlap",)),
    ("flat_adam: step 0", lambda: _adam(segments=[{"step": 0}]), ("step", "0")),
    ("cast: another size", lambda: ops.cast(torch.ones(3), torch.ones(4)), ("3", "4")),
    ("cast: unknown rounding", lambda: ops.cast(torch.ones(3), torch.ones(3), rounding="up"), ("rounding", "up")),
    ("cast: not contiguous", lambda: ops.cast(torch.ones(6)[::2], torch.ones(3)), ("contiguous",)),
    ("norm: out of another size", lambda: ops.norm(torch.ones(3), torch.ones(3)), ("out",)),
    ("pack: an offset too few", lambda: ops.pack([torch.ones(3)], [], torch.ones(4)), ("offset",)),
    ("pack: beyond the wire", lambda: ops.pack([torch.ones(3)], [2], torch.ones(4)), ("4",)),
    ("pack: double", lambda: ops.pack([torch.ones(3, dtype=torch.float64)], [0], torch.ones(4)), ("float64",)),
    ("unpack: tensors overlap", lambda: ops.unpack(torch.ones(8), [_SHARED[:4], _SHARED[2:6]], [0, 4]), ("apart",)),
]:  # fmt: skip
    bad(_name, ContractError, *_says)(lambda world, make=_make: make())

for _name, _call, _says in [
    ("all_gather: wrong size", lambda group: group.all_gather(torch.ones(5), torch.ones(2)), ("5", "2")),
    ("reduce_scatter: int", lambda group: group.reduce_scatter(torch.ones(1).int(), torch.ones(2).int()), ("int32",)),
    ("all_reduce: on meta", lambda group: group.all_reduce(torch.ones(2, device="meta")), ("meta",)),
    ("all_to_all: not divisible", lambda group: group.all_to_all(torch.ones(3), torch.ones(3)), ("3",)),
    ("broadcast: root outside", lambda group: group.broadcast(torch.ones(3), root=2), ("root", "2")),
]:
    bad(_name, ContractError, *_says, ranks=2)(lambda world, call=_call: call(world.communicator((0, 1), "all")))

bad("communicator without oneself", ContractError, r"with rank \d among", ranks=2)(
    lambda world: world.communicator((1 - world.rank,), "all")
)
bad("communicator of a rank twice", ContractError, "different", ranks=2)(
    lambda world: world.communicator((0, 0), "all")
)


@bad("ranks send different sizes", CollectiveError, "rank 0", "rank 1", "3", "4", ranks=2)
def _(world: World) -> None:
    world.communicator((0, 1), "all").all_reduce(torch.ones(3 + world.rank)).wait()


# -- what must go on working ---------------------------------------------------------------------------------------


def fine(name: str, ranks: int = 2) -> Callable[[Any], Any]:
    """Puts the decorated function into the table: nothing may be raised."""

    def add(function: Callable[[World], object]) -> Callable[[World], object]:
        assert name not in CASES, name
        CASES[name] = Case(name, function, None, (), ranks)
        return function

    return add


@fine("a submodule of the root outside forward")
def _(world: World) -> None:
    cut(world).norm(torch.zeros(1, 16))


@fine("metadata and text of a cut parameter")
def _(world: World) -> None:
    p = cut(world).norm.weight
    assert "CutParameter" in f"{p}" + repr(p) and (p.shape, p.dtype, p.device.type) == ((16,), F32, "cpu")
    assert (
        p.numel() == len(p) == 16 and p.requires_grad and p.is_leaf and p.grad is None and isinstance(p, nn.Parameter)
    )


@fine("a cut parameter under gathered()")
def _(world: World) -> None:
    model = cut(world)
    with npuzero.gathered(model):
        assert model.norm.weight.sum() == 16


@fine("a whole parameter after a step")
def _(world: World) -> None:
    model = cut(world, 1)
    optimizer = npuzero.AdamW(model.parameters())
    backward(model, world)
    optimizer.step()
    assert model.norm.weight.isfinite().all() and not model.norm.weight.equal(torch.ones(16))


@fine("zero_grad(set_to_none=False)")
def _(world: World) -> None:
    model = cut(world)
    optimizer = npuzero.AdamW(model.parameters())
    backward(model, world)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


@fine("a step without gradients")
def _(world: World) -> None:
    model = cut(world)
    npuzero.AdamW(model.parameters()).step()


@fine("clipping without gradients")
def _(world: World) -> None:
    assert npuzero.clip_grad_norm_(cut(world), 1.0) == 0


@fine("NaN gradients that are not asked about")
def _(world: World) -> None:
    model = cut(world)
    (loss_of(model) * math.nan).backward()
    assert npuzero.clip_grad_norm_(model, 1.0).isnan()


@fine("frozen after zero()")
def _(world: World) -> None:
    model = cut(world)
    optimizer = npuzero.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    model.norm.requires_grad_(False)
    backward(model, world)
    optimizer.step()
    assert npuzero.full_state_dict(model, rank0_only=False)["norm.weight"].equal(torch.ones(16))


def _weights_after(world: World, stage: str, faulty: bool) -> dict[str, Tensor]:
    """Weights after two good steps, with a forward, backward and step that fail between them."""
    model = cut(world, plan=stage, model=build(make=Exploding))
    optimizer = npuzero.AdamW(model.parameters(), lr=0.1)
    for explode in (False, True, False):
        model.explode = explode
        if not explode:
            backward(model, world)
            optimizer.step()
        elif faulty:
            with contextlib.suppress(ArithmeticError):
                backward(model, world)
            with contextlib.suppress(IndexError):
                model(torch.full((1, 12), 1000))
        optimizer.zero_grad()
    return npuzero.full_state_dict(model, rank0_only=False)


for _stage in PRESETS:

    @fine(f"going on after a pass that raised, {_stage}")
    def _(world: World, stage: str = _stage) -> None:
        plain, faulty = (_weights_after(world, stage, faulty) for faulty in (False, True))
        for name, value in plain.items():
            assert value.equal(faulty[name]), name

    @fine(f"a block nobody uses, {_stage}")
    def _(world: World, stage: str = _stage) -> None:
        model = cut(world, plan=stage, model=build(make=Choosy))
        optimizer = npuzero.AdamW(model.parameters())
        for _ in range(2):
            backward(model, world)
            optimizer.step()
            optimizer.zero_grad()


@fine("a second step without gradients")
def _(world: World) -> None:
    model = cut(world)
    optimizer = npuzero.AdamW(model.parameters())
    backward(model, world)
    optimizer.step()
    optimizer.zero_grad()
    once = npuzero.full_state_dict(model, rank0_only=False)
    optimizer.step()
    twice = npuzero.full_state_dict(model, rank0_only=False)
    assert all(value.equal(twice[name]) for name, value in once.items())


for _stage in ("zero0", "zero1", "zero2"):

    @fine(f"a rank without a backward pass, {_stage}")
    def _(world: World, stage: str = _stage) -> None:
        plain = build()
        torchs = torch.optim.SGD(plain.parameters(), lr=0.1)
        model = cut(world, plan=stage)
        ours = npuzero.ZeroOptimizer(torch.optim.SGD, [p for p in model.parameters() if p.requires_grad], lr=0.1)
        for takes_part in (range(2), range(1), range(2)):
            for rank in takes_part:
                (loss_of(plain, rank) / 2).backward()
                if rank == world.rank:
                    backward(model, world)
            for optimizer in (torchs, ours):
                optimizer.step()
                optimizer.zero_grad()
        found = npuzero.full_state_dict(model, rank0_only=False)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@fine("ZeroOptimizer over frozen parameters")
def _(world: World) -> None:
    model = cut(world)
    optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    backward(model, world)
    optimizer.step()
