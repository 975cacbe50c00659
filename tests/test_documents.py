"""What the README shows, runs; and the table of decisions has each of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from npuzero.cli import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_first_program_is_twelve_lines():
    assert len([line for line in PYTHON[0].splitlines() if line.strip()]) == 12


def test_its_programs_run_in_one_process(tmp_path):
    (tmp_path / "train.py").write_text("\n".join(PYTHON))
    run([sys.executable, "train.py"], tmp_path)


@pytest.mark.world
def test_the_first_program_runs_on_two_ranks(tmp_path):
    (tmp_path / "train.py").write_text(PYTHON[0])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run([*launcher, "--nproc-per-node", "2", "train.py"], tmp_path)


@pytest.mark.parametrize("command", re.findall(r"^npuzero plan --parameters.*$", README, re.MULTILINE))
def test_its_commands_run(command, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(command.split()[1:]) == 0
    assert "zero3" in capsys.readouterr().out


def test_the_table_of_decisions_says_what_the_records_say():
    folder = ROOT / "docs" / "decisions"
    rows = []
    for number, path in enumerate(sorted(folder.glob("[0-9]*.md")), 1):
        assert path.name.startswith(f"{number:04d}-"), f"{path.name} is record {number}: each has a number of its own"
        head = re.match(r"# (\d+)\. (.+)\n\nStatus: (accepted|superseded)(.*)\n\n(?=.)", path.read_text("utf-8"))
        assert head, f"{path.name} begins otherwise than CONTRIBUTING.md says"
        assert int(head[1]) == number, f"{path.name} has another number in its heading"
        rows.append(f"| [{number}]({path.name}) | {head[2]} | {head[3]}{head[4]} |")
    table = re.findall(r"^\| \[\d+\]\(.*$", (folder / "README.md").read_text("utf-8"), re.MULTILINE)
    assert table == rows
