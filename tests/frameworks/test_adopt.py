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
from frameworks.toys import BOUND, build_framework_net, max_difference, regression_rows
from npuzero import adopt
from npuzero.shard.find_engine import engine_of

CPU = torch.device("cpu")
INPUTS, TARGETS = (tensor[:16] for tensor in regression_rows().tensors)
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


def adopt_sharded_net() -> nn.Sequential:
    return adopt.shard_framework_model(build_framework_net(), CPU, {"stage": 3})


def adopt_train_step(model: nn.Module, optimizer: Optimizer) -> None:
    nn.functional.mse_loss(model(INPUTS), TARGETS).backward()
    optimizer.step()
    optimizer.zero_grad()


def adopted_weights(model: nn.Module) -> dict[str, Tensor]:
    return npuzero.full_state_dict(model) if adopt.is_sharded(model) else model.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_adopted_optimizer_updates_as_before_with_its_options_and_state(name: str) -> None:
    """Two steps of the plain model before it is sharded, and three after."""
    plain, other = build_framework_net(), build_framework_net()
    expected, before = (OPTIMIZERS[name](list(model.parameters())) for model in (plain, other))
    for model, optimizer in ((plain, expected), (other, before)):
        adopt_train_step(model, optimizer)
        adopt_train_step(model, optimizer)
    adopt.shard_framework_model(other, CPU, {"stage": 3})
    adopted = adopt.adopt_optimizer(before)
    assert adopted is before and type(adopted).__name__ == type(expected).__name__
    assert isinstance(adopted, npuzero.ZeroOptimizer) and isinstance(adopted, type(expected))
    for _ in range(3):
        adopt_train_step(plain, expected)
        adopt_train_step(other, adopted)
    assert max_difference(adopted_weights(plain), adopted_weights(other)) < BOUND
    assert adopt.adopt_optimizer(adopted) is adopted


def test_optimizers_over_plain_parameters_and_npuzeros_own_stay() -> None:
    plain = torch.optim.AdamW(build_framework_net().parameters())
    assert adopt.adopt_optimizer(plain) is plain
    own = npuzero.AdamW(adopt_sharded_net().parameters())
    assert adopt.adopt_optimizer(own) is own


def test_what_a_program_reads_and_writes_on_an_optimizer_stays_its_own() -> None:
    model = adopt_sharded_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.warmed_up = False  # type: ignore[attr-defined]
    defaults, groups, group = optimizer.defaults, optimizer.param_groups, optimizer.param_groups[0]
    group["lr_scale"] = 0.5
    adopted = adopt.adopt_optimizer(optimizer)
    assert adopted is optimizer and isinstance(adopted, torch.optim.AdamW) and repr(adopted).startswith("AdamW (")
    assert adopted.defaults is defaults and adopted.param_groups is groups and groups[0] is group
    assert adopted.warmed_up is False and group["lr_scale"] == 0.5  # type: ignore[attr-defined]
    before = {name: value for name, value in adopted_weights(model).items() if name.endswith("weight")}
    for each in optimizer.param_groups:  # as timm's and MAE's schedules do
        each["lr"] = 0.0 * each["lr_scale"]
    adopt_train_step(model, adopted)
    assert all(torch.equal(value, adopted_weights(model)[name]) for name, value in before.items())


def test_hooks_from_before_and_after_run_once_as_in_torch() -> None:
    model, ran = adopt_sharded_net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: ran.append("before step"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": len(ran)})
    optimizer.register_load_state_dict_post_hook(lambda _: ran.append("loaded"))
    adopt.adopt_optimizer(optimizer)
    optimizer.register_step_post_hook(lambda *_: ran.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda _: ran.append("read"))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {k: v for k, v in state.items() if k != "note"})
    adopt_train_step(model, optimizer)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert ran == ["before step", "after step", "read", "loaded"] and state["note"] == 3


class CountingOptimizer(Optimizer):
    """Keep what it counts in keys and attributes of its own, as timm's optimizers and schedule-free ones do."""

    def __init__(self, params: Any, lr: float = 0.1, count: int = 0) -> None:
        super().__init__(params, {"lr": lr, "count": count})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Move by a rate that falls with the count."""
        self.steps += 1
        for group in self.param_groups:
            group["count"] += 1
            group["rate"] = group["lr"] / group["count"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["rate"])


@pytest.mark.parametrize("made", ["adopted", "ZeroOptimizer"])
def test_keys_of_its_own_that_a_step_writes_last(made: str) -> None:
    plain, model = build_framework_net(), build_framework_net()
    expected = CountingOptimizer(plain.parameters())
    optimizer = CountingOptimizer(model.parameters()) if made == "adopted" else None
    adopt.shard_framework_model(model, CPU, {"stage": 3})
    adopted = (
        adopt.adopt_optimizer(optimizer) if optimizer else npuzero.ZeroOptimizer(CountingOptimizer, model.parameters())
    )
    for _ in range(3):
        adopt_train_step(plain, expected)
        adopt_train_step(model, adopted)
    assert max_difference(adopted_weights(plain), adopted_weights(model)) < BOUND
    assert adopted.param_groups[0]["count"] == 3 and adopted.param_groups[0]["rate"] == 0.1 / 3
    assert optimizer is None or optimizer.steps == 3


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_groups_are_added_and_taken_away(kind: type[Optimizer]) -> None:
    """A part of the model thaws, and stops again."""
    plain, model = build_framework_net(), build_framework_net()
    adopt.shard_framework_model(model, CPU, {"stage": 3})
    for each in (plain, model):
        optimizer = adopt.adopt_optimizer(kind([*each.parameters()][:2], lr=1e-2, weight_decay=0.0))
        adopt_train_step(each, optimizer)
        optimizer.add_param_group({"params": [*each.parameters()][2:], "lr": 2e-2})
        adopt_train_step(each, optimizer)
        del optimizer.param_groups[0]
        adopt_train_step(each, optimizer)
    assert max_difference(adopted_weights(plain), adopted_weights(model)) < BOUND


def test_a_group_that_is_refused_leaves_nothing() -> None:
    model = adopt_sharded_net()
    first, *others = model.parameters()
    optimizer = adopt.adopt_optimizer(torch.optim.AdamW([first]))
    with pytest.raises(npuzero.ConfigError, match="differentiable"):
        optimizer.add_param_group({"params": others, "differentiable": True})
    optimizer.add_param_group({"params": others})
    assert len(optimizer.param_groups) == 2


def test_states_of_shards_are_not_read_as_if_they_were_empty() -> None:
    model = adopt_sharded_net()
    optimizer = adopt.adopt_optimizer(torch.optim.AdamW(model.parameters()))
    adopt_train_step(model, optimizer)
    with pytest.raises(npuzero.StateError, match="state_dict"):
        optimizer.state[next(model.parameters())]
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == next(model.parameters()).shape


def test_a_step_that_the_program_has_replaced_is_not_lost() -> None:
    optimizer = torch.optim.SGD(adopt_sharded_net().parameters(), lr=0.1)
    first = optimizer.step
    optimizer.step = lambda *a, **k: first(*a, **k)  # type: ignore[method-assign]
    with pytest.raises(npuzero.ConfigError, match="whose step the program has replaced"):
        adopt.adopt_optimizer(optimizer)
    assert type(optimizer) is torch.optim.SGD


def test_a_state_that_does_not_fit_leaves_the_optimizer_as_it_was() -> None:
    model = build_framework_net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    adopt_train_step(model, optimizer)
    optimizer.state[next(model.parameters())]["exp_avg"] = torch.zeros(3)
    adopt.shard_framework_model(model, CPU, {"stage": 3})
    with pytest.raises(npuzero.CheckpointError, match="exp_avg"):
        adopt.adopt_optimizer(optimizer)
    assert type(optimizer) is torch.optim.AdamW and len(optimizer.state) == len([*model.parameters()])


class HiddenArgumentOptimizer(Optimizer):
    """Keeps an argument to itself, so that nobody can tell how it was made."""

    def __init__(self, params: Any, lr: float = 0.1, secret: int = 1) -> None:
        super().__init__(params, {"lr": lr})
        self.secret = secret

    def step(self, closure: object = None) -> None:
        """Do nothing."""


def test_an_optimizer_that_cannot_be_made_again_is_refused() -> None:
    with pytest.raises(npuzero.ConfigError, match="does not show: secret"):
        adopt.adopt_optimizer(HiddenArgumentOptimizer(adopt_sharded_net().parameters()))


def test_an_optimizer_that_is_not_elementwise_is_refused() -> None:
    with pytest.raises(npuzero.ConfigError, match="Adafactor"):
        adopt.adopt_optimizer(torch.optim.Adafactor(adopt_sharded_net().parameters()))


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


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_with_the_adopted_optimizer(name: str) -> None:
    """Warnings are errors here: torch warns where a scheduler's optimizer does not step before it."""
    plain, model = build_framework_net(), build_framework_net()
    expected, optimizer = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model))
    theirs, scheduler = SCHEDULERS[name](expected), SCHEDULERS[name](optimizer)
    adopt.shard_framework_model(model, CPU, {})
    adopted = adopt.adopt_optimizer(optimizer)
    adopt.check_scheduler(scheduler)
    for _ in range(5):
        adopt_train_step(plain, expected)
        adopt_train_step(model, adopted)
        theirs.step()
        scheduler.step()
        assert [group["lr"] for group in adopted.param_groups] == [group["lr"] for group in expected.param_groups]
    assert max_difference(adopted_weights(plain), adopted_weights(model)) < BOUND
    state = copy.deepcopy(scheduler.state_dict())
    again = SCHEDULERS[name](adopted)
    again.load_state_dict(state)
    assert again.get_last_lr() == scheduler.get_last_lr()


@pytest.mark.parametrize(
    ("name", "options"), [("cosine_with_min_lr", {"min_lr": 1e-6}), ("polynomial", {"power": 2.0})]
)
def test_schedules_of_transformers_read_the_defaults(name: str, options: dict[str, float]) -> None:
    transformers = pytest.importorskip("transformers")
    rates = []
    for adopts in (False, True):
        model = adopt_sharded_net() if adopts else build_framework_net()
        optimizer = adopt.adopt_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-5))
        scheduler = transformers.get_scheduler(name, optimizer, 0, 5, scheduler_specific_kwargs=options)
        for _ in range(5):
            adopt_train_step(model, optimizer)
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1] > 0


def test_a_plateau_is_followed() -> None:
    model = adopt_sharded_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    adopted = adopt.adopt_optimizer(optimizer)
    adopt.check_scheduler(scheduler)
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)
    assert scheduler.optimizer is adopted and adopted.param_groups[0]["lr"] == 0.25


def test_a_scheduler_of_an_optimizer_that_nobody_adopted_is_refused() -> None:
    optimizer = torch.optim.SGD(adopt_sharded_net().parameters(), lr=1.0)
    scheduler = schedulers.ExponentialLR(optimizer, 0.9)
    with pytest.raises(npuzero.ConfigError, match="nobody has prepared"):
        adopt.check_scheduler(scheduler)


def test_a_scheduler_of_a_plain_model_stays() -> None:
    optimizer = torch.optim.SGD(build_framework_net().parameters(), lr=1.0)
    scheduler = schedulers.ExponentialLR(optimizer, 0.9)
    adopt.check_scheduler(scheduler)
    assert scheduler.optimizer is optimizer


def test_a_model_is_sharded_once_and_not_in_part() -> None:
    model = adopt_sharded_net()
    engine = engine_of(model)
    assert adopt.shard_framework_model(model, CPU, {"stage": 1}) is model and engine_of(model) is engine
    with pytest.raises(npuzero.ConfigError, match="a part is sharded by itself"):
        adopt.shard_framework_model(nn.Sequential(model, nn.Linear(2, 2)), CPU, {})
    assert not adopt.is_sharded(adopt.shard_framework_model(nn.Tanh(), CPU, {}))


def test_frameworks_number_the_one_device_of_the_host() -> None:
    """accelerate says cpu:0 under torchrun, and the program may have called init() before."""
    world = npuzero.init()
    model = adopt.shard_framework_model(build_framework_net(), torch.device("cpu:0"), {"stage": 3})
    assert npuzero.init("cpu:0") is npuzero.init() is world and world.device == CPU
    adopt_train_step(model, adopt.adopt_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert not adopt.gathers_parameters(model) and not adopt.gathers_parameters(build_framework_net())


@pytest.mark.parametrize("options", [{"stag": 2}, {"stage": 7}])
def test_options_are_those_of_zero(options: dict[str, Any]) -> None:
    with pytest.raises(npuzero.ConfigError, match="stage"):
        adopt.shard_framework_model(build_framework_net(), CPU, options)
    with pytest.raises(npuzero.ConfigError, match="as a mapping"):
        adopt.check_zero_options("ZeroAccelerator", 2)


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
