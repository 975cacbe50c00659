"""Training programs by chance: a model, a plan, settings and statements, all drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import npuzero
from npuzero import Settings

DIM = 6
WORLDS = ((1, 1), (2, 1), (2, 2), (3, 3), (3, 1), (4, 2), (4, 4))
#: Under these no unit is gathered, so that ranks may run different ones.
WHOLE = ("zero0", "zero1", "zero1.5", "zero2")


class ProgramStumble(RuntimeError):
    """What a program raises and catches itself."""


class RandomBlock(nn.Module):
    """One of several kinds of layers, called with the number of the branch to take."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.kind = draw.choice(("linear", "norm", "frozen", "branches", "nested", "checkpoint", "reentrant"))
        self.linear = nn.Linear(DIM, DIM, bias=draw.random() < 0.5)
        if self.kind == "norm":
            self.norm = nn.LayerNorm(DIM)
        elif self.kind == "frozen":
            self.linear.requires_grad_(False)
            self.gain = nn.Parameter(torch.ones(DIM))
        elif self.kind == "branches":
            self.branches = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        elif self.kind in ("nested", "checkpoint", "reentrant"):
            self.inner = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        if draw.random() < 0.2:
            self.idle = nn.Parameter(torch.ones(draw.choice([(), (3,), (0, DIM)])))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        if self.kind in ("checkpoint", "reentrant") and torch.is_grad_enabled():
            y: Tensor = checkpoint(self._compute, x, branch, use_reentrant=self.kind == "reentrant")
            return y
        return self._compute(x, branch)

    def _compute(self, x: Tensor, branch: int) -> Tensor:
        y = torch.tanh(self.linear(self.norm(x) if self.kind == "norm" else x))
        if self.kind == "frozen":
            y = y * self.gain
        elif self.kind == "branches" and branch < 2:
            y = y + self.branches[branch](x)
        elif hasattr(self, "inner"):
            for inner in self.inner:
                y = torch.tanh(inner(y))
        return x + y


class RandomBlocksModel(nn.Module):
    """Blocks that are called in any order, some of them with one weight in common, between an entry and a head."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(RandomBlock(draw) for _ in range(draw.randint(2, 4)))
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(DIM, 3)
        if draw.random() < 0.3:
            first, second = draw.sample(list(self.blocks), 2)
            first.linear.weight = second.linear.weight  # one parameter of two units: the root's

    def forward(self, x: Tensor, blocks: list[tuple[int, int]], stumble: bool = False) -> Tensor:
        x = self.entry(x)
        for i, branch in blocks:
            x = self.blocks[i](x, branch)
        if stumble:
            raise ProgramStumble
        return self.head(x) * self.gain


@dataclass(frozen=True)
class ProgramStatement:
    """One line of a program: the name of a method of the interpreter, and what it is called with."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"


@dataclass(frozen=True)
class RandomProgram:
    """All of it follows from the seed."""

    seed: int
    plan: str
    shape: tuple[int, int]
    precision: str
    optimizer: str
    parts: int
    scaled: bool
    settings: Settings
    others: Settings
    statements: list[ProgramStatement]

    @classmethod
    def of(cls, seed: int) -> RandomProgram:
        draw = random.Random(seed)
        model = cls._model(seed)
        plan = draw.choice(npuzero.PRESETS)
        precision = "bf16" if draw.random() < 0.15 else "fp32"
        settings, others = (_random_settings(draw, overlap) for overlap in draw.sample((True, False), 2))
        reentrant = any(block.kind == "reentrant" for block in model.blocks)
        if reentrant:  # it finishes a parameter once per use, and what a flat has sent by then depends on the buckets
            others = replace(others, bucket_bytes=settings.bucket_bytes)
        scaled = draw.random() < 0.2
        parts = draw.choice((1, 1, 1, 2))
        author = ProgramAuthor(
            draw, len(model.blocks), parts, scaled, plan in WHOLE and not reentrant, precision == "fp32"
        )
        return cls(
            seed,
            plan,
            draw.choice(WORLDS),
            precision,
            "sgd" if precision == "bf16" else draw.choice(("adamw", "adamw", "adam", "sgd", "rmsprop")),
            parts,
            scaled,
            settings,
            others,
            list(author.program()),
        )

    @staticmethod
    def _model(seed: int) -> RandomBlocksModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return RandomBlocksModel(random.Random(seed))

    def model(self) -> RandomBlocksModel:
        return self._model(self.seed)

    def __str__(self) -> str:
        facts = f"{self.plan} on {self.shape}, {self.precision}, {self.optimizer} x {self.parts}, scaled={self.scaled}"
        lines = "\n".join(f"    {statement}" for statement in self.statements)
        return f"program {self.seed}: {facts}\n  {self.settings}\n  {self.others}\n{lines}"


def _random_settings(draw: random.Random, overlap: bool) -> Settings:
    return Settings(overlap=overlap, prefetch=draw.randint(0, 3), bucket_bytes=draw.choice((1, 200, 2**20)))


class ProgramAuthor:
    """Writes programs that are legal, and end with a step."""

    def __init__(self, draw: random.Random, blocks: int, parts: int, scaled: bool, free: bool, exact: bool) -> None:
        self._draw = draw
        self._blocks = blocks
        self._parts = parts
        self._scaled = scaled
        self._free = free
        self._exact = exact
        self._batch = 0

    def program(self) -> Iterator[ProgramStatement]:
        for _ in range(self._draw.randint(3, 6)):
            yield from self._step()

    def _step(self) -> Iterator[ProgramStatement]:
        draw = self._draw
        for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3))):
            yield from self._aside(0.25)
            yield self._pass()
            if draw.random() < 0.15:
                yield ProgramStatement("read", {"p": draw.choice((1.0, 2.0, float("inf")))})
            # A scaler unscales once a step, after which no more may come.
            if draw.random() < 0.2 and not self._scaled:
                yield self._clip()
            if draw.random() < 0.12 and not (self._free and self._scaled):
                yield ProgramStatement("drop", {"part": draw.random()})
                if self._free:  # before more comes of what others have brought, they must know
                    yield self._clip()
        yield from self._aside(0.2)
        if self._scaled:
            yield ProgramStatement("scaled_step", {"clip": draw.random() < 0.5, "of": self._some_parts()})
        else:
            if draw.random() < 0.4:
                yield self._clip()
            elif draw.random() < 0.2:
                yield ProgramStatement("clip_values", {"limit": draw.choice((1e-3, 1e-2))})
            yield ProgramStatement("step", {"of": self._some_parts()})
        yield from self._aside(0.25)
        if draw.random() < 0.85 or self._scaled:
            yield ProgramStatement("zero_grad", {"of": draw.choice(("model", "optimizers"))})

    def _some_parts(self) -> list[int]:
        every = list(range(self._parts))
        return self._draw.choice((every, every, every[:1], every[-1:]))

    def _aside(self, chance: float) -> Iterator[ProgramStatement]:
        draw = self._draw
        if draw.random() >= chance:
            return
        what = draw.choice(
            ("evaluate", "evaluate", "gradients", "look", "set_lr", "write", "stumble", "reload", "forward")
        )
        if what == "evaluate":
            yield ProgramStatement(what, {"x": self._next(), "blocks": self._calls(), "inference": draw.random() < 0.5})
        elif what in ("gradients", "forward"):
            yield ProgramStatement(what, {"x": self._next(), "blocks": self._calls()})
        elif what == "stumble":
            backward = draw.random() < 0.4
            yield ProgramStatement(what, {"x": self._next(), "blocks": self._calls(), "backward": backward})
        elif what == "set_lr":
            yield ProgramStatement(what, {"lr": draw.choice((1e-3, 3e-3, 1e-2))})
        elif what == "write":
            yield ProgramStatement(what, {"write": draw.random() < 0.5, "limit": draw.choice((0.3, 0.5))})
        elif what == "look":
            yield ProgramStatement(what)
        elif what == "reload" and self._exact:
            yield ProgramStatement(what, {"model": draw.random() < 0.7, "optimizer": draw.random() < 0.7})

    def _pass(self) -> ProgramStatement:
        draw = self._draw
        how = draw.choice(("once", "once", "once", "once", "twice", "together", "crossed"))
        count = 2 if how in ("together", "crossed") else 1
        return ProgramStatement(
            "backward",
            {
                "how": how,
                "xs": [self._next() for _ in range(count)],
                "blocks": [self._calls() for _ in range(count)],
                "no_sync": draw.random() < 0.3,
            },
        )

    def _next(self) -> int:
        self._batch += 1
        return self._batch

    def _calls(self) -> list[list[tuple[int, int]]]:
        """The blocks to call and their branches: for every rank the same, or, where that is legal, for each its own."""
        draw = self._draw
        chosen = []
        for _ in range(draw.choice((1, 1, 3)) if self._free else 1):
            order = [i for i in range(self._blocks) if draw.random() < 0.8]
            if draw.random() < 0.2:
                draw.shuffle(order)
            if draw.random() < 0.1 and order:
                order.append(draw.choice(order))
            chosen.append([(i, draw.randint(0, 2)) for i in order])
        return chosen

    def _clip(self) -> ProgramStatement:
        draw = self._draw
        return ProgramStatement(
            "clip", {"max_norm": draw.choice((0.1, 0.5, 1e3)), "p": draw.choice((2.0, 2.0, 1.0, float("inf")))}
        )
