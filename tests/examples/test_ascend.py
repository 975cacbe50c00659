"""The program of docs/ascend.md, as it stands there, on CPU ranks; tests/npu/binding has it on the emulated device."""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import npuzero
from examples.pages import ROOT, find_page_programs, run_program_text

PAGE = (ROOT / "docs/ascend.md").read_text("utf-8")
(PROGRAM,) = find_page_programs("ascend.md")


def parse_ascend_losses(output: str) -> dict[int, float]:
    """By step, counted from 1."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)}


@pytest.mark.world
@pytest.mark.slow
def test_it_trains_on_two_ranks_and_leaves_what_transformers_loads(tmp_path: Path) -> None:
    found = parse_ascend_losses(run_program_text(PROGRAM, 2, tmp_path))
    assert list(found) == [1, 3, 5] and found[5] < found[3] < found[1]
    AutoModelForCausalLM.from_pretrained(tmp_path / "weights")


@pytest.mark.slow
@pytest.mark.world
def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    whole = parse_ascend_losses(run_program_text(PROGRAM, 2, tmp_path))
    weights = tmp_path / "weights/model.safetensors"
    expected = weights.read_bytes()
    shutil.rmtree(tmp_path / "runs/llama/step-00000006")  # as if it had been stopped after five steps
    assert parse_ascend_losses(run_program_text(PROGRAM, 2, tmp_path)) == {5: whole[5]}
    assert weights.read_bytes() == expected
    shutil.rmtree(tmp_path / "runs/llama/step-00000006")
    assert list(parse_ascend_losses(run_program_text(PROGRAM, 1, tmp_path))) == [5], "on another number of ranks"


def test_what_the_page_names_is_there() -> None:
    """Presets, precisions, settings and functions; and its plan of two levels keeps the law."""
    assert set(re.findall(r'plan="([^"]+)"', PAGE)) <= {*npuzero.PRESETS, *npuzero.THINNED}
    assert set(re.findall(r'precision="([^"]+)"', PAGE)) <= set(npuzero.PRECISIONS)
    assert set(re.findall(r"Settings\((\w+)=", PAGE)) <= set(npuzero.Settings.names())
    for path in set(re.findall(r"\bnpuzero\.([\w.]*\w)", PAGE)) | set(re.findall(r"`((?:comm|observe)\.\w+)", PAGE)):
        functools.reduce(getattr, path.split("."), npuzero)
    near, wide = npuzero.Placement(("local",)), npuzero.Placement(("local", "node"))
    assert '`near, wide = Placement(("local",)), Placement(("local", "node"))`' in PAGE
    assert "`Plan(near, near, near, wide, local_size=n)`" in PAGE
    npuzero.Plan(near, near, near, wide, local_size=8)
