"""``npuzero plan --on``: the answer, the table, the trace, the picture, the JSON; options that do not go together."""

from __future__ import annotations

import json

import pytest

from npuzero.cli import main
from npuzero.cli.output.table import format_bytes
from npuzero.planner import Cluster, from_size
from npuzero.planner.advice import advise

from .test_advice import LLAMA

SMALL = ["plan", "--parameters", "200M", "--on", "16xa100-80g", "--seq", "1024", "--tokens", "131072"]


@pytest.fixture
def said(capsys):
    def run(*arguments: str) -> str:
        assert main([*map(str, arguments)]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    def run(*arguments: str) -> str:
        assert main([*map(str, arguments)]) == 2
        return capsys.readouterr().err

    return run


def test_the_answer_is_that_of_advise(said):
    text = said(*SMALL)
    advice = advise(from_size(200_000_000), "16xa100-80g", seq=1024, tokens_per_step=131072)
    assert text.splitlines()[0] == advice.answer
    assert text.startswith(str(advice))
    assert "16 × a100-80g in 2 nodes" in text
    assert "sequences of 1,024" in text


def test_the_table_shows_the_alternatives_and_what_they_send_between_nodes(said):
    text = said(*SMALL, "--table")
    facts = json.loads(said(*SMALL, "--json"))
    header = next(line for line in text.splitlines() if line.startswith("plan "))
    assert all(word in header for word in ("between nodes", "inside nodes", "tokens/s", "bound"))
    for each in (facts["best"], *facts["others"]):
        cells = [format_bytes(each["memory"]["device"]), format_bytes(each["bytes_sent_by_level"]["node"])]
        batch = f"{each['micro_batch']} × {each['micro_batches']}"
        rows = [line for line in text.splitlines() if line.startswith(each["plan"]) and f" {batch} " in line]
        assert any(all(cell in row for cell in cells) for row in rows), (each["plan"], batch)
    hpz, zero3 = (
        next(each for each in (facts["best"], *facts["others"]) if each["plan"] == name) for name in ("hpz", "zero3")
    )
    assert 0 < hpz["bytes_sent_by_level"]["node"] < zero3["bytes_sent_by_level"]["node"]


def test_json_has_it_all(said):
    facts = json.loads(said(*SMALL, "--json"))
    assert facts["fits"]
    assert facts["answer"].startswith("Fits: ")
    best = facts["best"]
    assert best["arguments"] == {"plan": best["plan"], "precision": "bf16"}
    assert best["tokens_per_step"] == 131072
    assert best["tokens_per_s"] == pytest.approx(131072 / best["step_s"] / 16)
    assert sum(best["parts_s"].values()) == pytest.approx(best["step_s"], rel=1e-6)
    speeds = [each["tokens_per_s"] for each in (best, *facts["others"])]
    assert speeds == sorted(speeds, reverse=True)
    assert facts["cluster"]["sources"]
    sent = sum(nbytes for verb, nbytes in best["bytes_sent"].items() if verb != "control")
    assert sum(best["bytes_sent_by_level"].values()) == sent


def test_where_nothing_fits_json_has_the_ways_out(said):
    arguments = ("plan", "--parameters", "13B", "--on", "1xa100-80g", "--seq", 2048, "--tokens", "0.1M")
    facts = json.loads(said(*arguments, "--json"))
    assert not facts["fits"]
    assert facts["best"] is None
    assert all(max(each["bytes_over"].values()) > 0 for each in facts["misfits"])
    whats = [way["what"] for way in facts["ways_out"]]
    assert any(what.startswith("4 devices with") for what in whats)
    assert "states on the host" in whats
    assert all(way["step_s"] > 0 for way in facts["ways_out"])


def test_the_trace_is_of_the_best_plan(said, tmp_path):
    path = tmp_path / "trace.json"
    said(*SMALL, "--trace", path)
    best = json.loads(said(*SMALL, "--json"))["best"]
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    assert events
    end_s = max(event["ts"] + event["dur"] for event in events) / 1e6
    assert end_s >= 0.9 * best["step_s"]


def test_the_picture_has_activations_and_the_capacity(said, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn: list[str] = []
    save = Figure.savefig

    def kept(figure, *arguments, **options):
        for axes in figure.axes:
            drawn.extend(text.get_text() for text in (*axes.texts, *axes.get_legend().get_texts()))
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    said(*SMALL, "--plot", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    assert "activations" in drawn
    assert f"a rank has {format_bytes(Cluster.named('a100-80g').device.memory_bytes)}" in drawn


def test_a_file_is_given_by_its_place_or_by_config(said, tmp_path):
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(LLAMA))
    on = ("--on", "8x910b-64g", "--seq", "64")
    assert said("plan", path, *on) == said("plan", "--config", path, *on)
    assert said("plan", path, "--world", "4") == said("plan", "--config", path, "--world", "4")


def test_a_cluster_comes_from_a_file(said, tmp_path):
    Cluster.named("16xa100-80g").write(tmp_path / "mine.json")
    on = SMALL.index("--on") + 1
    assert said(*SMALL[:on], tmp_path / "mine.json", *SMALL[on + 1 :]) == said(*SMALL)


def test_what_is_searched_may_be_said(said):
    text = said(*SMALL, "--presets", "hpz", "zero3", "--precision", "bf16-8bit", "--offload", "host", "--json")
    facts = json.loads(text)
    assert {each["plan"] for each in (facts["best"], *facts["others"])} == {"hpz+host", "zero3+host"}
    assert facts["best"]["arguments"]["offload"] == "host"
    assert facts["best"]["arguments"]["precision"] == "bf16-8bit"
    assert facts["best"]["memory"]["host"] > 0


def test_axes_that_are_asked_for_are_in_the_answer_and_in_json(said):
    text = said(*SMALL, "--tensor", "2", "--pipe", "2", "--mode", "msp", "--table")
    facts = json.loads(said(*SMALL, "--tensor", "2", "--pipe", "2", "--mode", "msp", "--json"))
    best = facts["best"]
    assert best["axes"] == {"pipe": 2, "tensor": 2}
    assert best["mesh"]["tensor"] == best["mesh"]["pipe"] == 2
    assert "(pipe 2 × tensor 2), micro-batch" in text.splitlines()[0]
    assert "parallel.tensor(model, mesh, 'msp'); npuzero.pipeline(model, mesh, micro_batches=" in text
    assert set(best["layers_bytes_sent"]) == {"tensor"}
    along = sum(
        sum(verbs.values()) for verbs in (*best["bytes_sent_along"].values(), *best["layers_bytes_sent"].values())
    )
    assert sum(best["bytes_sent_by_level"].values()) == along


def test_all_axes_are_searched_where_that_is_asked_for(said):
    arguments = ("plan", "--parameters", "200M", "--on", "4xa100-80g", "--seq", "1024", "--tokens", "16384", "--json")
    without, axes = (json.loads(said(*arguments, *more)) for more in ((), ("--axes", "--presets", "zero1")))
    assert axes["looked"] > without["looked"] / 8
    found = [tuple(each["axes"].items()) for each in (axes["best"], *axes["others"])]
    assert () in found and len(set(found)) > 1
    fixed = json.loads(said(*arguments, "--axes", "--presets", "zero1", "--pipe", "2"))
    assert {each["axes"]["pipe"] for each in (fixed["best"], *fixed["others"])} == {2}


def test_the_tokens_of_a_step_decide_on_the_batch(said):
    few, many = (
        json.loads(said(*SMALL[:-1], tokens, "--json"))["best"] for tokens in ("131072", "262144")
    )  # fmt: skip
    assert many["micro_batch"] * many["micro_batches"] == 2 * few["micro_batch"] * few["micro_batches"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--on", "8x910b-64g"], "seq: expected the tokens of a sequence"),
        (["--on", "8x910b-46g", "--seq", "64"], "Did you mean '910b-64g'?"),
        (["--on", "7x910b-64g/2", "--seq", "64"], "a multiple of the 2 devices of a node"),
        (["--on", "8x910b-64g", "--seq", "64", "--tokens", "64"], "tokens_per_step"),
        (["--on", "8x910b-64g", "--seq", "64", "--presets", "zero4"], "Did you mean"),
        (["--on", "8x910b-64g", "--seq", "64", "--world", "8"], "--world: expected no --on"),
        (["--on", "8x910b-64g", "--seq", "64", "--memory", "64GiB"], "--memory: expected no --on"),
        (["--on", "8x910b-64g", "--seq", "64", "--micro-batches", "4"], "--micro-batches: expected no --on"),
        (["--on", "8x910b-64g", "--seq", "64", "--pod", "2"], "--pod: expected no --on"),
        (["--on", "8x910b-64g", "--seq", "64", "--tensor", "3"], "mesh: tensor: expected a positive divisor of the 8"),
        (["--on", "8x910b-64g", "--seq", "63", "--sequence", "2"], "seq: expected a multiple of 2"),
        (["--on", "8x910b-64g", "--seq", "64", "--pipe", "8", "--tokens", "0.1M", "--units", "4"], "over 8 stages"),
        (["--axes"], "--axes: expected --on CLUSTER beside it"),
        (["--seq", "64"], "--seq: expected --on CLUSTER beside it"),
        (["--table"], "--table: expected --on CLUSTER beside it"),
        (["--trace", "t.json"], "--trace: expected --on CLUSTER beside it"),
        (["--presets", "zero3"], "--presets: expected --on CLUSTER beside it"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments, words, refused):
    text = refused("plan", "--parameters", "200M", *arguments)
    assert words in text
    assert text.startswith("npuzero: ConfigError: ")
    assert len(text.splitlines()) == 1


def test_a_trace_of_what_does_not_fit_is_refused(refused, tmp_path):
    arguments = ("--on", "1xa100-80g", "--seq", "2048", "--trace", str(tmp_path / "t.json"))
    assert "expected a plan that fits" in refused("plan", "--parameters", "70B", *arguments)
    assert not (tmp_path / "t.json").exists()
