"""Models with complex arithmetic: their gradients come as lazy negatives and conjugates, and train as in torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import checkpoint, comm
from npuzero.comm import World
from world.toy import build_seeded_model
from world.train import Session, State, check_equals_plain

PRESETS = [
    pytest.param(preset, marks=[] if preset in ("zero0", "zero2", "zero3") else pytest.mark.slow)
    for preset in npuzero.PRESETS
]


class SpectrumRotation(nn.Module):
    """Rotate the spectrum by a learned phase and scale it: one element each."""

    def __init__(self) -> None:
        super().__init__()
        self.amplitude = nn.Parameter(torch.tensor([0.5]))
        self.phase = nn.Parameter(torch.tensor([0.25]))
        self.bands = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        turn = torch.complex(self.amplitude, self.phase).conj()
        spectrum = torch.fft.rfft(x) * turn * torch.complex(torch.ones(5), self.bands).conj()
        return torch.fft.irfft(spectrum, n=8)


class SpectralModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SpectrumRotation() for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.register_buffer("roots", torch.polar(torch.ones(4), torch.arange(4.0)).conj(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x) * self.roots.imag[1]


def complex_model_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(3, 8, generator=generator)).square().mean()


def train_spectral(session: Session) -> State:
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        with session.no_sync():
            session.mean(lambda rank, step=step: complex_model_loss(session.model, 2 * step, rank)).backward()
        session.mean(lambda rank, step=step: complex_model_loss(session.model, 2 * step + 1, rank)).backward()
        session.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_spectral_model_trains_as_in_plain_torch(preset: str) -> None:
    check_equals_plain(train_spectral, 2, SpectralModel, plan=preset, local_size=1)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_phase_behind_a_conjugate_moves_the_right_way(preset: str) -> None:
    """The loss grows with p, so plain SGD takes 1 to -2; the gradient read as its negative gave 4."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.ones(1))

        def forward(self) -> Tensor:
            turn = torch.complex(torch.ones(1), self.p).conj()
            return -(turn * torch.ones(1, dtype=torch.complex64)).imag.sum()

    def rank(world: World) -> float:
        model = npuzero.zero(Behind(), plan=preset, world=world, local_size=1)
        optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), lr=3.0)
        model().backward()
        optimizer.step()
        return float(npuzero.full_state_dict(model, rank0_only=False)["p"])

    assert comm.run_threads(2, rank) == [-2.0, -2.0]


@pytest.mark.parametrize("precision", ({}, {"moments": "bf16"}))
def test_an_optimizer_over_plain_parameters(precision: dict[str, str]) -> None:
    outcomes = []
    for make in (lambda params: torch.optim.AdamW(params, lr=0.1), lambda p: npuzero.AdamW(p, lr=0.1, **precision)):
        model = build_seeded_model(make=SpectralModel)
        optimizer = make(model.parameters())
        for step in range(2):
            complex_model_loss(model, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append([p.detach() for p in model.parameters()])
    for mine, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2 if precision else 1e-5, atol=1e-3 if precision else 1e-6)


def lazy_negative(values: Tensor) -> Tensor:
    """Return a tensor equal to ``values``, with other contents in memory."""
    return torch.complex(torch.zeros_like(values), -values).conj().imag


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_values_that_are_loaded(precision: str) -> None:
    def rank(world: World) -> None:
        model = npuzero.zero(nn.Linear(1, 1), stage=2, precision=precision, world=world)
        npuzero.load_full_state_dict(
            model, {"weight": lazy_negative(torch.full((1, 1), 0.75)), "bias": lazy_negative(torch.ones(1))}
        )
        assert model.weight.item() == 0.75 and model.bias.item() == 1.0

    comm.run_threads(2, rank)


def test_values_that_are_saved_and_sent(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(make=SpectralModel), stage=2, world=world)
        extra = {"turn": lazy_negative(torch.ones(1)), "roots": torch.polar(torch.ones(2), torch.ones(2)).conj()}
        checkpoint.save(tmp_path, model, step=1, extra=extra)
        found = checkpoint.load(tmp_path, model)
        for name, value in extra.items():
            assert torch.equal(found.extra[name], value), name
        model.roots = model.roots.conj()
        npuzero.export(model, tmp_path / "exported")
        with pytest.raises(npuzero.ContractError, match=r"resolve_neg\(\)"):
            world.communicator(range(2), "lazy").all_reduce(lazy_negative(torch.ones(1)))

    comm.run_threads(2, rank)
