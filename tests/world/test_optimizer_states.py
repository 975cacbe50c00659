"""Optimizer states after a load: numbers, step counts in any place, halves of masters; and several
optimizers under one scaler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero.comm import SingleWorld
from world.toy import build_seeded_model
from world.train import CutSession, PlainSession, Session, check_equals_plain, relative_difference

Optimizer = torch.optim.Optimizer


def same_shape_parameters(count: int = 4, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters of one shape, so that only their numbers distinguish them."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(33, generator=generator).to(dtype)) for _ in range(count)]


def random_gradient_step(optimizer: Optimizer, number: int, left_out: tuple[int, ...] = ()) -> None:
    """One update; those in ``left_out`` have no gradient."""
    generator = torch.Generator().manual_seed(number)
    members = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(members):
        gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if i in left_out else gradient
    optimizer.step()


def assert_parameters_close(found: list[nn.Parameter], expected: list[nn.Parameter]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_difference(mine.detach(), theirs.detach()) < 1e-6


def check_both_optimizers(program: Callable[[Any], list[nn.Parameter]]) -> None:
    """The program by npuzero's AdamW, and by torch's."""
    assert_parameters_close(program(npuzero.AdamW), program(torch.optim.AdamW))


# -- numbers -----------------------------------------------------------------------------------------------------------


def build_grouped_optimizer(kind: Any, members: list[nn.Parameter]) -> Optimizer:
    return kind([{"params": members[:2], "lr": 1e-2}, {"params": members[2:], "lr": 1e-3, "weight_decay": 0.3}])  # type: ignore[no-any-return]


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3], [2, 3, 0, 1], [3, 0, 2, 1], [10, 7, 8, 2]])
def test_groups_of_equal_length_get_each_its_own_states(numbers: list[int]) -> None:
    """Look states up by their numbers in the state dict, in any order."""

    def program(kind: Any) -> list[nn.Parameter]:
        before = build_grouped_optimizer(torch.optim.AdamW, same_shape_parameters())
        for number in range(5):
            random_gradient_step(before, number, left_out=tuple(i for i in range(4) if number >= 2 + i))
        saved = before.state_dict()
        saved = {
            "state": {numbers[i]: state for i, state in saved["state"].items()},
            "param_groups": [
                {**group, "params": [numbers[i] for i in group["params"]]} for group in saved["param_groups"]
            ],
        }
        members = same_shape_parameters()
        optimizer = build_grouped_optimizer(kind, members)
        optimizer.load_state_dict(saved)
        for number in range(5, 8):
            random_gradient_step(optimizer, number)
        assert [float(state["step"]) for _, state in sorted(optimizer.state_dict()["state"].items())] == [5, 6, 7, 8]
        return members

    check_both_optimizers(program)


# -- step counts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"foreach": True}], ids=["host", "device", "foreach"])
def test_step_counts_that_differ_stay_so_over_a_load(options: dict[str, Any]) -> None:
    def program(kind: Any) -> list[nn.Parameter]:
        members = same_shape_parameters()
        own = options if kind is npuzero.AdamW else {}  # torch has no capturable on the host
        optimizer = kind(members, lr=1e-2, **own)
        for number in range(4):
            random_gradient_step(optimizer, number, left_out=(1,) if number else (2,))
        for leg in range(2):
            saved = copy.deepcopy(optimizer.state_dict())
            counts = [float(state["step"]) for _, state in sorted(saved["state"].items())]
            assert counts == [4 + 3 * leg, 1 + 2 * leg, 3 + 3 * leg, 4 + 3 * leg]
            optimizer = kind(members, lr=1e-2, **own)
            optimizer.load_state_dict(saved)
            for number in range(4, 7):
                random_gradient_step(optimizer, number, left_out=(1,) if number == 5 else ())
        return members

    check_both_optimizers(program)


@pytest.mark.parametrize("how", ["host", "capturable", "scaler"])
@pytest.mark.parametrize("plan", [None, "zero0", "zero3"])
@pytest.mark.parametrize("later", [3, 0])
def test_going_back_to_a_state_goes_back_in_steps(plan: str | None, how: str, later: int) -> None:
    """The loading optimizer has counted steps, in any place; its own count is no part of the loaded state."""
    session: Session = (
        PlainSession(build_seeded_model(), [0], 1)
        if plan is None
        else CutSession(build_seeded_model(), SingleWorld(), plan=plan)
    )
    optimizer = npuzero.AdamW(session.model.parameters(), lr=1e-2, capturable=how == "capturable")
    scaler = npuzero.LossScaler(init_scale=16.0, enabled=how == "scaler")

    def steps(first: int, last: int) -> dict[str, Tensor]:
        for number in range(first, last):
            scaler.scale(session.loss(number)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in session.state().items()}

    weights = steps(0, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    expected = steps(2, 5)
    steps(5, 5 + later)
    session.load(weights)
    optimizer.load_state_dict(saved)
    assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {2.0}
    found = steps(2, 5)
    assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {5.0}
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# -- masters in halves -------------------------------------------------------------------------------------------------


class ScalarScaledLinear(nn.Module):
    """A state of one scalar parameter, with the same shape as the step counts next to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@pytest.mark.parametrize("name", ["NAdam", "ASGD", "RAdam", "Adagrad", "Rprop", "Adamax"])
@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_numbers_beside_the_states_of_a_scalar_come_back(plan: str, name: str) -> None:
    """Most ranks have no part of the scalar."""

    def scenario(session: Session) -> None:
        make = partial(session.optimizer, getattr(torch.optim, name), lr=1e-2)
        optimizer = make()
        for number in range(4):
            if number == 2:
                state = optimizer.state_dict()
                optimizer = make()
                optimizer.load_state_dict(state)
            inputs = [torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * number + r)) for r in range(3)]
            session.mean(lambda rank, inputs=inputs: session.model(inputs[rank]).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    check_equals_plain(scenario, 3, ScalarScaledLinear, plan=plan)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_a_state_has_all_bits_of_masters(masters: str, moments: str) -> None:
    """Also the lower halves of parameters: after a load of both, training continues bit for bit."""
    options = {"lr": 1e-3, "masters": masters, "moments": moments, "seed": 1}
    members, others = same_shape_parameters(dtype=torch.bfloat16), same_shape_parameters(dtype=torch.bfloat16)
    optimizer, again = npuzero.AdamW(members, **options), npuzero.AdamW(others, **options)
    for number in range(3):
        random_gradient_step(optimizer, number)
    saved = copy.deepcopy(optimizer.state_dict())
    assert any(not torch.equal(state["master"], state["master"].bfloat16()) for state in saved["state"].values())
    again.load_state_dict(saved)
    with torch.no_grad():
        for p, q in zip(others, members, strict=True):
            p.copy_(q)
    for number in range(3, 6):
        for each in (optimizer, again):
            random_gradient_step(each, number)
    for p, q in zip(members, others, strict=True):
        assert torch.equal(p, q)
    for mine, theirs in zip(
        optimizer.state_dict()["state"].values(), again.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


# -- several optimizers under one scaler -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=["host", "fused", "capturable"])
@pytest.mark.parametrize("bad", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_of_two_optimizers_under_one_scaler_decides_for_itself(
    order: tuple[int, int], bad: tuple[int, ...], options: dict[str, Any]
) -> None:
    """An optimizer with overflowed gradients skips its step, and the scale decreases once."""
    outcomes = []
    kinds: tuple[Any, ...] = (npuzero.AdamW, npuzero.LossScaler), (torch.optim.AdamW, torch.amp.GradScaler)
    for kind, scaling in kinds:
        members = same_shape_parameters(2)
        own = options if kind is npuzero.AdamW else {}
        optimizers = [kind([p], lr=1e-2, **own) for p in members]
        scaler = scaling("cpu", init_scale=16.0, growth_interval=2)
        scales = []
        for number in range(4):
            loss = sum(((p * (number + 1)).sin().sum() for p in members), torch.zeros(()))
            scaler.scale(loss).backward()
            for i in bad if number == 1 else ():
                members[i].grad[5] = float("inf")  # type: ignore[index]
            for i in order:
                if number % 2:
                    scaler.unscale_(optimizers[i])
            for i in order:
                scaler.step(optimizers[i])
            scaler.update()
            scales.append(scaler.get_scale())
            for optimizer in optimizers:
                optimizer.zero_grad()
        taken = [float(optimizer.state_dict()["state"][0]["step"]) for optimizer in optimizers]
        assert taken == [3.0 if i in bad else 4.0 for i in range(2)]
        outcomes.append((members, scales))
    (mine, my_scales), (theirs, their_scales) = outcomes
    assert my_scales == their_scales
    assert_parameters_close(mine, theirs)
