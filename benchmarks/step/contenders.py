"""Contenders that need nothing but torch and npuzero: each turns the plain model into one that takes steps.

A contender is a function from (model, workload) to Steps. The model comes in float32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.step.workload import HYPER, MAX_NORM, Workload


@dataclass
class Steps:
    """How a contender takes a step: forward, backward, update.

    Attributes:
        model: called with tokens, gives logits.
        update: everything from gradients to new parameters, gradients cleared.
        backward: takes the loss.
        forward: entered around the forward pass (autocast).
        facts: what is to be reported beside the figures, such as bytes planned.
        trains: whether the ranks train one model together, so that their losses must agree with the reference.
    """

    model: nn.Module
    update: Callable[[], None]
    backward: Callable[[Tensor], Any] = torch.Tensor.backward
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    facts: dict[str, Any] | None = None


Contender = Callable[[nn.Module, Workload], Steps]


def compute_only(model: nn.Module, workload: Workload) -> Steps:
    """Forward and backward in the pure precision; gradients are dropped."""
    model.to(workload.dtype)

    def drop() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    return Steps(model, drop)


def alone(model: nn.Module, workload: Workload) -> Steps:
    """Plain torch on each rank for itself: clipping and fused AdamW (on float32 masters in bf16), no communication."""
    return plain_update(model.to(workload.dtype), model)


def plain_update(model: nn.Module, wrapped: nn.Module) -> Steps:
    """Torch's clipping and fused AdamW for the whole parameters of ``model``, which ``wrapped`` computes with."""
    parameters = list(model.parameters())
    low = parameters[0].dtype != torch.float32
    masters = [p.detach().float().requires_grad_() for p in parameters] if low else parameters
    optimizer = torch.optim.AdamW(masters, fused=True, **HYPER)

    def update() -> None:
        if low:
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if low:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)

    return Steps(wrapped, update)


def npuzero_preset(preset: str, local_size: int | None = None) -> Contender:
    """npuzero under a preset."""

    def build(model: nn.Module, workload: Workload) -> Steps:
        import npuzero

        world = npuzero.init()
        plan = npuzero.Plan.preset(preset, precision=workload.precision, local_size=local_size)
        model.to(world.device)
        predicted = npuzero.predict(model, plan, world, clip=True)
        npuzero.zero(model, plan=plan)
        optimizer = npuzero.AdamW(model.parameters(), **HYPER)

        def update() -> None:
            npuzero.clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

        return Steps(model, update, facts={"plan_bytes": sum(predicted.bytes_held.values())})

    return build


CONTENDERS: dict[str, Contender] = {
    "compute": compute_only,
    "alone": alone,
    **{preset: npuzero_preset(preset) for preset in ("zero0", "zero1", "zero2", "zero3", "zero3-keep")},
    # Each rank a group of its own: no traffic but the sum beyond the group.
    **{preset: npuzero_preset(preset, local_size=1) for preset in ("zero1.5", "hsdp")},
}
