"""Layers divided over tensor ranks train as one process does, in every mode and under every preset."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import npuzero
from models.zoo import gpt2, mixtral
from npuzero import comm
from npuzero.comm import World
from npuzero.parallel import tensor, tensor_bytes
from npuzero.parallel.tensor_parallel.plan_words import REFUSED
from npuzero.plan import DATA
from parallel.tensor_models import (
    BATCH,
    HIDDEN,
    LAYERS,
    SEQUENCE,
    TOY_PLAN,
    VOCABULARY,
    ZOO,
    TensorToyGPT,
    build_tensor_llama,
    build_tied_llama,
    make_stirred_tensor_model,
    tensor_batch,
    tensor_model_loss,
    tensor_plan,
)
from world.conftest import one_thread_per_rank  # noqa: F401
from world.toy import build_seeded_model
from world.train import State, assert_same_bits, assert_states_close

MODES = ("mtp", "msp", "fsp")


def train_tensor_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], steps: int, clip: Any
) -> Tensor:
    told = []
    for step in range(steps):
        loss = torch.stack([tensor_model_loss(model, step, rank) for rank in ranks]).mean()
        loss.backward()
        told += [loss.detach(), clip(model).detach().clone()]
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(told)


@cache
def train_tensor_plain(name: str, ranks: int, steps: int = 3, kind: str = "SGD") -> tuple[State, Tensor]:
    model = build_seeded_model(make=make_stirred_tensor_model(name))
    optimizer = getattr(torch.optim, kind)(model.parameters(), **OPTIONS[kind])
    told = train_tensor_model(
        model, optimizer, [*range(ranks)], steps, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    )
    return {n: value.detach().clone() for n, value in model.state_dict().items()}, told


OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 1e-2, "eps": 1e-3}}


def train_tensor_rank(
    world: World, name: str, mode: str, preset: str, ranks: int, steps: int, kind: str, **config: Any
) -> tuple[State, Tensor]:
    mesh = npuzero.mesh(tensor=ranks, local_size=1, world=world)
    model = tensor(build_seeded_model(make=make_stirred_tensor_model(name)), mesh, mode, plan=tensor_plan(name))
    model = npuzero.zero(model, plan=preset, mesh=mesh)
    if kind == "AdamW":
        optimizer: Any = npuzero.AdamW(model.parameters(), **OPTIONS[kind])
    else:
        optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), **OPTIONS[kind])
    data = [mesh.index(DATA)]
    told = train_tensor_model(model, optimizer, data, steps, lambda m: npuzero.clip_grad_norm_(m, 1.0))
    return npuzero.full_state_dict(model, rank0_only=False), told


def check_tensor_training(
    name: str, mode: str, preset: str, ranks: int, data: int = 1, steps: int = 3, kind: str = "SGD"
) -> None:
    bound = {"SGD": 1e-6, "AdamW": 1e-4}[kind]
    results = comm.run_threads(
        ranks * data, lambda world: train_tensor_rank(world, name, mode, preset, ranks, steps, kind)
    )
    expected, told = train_tensor_plain(name, data, steps, kind)
    for state, _ in results:
        assert_same_bits(state, results[0][0])
    assert_states_close(results[0][0], expected, bound)
    losses = torch.stack([found for _, found in results]).mean(0)  # each data rank has its own
    assert_states_close({"loss": losses[::2], "norm": losses[1::2]}, {"loss": told[::2], "norm": told[1::2]}, bound)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ZOO)
def test_every_model_trains_as_in_one_process(name: str, mode: str) -> None:
    check_tensor_training(name, mode, "zero3", 2)


@pytest.mark.parametrize(("mode", "preset", "ranks"), [("mtp", "zero0", 3), ("msp", "zero1", 4), ("fsp", "zero2", 3)])
def test_more_ranks(mode: str, preset: str, ranks: int) -> None:
    check_tensor_training("tied", mode, preset, ranks)


@pytest.mark.parametrize(("name", "mode", "preset"), [("qwen3", "msp", "zero3"), ("ToyGPT", "mtp", "hpz")])
def test_beside_data_ranks(name: str, mode: str, preset: str) -> None:
    check_tensor_training(name, mode, preset, 2, data=2)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@pytest.mark.parametrize("mode", MODES)
def test_with_activation_checkpointing(mode: str) -> None:
    def rank(world: World) -> State:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = npuzero.zero(
            tensor(build_seeded_model(make=make_stirred_tensor_model("qwen3")), mesh, mode), stage=3, mesh=mesh
        )
        model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), **OPTIONS["SGD"])
        train_tensor_model(model.train(), optimizer, [0], 3, lambda m: npuzero.clip_grad_norm_(m, 1.0))
        return npuzero.full_state_dict(model, rank0_only=False)

    states = comm.run_threads(2, rank)
    assert_same_bits(states[0], states[1])
    assert_states_close(states[0], train_tensor_plain("qwen3", 1)[0], 1e-6)


def test_generating_between_steps() -> None:
    """Under mtp, with a cache of each rank's heads."""

    def rank(world: World) -> list[list[list[int]]]:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = npuzero.zero(
            tensor(build_seeded_model(make=make_stirred_tensor_model("qwen3")), mesh), stage=3, mesh=mesh
        )
        whole = ZOO["qwen3"]()
        whole.load_state_dict(npuzero.full_state_dict(model, rank0_only=False))
        prompt = tensor_batch(5, 0)["input_ids"]
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        return [m.eval().generate(prompt, **options).tolist() for m in (model, whole)]

    for cut, whole in comm.run_threads(2, rank):
        assert cut == whole


def test_with_adamw() -> None:
    check_tensor_training("qwen2", "msp", "zero2", 2, steps=5, kind="AdamW")


@pytest.mark.slow
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero1.5", "zero2", "zero3", "hpz"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ZOO)
def test_grid(name: str, mode: str, preset: str, ranks: int, data: int) -> None:
    check_tensor_training(name, mode, preset, ranks, data)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_nothing_drifts_apart(mode: str) -> None:
    """Query norms see other heads on each rank, and norms on slices other positions: the same bits after 200 steps."""
    results = comm.run_threads(2, lambda world: train_tensor_rank(world, "qwen3", mode, "zero1", 2, 200, "SGD"))
    assert_same_bits(results[0][0], results[1][0])


# -- a vocabulary whose logits stay sharded ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "tied"])
@pytest.mark.parametrize("mode", ["mtp", "msp"])
def test_the_loss_of_sharded_logits(name: str, mode: str) -> None:
    def rank(world: World) -> tuple[State, Tensor, int]:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = build_seeded_model(make=make_stirred_tensor_model(name))
        model = tensor(model, mesh, mode, plan={**model.tp_plan, "lm_head": "vocabulary"})
        model = npuzero.zero(model, stage=3, mesh=mesh)
        optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), **OPTIONS["SGD"])
        told = train_tensor_model(model, optimizer, [0], 3, lambda m: npuzero.clip_grad_norm_(m, 1.0))
        width = model(**tensor_batch(0, 0)).logits.shape[-1]
        return npuzero.full_state_dict(model, rank0_only=False), told, width

    results = comm.run_threads(2, rank)
    expected, told = train_tensor_plain(name, 1)
    assert_same_bits(results[0][0], results[1][0])
    assert_states_close(results[0][0], expected, 1e-6)
    assert_states_close({"told": results[0][1]}, {"told": told}, 1e-6)
    assert results[0][2] == VOCABULARY // 2


# -- bytes and memory --------------------------------------------------------------------------------------------------


def measure_tensor_bytes(world: World, mode: str, name: str, layers: int) -> int:
    mesh = npuzero.mesh(tensor=world.size, world=world)
    config = {} if name == "ToyGPT" else {"num_hidden_layers": layers}
    model = tensor(
        build_seeded_model(make=make_stirred_tensor_model(name, **config)), mesh, mode, plan=tensor_plan(name)
    )
    model = npuzero.zero(model, stage=0, mesh=mesh)
    tensor_model_loss(model, 0, 0).backward()
    return sum(tensor_bytes(model).values())


@pytest.mark.parametrize(("mode", "factor"), [("mtp", 8), ("msp", 8), ("fsp", 10)])
@pytest.mark.parametrize(("name", "ranks"), [("llama", 2), ("phi3", 3), ("qwen3", 4)])
def test_bytes_of_a_layer(name: str, ranks: int, mode: str, factor: int) -> None:
    few, many = (comm.run_threads(ranks, lambda world, n=n: measure_tensor_bytes(world, mode, name, n)) for n in (1, 3))
    activations = BATCH * SEQUENCE * HIDDEN * 4
    assert [b - a for a, b in zip(few, many, strict=True)] == [2 * factor * activations * (ranks - 1) // ranks] * ranks


@pytest.mark.parametrize(("mode", "factor"), [("mtp", 8), ("msp", 8), ("fsp", 10)])
def test_bytes_of_a_step_where_the_vocabulary_is_whole(mode: str, factor: int) -> None:
    """Sequences are also split before the first layer (all-gather in backward) and gathered after the last."""
    ends = 0 if mode == "mtp" else 2
    sent = comm.run_threads(2, lambda world: measure_tensor_bytes(world, mode, "ToyGPT", LAYERS))
    assert sent == [(factor * LAYERS + ends) * BATCH * SEQUENCE * HIDDEN * 4 // 2] * 2


@pytest.mark.parametrize("preset", ["zero1", "zero3", "zero++"])
def test_the_engine_sends_and_holds_what_is_predicted(preset: str) -> None:
    def rank(world: World) -> None:
        mesh = npuzero.mesh(tensor=2, local_size=2, world=world)
        model = npuzero.zero(
            tensor(build_seeded_model(make=make_stirred_tensor_model("qwen3")), mesh, "msp"), plan=preset, mesh=mesh
        )
        optimizer = npuzero.AdamW(model.parameters())
        train_tensor_model(model, optimizer, [mesh.index(DATA)], 3, lambda m: npuzero.clip_grad_norm_(m, 1.0))
        whole = tensor(build_seeded_model(make=make_stirred_tensor_model("qwen3")), mesh, "msp")
        report, predicted = npuzero.report(model), npuzero.predict(whole, preset, mesh, clip=True)
        assert (report.bytes_sent, report.sent_along) == (predicted.bytes_sent, predicted.sent_along)
        assert report.bytes_held == predicted.bytes_held

    comm.run_threads(4, rank)


def kept_inputs(world: World, mode: str) -> int:
    """Return the bytes kept for backward by inputs of column-parallel Linears and outputs of the norms before them."""
    mesh = npuzero.mesh(tensor=world.size, world=world)
    model = npuzero.zero(
        tensor(build_seeded_model(make=make_stirred_tensor_model("llama")), mesh, mode), stage=0, mesh=mesh
    )
    seen: dict[StorageWeakRef, int] = {}

    def see(x: Tensor) -> None:
        seen[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()

    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            module.register_forward_pre_hook(lambda _module, args: see(args[0]))
        if name.endswith(("input_layernorm", "post_attention_layernorm")):
            module.register_forward_hook(lambda _module, _args, output: see(output))
    loss = tensor_model_loss(model, 0, 0)
    kept = sum(nbytes for storage, nbytes in seen.items() if not storage.expired())
    loss.backward()
    assert all(storage.expired() for storage in seen)
    return kept


def test_fsp_keeps_slices_of_what_it_gathers() -> None:
    whole = 2 * LAYERS * BATCH * SEQUENCE * HIDDEN * 4
    for mode, parts in (("mtp", 1), ("msp", 1), ("fsp", 3)):
        assert comm.run_threads(3, lambda world, mode=mode: kept_inputs(world, mode)) == [whole // parts] * 3


# -- bad input ---------------------------------------------------------------------------------------------------------


def tensor_refusals(make: Callable[[], nn.Module], ranks: int = 2, mode: str = "mtp", plan: Any = None) -> list[Any]:
    def rank(world: World) -> Any:
        mesh = npuzero.mesh(tensor=ranks, world=world)
        try:
            tensor(make(), mesh, mode, plan=plan)
        except npuzero.NpuZeroError as error:
            return error
        return None

    return comm.run_threads(ranks, rank)


def check_tensor_refuses(*words: str, **options: Any) -> None:
    """Check that every rank refuses, with all ``words`` in the error."""
    for error in tensor_refusals(**options):
        assert isinstance(error, npuzero.ConfigError)
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in: {error}"


def toy_refusal_options(**changes: Any) -> dict[str, Any]:
    return {"make": TensorToyGPT, "plan": {**TOY_PLAN, **changes}}


def test_what_does_not_divide() -> None:
    check_tensor_refuses(
        "tensor", "self_attn", "24 heads", "1 or 2 or 3 or 4 or 6 or 12", make=build_tensor_llama, ranks=5
    )
    check_tensor_refuses(
        "key-value heads",
        "2 key-value heads (24",
        "1 or 2",
        make=lambda: build_tensor_llama(num_key_value_heads=2),
        ranks=3,
    )
    check_tensor_refuses(
        "lm_head.weight", "tensor", "50", "1, 2, 5", make=lambda: build_tensor_llama(vocab_size=50), ranks=3
    )
    check_tensor_refuses(
        "gate_proj.weight", "tensor", "38", "1, 2", make=lambda: build_tensor_llama(intermediate_size=38), ranks=3
    )
    check_tensor_refuses("heads of", "5", "1 or 2", ranks=5, **toy_refusal_options())


def test_plans_that_cannot_work() -> None:
    check_tensor_refuses(
        "'blocks.*.gates'", "matches nothing", "'blocks.*.gate'", **toy_refusal_options(**{"blocks.*.gates": "colwise"})
    )
    check_tensor_refuses(
        "is of parameters", "gate.weight", **toy_refusal_options(**{"blocks.*.gate.weight": "colwise"})
    )
    check_tensor_refuses("'colwize'", "Did you mean 'colwise'", **toy_refusal_options(**{"blocks.*.gate": "colwize"}))
    check_tensor_refuses("blocks.0.down", "'rowwise' without", make=TensorToyGPT, plan={"blocks.*.down": "rowwise"})
    check_tensor_refuses(
        "blocks.0.gate", "'colwise' without 'rowwise'", make=TensorToyGPT, plan={"blocks.*.gate": "colwise"}
    )
    check_tensor_refuses("nn.Linear", "LayerNorm", **toy_refusal_options(**{"blocks.*.norm1": "colwise"}))
    check_tensor_refuses("spans", **toy_refusal_options(**{"blocks.*.gate": ("colwise", 2)}))
    check_tensor_refuses(
        "lm_head.weight",
        "embed_tokens.weight",
        "tied",
        make=build_tied_llama,
        plan={"lm_head": "colwise_gather_output"},
    )
    for word in REFUSED:
        check_tensor_refuses(word, REFUSED[word], **toy_refusal_options(**{"blocks.*.gate": word}))


def test_models_that_are_refused_by_name() -> None:
    check_tensor_refuses("GPT2LMHeadModel", "Conv1D", make=gpt2)
    conv = {"transformer.h.*.mlp.c_fc": "colwise", "transformer.h.*.mlp.c_proj": "rowwise"}
    check_tensor_refuses("transformer.h.0.mlp.c_fc", "Conv1D", make=gpt2, plan=conv)
    check_tensor_refuses("moe_tp_experts", "router", make=mixtral)
    check_tensor_refuses("ToyGPT", make=TensorToyGPT)


def test_dropout() -> None:
    """Allowed under msp where ranks have their own positions or heads."""
    check_tensor_refuses("dropout", "0.1", make=lambda: TensorToyGPT(dropout=0.1), plan=TOY_PLAN)
    check_tensor_refuses("dropout", "0.1", make=lambda: TensorToyGPT(dropout=0.1), plan=TOY_PLAN, mode="msp")
    check_tensor_refuses("attention_dropout", "0.2", "msp", make=lambda: build_tensor_llama(attention_dropout=0.2))
    assert tensor_refusals(lambda: build_tensor_llama(attention_dropout=0.2), mode="msp") == [None, None]


def test_what_is_whole_beside_cut_linears() -> None:
    """A norm is recognized by its width; other parameters need a word in the plan, or are refused."""
    strange = lambda: with_parameter(TensorToyGPT(), 5)  # noqa: E731
    check_tensor_refuses("blocks.0.attention.strange", "(5,)", "'replicate'", make=strange, plan=TOY_PLAN)
    said = {**TOY_PLAN, "blocks.*.attention": "replicated_with_grad_allreduce"}
    assert tensor_refusals(strange, plan=said) == [None, None]


def with_parameter(model: nn.Module, size: int) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.attention.strange = nn.Parameter(torch.ones(size))
    return model


def test_attention_that_is_left_whole_between_slices() -> None:
    layers = {"blocks.*.gate": "colwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    assert tensor_refusals(TensorToyGPT, plan=layers) == [None, None]
    check_tensor_refuses("blocks.0.attention", "msp", make=TensorToyGPT, mode="msp", plan=layers)


@pytest.mark.parametrize("name", ["llama", "ToyGPT"])
def test_a_sequence_that_does_not_divide(name: str) -> None:
    def rank(world: World) -> str:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = npuzero.zero(
            tensor(build_seeded_model(make=make_stirred_tensor_model(name)), mesh, "msp", tensor_plan(name)),
            stage=2,
            mesh=mesh,
        )
        batch = {key: value[:, :9] for key, value in tensor_batch(0, 0).items()}
        with pytest.raises(npuzero.ContractError) as refusal:
            model(**batch)
        return str(refusal.value)

    for text in comm.run_threads(2, rank):
        assert "axis tensor: sequence" in text
        assert "1 or 3 or 9" in text


@pytest.mark.parametrize("other", ["mode", "plan"])
def test_ranks_that_differ(other: str) -> None:
    def rank(world: World) -> str:
        mesh = npuzero.mesh(tensor=2, world=world)
        odd = world.rank == 1
        plan = {k: w for k, w in TOY_PLAN.items() if "attention" not in k} if odd and other == "plan" else TOY_PLAN
        with pytest.raises(npuzero.ConfigError) as refusal:
            tensor(TensorToyGPT(), mesh, "msp" if odd and other == "mode" else "mtp", plan)
        return str(refusal.value)

    assert all("axis tensor" in text and "same on all ranks" in text for text in comm.run_threads(2, rank))


def test_meshes_that_differ() -> None:
    def rank(world: World) -> str:
        mesh = npuzero.mesh(tensor=4 if world.rank == 3 else 2, local_size=1, world=world)
        with pytest.raises(npuzero.ConfigError) as refusal:
            tensor(TensorToyGPT(), mesh, "mtp", TOY_PLAN)
        return str(refusal.value)

    assert all("mesh" in text for text in comm.run_threads(4, rank))


def test_a_model_is_divided_once() -> None:
    def rank(world: World) -> None:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = tensor(TensorToyGPT(), mesh, plan=TOY_PLAN)
        with pytest.raises(npuzero.StateError):
            tensor(model, mesh, plan=TOY_PLAN)

    comm.run_threads(2, rank)


class CurvedModel(nn.Module):
    """An MLP between replicated Linears: second derivatives cross the collectives in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.up, self.down, self.leave = (nn.Linear(n, m) for n, m in ((4, 6), (6, 8), (8, 6), (6, 3)))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        return torch.tanh(self.leave(torch.tanh(self.down(torch.tanh(self.up(h))))))


def test_gradients_of_gradients() -> None:
    """Take second derivatives, as a penalty on the input's gradient does."""

    def second(model: nn.Module) -> list[Tensor]:
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), x)
        return [first.detach(), found]

    def rank(world: World) -> list[Tensor]:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = tensor(build_seeded_model(make=CurvedModel), mesh, plan={"up": "colwise", "down": "rowwise"})
        return second(npuzero.zero(model, stage=0, mesh=mesh))

    expected = second(build_seeded_model(make=CurvedModel))
    for found in comm.run_threads(2, rank):
        for mine, whole in zip(found, expected, strict=True):
            assert torch.allclose(mine, whole, rtol=1e-5, atol=1e-6)
