"""Pipelines of transformers' models and of tied embeddings, in combination with every other axis."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import npuzero
from npuzero import comm
from npuzero.comm import World
from npuzero.plan import DATA
from world.toy import build_seeded_model

from .pipeline_training import DeepModel, PipelineRun, assert_like_plain, relative_distance, train_pipeline

TIED = PipelineRun(make=partial(DeepModel, 6, tied=True), steps=10, clip=0.5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_tied_embedding_is_the_same_on_both_ends(ranks: int, stage: int):
    found = train_pipeline(TIED, ranks, stage)
    assert_like_plain(TIED, found, 1e-6)
    first, last = found[0], found[-1]
    assert torch.equal(first.state["tokens.weight"], last.state["tokens.weight"])
    assert last.pipe.tied


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_tied_embeddings_grid(schedule: str, chunks: int, stage: int, kind: str):
    run = replace(TIED, data=2, kind=kind)
    found = train_pipeline(run, 2, stage, schedule=schedule, chunks=chunks)
    assert_like_plain(run, found, 1e-6 if kind == "sgd" else 1e-4)
    weights = [each.state["tokens.weight"] for each in found]
    assert all(torch.equal(weights[0], other) for other in weights[1:])


# --- transformers -----------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SEQUENCE, STEPS, MICRO = 8, 2, 2


def build_pipeline_llama(tied: bool = False) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))


def build_pipeline_qwen() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8))


def pipeline_tokens(step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randint(1, SIZES["vocab_size"], (2 * MICRO, SEQUENCE), generator=generator)


def train_causal_lm_plain(make: Any, data: int) -> tuple[dict[str, Tensor], list[float]]:
    model = build_seeded_model(make=make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for tokens in (part for index in range(data) for part in pipeline_tokens(step, index).chunk(MICRO)):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / MICRO / data
            loss.backward()
            total += loss.item()
        losses.append(total)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, losses


def assert_trains(
    make: Any, plan: str, *, mode: str | None = None, data: int = 1, schedule: str = "1f1b", **options: Any
):
    state, losses = train_causal_lm_plain(make, data)
    tensor = 2 if mode else 1

    def rank(world: World) -> Any:
        mesh = npuzero.mesh(world=world, pipe=2, tensor=tensor, local_size=1)
        model = build_seeded_model(make=make)
        if mode:
            model = npuzero.parallel.tensor(model, mesh, mode=mode)
        given = {"micro_batches": MICRO, "schedule": schedule} | options
        pipe = npuzero.pipeline(model, mesh, plan=plan, **given)
        optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, pipe.parameters(), lr=0.1, momentum=0.9)
        found = []
        for step in range(STEPS):
            tokens = pipeline_tokens(step, mesh.index(DATA))
            found.append(pipe.step(input_ids=tokens, labels=tokens).item())
            npuzero.clip_grad_norm_(pipe, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return npuzero.full_state_dict(pipe, rank0_only=False), found

    ranks = comm.run_threads(2 * tensor * data, rank, timeout_s=60)
    names = {name for found, _ in ranks for name in found}
    assert {name for name in state if name in names} >= {
        name for name, _ in build_seeded_model(make=make).named_parameters()
    }
    for found, own in ranks:
        torch.testing.assert_close(own, losses, rtol=1e-5, atol=0)
        assert own == ranks[0][1]
        assert relative_distance(found, state) <= 1e-5


@pytest.mark.parametrize(
    "make",
    [build_pipeline_llama, partial(build_pipeline_llama, tied=True), build_pipeline_qwen],
    ids=["llama", "tied llama", "qwen3"],
)
def test_models_of_transformers_run_by_their_own_forward(make: Any):
    assert_trains(make, "zero3")


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("mode", ["mtp", "msp", "fsp"])
def test_tensor_ranks_within_stages(mode: str, schedule: str):
    assert_trains(build_pipeline_llama, "zero2", mode=mode, schedule=schedule)


def test_tensor_ranks_send_a_part_each():
    """If ranks hold the same activations, each sends a part, and the next stage all-gathers the parts."""

    def sent(world: World, mode: str, held: int) -> int:
        mesh = npuzero.mesh(world=world, pipe=2, tensor=2, local_size=1)
        model = npuzero.parallel.tensor(build_seeded_model(make=build_pipeline_llama), mesh, mode=mode)
        pipe = npuzero.pipeline(model, mesh, 2, micro_batches=MICRO)
        optimizer = npuzero.AdamW(pipe.parameters(), lr=1e-3)
        pipe.step(input_ids=pipeline_tokens(0, 0), labels=pipeline_tokens(0, 0))
        optimizer.step()
        found = npuzero.report(pipe)
        assert found.bytes_sent == npuzero.predict(pipe, found.plan, mesh, activation_bytes=held).bytes_sent
        return found.bytes_sent["send"]

    whole = 2 * SEQUENCE * SIZES["hidden_size"] * 4
    for mode, held in (("mtp", whole), ("msp", whole // 2)):
        found = comm.run_threads(4, partial(sent, mode=mode, held=held), timeout_s=20)
        assert found == [MICRO * whole // 2] * 4


PRESETS = ["zero0", "zero1", "zero1.5", "zero2", "zero3", "zero3-keep", "hpz", "hsdp", "mics"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("mode", "schedule", "chunks"), [("mtp", "1f1b", 1), ("msp", "interleaved", 2), ("fsp", "gpipe", 1)]
)
def test_two_by_two_by_two(mode: str, schedule: str, chunks: int, preset: str):
    assert_trains(build_pipeline_llama, preset, mode=mode, data=2, schedule=schedule, chunks=chunks)
    assert_trains(partial(build_pipeline_llama, tied=True), preset, mode=mode, data=2, schedule=schedule, chunks=chunks)
