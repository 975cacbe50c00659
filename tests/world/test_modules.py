"""Models of every structure: results of units, shared parameters, and nested modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import npuzero
from npuzero import comm
from npuzero.comm import World
from world.toy import ToyBlock, ToyGPT, TrainingRecipe, build_seeded_model, toy_tokens
from world.train import CutSession, Make, Session, State, check_equals_plain, train_by_recipe

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

PLANS = ("zero1", "zero3", "hpz", "hsdp")
every_plan = pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in PLANS else pytest.mark.slow) for plan in npuzero.PRESETS]
)


def train_grouped_steps(session: Session) -> State:
    return train_by_recipe(session, TrainingRecipe(steps=3, micro_batches=2, clip=0.5, groups=True))


# -- what units return -------------------------------------------------------------------------------------------------


@dataclass
class BlockOutput:
    hidden: Tensor
    notes: list[Tensor]


class OpaqueOutput:
    """A user's class, opaque to libraries."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


PACK: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda x: {"notes": (x.detach(), None, 1), "hidden": x}, lambda output: output["hidden"]),
    "tuple": (lambda x: (x, [x.mean(), "text"]), lambda output: output[0] + 0 * output[1][0]),
    "dataclass": (lambda x: BlockOutput(x, [x.sum()]), lambda output: output.hidden),
    "object": (OpaqueOutput, lambda output: output.hidden),
}


class PackingGPT(ToyGPT):
    """Blocks that return the type ``kind``."""

    def __init__(self, kind: str) -> None:
        self.pack, self.unpack = PACK[kind]
        pack = self.pack

        class PackingBlock(ToyBlock):
            def forward(self, x: Tensor) -> Any:
                return pack(super().forward(x))

        super().__init__(block=PackingBlock)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.unpack(block(x))
        return x


def make_packing_gpt(kind: str) -> Make:
    def make() -> nn.Module:
        return PackingGPT(kind)

    return make


# -- activation checkpointing ------------------------------------------------------------------------------------------


class CheckpointedGPT(ToyGPT):
    """Recompute its blocks in backward."""

    reentrant = False

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class ReentrantCheckpointedGPT(CheckpointedGPT):
    reentrant = True


class CheckpointedPairsGPT(ToyGPT):
    """Checkpoints around several units at once."""

    def run_blocks(self, x: Tensor) -> Tensor:
        first, *rest = self.blocks

        def run_rest(x: Tensor) -> Tensor:
            for block in rest:
                x = block(x)
            return x

        return checkpoint(run_rest, first(x), use_reentrant=False)


class CheckpointedInsideGPT(ToyGPT):
    """Checkpoints a part of each unit."""

    class Inside(ToyBlock):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)) + self.empty.sum()
            return x + checkpoint(self.mlp, x, use_reentrant=False)

    def __init__(self) -> None:
        super().__init__(block=self.Inside)


# -- what units share, and what is inside them -------------------------------------------------------------------------


class TiedBlocksGPT(ToyGPT):
    """Parameters shared between blocks, and two names for one within a block."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = self.blocks
        third.mlp[1].weight = first.mlp[1].weight
        second.qkv = first.qkv
        second.mlp[0] = second.norm
        third.mlp[0].weight = third.mlp[0].bias


class OneBlockTwiceGPT(ToyGPT):
    """One block computes twice in a pass."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0], self.blocks[2]):
            x = block(x)
        return x


class FrozenPartsGPT(ToyGPT):
    """A frozen first block, with no gradient needed before it; a frozen middle one; one with a trainable part."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)
        self.blocks[3].requires_grad_(False)
        self.blocks[3].out.bias.requires_grad_(True)
        self.tokens.weight.requires_grad_(False)


class OnlyRootGPT(ToyGPT):
    """No repeated list: one unit."""

    def __init__(self) -> None:
        super().__init__(layers=1)


class EarlyExitGPT(ToyGPT):
    """The loss uses the first block alone; the remaining outputs are dropped."""

    def run_blocks(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        self.blocks[2](self.blocks[1](first))
        return first


class InPlaceGPT(ToyGPT):
    """A unit's result is changed in place."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x.mul_(0.5).add_(1.0)
        return x


class ReturnsItsInputGPT(ToyGPT):
    """Units return their input together with their output."""

    class Passing(ToyBlock):
        def forward(self, x: Tensor) -> Any:
            return x, super().forward(x)

    def __init__(self) -> None:
        super().__init__(block=self.Passing)

    def run_blocks(self, x: Tensor) -> Tensor:
        total = x
        for block in self.blocks:
            before, x = block(x)
            total = total + before
        return total + x


class KeywordsGPT(ToyGPT):
    """Units take their input by keyword, within a list."""

    class Keywords(ToyBlock):
        def forward(self, *, inputs: list[Tensor]) -> Tensor:
            return super().forward(inputs[0])

    def __init__(self) -> None:
        super().__init__(block=self.Keywords)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(inputs=[x])
        return x


class NormalizedWeightsGPT(ToyGPT):
    """torch's parametrizations compute a weight from others in forward."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            torch.nn.utils.parametrizations.weight_norm(block.out)


class TransposedGPT(ToyGPT):
    """Parameters that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.out.weight = nn.Parameter(torch.randn(16, 16).t() * 0.1)


class ScriptedGPT(ToyGPT):
    """Blocks that TorchScript's interpreter runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(torch.jit.script(nn.Sequential(*block.mlp)) for block in self.blocks)


class TracedGPT(ToyGPT):
    def __init__(self) -> None:
        super().__init__()
        example = torch.ones(2, 12, 16)
        self.blocks = nn.ModuleList(torch.jit.trace(block.mlp, example, check_trace=False) for block in self.blocks)


MODELS: tuple[Make, ...] = (
    *(make_packing_gpt(kind) for kind in PACK),
    CheckpointedGPT,
    ReentrantCheckpointedGPT,
    CheckpointedPairsGPT,
    CheckpointedInsideGPT,
    TiedBlocksGPT,
    OneBlockTwiceGPT,
    FrozenPartsGPT,
    OnlyRootGPT,
    EarlyExitGPT,
    InPlaceGPT,
    ReturnsItsInputGPT,
    KeywordsGPT,
    NormalizedWeightsGPT,
    TransposedGPT,
    ScriptedGPT,
    TracedGPT,
)


@pytest.mark.checkered
@every_plan
@pytest.mark.parametrize("make", MODELS, ids=[*PACK, *(make.__name__ for make in MODELS[len(PACK) :])])
def test_models(make: Make, plan: str) -> None:
    check_equals_plain(train_grouped_steps, 4, make, plan=plan, local_size=2)


# -- what is called without the root -----------------------------------------------------------------------------------


class InPartsGPT(ToyGPT):
    """The root's own parameters are in modules, which the user may call one by one."""

    class Body(nn.Module):
        def __init__(self, tokens: nn.Module, blocks: nn.Module) -> None:
            super().__init__()
            self.tokens, self.blocks = tokens, blocks

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens)
            for block in self.blocks:
                x = block(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.body = self.Body(self.tokens, self.blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.body(tokens)))


def train_by_parts(session: Session) -> State:
    """In some steps, and in every evaluation, the user calls parts of the model one by one instead of forward."""
    model = session.model
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    seen = []

    def loss_by_parts(step: int, rank: int) -> Tensor:
        tokens = toy_tokens(step, 0, rank)
        logits = model.head(model.norm(model.body(tokens[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    for step in range(4):
        loss = session.loss(step) if step % 2 else session.mean(lambda rank, step=step: loss_by_parts(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(model.body(toy_tokens(step, 1, 0)).mean())
    return {"what the body said": torch.stack(seen)}


@every_plan
def test_parts_called_by_themselves(plan: str) -> None:
    check_equals_plain(train_by_parts, 4, InPartsGPT, plan=plan, local_size=2)


def test_after_a_part_has_raised_the_next_call_is_whole() -> None:
    def rank(world: World) -> bool:
        model = npuzero.zero(build_seeded_model(make=InPartsGPT), plan="zero3", world=world)
        with pytest.raises(TypeError):
            model.body(None)
        with torch.no_grad():
            return bool(model.body(toy_tokens(0, 0, 0)[:, :-1]).isfinite().all())

    assert comm.run_threads(2, rank) == [True, True]


# -- methods beside forward --------------------------------------------------------------------------------------------


class DescribingBlock(ToyBlock):
    """A unit with an additional method."""

    def describe(self, x: Tensor) -> dict[str, Tensor]:
        return {"described": F.linear(x, self.out.weight, self.out.bias).relu()}


class EncodingGPT(ToyGPT):
    """Methods that use parameters of the root and of a unit directly, and one that calls both."""

    def __init__(self) -> None:
        super().__init__(block=DescribingBlock)

    def encode(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.tokens.weight) * self.scale + self.positions

    def score(self, tokens: Tensor) -> Tensor:
        described = self.blocks[0].describe(self.encode(tokens))["described"]
        return F.linear(self.run_blocks(described), self.tokens.weight)


def train_by_methods(session: Session) -> State:
    model = session.model
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    if isinstance(session, CutSession):
        for module, name in ((model, "encode"), (model, "score"), (model.blocks[0], "describe")):
            npuzero.register_forward_method(module, name)
    seen = []
    for step in range(4):
        for micro_batch in range(2):

            def loss(rank: int, step: int = step, micro_batch: int = micro_batch) -> Tensor:
                tokens = toy_tokens(step, micro_batch, rank)
                logits = model.score(tokens[:, :-1]) if (step + micro_batch) % 2 else model(tokens[:, :-1])
                return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

            session.mean(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(model.encode(toy_tokens(step, 3, 0)[:, :-1]).mean())
    return {"what encode said": torch.stack(seen)}


@every_plan
def test_methods_that_use_parameters_themselves(plan: str) -> None:
    check_equals_plain(train_by_methods, 4, EncodingGPT, plan=plan, local_size=2)


def test_a_method_that_nobody_registered_is_told_how() -> None:
    model = npuzero.zero(build_seeded_model(make=EncodingGPT), plan="zero3")

    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(make=EncodingGPT), plan="zero3", world=world)
        with pytest.raises(npuzero.StateError, match="register_forward_method"):
            model.encode(toy_tokens(0, 0, 0)[:, :-1])

    comm.run_threads(2, rank)
    for name in ("encod", 3):
        with pytest.raises(npuzero.ConfigError, match="a method of EncodingGPT"):
            npuzero.register_forward_method(model, name)  # type: ignore[arg-type]
    with pytest.raises(npuzero.StateError, match="zero"):
        npuzero.register_forward_method(nn.Linear(2, 2), "forward")


# -- what is frozen for a while ----------------------------------------------------------------------------------------


def train_a_part_at_first(session: Session) -> None:
    """All train at zero(); the first block and the embedding are frozen for some steps, and thawed."""
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    resting = [*session.model.blocks[0].mlp.parameters(), session.model.tokens.weight]
    for step in range(5):
        for parameter in resting:
            parameter.requires_grad_(step not in (0, 1, 3))
        session.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()


@every_plan
def test_what_is_frozen_after_zero_is_thawed_at_any_time(plan: str) -> None:
    check_equals_plain(train_a_part_at_first, 4, plan=plan, local_size=2)


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_what_was_frozen_at_zero_is_told_how_to_thaw(plan: str) -> None:
    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan=plan, world=world)
        optimizer = npuzero.AdamW(model.parameters())
        model.positions.requires_grad_(True)
        model(torch.arange(12)[None]).square().mean().backward()
        with pytest.raises(npuzero.StateError, match=r"positions.*thawed.*frozen after it.*at any time"):
            optimizer.step()

    comm.run_threads(2, rank)


# -- torch.func --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_torch_func_over_a_model_works_or_says_what_does(plan: str) -> None:
    inputs = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))

    def values(model: nn.Module) -> list[Tensor]:
        parameters = dict(model.named_parameters())
        return [torch.func.functional_call(model, parameters, (inputs,)), torch.vmap(model)(inputs)]

    def derivatives(model: nn.Module, parameters: dict[str, Tensor]) -> Any:
        return torch.func.grad(lambda p: torch.func.functional_call(model, p, (inputs,)).sum())(parameters)

    plain = build_seeded_model(make=make)
    expected = derivatives(plain, dict(plain.named_parameters()))

    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(make=make), plan=plan, world=world)
        for found, value in zip(values(model), values(plain), strict=True):
            torch.testing.assert_close(found, value)
        if plan == "zero0":
            torch.testing.assert_close(derivatives(model, dict(model.named_parameters())), expected)
            return
        with pytest.raises(npuzero.StateError, match=r"torch\.func through unit.*full_state_dict"):
            derivatives(model, dict(model.named_parameters()))
        whole = npuzero.full_state_dict(model, rank0_only=False)  # the remedy of the error
        torch.testing.assert_close(derivatives(build_seeded_model(make=make), whole), expected)

    comm.run_threads(2, rank)


# -- TorchScript -------------------------------------------------------------------------------------------------------


def test_torchscript_around_units_is_an_error_that_names_it() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(npuzero.ConfigError, match=r"TorchScript module Sequential.*Script or trace the blocks"):
        npuzero.zero(scripted)
    model = nn.ModuleDict({"body": scripted})
    with pytest.raises(npuzero.ConfigError, match=r"units: body\.0, within body: .* TorchScript module Sequential"):
        npuzero.zero(model, units=lambda name, module: name == "body.0")
