"""Contenders that need nothing but torch and npuzero: each turns the plain model into one that takes steps.

An entry of CONTENDERS is called with no argument, imports what it needs, and returns a Build: from the plain model,
float32 on the CPU, and the workload to Steps. What is imported is no part of the memory that is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.step.workload import MAX_NORM, GPTWorkload, gpt_loss


@dataclass
class TrainSteps:
    """How a contender takes a step: forward, backward, update.

    Attributes:
        model: called with tokens, gives logits.
        update: everything from gradients to new parameters, gradients cleared.
        backward: takes the loss.
        forward: entered around the forward pass (autocast).
        plan_bytes: what the contender says a rank will hold, activations aside.
        only_computes: nobody wants the gradients.
        loss: of the model and tokens.
    """

    model: nn.Module
    update: Callable[[], None]
    backward: Callable[[Tensor], Any] = torch.Tensor.backward
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    plan_bytes: int | None = None
    only_computes: bool = False
    loss: Callable[[nn.Module, Tensor], Tensor] = gpt_loss


Build = Callable[[nn.Module, GPTWorkload], TrainSteps]


def default_device() -> torch.device:
    """The device npuzero would choose for this rank."""
    from npuzero import device

    return device.choose(int(os.environ.get("LOCAL_RANK", 0)))


def step_compute_only() -> Build:
    """Forward and backward in the pure precision; gradients are dropped, and nothing is sent."""
    device = default_device()

    def build(model: nn.Module, workload: GPTWorkload) -> TrainSteps:
        model.to(device, workload.dtype)
        plan_bytes = sum(parameter.nbytes for parameter in model.parameters())
        return TrainSteps(model, partial(model.zero_grad, set_to_none=True), plan_bytes=plan_bytes, only_computes=True)

    return build


def independent_ranks() -> Build:
    """Plain torch, each rank for itself: clipping and fused AdamW, on float32 masters where parameters are not."""
    device = default_device()
    return lambda model, workload: plain_steps(model.to(device), workload.hyper, workload.dtype)


def plain_steps(
    model: nn.Module,
    hyper: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> TrainSteps:
    """Torch's clipping and fused AdamW on all parameters of ``model``, which is float32 when this is called.

    In another dtype parameters have float32 masters. These begin with what the model held before its conversion, as
    npuzero's do: where an update is smaller than half a step of bfloat16, masters of rounded values learn less.
    """
    parameters = list(model.parameters())
    masters = [parameter.detach().requires_grad_() for parameter in parameters]
    model = wrap(model.to(dtype))
    if dtype == torch.float32:
        optimizer = torch.optim.AdamW(parameters, fused=True, **hyper)
        return TrainSteps(model, partial(clip_and_step, parameters, optimizer))
    optimizer = torch.optim.AdamW(masters, fused=True, **hyper)

    def update() -> None:
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        clip_and_step(masters, optimizer)
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)

    return TrainSteps(model, update)


def clip_and_step(parameters: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """The update as torch has it."""
    torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def npuzero_preset(preset: str, local_size: int | None = None, storage: str = "") -> Build:
    """npuzero under a preset; ``storage`` is what follows in the precision's name, such as ``"-split"``."""
    import npuzero

    def build(model: nn.Module, workload: GPTWorkload) -> TrainSteps:
        world = npuzero.init()
        model.to(world.device)
        plan = npuzero.Plan.preset(preset, precision=workload.precision + storage, local_size=local_size)
        plan_bytes = sum(npuzero.predict(model, plan, world, clip=True).bytes_held.values())
        npuzero.zero(model, plan=plan)
        optimizer = npuzero.AdamW(model.parameters(), **workload.hyper)

        def update() -> None:
            npuzero.clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

        return TrainSteps(model, update, plan_bytes=plan_bytes)

    return build


#: Presets that `--presets all` measures. Where all ranks share a host, the two-level ones are cut within groups of one
#: rank, and so send only the sum beyond the group.
PRESETS = {
    **dict.fromkeys(("zero0", "zero1", "zero2", "zero3", "zero3-keep")),
    "zero1.5": 1,
    "hsdp": 1,
}

CONTENDERS: dict[str, Callable[[], Build]] = {
    "compute": step_compute_only,
    "alone": independent_ranks,
    **{preset: partial(npuzero_preset, preset, local_size) for preset, local_size in PRESETS.items()},
    # Of bf16 only: no rounded copy beside the masters, as FSDP2 keeps none.
    "zero3-split": partial(npuzero_preset, "zero3", storage="-split"),
}
