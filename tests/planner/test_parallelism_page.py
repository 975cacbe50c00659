"""docs/parallelism.md and docs/planner.md: what they show as printed is what their commands and programs print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.shown import page_outputs, rewrite_page

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("parallelism.md", pytest.param("planner.md", marks=pytest.mark.slow))
ECHO = """\
```sh
npuzero plan --parameters 1B --world 2 | grep -E '^zero[01] '
```

```text
{}```

```sh
npuzero info
```

Text.

```python
raise SystemExit("not shown, and not run")
```

```python
print(6 * 7)
```

```text
{}```
"""


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_what_is_printed(page: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    assert rewrite_page(text) == text, f"run: python -m benchmarks.shown docs/{page}"
    assert text.count("```text") >= 3 and "```text\n```" not in text


@pytest.mark.parametrize("page", ["parallelism.md", "planner.md"])
def test_numbers_in_prose_are_printed_above(page: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    prose = re.sub(r"arXiv:[\d.]+|\]\([^)]*\)|`[^`]*`", "", prose)
    printed = page_outputs(text)
    assert [number for number in re.findall(r"\d+\.\d+", prose) if number not in printed] == []


def test_a_page_is_written_from_what_it_runs() -> None:
    page = rewrite_page(ECHO.format("", "41\n"))
    table, number = page_outputs(page).splitlines()[:-1], page_outputs(page).splitlines()[-1]
    assert number == "42"
    assert table and all(line.startswith(("zero0", "zero1")) for line in table)
    assert "GiB" in table[0] and page == rewrite_page(page)
    rest = ECHO.format("", "").split("```text")
    assert rest[1].removeprefix("\n```") in page  # blocks without an output are not run, nor touched


@pytest.mark.parametrize("command", ["rm -rf x", "npuzero plan --parameters 0", "npuzero plan | wc"])
def test_what_fails_or_is_no_command_is_an_error(command: str) -> None:
    with pytest.raises((ValueError, SystemExit)):
        rewrite_page(f"```sh\n{command}\n```\n\n```text\n```\n")
