"""The suites of ops and collectives and their command, at sizes where all that is left is whether they work."""

from __future__ import annotations

import json
import math

import pytest
import torch

from npuzero import ops as npuzero_ops
from npuzero.bench import Record
from npuzero.bench.shapes import gpt_shapes
from npuzero.bench.suites import ops
from npuzero.cli import main
from npuzero.errors import ConfigError


@pytest.mark.parametrize("elements", [10**6, 64 * 2**20])
def test_the_tensors_of_a_gpt(elements):
    shapes = gpt_shapes(elements)
    assert len(shapes) == 400
    assert 0.8 * elements < sum(map(math.prod, shapes)) <= elements


def test_too_few_elements_for_a_gpt():
    with pytest.raises(ConfigError, match="at least"):
        gpt_shapes(1000)


def test_every_op_is_benchmarked_and_its_contenders_pass_their_checks(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ops, "QUICK_ELEMENTS", 60_160)
    assert main(["bench", "ops", "--quick", "--out", str(tmp_path)]) == 0
    record = Record.read(tmp_path / "ops.json")
    assert [result.name for result in record.results] == ops.ops_benchmark_names(True)
    assert record.quick and record.command == "npuzero bench ops --quick --device cpu"
    shown = capsys.readouterr()
    for result in record.results:
        assert "npuzero" in result.seconds and result.checked
        assert result.title in shown.out and f"{result.name}: " in shown.err
    functions = {name for name in npuzero_ops.__all__ if name.islower()}
    assert functions <= {name.partition("/")[0] for name in ops.CASES}


def test_a_wrong_result_is_found_out_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ops, "QUICK_ELEMENTS", 60_160)
    right = npuzero_ops.norm
    monkeypatch.setattr(npuzero_ops, "norm", lambda x, out: (right(x, out), out.mul_(1 + 1e-9)))
    assert main(["bench", "ops", "--quick", "--only", "norm", "--out", str(tmp_path)]) == 2
    assert "npuzero: BenchmarkError: check of norm: expected the reference" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.world
def test_collectives_are_measured_on_two_and_four_ranks(tmp_path, capsys):
    wanted = ["barrier", "all_to_all/int8", "send", "reduce_scatter/bf16", "update/bf16"]
    assert main(["bench", "comm", "--quick", "--only", *wanted, "--out", str(tmp_path)]) == 0
    record = Record.read(tmp_path / "comm.json")
    names = [f"{name}/{ranks}" for ranks in (2, 4) for name in ("barrier", "reduce_scatter/bf16/64")]
    assert {result.name for result in record.results} >= set(names)
    assert len(record.results) == 10
    assert {result.parameters["ranks"] for result in record.results} == {2, 4}
    assert "reduce_scatter of 64 KiB bf16, 4 ranks" in capsys.readouterr().out


def test_unknown_benchmarks_are_named(capsys):
    assert main(["bench", "--only", "nrom"]) == 2
    message = capsys.readouterr().err
    assert "--only: expected beginnings of flat_adam/flat" in message and "got nrom" in message


def test_a_device_that_is_not_there_is_named(capsys):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    assert main(["bench", "ops", "--device", "cuda"]) == 2
    assert "device cuda: expected a usable device" in capsys.readouterr().err


def test_the_record_holds_every_round(tmp_path, monkeypatch):
    monkeypatch.setattr(ops, "QUICK_ELEMENTS", 60_160)
    assert main(["bench", "ops", "--quick", "--only", "cast/nearest", "--out", str(tmp_path)]) == 0
    (benchmark,) = json.loads((tmp_path / "ops.json").read_text())["benchmarks"]
    own = benchmark["contenders"]["npuzero"]
    assert 3 <= len(own["seconds"]) <= 5 and own["nbytes"] == 6 * 60_160
    assert own["speedup"].keys() == {"median", "mad", "error"}
