"""What units compute and keep, against published formulas and against another way to count."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npuzero.errors import ConfigError
from npuzero.planner import ModelShape, from_config, from_size
from npuzero.planner.model_work.units import ModelWorkload, measure_workload
from npuzero.shard.build import get_unit_parameters
from npuzero.shard.layout.find_units import discover_units

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}
LLAMA_7B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}


class GPT3Layer(nn.Module):
    """A layer of GPT-3's shape, as Korthikanti et al. count it (arXiv:2205.05198, section 4.1): scores and dropout."""

    def __init__(self, width: int, heads: int, fused: bool = False) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norms = nn.ModuleDict({"attention": nn.LayerNorm(width), "mlp": nn.LayerNorm(width)})
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms["attention"](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        else:
            y = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1) @ v
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(-2)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms["mlp"](x)))), 0.1)


class GPT3Model(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, vocabulary: int, sequence: int, fused: bool) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(GPT3Layer(width, heads, fused) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def gpt3_shape(width: int, heads: int, layers: int, vocabulary: int, sequence: int, fused: bool = False) -> ModelShape:
    with torch.device("meta"):
        model = GPT3Model(width, heads, layers, vocabulary, sequence, fused)
    return ModelShape("gpt", get_unit_parameters(model), module=lambda: model)


def flops_of(work: ModelWorkload) -> float:
    return sum(unit.flops for unit in work.units)


@pytest.mark.parametrize("size", [(1024, 16, 1024), (12288, 96, 2048)], ids=["350M", "GPT-3"])
def test_a_layer_keeps_what_korthikanti_says(size):
    h, a, s = size
    work = measure_workload(gpt3_shape(h, a, 4, 512, s), s, 2, "plain")
    b = work.micro_batch
    said = s * b * h * (34 + 5 * a * s / h)
    # They do not count the two numbers a row that a LayerNorm keeps, in float32.
    for layer in work.units[1:]:
        assert layer.saved_bytes == pytest.approx(said + 2 * 2 * 4 * s * b, rel=0.001)
        assert layer.input_bytes == 2 * s * b * h


def test_selective_recomputation_is_flash_attention():
    """Without scores 34 s b h are left (section 5 there), and of flash attention two numbers."""
    h, a, s = 2048, 16, 1024
    layer = measure_workload(gpt3_shape(h, a, 4, 512, s, fused=True), s, 1).units[2]
    assert layer.saved_bytes == pytest.approx(34 * s * h + (4 * 4 + 4 * a) * s, rel=0.001)


@pytest.mark.parametrize(
    ("h", "a", "layers"), [(2304, 24, 24), (6144, 48, 40), (12288, 96, 96)], ids=["1.7B", "18.4B", "175B"]
)
def test_flops_are_narayanans(h, a, layers):
    """72 B s L h^2 (1 + s / 6h + V / 12 L h) without recomputation: arXiv:2104.04473, section 5.1 and its appendix."""
    s, b, vocabulary = 2048, 2, 51200
    work = measure_workload(gpt3_shape(h, a, layers, vocabulary, s), s, b)
    said = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (12 * layers * h))
    assert 3 * flops_of(work) == pytest.approx(said, rel=1e-9)
    with_recomputation = 3 * flops_of(work) + sum(unit.flops for unit in work.units[1:])
    paper = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    assert with_recomputation == pytest.approx(paper, rel=1e-9)


def test_flops_are_torchs():
    from torch.utils.flop_counter import FlopCounterMode

    pytest.importorskip("transformers")
    shape = from_config(LLAMA, "llama")
    assert shape.module is not None
    built = shape.module()
    model = type(built)(built.config)
    ids = torch.zeros(2, 64, dtype=torch.long)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False)
    assert flops_of(measure_workload(shape, 64, 2, "plain", torch.float32)) == counter.get_total_flops()


def test_experts_compute_for_the_tokens_that_choose_them():
    pytest.importorskip("transformers")
    mixtral = LLAMA | {"model_type": "mixtral", "num_local_experts": 8}

    def layer_flops(top: int) -> float:
        return measure_workload(from_config(mixtral | {"num_experts_per_tok": top}, "m"), 128, 2).units[2].flops

    expert = 3 * 2 * 2 * 128 * 256 * 688
    assert layer_flops(2) - layer_flops(1) == expert == layer_flops(3) - layer_flops(2)


def test_equal_blocks_count_as_each_of_them_would():
    """Nine equal blocks, of which three run, against nine that all run, since no two neighbours are equal."""

    class Even(GPT3Layer):
        pass

    with torch.device("meta"):
        equal, other = (GPT3Model(64, 4, 9, 100, 32, True) for _ in range(2))
        for i in range(0, 9, 2):
            other.blocks[i] = Even(64, 4, True)
    works = [
        measure_workload(ModelShape("gpt", get_unit_parameters(m), module=lambda m=m: m), 32, 2) for m in (equal, other)
    ]
    assert len(discover_units(equal)) == len(works[0].units) == 10
    assert works[0].units == works[1].units
    for stretches in (lambda work: work.kept, lambda work: work.recomputed):
        assert stretches(works[0]) == stretches(works[1])


def test_what_a_pass_takes_it_gives_back():
    work = measure_workload(gpt3_shape(64, 4, 5, 100, 32), 32, 2)
    for stretches in (work.kept, work.recomputed):
        assert abs(sum(stretch.left_bytes for stretch in stretches)) <= 8  # the loss itself
        assert [s.unit for s in stretches if s.unit and not s.backward] == [1, 2, 3, 4, 5]
        assert [s.unit for s in stretches if s.unit and s.backward] == [5, 4, 3, 2, 1]
    parameters = [sum(p.shape.numel() for p in unit) for unit in gpt3_shape(64, 4, 5, 100, 32).units]
    for unit, numel in enumerate(parameters):
        assert sum(s.gradient_bytes for s in work.kept if s.unit == unit) == 2 * numel


def test_a_decoder_by_its_size_counts_as_llama():
    pytest.importorskip("transformers")
    model = from_config(LLAMA_7B, "llama")
    llama = measure_workload(model, 4096)
    ours = measure_workload(from_size(model.parameters, 32, 32000), 4096)
    assert flops_of(ours) == pytest.approx(flops_of(llama), rel=0.01)
    for field in ("saved_bytes", "input_bytes"):
        total = [sum(getattr(unit, field) for unit in work.units) for work in (ours, llama)]
        assert total[0] == pytest.approx(total[1], rel=0.02)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_without_transformers_decoders_count_alike(kind, monkeypatch):
    pytest.importorskip("transformers")
    config = LLAMA | {"model_type": kind, "head_dim": 32}
    if kind == "qwen2":
        del config["head_dim"]
    theirs = measure_workload(from_config(config, kind), 256, 2)
    monkeypatch.setitem(sys.modules, "transformers", None)
    ours = measure_workload(from_config(config, kind), 256, 2)
    assert flops_of(ours) == flops_of(theirs)
    saved = [sum(unit.saved_bytes for unit in work.units) for work in (ours, theirs)]
    assert saved[0] == pytest.approx(saved[1], rel=0.02)


def test_a_model_of_7b_is_counted_at_once():
    pytest.importorskip("transformers")
    measure_workload(from_config(LLAMA, "llama"), 64)  # what is imported first is not counted
    model = from_config(LLAMA_7B, "llama")
    begin = time.process_time()
    work = measure_workload(model, 4096)
    assert time.process_time() - begin < 1.0
    assert measure_workload(model, 4096) is work


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"sequence": 0}, "sequence"),
        ({"sequence": 64, "micro_batch": -1}, "micro_batch"),
        ({"sequence": 64, "micro_batch": True}, "micro_batch"),
        ({"sequence": 64, "attention": "flsh"}, "flash"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        measure_workload(from_size(10**6), **given)


def test_a_model_that_takes_no_tokens_is_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())
    with pytest.raises(ConfigError, match="language model"):
        measure_workload(ModelShape("images", get_unit_parameters(model), module=lambda: model), 64)


def test_shapes_without_modules_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100, "n_positions": 64}
    with pytest.raises(ConfigError, match="pip install transformers"):
        measure_workload(from_config(config, "gpt2"), 32)
