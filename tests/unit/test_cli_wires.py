"""npuzero plan says what travels in other dtypes and in few bits, and between nodes: as text and as JSON."""

from __future__ import annotations

import json

import pytest
import torch

import npuzero
from npuzero.cli import main
from npuzero.cli.output.table import format_bytes
from npuzero.config import Settings
from npuzero.plan import PRESETS, THINNED, Plan, Precision
from npuzero.planner.models import from_size
from unit.test_cli import lines_by_preset, sent_and_held


def test_sums_may_travel_as_wires(capsys):
    assert main(["plan", "--parameters", "1B", "--world", "16", "--local", "4", "--sums", "wire", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "sums in the communication dtype" in facts["model"]
    for name in PRESETS:
        plan = Plan.preset(name, precision=npuzero.Precision(torch.bfloat16, sums="wire"), local_size=4)
        report = from_size(10**9).predict(plan, 16, Settings())
        assert facts["presets"][name] == sent_and_held(report)


@pytest.mark.parametrize(
    ("options", "fields", "told"),
    [
        (["--gathers", "int8"], {"gathers": "int8"}, "bf16, parameters gathered in int8, 16 ranks"),
        (["--wires", "int4"], {"wires": "int4"}, "bf16, gradients in int4, 16 ranks"),
        (["--wires", "fp32"], {"wires": torch.float32}, "bf16, gradients in fp32, 16 ranks"),
        (
            ["--wires", "node=int4, local=bf16", "--feedback", "node"],
            {"wires": {"node": "int4", "local": torch.bfloat16}, "feedback": "node"},
            "bf16, gradients in int4 along node and bf16 along local, what rounding loses along node kept, 16 ranks",
        ),
        (
            ["--wires", "int8", "--feedback", "all", "--sums", "wire"],
            {"wires": "int8", "feedback": "all", "sums": "wire"},
            "bf16, sums in the communication dtype, gradients in int8, what rounding loses along all axes kept",
        ),
    ],
)
def test_what_travels_may_be_rounded(options, fields, told, capsys):
    assert main(["plan", "--parameters", "1B", "--world", "16", "--local", "4", *options, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert told in facts["model"] and list(facts["presets"]) == [*PRESETS, *THINNED]
    for name, found in facts["presets"].items():
        plan = Plan.preset(name, precision=Precision(torch.bfloat16, **fields), local_size=4)
        assert found == sent_and_held(from_size(10**9).predict(plan, 16, Settings())), name


def test_what_goes_between_nodes_and_inside_them(capsys):
    arguments = ["plan", "--parameters", "1B", "--world", "16", "--local", "4"]
    assert main([*arguments, "--json"]) == 0
    presets = json.loads(capsys.readouterr().out)["presets"]
    assert main(arguments) == 0
    text = capsys.readouterr().out.partition("sent per rank and step")[2]
    assert text.splitlines()[1].endswith("  total  between nodes  inside nodes")
    rows = {name: line for name, line in lines_by_preset(text).items() if name in presets}
    assert rows.keys() == presets.keys()
    for name, line in rows.items():
        along = presets[name]["bytes_sent_along"]
        node, local = (format_bytes(sum(along.get(axis, {}).values())) for axis in ("node", "local"))
        assert line.split()[-4:] == [*node.split(), *local.split()]
    assert "Between and inside nodes: what of this" in text
    assert main(["plan", "--parameters", "1B", "--world", "16"]) == 0
    alone = capsys.readouterr().out
    assert "between nodes" not in alone and set(THINNED).isdisjoint(lines_by_preset(alone))


@pytest.mark.parametrize(
    ("ranks", "options", "joined"),
    [
        (["--world", "16", "--local", "4"], ["--gathers", "int8", "--wires", "int4"], "hpz = zero++ = thin"),
        (["--world", "16", "--local", "1"], [], "zero++ = thin"),
    ],
)
def test_rows_that_are_rounded_alike_are_one(ranks, options, joined, capsys):
    assert main(["plan", "--parameters", "1B", *ranks, *options]) == 0
    labels = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert [label for label in labels if "thin" in label.split(" = ")] == [joined] * 2
