"""Ranks that train by different rules: each gets an error with the group, the option, the rank and all values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import npuzero
from npuzero import ConfigError, comm
from npuzero.comm import World
from npuzero.shard.find_engine import engine_of
from world.toy import TrainingRecipe, build_seeded_model, toy_param_groups
from world.train import CutSession, State, assert_same_bits

QUICK = ("zero0", "zero3", "hsdp")
every_plan = pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in QUICK else pytest.mark.slow) for plan in npuzero.PRESETS]
)
SIZE, ODD = 4, 2  # ranks, two per node; the rank that differs

#: A user's training loop; the flag marks the odd rank.
Loop = Callable[[CutSession, bool], None]


def accord_step(
    session: CutSession, optimizer: torch.optim.Optimizer, clip: float | None = None, number: int = 0
) -> None:
    session.loss(number).backward()
    if clip is not None:
        session.clip(clip)
    optimizer.step()
    optimizer.zero_grad()


def train_adamw_step(session: CutSession, clip: float | None = None, **options: Any) -> None:
    optimizer = npuzero.AdamW(toy_param_groups(session.model, TrainingRecipe(groups=True)), **{"lr": 1e-2, **options})
    accord_step(session, optimizer, clip)


def another_lr(session: CutSession, odd: bool) -> None:
    train_adamw_step(session, clip=1.0, lr=2e-2 if odd else 1e-2)


def a_tensor_as_lr(session: CutSession, odd: bool) -> None:
    train_adamw_step(session, lr=torch.tensor(2e-2 if odd else 1e-2))


def a_schedule_that_follows_the_ranks_own_loss(session: CutSession, odd: bool) -> None:
    optimizer = npuzero.AdamW(session.model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for number in range(3):
        accord_step(session, optimizer, clip=1.0, number=number)
        schedule.step(2.0 + number if odd else 2.0 - number)


def a_tensor_that_is_written(session: CutSession, odd: bool) -> None:
    lr = torch.tensor(1e-2)
    optimizer = npuzero.AdamW(session.model.parameters(), lr=lr)
    accord_step(session, optimizer)
    if odd:
        lr.mul_(0.5)
    accord_step(session, optimizer)


def another_weight_decay(session: CutSession, odd: bool) -> None:
    groups = list(toy_param_groups(session.model, TrainingRecipe(groups=True)))
    groups[1]["weight_decay"] = 0.1 if odd else 0.0  # type: ignore[index]
    accord_step(session, npuzero.ZeroOptimizer(torch.optim.SGD, groups, lr=0.1))


def other_betas(session: CutSession, odd: bool) -> None:
    train_adamw_step(session, betas=(0.9, 0.95) if odd else (0.9, 0.999))


def maximizing(session: CutSession, odd: bool) -> None:
    train_adamw_step(session, maximize=odd)


def another_class(session: CutSession, odd: bool) -> None:
    accord_step(session, (npuzero.Adam if odd else npuzero.AdamW)(session.model.parameters(), lr=1e-2))


def another_class_of_torchs(session: CutSession, odd: bool) -> None:
    kind = torch.optim.RMSprop if odd else torch.optim.SGD
    accord_step(session, npuzero.ZeroOptimizer(kind, session.model.parameters(), lr=1e-2, weight_decay=0.0), clip=1.0)


def other_groups(session: CutSession, odd: bool) -> None:
    """The rank decays parameters that the remaining ranks do not."""
    decays = [p for p in session.model.parameters() if p.dim() >= (1 if odd else 2)]
    others = [p for p in session.model.parameters() if p.dim() < (1 if odd else 2)]
    accord_step(
        session, npuzero.AdamW([{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    )


def a_parameter_left_out(session: CutSession, odd: bool) -> None:
    some = [p for name, p in session.model.named_parameters() if not (odd and name == "blocks.0.out.bias")]
    accord_step(session, npuzero.AdamW(some))


def a_group_added_later(session: CutSession, odd: bool) -> None:
    named = dict(session.model.named_parameters())
    last = named.pop("norm.weight")
    optimizer = npuzero.AdamW(named.values(), lr=1e-2)
    accord_step(session, optimizer, clip=1.0)
    optimizer.add_param_group({"params": [last], "lr": 1e-3 if odd else 1e-2})
    accord_step(session, optimizer)


def built_before_the_model_was_cut(session: CutSession, odd: bool) -> None:
    model = build_seeded_model()
    optimizer = npuzero.AdamW(model.parameters(), lr=2e-2 if odd else 1e-2)
    plan = engine_of(session.model).plan
    accord_step(CutSession(model, comm.current_world(), plan=plan), optimizer)


def another_clip_value(session: CutSession, odd: bool) -> None:
    train_adamw_step(session, clip=0.5 if odd else 1.0)


def another_norm(session: CutSession, odd: bool) -> None:
    optimizer = npuzero.AdamW(session.model.parameters())
    session.loss().backward()
    session.clip(1.0, float("inf") if odd else 2.0)
    optimizer.step()


def no_clipping(session: CutSession, odd: bool) -> None:
    train_adamw_step(session, clip=None if odd else 1.0)


def another_clip_value_of_scaled_gradients(session: CutSession, odd: bool) -> None:
    optimizer, scaler = npuzero.AdamW(session.model.parameters()), npuzero.LossScaler(init_scale=16.0)
    for _ in range(2):
        scaler.scale(session.loss()).backward()
        scaler.unscale_(optimizer)
        session.clip(0.5 if odd else 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def another_rule_of_the_scale(session: CutSession, odd: bool) -> None:
    optimizer = npuzero.AdamW(session.model.parameters())
    scaler = npuzero.LossScaler(init_scale=16.0, growth_interval=1 if odd else 2)
    scaler.scale(session.loss()).backward()
    scaler.step(optimizer)


def freezing_later(session: CutSession, odd: bool) -> None:
    optimizer = npuzero.AdamW(session.model.parameters())
    accord_step(session, optimizer)
    if odd:
        for parameter in session.model.blocks[0].parameters():  # type: ignore[union-attr, index]
            parameter.requires_grad_(False)
    accord_step(session, optimizer)


CASES: dict[Loop, tuple[dict[str, Any], Any, Any]] = {
    another_lr: ({"group": 0, "key": "lr"}, 2e-2, 1e-2),
    a_tensor_as_lr: ({"group": 0, "key": "lr"}, torch.tensor(2e-2).item(), torch.tensor(1e-2).item()),
    a_tensor_that_is_written: ({"group": 0, "key": "lr"}, torch.tensor(5e-3).item(), torch.tensor(1e-2).item()),
    a_schedule_that_follows_the_ranks_own_loss: ({"group": 0, "key": "lr"}, 5e-3, 1e-2),
    another_weight_decay: ({"group": 1, "key": "weight_decay"}, 0.1, 0.0),
    other_betas: ({"group": 0, "key": "betas"}, [0.9, 0.95], [0.9, 0.999]),
    maximizing: ({"group": 0, "key": "maximize"}, True, False),
    another_class: ({"key": "class"}, "Adam", "AdamW"),
    another_class_of_torchs: ({"key": "class"}, "ZeroOptimizer(RMSprop)", "ZeroOptimizer(SGD)"),
    other_groups: ({"key": "weight_decay"}, "group 0, of weight_decay 0.1", "group 1, of weight_decay 0.0"),
    a_parameter_left_out: ({"key": "class", "parameter": "blocks.0.out.bias"}, "no optimizer", "AdamW"),
    a_group_added_later: ({"group": 1, "key": "lr", "parameter": "norm.weight"}, 1e-3, 1e-2),
    built_before_the_model_was_cut: ({"group": 0, "key": "lr"}, 2e-2, 1e-2),
    another_clip_value: ({"key": "max_norm"}, 0.5, 1.0),
    another_norm: ({"key": "norm_type"}, float("inf"), 2.0),
    another_clip_value_of_scaled_gradients: ({"key": "max_norm"}, 0.5, 1.0),
    another_rule_of_the_scale: ({"key": "growth_interval"}, 1, 2),
    freezing_later: ({"key": "requires_grad"}, False, True),
}


def rank_errors(loop: Loop, **options: Any) -> list[ConfigError]:
    """Return the error of each rank."""

    def rank(world: World) -> ConfigError:
        session = CutSession(build_seeded_model(), world, **options)
        with pytest.raises(ConfigError) as caught:
            loop(session, world.rank == ODD)
        return caught.value

    return comm.run_threads(SIZE, rank, timeout_s=10)


@every_plan
@pytest.mark.parametrize("loop", CASES, ids=lambda loop: loop.__name__.replace("_", " "))
def test_ranks_that_differ(loop: Loop, plan: str) -> None:
    facts, odd, usual = CASES[loop]
    errors = rank_errors(loop, plan=plan, local_size=2)
    assert len({str(error) for error in errors}) == 1
    found = errors[0].facts
    assert {key: found[key] for key in facts} == facts
    assert found["rank"] == ODD
    assert found["values"] == [odd if rank == ODD else usual for rank in range(SIZE)]
    assert f"{odd} on rank 2" in str(errors[0]) and f"{usual} on ranks 0, 1, 3" in str(errors[0])


@every_plan
def test_a_rank_that_does_not_clip(plan: str) -> None:
    errors = rank_errors(no_clipping, plan=plan, local_size=2)
    assert len({str(error) for error in errors}) == 1
    assert errors[0].facts == {"key": "call", "rank": ODD, "values": [True, True, False, True]}
    assert errors[0].expected == "clip_grad_norm_ on every rank, since it is collective"
    line = r"at \w+\.py:\d+"
    got = rf"rank 0, 1, 3 is in clip_grad_norm_ {line}; rank 2 went on to optimizer.step {line} without it"
    assert re.fullmatch(got, errors[0].got)


@every_plan
def test_a_step_after_all_have_the_same_again(plan: str) -> None:
    """The error came before anything was updated."""

    def rank(world: World, once: bool) -> State:
        session = CutSession(build_seeded_model(), world, plan=plan, local_size=2)
        optimizer = npuzero.AdamW(session.model.parameters(), lr=1e-2)
        accord_step(session, optimizer)
        session.loss(1).backward()
        if once:
            optimizer.param_groups[0]["lr"] = 1.0 if world.rank == 1 else 1e-2
            with pytest.raises(ConfigError, match="lr of group 0"):
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 1e-2
        optimizer.step()
        return session.state()

    for found, expected in zip(
        *(comm.run_threads(SIZE, lambda w, o=o: rank(w, o)) for o in (True, False)), strict=True
    ):
        assert_same_bits(found, expected)


def run_legal_programs(world: World, plan: str) -> None:
    """Programs with harmless differences between ranks: another order, or separate objects."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    session = CutSession(model, world, plan=plan, local_size=2)
    x = torch.ones(2, 4)

    def steps(optimizer: torch.optim.Optimizer) -> None:
        for clips in (True, False):
            model(x).sum().backward()
            if clips:
                session.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()

    groups = [{"params": part.parameters(), "lr": 10.0**-i, "tag": object()} for i, part in enumerate(model)]  # type: ignore[arg-type]
    first = npuzero.AdamW(groups if world.rank else groups[::-1], foreach=None)
    steps(first)
    if world.rank == 1:
        npuzero.Adam(model.parameters(), lr=1.0)  # never stepped
    model(x).sum().backward()
    session.clip(1.0)
    first.step()
    first.zero_grad()
    # A new optimizer replaces the first, which some ranks keep.
    second = npuzero.ZeroOptimizer(torch.optim.SGD, sorted(model.parameters(), key=id), lr=float("nan"))
    if world.rank:
        del first
    steps(second)


@pytest.mark.parametrize("plan", QUICK)
def test_what_ranks_may_do_differently(plan: str) -> None:
    comm.run_threads(SIZE, lambda world: run_legal_programs(world, plan), timeout_s=10)


def test_the_words_are_exchanged_only_where_something_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A steady step exchanges nothing, under any schedule of options."""

    def rank(world: World) -> int:
        session = CutSession(build_seeded_model(), world, plan="zero3")
        optimizer = npuzero.AdamW(toy_param_groups(session.model, TrainingRecipe(groups=True)), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.9**number)
        asked: list[object] = []
        exchange = world.exchange
        monkeypatch.setattr(world, "exchange", lambda value: (asked.append(value), exchange(value))[1])
        for number in range(3):
            accord_step(session, optimizer, clip=1.0 + number, number=number)
            schedule.step()
        return len(asked)

    assert comm.run_threads(2, rank) == [0, 0]


def test_random_bits_need_the_same_places() -> None:
    def loop(session: CutSession, odd: bool) -> None:
        parameters = list(session.model.parameters())
        accord_step(session, npuzero.AdamW(parameters[::-1] if odd else parameters))

    [error, *_] = rank_errors(loop, plan="zero0", precision="bf16-stochastic")
    assert error.facts["rank"] == ODD and "random bits" in str(error)

    def seeds(session: CutSession, odd: bool) -> None:
        accord_step(session, npuzero.AdamW(session.model.parameters(), seed=int(odd)))

    [error, *_] = rank_errors(seeds, plan="zero0", precision="bf16-stochastic")
    assert error.facts["key"] == "seed" and error.facts["values"] == [0, 0, 1, 0]
