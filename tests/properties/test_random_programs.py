"""Training programs nobody would write, by chance: whatever is legal in torch, npuzero does as plain torch does.

A program is a model, a plan, settings and a sequence of statements, all of it drawn from one seed, which a failing
test names. It runs three times: by plain torch, by npuzero, and by npuzero with other settings, none of which may move
a bit.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import npuzero
from npuzero import Settings, comm
from npuzero.comm import World
from world.test_gradient_values import clip_values, gradients_of, norms_of
from world.train import CutSession, PlainSession, Session, State, assert_close, assert_same_bits

DIM, BATCH = 6, 3
#: What another order of sums may make of a program in float32, relative to each tensor's largest magnitude.
BOUND = 5e-5
#: What rounding to bfloat16 may make of it, relative to how far training has moved the model.
BF16_BOUND = 0.08
WORLDS = ((1, 1), (2, 1), (2, 2), (3, 3), (3, 1), (4, 2), (4, 4))
#: Under these no unit is gathered, so that ranks may run different ones.
WHOLE = ("zero0", "zero1", "zero1.5", "zero2")


class Stumble(RuntimeError):
    """What a program raises and catches itself."""


# -- models ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
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


class Model(nn.Module):
    """Blocks that are called in any order, some of them with one weight in common, between an entry and a head."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(draw) for _ in range(draw.randint(2, 4)))
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
            raise Stumble
        return self.head(x) * self.gain


# -- programs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """One line of a program: the name of a method of :class:`Interpreter`, and what it is called with."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"


@dataclass(frozen=True)
class Program:
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
    statements: list[Statement]

    @classmethod
    def of(cls, seed: int) -> Program:
        draw = random.Random(seed)
        model = cls._model(seed)
        plan = draw.choice(npuzero.PRESETS)
        precision = "bf16" if draw.random() < 0.15 else "fp32"
        settings, others = (_settings(draw, overlap) for overlap in draw.sample((True, False), 2))
        reentrant = any(block.kind == "reentrant" for block in model.blocks)
        if reentrant:  # it finishes a parameter once per use, and what a flat has sent by then depends on the buckets
            others = replace(others, bucket_bytes=settings.bucket_bytes)
        scaled = draw.random() < 0.2
        parts = draw.choice((1, 1, 1, 2))
        author = Author(draw, len(model.blocks), parts, scaled, plan in WHOLE and not reentrant, precision == "fp32")
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
    def _model(seed: int) -> Model:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Model(random.Random(seed))

    def model(self) -> Model:
        return self._model(self.seed)

    def __str__(self) -> str:
        facts = f"{self.plan} on {self.shape}, {self.precision}, {self.optimizer} x {self.parts}, scaled={self.scaled}"
        lines = "\n".join(f"    {statement}" for statement in self.statements)
        return f"program {self.seed}: {facts}\n  {self.settings}\n  {self.others}\n{lines}"


def _settings(draw: random.Random, overlap: bool) -> Settings:
    return Settings(overlap=overlap, prefetch=draw.randint(0, 3), bucket_bytes=draw.choice((1, 200, 2**20)))


class Author:
    """Writes programs that are legal, and end with a step."""

    def __init__(self, draw: random.Random, blocks: int, parts: int, scaled: bool, free: bool, exact: bool) -> None:
        self._draw = draw
        self._blocks = blocks
        self._parts = parts
        self._scaled = scaled
        self._free = free
        self._exact = exact
        self._batch = 0

    def program(self) -> Iterator[Statement]:
        for _ in range(self._draw.randint(3, 6)):
            yield from self._step()

    def _step(self) -> Iterator[Statement]:
        draw = self._draw
        for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3))):
            yield from self._aside(0.25)
            yield self._pass()
            if draw.random() < 0.15:
                yield Statement("read", {"p": draw.choice((1.0, 2.0, float("inf")))})
            # A scaler unscales once a step, after which no more may come.
            if draw.random() < 0.2 and not self._scaled:
                yield self._clip()
            if draw.random() < 0.12 and not (self._free and self._scaled):
                yield Statement("drop", {"part": draw.random()})
                if self._free:  # before more comes of what others have brought, they must know
                    yield self._clip()
        yield from self._aside(0.2)
        if self._scaled:
            yield Statement("scaled_step", {"clip": draw.random() < 0.5, "of": self._some_parts()})
        else:
            if draw.random() < 0.4:
                yield self._clip()
            elif draw.random() < 0.2:
                yield Statement("clip_values", {"limit": draw.choice((1e-3, 1e-2))})
            yield Statement("step", {"of": self._some_parts()})
        yield from self._aside(0.25)
        if draw.random() < 0.85 or self._scaled:
            yield Statement("zero_grad", {"of": draw.choice(("model", "optimizers"))})

    def _some_parts(self) -> list[int]:
        every = list(range(self._parts))
        return self._draw.choice((every, every, every[:1], every[-1:]))

    def _aside(self, chance: float) -> Iterator[Statement]:
        draw = self._draw
        if draw.random() >= chance:
            return
        what = draw.choice(
            ("evaluate", "evaluate", "gradients", "look", "set_lr", "write", "stumble", "reload", "forward")
        )
        if what == "evaluate":
            yield Statement(what, {"x": self._next(), "blocks": self._calls(), "inference": draw.random() < 0.5})
        elif what in ("gradients", "forward"):
            yield Statement(what, {"x": self._next(), "blocks": self._calls()})
        elif what == "stumble":
            backward = draw.random() < 0.4
            yield Statement(what, {"x": self._next(), "blocks": self._calls(), "backward": backward})
        elif what == "set_lr":
            yield Statement(what, {"lr": draw.choice((1e-3, 3e-3, 1e-2))})
        elif what == "write":
            yield Statement(what, {"write": draw.random() < 0.5, "limit": draw.choice((0.3, 0.5))})
        elif what == "look":
            yield Statement(what)
        elif what == "reload" and self._exact:
            yield Statement(what, {"model": draw.random() < 0.7, "optimizer": draw.random() < 0.7})

    def _pass(self) -> Statement:
        draw = self._draw
        how = draw.choice(("once", "once", "once", "once", "twice", "together", "crossed"))
        count = 2 if how in ("together", "crossed") else 1
        return Statement(
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

    def _clip(self) -> Statement:
        draw = self._draw
        return Statement(
            "clip", {"max_norm": draw.choice((0.1, 0.5, 1e3)), "p": draw.choice((2.0, 2.0, 1.0, float("inf")))}
        )


# -- how they run ------------------------------------------------------------------------------------------------------


class Interpreter:
    """Runs a program by one contender; what it sees on the way is in ``seen``."""

    def __init__(self, session: Session, program: Program) -> None:
        self._session = session
        self.seen: State = {}
        kinds = {
            "adamw": (torch.optim.AdamW, {"eps": 1e-4}),
            "adam": (torch.optim.Adam, {"eps": 1e-4, "amsgrad": True}),
            "sgd": (torch.optim.SGD, {"momentum": 0.9}),
            "rmsprop": (torch.optim.RMSprop, {"eps": 1e-3}),
        }
        kind, options = kinds[program.optimizer]
        every = list(session.model.parameters())
        parts = [every[i :: program.parts] for i in range(program.parts)]
        self._optimizers = [session.optimizer(kind, part, lr=1e-2, **options) for part in parts]
        self._scaler = session.scaler(init_scale=2.0**8, growth_interval=2) if program.scaled else None

    def run(self, statement: Statement) -> None:
        getattr(self, statement.name)(**statement.options)

    def backward(self, how: str, xs: list[int], blocks: list[Any], no_sync: bool) -> None:
        with self._session.no_sync() if no_sync else contextlib.nullcontext():
            if how == "together":
                self._scale(self._loss(xs[0], blocks[0]) + self._loss(xs[1], blocks[1])).backward()
                return
            losses = [self._scale(self._loss(x, calls)) for x, calls in zip(xs, blocks, strict=True)]
            losses[0].backward(retain_graph=how == "twice")
            losses[-1].backward() if how != "once" else None

    def clip(self, max_norm: float, p: float) -> None:
        self._see(self._session.clip(max_norm, p))

    def clip_values(self, limit: float) -> None:
        clip_values(self._session, limit)

    def read(self, p: float) -> None:
        """Norms by name, and whole gradients."""
        for found in (norms_of(self._session, p), gradients_of(self._session)):
            for name in sorted(found):
                self._see(found[name])

    def drop(self, part: float) -> None:
        names = [name for name, _ in self._session.model.named_parameters()]
        draw = random.Random(part)
        chosen = {name for name in names if draw.random() < part}
        for name, parameter in self._session.model.named_parameters():
            if name in chosen:
                parameter.grad = None

    def step(self, of: list[int]) -> None:
        for i in of:
            self._optimizers[i].step()

    def scaled_step(self, clip: bool, of: list[int]) -> None:
        if self._scaler is None or not self._has_gradients(of):
            return
        if clip:
            for i in of:
                self._scaler.unscale_(self._optimizers[i])
        for i in of:
            self._scaler.step(self._optimizers[i])
        self._scaler.update()
        self._see(torch.tensor(self._scaler.get_scale()))

    def zero_grad(self, of: str) -> None:
        if of == "model":
            self._session.model.zero_grad()
        else:
            for optimizer in self._optimizers:
                optimizer.zero_grad()

    def set_lr(self, lr: float) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def evaluate(self, x: int, blocks: Any, inference: bool) -> None:
        with torch.inference_mode() if inference else torch.no_grad():
            self._see(self._batch_loss(x, blocks, 0))

    def forward(self, x: int, blocks: Any) -> None:
        self._loss(x, blocks)

    def gradients(self, x: int, blocks: Any) -> None:
        """By hand, of one rank's loss: what .grad holds stays as it is."""
        loss = self._batch_loss(x, blocks, 0)
        (found,) = torch.autograd.grad(loss, [self._session.model.gain])
        self._see(found)

    def look(self) -> None:
        state = self._session.state()
        self._see(torch.stack([value.double().abs().sum() for value in state.values()]).float())

    def write(self, write: bool, limit: float) -> None:
        """Clamp all weights, the same on every rank."""
        model = self._session.model
        whole = (
            npuzero.gathered(model, write=write) if isinstance(self._session, CutSession) else contextlib.nullcontext()
        )
        with whole, torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-limit, limit)

    def stumble(self, x: int, blocks: Any, backward: bool) -> None:
        """An exception on every rank, in a forward or a backward pass; after the latter gradients are dropped."""
        with pytest.raises(Stumble):
            if not backward:
                self._loss(x, blocks, stumble=True)
            loss = self._loss(x, blocks)
            loss.register_hook(lambda _: _raise())
            loss.backward()
        if backward:
            self.zero_grad("optimizers")

    def reload(self, model: bool, optimizer: bool) -> None:
        if model:
            self._session.load(self._session.state())
        if optimizer:
            for each in self._optimizers:
                each.load_state_dict(each.state_dict())

    def _has_gradients(self, of: list[int]) -> bool:
        groups = [group for i in of for group in self._optimizers[i].param_groups]
        return all(
            any(
                parameter.grad is not None
                for group in self._optimizers[i].param_groups
                for parameter in group["params"]
            )
            for i in of
        ) and bool(groups)

    def _scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss) if self._scaler is not None else loss

    def _loss(self, x: int, blocks: Any, stumble: bool = False) -> Tensor:
        return self._session.mean(lambda rank: self._batch_loss(x, blocks, rank, stumble))

    def _batch_loss(self, x: int, blocks: Any, rank: int, stumble: bool = False) -> Tensor:
        batch = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(100 * x + rank))
        return self._session.model(batch, blocks[rank % len(blocks)], stumble).float().square().mean()

    def _see(self, value: Tensor) -> None:
        self.seen[f"seen {len(self.seen)}"] = value.detach().clone()


def _raise() -> Tensor:
    raise Stumble


def execute(session: Session, program: Program) -> State:
    interpreter = Interpreter(session, program)
    for statement in program.statements:
        interpreter.run(statement)
    return interpreter.seen | session.state()


def run(program: Program) -> State:
    """The program's outcome by npuzero, the same to the bit on every rank."""
    size, local_size = program.shape
    models = [program.model() for _ in range(size)]  # made here: the generator that fills them is the process's own

    def rank(world: World) -> State:
        options = {"plan": program.plan, "local_size": local_size, "settings": program.settings}
        return execute(CutSession(models[world.rank], world, precision=program.precision, **options), program)

    states = comm.run_threads(size, rank)
    for state in states[1:]:
        assert_same_bits(state, states[0])
    return states[0]


def check(seed: int, twice: bool = False) -> None:
    program = Program.of(seed)
    try:
        found = run(program)
        assert_same_bits(run(replace(program, settings=program.others)), found)
        if twice:
            assert_same_bits(run(program), found)
        size = program.shape[0]
        expected = execute(PlainSession(program.model(), range(size), size), program)
        if program.precision == "fp32":
            assert_close(found, expected, BOUND)
        else:
            assert_moved_alike(program.model().state_dict(), found, expected)
    except BaseException as error:
        error.add_note(str(program))
        raise


def assert_moved_alike(first: State, found: State, expected: State) -> None:
    """The model has moved as far as in float32, and to the same place, but for rounding."""
    assert found.keys() == expected.keys()

    def distance(of: Callable[[str], Tensor]) -> float:
        return float(torch.cat([of(name).double().reshape(-1) for name in first]).norm())

    moved = distance(lambda name: expected[name] - first[name])
    apart = distance(lambda name: found[name].float() - expected[name])
    rounding = distance(lambda name: first[name]) * 2**-8
    assert apart <= BF16_BOUND * moved + rounding, f"{apart} apart after a way of {moved}"


@pytest.fixture(autouse=True, scope="module")
def _one_thread_per_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(25))
def test_a_random_program_runs_as_by_plain_torch(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_many_random_programs_run_as_by_plain_torch(seed: int) -> None:
    check(seed, twice=seed % 4 == 0)
