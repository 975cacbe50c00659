"""``npuzero plan`` over tensor, sequence and pod axes prints the predictions, which match the ranks' bytes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import npuzero
from npuzero import parallel
from npuzero.cli import main
from npuzero.comm import Communicator, CountingCommunicator, Mesh, World, run_threads
from npuzero.config import Settings
from npuzero.plan import DATA, PRESETS, THINNED, Sent, ring_bytes
from npuzero.planner.models import from_size
from parallel.tensor_models import (
    BATCH,
    HIDDEN,
    LAYERS,
    SEQUENCE,
    VOCABULARY,
    build_tensor_llama,
    build_tensor_qwen3,
    build_tied_llama,
    tensor_batch,
    tensor_model_loss,
)
from world.conftest import one_thread_per_rank  # noqa: F401
from world.toy import build_seeded_model

TOKENS = BATCH * SEQUENCE
MODELS: dict[str, Any] = {"llama": build_tensor_llama, "tied": build_tied_llama, "qwen3": build_tensor_qwen3}
#: The sizes of all models here, by the names in their config files.
KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)


@pytest.fixture
def told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs the command for a model here, and returns its JSON, its text, or its error."""

    def run(name: str, *options: object, form: str = "json") -> Any:
        config = MODELS[name]().config.to_dict()
        path = tmp_path / "config.json"
        path.write_text(json.dumps({key: config[key] for key in KEYS if config.get(key) is not None}))
        more = ["--json"] if form == "json" else []
        capsys.readouterr()
        status = main(["plan", "--config", str(path), *map(str, options), *more])
        out, err = capsys.readouterr()
        assert status == (2 if form == "error" else 0), err
        return {"json": lambda: json.loads(out), "text": lambda: out, "error": lambda: err}[form]()

    return run


@pytest.fixture(params=["transformers", "npuzero"])
def counter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With transformers, and as if it were not installed."""
    if request.param == "npuzero":
        monkeypatch.setitem(sys.modules, "transformers", None)


# -- predictions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mtp", "msp"])
@pytest.mark.parametrize("name", MODELS)
def test_plan_says_what_predict_says_of_the_divided_model(name: str, mode: str, counter: None, told: Any) -> None:
    facts = told(name, "--world", 8, "--local", 4, "--tensor", 2, "--mode", mode, "--clip", "--micro-batches", 2)

    def rank(world: World) -> dict[str, Any]:
        model = parallel.tensor(build_seeded_model(make=MODELS[name]), npuzero.mesh(tensor=2, world=world), mode)
        shape = npuzero.MeshShape(node=2, local=2, tensor=2)
        return {
            preset: npuzero.predict(model, preset, shape, precision="bf16", clip=True, micro_batches=2)
            for preset in (*PRESETS, *THINNED)
        }

    reports = run_threads(2, rank)[0]
    assert list(facts["presets"]) == list(reports) and facts["mesh"]["tensor"] == facts["mesh"]["node"] == 2
    for preset, report in reports.items():
        found = facts["presets"][preset]
        assert (found["bytes_held"], found["bytes_sent"]) == (report.bytes_held, report.bytes_sent)
        assert found["bytes_sent_along"] == report.sent_along
        along: Counter[str] = Counter()
        for verbs in found["bytes_sent_along"].values():
            along.update(verbs)
        assert dict(along) == {v: n for v, n in report.bytes_sent.items() if n and v != "control"}


def test_axes_by_which_gradients_go(told: Any) -> None:
    """Under msp norms are all-reduced over tensor ranks as well; embeddings and Linears are sharded over them."""
    along = told("llama", "--world", 8, "--local", 4, "--tensor", 2, "--mode", "msp")["presets"]
    named = {preset: set(facts["bytes_sent_along"]) for preset, facts in along.items()}
    assert named["zero0"] == named["zero3"] == named["hsdp"] == {"node", "local", "tensor"}
    zero0, zero3, hsdp = (along[preset]["bytes_sent_along"]["tensor"] for preset in ("zero0", "zero3", "hsdp"))
    assert zero0 == zero3 == hsdp and zero0["all_gather"] == 2 * zero0["reduce_scatter"]  # of norms alone, as sums


def test_pods_are_ranks_that_nothing_is_sharded_over(told: Any) -> None:
    facts = told("llama", "--world", 8, "--pod", 2)
    zero3 = facts["presets"]["zero3"]
    report = npuzero.predict(build_tensor_llama(), "zero3", npuzero.MeshShape(node=1, local=4, pod=2), precision="bf16")
    assert (zero3["bytes_held"], zero3["bytes_sent"]) == (report.bytes_held, report.bytes_sent)
    assert set(zero3["bytes_sent_along"]) == {"local", "pod"} and facts["mesh"]["local"] == 4


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode", "preset"),
    [("llama", "mtp", "zero1"), ("qwen3", "msp", "zero3"), ("tied", "fsp", "zero2"), ("qwen3", "fsp", "zero0")],
)
def test_ranks_send_and_hold_what_plan_says(name: str, mode: str, preset: str, told: Any) -> None:
    options = ("--tensor", 2, "--mode", mode, "--tokens", TOKENS, "--precision", "fp32")
    facts = told(name, "--world", 4, *options)

    def rank(world: World) -> tuple[dict[str, int], ...]:
        mesh = npuzero.mesh(tensor=2, local_size=2, world=world)
        model = parallel.tensor(build_seeded_model(make=MODELS[name]), mesh, mode)
        model = npuzero.zero(model, plan=preset, mesh=mesh)
        optimizer = npuzero.AdamW(model.parameters())
        for step in range(2):
            before = parallel.tensor_bytes(model)
            tensor_model_loss(model, step, mesh.index(DATA)).backward()
            optimizer.step()
            optimizer.zero_grad()
        sent = Counter(parallel.tensor_bytes(model)) - Counter(before)
        report = npuzero.report(model)
        return dict(sent), report.bytes_sent, report.bytes_held

    for layers, sent, held in run_threads(4, rank):
        assert layers == facts["layers_bytes_sent"]["tensor"]
        assert sent == facts["presets"][preset]["bytes_sent"]
        assert held == facts["presets"][preset]["bytes_held"]


@pytest.mark.parametrize(("mode", "factor"), [("mtp", 8), ("msp", 8), ("fsp", 10)])
def test_layers_send_what_the_formula_says(mode: str, factor: int, told: Any) -> None:
    sent = told("llama", "--world", 3, "--tensor", 3, "--mode", mode, "--tokens", 24)["layers_bytes_sent"]["tensor"]
    activations = 24 * HIDDEN * 2
    ends = 4 + 2 * (mode != "mtp")  # embedding and head; slices before the first block and after the last
    logits = 24 * VOCABULARY * 2
    assert sum(sent.values()) == ((factor * LAYERS + ends) * activations + logits) * 2 // 3


class CountedMesh(Mesh):
    def __init__(self, world: World, **sizes: int) -> None:
        super().__init__(world, **sizes)  # type: ignore[arg-type]
        self.sent = Sent()

    def communicator(self, axes: tuple[str, ...], purpose: str) -> Communicator:
        made = super().communicator(axes, purpose)
        return CountingCommunicator(made, self.sent, self.shape.sizes(axes)) if purpose == "sequence" else made


def test_ranks_that_share_sequences_send_and_hold_what_plan_says(told: Any) -> None:
    """Llama's 12 key heads are more than two ranks; its rows equal those of any mesh, and isp."""
    options = ("--sequence", 2, "--tokens", TOKENS // 2, "--precision", "fp32", "--local", 2)
    facts = told("llama", "--world", 4, *options)

    def rank(world: World) -> tuple[dict[str, int], ...]:
        mesh = CountedMesh(world, sequence=2, local_size=2)
        model = parallel.sequence(build_seeded_model(make=build_tensor_llama), mesh)
        model = npuzero.zero(model, plan="isp", mesh=mesh)
        optimizer = npuzero.AdamW(model.parameters())
        for step in range(2):
            mesh.sent.clear()
            model(**parallel.slice(tensor_batch(step, mesh.index(DATA) // 2), mesh)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        report = npuzero.report(model)
        return {"all_to_all": mesh.sent["sequence", "all_to_all"]}, report.bytes_sent, report.bytes_held

    for layers, sent, held in run_threads(4, rank):
        assert layers == facts["layers_bytes_sent"]["sequence"]
        assert sent == facts["presets"]["isp"]["bytes_sent"]
        assert held == facts["presets"]["isp"]["bytes_held"]


def test_key_heads_are_repeated_where_more_ranks_share_sequences(told: Any) -> None:
    """8 ranks divide 24 query heads; 12 key heads are repeated twice, so that 24 of each are sent."""
    sent = told("llama", "--world", 8, "--sequence", 8, "--tokens", 4, "--micro-batches", 3)["layers_bytes_sent"]
    assert sent["sequence"] == {"all_to_all": 3 * LAYERS * 2 * 4 * ring_bytes("all_to_all", 4 * 24 * 2 * 2, 8)}


# -- text and errors ---------------------------------------------------------------------------------------------------


def test_the_text_has_axes_and_layers(told: Any) -> None:
    options = ("--world", 16, "--local", 4, "--tensor", 2, "--mode", "fsp", "--sequence", 2, "--pod", 2)
    text = told("llama", *options, form="text")
    assert "16 ranks (4 per host), tensor 2 (fsp), sequence 2, pod 2, 1 micro-batch a step" in text.splitlines()[0]
    assert "--tokens, of a rank and micro-batch, says" in text and "sent by the layers" not in text
    row = next(line for line in text.splitlines() if line.startswith("isp "))
    assert "parameters, gradients / 2, states / 4" in row
    text = told("llama", *options, "--tokens", 64, form="text")
    layers = text.partition("sent by the layers")[2].splitlines()
    assert [line.split()[0] for line in layers[3:5]] == ["tensor", "sequence"] and "all_to_all" in layers[1]


def test_without_further_axes_the_text_says_nothing_of_them(told: Any) -> None:
    text = told("llama", "--world", 4, form="text")
    assert "along" not in text and "layers" not in text
    assert "mesh" not in told("llama", "--world", 4)


def test_a_size_alone_is_a_model_that_the_ranks_divide(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--parameters", "1B", "--world", "12", "--tensor", "3", "--sequence", "2", "--tokens", "96"]
    assert main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == 10**9 and set(facts["layers_bytes_sent"]) == {"tensor", "sequence"}
    whole = from_size(10**9, ranks=6).predict(npuzero.Plan.preset("zero0", precision="bf16"), 1, Settings())
    part = facts["presets"]["zero0"]["bytes_held"]["states"] / whole.bytes_held["states"]
    assert 1 / 3 <= part < 0.34  # norms, and parameters outside the matrices, are unsharded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--world", 8, "--tensor", 3), "mesh: tensor: expected a positive divisor of the 8 ranks: 1, 2, 4, 8; got 3"),
        (("--world", 8, "--tensor", 2, "--pod", 8), "mesh: pod: expected a positive divisor of the 4 ranks"),
        (("--world", 8, "--tensor", 4, "--sequence", 4), "mesh: sequence: expected a positive divisor of the 2 ranks"),
        (("--world", 8, "--tensor", 8), "axis tensor: key-value heads of"),
        (("--world", 16, "--sequence", 16), "expected heads that the 16 ranks of the sequence axis divide"),
        (("--mode", "msp"), "--mode: expected --tensor 2 or more beside it"),
        (("--tokens", 8), "--tokens: expected --tensor, --sequence or --pipe beside it"),
        (("--tensor", 2, "--tiles", "lm_head=2"), "--tiles: expected layers in one piece"),
        (("--tensor", 2, "--mode", "fsp", "--tokens", 7), "--tokens: expected a number that 2 tensor ranks divide"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(options: tuple[object, ...], message: str, told: Any) -> None:
    error = told("llama", *options, form="error")
    assert message in error and error.startswith("npuzero: ConfigError: ") and len(error.splitlines()) == 1


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 48, "n_positions": 32}


@pytest.mark.parametrize(
    ("counter", "got"),
    [("transformers", "none in GPT2LMHeadModel"), ("npuzero", "none that is known without transformers")],
    indirect=["counter"],
)
def test_a_kind_without_a_plan_is_refused_by_name(
    counter: None, got: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    assert main(["plan", "--config", str(path), "--tensor", "2"]) == 2
    error = capsys.readouterr().err
    assert "--tensor 2: expected a kind of model whose division is known" in error and got in error
