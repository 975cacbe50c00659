"""What frameworks hand over becomes npuzero's: models once, optimizers with their options and state, schedulers never
orphaned.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers

import npuzero
from frameworks.toys import BOUND, distance, net, rows
from npuzero import adopt
from npuzero.shard.ownership import engine_of

CPU = torch.device("cpu")
INPUTS, TARGETS = (tensor[:16] for tensor in rows().tensors)
Made = Callable[[list[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Made] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9)),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "Adam, decoupled": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "groups": lambda p: torch.optim.AdamW([{"params": p[:4], "lr": 3e-2}, {"params": p[4:], "eps": 1e-5}], lr=1e-3),
}


def sharded() -> nn.Sequential:
    return adopt.shard(net(), CPU, {"stage": 3})


def step(model: nn.Module, optimizer: Optimizer) -> None:
    nn.functional.mse_loss(model(INPUTS), TARGETS).backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return npuzero.full_state_dict(model) if adopt.is_sharded(model) else model.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_heir_updates_as_the_optimizer_would_with_its_options_and_state(name: str) -> None:
    """Two steps of the plain model before it is sharded, and three after."""
    plain, other = net(), net()
    expected, before = (OPTIMIZERS[name](list(model.parameters())) for model in (plain, other))
    for model, optimizer in ((plain, expected), (other, before)):
        step(model, optimizer)
        step(model, optimizer)
    adopt.shard(other, CPU, {"stage": 3})
    heir = adopt.adopt(before)
    assert type(heir).__name__ in (type(before).__name__, "ZeroOptimizer") and isinstance(heir, npuzero.ZeroOptimizer)
    for _ in range(3):
        step(plain, expected)
        step(other, heir)
    assert distance(weights(plain), weights(other)) < BOUND
    assert adopt.adopt(heir) is heir and adopt.adopt(before) is heir


def test_optimizers_over_plain_parameters_and_npuzeros_own_stay() -> None:
    plain = torch.optim.AdamW(net().parameters())
    assert adopt.adopt(plain) is plain
    own = npuzero.AdamW(sharded().parameters())
    assert adopt.adopt(own) is own


def test_the_optimizer_that_was_replaced_does_not_step() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adopt.adopt(optimizer)
    with pytest.raises(npuzero.StateError, match="Step what prepare"):
        optimizer.step()


class Hidden(Optimizer):
    """Keeps an argument to itself, so that nobody can tell how it was made."""

    def __init__(self, params: Any, lr: float = 0.1, secret: int = 1) -> None:
        super().__init__(params, {"lr": lr})
        self.secret = secret

    def step(self, closure: object = None) -> None:
        """Do nothing."""


def test_an_optimizer_that_cannot_be_made_again_is_refused() -> None:
    with pytest.raises(npuzero.ConfigError, match="does not show: secret"):
        adopt.adopt(Hidden(sharded().parameters()))


def test_an_optimizer_that_is_not_elementwise_is_refused() -> None:
    with pytest.raises(npuzero.ConfigError, match="Adafactor"):
        adopt.adopt(torch.optim.Adafactor(sharded().parameters()))


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, T_max=9),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=9),
    "sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "chain": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("repointed", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_with_the_heir_whether_it_was_told_or_not(name: str, repointed: bool) -> None:
    """Warnings are errors here: torch warns where a scheduler's optimizer does not step before it."""
    plain, model = net(), net()
    expected, optimizer = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model))
    theirs, scheduler = SCHEDULERS[name](expected), SCHEDULERS[name](optimizer)
    adopt.shard(model, CPU, {})
    heir = adopt.adopt(optimizer)
    if repointed:
        adopt.repoint(scheduler)
        assert scheduler.optimizer is heir
    for _ in range(5):
        step(plain, expected)
        step(model, heir)
        theirs.step()
        scheduler.step()
        assert [group["lr"] for group in heir.param_groups] == [group["lr"] for group in expected.param_groups]
    assert distance(weights(plain), weights(model)) < BOUND
    state = copy.deepcopy(scheduler.state_dict())
    again = SCHEDULERS[name](heir)
    again.load_state_dict(state)
    assert again.get_last_lr() == scheduler.get_last_lr()


def test_a_plateau_is_followed() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    heir = adopt.adopt(optimizer)
    adopt.repoint(scheduler)
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)
    assert scheduler.optimizer is heir and heir.param_groups[0]["lr"] == 0.25


def test_a_scheduler_of_an_optimizer_that_nobody_adopted_is_refused() -> None:
    optimizer = torch.optim.SGD(sharded().parameters(), lr=1.0)
    scheduler = schedulers.ExponentialLR(optimizer, 0.9)
    with pytest.raises(npuzero.ConfigError, match="nobody has prepared"):
        adopt.repoint(scheduler)


def test_a_scheduler_of_a_plain_model_stays() -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=1.0)
    scheduler = schedulers.ExponentialLR(optimizer, 0.9)
    adopt.repoint(scheduler)
    assert scheduler.optimizer is optimizer


def test_a_model_is_sharded_once_and_not_in_part() -> None:
    model = sharded()
    engine = engine_of(model)
    assert adopt.shard(model, CPU, {"stage": 1}) is model and engine_of(model) is engine
    with pytest.raises(npuzero.ConfigError, match="a part is sharded by itself"):
        adopt.shard(nn.Sequential(model, nn.Linear(2, 2)), CPU, {})
    assert not adopt.is_sharded(adopt.shard(nn.Tanh(), CPU, {}))


@pytest.mark.parametrize("options", [{"stag": 2}, {"stage": 7}])
def test_options_are_those_of_zero(options: dict[str, Any]) -> None:
    with pytest.raises(npuzero.ConfigError, match="stage"):
        adopt.shard(net(), CPU, options)
    with pytest.raises(npuzero.ConfigError, match="as a mapping"):
        adopt.check_options("ZeroAccelerator", 2)


DOORS = """
import importlib, sys
import npuzero, npuzero.adopt

packages = ("accelerate", "transformers", "lightning", "pytorch_lightning")
print("imported", sorted(sys.modules.keys() & set(packages)))
sys.modules |= dict.fromkeys(packages)  # as if none were installed
for package in packages[:3]:
    try:
        importlib.import_module(f"npuzero.{package}")
    except npuzero.PackageMissing as error:
        print(error.subject, "|", error.do)
"""


def test_no_framework_is_imported_until_it_is_asked_for_and_then_named_where_it_is_missing() -> None:
    ended = subprocess.run([sys.executable, "-c", DOORS], capture_output=True, text=True, timeout=300, check=True)
    imported, *errors = ended.stdout.splitlines()
    assert imported == "imported []"
    names = ("accelerate", "transformers", "lightning")
    assert errors == [f"npuzero.{n} | pip install 'npuzero[frameworks]', or {n} alone." for n in names]
