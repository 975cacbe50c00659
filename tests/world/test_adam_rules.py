"""Adam's variants, with L2 decay and unbiased moments, compared with a plain form of the published formulas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import comm
from npuzero.comm import World
from world.test_optimizers import optimizer_state
from world.toy import build_seeded_model, toy_loss, toy_tokens
from world.train import CutSession, Session, State, assert_same_bits, check_equals_plain, run_cut

OPTIONS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.1}
KINDS = {"AdamW": npuzero.AdamW, "Adam": npuzero.Adam}


class PlainAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba, algorithm 1), in float32, with L2's or the decoupled decay, and with or without bias terms.

    As apex's and DeepSpeed's fused kernels have it: m / c1 / (sqrt(v / c2) + eps), where both c are 1 without.
    """

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, **how: bool) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **how})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                c1, c2 = (1 - b ** state["step"] if group["bias_correction"] else 1.0 for b in (beta1, beta2))
                decay = group["lr"] * group["weight_decay"] if group["decoupled"] else 0.0
                g = p.grad if group["decoupled"] else p.grad + group["weight_decay"] * p
                state["exp_avg"].mul_(beta1).add_((1 - beta1) * g)
                state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * g * g)
                root = state["exp_avg_sq"].double().sqrt().float() / torch.tensor(c2**0.5)
                p.copy_(p * (1 - decay) - group["lr"] / c1 * state["exp_avg"] / (root + group["eps"]))


def build_adam_rule(session: Session, kind: str, corrects: bool, **options: Any) -> Any:
    groups = [{"params": list(session.model.parameters())[i::2], "lr": lr} for i, lr in enumerate((3e-3, 1e-3))]
    if isinstance(session, CutSession):
        return KINDS[kind](groups, bias_correction=corrects, **{**OPTIONS, **options})
    return PlainAdam(groups, decoupled=kind == "AdamW", bias_correction=corrects, **OPTIONS)


def train_adam_rule(session: Session, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        session.loss(step).backward()
        session.clip(0.5)
        optimizer.step()
        optimizer.zero_grad()


def adam_moments(optimizer: Any) -> State:
    return {name: value for name, value in optimizer_state(optimizer).items() if "exp_avg" in name}


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_over_a_sharded_model(kind: str, corrects: bool, plan: str) -> None:
    def scenario(session: Session) -> State:
        optimizer = build_adam_rule(session, kind, corrects)
        train_adam_rule(session, optimizer, range(4))
        return adam_moments(optimizer)

    check_equals_plain(scenario, 2, plan=plan)


@pytest.mark.parametrize("kind", KINDS)
def test_stages_and_devices_that_count_give_the_same_bits(kind: str) -> None:
    """The host may know the coefficients, or the device compute them; two other numbers without bias terms."""

    def scenario(session: Session, corrects: bool = False, **options: Any) -> State:
        optimizer = build_adam_rule(session, kind, corrects, **options)
        train_adam_rule(session, optimizer, range(3))
        return session.state() | adam_moments(optimizer)

    first = run_cut(scenario, 2, plan="zero0")[0]
    for plan in ("zero1", "zero2", "zero3", "offload"):
        for found in run_cut(scenario, 2, plan=plan):
            assert_same_bits(found, first)
    counted = run_cut(lambda session: scenario(session, capturable=True), 2, plan="zero3")[0]
    assert_same_bits(counted, first)
    corrected = run_cut(lambda session: scenario(session, corrects=True), 2, plan="zero0")[0]
    assert not torch.equal(corrected["tokens.weight"], first["tokens.weight"])


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_over_plain_parameters_it_has_the_bits_of_the_formula(kind: str, corrects: bool) -> None:
    def parameters() -> list[nn.Parameter]:
        return [nn.Parameter(p.detach().clone()) for p in build_seeded_model().parameters()]

    mine, theirs = parameters(), parameters()
    ours = KINDS[kind](mine, bias_correction=corrects, **OPTIONS)
    plain = PlainAdam(theirs, decoupled=kind == "AdamW", bias_correction=corrects, **OPTIONS)
    for _ in range(4):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        plain.step()
    for p, q in zip(mine, theirs, strict=True):
        assert_same_bits({"p": p.detach()}, {"p": q.detach()})


def test_one_step_without_bias_terms_by_hand() -> None:
    """From zero moments m = 0.1 g and v = 0.001 g^2: the first step is 3.16 times lr, where bias terms make it lr."""
    steps: list[Tensor] = []
    for corrects in (False, True):
        p = nn.Parameter(torch.zeros(1))
        p.grad = torch.tensor([2.0])
        npuzero.AdamW([p], lr=1.0, eps=0.0, weight_decay=0.0, bias_correction=corrects).step()
        steps.append(p.detach())
    torch.testing.assert_close(torch.cat(steps), torch.tensor([-(0.1 / 0.001**0.5), -1.0]))


def test_a_state_goes_on_and_groups_stay_torchs() -> None:
    def half_way(session: Session) -> State:
        optimizer = build_adam_rule(session, "AdamW", False)
        train_adam_rule(session, optimizer, range(2))
        saved = optimizer.state_dict()
        assert all(group["bias_correction"] is False for group in saved["param_groups"])
        again = build_adam_rule(session, "AdamW", False)
        again.load_state_dict(saved)
        train_adam_rule(session, again, range(2, 4))
        return session.state()

    def whole(session: Session) -> State:
        train_adam_rule(session, build_adam_rule(session, "AdamW", False), range(4))
        return session.state()

    assert_same_bits(run_cut(half_way, 2, plan="zero2")[0], run_cut(whole, 2, plan="zero2")[0])
    torchs = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    assert npuzero.AdamW([nn.Parameter(torch.ones(1))]).param_groups[0].keys() == torchs.param_groups[0].keys()


def test_ranks_that_differ_are_told() -> None:
    def rank(world: World) -> str:
        model = npuzero.zero(build_seeded_model(), 1, world=world)
        optimizer = npuzero.AdamW(model.parameters(), bias_correction=world.rank == 0)
        toy_loss(model, toy_tokens(0, 0, world.rank)).backward()
        with pytest.raises(npuzero.ConfigError, match="bias_correction"):
            optimizer.step()
        return "told"

    assert comm.run_threads(2, rank) == ["told"] * 2
