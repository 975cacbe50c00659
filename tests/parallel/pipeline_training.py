"""One training in two ways: plain torch on the data of all ranks, and a pipeline over a mesh of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import npuzero
from npuzero import Report, comm
from npuzero.comm import World
from npuzero.parallel.pipeline_parallel.runner import Pipeline
from npuzero.plan import DATA
from world.toy import build_seeded_model

WIDTH, CLASSES, ROWS = 16, 11, 2  # rows of a micro-batch
State = dict[str, Tensor]


class PipelineBlock(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class DeepModel(nn.Module):
    """Embedding, blocks, norm and head, called one after another."""

    def __init__(self, layers: int = 14, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(PipelineBlock() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @property
    def order(self) -> list[nn.Module]:
        return [self.tokens, self.blocks, self.norm, self.head]


def pipeline_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), target.flatten())


@dataclass(frozen=True)
class PipelineRun:
    """Describe a training, for both ways."""

    micro_batches: int = 4
    data: int = 1
    steps: int = 3
    kind: str = "sgd"
    clip: float | None = None
    make: Callable[[], nn.Module] = DeepModel
    parts: bool = False  # matrices are clipped first, then vectors, then all by a list

    def batch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of data rank ``index``, [micro_batches * ROWS, 5] int64."""
        generator = torch.Generator().manual_seed(100 * step + index)
        both = torch.randint(CLASSES, (2, self.micro_batches * ROWS, 5), generator=generator)
        return both[0], both[1]

    def clipped(self, clip: Callable[..., Tensor], model: nn.Module) -> list[float]:
        """Clip by torch's function or npuzero's; return the norms."""
        every = [*model.parameters()]
        vectors = [p for p in every if p.dim() < 2]
        given: list[Any] = [[p for p in every if p.dim() > 1], vectors, every] if self.parts else [every]
        if isinstance(model, Pipeline) and not self.parts:
            given = [model]
        return [clip(some, self.clip or torch.inf).item() for some in given]

    def optimizer(self, parameters: Any, *, plain: bool = True) -> torch.optim.Optimizer:
        if self.kind == "sgd":
            made = torch.optim.SGD if plain else partial(npuzero.ZeroOptimizer, torch.optim.SGD)
            return made(parameters, lr=0.05, momentum=0.9)
        return (torch.optim.AdamW if plain else npuzero.AdamW)(parameters, lr=1e-2, eps=1e-3)


@cache
def train_pipeline_plain(run: PipelineRun) -> tuple[State, list[float], list[float]]:
    """Train by plain torch; return the final state, and the losses and norms of the steps."""
    model = build_seeded_model(make=run.make)
    optimizer = run.optimizer(model.parameters())
    losses, norms = [], []
    for step in range(run.steps):
        total = 0.0
        for index in range(run.data):
            for tokens, target in zip(*(part.chunk(run.micro_batches) for part in run.batch(step, index)), strict=True):
                loss = pipeline_loss(model(tokens), target) / run.micro_batches / run.data
                loss.backward()
                total += loss.item()
        losses.append(total)
        norms += run.clipped(nn.utils.clip_grad_norm_, model)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, losses, norms


@dataclass
class PipelineResult:
    """Store one rank's final state, and its measurements of the last step."""

    state: State
    losses: list[float]
    norms: list[float]
    report: Report
    pipe: Pipeline
    rank: int


def train_pipeline(
    run: PipelineRun, ranks: int, preset: Any = 3, *, mesh: dict[str, int] | None = None, **options: Any
) -> list[PipelineResult]:
    """Train by a pipeline over ``ranks`` pipe ranks times the data ranks."""

    def rank(world: World) -> PipelineResult:
        sizes = npuzero.mesh(world=world, pipe=ranks, local_size=1, **(mesh or {}))
        model = build_seeded_model(make=run.make)
        given = {"loss_fn": pipeline_loss, "blocks": model.order if isinstance(model, DeepModel) else None} | options
        which = {"plan": preset} if isinstance(preset, (str, npuzero.Plan)) else {"stage": preset}
        pipe = npuzero.pipeline(model, sizes, micro_batches=run.micro_batches, **which, **given)
        optimizer = run.optimizer(pipe.parameters(), plain=False)
        losses, norms = [], []
        for step in range(run.steps):
            tokens, target = run.batch(step, sizes.index(DATA))
            losses.append(pipe.step(tokens, target=target).item())
            norms += run.clipped(npuzero.clip_grad_norm_, pipe)
            optimizer.step()
            optimizer.zero_grad()
        report = npuzero.report(pipe)
        with npuzero.gathered(pipe):
            state = {name: value.detach().clone() for name, value in pipe.named_parameters(remove_duplicate=False)}
        whole = npuzero.full_state_dict(pipe, rank0_only=False)
        assert all(torch.equal(value, whole[name]) for name, value in state.items())
        return PipelineResult(state, losses, norms, report, pipe, world.rank)

    return comm.run_threads(ranks * run.data, rank, timeout_s=60)


def relative_distance(found: State, expected: State) -> float:
    """Return the largest difference, relative to each tensor's largest magnitude."""
    return max(
        ((value - expected[name]).abs().max() / expected[name].abs().max()).item() for name, value in found.items()
    )


def assert_like_plain(run: PipelineRun, found: list[PipelineResult], bound: float) -> None:
    state, losses, norms = train_pipeline_plain(run)
    assert {name for each in found for name in each.state} == set(state)
    for each in found:
        assert relative_distance(each.state, state) <= bound
        torch.testing.assert_close(each.losses, losses, rtol=1e-6, atol=0)
        torch.testing.assert_close(each.norms, norms, rtol=1e-6, atol=0)
        assert (each.losses, each.norms) == (found[0].losses, found[0].norms)
