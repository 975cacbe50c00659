"""Benchmarks of tensor and sequence ranks and of pipelines in tiny sizes: what they check, and whole runs."""

from __future__ import annotations

import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("transformers") is None:  # which takes seconds to import, in every worker
    pytest.skip("needs transformers", allow_module_level=True)

from benchmarks import figures, host_axes, pipeline, sequence, tensor
from benchmarks.axes.beside import AxisContender
from benchmarks.axes.llama import LlamaSizes
from benchmarks.axes.pipes import LlamaStage, PipelineSizes
from npuzero.bench import Record
from npuzero.errors import BenchmarkError

TINY = shlex.split(
    "--dim 32 --layers 2 --heads 4 --key-value-heads 2 --hidden 64 --vocabulary 64 --sequence 16 --rounds 1"
    " --visit 0.001"
)


def recorded_row_names(path: Path, group: str = "axes") -> list[str]:
    """Names of the rows that a record fills."""
    return [name for name, *_ in figures.figure_groups({each.name: each for each in Record.read(path).results})[group]]


def test_a_pair_of_each_mode_computes_what_plain_perceptrons_do():
    for mode in host_axes.MODES:
        assert "within" in host_axes.mode_benchmark(mode, layers=2).check()


def test_no_figure_is_taken_of_results_that_differ(monkeypatch):
    monkeypatch.setattr(host_axes.PerceptronBlock, "forward", lambda self, x: self.down(x) * torch.rand(1))
    with pytest.raises(BenchmarkError, match="mtp: output"):
        host_axes.mode_benchmark("mtp", layers=2).check()


def test_the_hosts_work_is_recorded(tmp_path):
    host_axes.main(["--layers", "2", "--seconds", "0.2", "--out", str(tmp_path / "record.json")])
    assert len(recorded_row_names(tmp_path / "record.json")) == 2


def test_the_sizes_are_those_that_figures_are_quoted_for():
    with torch.device("meta"):
        model = LlamaSizes().model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 31_990_272
    wide = LlamaSizes(**sequence.SIZES)
    assert (
        round(sequence.token_multiplications(wide) / sequence.token_multiplications(replace(wide, sequence=2048)), 3)
        == 1.075
    )


def test_two_stages_compute_what_the_model_does():
    sizes = PipelineSizes(dim=32, layers=3, heads=4, key_value_heads=2, hidden=64, vocabulary=64, sequence=16, first=2)
    tokens = sizes.tokens(0, 0)[:, :-1]
    ahead, behind = LlamaStage(sizes.model(), 0, sizes.first), LlamaStage(sizes.model(), 1, sizes.first)
    between = ahead(tokens)
    assert torch.equal(behind(between), sizes.model()(input_ids=tokens).logits)
    names = [{name for name, _ in stage.named_parameters()} for stage in (ahead, behind)]
    assert len(names[0]) + len(names[1]) == len(list(sizes.model().parameters()))
    assert sizes.sent_bytes == between.nbytes  # micro-batches are parts of it
    assert PipelineSizes().bubble == 1 / 9


def test_the_stages_of_a_pipeline_have_the_batch_of_their_data_rank():
    neighbours, apart = AxisContender("a", "x", LlamaSizes(), 2), AxisContender("b", "x", LlamaSizes(), 2, apart=True)
    assert [neighbours.batch(rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    assert [apart.batch(rank, 4) for rank in range(4)] == [0, 1, 0, 1]


@pytest.mark.slow
@pytest.mark.world
def test_a_step_over_tensor_ranks_is_compared_with_torchs(tmp_path):
    out = tmp_path / "record.json"
    tensor.main([*TINY, "--out", str(out)])
    result = Record.read(out).result("tensor/fp32-2")
    assert set(result.seconds) == {tensor.GLOO, tensor.SHM, tensor.OWN}
    assert all(values["held_bytes"] > 0 for values in result.values.values())
    assert len(recorded_row_names(out)) == 4


@pytest.mark.slow
@pytest.mark.world
def test_a_shared_sequence_is_compared_with_one_for_each(tmp_path):
    out = tmp_path / "record.json"
    sequence.main([*TINY, "--out", str(out)])
    result = Record.read(out).result("sequence")
    assert set(result.seconds) == {sequence.APART, sequence.OWN}
    assert result.parameters["sides"][sequence.APART]["sequence"] == 8
    assert len(recorded_row_names(out)) == 1


@pytest.mark.slow
@pytest.mark.world
def test_a_step_over_stages_is_compared_with_torchs_and_with_compute_only(tmp_path):
    out = tmp_path / "record.json"
    pipeline.main([*TINY, "--first", "1", "--out", str(out), "--trace", str(tmp_path / "trace.json")])
    result = Record.read(out).result("pipeline/fp32-2")
    assert set(result.seconds) == {*pipeline.CONTENDERS, pipeline.WHOLE}
    assert all(values["held_bytes"] > 0 for values in result.values.values())
    sent = result.parameters["sent_bytes"]
    assert sent == 8 * 16 * 32 * 4 and result.values[pipeline.OWN]["sent_bytes"] == [sent, sent]
    assert len(recorded_row_names(out, "pipe")) == 6
