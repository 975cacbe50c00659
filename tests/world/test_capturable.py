"""lr as a tensor, and steps that a graph can capture: the part a CPU can test. The rest is in tests/cuda."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import comm, device
from npuzero.comm import World
from npuzero.errors import ConfigError, StateError
from npuzero.ops.flat_adam import AdamSegment, adam_coefficients
from npuzero.optim import dynamic_rows

from .toy import TrainingRecipe, build_seeded_model, toy_loss, toy_param_groups, toy_tokens
from .train import (
    CutSession,
    PlainSession,
    Session,
    State,
    assert_same_bits,
    assert_states_close,
    check_equals_plain,
    run_cut,
)
from .watching import record_issued

CPU = torch.device("cpu")


def build_tensor_lr_adamw(session: Session, **options: Any) -> torch.optim.Optimizer:
    """Groups of matrices and vectors, each with a tensor as its lr."""
    matrices, vectors = toy_param_groups(session.model, TrainingRecipe(groups=True))
    assert isinstance(matrices, dict) and isinstance(vectors, dict)
    groups = [{**matrices, "lr": torch.tensor(1e-2)}, {**vectors, "lr": torch.tensor(2e-2)}]
    return npuzero.AdamW(groups, **options)


def world_of_one(plan: str | None, precision: str | None = None) -> Session:
    """A model that ``zero()`` made, alone; or a plain one."""
    if plan is None:
        return PlainSession(build_seeded_model(), [0], 1)
    return CutSession(build_seeded_model(), comm.SingleWorld(), plan=plan, precision=precision)


# -- nothing of a step comes from the host -----------------------------------------------------------------------------


def make_capturable_step(
    session: Session, optimizer: Any, scaler: Any, clip: bool, micro_batches: int
) -> Callable[[], None]:
    tokens = [toy_tokens(0, i, 0) for i in range(micro_batches)]

    def step() -> None:
        for each in tokens:
            scaler.scale(toy_loss(session.model, each) / micro_batches).backward()
        scaler.unscale_(optimizer)
        if clip:
            session.clip(0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


SCALERS: dict[str, Callable[[], Any]] = {
    "no scaler": partial(npuzero.LossScaler, enabled=False),
    "LossScaler": partial(npuzero.LossScaler, init_scale=2.0**8, growth_interval=3),
    "GradScaler": partial(torch.amp.GradScaler, "cpu", init_scale=2.0**8, growth_interval=3),
}


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("plan", [None, "zero0", "zero3"])
def test_a_step_reads_nothing_and_repeats_itself(plan: str | None, scaler: str) -> None:
    if plan and scaler == "GradScaler":
        pytest.skip("torch's scaler cannot read cut gradients")
    session = world_of_one(plan)
    optimizer = build_tensor_lr_adamw(session, capturable=True)
    step = make_capturable_step(session, optimizer, SCALERS[scaler](), plan is not None, micro_batches=2)
    step()
    step()
    seen = []
    for _ in range(3):
        with record_issued() as each:
            step()
        seen.append(each)
    assert any(name == "flat_adam" for name, _ in seen[0])
    assert seen[1] == seen[0] and seen[2] == seen[0]
    assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {5.0}


def test_what_is_watched_sees_a_step_that_the_host_counts() -> None:
    """Check that the test above can fail: without capturable the host passes its step count to the kernel."""
    session = PlainSession(build_seeded_model(), [0], 1)
    optimizer = npuzero.AdamW(session.model.parameters(), lr=1e-2)
    session.loss().backward()
    optimizer.step()
    with pytest.raises(AssertionError, match="reads"), record_issued():
        optimizer.step()


@pytest.mark.parametrize("plan", [None, "zero0", "zero3"])
def test_an_lr_that_is_a_tensor_is_not_read(plan: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    session = world_of_one(plan)
    optimizer = build_tensor_lr_adamw(session)
    lrs = [group["lr"] for group in optimizer.param_groups]
    session.loss().backward()
    optimizer.step()
    read = Tensor.__float__

    def refuse(tensor: Tensor) -> float:
        assert all(tensor is not lr for lr in lrs), "the host reads lr"
        return read(tensor)

    monkeypatch.setattr(Tensor, "__float__", refuse)
    monkeypatch.setattr(Tensor, "item", refuse)
    optimizer.step()


def test_the_capture_of_what_the_host_counts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    monkeypatch.setattr(device.KINDS["cpu"], "capturing", lambda _: True)
    npuzero.AdamW(model.parameters(), capturable=True).step()
    for refused in (
        npuzero.AdamW(model.parameters()),
        npuzero.AdamW([{"params": [model.weight], "capturable": True}, {"params": [model.bias]}]),
        npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), lr=0.1),
    ):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(StateError, match="capturable=True"):
            refused.step()
        assert all(map(torch.equal, before, model.parameters()))


# -- and the numbers are the same --------------------------------------------------------------------------------------


def train_two_groups(session: Session, tensor: bool, capturable: bool, steps: int = 4) -> State:
    """Train by two groups, one of which lacks a gradient now and then; return weights and states."""
    matrices, vectors = toy_param_groups(session.model, TrainingRecipe(groups=True))
    assert isinstance(matrices, dict) and isinstance(vectors, dict)
    lrs = [torch.tensor(lr) if tensor else torch.tensor(lr).item() for lr in (1e-2, 2e-2)]
    groups = [{**matrices, "lr": lrs[0]}, {**vectors, "lr": lrs[1]}]
    optimizer = npuzero.AdamW(groups, capturable=capturable)
    for step in range(steps):
        session.loss(step).backward()
        if step % 2:
            for name, parameter in session.model.named_parameters():
                if "mlp" in name:
                    parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    saved = optimizer.state_dict()["state"]
    states = {f"{number}.{name}": value for number, state in saved.items() for name, value in state.items()}
    return session.state() | {name: torch.as_tensor(value).clone() for name, value in states.items()}


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero3", "hsdp"])
@pytest.mark.parametrize("precision", [None, "bf16-stochastic"])
def test_bits_over_cut_models(plan: str, precision: str | None) -> None:
    expected = run_cut(
        partial(train_two_groups, tensor=False, capturable=False), 4, plan=plan, precision=precision, local_size=2
    )
    for tensor, capturable in ((True, False), (False, True), (True, True)):
        scenario = partial(train_two_groups, tensor=tensor, capturable=capturable)
        for found in run_cut(scenario, 4, plan=plan, precision=precision, local_size=2):
            assert_same_bits(found, expected[0])


def test_bits_over_plain_parameters() -> None:
    outcomes = [
        train_two_groups(PlainSession(build_seeded_model(), [0], 1), tensor, capturable)
        for tensor, capturable in itertools.product((False, True), repeat=2)
    ]
    for found in outcomes[1:]:
        assert_same_bits(found, outcomes[0])


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("beta1, beta2", [(0.9, 0.999), (0.8, 0.95), (0.0, 0.99999)])
def test_coefficients_of_the_device_are_the_hosts(beta1: float, beta2: float, corrects: bool) -> None:
    """Both are rounded once from float64, in which the two powers may differ by a unit in the last place."""
    steps = [*range(1, 400), *range(400, 400_000, 997)]
    for lr, weight_decay in ((1e-3, 0.1), (3.7e-5, 0.0)):
        options = {"lr": torch.tensor(lr, dtype=torch.float64), "betas": (beta1, beta2), "weight_decay": weight_decay}
        table = dynamic_rows([{**options, "decoupled_weight_decay": True}] * len(steps), steps, CPU, corrects)
        segment = partial(
            AdamSegment, 0, 1, lr, beta1, beta2, 1e-8, weight_decay, decoupled=True, maximize=False, amsgrad=False
        )
        host = [adam_coefficients(segment(step=step, bias_correction=corrects)) for step in steps]
        expected = torch.tensor([[k.step_size, k.bias2_sqrt, k.decay, k.step] for k in host])
        assert torch.equal(table, expected) or (
            (table != expected).float().mean() < 1e-3 and ((table - expected).abs() <= 1.2e-7 * expected.abs()).all()
        )


# -- schedules ---------------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=2e-2, total_steps=8),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(o, 0.7)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_write_the_tensor_in_place(name: str, capturable: bool) -> None:
    outcomes, seen = [], []
    for ours in (True, False):
        session = PlainSession(build_seeded_model(), [0], 1)
        lr, parameters = torch.tensor(1e-2), session.model.parameters()
        options: dict[str, Any] = {"capturable": capturable} if ours else {"fused": True}
        optimizer = (npuzero.AdamW if ours else torch.optim.AdamW)(parameters, lr=lr, **options)
        schedule = SCHEDULES[name](optimizer)
        lrs = []
        for step in range(6):
            session.loss(step).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            assert optimizer.param_groups[0]["lr"] is lr
            lrs.append(lr.item())
        outcomes.append(session.state())
        seen.append(lrs)
    assert seen[0] == seen[1] and len(set(seen[0])) >= 5
    assert_states_close(*outcomes)


def train_with_lr_schedule(session: Session) -> State:
    """A tensor that a schedule writes, over a cut model."""
    lr = torch.tensor(1e-2)
    options = {"capturable": True} if isinstance(session, CutSession) else {}
    optimizer = session.optimizer(torch.optim.AdamW, lr=lr, **options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=6)
    for step in range(5):
        session.loss(step).backward()
        session.clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {"lr": lr}


@pytest.mark.parametrize("plan", ["zero1", "zero3", "hsdp"])
def test_schedules_over_cut_models(plan: str) -> None:
    check_equals_plain(train_with_lr_schedule, 4, plan=plan, local_size=2)


# -- states go both ways -----------------------------------------------------------------------------------------------

OURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "capturable": {"capturable": True},
    "lr tensor": {"lr": torch.tensor(1e-2)},
    "fused": {"fused": True},
}
THEIRS: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["state"].keys() == expected["state"].keys() and found["state"]
    for number, state in expected["state"].items():
        assert state.keys() == found["state"][number].keys()
        for name, value in state.items():
            mine = found["state"][number][name]
            assert torch.equal(mine, value) and mine.dtype == value.dtype and mine.shape == value.shape, (number, name)
    assert [len(group["params"]) for group in found["param_groups"]] == [
        len(group["params"]) for group in expected["param_groups"]
    ]


@pytest.mark.parametrize("theirs", THEIRS)
@pytest.mark.parametrize("ours", OURS)
def test_states_go_both_ways(ours: str, theirs: str) -> None:
    """Three steps by one, then three by its peer from that state; both ways, against six steps of torch's."""
    makers = {
        "ours": lambda p: npuzero.AdamW(p, **{"lr": 1e-2, "amsgrad": True, **OURS[ours]}),
        "theirs": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, **THEIRS[theirs]),
    }

    def steps(session: Session, optimizer: Any, first: int) -> None:
        for step in range(first, first + 3):
            session.loss(step).backward()
            optimizer.step()
            optimizer.zero_grad()

    outcomes = []
    for first, second in (("theirs", "theirs"), ("ours", "theirs"), ("theirs", "ours"), ("ours", "ours")):
        session = PlainSession(build_seeded_model(), [0], 1)
        before = makers[first](session.model.parameters())
        steps(session, before, 0)
        saved = copy.deepcopy(before.state_dict())
        after = makers[second](session.model.parameters())
        options = [
            {key: group[key] for key in ("capturable", "fused", "foreach", "lr")} for group in after.param_groups
        ]
        after.load_state_dict(saved)
        for group, own in zip(after.param_groups, options, strict=True):
            group.update(own)  # a state has the options of its saver, as torch's has
        assert_same_state(after.state_dict(), saved)
        steps(session, after, 3)
        if first == second:  # going on without the way through a state
            straight = PlainSession(build_seeded_model(), [0], 1)
            through = makers[first](straight.model.parameters())
            steps(straight, through, 0)
            steps(straight, through, 3)
            assert_same_bits(session.state(), straight.state())
        outcomes.append(session.state())
    for found in outcomes[1:]:
        assert_states_close(found, outcomes[0])


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_a_cut_state_goes_on_where_it_was(plan: str, capturable: bool) -> None:
    """Looking at a state changes nothing; loading it, into either kind, goes on from it."""

    def rank(world: World) -> tuple[State, State]:
        outcomes = []
        for through in (False, True):
            session = CutSession(build_seeded_model(), world, plan=plan)
            optimizer: Any = build_tensor_lr_adamw(session, capturable=capturable)
            for step in range(5):
                if step == 2:
                    optimizer.state_dict()
                if step == 3 and through:
                    saved = optimizer.state_dict()
                    assert {float(state["step"]) for state in saved["state"].values()} == {3.0}
                    optimizer = build_tensor_lr_adamw(session, capturable=not capturable)
                    optimizer.load_state_dict(saved)
                    assert all(group["capturable"] == capturable for group in optimizer.param_groups)
                    assert optimizer.param_groups[0]["lr"] is not saved["param_groups"][0]["lr"]
                session.loss(step).backward()
                optimizer.step()
                optimizer.zero_grad()
            outcomes.append(session.state())
        return outcomes[0], outcomes[1]

    for straight, through in comm.run_threads(2, rank):
        assert_same_bits(through, straight)


def test_counts_on_the_device_are_torchs_state() -> None:
    """A tensor on the parameter's device, as torch's hook-writers read it; counted from its value so far."""
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = npuzero.AdamW([first, second], capturable=True)
    for step in range(3):
        first.grad, second.grad = torch.ones(3), torch.ones(2) if step else None
        optimizer.step()
    steps = [optimizer.state[p]["step"] for p in (first, second)]
    assert [(float(s), s.shape, s.dtype, s.device) for s in steps] == [
        (n, torch.Size([]), torch.float32, CPU) for n in (3.0, 2.0)
    ]
    optimizer.param_groups[0]["capturable"] = False
    optimizer.step()
    optimizer.param_groups[0]["capturable"] = True
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in (first, second)] == [5.0, 4.0]


# -- scalers over plain parameters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaler", ["LossScaler", "GradScaler"])
@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}, {}], ids=["fused", "capturable", "neither"])
def test_scaled_plain_steps_decide_as_torchs(options: dict[str, Any], scaler: str) -> None:
    """With an overflow in the middle; the host learns nothing of it if the optimizer decides on the device."""
    outcomes = []
    for kind in (npuzero.AdamW, torch.optim.AdamW):
        session = PlainSession(build_seeded_model(), [0], 1)
        chosen = options if kind is npuzero.AdamW else {"fused": True}
        optimizer = kind(session.model.parameters(), lr=1e-2, **chosen)
        scales = SCALERS[scaler if kind is npuzero.AdamW else "GradScaler"]()
        seen = []
        for step in range(6):
            loss = session.loss(step) * (math.inf if step == 2 else 1.0)
            scales.scale(loss).backward()
            if step % 2:
                scales.unscale_(optimizer)
                session.clip(0.5)
            scales.step(optimizer)
            scales.update()
            optimizer.zero_grad()
            seen.append(scales.get_scale())
        steps = {float(state["step"]) for state in optimizer.state_dict()["state"].values()}
        assert steps == {5.0}
        assert not hasattr(optimizer, "found_inf")
        outcomes.append(session.state() | {"scales": torch.tensor(seen)})
    assert_states_close(*outcomes)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    weight = nn.Parameter(torch.ones(4, 2))
    for refused, says in (
        ({"differentiable": True}, "differentiable"),
        ({"foreach": True, "lr": torch.tensor(1e-3)}, "lr as a Tensor"),
        ({"lr": torch.ones(2)}, "1-element"),
        ({"fused": True, "foreach": True}, "fused"),
        ({"betas": (torch.tensor(0.9), torch.zeros(1, device="meta"))}, "betas|meta"),
    ):
        with pytest.raises(ConfigError, match=says):
            npuzero.AdamW([weight], **refused)
    for dtype in (torch.complex64, torch.float64, torch.float8_e4m3fn):
        with pytest.raises(ConfigError, match=str(dtype)):
            npuzero.AdamW([nn.Parameter(torch.zeros(3).to(dtype))])


def test_sparse_gradients_are_refused_before_anything_is_changed() -> None:
    table, dense = nn.Embedding(7, 4, sparse=True), nn.Parameter(torch.ones(3))
    optimizer = npuzero.AdamW([dense, *table.parameters()])
    dense.grad = torch.ones(3)
    table(torch.arange(3)).sum().backward()
    with pytest.raises(ConfigError, match="sparse"):
        optimizer.step()
    assert dense.tolist() == [1.0, 1.0, 1.0] and not optimizer.state
