"""Parameters and wires in bfloat16, masters and accumulation in float32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import npuzero
from npuzero import Precision, Settings
from world.toy import ToyBlock, ToyGPT, TrainingRecipe, build_seeded_model, toy_loss, toy_tokens
from world.train import Make, Session, State, assert_same_bits, relative_difference, run_cut, train_by_recipe

STAGES = ("zero0", "zero1", "zero2", "zero3")
# Steps of equal size, by Adam's own eps: a rounding in the opposite direction does not propagate.
ONE = TrainingRecipe(steps=4, eps=1e-8)
TWO = TrainingRecipe(steps=3, micro_batches=2, eps=1e-8)
ULP = 2.0**-8  # of bfloat16, relative to the power of two below


class MixedBlock(ToyBlock):
    """Matrices in bfloat16, norms in float32."""

    def __init__(self, dim: int, frozen_norm: bool = False) -> None:
        super().__init__(dim, frozen_norm)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x).bfloat16()).chunk(3, -1)
        attention = F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True), self.out.weight)
        x = x + attention.float() + self.out.bias + self.empty.float().sum()
        norm, up, act, down = self.mlp
        hidden = act(F.linear(norm(x).bfloat16(), up.weight).float() + up.bias)
        return x + F.linear(hidden.bfloat16(), down.weight).float() + down.bias


class MixedGPT(ToyGPT):
    def __init__(self) -> None:
        super().__init__(block=MixedBlock)


#: Cases: all parameters converted by zero()'s argument; a model of two dtypes unchanged; wires with a separate dtype.
MODELS: dict[str, tuple[Make, Precision]] = {
    "bf16": (ToyGPT, Precision(torch.bfloat16)),
    "mixed": (MixedGPT, Precision()),
    "fp16": (ToyGPT, Precision(torch.float16)),
    "bf16 reduced in fp32": (ToyGPT, Precision(torch.bfloat16, wires=torch.float32)),
    "fp32 reduced in bf16": (ToyGPT, Precision(torch.float32, wires=torch.bfloat16)),
}
#: The same, but finished sums travel as wires do.
SENT_SUMS = {
    f"{name}, sums too": (make, replace(precision, sums="wire"))
    for name, (make, precision) in MODELS.items()
    if precision.wires is not torch.float32
}
QUICK = ("bf16", "mixed")


@cache
def train_mixed_precision(
    model: str,
    plan: str,
    recipe: TrainingRecipe,
    size: int = 4,
    settings: Settings | None = None,
    no_sync: bool = False,
) -> State:
    make, precision = (MODELS | SENT_SUMS)[model]

    def scenario(session: Session) -> State:
        return train_accumulated(session, recipe) if no_sync else train_by_recipe(session, recipe)

    states = run_cut(scenario, size, make, plan=plan, local_size=2, precision=precision, settings=settings)
    for state in states[1:]:
        assert_same_bits(state, states[0])
    return states[0]


def train_accumulated(session: Session, recipe: TrainingRecipe) -> State:
    """All micro-batches but the last under ``no_sync``."""
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2, eps=recipe.eps)
    for step in range(recipe.steps):
        with session.no_sync():
            for micro_batch in range(recipe.micro_batches - 1):
                (session.loss(step, micro_batch) / recipe.micro_batches).backward()
        (session.loss(step, recipe.micro_batches - 1) / recipe.micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {}


@dataclass(frozen=True)
class WireRounding:
    """Rounding of gradients to the wire dtype: per micro-batch or per step; at one level or at two; the sum."""

    each_micro_batch: bool
    two_levels: bool
    of_sum: bool = False


ROUNDING = {
    **dict.fromkeys(("zero0", "zero1"), WireRounding(each_micro_batch=False, two_levels=False)),
    **dict.fromkeys(("zero2", "zero3", "zero3-keep", "hpz"), WireRounding(each_micro_batch=True, two_levels=False)),
    "zero1.5": WireRounding(each_micro_batch=False, two_levels=True),
    **dict.fromkeys(("hsdp", "mics"), WireRounding(each_micro_batch=True, two_levels=True)),
}


@cache
def mixed_precision_by_hand(model: str, recipe: TrainingRecipe, rounding: WireRounding) -> State:
    """Compute mixed precision on 4 ranks by hand: autograd's gradient is scaled by 1/4, rounded to the wire's dtype
    if it is sent, and summed in float32; torch's AdamW updates masters; parameters are rounded masters.
    """
    make, precision = (MODELS | SENT_SUMS)[model]
    net = build_seeded_model(make=make)
    masters = {name: nn.Parameter(p.detach().float(), p.requires_grad) for name, p in net.named_parameters()}
    for parameter in net.parameters():
        parameter.data = parameter.data.to(precision.parameter_of(parameter.dtype))
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, eps=recipe.eps)
    groups = ((0, 1), (2, 3)) if rounding.two_levels else ((0, 1, 2, 3),)
    for step in range(recipe.steps):
        micro_batches = [
            [_scaled_gradients(net, recipe, step, micro_batch, rank) for rank in range(4)]
            for micro_batch in range(recipe.micro_batches)
        ]
        for name, parameter in net.named_parameters():
            given = [[rank[name] for rank in ranks] for ranks in micro_batches if name in ranks[0]]
            if given:
                masters[name].grad = _sum_wire_gradients(given, groups, rounding, precision.wire_of(parameter.dtype))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.copy_(masters[name])
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def _scaled_gradients(net: nn.Module, recipe: TrainingRecipe, step: int, micro_batch: int, rank: int) -> State:
    net.zero_grad()
    (toy_loss(net, toy_tokens(step, micro_batch, rank)) / recipe.micro_batches).backward()
    return {name: p.grad.float() / 4 for name, p in net.named_parameters() if p.grad is not None}


def _sum_wire_gradients(
    given: list[list[Tensor]], groups: tuple[tuple[int, ...], ...], rounding: WireRounding, wire: torch.dtype
) -> Tensor:
    """Sum ``given[micro-batch][rank]`` as the ranks do."""
    if not rounding.each_micro_batch:
        given = [[sum(gradients[1:], gradients[0]) for gradients in zip(*given, strict=True)]]
    within = []
    for group in groups:
        sums = [sum(ranks[r].to(wire).float() for r in group) for ranks in given]
        within.append(sum(sums[1:], sums[0]))
    total = sum(part.to(wire).float() for part in within) if rounding.two_levels else within[0]
    return total.to(wire).float() if rounding.of_sum else total


every_model = pytest.mark.parametrize(
    "model", [pytest.param(model, marks=() if model in QUICK else pytest.mark.slow) for model in MODELS]
)


@pytest.mark.checkered
@pytest.mark.parametrize("plan", npuzero.PRESETS)
@pytest.mark.parametrize("recipe", [ONE, TWO], ids=["one micro-batch", "two"])
@every_model
def test_training_equals_mixed_precision_by_hand(model: str, recipe: TrainingRecipe, plan: str) -> None:
    """A master close to the middle of two bfloat16 numbers may round either way, and values
    computed from it moves by as much: nearly all elements are equal, and none is far.
    """
    assert_nearly_equal(
        train_mixed_precision(model, plan, recipe), mixed_precision_by_hand(model, recipe, ROUNDING[plan])
    )


@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3", "hsdp"])
@every_model
def test_without_sync_gradients_are_rounded_once_a_step(model: str, plan: str) -> None:
    """Micro-batches accumulate in float32 on each rank, in any wire dtype."""
    rounding = replace(ROUNDING[plan], each_micro_batch=False)
    assert_nearly_equal(
        train_mixed_precision(model, plan, TWO, no_sync=True), mixed_precision_by_hand(model, TWO, rounding)
    )


#: Where several ranks keep the same states, finished sums are sent; elsewhere they stay in place.
SENDS_SUMS = ("zero0", "zero1.5", "hsdp", "mics")
every_sent_sum = pytest.mark.parametrize(
    "model",
    [pytest.param(model, marks=() if model == "bf16, sums too" else pytest.mark.slow) for model in SENT_SUMS],
)


@pytest.mark.parametrize("plan", SENDS_SUMS)
@pytest.mark.parametrize("recipe", [ONE, TWO], ids=["one micro-batch", "two"])
@every_sent_sum
def test_sums_that_travel_as_wires_are_rounded_once_more(model: str, recipe: TrainingRecipe, plan: str) -> None:
    """And equal on all ranks, bit for bit, as :func:`train_mixed_precision` checks."""
    found = train_mixed_precision(model, plan, recipe)
    assert_nearly_equal(found, mixed_precision_by_hand(model, recipe, replace(ROUNDING[plan], of_sum=True)), share=0.9)
    with pytest.raises(AssertionError, match="some bits"):
        assert_same_bits(found, train_mixed_precision(model.removesuffix(", sums too"), plan, recipe))


@pytest.mark.parametrize("plan", ["zero0", "hsdp"])
def test_without_sync_sums_travel_as_wires_too(plan: str) -> None:
    rounding = replace(ROUNDING[plan], each_micro_batch=False, of_sum=True)
    found = train_mixed_precision("bf16, sums too", plan, TWO, no_sync=True)
    assert_nearly_equal(found, mixed_precision_by_hand("bf16, sums too", TWO, rounding), share=0.9)


@pytest.mark.parametrize("plan", [plan for plan in npuzero.PRESETS if plan not in SENDS_SUMS])
def test_where_no_sum_travels_none_is_rounded(plan: str) -> None:
    assert_same_bits(train_mixed_precision("bf16, sums too", plan, ONE), train_mixed_precision("bf16", plan, ONE))


@pytest.mark.parametrize("plan", SENDS_SUMS)
def test_settings_change_no_bit_of_sums_that_travel_as_wires(plan: str) -> None:
    for settings in (Settings(overlap=False), Settings(prefetch=3, bucket_bytes=2048)):
        assert_same_bits(
            train_mixed_precision("bf16, sums too", plan, TWO, settings=settings),
            train_mixed_precision("bf16, sums too", plan, TWO),
        )


def test_sums_of_float32_wires_travel_in_float32_either_way() -> None:
    def scenario(session: Session) -> State:
        return train_by_recipe(session, ONE)

    for parameters in (torch.float32, torch.bfloat16):
        precisions = [Precision(parameters, wires=torch.float32, sums=sums) for sums in ("fp32", "wire")]
        one, other = (run_cut(scenario, 2, ToyGPT, plan="zero0", precision=precision)[0] for precision in precisions)
        assert_same_bits(one, other)


def assert_nearly_equal(found: State, expected: State, share: float = 0.95) -> None:
    assert found.keys() == expected.keys()
    equal = total = 0
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert relative_difference(found[name], value) <= 2 * ULP, name
        equal += int((found[name].float() - value.float()).abs().le(value.float().abs() * 1e-5 + 1e-7).sum())
        total += value.numel()
    assert equal >= share * total


@every_model
def test_stages_give_the_same_bits(model: str) -> None:
    for plan in (*STAGES[1:], "zero3-keep", "hpz"):
        assert_same_bits(train_mixed_precision(model, plan, ONE), train_mixed_precision(model, STAGES[0], ONE))


@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3", "hsdp"])
def test_settings_change_no_bit(plan: str) -> None:
    for settings in (Settings(overlap=False), Settings(prefetch=3)):
        assert_same_bits(
            train_mixed_precision("bf16", plan, TWO, settings=settings), train_mixed_precision("bf16", plan, TWO)
        )


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_masters_see_what_bfloat16_cannot(plan: str) -> None:
    """Steps below half an ulp of the parameter add up: without masters nothing would ever move."""

    def scenario(session: Session) -> State:
        optimizer = session.optimizer(torch.optim.SGD, lr=2.0**-12)
        for _ in range(16):
            session.model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {}

    def make() -> nn.Module:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(layer.weight)
        return layer

    state, _ = run_cut(scenario, 2, make, plan=plan, precision="bf16")
    assert state["weight"].item() == 1.0 - 16 * 2.0**-12
