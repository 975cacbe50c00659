"""Bad inputs: forward and backward passes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

import npuzero
from npuzero import PRESETS, StateError
from npuzero.comm import World
from world.toy import ToyGPT, build_seeded_model

from .case import BadInputTable, backward_toy_loss, bad_input_loss, shard_toy

TABLE = BadInputTable()
bad, fine = TABLE.bad, TABLE.fine


@bad("step inside backward", StateError, "inside a backward", "after", ranks=2)
def _(world: World) -> None:
    model = shard_toy(world)
    optimizer = npuzero.AdamW(model.parameters())
    model.blocks[1].register_full_backward_hook(lambda *_: optimizer.step())
    backward_toy_loss(model, world)


@bad("clip inside backward", StateError, "inside a backward", "after", ranks=2)
def _(world: World) -> None:
    model = shard_toy(world)
    model.blocks[1].register_full_backward_hook(lambda *_: npuzero.clip_grad_norm_(model, 1.0) and None)
    backward_toy_loss(model, world)


class ExplodeInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("boom")


class SkipsBlockGPT(ToyGPT):
    """Leave a block out."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in (self.blocks[0], self.blocks[2]):
            x = block(x)
        return self.head(self.norm(x)) * self.scale


class ExplodingGPT(ToyGPT):
    explode = True

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 0 and self.explode:
                x = ExplodeInBackward.apply(x)
        return self.head(self.norm(x)) * self.scale


@bad("step after a backward that raised", StateError, "zero_grad", ranks=2)
def _(world: World) -> None:
    model = shard_toy(world, model=build_seeded_model(make=ExplodingGPT))
    optimizer = npuzero.AdamW(model.parameters())
    with contextlib.suppress(ArithmeticError):
        backward_toy_loss(model, world)
    optimizer.step()


def _weights_after(world: World, stage: str, faulty: bool) -> dict[str, Tensor]:
    """Return the weights after two good steps, with a failing forward, backward and step between them."""
    model = shard_toy(world, plan=stage, model=build_seeded_model(make=ExplodingGPT))
    optimizer = npuzero.AdamW(model.parameters(), lr=0.1)
    for explode in (False, True, False):
        model.explode = explode
        if not explode:
            backward_toy_loss(model, world)
            optimizer.step()
        elif faulty:
            with contextlib.suppress(ArithmeticError):
                backward_toy_loss(model, world)
            with contextlib.suppress(IndexError):
                model(torch.full((1, 12), 1000))
        optimizer.zero_grad()
    return npuzero.full_state_dict(model, rank0_only=False)


for _stage in PRESETS:

    @fine(f"going on after a pass that raised, {_stage}")
    def _(world: World, stage: str = _stage) -> None:
        plain, faulty = (_weights_after(world, stage, faulty) for faulty in (False, True))
        for name, value in plain.items():
            assert value.equal(faulty[name]), name

    @fine(f"a block nobody uses, {_stage}")
    def _(world: World, stage: str = _stage) -> None:
        model = shard_toy(world, plan=stage, model=build_seeded_model(make=SkipsBlockGPT))
        optimizer = npuzero.AdamW(model.parameters())
        for _ in range(2):
            backward_toy_loss(model, world)
            optimizer.step()
            optimizer.zero_grad()


for _stage in ("zero0", "zero1", "zero2"):

    @fine(f"a rank without a backward pass, {_stage}")
    def _(world: World, stage: str = _stage) -> None:
        plain = build_seeded_model()
        torchs = torch.optim.SGD(plain.parameters(), lr=0.1)
        model = shard_toy(world, plan=stage)
        ours = npuzero.ZeroOptimizer(torch.optim.SGD, [p for p in model.parameters() if p.requires_grad], lr=0.1)
        for takes_part in (range(2), range(1), range(2)):
            for rank in takes_part:
                (bad_input_loss(plain, rank) / 2).backward()
                if rank == world.rank:
                    backward_toy_loss(model, world)
            for optimizer in (torchs, ours):
                optimizer.step()
                optimizer.zero_grad()
        found = npuzero.full_state_dict(model, rank0_only=False)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
