"""Steps captured and run again: nothing that changes from step to step is left behind in what was captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import comm
from npuzero.errors import StateError

from .graphs import capture_step

WARM_UP, REPLAYS = 3, 5


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cpu") if request.param == "cpu" else torch.device("cuda", 0)


def build_capture_model(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.LayerNorm(48)) for _ in range(3)]
    return nn.Sequential(*blocks).to(device, dtype)


def warm_up_steps(device: torch.device) -> int:
    """Steps that the warm-up and the capture have taken: only a recording runs what it captures."""
    return WARM_UP + (device.type == "cpu")


def run_captured_steps(
    step: Callable[[], None], change: Callable[[int], None], device: torch.device, capture: bool
) -> None:
    """The same steps, each after ``change(number)``: all of them as they come, or the later ones captured."""
    change(0)
    if capture:
        step = capture_step(step, device, WARM_UP)
    else:
        for _ in range(warm_up_steps(device)):
            step()
    for number in range(1, REPLAYS + 1):
        change(number)
        step()


def optimizer_step_counts(optimizer: torch.optim.Optimizer) -> set[float]:
    return {float(state["step"]) for state in optimizer.state_dict()["state"].values()}


def capture_updates(device: torch.device, dtype: torch.dtype, options: dict[str, Any], capture: bool) -> list[Tensor]:
    """Parameters after updates with another lr each, other gradients, and one that overflowed."""
    model, lr = build_capture_model(device, dtype), torch.tensor(1e-2, device=device)
    optimizer: Any = npuzero.AdamW(model.parameters(), lr=lr, capturable=True, **options)
    optimizer.found_inf, optimizer.grad_scale = torch.zeros((), device=device), torch.ones((), device=device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def change(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
        lr.fill_(1e-2 / (1 + number))
        optimizer.grad_scale.fill_(2.0**number)
        optimizer.found_inf.fill_(float(number == 3))

    run_captured_steps(optimizer.step, change, device, capture)
    assert optimizer_step_counts(optimizer) == {warm_up_steps(device) + REPLAYS - 1.0}
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"masters": "split", "moments": "bf16"}], ids=["whole", "split, bf16"])
def test_an_update_of_plain_parameters(device: torch.device, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Captured: the bits of the same steps as they come."""
    assert all(map(torch.equal, *(capture_updates(device, dtype, options, capture) for capture in (False, True))))


def train_captured(
    device: torch.device, plan: str, precision: str, scaled: bool, capture: bool
) -> tuple[float, dict[str, Tensor]]:
    """The loss scale and the weights after whole steps with other data and another lr each."""
    model = npuzero.zero(build_capture_model(device), plan=plan, precision=precision, world=comm.SingleWorld(device))
    lr, data = torch.tensor(1e-2, device=device), torch.zeros(16, 48, device=device)
    optimizer = npuzero.AdamW(model.parameters(), lr=lr, capturable=True)
    scaler = npuzero.LossScaler(init_scale=2.0**8, growth_interval=2, enabled=scaled)

    def step() -> None:
        loss = (model(data).float() - data).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        npuzero.clip_grad_norm_(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def change(number: int) -> None:
        data.copy_(torch.randn(16, 48, generator=torch.Generator().manual_seed(number)))
        data[0, 0] = torch.inf if number == 3 and scaled else 0.0
        lr.fill_(1e-2 / (1 + number))

    run_captured_steps(step, change, device, capture)
    assert optimizer_step_counts(optimizer) == {warm_up_steps(device) + REPLAYS - float(scaled)}
    return scaler.get_scale(), npuzero.full_state_dict(model)


@pytest.mark.usefixtures("permissive")  # what stands for a graph on the CPU replays ops, past the hooks
@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("plan", ["zero0", "zero3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-8bit"])
def test_a_whole_training_step(device: torch.device, plan: str, precision: str, scaled: bool) -> None:
    """Forward, backward, clipping and update, with an overflow that only the device sees; as the steps come."""
    (scale, expected), (found_scale, found) = (
        train_captured(device, plan, precision, scaled, capture) for capture in (False, True)
    )
    assert found_scale == scale
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


def build_captured_step(device: torch.device) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    model = npuzero.zero(build_capture_model(device), stage=3, world=comm.SingleWorld(device))
    optimizer = npuzero.AdamW(model.parameters(), capturable=True)
    data = torch.ones(4, 48, device=device)

    def step() -> None:
        model(data).square().mean().backward()
        npuzero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, step


@pytest.mark.usefixtures("permissive")  # what stands for a graph on the CPU replays ops, past the hooks
def test_a_state_is_looked_at_between_replays(device: torch.device) -> None:
    """What is captured goes on counting where state_dict looks."""
    optimizer, step = build_captured_step(device)
    replay = capture_step(step, device, WARM_UP)
    for count in range(warm_up_steps(device), warm_up_steps(device) + 3):
        assert optimizer_step_counts(optimizer) == {count}
        replay()


@pytest.mark.gpu
def test_replays_allocate_nothing() -> None:
    device = torch.device("cuda", 0)
    replay = capture_step(build_captured_step(device)[1], device, WARM_UP)
    before = torch.cuda.memory_stats(device)
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats(device)
    for name in ("allocation.all.allocated", "reserved_bytes.all.current"):
        assert after[name] == before[name], name


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_the_capture_of_steps_that_the_host_counts_is_refused() -> None:
    model = build_capture_model(torch.device("cuda", 0))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = npuzero.AdamW(model.parameters())
    optimizer.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(StateError, match="capturable=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
