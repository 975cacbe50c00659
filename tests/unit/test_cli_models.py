"""npuzero plan counts real models to the element, by transformers and without it, and refuses what it cannot count."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path

import pytest
import torch

import npuzero
from npuzero.cli import main
from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.plan import PRESETS, Plan
from npuzero.planner.models import ModelShape, from_config, from_size

COUNTERS = ("transformers", "npuzero")


@pytest.fixture(params=COUNTERS)
def counter(request, monkeypatch):
    """With transformers, and as if it were not installed."""
    if request.param == "transformers":
        pytest.importorskip("transformers")
    else:
        monkeypatch.setitem(sys.modules, "transformers", None)
    return request.param


@pytest.fixture
def alone(monkeypatch):
    """As if transformers were not installed."""
    monkeypatch.setitem(sys.modules, "transformers", None)


def decoder_config(
    kind: str, hidden: int, inner: int, heads: int, layers: int, vocabulary: int, **more: object
) -> dict:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    return {"model_type": kind, **dict(zip(names, (hidden, inner, heads, layers, vocabulary), strict=True)), **more}


def gpt2_config(hidden: int, heads: int, layers: int, **more: object) -> dict:
    return {"model_type": "gpt2", "n_embd": hidden, "n_head": heads, "n_layer": layers, "vocab_size": 50257,
            "n_positions": 1024, **more}  # fmt: skip


GQA = {"num_key_value_heads": 8}
BERT = decoder_config("bert", 768, 3072, 12, 12, 30522, max_position_embeddings=512, type_vocab_size=2)
#: As their files say, and how many parameters their authors count.
REAL = {
    "Llama-2-7B": (decoder_config("llama", 4096, 11008, 32, 32, 32000), 6_738_415_616),
    "Llama-3-8B": (decoder_config("llama", 4096, 14336, 32, 32, 128256, **GQA), 8_030_261_248),
    "Llama-3.2-1B": (
        decoder_config("llama", 2048, 8192, 32, 16, 128256, **GQA, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "Mistral-7B": (decoder_config("mistral", 4096, 14336, 32, 32, 32000, **GQA), 7_241_732_096),
    "Mixtral-8x7B": (decoder_config("mixtral", 4096, 14336, 32, 32, 32000, **GQA, num_local_experts=8), 46_702_792_704),
    "Qwen2-7B": (decoder_config("qwen2", 3584, 18944, 28, 28, 152064, num_key_value_heads=4), 7_615_616_512),
    "Qwen2.5-0.5B": (
        decoder_config("qwen2", 896, 4864, 14, 24, 151936, num_key_value_heads=2, tie_word_embeddings=True),
        494_032_768,
    ),
    "Qwen3-8B": (decoder_config("qwen3", 4096, 12288, 32, 36, 151936, **GQA, head_dim=128), 8_190_735_360),
    "GPT-2": (gpt2_config(768, 12, 12), 124_439_808),
    "GPT-2 XL": (gpt2_config(1600, 25, 48), 1_557_611_200),
    "GPT-NeoX-20B": (decoder_config("gpt_neox", 6144, 24576, 64, 44, 50432), 20_554_567_680),
    "Pythia-1.4B": (decoder_config("gpt_neox", 2048, 8192, 16, 24, 50304), 1_414_647_808),
    "Phi-2": (decoder_config("phi", 2560, 10240, 32, 32, 51200), 2_779_683_840),
    "BERT base": (BERT, 109_514_298),
}


@pytest.mark.parametrize("name", REAL)
def test_real_models_are_counted_to_the_element(name, counter):
    config, parameters = REAL[name]
    model = from_config(config, name)
    assert model.parameters == parameters and model.frozen == 0
    assert len(model.units) == 1 + config.get("num_hidden_layers", config.get("n_layer"))
    assert counter in model.name


TINY = {
    kind: decoder_config(kind, 64, 96, 8, 2, 101, num_key_value_heads=2)
    for kind in ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gpt_neox", "phi")
}
TINY["mixtral"] |= {"num_local_experts": 4, "num_experts_per_tok": 2}
TINY |= {"gpt2": gpt2_config(64, 4, 2), "bert": BERT | {"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 77}}
VARIANTS = [
    *((kind, {}) for kind in TINY),
    *((kind, {"tie_word_embeddings": kind != "gpt2"}) for kind in TINY if kind != "bert"),
    *((kind, {"head_dim": 24}) for kind in ("llama", "mistral", "mixtral", "qwen2", "qwen3")),
    *((kind, {"attention_bias": True}) for kind in ("llama", "qwen2", "qwen3", "mistral")),
    ("gpt_neox", {"attention_bias": False}),
    ("llama", {"mlp_bias": True, "num_key_value_heads": None}),
    ("llama", {"torch_dtype": "bfloat16", "rope_scaling": None, "hidden_act": "silu"}),
    ("phi", {"qk_layernorm": True}),
    ("phi", {"num_key_value_heads": None}),
    ("gpt2", {"n_inner": 33}),
    ("bert", {"type_vocab_size": 5, "max_position_embeddings": 33}),
]


def parameter_shapes(model: ModelShape) -> list[list[tuple[int, ...]]]:
    return [[tuple(parameter.shape) for parameter in unit] for unit in model.units]


@pytest.mark.parametrize(("kind", "change"), VARIANTS)
def test_both_ways_of_counting_find_the_same_shapes(kind, change, monkeypatch):
    pytest.importorskip("transformers")
    config = TINY[kind] | change
    by_class = from_config(config, "test")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert parameter_shapes(from_config(config, "test")) == parameter_shapes(by_class)


def test_a_key_that_the_file_leaves_out_counts_as_in_transformers(monkeypatch):
    """Grouped attention above all: how many groups there are without a word depends on the kind."""
    pytest.importorskip("transformers")
    for kind in ("llama", "mistral", "qwen2", "qwen3", "phi"):
        config = {key: value for key, value in TINY[kind].items() if key != "num_key_value_heads"}
        by_class = from_config(config, "test")
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "transformers", None)
            assert parameter_shapes(from_config(config, "test")) == parameter_shapes(by_class), kind


#: Others that transformers has: two stacks, images, a frozen embedding, experts, the class that the file names.
OTHERS = {
    "T5": {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2, "vocab_size": 64},
    "ViT": decoder_config("vit", 32, 64, 4, 2, 0, image_size=32) | {"architectures": ["ViTForImageClassification"]},
    "Whisper": {
        "model_type": "whisper", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 64,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0, "num_hidden_layers": 2,
    },
    "OLMoE": decoder_config("olmoe", 32, 64, 4, 2, 64, num_experts=4, num_key_value_heads=4),
    "a classifier": TINY["llama"] | {"architectures": ["LlamaForSequenceClassification"], "pad_token_id": 0},
    "a base model": TINY["gpt2"] | {"architectures": ["GPT2Model"]},
}  # fmt: skip
OTHERS["ViT"].pop("vocab_size")


#: Files as the hub has them: an old name of the width, the text's sizes beside a vision_config, defaults left out.
VISION = {"embed_dim": 1280, "depth": 32, "hidden_size": 3584, "in_chans": 3, "mlp_ratio": 4, "num_heads": 16}
CLIP = decoder_config("clip_vision_model", 1024, 4096, 16, 24, 32000, image_size=336, patch_size=14, projection_dim=768)
HUB = {
    "BLOOM-560M": (
        {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250880},
        559_214_592,
    ),
    "Qwen2-VL-7B": (REAL["Qwen2-7B"][0] | {"model_type": "qwen2_vl", "vision_config": VISION}, 8_291_375_616),
    "LLaVA-1.5-7B": (
        {"model_type": "llava", "vision_config": CLIP, "text_config": {"model_type": "llama", "vocab_size": 32064}},
        7_063_427_072,
    ),
}


@pytest.mark.parametrize("name", HUB)
def test_files_as_the_hub_has_them(name):
    pytest.importorskip("transformers")
    config, parameters = HUB[name]
    assert from_config(config, name).parameters == parameters
    if "text_config" in config:
        with pytest.raises(ConfigError, match=r"text_config: .* no such key"):
            from_config({key: value for key, value in config.items() if key != "text_config"}, name)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_counted_by_their_class(name, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    config = OTHERS[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["plan", "--config", str(path), "--world", "4", "--local", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    made = transformers.AutoConfig.for_model(**config)
    default = {"T5": "T5ForConditionalGeneration", "Whisper": "WhisperForConditionalGeneration"}
    kind = config.get("architectures", [default.get(name, "OlmoeForCausalLM")])[0]
    with torch.device("meta"):
        model = getattr(transformers, kind)(made)
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters()) and kind in facts["model"]
    assert ("frozen" in facts["model"]) is (name == "Whisper")
    for preset in PRESETS:
        report = npuzero.predict(model, preset, 4, local_size=2, precision="bf16")
        held, sent, along = report.bytes_held, report.bytes_sent, report.sent_along
        assert facts["presets"][preset] == {"bytes_held": held, "bytes_sent": sent, "bytes_sent_along": along}


LLAMA = TINY["llama"]
LLAMA_NAMES = {key: value for key, value in LLAMA.items() if key != "model_type"}


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (LLAMA_NAMES, "model_type: expected the kind of model, .*; got no such key"),
        (LLAMA | {"model_type": 3}, r"model_type: .* got 3 \(int\)"),
        (LLAMA_NAMES | {"model_type": "my_decoder"}, "model_type: .*got 'my_decoder'"),
        (LLAMA_NAMES | {"model_type": "lama"}, "got 'lama'. Did you mean 'llama'"),
        (LLAMA | {"architectures": ["MyOwnForCausalLM"]}, "architectures: .*MyOwnForCausalLM"),
        ({key: value for key, value in LLAMA.items() if key != "hidden_size"}, "hidden_size: .* got no such key"),
        (LLAMA_NAMES | {"model_type": "gpt2"}, "n_embd: .* got no such key|intermediate_size: .* not be counted"),
        (LLAMA | {"hidden_size": "4096"}, "hidden_size.*'4096'"),
        (LLAMA | {"hidden_size": None}, "hidden_size"),
        (LLAMA | {"hidden_size": 63}, "(?i)hidden[_ ]size.* multiple of "),
        (LLAMA | {"hidden_size": 2**60}, "hidden_size|llama: expected"),
        (LLAMA | {"num_hidden_layers": 10**7}, "num_hidden_layers: expected an integer from 1 to 4096"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers: expected an integer from 1 to 4096"),
        (TINY["gpt2"] | {"n_layer": 10**7}, "n_layer: expected an integer from 1 to 4096"),
        (LLAMA | {"vocab_size": True}, "vocab_size"),
        (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings"),
        (LLAMA | {"num_local_experts": 8}, "num_local_experts: .* which would not be counted"),
        (LLAMA_NAMES | {"model_type": "llama", "num_key_value_head": 2} | {"num_key_value_heads": 8}, None),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(config, match, counter):
    if match is None:  # a stranger beside the key itself changes nothing
        assert from_config(config, "test").parameters == from_config(LLAMA | {"num_key_value_heads": 8}, "").parameters
        return
    with pytest.raises(ConfigError, match=match) as caught:
        from_config(config, "test")
    assert str(caught.value).startswith("test: ") and caught.value.do and "\n" not in str(caught.value)


def test_a_misspelt_key_is_named(counter):
    config = {key: value for key, value in LLAMA.items() if key not in ("vocab_size", "num_key_value_heads")}
    with pytest.raises(ConfigError, match="Did you mean 'vocabulary_size'"):
        from_config(config | {"vocabulary_size": 101}, "test")
    with pytest.raises(ConfigError, match=r"num_key_value_head: .*Did you mean 'num_key_value_heads'"):
        from_config(config | {"vocab_size": 101, "num_key_value_head": 2}, "test")


def test_a_class_tells_its_kind(counter):
    config = LLAMA_NAMES | {"architectures": ["MistralForCausalLM"]}
    assert parameter_shapes(from_config(config, "test")) == parameter_shapes(
        from_config(LLAMA | {"model_type": "mistral"}, "test")
    )


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "t5"},
        {"model_type": "phi", "head_dim": 24},
        {"model_type": "gpt2", "add_cross_attention": True},
    ],
)
def test_without_transformers_the_rest_is_refused_and_says_so(change, alone):
    with pytest.raises(ConfigError, match=r"without transformers.*Run: pip install transformers"):
        from_config(LLAMA | change, "test")


def test_neither_the_network_nor_a_repositorys_code_is_touched(tmp_path, monkeypatch, counter):
    """A file from the hub whose code would leave a trace."""
    (tmp_path / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    code = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}

    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    assert from_config(LLAMA | {"auto_map": code}, "test").parameters == from_config(LLAMA, "test").parameters
    with pytest.raises(ConfigError, match="'own'"):
        from_config(LLAMA | {"auto_map": code, "model_type": "own"}, "test")
    assert not (tmp_path / "ran").exists()


def test_a_quantized_file_is_counted_as_its_model_is_trained(counter):
    quantized = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    assert parameter_shapes(from_config(LLAMA | quantized, "")) == parameter_shapes(from_config(LLAMA, ""))


# -- by size alone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [None, 1, 7, 32])
@pytest.mark.parametrize("vocabulary", [None, 1, 300])
def test_a_size_is_kept_to_the_element(blocks, vocabulary):
    for digits in range(5, 13):
        for parameters in (10**digits, 3 * 10**digits + 7, 77 * 10 ** (digits - 1) - 1):
            model = from_size(parameters, blocks, vocabulary)
            assert model.parameters == parameters
            assert blocks is None or len(model.units) == 1 + blocks
            rest = sum(p.shape.numel() for p in model.units[0] if p.name == "rest")
            assert rest <= max(0.01 * parameters, 2000)


def of_a_rank(model: ModelShape, preset: str) -> tuple[int, int]:
    """Bytes held and sent."""
    report = model.predict(Plan.preset(preset, precision="bf16", local_size=8), 64, Settings())
    return sum(report.bytes_held.values()), sum(report.bytes_sent.values())


def test_a_size_of_llamas_is_llama(alone):
    for config in (REAL["Llama-2-7B"][0], decoder_config("llama", 5120, 13824, 40, 40, 32000)):
        real = from_config(config, "")
        assert parameter_shapes(from_size(real.parameters)) == parameter_shapes(real)


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text("utf-8")
ROWS = re.findall(r"^\| ([^|]+?) \|((?: [+−]?[\d.]+ % \|){4})$", PAGE, re.MULTILINE)


def test_the_pages_errors_are_those_of_real_models(alone):
    """docs/plan.md: how far memory under zero3 and zero0 is off, by size alone, and with --units and --vocabulary."""
    assert len(ROWS) >= 8
    for name, cells in ROWS:
        config, _ = REAL[name]
        real = from_config(config, name)
        told = [float(cell.replace("−", "-").strip(" %")) for cell in cells.strip("|").split("|")]
        models = (from_size(real.parameters), from_size(real.parameters, len(real.units) - 1, config["vocab_size"]))
        found = []
        for model in models:
            for preset in ("zero0", "zero3"):
                (held, sent), (real_held, real_sent) = of_a_rank(model, preset), of_a_rank(real, preset)
                found.append(100 * (held / real_held - 1))
                assert sent == pytest.approx(real_sent, rel=0.002), (name, preset)
        assert found == pytest.approx(told, abs=0.051), name
