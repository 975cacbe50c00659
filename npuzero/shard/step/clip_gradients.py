"""Clip and skip the gradients of given parameters: of a model, part of a model, or several models.

As in torch, the norm covers exactly the given tensors, and only they are scaled. Plain tensors may be among them: they
contribute the mean of their p-th powers over the ranks, so that every rank scales by the same factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.linalg import vector_norm

from npuzero.comm.watchdog.call_names import collective_call
from npuzero.errors import StateError
from npuzero.plan import AXES
from npuzero.shard.find_engine import GradientTargets
from npuzero.shard.gradients.vote_rules import Words
from npuzero.shard.step.read_gradients import ChosenGradients

if TYPE_CHECKING:
    from npuzero.shard.engine import Engine


@_disable_dynamo
@collective_call("clip_grad_norm_")
@torch.no_grad()
def clip_gradient_norm(given: GradientTargets, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Clip the gradients to a p-norm of at most ``max_norm``; return the earlier norm, () float32. Collective.

    Raises:
        StateError: with ``error_if_nonfinite``, a norm that is inf or NaN.
    """
    chosen = _choose_gradients("clip_grad_norm_", {"max_norm": max_norm, "norm_type": norm_type}, given)
    device = next(iter(given.engines)).device
    norms = [each.norm(norm_type).to(device) for each in chosen if each.some]
    plain = [tensor.grad for tensor in given.plain if tensor.grad is not None]
    if given.plain:
        norms.append(_plain_norm(plain, norm_type, next(iter(given.engines))))
    if not norms:
        return torch.zeros((), device=device)
    # All ranks have the same total, so either all raise, before any gradient is scaled, or none does.
    total = (norms[0] if len(norms) == 1 else cast(Tensor, vector_norm(torch.stack(norms), norm_type))).float()
    if error_if_nonfinite and not total.isfinite().item():
        units = [name for engine in given.engines for name in engine.gradients.nonfinite_units()]
        raise StateError(
            "clip_grad_norm_",
            expected="finite gradients",
            got=f"a norm of {total.item()}, here from units {units}",
            do="Lower the learning rate or look at the loss; zero_grad() drops these gradients.",
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for each in chosen:
        if each.some:
            each.scale(scale.to(each.device))
    for gradient in plain:
        gradient.mul_(scale.to(gradient.device))
    return total


@_disable_dynamo
@collective_call("clip_grad_value_")
@torch.no_grad()
def clip_gradient_values(given: GradientTargets, limit: float) -> None:
    """Clip every element of the gradients to ``[-limit, limit]``. Collective."""
    for each in _choose_gradients("clip_grad_value_", {"clip_value": limit}, given):
        if each.some:
            each.clamp(limit)
    for tensor in given.plain:
        if tensor.grad is not None:
            tensor.grad.clamp_(-limit, limit)


@_disable_dynamo
@collective_call("skip_nonfinite_")
@torch.no_grad()
def skip_nonfinite(given: GradientTargets) -> Tensor:
    """Skip the next update if any of the gradients is inf or NaN; return () bool: whether one is. Collective."""
    chosen = _choose_gradients("skip_nonfinite_", {}, given)
    device = next(iter(given.engines)).device
    found = [each.nonfinite().to(device) for each in chosen if each.some]
    if not found:
        return torch.zeros((), dtype=torch.bool, device=device)
    bad = found[0] if len(found) == 1 else torch.stack(found).any()
    for each, (engine, parameters) in zip(chosen, given.engines.items(), strict=True):
        if each.some:
            ids = None if parameters is None else frozenset(map(id, parameters))
            engine.boundary.skip_where(bad.float().view(1).to(engine.device), ids)
    return bad


def _choose_gradients(call: str, words: Words, given: GradientTargets) -> list[ChosenGradients]:
    for engine in given.engines:
        engine.boundary.early.refuse(call)
    return [engine.gradients.choose(call, words, parameters) for engine, parameters in given.engines.items()]


def _plain_norm(gradients: Sequence[Tensor], p: float, engine: Engine) -> Tensor:
    """Return () float64: the p-norm of plain gradients, with its p-th power averaged over the ranks. Collective."""
    mine = [cast(Tensor, vector_norm(gradient, p, dtype=torch.float64)) for gradient in gradients if gradient.numel()]
    norm = torch.zeros((), dtype=torch.float64, device=engine.device)
    if mine:
        norm = cast(Tensor, vector_norm(torch.stack([each.to(norm.device) for each in mine]), p))
    ranks = engine.mesh.size(AXES)
    if ranks == 1:
        return norm
    norms = torch.zeros(ranks, dtype=torch.float64, device=norm.device)
    norms[engine.mesh.index(AXES)] = norm
    engine.mesh.communicator(AXES, "control").all_reduce(norms, tag="gradient norm").wait()
    return cast(Tensor, vector_norm(norms, p).div(ranks ** (1 / p)))
