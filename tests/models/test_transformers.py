"""Models of transformers, unmodified, under the native loop: every preset trains as plain torch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import npuzero
from models.model_ranks import train_models
from models.training import TransformersLoop, make_stirred_model
from models.zoo import ZOO, zoo_batch
from npuzero import comm
from npuzero.comm import World
from npuzero.shard.layout.find_units import discover_units
from world.comm_ranks import rank_results, run_comm_ranks
from world.toy import build_seeded_model
from world.train import check_equals_plain, relative_difference

# What PEFT and most scripts call, by a name that transformers is about to change.
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")

every_model = pytest.mark.parametrize("name", ZOO)


def mark_slow_values(quick: tuple[Any, ...], every: tuple[Any, ...]) -> list[Any]:
    """All values of a parameter, those that are not ``quick`` marked as slow."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in every]


every_plan = pytest.mark.parametrize("plan", mark_slow_values(("zero2", "zero3"), npuzero.PRESETS))
every_cut_plan = pytest.mark.parametrize("plan", mark_slow_values(("zero3",), ("zero3", "zero3-keep", "hpz", "hsdp")))
every_size = pytest.mark.parametrize("size", mark_slow_values((2,), (1, 2, 3)))

UNITS = {
    "gpt2": ["transformer.h.0", "transformer.h.1"],
    "llama": ["model.layers.0", "model.layers.1"],
    "mixtral": ["model.layers.0", "model.layers.1"],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    "vit": ["vit.layers.0", "vit.layers.1"],
}
TIED = {
    "gpt2": {"lm_head.weight", "transformer.wte.weight"},
    "t5": {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"},
}


@every_model
def test_the_blocks_are_found(name: str) -> None:
    root, *units = discover_units(ZOO[name]())
    assert [unit.name for unit in units] == UNITS[name]
    assert not [path for path, _ in root.parameters if path.startswith(tuple(f"{block}." for block in UNITS[name]))]


@every_model
@every_plan
@every_size
def test_training_equals_plain_torch(name: str, plan: str, size: int) -> None:
    check_equals_plain(TransformersLoop(), size, make_stirred_model(name), plan=plan)


@every_model
@every_cut_plan
@every_size
@pytest.mark.parametrize("reentrant", mark_slow_values((False,), (False, True)))
def test_training_with_gradient_checkpointing(name: str, plan: str, size: int, reentrant: bool) -> None:
    check_equals_plain(
        TransformersLoop(steps=4, checkpointing=True, reentrant=reentrant), size, make_stirred_model(name), plan=plan
    )


@pytest.mark.slow
@every_model
@every_plan
def test_micro_batches_and_clipping(name: str, plan: str) -> None:
    check_equals_plain(TransformersLoop(micro_batches=3, clip=0.5), 3, make_stirred_model(name), plan=plan)


@pytest.mark.world
@pytest.mark.parametrize("size", mark_slow_values((), (1, 2, 3)))
def test_training_in_processes(size: int, tmp_path: Path) -> None:
    rank_results(run_comm_ranks(size, train_models, tuple(ZOO), npuzero.PRESETS, folder=tmp_path, limit_s=200.0))


@pytest.mark.world
def test_training_in_two_processes(tmp_path: Path) -> None:
    rank_results(run_comm_ranks(2, train_models, ("gpt2", "t5"), ("zero3",), folder=tmp_path))


# -- between the steps -------------------------------------------------------------------------------------------------


def after_a_step(world: World, name: str, plan: str, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = npuzero.zero(make_stirred_model(name)(), plan=plan, world=world, **options)
    optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
    transformers_train_step(model, optimizer, world, 0)
    return model, optimizer


def transformers_train_step(model: Any, optimizer: torch.optim.Optimizer, world: World, number: int) -> None:
    model(**zoo_batch(model, number, 0, world.rank)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def plain_twin(model: Any, name: str) -> Any:
    """A plain model with the weights of a cut one."""
    plain = ZOO[name]()
    plain.load_state_dict(npuzero.full_state_dict(model, rank0_only=False))
    return plain


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "t5"])
@every_cut_plan
def test_generating_between_steps(name: str, plan: str) -> None:
    """T5 calls its encoder outside of its forward."""

    def rank(world: World) -> tuple[Tensor, Tensor]:
        model, optimizer = after_a_step(world, name, plan)
        plain = plain_twin(model, name)
        prompt = zoo_batch(model, 5, 0, 0)["input_ids"]
        made = [m.eval().generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False) for m in (model, plain)]
        transformers_train_step(model.train(), optimizer, world, 1)
        return made[0], made[1]

    for cut, whole in comm.run_threads(2, rank):
        assert cut.tolist() == whole.tolist()


@every_model
@every_plan
def test_evaluation(name: str, plan: str) -> None:
    def rank(world: World) -> float:
        model, _ = after_a_step(world, name, plan)
        plain = plain_twin(model, name)
        with torch.no_grad():
            cut, whole = (m.eval()(**zoo_batch(m, 5, 0, world.rank)).logits for m in (model, plain))
        return relative_difference(cut, whole)

    assert max(comm.run_threads(2, rank)) < 1e-6


@pytest.mark.parametrize("name", TIED)
@every_plan
def test_what_is_tied_stays_tied(name: str, plan: str) -> None:
    def rank(world: World) -> None:
        model, _ = after_a_step(world, name, plan)
        assert len({id(model.get_parameter(path)) for path in TIED[name]}) == 1
        model.tie_weights()  # transformers calls it at will
        assert len({id(model.get_parameter(path)) for path in TIED[name]}) == 1
        state = npuzero.full_state_dict(model, rank0_only=False)
        assert len({id(state[path]) for path in TIED[name]}) == 1
        transformers_train_step(model, npuzero.AdamW(model.parameters()), world, 1)

    comm.run_threads(2, rank)


@every_plan
def test_buffers_stay_as_they_are(plan: str) -> None:
    """Rotary frequencies are buffers that no state dict has; in bfloat16 they would turn by other angles."""

    def rank(world: World) -> list[Tensor]:
        model, _ = after_a_step(world, "llama", plan, precision="bf16")
        return [buffer.clone() for buffer in model.buffers()]

    expected = list(ZOO["llama"]().buffers())
    assert expected
    for found in comm.run_threads(2, rank):
        for buffer, other in zip(expected, found, strict=True):
            assert buffer.dtype == other.dtype and torch.equal(buffer, other)


@every_model
@every_plan
def test_bfloat16_parameters_learn(name: str, plan: str) -> None:
    """By zero()'s argument, float32 images and all: the batch it sees again and again is learned."""

    def rank(world: World) -> list[float]:
        model = npuzero.zero(
            build_seeded_model(make=make_stirred_model(name)), plan=plan, world=world, precision="bf16"
        )
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(6):
            loss = model(**zoo_batch(model, 0, 0, world.rank)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    for losses in comm.run_threads(2, rank):
        assert losses[-1] < 0.95 * losses[0], losses
