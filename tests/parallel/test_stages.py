"""The stages of a pipeline, run in order, give the full model's results, under the same parameter names."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import npuzero
from npuzero import comm, parallel
from npuzero.comm import World
from npuzero.errors import ConfigError
from npuzero.parallel.pipeline_parallel.divide import PipelineStages, StageDivision, divide_into_stages
from npuzero.plan import PIPE, Relation
from npuzero.shard.layout.axis_relations import get_relations
from npuzero.shard.layout.find_units import discover_units
from parallel.tensor_models import TOY_PLAN, tensor_batch
from parallel.tensor_models import TensorBlock as AttentionBlock
from world.conftest import one_thread_per_rank  # noqa: F401
from world.toy import build_seeded_model
from world.train import assert_same_bits, assert_states_close

# PEFT and transformers warn of each other's names.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")

VOCABULARY, HIDDEN = 48, 24
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 8}


def make_causal_model(kind: str, **more: Any) -> Callable[[], nn.Module]:
    """Build a causal model of transformers."""

    def make() -> nn.Module:
        name = "Gemma3Text" if kind == "Gemma3" else kind
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return make


def lora() -> nn.Module:
    return get_peft_model(
        make_causal_model("Llama")(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": make_causal_model("Llama"),
    "tied": make_causal_model("Llama", tie_word_embeddings=True),
    "base": lambda: make_causal_model("Llama")().model,
    "qwen2": make_causal_model("Qwen2"),
    "qwen3": make_causal_model("Qwen3", use_sliding_window=True, **ALTERNATING),
    "gemma3": make_causal_model("Gemma3", query_pre_attn_scalar=8, **ALTERNATING),
    "granite": make_causal_model("Granite", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5),
    "mixtral": make_causal_model("Mixtral", num_local_experts=4),
    "lora": lora,
}


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(32, HIDDEN) * 0.1)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        return self.tokens(tokens) * scale + self.positions[: tokens.shape[1]]


class ListedGPT(nn.Module):
    """A model without a usable forward: a list gives the order of calls."""

    def __init__(self, tied: bool = False, dropout: float = 0.5) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(4))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.register_buffer("seen", torch.zeros(()))
        if tied:
            self.head.weight = self.embedding.tokens.weight

    @property
    def listed(self) -> list[nn.Module]:
        return [self.embedding, self.dropout, self.blocks, self.norm, self.head]

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        x = self.dropout(self.embedding(tokens, scale))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_layers(count: int = 5, width: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)))


def run_stages(stages: PipelineStages, *args: Any, **options: Any) -> Any:
    for stage in range(stages.count):
        args = (stages(stage, *args, **options),)
    return args[0]


def take_all_stages(division: StageDivision) -> PipelineStages:
    return division.take(range(len(division.blocks)))


def stage_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_named_as(part: nn.Module, whole: nn.Module) -> None:
    for names in ("named_parameters", "named_buffers"):
        assert [n for n, _ in getattr(part, names)()] == [n for n, _ in getattr(whole, names)()]
    assert list(part.state_dict()) == list(whole.state_dict())


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_stages_of_a_sequential(ranks: int) -> None:
    whole = build_seeded_model(make=build_layers)
    stages = take_all_stages(divide_into_stages(copy.deepcopy(whole), ranks))
    x = torch.randn(3, 8)
    expected, found = whole(x), run_stages(stages, x)
    assert torch.equal(found, expected)
    expected.sum().backward()
    found.sum().backward()
    assert_same_bits(stage_gradients(stages), stage_gradients(whole))
    assert_named_as(stages, whole)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_a_list_of_modules(tied: bool) -> None:
    whole = build_seeded_model(make=lambda: ListedGPT(tied=tied))
    model = copy.deepcopy(whole)
    stages = take_all_stages(divide_into_stages(model, 3, blocks=model.listed))
    tokens = tensor_batch(0, 0)["input_ids"]
    torch.manual_seed(1)
    expected = whole(tokens, scale=2.0)
    torch.manual_seed(1)
    found = run_stages(stages, tokens, scale=2.0)
    assert torch.equal(found, expected)
    for each in (found, expected):
        F.cross_entropy(each.flatten(0, 1), tokens.flatten()).backward()
    assert_same_bits(stage_gradients(stages), stage_gradients(whole))
    assert_named_as(stages, whole)
    assert torch.equal(run_stages(stages.eval(), tokens), whole.eval()(tokens)), "dropout is off, on every stage"


@pytest.mark.parametrize("name", MODELS)
def test_stages_of_a_transformers_model(name: str) -> None:
    whole = build_seeded_model(make=MODELS[name])
    batch = tensor_batch(0, 0)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :3] = 0
    options = {"attention_mask": mask} | ({} if name == "base" else {"labels": batch["labels"]})
    model = copy.deepcopy(whole)
    expected = whole(batch["input_ids"], **options)
    expected[0].sum().backward()
    for ranks in (2, 5):
        model.zero_grad()
        stages = take_all_stages(divide_into_stages(model, ranks))
        found = run_stages(stages, batch["input_ids"], **options)
        found[0].sum().backward()
        assert type(found) is type(expected)
        assert_same_bits({"first": found[0].detach()}, {"first": expected[0].detach()})
        assert_same_bits(stage_gradients(stages), stage_gradients(whole))
        assert_named_as(stages, whole)


@pytest.mark.parametrize("split", [(1, 4, 1, 1), (1, 1, 3, 2), (2, 1, 2, 2), (4, 1, 1, 1)])
def test_a_transformers_model_is_divided_anywhere(split: tuple[int, ...]) -> None:
    """Also if a stage has only the embedding, only the norm, or no layer."""
    whole = build_seeded_model(make=MODELS["granite"])
    stages = take_all_stages(divide_into_stages(copy.deepcopy(whole), 2, 2, split=split))
    batch = tensor_batch(0, 0)
    assert torch.equal(run_stages(stages, batch["input_ids"]).logits, whole(batch["input_ids"]).logits)


def test_modes_reach_what_a_stage_has_beside_its_blocks() -> None:
    model: Any = build_seeded_model(make=MODELS["llama"])
    model.model.dropout = nn.Dropout(0.5)
    model.model.layers[2].register_forward_hook(lambda _layer, _args, output: model.model.dropout(output))
    stages = take_all_stages(divide_into_stages(model.train(), 2))
    tokens = tensor_batch(0, 0)["input_ids"]
    assert stages.eval() is stages and not model.model.dropout.training
    assert torch.equal(run_stages(stages, tokens).logits, model.eval()(tokens).logits)
    assert stages.train() is stages and model.model.dropout.training


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_with_activation_checkpointing(reentrant: bool) -> None:
    whole: Any = build_seeded_model(make=MODELS["qwen3"])
    model: Any = copy.deepcopy(whole)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    stages = take_all_stages(divide_into_stages(model.train(), 2))
    batch = tensor_batch(0, 0)
    whole.train()(**batch).loss.backward()
    run_stages(stages, **batch).loss.backward()
    assert_same_bits(stage_gradients(stages), stage_gradients(whole))


# -- what a rank has ---------------------------------------------------------------------------------------------------


def test_ranks_have_what_is_theirs_under_its_name_in_the_whole_model() -> None:
    model = build_seeded_model(make=MODELS["llama"])
    whole = dict(model.named_parameters())
    division = divide_into_stages(model, 2, chunks=2, split=(2, 1, 1, 3))
    first, second = division.take((2, 0)), division.take((1, 3))
    assert first.numbers == (0, 2) and second.numbers == (1, 3) and first.count == second.count == 4
    assert division.blocks[2] == ("model.layers.2",)
    found = {**dict(first.named_parameters()), **dict(second.named_parameters())}
    assert found.keys() == whole.keys() and all(found[name] is whole[name] for name in whole)
    layer = [name.removeprefix("model.layers.2.") for name, _ in first.named_parameters() if ".2." in name]
    assert layer == [name for name, _ in model.get_submodule("model.layers.2").named_parameters()]
    assert not {name.split(".")[2] for name, _ in first.named_parameters() if "layers" in name} - {"0", "2"}
    for stages in (first, second):  # rotary embeddings are on every stage
        assert dict(stages.named_buffers()).keys() == dict(model.named_buffers()).keys() != set()


def test_blocks_of_other_ranks_are_let_go() -> None:
    model = build_seeded_model(make=MODELS["gemma3"])
    gone = weakref.ref(model.get_submodule("model.layers.0")), weakref.ref(model.get_submodule("model.layers.3"))
    first = divide_into_stages(model, 2, split=(3, 4)).take((0,))
    del model
    gc.collect()
    assert gone[0]() is not None and gone[1]() is None
    assert first(0, tensor_batch(0, 0)["input_ids"]).shape == (2, 12, HIDDEN)


def test_every_block_is_a_unit() -> None:
    model = build_seeded_model(make=ListedGPT)
    division = divide_into_stages(model, 2, chunks=2, split=(2, 4, 1, 1), blocks=model.listed)
    names = [
        [spec.name for spec in discover_units(part, part.unit_rule)] for part in map(division.take, ((0, 2), (3,)))
    ]
    assert names == [["root", "embedding", "norm"], ["root", "head"]]
    units = discover_units(division.take((1,)), lambda *told: division.take((1,)).unit_rule(*told))
    assert {spec.name: len(spec.parameters) for spec in units} == {"root": 0, **{f"blocks.{i}": 15 for i in range(4)}}


def test_buffers_are_one_with_the_models() -> None:
    model = build_seeded_model(make=ListedGPT)
    stages = take_all_stages(divide_into_stages(model, 2, blocks=model.listed))
    stages.double()
    assert stages.get_buffer("seen").dtype == model.get_buffer("seen").dtype == torch.float64
    assert dict(stages.named_buffers()).keys() == {"seen"}


def test_buffers_of_blocks_are_on_their_stage() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
    found = [{name[0] for name, _ in divide_into_stages(model, 2).take((rank,)).named_buffers()} for rank in range(2)]
    assert found == [{"0"}, {"1"}]


@pytest.mark.parametrize("name", ["qwen2", "tied"])
def test_models_on_meta(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    stages = divide_into_stages(model, 2).take((1,))
    assert stages.numbers == (1,) and all(parameter.is_meta for parameter in stages.parameters())
    assert [*stages.state_dict()] == [key for key in model.state_dict() if key in stages.state_dict()]


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_tied_embedding_is_in_the_root_unit_of_both_ends(chunks: int) -> None:
    model = build_seeded_model(make=MODELS["tied"])
    division = divide_into_stages(model, 3, chunks)
    name, other = "model.embed_tokens.weight", "lm_head.weight"
    for rank in range(3):
        own = division.take(range(rank, 3 * chunks, 3))
        first, *_ = names = [each for each, _ in own.named_parameters()]
        root = [each for each, _ in discover_units(own, own.unit_rule)[0].parameters]
        if rank == 1:
            assert own.tied == () and name not in names and root == []
            continue
        assert own.tied == (name,) and first == name and root == [name]
        assert {name, other} <= own.state_dict().keys() and other not in names
        assert get_relations(own.get_parameter(name)) == {PIPE: Relation.SUMMED}


def test_a_tie_on_one_rank_is_a_tie_and_no_more() -> None:
    model = build_seeded_model(make=MODELS["tied"])
    stages = take_all_stages(divide_into_stages(model, 1, chunks=3))
    assert stages.tied == () and get_relations(stages.get_parameter("model.embed_tokens.weight")) == {}


# -- beside other axes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "GPT"])
@pytest.mark.parametrize("mode", ["mtp", "msp", "fsp"])
def test_over_tensor_ranks(mode: str, name: str) -> None:
    """Hidden states are sent between stages as slices of the sequence, with positions of the full sequence."""
    make: Callable[[], nn.Module] = (
        make_causal_model("Llama", head_dim=8) if name == "llama" else lambda: ListedGPT(dropout=0.0)
    )
    batch = tensor_batch(0, 0)

    def run(model: Any, forward: Callable[..., Any]) -> tuple[Tensor, dict[str, Tensor]]:
        found = forward(**batch).logits if name == "llama" else forward(batch["input_ids"])
        F.cross_entropy(found.flatten(0, 1), batch["labels"].flatten()).backward()
        return found.detach(), stage_gradients(model)

    def rank(world: World) -> tuple[list[int], Tensor, dict[str, Tensor]]:
        mesh = npuzero.mesh(tensor=2, world=world)
        model: Any = parallel.tensor(
            build_seeded_model(make=make), mesh, mode, plan=None if name == "llama" else TOY_PLAN
        )
        stages = take_all_stages(divide_into_stages(model, 2, 2, blocks=None if name == "llama" else model.listed))
        stages = npuzero.zero(stages, stage=0, mesh=mesh, units=stages.unit_rule)
        optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, stages.parameters(), lr=0.1)
        lengths: list[int] = []

        def forward(*args: Any, **options: Any) -> Any:
            for stage in range(4):
                args = (stages(stage, *args, **options),)
                lengths.append(args[0].shape[1] if isinstance(args[0], Tensor) else 0)
            return args[0]

        found, _ = run(stages, forward)
        optimizer.step()
        return lengths, found, npuzero.full_state_dict(stages, rank0_only=False)

    whole = build_seeded_model(make=make)
    expected, _ = run(whole, whole)
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    for lengths, logits, state in comm.run_threads(2, rank):
        assert set(lengths[:3]) == {12 if mode == "mtp" else 6}
        assert_states_close({"logits": logits}, {"logits": expected}, 1e-5)
        assert_states_close(state, whole.state_dict(), 1e-5)


def test_over_slices_of_sequences() -> None:
    tokens = torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    whole = build_seeded_model(make=MODELS["llama"])
    models = [copy.deepcopy(whole) for _ in range(2)]

    def rank(world: World) -> Tensor:
        mesh = npuzero.mesh(sequence=2, world=world)
        stages = take_all_stages(divide_into_stages(parallel.sequence(models[world.rank], mesh), 3))
        given = parallel.slice(tokens, mesh)
        return run_stages(stages, given).logits.detach()  # positions are those of the slice, on every stage

    found = torch.cat(comm.run_threads(2, rank), 1)
    assert_states_close({"logits": found}, {"logits": whole(tokens).logits.detach()}, 1e-5)


# -- which blocks ------------------------------------------------------------------------------------------------------


def test_embeddings_cost_nothing_and_heads_do() -> None:
    division = divide_into_stages(build_seeded_model(make=make_causal_model("Llama", vocab_size=4000)), 2)
    assert division.blocks == (
        tuple(f"model.{name}" for name in ("embed_tokens", *map("layers.{}".format, range(4)), "norm")),
        ("lm_head",),
    )


def test_splits_as_given() -> None:
    model = build_layers()
    assert divide_into_stages(model, 2, split=(1, 4)).blocks == (("0",), ("1", "2", "3", "4"))
    assert divide_into_stages(model, 2, split=("0", "3")).blocks == (("0", "1", "2"), ("3", "4"))
    assert divide_into_stages(model, 2, split=(3, 7), blocks=["4", *model[:4]]).blocks[0] == ("4.0", "4.1", "0.0")


# -- errors ------------------------------------------------------------------------------------------------------------


def shared_block() -> nn.Module:
    model = build_layers()
    model[3] = model[0]
    return model


def tied_inside() -> nn.Module:
    model = build_layers()
    model[2][0].weight = model[0][0].weight
    return model


def llama_with_replaced_forward() -> nn.Module:
    model: Any = MODELS["llama"]()
    model.model.forward = model.model.forward  # bound to all of the model
    return model


class NumbersModule(nn.Module):
    """A model with a child named like a property of Stages."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (build_layers, {"ranks": 6}, "at most as many as there are blocks: 5; got 6"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), {"ranks": 2}, "blocks with parameters: 1; got 2"),
        (build_layers, {"ranks": 0}, "ranks: expected a positive number"),
        (build_layers, {"ranks": 1, "chunks": 1.5}, "chunks: expected a positive number"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
            {"ranks": 2, "split": (1, 1)},
            "stage 1: expected parameters in every stage; got none in '1'",
        ),
        (build_layers, {"ranks": 2, "split": (1, 2, 2)}, "an entry for each of 2 stages"),
        (build_layers, {"ranks": 2, "split": (1, 3)}, "5 in all; got \\[1, 3\\], 4 in all"),
        (build_layers, {"ranks": 2, "split": (5, 0)}, "at least a block in each stage"),
        (build_layers, {"ranks": 2, "split": ("1", "2")}, "in order, from '0' on; got '1', '2'"),
        (MODELS["llama"], {"ranks": 2, "split": ("model.embed_tokens", "model.layer.2")}, "mean 'model.layers.2'"),
        (ListedGPT, {"ranks": 2}, "an nn.Sequential, a model of transformers .* got ListedGPT. Give blocks="),
        (ListedGPT, {"ranks": 2, "blocks": ["embeddding"]}, "got 'embeddding'. Did you mean 'embedding'"),
        (build_layers, {"ranks": 2, "blocks": [nn.Linear(2, 2)]}, "parts of Sequential; got Linear"),
        (
            ListedGPT,
            {"ranks": 2, "blocks": ["blocks", "norm"]},
            "parameter embedding.positions: .* in none of 5, 'blocks.0'",
        ),
        (ListedGPT, {"ranks": 2, "blocks": ["blocks", "blocks.1"]}, "block 'blocks.1': .* in two places"),
        (
            ListedGPT,
            {"ranks": 2, "blocks": ["blocks", "blocks.1.down"]},
            "'blocks.1.down': .* in two places, also 'blocks.1'",
        ),
        (ListedGPT, {"ranks": 2, "blocks": [""]}, "got the model itself"),
        (shared_block, {"ranks": 2}, "block '3': .* called once.* also '0'"),
        (tied_inside, {"ranks": 5}, "parameter 0.0.weight, tied to 2.0.weight: .* stages 0, 2 on ranks 0, 2 of 5"),
        (make_causal_model("Llama", output_hidden_states=True), {"ranks": 2}, "config.output_hidden_states=True"),
        (make_causal_model("Mixtral", output_router_logits=True), {"ranks": 2}, "config.output_router_logits=True"),
        (llama_with_replaced_forward, {"ranks": 2}, "forward of its class.* Compile the blocks"),
        pytest.param(lambda: torch.compile(MODELS["llama"]()), {"ranks": 2}, "is compiled", marks=pytest.mark.slow),
    ],
)
def test_models_that_cannot_be_divided(make: Callable[[], nn.Module], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        divide_into_stages(make(), **options)


def test_stages_that_cannot_be_taken() -> None:
    division = divide_into_stages(build_layers(), 2)
    for numbers in ((), (2,), (-1,)):
        with pytest.raises(ConfigError, match="numbers of stages from 0 to 1"):
            division.take(numbers)
    with pytest.raises(ConfigError, match=r"the stage's number first, one of 1; got shape=\(2, 3\)"):
        division.take((1,))(torch.ones(2, 3))
    with pytest.raises(ConfigError, match="one of the stages 1, which are here; got 0"):
        division.take((1,))(0, torch.ones(1, 8))
    with pytest.raises(ConfigError, match=r"'numbers'\. Rename"):
        divide_into_stages(NumbersModule(), 1, blocks=["numbers"]).take((0,))


@pytest.mark.parametrize("option", ["output_hidden_states", "output_attentions", "use_cache"])
def test_calls_that_a_stage_cannot_answer(option: str) -> None:
    stages = take_all_stages(divide_into_stages(MODELS["llama"](), 2))
    with pytest.raises(ConfigError, match=f"got {option}=True. Leave it out"):
        stages(0, tensor_batch(0, 0)["input_ids"], **{option: True})


def test_layers_that_hand_on_more_than_hidden_states() -> None:
    model: Any = MODELS["llama"]()
    model.model.layers[2].register_forward_hook(lambda _module, _args, output: (output, output))
    stages = take_all_stages(divide_into_stages(model, 2, split=(3, 4)))
    hidden = stages(0, tensor_batch(0, 0)["input_ids"])
    with pytest.raises(ConfigError, match=r"hand on one tensor.* got one that returns tuple"):
        stages(1, hidden)
