"""Schedules: the published formulas, written down once more from their pages, and what schedules share."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import npuzero
from npuzero import CheckpointError, ConfigError, schedules

OWN = (3e-4, 7e-3)
few = settings(max_examples=40, deadline=None)


def build_two_group_optimizer(kind: Any = npuzero.AdamW, **options: Any) -> Any:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in OWN]
    return kind(groups, lr=1.0, **options)


def schedule_rates(schedule: Any, steps: int) -> list[list[float]]:
    """Of both groups before each step, as the optimizer has them."""
    optimizer, seen = schedule.optimizer, []
    for _ in range(steps):
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return seen


def assert_rates(schedule: Any, expected: Callable[[int, float], float], steps: int = 60) -> None:
    """``expected``: of the optimizer's n-th step from 0, and the group's own rate."""
    for n, found in enumerate(schedule_rates(schedule, steps)):
        assert found == pytest.approx([expected(n, own) for own in OWN], rel=1e-12, abs=1e-18), n


# -- DeepSpeed's -------------------------------------------------------------------------------------------------------


@few
@given(size=st.integers(1, 9), rate=st.floats(0.1, 4), staircase=st.booleans())
def test_the_range_test_rises_by_a_part_of_the_least_each_interval(size: int, rate: float, staircase: bool) -> None:
    schedule = schedules.LRRangeTest(build_two_group_optimizer(), 1e-3, size, rate, staircase)
    assert_rates(schedule, lambda n, own: 1e-3 * (1 + rate * (n // size if staircase else n / size)))


warm_ups = {"steps": st.integers(2, 20), "kind": st.sampled_from(["log", "linear"])}


def warm_up_fraction(n: int, steps: int, kind: str) -> float:
    """How far a warm-up is in the n-th step: the schedule has been stepped n times, and counts from 0 then."""
    done = n - 1
    return math.log(done + 1) / math.log(steps) if kind == "log" else done / steps


@few
@given(**warm_ups, least=st.floats(0, 1e-4), most=st.sampled_from([None, 1e-2, [1e-3, 2e-3]]))
def test_a_warm_up_ends_at_the_greatest_rate(steps: int, kind: str, least: float, most: Any) -> None:
    tops = dict(zip(OWN, OWN if most is None else most if isinstance(most, list) else [most] * 2, strict=True))
    schedule = schedules.WarmupLR(
        build_two_group_optimizer(), warmup_min_lr=least, warmup_max_lr=most, warmup_num_steps=steps, warmup_type=kind
    )

    def expected(n: int, own: float) -> float:
        part = 0.0 if n == 0 else 1.0 if n > steps else warm_up_fraction(n, steps, kind)
        return least + (tops[own] - least) * part

    assert_rates(schedule, expected)


@few
@given(**warm_ups, total=st.integers(21, 50))
def test_a_decay_reaches_the_least_rate_in_the_last_step(steps: int, kind: str, total: int) -> None:
    params = {"total_num_steps": total, "warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": steps}
    schedule = schedules.WarmupDecayLR(build_two_group_optimizer(), **params, warmup_type=kind)

    def expected(n: int, own: float) -> float:
        if n == 0:
            return 1e-5
        part = warm_up_fraction(n, steps, kind) if n <= steps else max(0.0, (total - (n - 1)) / (total - steps))
        return 1e-5 + (1e-3 - 1e-5) * part

    assert_rates(schedule, expected)


@few
@given(**warm_ups, total=st.integers(21, 50), start=st.floats(0, 1), end=st.floats(0, 0.5))
def test_a_cosine_scales_the_optimizers_own_rates(steps: int, kind: str, total: int, start: float, end: float) -> None:
    schedule = schedules.WarmupCosineLR(build_two_group_optimizer(), total, start, steps, end, kind)

    def expected(n: int, own: float) -> float:
        if n == 0:
            return 0.0
        if n <= steps:
            return own * (start + (1 - start) * warm_up_fraction(n, steps, kind))
        done = min(1.0, (n - steps) / (total - steps))
        return own * (end + (1 - end) * (1 + math.cos(math.pi * done)) / 2)

    assert_rates(schedule, expected)


CYCLE: dict[str, Any] = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_min_mom": 0.85, "cycle_max_mom": 0.95}


@few
@given(up=st.integers(1, 12), down=st.integers(1, 12), size=st.integers(0, 4), stairs=st.integers(0, 5))
def test_one_cycle_goes_up_and_down_once_and_decays(up: int, down: int, size: int, stairs: int) -> None:
    optimizer = build_two_group_optimizer()
    schedule = schedules.OneCycle(
        *(optimizer,),
        **CYCLE,
        **{"cycle_first_step_size": up, "cycle_second_step_size": down, "cycle_first_stair_count": stairs},
        **{"decay_step_size": size, "decay_lr_rate": 0.5, "decay_mom_rate": 1e-4},
    )
    for n in range(40):
        done = n % (up + down) if n <= up + down else None
        decays = (n - up - down) / size if size and n > up + down else 0.0
        if done is None:
            lr, mom = 1e-4 / (1 + 0.5 * decays), 0.95 * (1 + 1e-4 * decays)
        else:
            height = min(done / up, (up + down - done) / down)
            if stairs:
                height = (done * stairs // up if done <= up else (up + down - done) * stairs // down) / stairs
            lr, mom = 1e-4 + 9e-4 * height, 0.95 - 0.1 * height
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(lr, rel=1e-12)
            assert group["betas"] == pytest.approx((0.85 if n == 0 else mom, 0.99), rel=1e-12)
        optimizer.step()
        schedule.step()


def test_one_cycle_leaves_a_momentum_that_is_no_beta_alone_and_says_so() -> None:
    optimizer = build_two_group_optimizer(torch.optim.SGD, momentum=0.5)
    with pytest.warns(UserWarning, match="momentum of SGD alone"):
        schedule = schedules.OneCycle(optimizer, **CYCLE)
    schedule_rates(schedule, 3)
    assert all(group["momentum"] == 0.5 and "betas" not in group for group in optimizer.param_groups)
    with warnings.catch_warnings(action="error"):
        schedules.OneCycle(optimizer, **CYCLE, cycle_momentum=False)


# -- InternEvo's -------------------------------------------------------------------------------------------------------


@few
@given(init=st.integers(0, 5), ratio=st.sampled_from([0.0, 0.1, 0.25]), total=st.integers(20, 50))
def test_fine_tuning_waits_warms_up_and_follows_a_cosine(init: int, ratio: float, total: int) -> None:
    schedule = schedules.FineTuneCosineAnnealingWarmupLR(build_two_group_optimizer(), total, init, ratio, eta_min=1e-5)
    warm = int(total * ratio)

    def expected(n: int, own: float) -> float:
        if n < init:
            return 0.0
        if n < init + warm:
            return own * (n - init + 1) / warm
        return 1e-5 + (own - 1e-5) * (1 + math.cos(math.pi * (n - init - warm) / (total - init - warm))) / 2

    assert_rates(schedule, expected)


def test_fine_tuning_that_does_not_wait_is_the_plain_form() -> None:
    fine = schedule_rates(schedules.FineTuneCosineAnnealingWarmupLR(build_two_group_optimizer(), 40, 0, 0.25, 1e-6), 40)
    assert fine == schedule_rates(schedules.CosineAnnealingWarmupLR(build_two_group_optimizer(), 40, 10, 1e-6), 40)
    assert fine[9] == pytest.approx(OWN) and fine[10] == pytest.approx(OWN)


@pytest.mark.parametrize("c", [0.0, 0.5, 0.8])
def test_the_second_beta_grows_with_the_steps(c: float) -> None:
    optimizer = build_two_group_optimizer(betas=(0.9, 0.999))
    schedule = schedules.Beta2Scheduler(optimizer, init_beta2=0.9, c=c)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    for step in range(1, 60):
        if step == 30:
            state, schedule = schedule.state_dict(), schedules.Beta2Scheduler(optimizer, init_beta2=0.5)
            schedule.load_state_dict(state)
        optimizer.step()
        schedule.step()
        beta2 = max(0.9, 1 - step**-c) if c else 0.9
        assert all(group["betas"] == (0.9, pytest.approx(beta2)) for group in optimizer.param_groups)
    with pytest.raises(CheckpointError, match="cur_iter"):
        schedule.load_state_dict({})


# -- what they share ---------------------------------------------------------------------------------------------------

ALL: dict[str, Callable[[Any], Any]] = {
    "LRRangeTest": lambda o: schedules.LRRangeTest(o, 1e-4, 3),
    "OneCycle": lambda o: schedules.OneCycle(o, 1e-4, 1e-2, cycle_first_step_size=5, decay_step_size=2),
    "WarmupLR": lambda o: schedules.WarmupLR(o, warmup_num_steps=4),
    "WarmupDecayLR": lambda o: schedules.WarmupDecayLR(o, 12, warmup_num_steps=4),
    "WarmupCosineLR": lambda o: schedules.WarmupCosineLR(o, 12, warmup_num_steps=4),
    "CosineAnnealingWarmupLR": lambda o: schedules.CosineAnnealingWarmupLR(o, 12, 4),
    "FineTuneCosineAnnealingWarmupLR": lambda o: schedules.FineTuneCosineAnnealingWarmupLR(o, 12, 2, 0.2),
}
KINDS = {
    "npuzero": npuzero.AdamW,
    "torch": torch.optim.AdamW,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALL)
def test_a_state_goes_on_where_it_was_saved(name: str, kind: str, tmp_path: Any) -> None:
    """With the optimizer's, through a file of plain data."""
    whole = ALL[name](build_two_group_optimizer(KINDS[kind]))
    expected = schedule_rates(whole, 14)
    first = ALL[name](build_two_group_optimizer(KINDS[kind]))
    schedule_rates(first, 6)
    torch.save([first.state_dict(), first.optimizer.state_dict()], tmp_path / "state.pt")
    mine, its = torch.load(tmp_path / "state.pt", weights_only=True)
    again = ALL[name](build_two_group_optimizer(KINDS[kind]))
    again.optimizer.load_state_dict(its)
    again.load_state_dict(mine)
    assert schedule_rates(again, 8) == expected[6:]
    assert again.optimizer.param_groups[0]["betas"] == whole.optimizer.param_groups[0]["betas"]
    assert isinstance(again, torch.optim.lr_scheduler.LRScheduler) and again.get_last_lr() == whole.get_last_lr()


@pytest.mark.parametrize("name", ALL)
def test_a_rate_that_is_a_tensor_is_written_in_place(name: str) -> None:
    parameter = nn.Parameter(torch.ones(1))
    lr = torch.tensor(OWN[0], dtype=torch.float64)
    schedule = ALL[name](npuzero.AdamW([{"params": [parameter], "lr": lr}]))
    found = [rate for (rate,) in schedule_rates(schedule, 10)]
    assert schedule.optimizer.param_groups[0]["lr"] is lr
    assert found == pytest.approx([first for first, _ in schedule_rates(ALL[name](build_two_group_optimizer()), 10)])


def test_deepspeeds_can_begin_at_an_iteration() -> None:
    expected = schedule_rates(schedules.WarmupLR(build_two_group_optimizer(), warmup_num_steps=8), 10)
    later = schedules.WarmupLR(build_two_group_optimizer(), warmup_num_steps=8, last_batch_iteration=3)
    assert later.last_batch_iteration == 3 and schedule_rates(later, 6) == expected[4:]


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a key of another name": (lambda o: schedules.WarmupLR(o, warmup_steps=3), "warmup_num_steps"),
    "no steps": (lambda o: schedules.WarmupLR(o, warmup_num_steps=0), "warmup_num_steps.*not below 1"),
    "half a step": (lambda o: schedules.WarmupLR(o, warmup_num_steps=1.5), "warmup_num_steps.*integer"),
    "another warm-up": (lambda o: schedules.WarmupLR(o, warmup_type="lin"), "Did you mean 'linear'"),
    "three rates for two groups": (lambda o: schedules.WarmupLR(o, [0, 0, 0]), "warmup_min_lr.*2 of them"),
    "text for a rate": (lambda o: schedules.WarmupDecayLR(o, 9, warmup_max_lr="1e-3"), "warmup_max_lr.*number"),
    "auto": (lambda o: schedules.WarmupDecayLR(o, "auto"), "total_num_steps.*integer.*auto"),
    "a ratio below 0": (lambda o: schedules.WarmupCosineLR(o, 9, cos_min_ratio=-1), "cos_min_ratio"),
    "no way up": (lambda o: schedules.OneCycle(o, 0.1, 1.0, cycle_first_step_size=0), "cycle_first_step_size"),
    "no number of stairs": (lambda o: schedules.OneCycle(o, 0.1, 1.0, cycle_first_stair_count=0.5), "stair_count"),
    "a range test of nothing": (lambda o: schedules.LRRangeTest(o, lr_range_test_step_size=0), "step_size"),
    "nothing left for a cosine": (lambda o: schedules.CosineAnnealingWarmupLR(o, 4, 4), "total_steps.*more than the 4"),
    "a wrapper": (lambda o: schedules.WarmupLR([o]), "an optimizer"),
    "a beta of 1": (lambda o: schedules.Beta2Scheduler(o, 1.0), "init_beta2.*below 1"),
    "betas of SGD": (
        lambda o: schedules.Beta2Scheduler(build_two_group_optimizer(torch.optim.SGD), 0.9),
        "one with betas",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    make, says = BAD[name]
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        make(build_two_group_optimizer())
