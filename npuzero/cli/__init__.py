"""The command line: ``npuzero`` and its commands. The only part, with ``__main__``, that prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from npuzero.cli import bench, build_npu, check, config, export, info, plan
from npuzero.errors import NpuZeroError

EXIT_ERROR = 2  # argparse's own


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status. A known error is one line on stderr, not a traceback."""
    options = build_parser().parse_args(arguments)
    try:
        text = options.run(options)
    except NpuZeroError as error:
        print(f"npuzero: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_ERROR
    try:
        if text:
            print(text, flush=True)
    except BrokenPipeError:  # `npuzero info | head`
        sys.stderr.close()
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the options of every command."""
    parser = argparse.ArgumentParser(prog="npuzero", description="A ZeRO training engine for Ascend NPU, CUDA and CPU.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (info, plan, config, export, bench, check, build_npu):
        command.add_parser(commands)
    return parser
