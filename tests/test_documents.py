"""The code that README and docs show runs; README names every public name; the table of decisions lists them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import documents
import npuzero
from documents import PAGES, ROOT
from examples.pages import run_program_text, run_script
from npuzero.cli import main

README = (ROOT / "README.md").read_text("utf-8")
FIRST = next(block.code for block in documents.find_page_blocks("README.md"))
COMMANDS = {
    command: page
    for page in ("README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")))
    for command in re.findall(r"^npuzero plan --parameters.*$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
}


def test_the_first_program_is_twelve_lines():
    assert len([line for line in FIRST.splitlines() if line.strip()]) == 12


@pytest.mark.world
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_first_program_prints_rank_world_and_a_falling_loss(ranks, tmp_path):
    printed = run_program_text(FIRST, ranks, tmp_path)
    for rank in range(ranks):
        found = re.findall(rf"rank {rank} of {ranks}, step +(\d+): loss ([\d.]+)", printed)
        losses = [float(loss) for _, loss in found]
        assert [int(step) for step, _ in found] == list(range(30))
        assert losses[29] < losses[15] < losses[5] < losses[0] and losses[29] < 0.5 * losses[0]


@pytest.mark.world
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_programs_of_all_pages_run(ranks, tmp_path):
    pytest.importorskip("transformers")
    printed = run_script(Path(documents.__file__), ranks, tmp_path)
    assert [page for page in PAGES if printed.count(f"--- {page}\n") != ranks] == []


def test_pages_say_who_runs_what_is_not_run_there():
    found = [(page, block) for page in PAGES for block in documents.find_page_blocks(page)]
    assert sum(block.code.count("\n") for _, block in found if not block.mark) > 100
    for page, block in found:
        _, runs, path = block.mark.partition("run by ")
        assert not runs or (ROOT / path).is_file(), f"{page}, line {block.line}: there is no {path}"
    for page in PAGES:
        shown = (ROOT / page).read_text("utf-8").count("```python")
        hidden = (ROOT / page).read_text("utf-8").count("<!-- python\n")
        assert len(documents.find_page_blocks(page)) == shown + hidden, (
            f"{page}: a block is in no form that would be run"
        )


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(command.partition("#")[0].split()[1:]) == 0
    assert "zero3" in capsys.readouterr().out


def test_readme_has_a_line_for_every_public_name():
    table = README[README.index("## API") :]
    missing = [name for name in npuzero.__all__ if not re.search(rf"\b{name}\b", table)]
    assert missing == []


def test_links_lead_somewhere():
    """Check that links lead to existing files, and to headings as GitHub writes them."""
    for page in ("README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))):
        path = ROOT / page
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", path.read_text("utf-8")):
            file, _, heading = target.partition("#")
            there = (path.parent / file).resolve() if file else path
            assert there.exists(), f"{page}: there is no {target}"
            if heading:
                titles = re.findall(r"^#+ (.+)$", there.read_text("utf-8"), re.MULTILINE)
                anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
                assert heading in anchors, f"{page}: {file} has no heading #{heading}"


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
