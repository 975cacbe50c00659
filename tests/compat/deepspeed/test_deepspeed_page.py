"""The page shows what the command prints, and docstrings what runs."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import pytest

import npuzero
from compat.deepspeed.reference import DenseGPT
from npuzero.cli import main
from npuzero.compat.deepspeed import DeepSpeedEngine, explain
from world.toy import build_seeded_model

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "deepspeed.md").read_text("utf-8")


def test_the_table_is_what_the_command_prints(tmp_path, monkeypatch, capsys):
    (configuration,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (table,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "ds_config.json").write_text(configuration, "utf-8")
    (command,) = re.findall(r"^`npuzero (config explain [^`]+)` prints:", PAGE, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    assert capsys.readouterr().out == table


@pytest.mark.parametrize(
    "call",
    [explain, DeepSpeedEngine.save_checkpoint, DeepSpeedEngine.load_checkpoint, DeepSpeedEngine.save_16bit_model],
)
def test_examples_run(call, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = npuzero.initialize(model=build_seeded_model(make=DenseGPT), config=said).engine
    (code,) = re.findall(r"^Example::\n\n((?: {4}.*\n?|\n)+)", inspect.getdoc(call) or "", re.MULTILINE)
    exec(textwrap.dedent(code), {"engine": engine})
    if call is explain:
        assert "gradient_cliping refused Did you mean 'gradient_clipping'?" in capsys.readouterr().out
