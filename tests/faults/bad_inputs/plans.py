"""Bad inputs: plans, precision and predictions."""

from __future__ import annotations

import math
import re

import torch
from torch import nn

import npuzero
from npuzero import ConfigError, Memory, Placement, Plan, Precision
from npuzero.comm import World
from world.toy import ToyGPT, build

from .case import Table, cut

TABLE = Table()
bad = TABLE.bad
D = ("node", "local")
F32 = torch.float32
STATES = Placement(D)


class Integers(nn.Module):
    """A parameter that cannot train."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)


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
