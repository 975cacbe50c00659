"""Programs that write into parameters: the outcome is plain torch's, under any plan and precision.

Or, where the ranks write different values, an error on every rank that names the unit and the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import comm
from npuzero.comm import World
from npuzero.shard.find_engine import engine_behind
from world.toy import VOCABULARY, ToyBlock, ToyGPT, build_seeded_model
from world.train import CutSession, Session, State, assert_same_bits, check_equals_plain

QUICK = ("zero2", "zero3", "hsdp")
every_plan = pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in QUICK else pytest.mark.slow) for plan in npuzero.PRESETS]
)
LOW = ("bf16", "fp16", "bf16-split", "bf16-stochastic")
LIMIT = 0.0625  # in every precision
SIZE = 4  # ranks, two a node


def clamp_in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.clamp_(-LIMIT, LIMIT)


def by_data(weight: Tensor) -> None:
    weight.data.clamp_(-LIMIT, LIMIT)


def by_detach(weight: Tensor) -> None:
    weight.detach()[1:].clamp_(-LIMIT, LIMIT)


def by_an_alias(weight: Tensor) -> None:
    alias = weight.data
    alias.view(-1)[::2].clamp_(-LIMIT, LIMIT)


WAYS = (clamp_in_place, by_data, by_detach, by_an_alias)


# -- within a forward --------------------------------------------------------------------------------------------------


class WritingLinear(nn.Linear):
    way: Callable[[Tensor], None]

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)
        self.fixed = nn.Parameter(torch.ones(3, 5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        type(self).way(self.weight)
        type(self).way(self.fixed)
        return super().forward(x) * self.fixed.mean()


def make_writing_model(way: Callable[[Tensor], None]) -> Callable[[], nn.Module]:
    """Makes models whose blocks' forward writes their weights; doing it twice does what doing it once does."""
    linear = type("Linear", (WritingLinear,), {"way": staticmethod(way)})

    class WritingBlock(ToyBlock):
        def __init__(self, dim: int, frozen_norm: bool = False) -> None:
            super().__init__(dim, frozen_norm)
            self.out = linear(dim)

    return lambda: ToyGPT(layers=2, block=WritingBlock)


# Plain torch, which has a forward for each rank's batch, refuses writes between that it counts.
MAKES = {way.__name__: make_writing_model(way) for way in (by_data, by_an_alias)}


def train_and_evaluate(session: Session) -> None:
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        session.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            session.loss(step)


@pytest.mark.parametrize("way", MAKES)
@every_plan
def test_a_forward_that_writes_its_weight(plan: str, way: str) -> None:
    check_equals_plain(train_and_evaluate, SIZE, MAKES[way], plan=plan, local_size=2)


@pytest.mark.parametrize("precision", LOW)
def test_a_forward_that_writes_its_weight_in_low_precision(precision: str) -> None:
    """Masters follow the written values, and stages stay alike to the bit."""
    alike = ("zero3", "zero3-keep") if precision == "bf16-split" else ("zero0", "zero2", "zero3")
    states = [_run_on_ranks(train_and_evaluate, MAKES["by_data"], plan=plan, precision=precision) for plan in alike]
    for state in states[1:]:
        assert_same_bits(state, states[0])
    written = [value for name, value in states[0].items() if name.endswith("out.weight")]
    assert written and all(value.abs().max() <= LIMIT + 0.03 for value in written)


class MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16, max_norm=0.5)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


@every_plan
def test_an_embedding_with_max_norm_over_equal_batches(plan: str) -> None:
    def alike(session: Session) -> None:
        session.ranks = (0,)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-1)
        for step in range(3):
            session.loss(step).backward()
            optimizer.step()
            optimizer.zero_grad()

    check_equals_plain(alike, SIZE, MaxNorm, plan=plan, local_size=2)


@every_plan
def test_an_embedding_with_max_norm_over_batches_that_differ(plan: str) -> None:
    def rank(world: World) -> str:
        session = CutSession(build_seeded_model(make=MaxNorm), world, plan=plan, local_size=2)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-1)
        session.loss().backward()
        with pytest.raises(npuzero.StateError) as caught:
            optimizer.step()
        return str(caught.value)

    for text in comm.run_threads(SIZE, rank):
        assert "embed.weight" in text and "different" in text and "max_norm" in text


# -- between steps -----------------------------------------------------------------------------------------------------


@contextmanager
def _gathered_parameters(model: nn.Module, write: bool = False) -> Iterator[None]:
    """Return full parameters: gathered from a sharded model, plain torch's unchanged."""
    if any(engine_behind(parameter) is not None for parameter in model.parameters()):
        with npuzero.gathered(model, write=write):
            yield
    else:
        yield


def clip_weights(way: Callable[[Tensor], None], write: bool = False) -> Callable[[Session], None]:
    def scenario(session: Session) -> None:
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(3):
            session.loss(step).backward()
            optimizer.step()
            optimizer.zero_grad()
            with _gathered_parameters(session.model, write):
                for parameter in session.model.parameters():
                    if parameter.dim() > 1 and parameter.numel():
                        way(parameter)

    return scenario


CLIPPING = {way.__name__: clip_weights(way) for way in WAYS}
PAST_TORCH = clip_weights(lambda weight: weight.detach().numpy().clip(-LIMIT, LIMIT, out=weight.detach().numpy()), True)


@pytest.mark.parametrize("way", CLIPPING)
@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_weights_clipped_after_each_step(plan: str, way: str) -> None:
    check_equals_plain(CLIPPING[way], SIZE, plan=plan, local_size=2)


@every_plan
def test_weights_clipped_past_torch(plan: str) -> None:
    check_equals_plain(PAST_TORCH, SIZE, plan=plan, local_size=2)


@pytest.mark.parametrize(("precision", "write"), [*((name, False) for name in LOW), ("bf16", True)])
@pytest.mark.parametrize("plan", ["zero0", "zero1", pytest.param("zero1.5", marks=pytest.mark.slow), "hsdp"])
def test_what_is_written_outlasts_a_step_that_changes_nothing(plan: str, precision: str, write: bool) -> None:
    """Weights copied back from an average, ``nn.init``: the earlier masters do not return."""

    def rank(world: World) -> list[Tensor]:
        session = CutSession(build_seeded_model(), world, plan=plan, precision=precision, local_size=2)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        session.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        block = session.model.blocks[0]
        with _gathered_parameters(session.model, write):
            nn.init.constant_(block.qkv.weight, LIMIT)
            block.out.weight.data.copy_(torch.full((16, 16), -LIMIT))
            for parameter in block.mlp.parameters():
                parameter.data.zero_()
        optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
        session.loss().backward()
        optimizer.step()
        state = session.state()
        return [state[f"blocks.0.{name}"] for name in ("qkv.weight", "out.weight", "mlp.1.weight", "mlp.3.bias")]

    for written in comm.run_threads(SIZE, rank):
        for tensor, value in zip(written, (LIMIT, -LIMIT, 0.0, 0.0), strict=True):
            assert torch.equal(tensor, torch.full_like(tensor, value))


@pytest.mark.parametrize(("plan", "precision"), [("zero0", "bf16"), ("zero2", "fp16"), ("zero3", "bf16")])
def test_masters_keep_their_bits_where_values_stay(plan: str, precision: str) -> None:
    """Reading through ``p.data``, or a write that changes nothing, moves no bit of the training."""

    def trained(touch: Callable[[Tensor], object]) -> Callable[[Session], None]:
        def scenario(session: Session) -> None:
            optimizer = session.optimizer(torch.optim.AdamW, lr=1e-3)
            for step in range(4):
                session.loss(step).backward()
                optimizer.step()
                optimizer.zero_grad()
                with _gathered_parameters(session.model):
                    for parameter in session.model.parameters():
                        touch(parameter)

        return scenario

    options = {"plan": plan, "precision": precision}
    untouched, read, same = (
        _run_on_ranks(trained(touch), **options)
        for touch in (lambda p: None, lambda p: p.data.sum(), lambda p: p.data.mul_(1.0))
    )
    assert_same_bits(read, untouched)
    assert_same_bits(same, untouched)


class SlowCopyPair(nn.Module):
    """A model that learns from a slow copy of itself, as in BYOL and MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = ToyGPT(), ToyGPT()
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.online(tokens) + self.target(tokens)


@every_plan
def test_a_target_that_follows_by_moving_averages(plan: str) -> None:
    check_equals_plain(follow_slow_copy, SIZE, SlowCopyPair, plan=plan, local_size=2)


def follow_slow_copy(session: Session) -> None:
    optimizer = session.optimizer(
        torch.optim.AdamW, [p for p in session.model.parameters() if p.requires_grad], lr=1e-2
    )
    for step in range(3):
        session.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with _gathered_parameters(session.model):
            both = zip(session.model.target.parameters(), session.model.online.parameters(), strict=True)
            for slow, fast in both:
                slow.data.mul_(0.5).add_(fast.data, alpha=0.5)


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2"])
def test_weights_that_stay_whole_need_no_block(plan: str) -> None:
    def scenario(session: Session) -> None:
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(3):
            session.loss(step).backward()
            optimizer.step()
            optimizer.zero_grad()
            for parameter in session.model.parameters():
                by_data(parameter)

    check_equals_plain(scenario, SIZE, plan=plan)


# -- ranks that write different values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["zero0", "zero3", "hsdp"])
@pytest.mark.parametrize("write", [False, True])
def test_ranks_that_write_different_values_within_a_block(plan: str, write: bool) -> None:
    def rank(world: World) -> str:
        model = CutSession(build_seeded_model(), world, plan=plan, local_size=2).model
        with pytest.raises(npuzero.StateError) as caught, npuzero.gathered(model, write=write):
            model.blocks[1].mlp[1].weight.data.fill_(world.rank // 3)  # type: ignore[index, union-attr]
        return str(caught.value)

    for text in comm.run_threads(SIZE, rank):
        assert "blocks.1.mlp.1.weight" in text and "unit 'blocks.1'" in text


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2"])
def test_one_rank_that_writes_into_whole_parameters(plan: str, precision: str) -> None:
    def rank(world: World) -> str:
        session = CutSession(build_seeded_model(), world, plan=plan, precision=precision)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        if world.rank == 1:
            nn.init.zeros_(session.model.blocks[0].qkv.weight)  # type: ignore[index, union-attr]
        session.loss().backward()
        with pytest.raises(npuzero.StateError) as caught:
            optimizer.step()
        return str(caught.value)

    for text in comm.run_threads(2, rank):
        assert "blocks.0.qkv.weight" in text and "by ranks [1] alone" in text


def test_ranks_that_write_the_same_values_to_other_places() -> None:
    def rank(world: World) -> str:
        session = CutSession(build_seeded_model(), world, plan="zero1")
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        weight: Any = session.model.norm.weight
        with torch.no_grad():
            weight.copy_(torch.arange(len(weight)).roll(world.rank))
        session.loss().backward()
        with pytest.raises(npuzero.StateError) as caught:
            optimizer.step()
        return str(caught.value)

    assert all("norm.weight" in text for text in comm.run_threads(2, rank))


def _run_on_ranks(
    scenario: Callable[[Session], State], make: Callable[[], nn.Module] = ToyGPT, **options: object
) -> State:
    def rank(world: World) -> State:
        session = CutSession(build_seeded_model(make=make), world, local_size=2, **options)
        scenario(session)
        return session.state()

    states = comm.run_threads(SIZE, rank)
    for state in states[1:]:
        assert_same_bits(state, states[0])
    return states[0]
