"""torch optimizers that may run over shards: those with an element-wise update, under any name. Others are refused at
construction, with the reason found.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import npuzero

STEPS = 3


class SimpleOptimizer(torch.optim.Optimizer):
    """A user's optimizer: subtract ``change`` of a parameter and its gradient."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.change(p, p.grad, group))

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class MyOptimizer(SimpleOptimizer):
    """LARS (You et al., 2017): each layer has its own rate, by the norms of its weights and gradients."""

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad * p.norm() / grad.norm()


class LambWhereDecayed(SimpleOptimizer):
    """As some have it: a trust ratio only where there is weight decay."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay=weight_decay)

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        update = grad.sign() + group["weight_decay"] * p
        return update * p.norm() / update.norm() if group["weight_decay"] else update


class CentralizedOptimizer(SimpleOptimizer):
    """Gradients of matrices lose their mean over each row (Yong et al., 2020)."""

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad - grad.mean(1, keepdim=True) if grad.dim() > 1 else grad


class DecaysMatrices(SimpleOptimizer):
    """No weight decay of biases: in a range of elements, a matrix is not recognized as one."""

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad + 0.1 * p if p.dim() > 1 else grad


class LangevinOptimizer(SimpleOptimizer):
    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad + torch.randn_like(p)


class ClippingSGD(torch.optim.SGD):
    """Clip by the norm of all gradients it sees, which on a rank are only some."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.5)
        return super().step(closure)


class SignedOptimizer(SimpleOptimizer):
    """Element-wise."""

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad.sign()


def elementwise_parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5))]


@pytest.mark.parametrize(
    "kind",
    [MyOptimizer, CentralizedOptimizer, DecaysMatrices, LangevinOptimizer, ClippingSGD, torch.optim.Adafactor],
    ids=lambda kind: kind.__name__,
)
def test_what_looks_beyond_an_element_is_refused_under_any_name(kind: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(npuzero.ConfigError, match=f"{kind.__name__}.*element-wise.*part of its tensor"):
        npuzero.ZeroOptimizer(kind, elementwise_parameters(), lr=0.1)


def test_a_learning_rate_of_zero_hides_nothing() -> None:
    with pytest.raises(npuzero.ConfigError, match="element-wise"):
        npuzero.ZeroOptimizer(MyOptimizer, elementwise_parameters(), lr=0.0)


def test_an_option_of_one_group_is_seen() -> None:
    plain, decayed = elementwise_parameters()
    npuzero.ZeroOptimizer(LambWhereDecayed, [plain])
    with pytest.raises(npuzero.ConfigError, match=r"LambWhereDecayed.*element-wise"):
        npuzero.ZeroOptimizer(LambWhereDecayed, [{"params": [plain]}, {"params": [decayed], "weight_decay": 0.1}])
    optimizer = npuzero.ZeroOptimizer(LambWhereDecayed, [plain])
    with pytest.raises(npuzero.ConfigError, match=r"LambWhereDecayed.*element-wise"):
        optimizer.add_param_group({"params": [decayed], "weight_decay": 0.1})


def test_what_needs_more_than_gradients_is_refused_with_the_reason() -> None:
    with pytest.raises(npuzero.ConfigError, match=r"LBFGS.*closure"):
        npuzero.ZeroOptimizer(torch.optim.LBFGS, elementwise_parameters())
    with pytest.raises(npuzero.ConfigError, match=r"SparseAdam.*dense gradients"):
        npuzero.ZeroOptimizer(torch.optim.SparseAdam, elementwise_parameters())
    if hasattr(torch.optim, "Muon"):
        with pytest.raises(npuzero.ConfigError, match=r"Muon.*2D"):
            npuzero.ZeroOptimizer(torch.optim.Muon, elementwise_parameters()[:1])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *[
            (name, {})
            for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta")
        ],
        *[(name, {}) for name in ("Rprop", "ASGD")],
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("Adam", {"amsgrad": True, "foreach": True}),
        ("AdamW", {"maximize": True, "lr": torch.tensor(0.1)}),
        ("RMSprop", {"centered": True, "momentum": 0.5}),
        ("Adam", {"capturable": True}),
        (SignedOptimizer, {}),
    ],
    ids=str,
)
def test_element_wise_optimizers_are_taken(kind: Any, options: dict[str, Any]) -> None:
    """And plain parameters move as under the class itself."""
    kind = getattr(torch.optim, kind) if isinstance(kind, str) else kind
    mine, its = elementwise_parameters(), elementwise_parameters()
    wrapped = npuzero.ZeroOptimizer(kind, mine, **options)
    if options.get("capturable"):
        return  # is for accelerators
    plain = kind(its, **options)
    for step in range(STEPS):
        for parameter in (*mine, *its):
            parameter.grad = torch.full_like(parameter, 0.5 - step)
        wrapped.step()
        plain.step()
    assert all(map(torch.equal, mine, its))


def test_trying_disturbs_nobody() -> None:
    """The trial changes no random state, and calls no global hook that counts steps."""
    steps: list[torch.optim.Optimizer] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: steps.append(optimizer))
    try:
        before = torch.get_rng_state()
        for kind in (LangevinOptimizer, ClippingSGD, torch.optim.Rprop):
            try:
                npuzero.ZeroOptimizer(kind, elementwise_parameters(), lr=0.3)
            except npuzero.ConfigError:
                assert kind is not torch.optim.Rprop
        assert torch.get_rng_state().equal(before)
        assert not [optimizer for optimizer in steps if type(optimizer) in (LangevinOptimizer, torch.optim.Rprop)]
    finally:
        hook.remove()


def test_all_of_torchs_are_known_here() -> None:
    """A new optimizer must be checked."""
    known = {
        *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD"),
        *("LBFGS", "SparseAdam", "Adafactor", "Muon", "Optimizer"),
    }
    there = {name for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    assert there <= known
