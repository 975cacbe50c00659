"""Advice: the answer in a line, what would make it fit, and a run that takes what it says."""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import pytest
import torch
from torch import nn

import npuzero
from npuzero import comm
from npuzero.errors import ConfigError, StateError
from npuzero.plan import NODE, OFFLOADED
from npuzero.planner import Cluster, from_size
from npuzero.planner.advice import advise, build_model_shape, bytes_between_nodes, format_estimate
from npuzero.planner.hardware.cluster import DeviceSpec, LinkSpec
from npuzero.planner.search import Choices

GIB = 2**30
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 128,
}


def advice_cluster(ranks: int = 8, local: int = 4, gib: float = 64.0, host_gib: float = 64.0) -> Cluster:
    rates = {"local": 1e11, "node": 1e10, "host": 2e10, "disk_read": 2e9, "disk_write": 2e9}
    device = DeviceSpec({"bf16": 3e14, "fp32": 2e13}, 0.6, int(gib * GIB), 1e12)
    links = {level: LinkSpec(rate, 1e-5) for level, rate in rates.items()}
    return Cluster("made up", device, links, local, ranks, host_memory_bytes=int(host_gib * GIB))


class TinyLanguageModel(nn.Module):
    """A language model: int64[B, T] -> logits [B, T, 96]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(96, 32), nn.Linear(32, 96)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale.to(self.embed.weight.dtype)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@functools.cache
def advise_7b(nodes: int = 1):
    return advise(from_size(7 * 10**9), f"{8 * nodes}x910b-64g", seq=4096, tokens_per_step=nodes * 2**19)


def test_the_answer_comes_first():
    advice = advise_7b()
    best, run = advice.best, advice.best.run
    limit = best.job.cluster.device.memory_bytes
    found = re.fullmatch(
        r"Fits: ([\w.-]+), micro-batch (\d+) × (\d+), (no )?recompute, (\d+) of (\d+) GiB, "
        r"about ([\d,]+) tokens/s a device; ([\w ]+)-bound",
        str(advice).splitlines()[0],
    )
    assert found, str(advice)
    name, size, count, kept, held, of, speed, bound = found.groups()
    assert (name, int(size), int(count), bool(kept)) == (
        run.plan.name, run.micro_batch, run.micro_batches, not run.recompute,
    )  # fmt: skip
    assert (int(held), int(of)) == (round(best.memory["device"] / GIB), round(limit / GIB))
    assert float(speed.replace(",", "")) == pytest.approx(best.tokens_per_s, rel=5e-3)
    assert bound == best.bound
    assert run.micro_batch * run.micro_batches == 16, "half a million tokens are 16 sequences of 4,096 for each of 8"
    assert advice.fits
    assert not advice.ways_out


def test_it_says_why():
    text = str(advise_7b())
    assert "A step takes" in text
    assert "busy in it: compute" in text
    assert re.search(r"- Next: [\w.-]+ -\d+\.\d%", text), "others, and how much slower they are"
    assert "Recomputation would take" in text
    assert "zero0: too much memory" in text
    others = [each.tokens_per_s for each in advise_7b().others]
    assert others == sorted(others, reverse=True)
    assert others[0] <= advise_7b().best.tokens_per_s


def test_over_several_nodes_it_says_what_goes_between_them():
    advice = advise_7b(2)
    by_name = {each.run.plan.name: each for each in reversed(advice.found.fitting) if each.run.plan.local_size is None}
    hpz, zero3 = bytes_between_nodes(by_name["hpz"]), bytes_between_nodes(by_name["zero3"])
    assert 0 < hpz < zero3
    line = next(line for line in str(advice).splitlines() if "between nodes" in line)
    assert f"hpz {hpz / GIB:.3g}" in line
    assert f"zero3 {zero3 / GIB:.3g}" in line
    # An axis of whole nodes' ranks is the level between nodes: what hpz gathers again in backward stays inside.
    assert hpz == sum(by_name["hpz"].report.sent_along[NODE].values())


def test_13b_on_one_gpu_says_what_would_make_it_fit():
    advice = advise(from_size(13 * 10**9), "1xa100-80g", seq=2048, tokens_per_step=2**17)
    first = str(advice).splitlines()[0]
    assert first.startswith("Does not fit: 218 GiB of states; ")
    assert "4 devices with" in first
    assert "states on the host" in first
    assert not advice.fits
    with pytest.raises(ConfigError, match="Take one of these: 4 devices"):
        advice.best  # noqa: B018 - it raises
    for way in advice.ways_out:
        estimate = way.estimate
        assert not any(estimate.over(advice.choices.spare).values())
        assert f"With {way.what}: {format_estimate(estimate)}." in str(advice)
    devices = next(way.estimate.job.cluster.ranks for way in advice.ways_out if "devices" in way.what)
    assert devices == 4
    half = advise(from_size(13 * 10**9), "2xa100-80g", seq=2048, tokens_per_step=2**17)
    assert not half.fits, "so two would not do"


@pytest.mark.parametrize(("gib", "bits"), [(18, "bf16-split"), (16, "bf16-stochastic"), (12, "bf16-8bit")])
def test_fewer_bits_are_a_way_out_where_they_do(gib, bits):
    model = from_size(10**9)
    advice = advise(model, advice_cluster(1, 1, gib=gib), seq=512, tokens_per_step=2**14)
    assert f", or {bits}, or states on the host" in advice.answer
    way = next(way for way in advice.ways_out if way.what == bits)
    again = advise(model, advice_cluster(1, 1, gib=gib), seq=512, tokens_per_step=2**14, precision=bits)
    assert again.best.run == way.estimate.run
    assert again.best.arguments()["precision"] == bits


def test_two_changes_together_where_no_single_one_does():
    alone = advice_cluster(1, 1, gib=4, host_gib=11)
    alone = dataclasses.replace(alone, links={"host": alone.links["host"]})  # and no disk, and nobody beside it
    advice = advise(from_size(10**9), alone, seq=128, tokens_per_step=2**12)
    assert [way.what for way in advice.ways_out] == ["bf16-8bit and states on the host"], advice.answer


def test_what_is_ruled_out_is_a_way_out():
    choices = Choices(presets=("zero3",), recompute=(False,), micro_batches=(4,))
    advice = advise(from_size(10**9), advice_cluster(8, 8, gib=16), seq=2048, tokens_per_step=2**20, choices=choices)
    assert {"recomputation", "a smaller micro-batch"} <= {way.what for way in advice.ways_out}
    plain = advise(from_size(10**9, ranks=16), advice_cluster(8, 8, gib=6), seq=4096, attention="plain")
    assert "flash attention would" in plain.answer


def test_where_nothing_would_do_it_says_so():
    advice = advise(from_size(10**11), advice_cluster(1, 1, gib=0.25, host_gib=1), seq=128, tokens_per_step=2**12)
    assert not advice.ways_out
    assert "Does not fit" in str(advice)
    assert "many more devices, or a smaller model" in str(advice)
    with pytest.raises(ConfigError, match="Take more devices"):
        advice.best  # noqa: B018 - it raises


def test_models_come_as_modules_values_and_files(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    of_values, of_file, of_text = (advise(each, advice_cluster(), seq=64) for each in (LLAMA, path, str(path)))
    assert of_values.best.run == of_file.best.run == of_text.best.run
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    assert advise(module, advice_cluster(), seq=64).best.memory == of_values.best.memory


def test_a_module_is_left_as_it_is():
    model = TinyLanguageModel()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shape = build_model_shape(model)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert all(value.is_meta for value in shape.module().state_dict().values())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def train_as_advised(world, advice):
    """Train as advised, and return what the rank sent and held, measured."""
    model = npuzero.zero(TinyLanguageModel(), world=world, **advice.best.arguments())
    optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
    run = advice.best.run
    for _ in range(3):
        for _ in range(run.micro_batches):
            logits = model(torch.zeros(run.micro_batch, 16, dtype=torch.long))
            (logits.float().square().mean() / run.micro_batches).backward()
        npuzero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model(torch.zeros(1, 16, dtype=torch.long))
    return npuzero.report(model)


@pytest.mark.parametrize(
    ("ranks", "choices"),
    [
        (1, Choices()),
        (2, Choices()),
        (2, Choices(presets=("zero3",), micro_batches=(2,))),
        (2, Choices(presets=("hsdp",), local_sizes=(1,), precisions=("bf16-split",))),
        (2, Choices(presets=("zero2",), offloads=("host",), precisions=("fp32",))),
    ],
    ids=["alone", "two", "zero3", "groups", "offload"],
)
def test_zero_takes_the_arguments_and_reports_what_was_predicted(ranks, choices):
    advice = advise(
        TinyLanguageModel(), advice_cluster(ranks, ranks), seq=16, tokens_per_step=16 * ranks * 4, choices=choices
    )
    best = advice.best
    for report in comm.run_threads(ranks, lambda world: train_as_advised(world, advice)):
        assert report.held == best.report.held
        assert report.bytes_sent == best.report.bytes_sent
        assert report.sent_along == best.report.sent_along
        assert report.bytes_moved == best.report.bytes_moved


def test_plans_off_the_device_are_advised_if_asked_for():
    choices = Choices(presets=OFFLOADED)
    advice = advise(from_size(10**9), advice_cluster(1, 1, gib=16), seq=512, tokens_per_step=2**14, choices=choices)
    assert advice.best.run.plan.name in OFFLOADED
    assert "GiB on host" in advice.answer


def test_without_tokens_the_batch_is_what_fits():
    small, large = (advise(from_size(10**9), advice_cluster(8, 8, gib=gib), seq=2048) for gib in (24, 64))
    assert small.best.run.micro_batches == 1
    assert small.best.tokens_per_s <= large.best.tokens_per_s


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((LLAMA, "8x910b-64g"), {}, "seq: expected the tokens of a sequence"),
        ((LLAMA, "8x910b-64g"), {"seq": 0}, "seq: expected the tokens of a sequence"),
        ((LLAMA, "8x910b-64g"), {"seq": True}, "seq: expected the tokens of a sequence"),
        ((LLAMA, "8x910b-46g"), {"seq": 64}, "Did you mean '910b-64g'"),
        ((LLAMA, 8), {"seq": 64}, "npuzero.advise(): cluster"),
        ((LLAMA, "7x910b-64g/2"), {"seq": 64}, "a multiple of the 2 devices of a node"),
        ((LLAMA, "nowhere.json"), {"seq": 64}, "nowhere.json"),
        ((7, "8x910b-64g"), {"seq": 64}, "npuzero.advise(): model"),
        ((LLAMA, "8x910b-64g"), {"sequence": 64}, "Did you mean 'seq'"),
        ((LLAMA, "8x910b-64g"), {"seq": 64, "precision": "bf61"}, "Did you mean 'bf16'"),
        ((LLAMA, "8x910b-64g"), {"seq": 64, "tokens_per_step": 64}, "tokens_per_step"),
        ((LLAMA, "8x910b-64g"), {"seq": 64, "tokens_per_step": -1}, "tokens_per_step"),
        ((LLAMA, "8x910b-64g"), {"seq": 64, "attention": "flush"}, "Did you mean 'flash'"),
        (({"model_type": "llama", "hiden_size": 64}, "8x910b-64g"), {"seq": 64}, "hidden_size"),
    ],
)
def test_what_cannot_be_is_refused(arguments, options, words):
    with pytest.raises(ConfigError) as refused:
        npuzero.advise(*arguments, **options)
    assert words in str(refused.value)


def test_a_sharded_model_is_refused():
    def refused(world: comm.World) -> str:
        with pytest.raises(StateError) as error:
            advise(npuzero.zero(TinyLanguageModel(), stage=3, world=world), advice_cluster(), seq=16)
        return str(error.value)

    assert "has not seen" in comm.run_threads(1, refused)[0]


def test_it_is_the_same_each_time():
    first, again = (advise(from_size(10**9), advice_cluster(), seq=512, tokens_per_step=2**16) for _ in range(2))
    assert str(first) == str(again)
    assert dataclasses.replace(first.best, job=again.best.job, work=again.best.work) == dataclasses.replace(
        again.best, timeline=first.best.timeline
    )
