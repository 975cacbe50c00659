"""The engine behaves as DeepSpeed's: boundaries, skipped updates, batch sizes, checkpoints, what clients pass."""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import npuzero
from compat.deepspeed.reference import DenseGPT
from npuzero import comm
from npuzero.comm import World
from npuzero.errors import CheckpointError, ConfigError, NonFiniteError, StateError
from world.toy import build_seeded_model, toy_loss, toy_tokens

LOW = {"bf16": {"enabled": True}}


def engine_config(stage: int = 2, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def initialize_engine(settings: dict[str, Any], **more: Any) -> Any:
    return npuzero.initialize(model=build_seeded_model(make=DenseGPT), config=settings, **more).engine


def engine_backward(engine: Any, step: int, rank: int, times: float = 1.0) -> Tensor:
    """A pass; the loss that backward() gives back."""
    return engine.backward(toy_loss(engine, toy_tokens(step, 0, rank)) * times)


def full_engine_weights(engine: Any) -> dict[str, Tensor]:
    return npuzero.full_state_dict(engine.module, rank0_only=False)


def weights_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def run_two_ranks(fn: Any) -> list[Any]:
    return comm.run_threads(2, fn)


def test_updates_come_at_the_last_pass_of_a_step():
    def rank(world: World) -> list[Any]:
        engine = initialize_engine(engine_config(accumulation=3), auto={})
        seen = []
        for step in range(6):
            before = full_engine_weights(engine)
            loss = toy_loss(engine, toy_tokens(step, 0, world.rank))
            assert engine.backward(loss).item() == pytest.approx(loss.item() / 3)
            due = engine.is_gradient_accumulation_boundary()
            engine.step()
            assert engine.was_step_applied() is due is not weights_equal(before, full_engine_weights(engine))
            seen.append(due)
        assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (6, 2, 24)
        assert engine.get_global_grad_norm() > 0 and engine.get_lr() == [1e-2] and engine.get_mom() == [(0.9, 0.999)]
        return seen

    assert run_two_ranks(rank)[0] == [False, False, True] * 2


def test_a_program_may_own_the_boundary():
    def rank(world: World) -> tuple[int, int]:
        engine = initialize_engine(engine_config(accumulation=4, managed_gradient_accumulation=False))
        for step in range(3):
            engine_backward(engine, step, world.rank)
            assert not engine.is_gradient_accumulation_boundary()
        engine.step()
        with pytest.raises(StateError, match="managed_gradient_accumulation"):
            engine.set_gradient_accumulation_boundary(True)
        said = initialize_engine(engine_config(accumulation=4))
        said.set_gradient_accumulation_boundary(False)
        for step in range(2):
            engine_backward(said, step, world.rank)
            said.step()
        said.set_gradient_accumulation_boundary(True)
        said.step()
        assert (said.global_steps, said.micro_steps) == (1, 3)
        return engine.global_steps, engine.global_samples

    assert run_two_ranks(rank) == [(1, 12)] * 2


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("precision", "skips"),
    [
        (LOW, True),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, False),
        ({"fp16": {"enabled": True, "loss_scale": 64}}, True),
        ({"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}, True),
    ],
    ids=["bf16", "unchecked", "static", "dynamic"],
)
def test_what_overflows_on_one_rank_is_skipped_on_all(stage, precision, skips):
    def rank(world: World) -> None:
        schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        engine = initialize_engine(engine_config(stage, **precision), lr_scheduler=schedule)
        engine_backward(engine, 0, world.rank)
        engine.step()
        before, rates = full_engine_weights(engine), engine.get_lr()
        engine_backward(engine, 1, world.rank, math.inf if world.rank else 1.0)
        engine.step()
        assert engine.was_step_applied() is not skips and engine.skipped_steps == int(skips)
        assert engine.global_steps == 2 and weights_equal(before, full_engine_weights(engine)) is skips
        assert engine.get_lr() == (rates if skips else [rates[0] / 2])
        if engine.scaler is not None:
            assert engine.scaler.get_scale() == (64.0 if "loss_scale" in precision["fp16"] else 2.0**7)

    run_two_ranks(rank)


def test_a_parameter_without_a_gradient_may_be_an_error():
    def rank(world: World) -> None:
        net = build_seeded_model(make=DenseGPT)
        net.spare = nn.Linear(2, 2)
        said = engine_config(2) | {"zero_optimization": {"stage": 2, "ignore_unused_parameters": False}}
        engine = npuzero.initialize(model=net, config=said).engine
        engine_backward(engine, 0, world.rank)
        with pytest.raises(StateError, match=r"spare\.weight"):
            engine.step()

    run_two_ranks(rank)


def test_an_overflow_at_the_least_scale_ends_the_run():
    def rank(world: World) -> None:
        least = {"enabled": True, "initial_scale_power": 1, "min_loss_scale": 2, "hysteresis": 2}
        engine = initialize_engine(engine_config(1, fp16=least))
        engine_backward(engine, 0, world.rank, math.inf)
        engine.step()  # hysteresis allows one
        engine_backward(engine, 0, world.rank, math.inf)
        with pytest.raises(NonFiniteError, match="least one, 2"):
            engine.step()

    run_two_ranks(rank)


def test_batch_sizes_change_by_passes_or_by_the_micro_batch():
    def rank(world: World) -> None:
        engine = initialize_engine(engine_config(accumulation=2))
        assert (engine.train_batch_size(), engine.dp_world_size, engine.world_size) == (8, 2, 2)
        engine.set_train_batch_size(16)
        assert engine.gradient_accumulation_steps() == 4 and engine.train_micro_batch_size_per_gpu() == 2
        with pytest.raises(ConfigError, match="a multiple of 4"):
            engine.set_train_batch_size(18)
        engine.set_train_micro_batch_size(3)
        assert engine.train_batch_size() == 24 and engine.gradient_accumulation_steps() == 4
        with pytest.raises(ConfigError, match="train_batch_size"):
            engine.set_train_micro_batch_size(0)
        assert engine.zero_optimization_stage() == 2 and engine.gradient_clipping() == 0
        assert not engine.fp16_enabled() and not engine.bfloat16_enabled() and engine.device.type == "cpu"
        assert engine.global_rank == world.rank

    run_two_ranks(rank)


def test_calls_out_of_turn_are_errors():
    def rank(world: World) -> None:
        engine = initialize_engine(engine_config(2))
        with pytest.raises(StateError, match=r"engine.backward\(loss\) before it"):
            engine.step()
        with pytest.raises(ConfigError, match="a scalar tensor"):
            engine.backward(torch.ones(3))
        with pytest.raises(StateError, match="stage 0 or 1"), engine.no_sync():
            pass
        plain = initialize_engine(engine_config(1))
        with plain.no_sync():
            engine_backward(plain, 0, world.rank)
            with pytest.raises(StateError, match="no_sync"):
                plain.step()
        engine_backward(plain, 1, world.rank)
        plain.step()
        engine.destroy()

    run_two_ranks(rank)


def test_a_loss_may_be_scaled_and_run_by_the_program():
    def rank(world: World) -> None:
        one, other = (
            initialize_engine(engine_config(1, 2, fp16={"enabled": True, "loss_scale": 32})) for _ in range(2)
        )
        for step in range(4):
            engine_backward(one, step, world.rank)
            other.scale(toy_loss(other, toy_tokens(step, 0, world.rank))).backward()
            one.step()
            other.step()
        assert one.global_steps == 2 and weights_equal(full_engine_weights(one), full_engine_weights(other))

    run_two_ranks(rank)


def test_what_the_engine_has_not_the_model_has():
    engine = npuzero.initialize(
        model=build_seeded_model(make=DenseGPT), config=engine_config(0, torch_autocast={"enabled": True})
    ).engine
    assert engine.head is engine.module.head and [*engine.parameters()] == [*engine.module.parameters()]
    assert engine.eval() is engine and not engine.module.training and engine.train().module.training
    assert engine(toy_tokens(0, 0, 0)).dtype is torch.bfloat16, "under torch.autocast"
    with pytest.raises(AttributeError, match="wrong"):
        _ = engine.wrong
    assert "refused=0" in repr(engine.translation)


@pytest.mark.parametrize(("saves", "loads"), [(1, 3), (3, 2)])
def test_a_checkpoint_goes_on_under_another_stage(saves, loads, tmp_path):
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8, "warmup_type": "linear"}}
    fp16 = {"enabled": True, "initial_scale_power": 4}

    def run(engine: Any, steps: range, rank: int) -> None:
        for step in steps:
            engine_backward(engine, step, rank)
            engine.step()

    def rank(world: World) -> None:
        engine = initialize_engine(engine_config(saves, fp16=fp16, scheduler=schedule))
        assert engine.load_checkpoint(tmp_path) == (None, None), "there is none, and nobody has named one"
        run(engine, range(2), world.rank)
        assert engine.save_checkpoint(tmp_path, client_state={"epoch": 7, "seen": [1, "two"]})
        engine.save_checkpoint(tmp_path, "apart", save_latest=False)
        run(engine, range(2, 4), world.rank)

        other = initialize_engine(engine_config(loads, fp16=fp16, scheduler=schedule))
        path, client_state = other.load_checkpoint(tmp_path)
        assert "global_step2" in path and client_state == {"epoch": 7, "seen": [1, "two"]}
        assert (other.global_steps, other.global_samples, other.micro_steps) == (2, 8, 2)
        run(other, range(2, 4), world.rank)
        assert other.get_lr() == engine.get_lr()
        for name, value in full_engine_weights(engine).items():
            torch.testing.assert_close(full_engine_weights(other)[name], value)

        bare = initialize_engine(engine_config(loads, fp16=fp16, scheduler=schedule))
        _, client_state = bare.load_checkpoint(tmp_path, "apart", load_module_only=True)
        assert client_state == {} and bare.global_steps == 0 and bare.get_lr() != engine.get_lr()
        with pytest.raises(ConfigError, match="one tag"):
            engine.save_checkpoint(tmp_path, f"mine{world.rank}")

    run_two_ranks(rank)


def test_deepspeeds_own_checkpoints_are_refused_with_a_way_out(tmp_path):
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "global_step1" / "mp_rank_00_model_states.pt").touch()
    engine = npuzero.initialize(model=build_seeded_model(make=DenseGPT), config=engine_config(0)).engine
    with pytest.raises(CheckpointError, match="zero_to_fp32"):
        engine.load_checkpoint(tmp_path, "global_step1")


def test_weights_that_are_not_to_be_gathered_are_not_saved_in_silence(tmp_path):
    def rank(world: World) -> None:
        assert initialize_engine(engine_config(3, **LOW)).save_16bit_model(tmp_path) is False and not [
            *tmp_path.iterdir()
        ]

    with pytest.warns(UserWarning, match="wrote nothing .* lacks .*stage3_gather_16bit_weights_on_model_save: true"):
        comm.run_threads(2, rank)


def test_weights_are_saved_for_others(tmp_path):
    def rank(world: World) -> None:
        engine = initialize_engine(
            engine_config(3, **LOW)
            | {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}
        )
        assert engine.save_16bit_model(tmp_path) and engine.save_16bit_model(tmp_path, "model.safetensors")
        engine.module.head.bias.requires_grad_(False)
        assert engine.save_16bit_model(tmp_path, "some.bin", exclude_frozen_parameters=True)
        plain = build_seeded_model(make=DenseGPT).bfloat16()
        state = torch.load(tmp_path / "pytorch_model.bin")
        plain.load_state_dict(state)
        assert weights_equal(dict(plain.state_dict()), full_engine_weights(engine))
        assert state.keys() - torch.load(tmp_path / "some.bin").keys() == {"head.bias"}
        world.exchange(None)

    run_two_ranks(rank)
    from safetensors.torch import load_file

    assert load_file(tmp_path / "model.safetensors").keys() == build_seeded_model(make=DenseGPT).state_dict().keys()


def test_a_dataset_is_divided_over_the_ranks():
    def rank(world: World) -> tuple[list[int], int]:
        options = {"collate_fn": lambda samples: torch.stack([value for (value,) in samples])}
        options |= {"training_data": TensorDataset(torch.arange(18))}
        config = engine_config() | {"dataloader_drop_last": True}
        made = npuzero.initialize(model=build_seeded_model(make=DenseGPT), config=config, **options)
        return torch.cat([*made.training_dataloader]).tolist(), len(made.training_dataloader)

    (one, batches), (other, _) = run_two_ranks(rank)
    assert batches == 4 and len(one) == len(other) == 8 and len({*one, *other}) == 16
    with pytest.raises(ConfigError, match="training_data"):
        npuzero.initialize(model=build_seeded_model(make=DenseGPT), config=engine_config(), training_data=3)


def test_clients_optimizers_and_schedules_are_taken_over():
    """The same numbers as by plain torch; a schedule over the client's optimizer moves npuzero's."""

    def groups(net: nn.Module) -> list[dict[str, Any]]:
        decay = [p for p in net.parameters() if p.dim() > 1]
        return [{"params": decay}, {"params": [p for p in net.parameters() if p.dim() <= 1], "lr": 3e-3}]

    def rank(world: World) -> None:
        bare = {key: value for key, value in engine_config().items() if key != "optimizer"}
        for kind, options in ((torch.optim.AdamW, {"eps": 1e-3}), (torch.optim.SGD, {"momentum": 0.9})):
            plain, net = build_seeded_model(make=DenseGPT), build_seeded_model(make=DenseGPT)
            mine = kind(groups(plain), lr=1e-2, **options)
            theirs = kind(groups(net), lr=1e-2, **options)
            mine_schedule, schedule = (
                torch.optim.lr_scheduler.SequentialLR(
                    each,
                    [
                        torch.optim.lr_scheduler.ConstantLR(each, 0.5, 1),
                        torch.optim.lr_scheduler.ExponentialLR(each, 0.7),
                    ],
                    [1],
                )
                for each in (mine, theirs)
            )
            engine, optimizer, _, returned = npuzero.initialize(
                model=net, optimizer=theirs, lr_scheduler=schedule, config=bare
            )
            assert returned is schedule and optimizer is theirs and len(optimizer.param_groups) == 2
            for step in range(3):
                engine_backward(engine, step, world.rank)
                engine.step()
                torch.stack([toy_loss(plain, toy_tokens(step, 0, each)) for each in range(2)]).mean().backward()
                mine.step()
                mine.zero_grad()
                mine_schedule.step()
            assert engine.get_lr() == pytest.approx([group["lr"] for group in mine.param_groups])
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(full_engine_weights(engine)[name], value, rtol=1e-5, atol=1e-6)

    run_two_ranks(rank)


def test_a_clients_state_may_have_what_programs_usually_have(tmp_path):
    counts = defaultdict(int, seen=3)
    state = {"best": numpy.float64(0.5), "at": [numpy.int64(2)], "counts": counts}
    state["args"] = argparse.Namespace(lr=numpy.float32(0.25))
    engine = initialize_engine(engine_config(0))
    engine.save_checkpoint(tmp_path, client_state=state)
    _, loaded = engine.load_checkpoint(tmp_path)
    assert loaded == {"best": 0.5, "at": [2], "args": {"lr": 0.25}, "counts": {"seen": 3}}


def test_what_neither_engine_nor_model_has_is_not_the_models_fault():
    engine = initialize_engine(engine_config(0))
    with pytest.raises(AttributeError, match=r"engine has no attribute 'get_lrs', and neither has the .* 'get_lr'"):
        _ = engine.get_lrs
    assert engine.head is engine.module.head and not hasattr(engine, "nothing")


def test_functions_may_make_optimizer_and_schedule():
    bare = {key: value for key, value in engine_config(0).items() if key != "optimizer"}
    net = build_seeded_model(make=DenseGPT)
    engine, optimizer, loader, schedule = npuzero.initialize(
        model=net,
        model_parameters=[{"params": [net.head.weight], "lr": 0.25}],
        optimizer=lambda parameters: npuzero.AdamW(parameters, lr=0.5),
        lr_scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1),
        config=bare,
    )
    assert schedule.optimizer is optimizer and loader is None and engine.lr_scheduler is schedule
    assert engine.get_lr() == [0.25], "model_parameters are what trains"


def test_a_schedule_is_never_orphaned():
    net, other = build_seeded_model(make=DenseGPT), build_seeded_model(make=DenseGPT)
    bare = {key: value for key, value in engine_config(0).items() if key != "optimizer"}
    stranger = torch.optim.lr_scheduler.StepLR(torch.optim.AdamW(other.parameters()), 1)
    with pytest.raises(ConfigError, match="lr_scheduler"):
        npuzero.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), lr_scheduler=stranger, config=bare)


@pytest.mark.parametrize("stage", [0, 3])
def test_rates_that_are_written_into_the_clients_groups_count(stage):
    """As MAE's and BEiT's loops write them; the schedule keeps its own keys in the groups, and the state goes on."""
    plain, net = build_seeded_model(make=DenseGPT), build_seeded_model(make=DenseGPT)
    made = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, net)]
    for each, optimizer in zip((plain, net), made, strict=True):
        toy_loss(each, toy_tokens(0, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    schedules = [torch.optim.lr_scheduler.OneCycleLR(each, 0.1, total_steps=9) for each in made]
    bare = {key: value for key, value in engine_config(stage).items() if key != "optimizer"}
    engine, *_ = npuzero.initialize(model=net, optimizer=made[1], lr_scheduler=schedules[1], config=bare)
    for step, scale in enumerate((0.5, 0.0)):
        for optimizer in made:
            for group in optimizer.param_groups:
                group["lr"] *= scale
        engine.backward(toy_loss(engine, toy_tokens(step, 0, 0)))
        engine.step()
        toy_loss(plain, toy_tokens(step, 0, 0)).backward()
        made[0].step()
        made[0].zero_grad()
        schedules[0].step()
    assert engine.get_lr() == [group["lr"] for group in made[0].param_groups] == schedules[0].get_last_lr()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(full_engine_weights(engine)[name], value, rtol=1e-5, atol=1e-6)


def test_a_trainers_arguments_fill_what_is_left_to_auto(tmp_path):
    auto = "auto"
    said = {
        "train_batch_size": auto,
        "train_micro_batch_size_per_gpu": auto,
        "gradient_accumulation_steps": auto,
        "gradient_clipping": auto,
        "bf16": {"enabled": auto},
        "fp16": {"enabled": auto},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), auto)},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), auto),
        },
    }
    args = SimpleNamespace(
        per_device_train_batch_size=3, gradient_accumulation_steps=2, max_grad_norm=0.7, learning_rate=2e-3,
        adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-5, weight_decay=0.3, warmup_steps=4, max_steps=9, bf16=True,
        fp16=False, deepspeed_config=None,
    )  # fmt: skip
    engine = npuzero.initialize(args, build_seeded_model(make=DenseGPT), config=said).engine
    (group,) = engine.optimizer.param_groups
    assert [group[name] for name in ("betas", "eps", "weight_decay")] == [(0.8, 0.9), 1e-5, 0.3]
    assert (engine.train_batch_size(), engine.gradient_clipping(), engine.bfloat16_enabled()) == (6, 0.7, True)
    with pytest.raises(ConfigError) as caught:
        npuzero.initialize(model=build_seeded_model(make=DenseGPT), config=said)
    refused = {*caught.value.facts["refused"]}
    assert {"bf16.enabled", "optimizer.params.lr", "scheduler.params.total_num_steps"} < refused


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True, "check_grad_overflow": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2])
def test_only_what_is_optimized_counts(stage, more):
    """Of a head that is trained alone: its norm, clipped and measured, its overflow, whatever the rest's gradients."""

    def rank(world: World) -> list[Any]:
        net = build_seeded_model(make=DenseGPT)
        head = [net.get_parameter(name) for name, _ in net.named_parameters() if name.startswith("head")]
        said = engine_config(stage, gradient_clipping=0.1, optimizer={"type": "SGD", "params": {"lr": 0.0}}, **more)
        engine = npuzero.initialize(model=net, model_parameters=head, config=said).engine
        norms = []
        for _ in range(3):
            engine_backward(engine, 0, world.rank)
            engine.step()
            norms.append(engine.get_global_grad_norm())
        return norms

    for norms in run_two_ranks(rank):
        assert len(set(norms)) == 1 and norms[0] > 0


def test_an_optimizer_of_another_model_is_refused():
    other = torch.optim.SGD(build_seeded_model(make=DenseGPT).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="none of which it has"):
        npuzero.initialize(model=build_seeded_model(make=DenseGPT), optimizer=other, config=engine_config())
    with pytest.raises(ConfigError, match="none of which it has"):
        foreign = nn.Linear(2, 2).parameters()
        npuzero.initialize(model=build_seeded_model(make=DenseGPT), model_parameters=foreign, config=engine_config())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "one configuration"),
        ({"config": engine_config(), "config_params": engine_config()}, "2 of them"),
        ({"config": 3}, "a dict, or the path"),
        ({"config": "nowhere.json"}, "nowhere.json"),
        ({"config": {"train_batch_size": 4}, "model_parameters": []}, "an optimizer beside model_parameters="),
        ({"config": {"train_batch_size": 4}, "lr_scheduler": print}, "an optimizer beside lr_scheduler="),
        ({"config": engine_config(), "mpu": 1}, "mpu"),
        ({"config": engine_config() | {"gradient_cliping": 1}}, "gradient_clipping"),
    ],
)
def test_what_cannot_begin_says_why(options, match):
    with pytest.raises(ConfigError, match=match):
        npuzero.initialize(model=build_seeded_model(make=DenseGPT), **options)
    with pytest.raises(ConfigError, match=r"a torch\.nn\.Module"):
        npuzero.initialize(config=engine_config())
