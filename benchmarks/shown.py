"""Update the outputs of commands and programs shown in pages. From the repository's root:

    python -m benchmarks.shown docs/parallelism.md docs/planner.md      # rewrites the pages

A ``text`` block directly after an ``sh`` or ``python`` block shows its output. Commands are npuzero's, one per line,
optionally followed by ``| grep -E 'PATTERN'``, which keeps matching lines; a Python block is a separate program.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from npuzero.cli import main as npuzero

_SHOWN = re.compile(r"^```(sh|python)\n((?:(?!```).)*)^```\n\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PIPE = re.compile(r"(?P<command>npuzero .*?)(?: \| grep -E '(?P<pattern>[^']*)')?")


def rewrite_page(page: str) -> str:
    """Return a page with the current outputs of its commands and programs.

    Raises:
        ValueError: a line is not such a command, or a command failed.
    """

    def put(found: re.Match[str]) -> str:
        kind, code = found[1], found[2]
        namespace: dict[str, Any] = {"__name__": "__main__"}
        printed = (
            _capture_stdout(lambda: exec(code, namespace))
            if kind == "python"
            else "".join(map(_run_shown_command, _command_lines(code)))
        )
        return f"```{kind}\n{code}```\n\n```text\n{printed}```"

    return _SHOWN.sub(put, page)


def page_outputs(page: str) -> str:
    """Return all outputs shown in a page."""
    return "".join(found[3] for found in _SHOWN.finditer(page))


def _command_lines(code: str) -> list[str]:
    """Return the commands of a block, with backslash continuations joined."""
    return [line for line in code.replace("\\\n", " ").splitlines() if line.strip()]


def _run_shown_command(line: str) -> str:
    """Return the output of a command, filtered by its pattern."""
    found = _PIPE.fullmatch(re.sub(r"\s+", " ", line.strip()))
    if found is None:
        raise ValueError(f"no command of npuzero's: {line}")

    def call() -> None:
        if npuzero(shlex.split(found["command"])[1:]):
            raise ValueError(f"it failed: {line}")

    lines = _capture_stdout(call).splitlines(keepends=True)
    return "".join(each for each in lines if found["pattern"] is None or re.search(found["pattern"], each))


def _capture_stdout(call: Callable[[], object]) -> str:
    told = io.StringIO()
    with redirect_stdout(told):
        call()
    return "\n".join(line.rstrip() for line in told.getvalue().strip("\n").splitlines()) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="+")
    for path in parser.parse_args(arguments).pages:
        path.write_text(rewrite_page(path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
