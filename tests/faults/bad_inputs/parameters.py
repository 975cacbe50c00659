"""Bad inputs: sharded parameters and their gradients, changed behind the engine."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import npuzero
from npuzero import StateError
from npuzero.comm import World
from world.toy import ToyGPT, build_seeded_model

from .case import BadInputTable, backward_toy_loss, shard_toy

TABLE = BadInputTable()
bad, fine = TABLE.bad, TABLE.fine
F32 = torch.float32


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
        lambda world, read=_read: read(shard_toy(world).norm.weight)
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

        @bad(f"sharded gradient, {_stage}: {_name}", StateError, "gradient", ranks=2)
        def _(world: World, stage: str = _stage, read: Any = _read) -> None:
            model = shard_toy(world, plan=stage)
            backward_toy_loss(model, world)
            read(model.norm.weight)


def _step_with_change(world: World, change: Callable[[Any], object], stage: str, before: bool) -> None:
    """Take a step after ``change(model)``, which runs before or after the backward pass."""
    model = shard_toy(world, plan=stage)
    optimizer = npuzero.AdamW(model.parameters())
    backward_toy_loss(model, world)
    optimizer.step()
    optimizer.zero_grad()
    if before:
        change(model)
    backward_toy_loss(model, world)
    if not before:
        change(model)
    optimizer.step()
    optimizer.zero_grad()
    backward_toy_loss(model, world)


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
        ("double", lambda model: model.double(), False, ("sharded gradient|parameter", "zero")),
        ("to meta", lambda model: model.to("meta"), True, ("parameter", "zero")),
        ("to_empty", lambda model: model.to_empty(device="cpu"), True, ("parameter", "zero")),
        ("p.data = ...", _new_data, True, ("norm.weight",)),
        ("p.data = ... after backward", _new_data, False, ("norm.weight",)),
        ("another parameter", _new_parameter, True, ("norm.weight",)),
        ("p.grad = ...", _set_grad, False, ("norm.weight", "grad")),
        ("p.grad = ... before backward", _set_grad, True, ("norm.weight", "grad")),
    ]:
        bad(f"{_name} after zero(), {_stage}", StateError, *_says, ranks=2)(
            lambda world, change=_change, stage=_stage, before=_before: _step_with_change(world, change, stage, before)
        )

for _stage in ("zero0", "zero3"):
    for _name, _call in {
        "to": lambda model: model.to(torch.bfloat16),
        "half": lambda model: model.half(),
        "to, of a device": lambda model: model.to("meta"),
        "xpu": lambda model: model.xpu(),  # this torch has no xpu, and raises its own error
    }.items():
        _says = (rf"ToyGPT\.{_name.partition(',')[0]}\(\) after npuzero\.zero\(\)", r"before npuzero\.zero\(\)")
        bad(f"who converts, {_stage}: {_name}", StateError, *_says, ranks=2)(
            lambda world, call=_call, stage=_stage: call(shard_toy(world, plan=stage))
        )

    @bad(f"who writes into a gradient, {_stage}: torch's SGD", StateError, r"^torch\.optim\.SGD\.step on", ranks=2)
    def _(world: World, stage: str = _stage) -> None:
        model = shard_toy(world, plan=stage)
        backward_toy_loss(model, world)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    _why = "no rank has it unsharded" if _stage == "zero3" else "in a buffer of its own"

    @bad(f"why, {_stage}", StateError, r"^Tensor\.mul_ on the gradient of norm\.weight, called at", _why, ranks=2)
    def _(world: World, stage: str = _stage) -> None:
        model = shard_toy(world, plan=stage)
        backward_toy_loss(model, world)
        model.norm.weight.grad.mul_(2)


@bad("who reads: an update by hand", StateError, r"^reading the gradient of [\w.]+, called at parameters", ranks=2)
def _(world: World) -> None:
    model = shard_toy(world)
    backward_toy_loss(model, world)
    0.1 * model.norm.weight.grad


@bad("who reads: an optimizer", StateError, r"^torch\.optim\.SGD\.step on", r"Use npuzero\.AdamW", ranks=2)
def _(world: World) -> None:
    model = shard_toy(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward_toy_loss(model, world)
    optimizer.step()


@bad("who reads: state_dict", StateError, r"^ToyGPT\.state_dict on", "at parameters.py", "npuzero.export", ranks=2)
def _(world: World) -> None:
    shard_toy(world).state_dict()


for _name, _call in {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
}.items():
    for _stage in ("zero0", "zero3"):
        bad(f"{_name} of a cut model, {_stage}", StateError, "full_state_dict", ranks=2)(
            lambda world, call=_call, stage=_stage: call(shard_toy(world, plan=stage))
        )

for _name, _call in {
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict(build_seeded_model().state_dict()),
    "share_memory": lambda model: model.share_memory(),
    "copy.copy then sum": lambda model: copy.copy(model).norm.weight.sum(),
    "apply init": lambda model: model.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None),
}.items():
    bad(f"{_name}, sharded model", StateError, "full_state_dict", ranks=2)(
        lambda world, call=_call: call(shard_toy(world))
    )


class EncodingToyGPT(ToyGPT):
    def encode(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions


@bad("a method outside forward", StateError, "tokens.weight|positions", "forward", ranks=2)
def _(world: World) -> None:
    shard_toy(world, model=build_seeded_model(make=EncodingToyGPT)).encode(torch.zeros(1, 12, dtype=torch.int64))


@bad("a part of a unit outside forward", StateError, r"blocks\.0", "forward", ranks=2)
def _(world: World) -> None:
    shard_toy(world).blocks[0].qkv(torch.zeros(1, 16))


@fine("a submodule of the root outside forward")
def _(world: World) -> None:
    shard_toy(world).norm(torch.zeros(1, 16))


@fine("metadata and text of a cut parameter")
def _(world: World) -> None:
    p = shard_toy(world).norm.weight
    assert "ShardedParameter" in f"{p}" + repr(p) and (p.shape, p.dtype, p.device.type) == ((16,), F32, "cpu")
    assert (
        p.numel() == len(p) == 16 and p.requires_grad and p.is_leaf and p.grad is None and isinstance(p, nn.Parameter)
    )


@fine("a cut parameter under gathered()")
def _(world: World) -> None:
    model = shard_toy(world)
    with npuzero.gathered(model):
        assert model.norm.weight.sum() == 16


@fine("a whole parameter after a step")
def _(world: World) -> None:
    model = shard_toy(world, 1)
    optimizer = npuzero.AdamW(model.parameters())
    backward_toy_loss(model, world)
    optimizer.step()
    assert model.norm.weight.isfinite().all() and not model.norm.weight.equal(torch.ones(16))
