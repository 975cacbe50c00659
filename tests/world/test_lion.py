"""Lion over sharded models and plain parameters, compared with its authors' form in plain torch."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import npuzero
from npuzero import Precision, checkpoint, comm
from npuzero.comm import World
from world.test_optimizers import optimizer_state
from world.toy import build_seeded_model
from world.train import (
    BOUND,
    CutSession,
    Session,
    State,
    assert_same_bits,
    assert_states_close,
    check_equals_plain,
    run_cut,
)

PLANS = ("zero0", "zero1", "zero2", "zero3", "hsdp")
LION: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
PRECISIONS = {
    "bf16": "bf16",
    "split": Precision(torch.bfloat16, masters="split", moments="bf16"),
    "8 bits": Precision(torch.bfloat16, masters="split", moments="int8"),
    "drawn": Precision(torch.bfloat16, masters="none", moments="int8"),
}


class PlainLion(torch.optim.Optimizer):
    """As published with the paper (arXiv 2302.06675)."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                update = beta1 * state["exp_avg"] + (1 - beta1) * p.grad
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update.sign())
                state["exp_avg"].mul_(beta2).add_((1 - beta2) * p.grad)


def build_lion(session: Session, params: Any = None, **options: Any) -> Any:
    kind = npuzero.Lion if isinstance(session, CutSession) else PlainLion
    return kind(session.model.parameters() if params is None else params, **{**LION, **options})


def build_two_group_lion(session: Session) -> Any:
    some = list(session.model.parameters())
    return build_lion(
        session, [{"params": some[::2]}, {"params": some[1::2], "betas": (0.8, 0.95), "weight_decay": 0.0}]
    )


def run_lion_steps(session: Session, optimizer: Any, steps: range, clip: float | None = 0.5) -> None:
    for step in steps:
        session.loss(step).backward()
        if clip is not None:
            session.clip(clip)
        optimizer.step()
        optimizer.zero_grad()


def lion_momenta(optimizer: Any) -> State:
    return {k: v for k, v in optimizer_state(optimizer).items() if k.endswith("exp_avg")}


def train_lion(session: Session) -> State:
    optimizer = build_two_group_lion(session)
    run_lion_steps(session, optimizer, range(4))
    return lion_momenta(optimizer)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_trains_as_plain_torch_does(plan: str, size: int) -> None:
    check_equals_plain(train_lion, size, plan=plan, local_size=2 if size == 4 and plan == "hsdp" else None)


def test_over_plain_parameters_it_has_the_bits_of_plain_torch() -> None:
    mine, theirs = build_seeded_model(), build_seeded_model()
    groups = [
        [{"params": list(m.parameters())[::2]}, {"params": list(m.parameters())[1::2], "lr": 3e-3}]
        for m in (mine, theirs)
    ]
    optimizers = (npuzero.Lion(groups[0], **LION), PlainLion(groups[1], **LION))
    for _ in range(5):
        for mine_p, its_p in zip(mine.parameters(), theirs.parameters(), strict=True):
            mine_p.grad = torch.randn_like(mine_p)
            its_p.grad = mine_p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert_same_bits(dict(mine.state_dict()), dict(theirs.state_dict()))
    assert_same_bits(lion_momenta(optimizers[0]), lion_momenta(optimizers[1]))


def test_it_goes_up_where_it_is_told_to() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([1.0, 0.0, -2.0])
    npuzero.Lion([p], lr=0.5, maximize=True).step()
    assert p.tolist() == [0.5, 0.0, -0.5]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_stages_give_the_same_bits(precision: str) -> None:
    first = run_cut(train_lion, 2, plan="zero0", precision=PRECISIONS[precision])[0]
    for plan in ("zero1", "zero3"):
        for state in run_cut(train_lion, 2, plan=plan, precision=PRECISIONS[precision]):
            assert_same_bits(state, first)


def test_split_masters_are_whole_masters_to_the_bit() -> None:
    whole = run_cut(train_lion, 2, plan="zero3", precision="bf16")[0]
    split = run_cut(train_lion, 2, plan="zero3", precision=Precision(torch.bfloat16, masters="split"))[0]
    assert_same_bits(split, whole)


def test_an_overflow_skips_a_step_and_lr_may_lie_on_the_device() -> None:
    def scaled(session: Session) -> State:
        # Plain torch's scaler skips on the host, npuzero's on the device, which then counts the steps.
        own = isinstance(session, CutSession)
        optimizer = build_lion(session, lr=torch.tensor(1e-3) if own else 1e-3)
        scaler = session.scaler(init_scale=2.0**8)
        for step in range(4):
            scaler.scale(session.loss(step) * (torch.inf if step == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            if step != 1:
                session.clip(0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return {**lion_momenta(optimizer), "scale": torch.tensor(scaler.get_scale())}

    check_equals_plain(scaled, 2, plan="zero3")


def test_states_go_from_a_cut_model_to_a_plain_one_and_back() -> None:
    def rank(world: World) -> tuple[State, State]:
        results = []
        cut = CutSession(build_seeded_model(), world, plan="zero3")
        optimizer = build_two_group_lion(cut)
        run_lion_steps(cut, optimizer, range(2))
        saved, weights = copy.deepcopy(optimizer.state_dict()), cut.state()
        run_lion_steps(cut, optimizer, range(2, 4))
        results.append(cut.state() | optimizer_state(optimizer))
        again = CutSession(build_seeded_model(1), world, plan="zero1")
        again.load(weights)
        other = build_two_group_lion(again)
        plain = build_seeded_model(1)
        plain.load_state_dict(weights)
        some = list(plain.parameters())
        between = npuzero.Lion([{"params": some[::2]}, {"params": some[1::2]}])
        between.load_state_dict(saved)
        other.load_state_dict(pickle.loads(pickle.dumps(between.state_dict())))
        run_lion_steps(again, other, range(2, 4))
        results.append(again.state() | optimizer_state(other))
        return results[0], results[1]

    for went_on, came_back in comm.run_threads(2, rank):
        assert_same_bits(came_back, went_on)


@pytest.mark.parametrize("precision", ["fp32", "8 bits"])
def test_another_preset_goes_on_from_a_checkpoint(precision: str, tmp_path: Path) -> None:
    options = {"precision": PRECISIONS.get(precision, precision)}

    def saves(world: World) -> State:
        session = CutSession(build_seeded_model(), world, plan="zero3", **options)
        optimizer = build_lion(session)
        run_lion_steps(session, optimizer, range(2))
        checkpoint.save(tmp_path, session.model, optimizer, step=2)
        return session.state() | optimizer_state(optimizer)

    def loads(world: World) -> State:
        session = CutSession(build_seeded_model(1), world, plan="hsdp", local_size=2, **options)
        optimizer = build_lion(session)
        assert checkpoint.load(tmp_path, session.model, optimizer).step == 2
        loaded = session.state() | optimizer_state(optimizer)
        run_lion_steps(session, optimizer, range(2, 3))
        return loaded

    saved = comm.run_threads(2, saves)[0]
    for loaded in comm.run_threads(4, loads):
        assert_same_bits(loaded, saved)


@pytest.mark.parametrize("plan", ["zero1", "zero3", "hsdp"])
@pytest.mark.parametrize("precision", ["fp32", *PRECISIONS])
def test_report_equals_predict_with_one_moment(plan: str, precision: str) -> None:
    options: dict[str, Any] = {"local_size": 2, "precision": PRECISIONS.get(precision, precision)}

    def rank(world: World) -> npuzero.Report:
        session = CutSession(build_seeded_model(), world, plan=plan, **options)
        run_lion_steps(session, build_lion(session), range(3), clip=None)
        session.state()
        return npuzero.report(session.model)

    expected = npuzero.predict(build_seeded_model(), plan, 4, moments=1, **options)
    for report in comm.run_threads(4, rank):
        assert report.bytes_held == expected.bytes_held
        assert report.bytes_sent == expected.bytes_sent


def test_states_of_a_plain_bfloat16_model_stay_near_whole_ones() -> None:
    kinds: list[dict[str, Any]] = [{}, {"masters": "split"}, {"masters": "none", "moments": "bf16"}]
    found = []
    for kind in kinds:
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(4096).bfloat16())
        optimizer = npuzero.Lion([p], lr=1e-3, **kind)
        for _ in range(20):
            p.grad = torch.randn_like(p)
            optimizer.step()
        found.append({"p": p.detach().float()})
    assert_same_bits(found[1], found[0])
    assert_states_close(found[2], found[0], 2.0**-6)
    assert BOUND < 2.0**-6


BAD = {
    "lr": {"lr": -1e-3},
    "betas": {"betas": (0.9, 1.0)},
    "weight_decay": {"weight_decay": float("nan")},
    "masters": {"masters": "fp16"},
    "moments": {"moments": "int4"},
    "seed": {"seed": -1},
}


@pytest.mark.parametrize("name", BAD)
def test_options_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(npuzero.errors.ConfigError, match=name):
        npuzero.Lion([torch.nn.Parameter(torch.zeros(3))], **BAD[name])
