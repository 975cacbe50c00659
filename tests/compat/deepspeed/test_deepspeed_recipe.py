"""What a configuration comes to: the batch, the plan, settings, the optimizer and the schedule."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import npuzero
from npuzero.compat.deepspeed import EngineRecipe, explain
from npuzero.compat.deepspeed.batch import complete_batch_sizes
from npuzero.compat.deepspeed.makers import SCHEDULES, choose_optimizer_maker
from npuzero.compat.rules import Decision
from npuzero.errors import ConfigError
from npuzero.plan import Memory, Placement

BASE = {"train_micro_batch_size_per_gpu": 2}
REFUSED, NOTED = Decision.REFUSED, Decision.NOTED


def explained_recipe(world: int = 4, **more: Any) -> EngineRecipe:
    return EngineRecipe.of(explain(BASE | more, world=world), world)


def refused_entries(world: int = 4, **more: Any) -> dict[str, str]:
    return {entry.path: entry.words for entry in explain(BASE | more, world=world).decided(REFUSED)}


def decision_of_key(path: str, **more: Any) -> Decision:
    return next(entry.decision for entry in explain(BASE | more, world=4).entries if entry.path == path)


# -- the batch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "batch"),
    [
        ((24, 3, 2), (24, 3, 2)),
        ((24, 3, None), (24, 3, 2)),
        ((24, None, 2), (24, 3, 2)),
        ((None, 3, 2), (24, 3, 2)),
        ((24, None, None), (24, 6, 1)),
        ((None, 3, None), (12, 3, 1)),
    ],
)
def test_the_six_ways_to_say_a_batch(said, batch):
    found = complete_batch_sizes(*said, 4)
    assert (found.total, found.micro, found.accumulation) == batch


def test_each_triple_is_taken_or_refused_as_by_deepspeed():
    config = pytest.importorskip("deepspeed.runtime.config", exc_type=ImportError)
    values = (None, -4, 0, 1, 2, 3, 4, 6, 12)
    taken = 0
    for total, micro, accumulation, world in itertools.product(values, values, values, (1, 2, 3)):
        theirs: Any = SimpleNamespace(
            train_batch_size=total, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=accumulation,
            world_size=world,
        )  # fmt: skip
        try:
            config.DeepSpeedConfig._set_batch_related_parameters(theirs)
            config.DeepSpeedConfig._batch_assertion(theirs)
        except (AssertionError, ZeroDivisionError):
            with pytest.raises(ConfigError):
                complete_batch_sizes(total, micro, accumulation, world)
            continue
        found = complete_batch_sizes(total, micro, accumulation, world)
        expected = (theirs.train_batch_size, theirs.train_micro_batch_size_per_gpu, theirs.gradient_accumulation_steps)
        assert (found.total, found.micro, found.accumulation) == expected, (total, micro, accumulation, world)
        taken += 1
    assert taken > 100


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"gradient_accumulation_steps": 2}, "train_batch_size"),
        ({}, "train_batch_size"),
        ({"train_batch_size": 7}, "train_batch_size"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 16}, "gradient_accumulation_steps"),
        ({"train_batch_size": -8}, "train_batch_size"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_batch_size"),
        ({"train_micro_batch_size_per_gpu": 1.5}, "train_micro_batch_size_per_gpu"),
    ],
)
def test_a_bad_batch_is_refused_by_its_key(said, key):
    found = explain(said, world=4)
    assert [entry.path for entry in found.decided(REFUSED)] == [key]
    assert not [entry for entry in explain(said).decided(REFUSED) if "1.5" not in entry.words], "no world, no check"


# -- the plan ----------------------------------------------------------------------------------------------------------


def zero_section(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


@pytest.mark.parametrize("stage", range(4))
def test_a_stage_is_its_preset(stage):
    found = explained_recipe(**zero_section(stage=stage))
    assert found.plan == npuzero.Plan.preset(stage, precision="fp32") and found.stage == stage
    assert (
        explained_recipe(**zero_section(stage=stage), bf16={"enabled": True}).plan.precision
        == npuzero.PRECISIONS["bf16"]
    )


def test_no_section_is_stage_0_and_the_old_form_a_stage():
    assert explained_recipe().plan == npuzero.Plan.preset(0, precision="fp32")
    assert explained_recipe(zero_optimization=True).stage == 1 and explained_recipe(zero_optimization=False).stage == 0


@pytest.mark.parametrize(
    ("keys", "preset", "options"),
    [
        ({"zero_hpz_partition_size": 2}, "hpz", {"local_size": 2}),
        ({"mics_shard_size": 2}, "mics", {"local_size": 2}),
        ({"offload_optimizer": {"device": "cpu"}}, "offload3", {}),
        ({"cpu_offload": True}, "offload3", {}),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "x"}}, "infinity-states", {}),
        (
            {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme", "nvme_path": "x"}},
            "infinity",
            {},
        ),
    ],
)
def test_what_stage_3_says_beside_is_a_preset(keys, preset, options):
    found = explained_recipe(**zero_section(stage=3, **keys)).plan
    expected = npuzero.Plan.preset(preset, precision="fp32", **options)
    assert found.parts == expected.parts and found.local_size == expected.local_size


def test_thin_wires_are_those_of_zero_plus_plus():
    keys = {"stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    found = explained_recipe(**zero_section(**keys), bf16={"enabled": True}).plan
    assert found.precision == npuzero.Plan.preset("zero++", precision="bf16").precision
    for path in keys:
        if path != "stage":
            assert decision_of_key(f"zero_optimization.{path}", **zero_section(**{**keys, "stage": 2})) is NOTED


def test_parameters_off_the_device_take_states_along():
    plan = explained_recipe(**zero_section(stage=3, offload_param={"device": "cpu"})).plan
    assert plan.parameters.memory is plan.states.memory is plan.gradients.memory is Memory.HOST
    plan = explained_recipe(
        **zero_section(stage=3, offload_param={"device": "nvme"}, offload_optimizer={"device": "cpu"})
    ).plan
    assert plan.parameters.memory is Memory.NVME and plan.states.memory is Memory.HOST
    assert "stage 3" in refused_entries(**zero_section(stage=2, offload_param={"device": "cpu"}))[
        "zero_optimization.offload_param.device"
    ]  # fmt: skip


def test_a_part_of_the_states_rests_off_the_device():
    plan = explained_recipe(**zero_section(stage=3, offload_optimizer={"device": "cpu", "ratio": 0.25})).plan
    assert plan.states == Placement(("node", "local"), Memory.HOST, 0.25)
    assert not explained_recipe(
        **zero_section(stage=3, offload_optimizer={"device": "cpu", "ratio": 0})
    ).plan.states.far
    assert explained_recipe(activation_checkpointing={"cpu_checkpointing": True}).plan.activations.memory is Memory.HOST


def test_settings_move_no_bit_and_buckets_count_elements():
    keys = {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 5e8, "offload_optimizer": {"nvme_path": "there"}}
    found = explained_recipe(**zero_section(**keys), aio={"intra_op_parallelism": 2}, bf16={"enabled": True}).settings
    assert found == npuzero.Settings(overlap="parameters", bucket_bytes=10**9, io_threads=2, nvme_paths=("there",))
    assert explained_recipe(**zero_section(stage=2, reduce_bucket_size="auto")).settings == npuzero.Settings()


@pytest.mark.parametrize(
    ("more", "wire"),
    [
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, torch.float32),
        ({"fp16": {"enabled": True}, "communication_data_type": "fp16"}, torch.float16),
        ({"communication_data_type": "bf16"}, torch.bfloat16),
        ({"communication_data_type": None}, torch.float32),
    ],
)
def test_gradients_travel_in_the_dtype_said(more, wire):
    precision = explained_recipe(**more).plan.precision
    assert precision.wire_of(precision.parameter_of(torch.float32)) is wire


# -- precision ---------------------------------------------------------------------------------------------------------


def test_loss_scales_are_those_said():
    assert explained_recipe().scale is None and not explained_recipe().conduct.skips
    assert (
        explained_recipe(bf16={"enabled": True}).scale is None
        and explained_recipe(bf16={"enabled": True}).conduct.skips
    )
    assert explained_recipe(bfloat16={"enabled": True}).conduct.skips, "the old name"
    assert not explained_recipe(bf16={"enabled": True, "check_grad_overflow": False}).conduct.skips
    assert explained_recipe(fp16={"enabled": True, "loss_scale": 8}).scale == {
        "init_scale": 8.0,
        "floor": 8.0,
        "ceiling": 8.0,
    }
    assert explained_recipe(fp16={"enabled": True}).scale == {
        "init_scale": 2.0**16,
        "growth_interval": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "floor": 1,
        "growth_delay": 1,
    }
    npuzero.LossScaler(**explained_recipe(fp16={"enabled": True, "initial_scale_power": 0, "min_loss_scale": 4}).scale)


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled"),
        ({"communication_data_type": "fp16"}, "communication_data_type"),
        ({"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}}, "data_types.param_dtype"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        ({"amp": {"enabled": True}}, "amp"),
        ({"elasticity": {"enabled": True}}, "elasticity"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "scheduler.params.total_num_steps"),
        ({"scheduler": {"params": {"warmup_num_steps": 3}}}, "scheduler.type"),
        ({"scheduler": {"type": "WarmupRL"}}, "scheduler.type"),
        ({"scheduler": {"type": "Counter"}}, "scheduler.type"),
        ({"scheduler": {"type": "ReduceLROnPlateau"}}, "scheduler.type"),
        ({"scheduler": {"type": "StepLR", "params": {"step_size": 2, "total_num_steps": 3}}},
         "scheduler.params.total_num_steps"),
        ({"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}}, "optimizer.params.momentum"),
        ({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.99]}}}, "optimizer.params.betas"),
        ({"optimizer": {"params": {"lr": 0.1}}}, "optimizer.type"),
        ({"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}}, "optimizer.type"),
        ({"optimizer": {"type": "AdamV"}}, "optimizer.type"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, "optimizer.params.max_grad_norm"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused_by_its_key_with_a_way_out(more, path):
    found = refused_entries(**more)
    assert [*found] == [path] and len(found[path].split()) > 3


def test_what_has_been_removed_and_is_off_is_noted():
    assert decision_of_key("amp", amp={"enabled": False}) is NOTED
    assert decision_of_key("nebula", nebula={}) is NOTED
    assert decision_of_key("zero_optimization.offload_param", **zero_section(offload_param=None)) is NOTED


def test_version_traps_are_said():
    found = explain(BASE | {"bf16": {"enabled": True}}, world=1)
    traps = dict(found.traps())
    assert "1.0 since 0.19.3" in traps["gradient_clipping"] and found.value("gradient_clipping") == 1.0
    assert "since 0.19.3" in traps["bf16.check_grad_overflow"]
    found = explain({"optimizer": {"type": "Adam"}, "gradient_accumulation_steps": 2}, world=None)
    assert {"optimizer.type", "gradient_accumulation_steps"} <= dict(found.traps()).keys()


# -- optimizers and schedules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "params", "cls", "group"),
    [
        ("Adam", {"lr": 0.5}, npuzero.AdamW, {"lr": 0.5, "weight_decay": 0.0, "eps": 1e-8, "betas": (0.9, 0.999)}),
        ("adamw", {"weight_decay": 0.2}, npuzero.AdamW, {"lr": 1e-3, "weight_decay": 0.2}),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.2}, npuzero.Adam, {"weight_decay": 0.2}),
        ("AdamW", {"adam_w_mode": False}, npuzero.AdamW, {"weight_decay": 0.0}),
        ("AdamW", {"torch_adam": True}, npuzero.AdamW, {"weight_decay": 0.01}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, npuzero.Adam, {"weight_decay": 0}),
        ("AdamW", {"bias_correction": False}, npuzero.AdamW, {"bias_correction": False}),
        ("Lion", {}, npuzero.Lion, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        ("adagrad", {"lr": 0.3}, npuzero.ZeroOptimizer, {"lr": 0.3}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, npuzero.ZeroOptimizer, {"momentum": 0.9}),
    ],
)
def test_a_type_is_its_class_with_deepspeeds_defaults(kind, params, cls, group):
    maker, options = explained_recipe(optimizer={"type": kind, "params": params}).optimizer
    made = maker([torch.nn.Parameter(torch.zeros(3))], options)
    assert type(made) is cls
    assert {name: made.param_groups[0][name] for name in group} == group


def test_every_optimizer_of_deepspeed_is_made_or_has_a_way_out():
    config = pytest.importorskip("deepspeed.runtime.config", exc_type=ImportError)
    for kind in config.DEEPSPEED_OPTIMIZERS:
        maker = choose_optimizer_maker(kind, True, False)
        assert not isinstance(maker, str) or "Take AdamW" in maker, kind


def test_options_that_torch_refuses_are_errors_of_ours():
    maker, options = explained_recipe(optimizer={"type": "SGD", "params": {"lr": 0.1, "nesterov": True}}).optimizer
    with pytest.raises(ConfigError, match="Nesterov"):
        maker([torch.nn.Parameter(torch.zeros(3))], options)
    maker, options = explained_recipe(
        scheduler={"type": "CyclicLR", "params": {"base_lr": 0.1, "max_lr": "much"}}
    ).schedule
    with pytest.raises(ConfigError, match="CyclicLR"):
        maker(npuzero.AdamW([torch.nn.Parameter(torch.zeros(3))]), options)


def test_schedules_are_made_over_the_optimizer():
    params: dict[str, dict[str, Any]] = {
        "WarmupLR": {"warmup_num_steps": 10, "warmup_max_lr": 0.5, "warmup_type": "linear"},
        "WarmupDecayLR": {"total_num_steps": 20, "warmup_num_steps": 10, "warmup_max_lr": 0.5},
        "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 10},
        "LRRangeTest": {"lr_range_test_min_lr": 0.1},
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_momentum": False},
        "StepLR": {"step_size": 1, "gamma": 0.5},
    }
    assert {*SCHEDULES} < params.keys()
    for kind, options in params.items():
        optimizer = npuzero.AdamW([torch.nn.Parameter(torch.zeros(3))], lr=0.4)
        maker, given = explained_recipe(scheduler={"type": kind, "params": options}).schedule
        schedule = maker(optimizer, given)
        optimizer.step()
        schedule.step()
        assert 0 <= optimizer.param_groups[0]["lr"] <= 0.5 and schedule.optimizer is optimizer, kind
