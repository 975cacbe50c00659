"""Contenders that need only torch and npuzero. Each turns the plain model into one that takes steps.

An entry of CONTENDERS is called without arguments, imports its packages, and returns a Build: a function from the plain
model (float32 on the CPU) and the workload to TrainSteps. Imports do not count toward the measured memory.
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
    """A contender's step: forward, backward, update.

    Attributes:
        model: maps tokens to logits.
        update: everything from gradients to new parameters, including clearing gradients.
        backward: called with the loss.
        forward: context manager around the forward pass (autocast).
        plan_bytes: predicted memory per rank, without activations.
        only_computes: gradients are not used.
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
    """Return the device that npuzero would choose for this rank."""
    from npuzero import device

    return device.choose(int(os.environ.get("LOCAL_RANK", 0)))


def step_compute_only() -> Build:
    """Forward and backward in the pure precision; gradients are dropped, without communication."""
    device = default_device()

    def build(model: nn.Module, workload: GPTWorkload) -> TrainSteps:
        model.to(device, workload.dtype)
        plan_bytes = sum(parameter.nbytes for parameter in model.parameters())
        return TrainSteps(model, partial(model.zero_grad, set_to_none=True), plan_bytes=plan_bytes, only_computes=True)

    return build


def independent_ranks() -> Build:
    """Build plain torch on each rank independently: clipping, fused AdamW, float32 masters for other dtypes."""
    device = default_device()
    return lambda model, workload: plain_steps(model.to(device), workload.hyper, workload.dtype)


def plain_steps(
    model: nn.Module,
    hyper: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> TrainSteps:
    """Build torch's clipping and fused AdamW on all parameters of ``model``, which must be float32 here.

    In another dtype parameters have float32 masters, initialized from the values before conversion, as npuzero's are:
    with updates smaller than half a step of bfloat16, masters of rounded values learn less.
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
    """Update as torch does: clip, step, clear gradients."""
    torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def npuzero_preset(preset: str, local_size: int | None = None, storage: str = "") -> Build:
    """Build npuzero under a preset; ``storage`` is the suffix of the precision's name, such as ``"-split"``."""
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


#: Presets of `--presets all`. If all ranks share a host, the two-level presets use groups of one rank, and so send only
#: the sum beyond the group.
PRESETS = {
    **dict.fromkeys(("zero0", "zero1", "zero2", "zero3", "zero3-keep")),
    "zero1.5": 1,
    "hsdp": 1,
}

CONTENDERS: dict[str, Callable[[], Build]] = {
    "compute": step_compute_only,
    "alone": independent_ranks,
    **{preset: partial(npuzero_preset, preset, local_size) for preset, local_size in PRESETS.items()},
    # Only for bf16: without a rounded copy in addition to the masters, as in FSDP2.
    "zero3-split": partial(npuzero_preset, "zero3", storage="-split"),
}
