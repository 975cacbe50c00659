"""The command line: info and plan, as text and as JSON; errors are one line on stderr and status 2."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys

import pytest
import torch

import npuzero
from npuzero.cli import main
from npuzero.cli.output.table import choose_byte_unit, format_bytes, format_table
from npuzero.config import Settings
from npuzero.info import info
from npuzero.plan import PRESETS, THINNED, Plan
from npuzero.planner.models import from_size

LLAMA_2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}


@pytest.fixture
def config_file(tmp_path):
    def write(**values):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values))
        return str(path)

    return write


def sent_and_held(report):
    held, sent, along = report.bytes_held, report.bytes_sent, report.sent_along
    return {"bytes_held": held, "bytes_sent": sent, "bytes_sent_along": along}


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
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["presets"]) == set(PRESETS)


def test_plan_says_what_predict_says(capsys):
    options = ["--parameters", "7e9", "--units", "32", "--world", "64", "--local", "8", "--micro-batches", "2"]
    assert main(["plan", *options, "--precision", "bf16", "--clip", "--json"]) == 0
    presets = json.loads(capsys.readouterr().out)["presets"]
    model = from_size(7 * 10**9, 32)
    assert list(presets) == [*PRESETS, *THINNED]
    for name in presets:
        plan = Plan.preset(name, precision="bf16", local_size=8)
        report = model.predict(plan, 64, Settings(), micro_batches=2, clip=True)
        assert presets[name] == sent_and_held(report)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(
            (text, 7_000_000_000)
            for text in ("7B", "7b", "7e9", "7_000_000_000", "7,000,000,000", "7000M", "7.0B", "7E9")
        ),
        ("1.5B", 1_500_000_000),
        ("350M", 350_000_000),
        ("125m", 125_000_000),
        ("1.1T", 1_100_000_000_000),
        ("0.123456789B", 123_456_789),
    ],
)
def test_a_models_size_is_a_number_as_people_write_it(text, value, capsys):
    assert main(["plan", "--parameters", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == value


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *((text, 64 * 2**30) for text in ("64GiB", "64gib", "64g", "64G", "64 GiB", "64Gi", "65536MiB", "68719476736")),
        ("64GB", 64 * 10**9),
        ("80gb", 80 * 10**9),
        ("0.5TiB", 2**39),
        ("1.1GiB", int(1.1 * 2**30)),
    ],
)
def test_memory_as_people_write_it(text, nbytes, capsys):
    assert main(["plan", "--parameters", "7B", "--memory", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_bytes"] == nbytes


def lines_by_preset(text):
    """Lines of a table by the names that its first column has."""
    named = [(line, line.split("  ")[0].split(" = ")) for line in text.splitlines()]
    return {name: line for line, names in named for name in names}


def test_which_presets_fit_and_by_how_much(capsys):
    arguments = ["plan", "--parameters", "7B", "--world", "64", "--local", "8", "--memory", "16GiB"]
    assert main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    text = capsys.readouterr().out
    rows = lines_by_preset(text.split("sent per rank")[0])
    fitting = []
    for name in PRESETS:
        left = facts["presets"][name]["bytes_left"]
        assert left == 16 * 2**30 - sum(facts["presets"][name]["bytes_held"].values())
        assert rows[name].endswith(
            f"fits, {format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} too much"
        )
        fitting += [name] * (left >= 0)
    assert 0 < len(fitting) < len(PRESETS)
    assert facts["first_fit"] == fitting[0] == "zero2" and "The first that fits in 16.00 GiB is zero2" in text


@pytest.mark.parametrize(
    ("options", "offload", "gradients"),
    [
        (["--offload", "host"], "host", True),
        (["--offload", "nvme"], "nvme", True),
        (["--states", "nvme", "--gradients", "host"], "nvme", True),
        (["--states", "host"], "host", False),
    ],
)
def test_rows_off_the_device_say_what_predict_says(options, offload, gradients, capsys):
    arguments = ["plan", "--parameters", "1B", "--world", "16", "--local", "4", "--micro-batches", "2", *options]
    assert main([*arguments, "--link", "20", "--memory", "4GiB", "--json"]) == 0
    presets = json.loads(capsys.readouterr().out)["presets"]
    assert list(presets) == [*PRESETS, *THINNED, *(f"{name}+{offload}" for name in PRESETS)]
    for name in PRESETS:
        plan = Plan.preset(name, precision="bf16", local_size=4)
        placed = plan.offloaded(offload)
        placed = placed if gradients else dataclasses.replace(placed, gradients=plan.gradients)
        report = from_size(10**9).predict(placed, 16, Settings(), micro_batches=2)
        assert presets[f"{name}+{offload}"] == {
            "bytes_held": report.bytes_held,
            "bytes_sent": report.bytes_sent,
            "bytes_sent_along": report.sent_along,
            "memory": report.memory,
            "bytes_moved": report.bytes_moved,
            "link_seconds": max(report.bytes_moved["device>host"], report.bytes_moved["host>device"]) / 20e9,
            "bytes_left": 4 * 2**30 - report.memory["device"],
        }
        assert set(presets[name]) == {"bytes_held", "bytes_sent", "bytes_sent_along", "bytes_left"}


def test_rows_with_lag_are_those_with_gradients_on_the_host(capsys):
    arguments = ["plan", "--parameters", "1B", "--world", "16", "--offload", "host", "--lag", "1", "--json"]
    assert main(arguments) == 0
    presets = json.loads(capsys.readouterr().out)["presets"]
    placed = [Plan.preset(name, precision="bf16").offloaded("host") for name in PRESETS]
    late = {f"{plan.name}, lag 1": dataclasses.replace(plan, lag=1) for plan in placed if plan.gradients.far}
    assert list(presets) == [*PRESETS, *late] and "zero2+host, lag 1" in late
    for name, plan in late.items():
        report = from_size(10**9).predict(plan, 16, Settings())
        assert (presets[name]["memory"], presets[name]["bytes_moved"]) == (report.memory, report.bytes_moved)


def test_the_disk_s_seconds_are_those_of_both_ways(capsys):
    arguments = ["plan", "--parameters", "7B", "--world", "8", "--offload", "nvme", "--disk", "5", "--link", "25"]
    assert main([*arguments, "--memory", "8GiB"]) == 0
    text = capsys.readouterr().out
    memory, _, moved = text.partition("moved between memories per rank and step")
    header = memory.splitlines()[6].split()
    assert header[-4:] == ["nvme", "in", "8.00", "GiB"] and "host" in header
    row = lines_by_preset(moved)["zero3+nvme"].split()
    # 12 bytes of each of 7e9 / 8 elements there and back, 4 to the host, 2 to the device: padded a little.
    assert float(row[-2]) == pytest.approx(2 * 12 * 7 / 8 / 5, rel=0.01)
    assert float(row[-4]) == pytest.approx(4 * 7 / 8 / 25, rel=0.01)
    assert set(lines_by_preset(moved)).isdisjoint(PRESETS), "what is on the device moves nothing"
    assert "The first that fits in 8.00 GiB is zero3+nvme" in text


def test_parameters_leave_the_device_where_they_are_sharded_as_states_are(capsys):
    arguments = ["plan", "--parameters", "1B", "--world", "16", "--local", "4", "--offload", "nvme+parameters"]
    assert main([*arguments, "--disk", "5", "--json"]) == 0
    presets = json.loads(capsys.readouterr().out)["presets"]
    rows = [name.partition("+")[0] for name in presets if "+nvme" in name]
    assert rows == ["zero0", "zero3", "zero3-keep", "hpz", "hsdp", "mics"]
    assert presets["zero3+nvme+parameters"]["disk_seconds"] > presets["zero3-keep+nvme+parameters"]["disk_seconds"] > 0


def test_parameters_may_stay_unsharded_between_micro_batches(capsys):
    arguments = ["plan", "--parameters", "7B", "--world", "16", "--local", "8", "--micro-batches", "4"]
    assert main([*arguments, "--between", "unsharded"]) == 0
    text = capsys.readouterr().out
    assert "parameters unsharded between them" in text.splitlines()[0]
    row = lines_by_preset(text.partition("sent per rank and step")[0])["zero3-keep"]
    assert "all / 16, after_forward unsharded, between unsharded" in row
    gathered = {}
    for chosen in ([], ["--between", "unsharded"]):
        assert main([*arguments, *chosen, "--json"]) == 0
        presets = json.loads(capsys.readouterr().out)["presets"]
        gathered[bool(chosen)] = {name: presets[name]["bytes_sent"]["all_gather"] for name in ("zero2", "zero3")}
    assert (
        gathered[False]["zero3"] == 8 * gathered[True]["zero3"] and gathered[False]["zero2"] == gathered[True]["zero2"]
    )


def test_without_offload_no_table_speaks_of_it(capsys):
    assert main(["plan", "--parameters", "7B", "--memory", "8GiB"]) == 0
    text = capsys.readouterr().out
    assert "moved between" not in text and " nvme" not in text and "or another memory (--offload)" in text


def test_where_nothing_fits_the_nearest_is_named(capsys):
    arguments = ["plan", "--parameters", "70B", "--memory", "24GiB"]
    assert main(arguments) == 0
    assert "None fits in 24.00 GiB; zero3 is nearest" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["first_fit"] is None


def test_small_rows_keep_their_digits(capsys):
    assert main(["plan", "--parameters", "7B", "--world", "1024", "--local", "8"]) == 0
    text = capsys.readouterr().out
    zero3 = next(line for line in text.splitlines() if line.startswith("zero3 "))
    assert "all / 1024   13.13 MiB  26.26 MiB" in zero3  # 2 and 4 bytes / 1024, padded: not 0.01 GiB


def test_plan_as_text_has_a_row_for_each_preset_in_both_tables(capsys):
    assert main(["plan", "--parameters", "1e9", "--world", "16", "--local", "4", "--precision", "fp32"]) == 0
    text = capsys.readouterr().out
    assert "1,000,000,000 parameters, fp32, 16 ranks (4 per host), 1 micro-batch a step" in text
    for half in text.split("sent per rank and step"):
        assert set(lines_by_preset(half)) >= set(PRESETS)
    assert "memory per rank\n" in text and "sent per rank and step\n" in text
    assert "activations come on top" in text.lower()


@pytest.mark.parametrize(
    ("ranks", "joined"),
    [
        (["--world", "16", "--local", "4"], ["hsdp = mics"]),
        (["--world", "8"], ["zero1 = zero1.5", "zero3 = hpz = hsdp = mics"]),
        (["--world", "8", "--local", "8"], ["zero1 = zero1.5", "zero3 = hpz = hsdp = mics"]),
        (["--world", "8", "--local", "1"], ["zero0 = zero1.5 = hsdp = mics", "zero3-keep = hpz"]),
    ],
)
def test_presets_that_coincide_share_a_row_and_only_those(ranks, joined, capsys):
    assert main(["plan", "--parameters", "1B", *ranks, "--micro-batches", "2", "--clip", "--memory", "1TiB"]) == 0
    text = capsys.readouterr().out
    tables = text.split("sent per rank and step")
    for half in tables:
        labels = [line.split("  ")[0] for line in half.splitlines()]
        assert [label for label in labels if " = " in label and set(label.split(" = ")) <= set(PRESETS)] == joined
    assert ("All 8 ranks share a host" in text) == (joined[-1] == "zero3 = hpz = hsdp = mics")
    assert main(["plan", "--parameters", "1B", *ranks, "--micro-batches", "2", "--clip", "--json"]) == 0
    presets = json.loads(capsys.readouterr().out)["presets"]
    places = {name: line for half in tables[:1] for name, line in lines_by_preset(half).items() if name in PRESETS}
    for name, other in itertools.combinations(PRESETS, 2):
        assert (presets[name] == presets[other]) == (places[name] == places[other]), (name, other)


def test_one_rank_is_told_that_all_presets_are_the_same(capsys):
    assert main(["plan", "--parameters", "13B", "--world", "1", "--memory", "80GiB"]) == 0
    text = capsys.readouterr().out
    assert "1 rank (1 per host)" in text and "On one rank there is nothing to shard over" in text
    assert sum(line.startswith("any preset  ") for line in text.splitlines()) == 2
    assert "It does not fit in 80.00 GiB, 137.9 GiB too much: take more ranks (--world)" in text


def test_a_config_file_gives_the_models_real_size(config_file, capsys):
    assert main(["plan", "--config", config_file(**LLAMA_2_7B, unknown_key=3), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 6_738_415_616


def test_a_config_file_predicts_what_the_model_itself_does(config_file, capsys):
    sizes = {"hidden_size": 24, "intermediate_size": 40, "vocab_size": 50, "num_hidden_layers": 3}
    path = config_file(**sizes, model_type="llama", num_attention_heads=2)
    assert main(["plan", "--config", path, "--world", "8", "--local", "4", "--micro-batches", "2", "--json"]) == 0
    presets = json.loads(capsys.readouterr().out)["presets"]
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    for name in PRESETS:
        report = npuzero.predict(model, name, 8, local_size=4, precision="bf16", micro_batches=2)
        assert presets[name] == sent_and_held(report)


def test_layers_in_tiles_are_predicted_as_the_model_with_tiles_is(config_file, capsys):
    sizes = {"hidden_size": 24, "intermediate_size": 40, "vocab_size": 50, "num_hidden_layers": 3}
    path = config_file(**sizes, model_type="llama", num_attention_heads=2)
    options = ["--tiles", "lm_head=7", "mlp.up_proj=3", "--world", "4", "--prefetch", "0", "--json"]
    assert main(["plan", "--config", path, *options]) == 0
    presets = json.loads(capsys.readouterr().out)["presets"]
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    npuzero.tiled(model, {"lm_head": 7, "*.mlp.up_proj": 3})
    for name in PRESETS:
        report = npuzero.predict(model, name, 4, precision="bf16", settings=Settings(prefetch=0))
        assert presets[name] == sent_and_held(report)


def test_what_is_cut_is_padded_for_the_world():
    model = from_size(160, 10, vocabulary=1)
    held = model.predict(Plan.preset("zero3", precision="fp32"), 8, Settings()).bytes_held
    assert held["parameters"] == 11 * 512  # ten blocks and the root, a shard each of a few elements


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--parameters", "10", "--units", "32"], "--parameters: expected at least 16 for each of 32 blocks"),
        (["plan", "--parameters", "1M", "--vocabulary", "1M"], "enough for 12 blocks beside a vocabulary of 1,000,000"),
        (["plan", "--parameters", "7e9", "--world", "64", "--local", "7"], "a local_size that divides the world of 64"),
        (["plan", "--parameters", "7e9", "--prefetch", "-1"], "settings.prefetch: expected an integer from 0"),
        (["plan", "--parameters", "7e9", "--feedback", "node"], "precision.feedback='node': expected gradients"),
        (["plan", "--parameters", "7e9", "--wires", "tensor=int4"], "precision.wires: expected wires by axes among"),
        (["plan", "--parameters", "7e9", "--wires", "node=bf16,local=fp32"], "expected one dtype along all axes"),
        (["plan", "--parameters", "7e9", "--disk", "5"], "--disk: expected --offload or --states nvme beside it"),
        (["plan", "--parameters", "7e9", "--disk", "5", "--offload", "host"], "--disk: expected --offload or --states"),
        (["plan", "--parameters", "7e9", "--link", "5"], "--link: expected --offload or --states beside it"),
        (["plan", "--parameters", "7e9", "--gradients", "host"], "--gradients: expected --offload or --states"),
        (["plan", "--parameters", "7e9", "--lag", "1", "--states", "host"], "--states with --gradients beside it"),
        (["plan", "--parameters", "7e9", "--offload", "host", "--states", "host"], "neither --states nor --gradients"),
        (["plan", "--parameters", "7e9", "--tiles", "head=8"], "--tiles head: expected the name of a Linear layer"),
        (["plan", "--parameters", "7e9", "--tiles", "up_proj=99999"], "--tiles up_proj: expected at most"),
        (["plan", "--config", "missing.json"], "file missing.json: expected a readable file"),
        (["plan", "--config", "x.json", "--units", "3"], "--units: expected --parameters beside it"),
        (["plan", "--config", "x.json", "--vocabulary", "3k"], "--vocabulary: expected --parameters beside it"),
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
        ["plan", "--parameters", "7e9", "--sums", "bf16"],
        ["plan", "--parameters", "7e9", "--gathers", "int4"],
        ["plan", "--parameters", "7e9", "--wires", "int3"],
        ["plan", "--parameters", "7e9", "--wires", ""],
        ["plan", "--parameters", "7e9", "--wires", "node=int4,int8"],
        ["plan", "--parameters", "7e9", "--wires", "node=int4,node=int8"],
        ["plan", "--parameters", "7e9", "--feedback", "local"],
        ["plan", "--parameters", "7e9", "--offload", "disk"],
        ["plan", "--parameters", "7e9", "--offload", "nvme", "--disk", "0"],
        ["plan", "--parameters", "7e9", "--offload", "nvme", "--disk", "fast"],
        ["plan", "--parameters", "7e9", "--offload", "nvme", "--link", "5GiB"],
        ["plan", "--parameters", "7e9", "--tiles", "8"],
        ["plan", "--parameters", "7e9", "--tiles", "lm_head=none"],
        ["plan", "--parameters", "7BB"],
        ["plan", "--parameters", "7GB"],
        ["plan", "--parameters", "1,5B"],
        ["plan", "--parameters", "0B"],
        ["plan", "--parameters", "7B", "--memory", "64"],
        ["plan", "--parameters", "7B", "--memory", "-64GiB"],
        ["plan", "--parameters", "7B", "--memory", "64 gigs"],
        ["plan", "--parameters", "7B", "--memory", "inf"],
    ],
)
def test_a_wrong_option_is_argparses_error(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and "usage: npuzero" in capsys.readouterr().err


def test_plot_draws_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert main(["plan", "--parameters", "1e9", "--world", "8", "--memory", "16GiB", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_plot_without_matplotlib_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", "--parameters", "1e9", "--plot", str(tmp_path / "p.png")]) == 2
    assert "--plot: expected matplotlib" in capsys.readouterr().err


def test_a_single_rank_sends_nothing_and_still_has_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["plan", "--parameters", "1e6", "--units", "2", "--world", "1", "--plot", str(tmp_path / "p.png")]) == 0
    traffic = capsys.readouterr().out.split("sent per rank and step")[1].splitlines()
    assert traffic[3].split() == ["any", "preset", "-", "-", "-", "-", "-"]


def test_tables_and_quantities():
    assert format_table(["a", "bb"], [["x", "1"], ["long", "22"]]) == "a     bb\n----  --\nx      1\nlong  22"
    assert (
        choose_byte_unit(0) == ("B", 1)
        and choose_byte_unit(9 * 2**30) == ("MiB", 2**20)
        and choose_byte_unit(10 * 2**30) == ("GiB", 2**30)
    )
    assert [format_bytes(n) for n in (0, 1, 1023, 1024, 1100, 3 * 2**19)] == [
        "-",
        "1 B",
        "1023 B",
        "1.00 KiB",
        "1.07 KiB",
        "1.50 MiB",
    ]
    assert [format_bytes(n) for n in (99 * 2**30, 123 * 2**30, 1023 * 2**30, 2**40)] == [
        "99.00 GiB",
        "123.0 GiB",
        "1,023.0 GiB",
        "1.00 TiB",
    ]
