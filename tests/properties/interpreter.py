"""Runs random programs by one contender."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import npuzero
from properties.programs import DIM, ProgramStatement, ProgramStumble, RandomProgram
from world.test_gradient_values import clip_model_values, full_gradients, gradient_norms
from world.train import CutSession, Session, State

BATCH = 3


def execute_program(session: Session, program: RandomProgram) -> State:
    """What the program sees on its way, and the state that it ends with."""
    by = ProgramContender(session, program)
    interpreter = ProgramInterpreter(by)
    for statement in program.statements:
        interpreter.run(statement)
    return by.seen | session.state()


class ProgramContender:
    """A program's model and optimizers, by plain torch or by npuzero; what it sees on the way is in ``seen``."""

    def __init__(self, session: Session, program: RandomProgram) -> None:
        self.session = session
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
        self.optimizers = [session.optimizer(kind, part, lr=1e-2, **options) for part in parts]
        self.scaler = session.scaler(init_scale=2.0**8, growth_interval=2) if program.scaled else None

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss) if self.scaler is not None else loss

    def loss(self, x: int, blocks: Any, stumble: bool = False) -> Tensor:
        """The mean over the ranks, each of which has a batch of its own."""
        return self.session.mean(lambda rank: self.loss_of(rank, x, blocks, stumble))

    def loss_of(self, rank: int, x: int, blocks: Any, stumble: bool = False) -> Tensor:
        batch = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(100 * x + rank))
        return self.session.model(batch, blocks[rank % len(blocks)], stumble).float().square().mean()

    def see(self, value: Tensor) -> None:
        self.seen[f"seen {len(self.seen)}"] = value.detach().clone()


def has_gradients(optimizer: Any) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


class ProgramInterpreter:
    """What the statements of a program mean: for each a method of its name."""

    def __init__(self, by: ProgramContender) -> None:
        self._by = by

    def run(self, statement: ProgramStatement) -> None:
        getattr(self, statement.name)(**statement.options)

    def backward(self, how: str, xs: list[int], blocks: list[Any], no_sync: bool) -> None:
        with self._by.session.no_sync() if no_sync else contextlib.nullcontext():
            if how == "together":
                self._by.scale(self._by.loss(xs[0], blocks[0]) + self._by.loss(xs[1], blocks[1])).backward()
                return
            losses = [self._by.scale(self._by.loss(x, calls)) for x, calls in zip(xs, blocks, strict=True)]
            losses[0].backward(retain_graph=how == "twice")
            losses[-1].backward() if how != "once" else None

    def clip(self, max_norm: float, p: float) -> None:
        self._by.see(self._by.session.clip(max_norm, p))

    def clip_values(self, limit: float) -> None:
        clip_model_values(self._by.session, limit)

    def read(self, p: float) -> None:
        """Norms by name, and whole gradients."""
        for found in (gradient_norms(self._by.session, p), full_gradients(self._by.session)):
            for name in sorted(found):
                self._by.see(found[name])

    def drop(self, part: float) -> None:
        names = [name for name, _ in self._by.session.model.named_parameters()]
        draw = random.Random(part)
        chosen = {name for name in names if draw.random() < part}
        for name, parameter in self._by.session.model.named_parameters():
            if name in chosen:
                parameter.grad = None

    def step(self, of: list[int]) -> None:
        for i in of:
            self._by.optimizers[i].step()

    def scaled_step(self, clip: bool, of: list[int]) -> None:
        if self._by.scaler is None or not all(has_gradients(self._by.optimizers[i]) for i in of):
            return
        if clip:
            for i in of:
                self._by.scaler.unscale_(self._by.optimizers[i])
        for i in of:
            self._by.scaler.step(self._by.optimizers[i])
        self._by.scaler.update()
        self._by.see(torch.tensor(self._by.scaler.get_scale()))

    def zero_grad(self, of: str) -> None:
        if of == "model":
            self._by.session.model.zero_grad()
        else:
            for optimizer in self._by.optimizers:
                optimizer.zero_grad()

    def set_lr(self, lr: float) -> None:
        for optimizer in self._by.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def evaluate(self, x: int, blocks: Any, inference: bool) -> None:
        with torch.inference_mode() if inference else torch.no_grad():
            self._by.see(self._by.loss_of(0, x, blocks))

    def forward(self, x: int, blocks: Any) -> None:
        self._by.loss(x, blocks)

    def gradients(self, x: int, blocks: Any) -> None:
        """By hand, of one rank's loss: what .grad holds stays as it is."""
        loss = self._by.loss_of(0, x, blocks)
        (found,) = torch.autograd.grad(loss, [self._by.session.model.gain])
        self._by.see(found)

    def look(self) -> None:
        state = self._by.session.state()
        self._by.see(torch.stack([value.double().abs().sum() for value in state.values()]).float())

    def write(self, write: bool, limit: float) -> None:
        """Clamp all weights, the same on every rank."""
        model = self._by.session.model
        cut = isinstance(self._by.session, CutSession)
        whole = npuzero.gathered(model, write=write) if cut else contextlib.nullcontext()
        with whole, torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-limit, limit)

    def stumble(self, x: int, blocks: Any, backward: bool) -> None:
        """An exception on every rank, in a forward or a backward pass; after the latter gradients are dropped."""
        with pytest.raises(ProgramStumble):
            if not backward:
                self._by.loss(x, blocks, stumble=True)
            loss = self._by.loss(x, blocks)
            loss.register_hook(lambda _: _raise_stumble())
            loss.backward()
        if backward:
            self.zero_grad("optimizers")

    def reload(self, model: bool, optimizer: bool) -> None:
        if model:
            self._by.session.load(self._by.session.state())
        if optimizer:
            for each in self._by.optimizers:
                each.load_state_dict(each.state_dict())


def _raise_stumble() -> Tensor:
    raise ProgramStumble
