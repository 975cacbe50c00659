"""The command line: info and plan, as text and as JSON; errors are one line on stderr and status 2."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import npuzero
from npuzero.cli import main
from npuzero.cli.model import from_config, from_size
from npuzero.cli.table import quantity, table, unit_for
from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.info import info
from npuzero.plan import PRESETS, Plan

LLAMA_2_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
LLAMA_3_8B = {**LLAMA_2_7B, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}


@pytest.fixture
def config_file(tmp_path):
    def write(**values):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values))
        return str(path)

    return write


def test_info_tells_devices_kernels_and_what_is_missing(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for word in ("Versions", "Devices", "Kernels in this build", "Collectives", "Missing", "flat_adam", "gloo"):
        assert word in text
    assert f"torch          {torch.__version__}" in text


def test_info_as_json_is_what_the_function_returns(capsys):
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == info()


def test_info_gives_a_reason_and_a_remedy_for_each_thing_missing():
    facts = info()
    missing = {item["what"] for item in facts["missing"]}
    for kind, found in facts["devices"].items():
        assert (f"device {kind}" in missing) is not found["available"]
        assert bool(found["devices"]) is found["available"]
    for item in facts["missing"]:
        assert item["why"] and item["do"].endswith(".")
    assert facts["kernels"]["flat_adam"]["cpu"] is True
    assert facts["isa"]["chosen"] in facts["isa"]["supported"]
    assert set(facts["isa"]["supported"]) <= set(facts["isa"]["built"])


def test_the_module_runs_as_a_command(tmp_path):
    command = [sys.executable, "-m", "npuzero", "plan", "--parameters", "1e6", "--units", "4", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["presets"]) == set(PRESETS)


def test_plan_says_what_predict_says(capsys):
    options = ["--parameters", "7e9", "--units", "32", "--world", "64", "--local", "8", "--micro-batches", "2"]
    assert main(["plan", *options, "--precision", "bf16", "--clip", "--json"]) == 0
    presets = json.loads(capsys.readouterr().out)["presets"]
    model = from_size(7 * 10**9, 32)
    for name in PRESETS:
        plan = Plan.preset(name, precision="bf16", local_size=8)
        report = model.predict(plan, 64, Settings(), micro_batches=2, clip=True)
        assert presets[name] == {"bytes_held": report.bytes_held, "bytes_sent": report.bytes_sent}


def test_plan_as_text_has_a_row_for_each_preset_in_both_tables(capsys):
    assert main(["plan", "--parameters", "1e9", "--world", "16", "--local", "4", "--precision", "fp32"]) == 0
    text = capsys.readouterr().out
    assert "1,000,000,000 parameters, fp32, 16 ranks (4 per host), 1 micro-batch a step" in text
    rows = [line.split()[0] for line in text.splitlines() if line.strip()]
    for name in PRESETS:
        assert rows.count(name) == 2
    assert "memory per rank, GiB" in text and "sent per rank and step, GiB" in text


def test_a_config_file_gives_the_models_real_size(config_file, capsys):
    assert main(["plan", "--config", config_file(**LLAMA_2_7B, unknown_key=3), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 6_738_415_616


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_2_7B, 6_738_415_616),
        (LLAMA_3_8B, 8_030_261_248),
        (LLAMA_2_7B | {"tie_word_embeddings": True}, 6_738_415_616 - 32000 * 4096),
        (LLAMA_2_7B | {"attention_bias": True}, 6_738_415_616 + 32 * 4 * 4096),
        (LLAMA_2_7B | {"mlp_bias": True}, 6_738_415_616 + 32 * (2 * 11008 + 4096)),
        (LLAMA_2_7B | {"head_dim": 64}, 6_738_415_616 - 32 * 4 * 4096 * 2048),
    ],
)
def test_parameters_of_known_models(config, parameters):
    model = from_config(config, "test")
    assert model.parameters == parameters
    assert len(model.units) == 1 + config["num_hidden_layers"]


class Block(nn.Module):
    """A block of LLAMA_2_7B's kind, of other sizes."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        sizes = [(hidden, hidden)] * 4 + [(hidden, inner)] * 2 + [(inner, hidden)]
        self.layers = nn.ModuleDict({f"l{i}": nn.Linear(*size, bias=False) for i, size in enumerate(sizes)})
        self.norms = nn.ParameterList([torch.empty(hidden), torch.empty(hidden)])


class Decoder(nn.Module):
    def __init__(self, hidden: int, inner: int, vocabulary: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.norm = nn.Parameter(torch.empty(hidden))
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(hidden, inner) for _ in range(blocks))


def test_a_config_file_predicts_what_the_model_itself_does(config_file, capsys):
    sizes = {"hidden_size": 24, "intermediate_size": 40, "vocab_size": 50, "num_hidden_layers": 3}
    path = config_file(**sizes, num_attention_heads=2)
    assert main(["plan", "--config", path, "--world", "8", "--local", "4", "--micro-batches", "2", "--json"]) == 0
    presets = json.loads(capsys.readouterr().out)["presets"]
    with torch.device("meta"):
        model = Decoder(*sizes.values())
    for name in PRESETS:
        report = npuzero.predict(model, name, 8, local_size=4, precision="bf16", micro_batches=2)
        assert presets[name] == {"bytes_held": report.bytes_held, "bytes_sent": report.bytes_sent}


def test_what_is_cut_is_padded_for_the_world():
    held = from_size(1001, 10).predict(Plan.preset("zero3", precision="fp32"), 8, Settings()).bytes_held
    assert held["parameters"] == 11 * 512  # ten units of 100 elements and a rest of 1, a shard each


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden_size": None}, "hidden_size: expected the sizes of a transformer"),
        ({"hidden_size": "4096"}, r"hidden_size: expected an integer from 1 to \d+; got '4096' \(str\)"),
        ({"hidden_size": 4095}, "expected a multiple of num_attention_heads = 32; got 4095"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected an integer"),
        ({"vocab_size": True}, "vocab_size: expected an integer"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected True or False"),
        ({"num_local_experts": 8}, "expected a dense model"),
    ],
)
def test_a_config_that_is_no_dense_transformer_is_an_error(change, match):
    with pytest.raises(ConfigError, match=match):
        from_config(LLAMA_2_7B | change, "test")


def test_a_mistyped_key_is_named():
    config = {key: value for key, value in LLAMA_2_7B.items() if key != "vocab_size"} | {"vocabulary_size": 1}
    with pytest.raises(ConfigError, match="Did you mean 'vocabulary_size'"):
        from_config(config, "test")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--parameters", "10", "--units", "32"], "--parameters: expected at least one for each of 32 units"),
        (["plan", "--parameters", "7e9", "--world", "64", "--local", "7"], "a local_size that divides the world of 64"),
        (["plan", "--parameters", "7e9", "--prefetch", "-1"], "settings.prefetch: expected an integer from 0"),
        (["plan", "--config", "missing.json"], "file missing.json: expected a readable file"),
        (["plan", "--config", "x.json", "--units", "3"], "--units: expected --parameters beside it"),
        (["plan", "--parameters", "1e6", "--plot", "no/such/folder.png"], "picture no/such/folder.png"),
        (["plan", "--parameters", "1e6", "--plot", "picture.nonsense"], "--plot: expected a picture's file name"),
    ],
)
def test_a_known_error_is_one_line_on_stderr(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err.splitlines()) == 1
    assert err.startswith(("npuzero: ConfigError: ", "npuzero: StorageError: "))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["plam"],
        ["info", "--jsn"],
        ["plan"],
        ["plan", "--parameters", "7e9", "--config", "x"],
        ["plan", "--parameters", "many"],
        ["plan", "--parameters", "1.5"],
        ["plan", "--parameters", "nan"],
        ["plan", "--parameters", "7e9", "--world", "0"],
        ["plan", "--parameters", "7e9", "--precision", "fp8"],
    ],
)
def test_a_wrong_option_is_argparses_error(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and "usage: npuzero" in capsys.readouterr().err


def test_plot_draws_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert main(["plan", "--parameters", "1e9", "--world", "8", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_plot_without_matplotlib_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", "--parameters", "1e9", "--plot", str(tmp_path / "p.png")]) == 2
    assert "--plot: expected matplotlib" in capsys.readouterr().err


def test_a_single_rank_sends_nothing_and_still_has_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["plan", "--parameters", "1e6", "--units", "2", "--world", "1", "--plot", str(tmp_path / "p.png")]) == 0
    assert "sent per rank and step, B" in capsys.readouterr().out


def test_tables_and_quantities():
    assert table(["a", "bb"], [["x", "1"], ["long", "22"]]) == "a     bb\n----  --\nx      1\nlong  22"
    assert unit_for(0) == ("B", 1) and unit_for(9 * 2**30) == ("MiB", 2**20) and unit_for(10 * 2**30) == ("GiB", 2**30)
    assert [quantity(n, 2**20) for n in (0, 1, 3 * 2**19)] == ["-", "<0.01", "1.50"]
    assert quantity(1234, 1) == "1,234"
