"""Strict mode: a world of one refuses the calls that several ranks refuse, in their words, with unchanged results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import comm
from npuzero.comm import World

Act = Callable[[nn.Module], object]
HINT = "strict mode refuses it here, as several ranks do; to allow it leave out NPUZERO_STRICT=1"


def read_gradient(model: nn.Module) -> None:
    next(model.parameters()).grad.norm()  # type: ignore[union-attr]


def clip_as_torch_does(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def step_as_torch_does(model: nn.Module) -> None:
    torch.optim.SGD([next(model.parameters())], lr=0.1, foreach=False).step()


def mix_parameters(model: nn.Module) -> None:
    npuzero.AdamW([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1).step()


def load_empty_state(model: nn.Module) -> None:
    model.load_state_dict({})


def ask_for_the_state(model: nn.Module) -> None:
    model.state_dict()


def read_weight(model: nn.Module) -> None:
    model[1].weight.sum()  # type: ignore[index]


def read_before_backward(model: nn.Module) -> None:
    model(torch.ones(2, 4))
    read_weight(model)


@torch.no_grad()
def write_weight(model: nn.Module) -> None:
    model[1].weight.fill_(1.0)  # type: ignore[index]


def write_into_data(model: nn.Module) -> None:
    model[1].weight.data.fill_(1.0)  # type: ignore[index,union-attr]


def replace_data(model: nn.Module) -> None:
    model[1].weight.data = torch.ones(4, 4)  # type: ignore[index,union-attr]


def differentiate_twice(model: nn.Module) -> None:
    model(torch.ones(2, 4)).square().sum().backward(create_graph=True)


def two_linear_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def refusal_text(world: World, act: Act, plan: str, strict: bool) -> str | None:
    model = npuzero.zero(two_linear_model(), plan=plan, world=world, settings=npuzero.Settings(strict=strict))
    model(torch.ones(2, 4)).sum().backward()
    try:
        act(model)
    except npuzero.errors.StateError as error:
        return str(error)
    except RuntimeError:  # torch's own, which no plan refuses
        return None
    return None


CASES: list[tuple[Act, str]] = [
    (read_gradient, "zero0"),
    (read_gradient, "zero2"),
    (clip_as_torch_does, "zero2"),
    (step_as_torch_does, "zero2"),
    (mix_parameters, "zero1"),
    (load_empty_state, "zero3"),
    (ask_for_the_state, "zero3"),
    (read_weight, "zero3"),
    (read_weight, "hpz"),
    (read_before_backward, "zero3"),
    (read_before_backward, "zero3-keep"),
    (write_weight, "zero3"),
    (write_into_data, "zero3"),
    (replace_data, "zero3"),
    (differentiate_twice, "zero3"),
]


@pytest.mark.parametrize(("act", "plan"), CASES, ids=lambda case: getattr(case, "__name__", case))
@pytest.mark.usefixtures("permissive")
def test_one_strict_rank_refuses_what_two_refuse(act: Act, plan: str) -> None:
    on_two = comm.run_threads(2, lambda world: refusal_text(world, act, plan, False))[0]
    on_one = comm.run_threads(1, lambda world: refusal_text(world, act, plan, True))[0]
    assert on_two is not None and on_one is not None
    assert on_one.startswith(on_two)
    # Writes to gradients, as by torch's optimizers and clipping, are refused without strict mode as well.
    if act not in (clip_as_torch_does, step_as_torch_does):
        assert HINT in on_one.removeprefix(on_two)
        assert comm.run_threads(1, lambda world: refusal_text(world, act, plan, False)) == [None]


@pytest.mark.usefixtures("permissive")
def test_two_ranks_know_no_strict_mode() -> None:
    """Also where a plan shards over axes along which there is but one of them."""
    near = npuzero.Placement(("node",))
    plan = npuzero.Plan(near, near, near, near, local_size=2)

    def run(world: World, strict: bool) -> tuple[list[str], npuzero.Report]:
        settings = npuzero.Settings(strict=strict)
        model = npuzero.zero(two_linear_model(), plan=plan, world=world, settings=settings)
        optimizer = npuzero.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return list(model.state_dict()), npuzero.report(model)

    without, with_it = (comm.run_threads(2, partial(run, strict=strict)) for strict in (False, True))
    assert without == with_it


def test_the_variable_makes_every_model_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("NPUZERO_STRICT", text)
        found = comm.run_threads(1, lambda world: refusal_text(world, mix_parameters, "zero1", False))
        assert (found != [None]) is expected
    monkeypatch.setenv("NPUZERO_STRICT", "yes")
    with pytest.raises(npuzero.errors.ConfigError, match="NPUZERO_STRICT: expected one of 0, 1"):
        comm.run_threads(1, lambda world: refusal_text(world, mix_parameters, "zero1", False))


class ClampedLayer(nn.Module):
    """A block that writes its own weight, and has a parameter that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return self.linear(x).tanh() * self.scale


def train_strict(world: World, plan: str, precision: str, strict: bool, folder: Path) -> dict[str, object]:
    """Every call that a program may make on any number of ranks."""
    torch.manual_seed(0)
    settings = npuzero.Settings(strict=strict)
    model = npuzero.zero(
        nn.Sequential(*[ClampedLayer() for _ in range(3)]),
        plan=plan,
        precision=precision,
        world=world,
        settings=settings,
    )
    optimizer = npuzero.AdamW(model.parameters(), lr=0.01)
    found: dict[str, object] = {}
    for step in range(3):
        for _ in range(2):
            model(torch.randn(4, 8)).float().square().mean().backward()
        found[f"norm {step}"] = npuzero.clip_grad_norm_(model, 0.1)
        found[f"gradient {step}"] = npuzero.full_gradient(model[0].linear.weight)
        found[f"norms {step}"] = npuzero.grad_norms(model)
        optimizer.step()
        optimizer.zero_grad()
        with npuzero.gathered(model, write=True), torch.no_grad():
            model[1].linear.bias.mul_(0.5)
        with torch.no_grad():
            found[f"evaluation {step}"] = model(torch.ones(1, 8))
    npuzero.checkpoint.save(folder / "checkpoint", model, optimizer, step=3)
    npuzero.export(model, folder / "weights")
    found["weights"] = (folder / "weights/model.safetensors").read_bytes()
    state = npuzero.full_state_dict(model)
    npuzero.load_full_state_dict(model, {name: torch.zeros_like(value) for name, value in state.items()})
    npuzero.checkpoint.load(folder / "checkpoint", model, optimizer)
    model(torch.randn(4, 8)).float().square().mean().backward()
    optimizer.step()
    found["report"] = npuzero.report(model)
    return found | npuzero.full_state_dict(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-split"])
@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3", "zero3-keep"])
@pytest.mark.usefixtures("permissive")
def test_strict_mode_moves_no_bit_and_no_byte(plan: str, precision: str, tmp_path: Path) -> None:
    plain, strict = (
        comm.run_threads(
            1, lambda world, strict=strict: train_strict(world, plan, precision, strict, tmp_path / str(strict))
        )[0]
        for strict in (False, True)
    )
    assert plain.keys() == strict.keys()
    for name, value in plain.items():
        same = torch.equal(value, strict[name]) if isinstance(value, Tensor) else value == strict[name]
        assert same, name


@pytest.mark.usefixtures("permissive")
@pytest.mark.parametrize("plan", ["zero3", "hpz"])
def test_a_strict_step_holds_and_sends_what_is_predicted(plan: str) -> None:
    def run(world: World) -> tuple[npuzero.Report, npuzero.Report]:
        model = npuzero.zero(two_linear_model(), plan=plan, world=world, settings=npuzero.Settings(strict=True))
        optimizer = npuzero.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return npuzero.report(model), npuzero.predict(two_linear_model(), plan, 1)

    measured, predicted = comm.run_threads(1, run)[0]
    assert measured == predicted
