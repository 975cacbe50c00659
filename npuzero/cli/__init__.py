"""The command line: ``npuzero`` and its commands. Only this part and ``__main__`` print.

``build_parser`` collects one parser per command (``add_..._parser``). ``main`` parses the arguments, runs the command
and prints the text that it returns; a known error becomes one line on stderr and exit status 2. ``output/`` draws
tables and pictures, ``plan_options/`` holds the options of ``npuzero plan`` by topic.

Read first: ``plan.py``, ``bench.py``, ``check.py``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from npuzero.cli.bench import add_bench_parser
from npuzero.cli.build_npu import add_build_npu_parser
from npuzero.cli.check import add_check_parser
from npuzero.cli.config import add_config_parser
from npuzero.cli.export import add_export_parser
from npuzero.cli.info import add_info_parser
from npuzero.cli.plan import add_plan_parser
from npuzero.errors import NpuZeroError

EXIT_ERROR = 2  # argparse's own


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. A known error prints one line on stderr, not a traceback."""
    options = build_parser().parse_args(arguments)
    try:
        text = options.run(options)
    except NpuZeroError as error:
        print(f"npuzero: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_ERROR
    try:
        if text:
            print(text, flush=True)
    except BrokenPipeError:  # for example `npuzero info | head`
        sys.stderr.close()
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all commands."""
    parser = argparse.ArgumentParser(prog="npuzero", description="A ZeRO training engine for Ascend NPU, CUDA and CPU.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add_parser in (
        add_info_parser,
        add_plan_parser,
        add_config_parser,
        add_export_parser,
        add_bench_parser,
        add_check_parser,
        add_build_npu_parser,
    ):
        add_parser(commands)
    return parser
