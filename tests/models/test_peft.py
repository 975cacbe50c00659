"""LoRA by PEFT: a frozen base in cut flats, adapters that train, states for the adapters alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

import npuzero
from models.test_transformers import every_cut_plan, mark_slow_values
from models.training import TransformersLoop, make_stirred_model
from models.zoo import ZOO, zoo_batch
from npuzero import comm
from npuzero.comm import World
from npuzero.shard.find_engine import engine_of
from world.toy import build_seeded_model
from world.train import CutSession, State, assert_same_bits, check_equals_plain, run_cut, run_plain, worst_difference

# PEFT and transformers warn of each other's names.
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:peft"
)

TARGETS = {"gpt2": ["c_attn"], "t5": ["q", "v"]}
every_model = pytest.mark.parametrize("name", mark_slow_values(("gpt2", "llama", "t5"), tuple(ZOO)))
every_plan = pytest.mark.parametrize("plan", mark_slow_values(("zero3",), npuzero.PRESETS))


@cache
def make_adapted_model(name: str, dtype: torch.dtype = torch.float32) -> Callable[[], nn.Module]:
    """Makes the model with adapters in float32 around a base in ``dtype``; the adapters are not zero."""

    def make() -> nn.Module:
        return add_lora_adapters(name, make_stirred_model(name)().to(dtype))

    return make


def add_lora_adapters(name: str, base: nn.Module) -> PeftModel:
    targets = TARGETS.get(name, ["q_proj", "v_proj"])
    # GPT-2 stores its projections the other way round.
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, fan_in_fan_out=name == "gpt2")
    model = get_peft_model(base, config)
    assert any(parameter.requires_grad for parameter in model.parameters())
    return model


@every_model
@every_plan
@pytest.mark.parametrize("checkpointing", mark_slow_values((False,), (False, True)))
def test_adapters_train_as_in_plain_torch(name: str, plan: str, checkpointing: bool) -> None:
    state = check_equals_plain(TransformersLoop(checkpointing=checkpointing), 2, make_adapted_model(name), plan=plan)
    before = build_seeded_model(make=make_adapted_model(name)).state_dict()
    frozen = [key for key in state if "lora_" not in key]
    assert_same_bits({key: state[key] for key in frozen}, {key: before[key] for key in frozen})
    assert not [key for key in state if "lora_" in key and torch.equal(state[key], before[key])]


@every_model
@every_plan
def test_float32_adapters_around_a_bfloat16_base(name: str, plan: str) -> None:
    make = make_adapted_model(name, torch.bfloat16)
    states = run_cut(TransformersLoop(steps=4), 2, make, plan=plan)
    assert_same_bits(states[1], states[0])
    assert {value.dtype for key, value in states[0].items() if "lora_" in key} == {torch.float32}
    assert {value.dtype for key, value in states[0].items() if "lora_" not in key} == {torch.bfloat16}
    # A product of bfloat16 rounds otherwise for one sample and for all: what is left of it after four steps.
    assert worst_difference(states[0], run_plain(TransformersLoop(steps=4), 2, make)) < 2e-2


@every_cut_plan
def test_only_adapters_have_states(plan: str) -> None:
    """And gradients: the frozen base costs its shard and nothing else, as was predicted."""

    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(make=make_adapted_model("llama")), plan=plan, world=world)
        model(**zoo_batch(model, 0, 0, world.rank)).loss.backward()
        npuzero.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2).step()
        flats = [flat for unit in engine_of(model).units for flat in unit.flats]
        assert {flat.trainable for flat in flats} == {True, False}
        held, trainable = npuzero.report(model).bytes_held, sum(f.layout.numel for f in flats if f.trainable)
        assert held["gradients"] == 4 * trainable // 2 and held["states"] == 8 * trainable // 2
        assert held["parameters"] == sum(flat.layout.numel for flat in flats) * 4 // 2
        predicted = npuzero.predict(build_seeded_model(make=make_adapted_model("llama")), plan, 2)
        assert {part: held[part] for part in ("parameters", "gradients", "states")} == {
            part: predicted.bytes_held[part] for part in ("parameters", "gradients", "states")
        }

    comm.run_threads(2, rank)


@pytest.mark.parametrize("name", ["llama", "t5"])
@every_cut_plan
def test_generating_with_adapters(name: str, plan: str) -> None:
    """PEFT's generate() calls the base model, not the root."""

    def rank(world: World) -> tuple[Tensor, Tensor]:
        model = npuzero.zero(build_seeded_model(make=make_adapted_model(name)), plan=plan, world=world)
        prompt = zoo_batch(model, 0, 0, 0)["input_ids"]
        made = [
            m.eval().generate(input_ids=prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
            for m in (model, build_seeded_model(make=make_adapted_model(name)))
        ]
        return made[0], made[1]

    for cut, whole in comm.run_threads(2, rank):
        assert cut.tolist() == whole.tolist()


@every_cut_plan
def test_a_base_from_files_and_the_adapter_back_into_one(plan: str, tmp_path: Path) -> None:
    """The base is built on meta and read from its files; the adapter is written as PEFT reads it."""
    base = build_seeded_model(make=make_stirred_model("llama"))
    base.save_pretrained(tmp_path / "base")

    def in_base(name: str) -> str | None:
        return None if "lora_" in name else name.removeprefix("base_model.model.").replace(".base_layer", "")

    def in_adapter(name: str) -> str | None:
        return name.replace(".default", "") if "lora_" in name else None

    def rank(world: World) -> State:
        with torch.device("meta"):
            model = ZOO["llama"]()
        initialize = model._init_weights
        model = add_lora_adapters("llama", model)
        for name, module in model.named_modules():  # PEFT makes adapters where the base is
            if name.endswith(("lora_A.default", "lora_B.default")):
                module.to_empty(device="cpu").reset_parameters()
        weights = npuzero.Weights(tmp_path / "base", rename=in_base)
        TransformersLoop(steps=2)(CutSession(model, world, plan=plan, weights=weights, initialize=initialize))
        npuzero.export(model, tmp_path / "adapter" / "adapter_model.safetensors", rename=in_adapter)
        if world.rank == 0:
            model.peft_config["default"].save_pretrained(tmp_path / "adapter")
        return npuzero.full_state_dict(model, rank0_only=False)

    states = comm.run_threads(2, rank)
    loaded = PeftModel.from_pretrained(build_seeded_model(make=make_stirred_model("llama")), tmp_path / "adapter")
    assert_same_bits({name: value.detach() for name, value in loaded.state_dict().items()}, states[1])
    assert isinstance(loaded.merge_and_unload(), type(base))
