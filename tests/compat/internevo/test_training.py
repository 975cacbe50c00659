"""Training from an InternEvo configuration: the same numbers as plain torch that follows InternEvo's rules."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero.comm import World, run_threads
from npuzero.compat.internevo import HybridZeroOptimizer, initialize, load
from npuzero.errors import CheckpointError, ConfigError, StateError
from world import toy

STEPS, RANKS = 8, 2
DTYPES = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16, "torch.float16": torch.float16}

TEXT = """
data = dict(seq_len=1, micro_bsz=4, micro_num={micro_num})
grad_scaler = dict(
    fp16=dict(initial_scale=2**{power}, min_scale=1, growth_interval=2),
    growth_factor=2, backoff_factor=0.5, max_scale=2**20, hysteresis=2,
)
hybrid_zero_optimizer = dict(
    overlap_sync_grad=True, overlap_sync_param=True, reduce_bucket_size=512, clip_grad_norm={clip}
)
adam = dict(lr=1e-2, adam_beta1=0.9, adam_beta2=0.95, adam_beta2_c={c}, adam_eps=1e-3, weight_decay=0.01)
lr_scheduler = dict(total_steps=10, init_steps=1, warmup_ratio=0.2, eta_min=1e-3, last_epoch=-1)
beta2_scheduler = dict(init_beta2=adam["adam_beta2"], c=adam["adam_beta2_c"], cur_iter=-1)
model = dict(dtype={dtype!r}, checkpoint={checkpoint})
parallel = dict({parallel})
"""


class CountingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.inner(x))


def build_counting_blocks() -> nn.Module:
    return toy.build_seeded_model(make=lambda: nn.Sequential(*(CountingBlock() for _ in range(4))))


def internevo_batch(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def internevo_loss(out: Tensor) -> Tensor:
    return out.float().square().mean() * 16


def write_training_config(path: Any, **values: Any) -> Any:
    usual = {"dtype": "torch.float32", "micro_num": 1, "power": 16, "clip": 1.0, "c": 0.8, "checkpoint": False}
    path.write_text(TEXT.format(**{**usual, "parallel": "zero1=-1", **values}))
    return load(path)


class InternEvoReference:
    """InternEvo's rules over plain torch: masters, a loss scale, clipping, schedules, in one process for all ranks."""

    def __init__(self, config: Any) -> None:
        said = config.values
        self.said, self.dtype = said, DTYPES[said["model"]["dtype"]]
        self.net = build_counting_blocks()
        self.model = copy.deepcopy(self.net).to(self.dtype)
        adam = said["adam"]
        betas = (adam["adam_beta1"], adam["adam_beta2"])
        options = {"lr": adam["lr"], "eps": adam["adam_eps"], "weight_decay": adam["weight_decay"]}
        self.optimizer = torch.optim.AdamW(self.net.parameters(), betas=betas, **options)
        scaled = self.dtype != torch.float32
        self.scale = said["grad_scaler"]["fp16"]["initial_scale"] if scaled else 1
        self.scaled, self.good, self.bad, self.taken = scaled, 0, 0, 0

    def rate(self) -> float:
        """The learning rate of the step that comes, ``taken`` steps after the begin."""
        said = self.said["lr_scheduler"]
        total, begin, low, high = said["total_steps"], said["init_steps"], said["eta_min"], self.said["adam"]["lr"]
        warm = int(total * said["warmup_ratio"])
        if self.taken < begin:
            return 0.0
        if self.taken < begin + warm:
            return high * (self.taken + 1 - begin) / warm
        part = (self.taken - begin - warm) / (total - begin - warm)
        return low + (high - low) * (1 + math.cos(math.pi * part)) / 2

    def beta2(self) -> float:
        said = self.said["beta2_scheduler"]
        return max(said["init_beta2"], 1 - self.taken ** -said["c"]) if self.taken else self.said["adam"]["adam_beta2"]

    def step(self, step: int) -> tuple[bool, float]:
        sums = [torch.zeros_like(parameter) for parameter in self.net.parameters()]
        micros = self.said["data"]["micro_num"]
        for rank in range(RANKS):
            for micro in range(micros):
                self.model.zero_grad()
                out = self.model(internevo_batch(step, micro, rank).to(self.dtype))
                (internevo_loss(out) / micros * self.scale).backward()
                for total, parameter in zip(sums, self.model.parameters(), strict=True):
                    total += (parameter.grad / RANKS).float()
        for total, parameter in zip(sums, self.net.parameters(), strict=True):
            parameter.grad = total / self.scale
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.net.parameters()]).item()
        if not math.isfinite(norm):
            self.good, self.bad = 0, self.bad + 1
            if self.scaled and self.bad >= 2:
                self.scale = max(1, self.scale / 2)
            return False, -2.0 if math.isnan(norm) else -1.0
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.said["hybrid_zero_optimizer"]["clip_grad_norm"])
        for group in self.optimizer.param_groups:
            group["lr"], group["betas"] = self.rate(), (group["betas"][0], self.beta2())
        self.optimizer.step()
        self.taken, self.good = self.taken + 1, self.good + 1
        if self.good == 2:
            self.good = self.bad = 0
            self.scale = min(2**20, self.scale * 2) if self.scaled else 1
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.net.parameters(), strict=True):
                parameter.copy_(master)
        return True, norm


def train_internevo(world: World, config: Any) -> Iterator[tuple[bool, float, float]]:
    made = initialize(build_counting_blocks(), config, world=world)
    micros = config.micro_batches
    for step in range(STEPS):
        made.optimizer.zero_grad()
        for micro in range(micros):
            made.optimizer.skip_grad_reduce = micro < micros - 1
            made.optimizer.backward(internevo_loss(made.model(internevo_batch(step, micro, world.rank))) / micros)
        scale = made.optimizer.loss_scale.item()
        done, norms = made.optimizer.step()
        if done:
            made.lr_scheduler.step()
            made.beta2_scheduler.step()
        yield done, norms["0_default"], scale
    yield npuzero.full_state_dict(made.model, rank0_only=False)


@pytest.mark.parametrize(
    "values",
    [
        {"micro_num": 2},
        {"micro_num": 2, "parallel": "zero1=dict(size=-1, fsdp=True)", "checkpoint": 0.5},
        {"parallel": "zero1=1, tensor=dict(size=1, mode='isp'), weight=dict(size=2, overlap=True)"},
        {"dtype": "torch.bfloat16", "clip": 0.5},
        {"dtype": "torch.float16", "power": 18},
        {"dtype": "torch.float16", "power": 8, "parallel": "fsdp=dict(enable=True)", "checkpoint": True},
    ],
    ids=["zero1", "fsdp", "isp", "bf16", "fp16", "fp16-fsdp"],
)
def test_the_same_numbers_as_plain_torch(tmp_path, values):
    config = write_training_config(tmp_path / "config.py", **values)
    plain = InternEvoReference(config)
    expected = [(plain.scale, *plain.step(step)) for step in range(STEPS)]
    for *steps, state in run_threads(RANKS, lambda world: [*train_internevo(world, config)]):
        for (scale, done, norm), (did, told, at) in zip(expected, steps, strict=True):
            assert (did, at) == (done, scale)
            assert told == pytest.approx(norm, rel=1e-5)
        for name, parameter in plain.model.state_dict().items():
            assert (state[name].float() - parameter.float()).abs().max() <= 1e-6, name
    skipped = [done for _, done, _ in expected].count(False)
    assert (skipped > 1) is (values.get("power") == 18), "the case tests no overflow, or one that nobody meant"


def test_checkpointed_blocks_run_again_in_backward(tmp_path):
    def ran(world: World) -> list[int]:
        net = build_counting_blocks()
        made = initialize(net, write_training_config(tmp_path / f"{world.rank}.py", checkpoint=0.5), world=world)
        made.optimizer.backward(internevo_loss(made.model(internevo_batch(0, 0, world.rank))))
        return [block.calls for block in net]

    assert run_threads(1, ran) == [[2, 2, 1, 1]]
    with pytest.raises(ConfigError, match=r"model\.checkpoint"):
        run_threads(1, lambda world: initialize(nn.Linear(8, 8), tmp_path / "0.py", world=world))


# -- the optimizer by itself -------------------------------------------------------------------------------------------


def build_hybrid_optimizer(world: World, **options: Any) -> tuple[nn.Module, HybridZeroOptimizer]:
    model = npuzero.zero(build_counting_blocks(), stage=2, world=world)
    return model, HybridZeroOptimizer(model, npuzero.AdamW(model.parameters(), lr=1e-2), **options)


def test_without_a_scaler_what_is_not_finite_is_skipped_and_told_on_every_rank():
    def body(world: World) -> list[Any]:
        model, optimizer = build_hybrid_optimizer(world, clip_grad_norm=1.0)
        found = []
        for bad in (1.0, math.inf, math.nan, 1.0):
            before = {name: value.clone() for name, value in npuzero.full_state_dict(model, rank0_only=False).items()}
            factor = bad if world.rank == 1 else 1.0
            optimizer.backward(internevo_loss(model(internevo_batch(0, 0, world.rank))) * factor)
            done, norms = optimizer.step()
            after = npuzero.full_state_dict(model, rank0_only=False)
            assert done is not all(torch.equal(before[name], after[name]) for name in before)
            found.append((done, *norms.values()))
        assert optimizer.loss_scale.tolist() == [1.0]
        return found

    for (good, first), nan, also, (again, last) in run_threads(2, body):
        assert (good, again) == (True, True)
        assert first > 0 and last > 0
        assert nan == also == (False, -2.0)  # inf * 0 where tanh is flat, or inf - inf: a NaN is among them


def test_without_clipping_no_norm_is_told():
    def body(world: World) -> Any:
        model, optimizer = build_hybrid_optimizer(world)
        optimizer.backward(internevo_loss(model(internevo_batch(0, 0, 0))))
        return optimizer.step()

    assert run_threads(1, body) == [(True, {})]


def test_its_state_goes_on_where_it_was():
    def body(world: World) -> None:
        runs = []
        for stop in (False, True):
            scaler = npuzero.LossScaler(init_scale=2.0**10, growth_interval=1)
            model, optimizer = build_hybrid_optimizer(world, scaler=scaler, clip_grad_norm=1.0)
            for step in range(4):
                if stop and step == 2:
                    state, weights = (
                        copy.deepcopy(optimizer.state_dict()),
                        npuzero.full_state_dict(model, rank0_only=False),
                    )
                    fresh, optimizer = build_hybrid_optimizer(world, scaler=npuzero.LossScaler(), clip_grad_norm=1.0)
                    npuzero.load_full_state_dict(fresh, weights)
                    optimizer.load_state_dict(state)
                    model = fresh
                optimizer.backward(internevo_loss(model(internevo_batch(step, 0, world.rank))))
                assert optimizer.step()[0]
            runs.append((optimizer.loss_scale.item(), npuzero.full_state_dict(model, rank0_only=False)))
        (scale, straight), (resumed, again) = runs
        assert scale == resumed == 2.0**14
        assert all(torch.equal(straight[name], again[name]) for name in straight)

    run_threads(2, body)


def test_torchs_schedulers_and_copies_take_it():
    def body(world: World) -> None:
        model, optimizer = build_hybrid_optimizer(world)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        optimizer.backward(internevo_loss(model(internevo_batch(0, 0, 0))))
        optimizer.step()
        schedule.step()
        assert optimizer.optim.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 5e-3
        assert "AdamW" in repr(optimizer)
        with pytest.raises(AttributeError, match="no_such"):
            optimizer.no_such  # noqa: B018

    run_threads(1, body)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1"])
def test_what_is_no_norm_to_clip_to_is_refused(value):
    with pytest.raises(ConfigError, match="clip_grad_norm"):
        run_threads(1, lambda world: build_hybrid_optimizer(world, clip_grad_norm=value))


def test_a_closure_no_gradient_and_a_foreign_state_are_refused():
    def body(world: World) -> None:
        _, optimizer = build_hybrid_optimizer(world, clip_grad_norm=1.0)
        with pytest.raises(StateError, match="no closure"):
            optimizer.step(lambda: None)
        with pytest.raises(StateError):
            optimizer.step()
        for state in ({}, [], {"grad_scaler": {}, "base_optim_states": {}, "flat_fp32_weights": {}}):
            with pytest.raises(CheckpointError, match="state_dict"):
                optimizer.load_state_dict(state)

    run_threads(1, body)
