"""Run the Python of README and docs as it stands there: by `python documents.py`, or by torchrun on several ranks.

A page is one program: its blocks run in order, in one namespace and a separate folder; all pages share one world.
Hidden comments mark the exceptions:

    <!-- python                     what the page's reader has already: it runs in its place
    model = torch.nn.Linear(2, 2)
    -->
    <!-- not run here: why -->      the next block does not run
    <!-- run by tests/x.py -->      some other test runs it
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Pages with Python in them.
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in (
        *sorted(ROOT.glob("*.md")),
        *sorted(ROOT.glob("docs/*.md")),
        *sorted(ROOT.glob("examples/*/README.md")),
    )
    if "```python" in path.read_text("utf-8")
)

_MARK = r"(?:<!-- (?P<mark>(?:not run here: |run by )[^\n]+) -->\n+)?"
_BLOCK = re.compile(
    rf"^<!-- python\n(?P<hidden>.*?)^-->|^{_MARK}^```python\n(?P<shown>.*?)^```", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class PageBlock:
    """Store one Python block of a page.

    Attributes:
        code: as it stands there.
        line: number of its first line on the page, from 1.
        mark: why it does not run here, or which file runs it; empty if it runs.
    """

    code: str
    line: int
    mark: str


def find_page_blocks(page: str) -> list[PageBlock]:
    """Return the blocks of a page in order, hidden ones included."""
    text = (ROOT / page).read_text("utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        group = "hidden" if match["hidden"] is not None else "shown"
        found.append(PageBlock(match[group], text.count("\n", 0, match.start(group)) + 1, match["mark"] or ""))
    return found


def run_page(page: str) -> None:
    """Run the page's program in the current folder; tracebacks show the page's lines."""
    namespace = {"__name__": "__main__"}
    for block in find_page_blocks(page):
        if not block.mark:
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(ROOT / page), "exec"), namespace)


def main() -> None:
    start = Path.cwd()
    for page in sys.argv[1:] or PAGES:
        print(f"--- {page}\n", end="", flush=True)  # one write: other ranks print as well
        folder = start / page.replace("/", "-")
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        run_page(page)


if __name__ == "__main__":
    main()
