"""Bad inputs: plans, precision and predictions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import npuzero
from npuzero import ConfigError, Memory, Placement, Plan, Precision, Settings, checkpoint
from npuzero.comm import World
from npuzero.errors import config_error_as
from world.toy import ToyGPT, build_seeded_model

from .case import BadInputTable, shard_toy

TABLE = BadInputTable()
bad = TABLE.bad
D = ("node", "local")
F32 = torch.float32
STATES = Placement(D)
WHOLE, HOST, NVME = Placement(), Placement(D, Memory.HOST), Placement(D, Memory.NVME)


class IntegerParameter(nn.Module):
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
        lambda world, stage=_stage: shard_toy(world, plan=stage) if isinstance(stage, str) else shard_toy(world, stage)
    )

for _name, _make, _says in [
    ("law broken", lambda: Plan(parameters=Placement(D)), ("prefix", r"gradients\.axes=\(\)", "parameters.axes")),
    ("law broken by order", lambda: Plan(gradients=Placement(D[::-1]), states=STATES), ("prefix",)),
    ("axis unknown", lambda: Plan(states=Placement(("rack",))), ("rack", "node.*local")),
    ("axis twice", lambda: Plan(states=Placement(("local", "local"))), ("distinct", "local")),
    ("axes are text", lambda: Plan(states=Placement("local")), ("local",)),
    ("axes are None", lambda: Plan(states=Placement(None)), ("None",)),
    ("axes are a list", lambda: Plan(states=Placement(["local"])), ("local",)),
    ("share 0", lambda: Plan(states=Placement(D, Memory.HOST, 0)), (r"states\.share", "above 0")),
    ("share of half a part", lambda: Plan(states=Placement(D, share=0.5)), (r"states\.share", "1.0", "0.5")),
    ("share is text", lambda: Plan(states=Placement(D, Memory.HOST, "half")), (r"states\.share", "'half'")),
    ("gradients alone on the host", lambda: Plan(gradients=HOST, states=STATES), (r"gradients\.memory", "DEVICE")),
    ("gradients on the host, states sharded further", lambda: Plan(gradients=Placement((), Memory.HOST), states=HOST),
     (r"gradients\.memory", "same axes")),
    ("gradients on nvme", lambda: Plan(gradients=NVME, states=NVME), (r"gradients\.memory", "Memory.HOST")),
    ("parameters alone on the host", lambda: Plan(HOST, WHOLE, STATES, STATES), (r"parameters\.memory", "states off")),
    ("parameters on the host, states sharded further", lambda: Plan(Placement((), Memory.HOST), WHOLE, HOST, HOST),
     (r"parameters\.memory", "same axes")),
    ("parameters on the host, states in part", lambda: Plan(HOST, WHOLE, HOST, Placement(D, Memory.HOST, 0.5)),
     (r"parameters\.memory", "all of states")),
    ("a share of parameters", lambda: Plan(Placement(D, Memory.HOST, 0.5), WHOLE, HOST, HOST),
     (r"parameters\.share", "1.0")),
    ("offload unknown", lambda: npuzero.predict(ToyGPT(), 3, 8, offload="disk"), ("host, nvme", "'disk'")),
    ("offload is True", lambda: npuzero.predict(ToyGPT(), 3, 8, offload=True), ("offload", "True")),
    ("offload twice", lambda: npuzero.predict(ToyGPT(), "offload", 8, offload="nvme"), ("either", "'offload'")),
    ("an old name of a field", lambda: Plan(held=Placement()), ("'held'", "Did you mean 'after_forward'")),
    ("a misspelt field", lambda: Plan(gradient=Placement()), ("'gradient'", "Did you mean 'gradients'?")),
    ("held on nvme", lambda: Plan(after_forward=Placement(memory=Memory.NVME)), ("forward.memory", "Memory.DEVICE")),
    ("between over other axes", lambda: Plan(STATES, WHOLE, STATES, STATES, between=Placement(D[::-1])),
     ("prefix", r"between\.axes", r"parameters\.axes")),
    ("between further than parameters", lambda: Plan(between=STATES), ("prefix", r"between\.axes", "over fewer axes")),
    ("between on the host", lambda: Plan(STATES, WHOLE, STATES, STATES, between=HOST),
     (r"between\.memory", "DEVICE", "leave between out")),
    ("between nearer than parameters, and not near", lambda: Plan(NVME, WHOLE, HOST, NVME, between=HOST),
     (r"between\.memory", "DEVICE")),
    ("between is text", lambda: Plan(between="local"), ("between", "Placement", "'local'")),
    ("a share of between", lambda: Plan(HOST, WHOLE, HOST, HOST, between=Placement(D, Memory.HOST, 0.5)),
     (r"between\.share", "1.0")),
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
    ("predict int parameters", lambda: npuzero.predict(IntegerParameter(), 3, 8), ("numbers", "int32")),
]:  # fmt: skip
    bad(_name, ConfigError, *_says)(lambda world, make=_make: make())


bad("files without a folder", ConfigError, "nvme_paths")(lambda world: shard_toy(world, plan="infinity-states"))
bad("files in no folder", ConfigError, "/not/there")(
    lambda world: shard_toy(world, plan="infinity-states", settings=Settings(nvme_paths=("/not/there",)))
)

#: A wrong value, and the word of the error that names the right one.
MISSPELT: dict[str, tuple[Callable[[World], object], str]] = {
    "plan='zero-3'": (lambda world: shard_toy(world, plan="zero-3"), "'zero3'"),
    "plan='ZeRO-2'": (lambda world: shard_toy(world, plan="ZeRO-2"), "'zero2'"),
    "plan='zero-offload'": (lambda world: Plan.preset("zero-offload"), "'offload'"),
    "offload='NVME'": (lambda world: shard_toy(world, 3, offload="NVME"), "'nvme'"),
    "plan='fsdp'": (lambda world: shard_toy(world, plan="fsdp"), "'zero3'"),
    "stage='1.5'": (lambda world: shard_toy(world, "1.5"), "'zero1.5'"),
    "a unit's preset": (lambda world: shard_toy(world, unit_plans={"blocks.1": "zero-1"}), "'zero1'"),
    "a unit's name": (lambda world: shard_toy(world, unit_plans={"block.1": "zero1"}), "'blocks.1'"),
    "predict(plan='zero-3')": (lambda world: npuzero.predict(ToyGPT(), "zero-3", 8), "'zero3'"),
    "precision='bfloat16'": (lambda world: shard_toy(world, precision="bfloat16"), "'bf16'"),
    "precision='float16'": (lambda world: shard_toy(world, precision="float16"), "'fp16'"),
    "precision='bf16_split'": (lambda world: shard_toy(world, precision="bf16_split"), "'bf16-split'"),
    "Precision('bf16')": (lambda world: Precision("bf16"), "torch.bfloat16"),  # type: ignore[arg-type]
    "Precision(masters=)": (lambda world: Precision(torch.bfloat16, masters="spilt"), "'split'"),
    "AdamW(moments=)": (lambda world: npuzero.AdamW(build_seeded_model().parameters(), moments="int-8"), "'int8'"),
    "an axis": (lambda world: Plan(states=Placement(("noed",))), "'node'"),
}
for _name, (_call, _meant) in MISSPELT.items():
    bad(f"misspelt: {_name}", ConfigError, f"Did you mean {re.escape(_meant)}\\?")(_call)

#: A keyword that does not exist, its call, and the keyword that is meant.
KEYWORDS: dict[str, tuple[Callable[[World], object], str]] = {
    "zero(stge=)": (lambda world: shard_toy(world, stge=3), "stage"),
    "zero(preset=)": (lambda world: shard_toy(world, preset="zero3"), "plan"),
    "zero(prefetch=)": (lambda world: shard_toy(world, prefetch=2), "settings=Settings(prefetch=...)"),
    "init(devise=)": (lambda world: npuzero.init(devise="cpu"), "device"),
    "Settings(prefech=)": (lambda world: npuzero.Settings(prefech=2), "prefetch"),
    "Plan(gradient=)": (lambda world: Plan(gradient=STATES), "gradients"),
    "Plan.preset(presision=)": (lambda world: Plan.preset(3, presision="bf16"), "precision"),
    "Placement(axis=)": (lambda world: Placement(axis=D), "axes"),
    "Precision(reduce_dtype=)": (lambda world: Precision(reduce_dtype=F32), "wires"),
    "AdamW(weight_deca=)": (lambda world: npuzero.AdamW([], weight_deca=0.1), "weight_decay"),
    "Lion(bets=)": (lambda world: npuzero.Lion([], bets=(0.9, 0.99)), "betas"),
    "predict(microbatches=)": (lambda world: npuzero.predict(ToyGPT(), 3, 8, microbatches=2), "micro_batches"),
    "checkpoint.save(async_save=)": (lambda world: checkpoint.save("", ToyGPT(), async_save=True), "asynchronous"),
}  # fmt: skip
for _name, (_call, _meant) in KEYWORDS.items():

    @bad(f"unknown keyword: {_name}", config_error_as(TypeError), f"Did you mean {re.escape(repr(_meant))}\\?")
    def _(world: World, call: Callable[[World], object] = _call) -> None:
        with pytest.raises(TypeError):  # as in plain Python
            call(world)
        call(world)


@bad("world not divisible by local_size", ConfigError, "divides the world of 3", "2", ranks=3)
def _(world: World) -> None:
    shard_toy(world, plan="hsdp", local_size=2)


@bad("stage and plan together", ConfigError, "stage=3", "zero2")
def _(world: World) -> None:
    shard_toy(world, 3, plan="zero2")


@bad("tf32 on the CPU", ConfigError, "precision.matmul on cpu", "ieee", "'tf32'", ranks=2)
def _(world: World) -> None:
    shard_toy(world, 3, precision="tf32")


@bad("Plan and precision together", ConfigError, "precision")
def _(world: World) -> None:
    shard_toy(world, plan=Plan.preset(3), precision="bf16")


@bad("Plan and local_size together", ConfigError, "local_size")
def _(world: World) -> None:
    shard_toy(world, plan=Plan.preset(3), local_size=2)


@bad("world is a number", ConfigError, "World", "2")
def _(world: World) -> None:
    npuzero.zero(build_seeded_model(), 3, world=2)  # type: ignore[arg-type]
