"""accelerate's door: the weights of DistributedDataParallel, states that go on, and what is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import npuzero
from frameworks.toys import (
    BOUND,
    ROOT,
    build_framework_net,
    build_regression_loader,
    distance_from_start,
    max_difference,
    regression_rows,
)
from npuzero import adopt

pytest.importorskip("accelerate")

from accelerate import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DDPCommunicationHookType

from frameworks.accelerate_ranks import AccelerateTraining
from npuzero.accelerate import ZeroAccelerator
from test_docstrings import find_example

FP16 = DDPCommunicationHookType.FP16
RANKS = ROOT / "tests" / "frameworks" / "accelerate_ranks.py"
INPUTS, TARGETS = (tensor[:16] for tensor in regression_rows().tensors)
QUICK = ("1-no-4", "3-bf16-1", "3-fp16-4")
CELLS = ("-".join(cell) for cell in itertools.product("0123", ("no", "bf16", "fp16"), "14"))
REST = tuple(cell for cell in CELLS if cell not in QUICK)


@pytest.fixture
def accelerator() -> Iterator[Callable[..., ZeroAccelerator]]:
    def make(**options: Any) -> ZeroAccelerator:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        return ZeroAccelerator(cpu=True, **options)

    yield make
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.world
@pytest.mark.parametrize("cell", [*QUICK, *(pytest.param(cell, marks=pytest.mark.slow) for cell in REST)])
def test_two_ranks_train_as_under_ddp_and_go_on_from_a_state(cell: str, cases: Callable[[str], Path]) -> None:
    """Accumulation, clipping, a scheduler, mixed precision, evaluation over all ranks."""
    found = torch.load(cases(cell) / f"{cell}.pt", weights_only=True)
    ddp, zero, resumed = (found[name] for name in ("ddp", "zero", "resumed"))
    assert distance_from_start(zero["weights"]) > 1e-2
    assert max_difference(ddp["weights"], zero["weights"]) < BOUND
    assert zero["loss"] == pytest.approx(ddp["loss"], abs=BOUND)
    assert zero["rates"] == zero["last"] == ddp["last"] != [1e-2]
    assert max_difference(resumed["weights"], zero["weights"]) == 0
    assert resumed["rates"] == zero["rates"]


@pytest.mark.world
@pytest.mark.parametrize(("cell", "passes"), [("1-no-4", 1), ("3-bf16-1", 1), ("3-fp16-4", 2)])
def test_accumulation_sends_once_a_step_where_gradients_are_kept_unsharded(
    cell: str, passes: int, cases: Callable[[str], Path]
) -> None:
    """An epoch has six batches a rank, so a step of four is followed by one of two."""
    found = torch.load(cases(cell) / f"{cell}.pt", weights_only=True)
    foreseen = npuzero.predict(build_framework_net(), int(cell[0]), world=2, micro_batches=passes).bytes_sent
    assert found["zero"]["sent"]["reduce_scatter"] == foreseen["reduce_scatter"] > 0


@pytest.mark.world
def test_a_state_of_two_ranks_goes_on_on_one(
    cases: Callable[[str], Path], accelerator: Callable[..., ZeroAccelerator]
) -> None:
    folder = cases(QUICK[0])
    one = AccelerateTraining(accelerator(zero={"stage": 2}, gradient_accumulation_steps=4))
    one.accelerator.load_state(str(folder / f"{QUICK[0]}.state"))
    saved = torch.load(folder / f"{QUICK[0]}.pt", weights_only=True)["resumed"]["saved"]
    assert max_difference(one.accelerator.get_state_dict(one.model), saved) == 0
    assert one.scheduler.get_last_lr() != [1e-2]
    one.epoch()
    assert max_difference(one.accelerator.get_state_dict(one.model), saved) > 1e-3


def test_there_is_no_wrapper_and_the_order_of_prepare_does_not_matter(
    accelerator: Callable[..., ZeroAccelerator],
) -> None:
    made = accelerator()
    plain = build_framework_net()
    optimizer, model = made.prepare(torch.optim.AdamW(plain.parameters()), plain)
    assert model is plain and made.unwrap_model(model) is plain and adopt.is_sharded(plain)
    assert isinstance(optimizer.optimizer, npuzero.AdamW)
    assert made.prepare(model) is model
    with pytest.raises(npuzero.StateError, match=r"npuzero\.full_state_dict"):
        model.state_dict()
    assert model.to(made.device) is model and model.cpu() is model
    with pytest.raises(npuzero.StateError, match="before npuzero"):
        model.to("meta")


def test_a_model_for_evaluation_stays_whole_until_it_is_to_train(accelerator: Callable[..., ZeroAccelerator]) -> None:
    made = accelerator()
    model = made.prepare_model(build_framework_net(), evaluation_mode=True)
    assert not adopt.is_sharded(model) and model.state_dict()
    assert adopt.is_sharded(made.prepare(model))


def test_a_scheduler_comes_with_its_optimizer(accelerator: Callable[..., ZeroAccelerator]) -> None:
    made = accelerator()
    model = made.prepare(build_framework_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(npuzero.ConfigError, match="nobody has prepared"):
        made.prepare(scheduler)
    prepared, scheduler = made.prepare(optimizer, scheduler)
    assert scheduler.scheduler.optimizer is prepared.optimizer is optimizer


@pytest.mark.parametrize("size", ["10GB", 1000])
def test_weights_are_saved_as_safetensors_in_files_of_a_size(
    size: str | int, accelerator: Callable[..., ZeroAccelerator], tmp_path: Path
) -> None:
    made = accelerator()
    model = made.prepare(build_framework_net())
    made.save_model(model, tmp_path, max_shard_size=size)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (size == 1000)
    assert (
        max_difference(
            {name: value for file in files for name, value in load_file(file).items()},
            build_framework_net().state_dict(),
        )
        == 0
    )


def test_what_a_script_registers_is_saved_beside(accelerator: Callable[..., ZeroAccelerator], tmp_path: Path) -> None:
    class Counter:
        count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    made = accelerator()
    model, counter, seen = made.prepare(build_framework_net()), Counter(), []
    teacher = made.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
    made.register_for_checkpointing(counter)
    made.register_save_state_pre_hook(lambda models, weights, folder: seen.append((models, len(weights), folder)))
    counter.count = 7
    with torch.no_grad():
        teacher.weight.fill_(2)
    made.save_state(str(tmp_path))
    counter.count = 0
    with torch.no_grad():
        teacher.weight.fill_(3)
    made.load_state(str(tmp_path))
    assert counter.count == 7 and teacher.weight.eq(2).all()
    assert seen == [([model, teacher], 1, str(tmp_path))]


def test_two_optimizers_of_one_model_are_saved_and_loaded(
    accelerator: Callable[..., ZeroAccelerator], tmp_path: Path
) -> None:
    def training() -> tuple[ZeroAccelerator, nn.Module, list[Any]]:
        made, model = accelerator(), build_framework_net()
        first, rest = list(model[0].parameters()), [p for block in model[1:] for p in block.parameters()]
        parts = (torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2))
        model, *optimizers = made.prepare(model, *parts)
        return made, model, optimizers

    def steps(made: ZeroAccelerator, model: nn.Module, optimizers: list[Any]) -> None:
        for inputs, targets in build_regression_loader():
            made.backward(nn.functional.mse_loss(model(inputs), targets))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    first = training()
    steps(*first)
    first[0].save_state(str(tmp_path))
    steps(*first)
    second = training()
    second[0].load_state(str(tmp_path))
    steps(*second)
    assert max_difference(first[0].get_state_dict(first[1]), second[0].get_state_dict(second[1])) == 0


def test_a_step_that_overflows_is_told_and_no_step_of_the_schedule(
    accelerator: Callable[..., ZeroAccelerator],
) -> None:
    training = AccelerateTraining(accelerator(mixed_precision="fp16"))
    made, model = training.accelerator, training.model
    inputs, targets = next(iter(training.loader))
    skipped = []
    for factor in (1.0, float("inf"), 1.0):
        made.backward(nn.functional.mse_loss(model(inputs), targets) * factor)
        training.optimizer.step()
        skipped.append(made.optimizer_step_was_skipped)
        training.scheduler.step()
        training.optimizer.zero_grad()
    assert skipped == [False, True, False]
    assert training.scheduler.scheduler.last_epoch == 2
    assert made.scaler.get_scale() == 2.0**15


def test_clipping_is_of_the_parameters_that_are_given(accelerator: Callable[..., ZeroAccelerator]) -> None:
    made = accelerator()
    reference = build_framework_net()
    model = made.prepare(copy.deepcopy(reference))
    for each in (model, reference):
        nn.functional.mse_loss(each(INPUTS), TARGETS).backward()
    part = made.clip_grad_norm_(model[0].parameters(), 1e-2)
    torch.testing.assert_close(part, nn.utils.clip_grad_norm_(reference[0].parameters(), 1e-2))
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(npuzero.full_gradient(found), expected.grad)
    norm = made.clip_grad_norm_(model.parameters(), 0.1)
    made.clip_grad_value_(model.parameters(), 1e-3)
    assert norm > 0.1 and npuzero.full_gradient(model[0].weight).abs().max() <= 1e-3
    plain = nn.Linear(1, 1)
    plain(torch.ones(1, 1)).sum().backward()
    assert made.clip_grad_norm_(plain.parameters(), 1.0) == pytest.approx(2**0.5)


def test_uneven_inputs_are_refused(accelerator: Callable[..., ZeroAccelerator]) -> None:
    made = accelerator()
    model = made.prepare(build_framework_net())
    with made.join_uneven_inputs([model]):
        model(INPUTS)
    with pytest.raises(npuzero.ConfigError, match="as many batches"), made.join_uneven_inputs([model], False):
        pass


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("fsdp_plugin", lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()}),
        ("parallelism_config", lambda: {"parallelism_config": object()}),
        ("comm_hook", lambda: {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook=FP16)]}),
    ],
)
def test_what_would_shard_or_reduce_beside_npuzero_is_refused(
    what: str, options: Callable[[], dict[str, Any]], accelerator: Callable[..., ZeroAccelerator]
) -> None:
    with pytest.raises(npuzero.ConfigError, match=rf"got {what}\. Leave it out"):
        accelerator(**options())


def test_buffers_are_rank_0s_unless_ddp_would_leave_them(accelerator: Callable[..., ZeroAccelerator]) -> None:
    """Seen by what the ranks agree on: of one rank nothing is sent."""
    left = [DistributedDataParallelKwargs(broadcast_buffers=False)]
    asked = []
    for options in ({}, {"kwargs_handlers": left}, {"zero": {"buffers": "average"}, "kwargs_handlers": left}):
        made = accelerator(**options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adopt, "zero", lambda model, **options: asked.append(options["buffers"]) or model)
            made.prepare_model(build_framework_net())
    assert asked == ["broadcast", None, "average"]


def test_options_are_checked_where_the_accelerator_is_made(accelerator: Callable[..., ZeroAccelerator]) -> None:
    with pytest.raises(npuzero.ConfigError, match="as a mapping"):
        accelerator(zero=3)


def test_the_example_of_its_docstring_runs(
    accelerator: Callable[..., ZeroAccelerator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = build_framework_net()
    names = {
        "ZeroAccelerator": accelerator,
        "model": model,
        "loader": build_regression_loader(),
        "loss_of": nn.functional.mse_loss,
    }
    exec(find_example(ZeroAccelerator), names | {"optimizer": torch.optim.AdamW(model.parameters())})
    assert (tmp_path / "weights" / "model.safetensors").is_file()
