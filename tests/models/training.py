"""The loop in which transformers models train, and its oracle: see world/train.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from world.train import Session, State

from .zoo import ZOO, zoo_batch


@cache
def make_stirred_model(name: str, **config: object) -> Callable[[], nn.Module]:
    """Makes the model ``name`` as after some training: no parameter is all zeros or ones."""

    def make() -> nn.Module:
        return stir_parameters(ZOO[name](**config))

    return make


@torch.no_grad()
def stir_parameters(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@dataclass(frozen=True)
class TransformersLoop:
    """A training loop as its user writes it, over the trainable parameters.

    A key's bias has no gradient but for rounding, and Adam divides a gradient by its own size: hence ``eps``, larger
    than elsewhere, since T5 multiplies what rounding makes by more than the other models do.
    """

    steps: int = 10
    micro_batches: int = 1
    clip: float | None = None
    checkpointing: bool = False
    reentrant: bool = False

    def __call__(self, session: Session) -> State:
        model = session.model
        model.train()
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": self.reentrant})
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = session.optimizer(torch.optim.AdamW, trained, lr=1e-2, eps=1e-2)
        losses = []
        for step in range(self.steps):
            for micro_batch in range(self.micro_batches):
                loss = session.mean(
                    lambda rank, step=step, micro=micro_batch: model(**zoo_batch(model, step, micro, rank)).loss
                )
                (loss / self.micro_batches).backward()
            if self.clip is not None:
                session.clip(self.clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert losses[-1].isfinite()
        return {}
