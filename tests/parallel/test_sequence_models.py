"""Models of transformers give the same results on slices of sequences as on full sequences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import ConfigError, parallel
from npuzero.comm import World, run_threads
from npuzero.plan import DATA
from world.toy import build_seeded_model
from world.train import assert_same_bits, assert_states_close

transformers: Any = pytest.importorskip("transformers")

VOCABULARY, SEQUENCE = 37, 16
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build_sequence_llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_SIZES, "num_key_value_heads": 2, **more}))


def build_sequence_qwen3(**more: Any) -> Any:
    """Norms of queries and keys, and heads with more elements in total than the model's width."""
    sizes = {**_SIZES, "num_key_value_heads": 1, "head_dim": 16}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **more))


def mistral(**more: Any) -> Any:
    """A token attends to the five before it, some of them in another rank's slice."""
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**_SIZES, num_key_value_heads=4, sliding_window=6, **more)
    )


def build_sequence_gpt2(**more: Any) -> Any:
    """Learned positions, packed Linears."""
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **still, **more))


def sequence_model_batch(kind: str, seed: int = 0) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    given = {"input_ids": tokens, "labels": tokens.clone()}
    if kind == "padded":
        given["attention_mask"] = torch.ones_like(tokens)
        given["attention_mask"][0, 11:] = 0
        given["labels"][0, 11:] = -100
    if kind == "packed":
        given["position_ids"] = torch.cat([torch.arange(n) for n in (5, 4, 7)]).expand(2, -1)
        given["labels"][:, [5, 9]] = -100  # the first token of a sequence is no token's successor
    return given


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_sequence_model(make: Callable[..., Any], kind: str, ranks: int, **config: Any) -> None:
    """Logits, the loss on every rank, and gradients averaged over the ranks equal those on full sequences."""
    whole, given = build_seeded_model(make=lambda: make(**config)), sequence_model_batch(kind)
    models = [copy.deepcopy(whole) for _ in range(ranks)]

    def rank(world: World) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        mesh = npuzero.mesh(sequence=ranks, world=world)
        model = parallel.sequence(models[world.rank], mesh)
        found = model(**parallel.slice(given, mesh))
        found.loss.backward()
        return found.loss.detach(), found.logits.detach(), named_gradients(model)

    expected = whole(**given, use_cache=False)  # with a cache transformers does not look for packed sequences
    expected.loss.backward()
    found = run_threads(ranks, rank)
    seen = given.get("attention_mask", torch.ones(2, SEQUENCE)).bool()
    logits = torch.cat([each[1] for each in found], 1)
    assert_states_close({"logits": logits[seen]}, {"logits": expected.logits.detach()[seen]}, 1e-5)
    for loss, _, _ in found:
        assert torch.equal(loss, found[0][0])
    mean = {name: sum(each[2][name] for each in found) / ranks for name in found[0][2]}
    assert_states_close({"loss": found[0][0], **mean}, {"loss": expected.loss.detach(), **named_gradients(whole)}, 1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
def test_slices_of_a_llama(kind: str, attention: str) -> None:
    check_sequence_model(build_sequence_llama, kind, 2, attn_implementation=attention)


@pytest.mark.parametrize(
    ("make", "attention"), [(build_sequence_qwen3, "eager"), (mistral, "sdpa"), (build_sequence_gpt2, "sdpa")]
)
def test_slices_of_other_models(make: Callable[..., Any], attention: str) -> None:
    check_sequence_model(make, "plain", 4, attn_implementation=attention)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("make", [build_sequence_llama, build_sequence_qwen3, mistral, build_sequence_gpt2])
def test_slices_of_all_models(make: Callable[..., Any], ranks: int, kind: str, attention: str) -> None:
    check_sequence_model(make, kind, ranks, attn_implementation=attention)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [1, 2, 4])
def test_key_heads_of_a_llama(keys: int) -> None:
    check_sequence_model(build_sequence_llama, "plain", 4, attn_implementation="sdpa", num_key_value_heads=keys)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_llama_trains_under_isp(checkpointing: bool) -> None:
    """Four ranks, two sequences a step, each on two of them; parameters over two ranks, states over four."""

    def train(model: Any, optimizer: Any, loss_of: Callable[[int], Tensor]) -> None:
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for step in range(3):
            loss_of(step).backward()
            optimizer.step()
            optimizer.zero_grad()

    def rank(world: World) -> dict[str, Tensor]:
        mesh = npuzero.mesh(sequence=2, world=world)
        model: Any = npuzero.zero(
            parallel.sequence(build_seeded_model(make=build_sequence_llama), mesh), plan="isp", local_size=2, mesh=mesh
        )
        optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
        group = mesh.index(DATA) // 2
        train(
            model,
            optimizer,
            lambda step: model(**parallel.slice(sequence_model_batch("plain", 2 * step + group), mesh)).loss,
        )
        assert npuzero.report(model).bytes_sent == npuzero.predict(model, "isp", mesh, local_size=2).bytes_sent
        return npuzero.full_state_dict(model, rank0_only=False)

    whole = build_seeded_model(make=build_sequence_llama)
    plain = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    train(
        whole,
        plain,
        lambda step: sum(whole(**sequence_model_batch("plain", 2 * step + group)).loss for group in range(2)) / 2,
    )
    states = run_threads(4, rank)
    for state in states:
        assert_same_bits(state, states[0])
    assert_states_close(states[0], whole.state_dict(), 2e-6)


def test_positions_are_those_of_the_slice_where_none_are_given() -> None:
    given = sequence_model_batch("plain")["input_ids"]

    def rank(world: World) -> None:
        mesh = npuzero.mesh(sequence=2, world=world)
        model = parallel.sequence(build_seeded_model(make=build_sequence_gpt2), mesh)
        part = parallel.slice({"input_ids": given}, mesh)
        assert torch.equal(model(part["input_ids"]).logits, model(**part).logits)
        twin = copy.deepcopy(model)  # with the same ranks
        assert torch.equal(twin(**part).logits, model(**part).logits)

    run_threads(2, rank)


def test_a_model_that_is_not_prepared_does_not_train_on_a_sequence_axis() -> None:
    """Its attention would see only this rank's slice."""

    def rank(world: World) -> None:
        mesh = npuzero.mesh(sequence=2, world=world)
        with pytest.raises(ConfigError, match=r"axis sequence: .*got GPT2.*npuzero.parallel.sequence\(model, mesh\)"):
            npuzero.zero(build_seeded_model(make=build_sequence_gpt2), mesh=mesh)
        npuzero.zero(parallel.sequence(build_seeded_model(make=build_sequence_gpt2), mesh))

    run_threads(2, rank)


def sequence_refusals(mesh: Any) -> dict[str, Callable[[], object]]:
    """Calls that every rank refuses, by the text of the error."""
    model, part = (
        parallel.sequence(build_seeded_model(make=build_sequence_llama), mesh),
        parallel.slice(sequence_model_batch("padded"), mesh),
    )
    sliced = {**part, "attention_mask": parallel.slice(part["attention_mask"], mesh)}
    t5 = {"vocab_size": 37, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    neox = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    bart = {"vocab_size": 37, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 8}
    heads = {**_SIZES, "num_attention_heads": 6, "hidden_size": 24, "num_key_value_heads": 3}
    return {
        r"LlamaForCausalLM: expected heads that the 4 ranks .* got 6 heads\. Choose sequence among 1, 2, 3, 6": (
            lambda: parallel.sequence(build_sequence_llama(**heads), mesh)
        ),
        "got Linear. Wrap the attention": lambda: parallel.sequence(nn.Linear(2, 2), mesh),
        "T5ForConditionalGeneration, which is more": lambda: parallel.sequence(
            transformers.T5ForConditionalGeneration(transformers.T5Config(**t5)), mesh
        ),
        "layers that bring tokens together without attention": lambda: parallel.sequence(
            transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1)),
            mesh,
        ),
        "AttentionInterface; got GPTNeoXJapaneseForCausalLM": lambda: parallel.sequence(
            transformers.GPTNeoXJapaneseForCausalLM(transformers.GPTNeoXJapaneseConfig(**neox)), mesh
        ),
        "BartForCausalLM, which takes no position_ids": lambda: parallel.sequence(
            transformers.BartForCausalLM(transformers.BartConfig(**bart)), mesh
        ),
        "prepared already": lambda: parallel.sequence(model, mesh),
        r"attention_mask \[batch, 16\] of whole sequences, if any; got attention_mask \[2, 4\]": lambda: model(
            **sliced
        ),
        "got another pattern": lambda: model(
            input_ids=part["input_ids"], position_ids=torch.tensor([[0, 1, 0, 1]]).expand(2, -1)
        ),
        # The text depends on the object that transformers makes first: the mask or the cache.
        r"got past_key_values|generate\(\)": lambda: model.generate(part["input_ids"], max_new_tokens=2),
        "got output_attentions": lambda: model(**part, output_attentions=True),
    }


@pytest.mark.filterwarnings("ignore")  # transformers warns of the refused arguments
def test_what_slices_cannot_do_is_refused_by_every_rank() -> None:
    def rank(world: World) -> None:
        mesh = npuzero.mesh(sequence=4, world=world)
        for message, call in sequence_refusals(mesh).items():
            with pytest.raises(ConfigError, match=message):
                call()

    run_threads(4, rank)
