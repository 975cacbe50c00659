"""``npuzero config``: explain the translation of another engine's configuration, key by key."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from npuzero.cli.arguments import parse_number
from npuzero.cli.output.table import format_table
from npuzero.errors import ConfigError, did_you_mean

#: By file ending: the engine, and the module that explains its configuration.
DOORS = {
    ".json": ("DeepSpeed", "npuzero.compat.deepspeed"),
    ".py": ("InternEvo", "npuzero.compat.internevo"),
}
_WORDS_WIDTH = 78

_EPILOG = """\
examples:
  npuzero config explain ds_config.json
  npuzero config explain ds_config.json --world 8 --auto optimizer.params.lr=1e-4 bf16.enabled=true
  npuzero config explain 7B_sft.py --world 64
  npuzero config keys .json

honoured: npuzero has the same, and the value goes there; translated: it becomes another, or goes elsewhere; noted:
nothing follows from it, and the words say why that is well; refused: what it asks for is not there, and the words say
what to do. A value (absent) is a default of the other engine's."""


def add_config_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "config",
        help="what becomes of each key of a DeepSpeed or InternEvo configuration",
        description="What becomes of each key of another engine's configuration.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    one = actions.add_parser("explain", help="of one file: each key, what becomes of it, and where it goes")
    one.add_argument("file", type=Path, metavar="FILE", help=f"a configuration: {_format_file_endings()}")
    one.add_argument(
        "--world",
        type=parse_number,
        metavar="N",
        help="ranks (of DeepSpeed those with data of their own), for what depends on them",
    )
    one.add_argument("--auto", nargs="+", default=[], metavar="KEY=VALUE", help='values for keys that say "auto"')
    one.add_argument("--json", action="store_true", help="print the entries as JSON")
    one.set_defaults(run=run_config)
    keys = actions.add_parser("keys", help="all keys that are known, and what becomes of them")
    keys.add_argument("ending", choices=DOORS, metavar="ENDING", help=f"of its files: {_format_file_endings()}")
    keys.set_defaults(run=render_all_keys)


def run_config(options: argparse.Namespace) -> str:
    """Return the command's output.

    Raises:
        ConfigError: the kind of file is unknown, or a value of --auto is not key=value.
    """
    suffix = options.file.suffix
    if suffix not in DOORS:
        raise ConfigError(
            f"file {options.file}",
            expected=f"a name that ends in {_format_file_endings()}",
            got=repr(suffix),
            do=did_you_mean(suffix, DOORS, "Rename the file by what it is."),
        )
    door = import_module(DOORS[suffix][1])
    found = door.explain(options.file, world=options.world, auto=dict(map(_parse_assignment, options.auto)))
    if options.json:
        facts = [dict(zip(("key", "value", "decision", "goes to", "words"), row, strict=True)) for row in found.rows()]
        return json.dumps({"entries": facts, "traps": dict(found.traps())}, indent=2)
    return render_translation(found)


def render_all_keys(options: argparse.Namespace) -> str:
    """Return the table of all known keys."""
    rules = import_module(DOORS[options.ending][1]).RULES
    rows = [(rule.path, rule.decision.value, rule.words) for rule in sorted(rules, key=lambda rule: rule.path)]
    return _wrapped_table(("key", "decision", "words"), rows)


def render_translation(found: Any) -> str:
    """Return the table of a translation, its traps, and the number of keys per decision."""
    rows = [(path, value, decision, goes, words) for path, value, decision, goes, words in found.rows()]
    sections = [_wrapped_table(("key", "value", "decision", "goes to", "words"), rows)]
    traps = [textwrap.fill(f"{path}: {trap}", 118, subsequent_indent="    ") for path, trap in found.traps()]
    if traps:
        sections.append("\n".join(["Traps", *(f"  {trap}" for trap in traps)]))
    counts: dict[str, int] = {}
    for _, _, decision, _, _ in rows:
        counts[decision] = counts.get(decision, 0) + 1
    sections.append(", ".join(f"{count} {decision}" for decision, count in sorted(counts.items())))
    return "\n\n".join(sections)


def _wrapped_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format rows of text with the last column wrapped."""
    lines: list[Sequence[str]] = []
    for *cells, words in rows:
        first, *rest = textwrap.wrap(words, _WORDS_WIDTH) or [""]
        lines.append([*cells, first])
        lines += [[*("" for _ in cells), line] for line in rest]
    return format_table(header, lines, left=len(header))


def _parse_assignment(text: str) -> tuple[str, Any]:
    """Parse ``key=value``; the value is JSON, or text if it does not parse."""
    key, _, value = text.partition("=")
    if not key or not value:
        raise ConfigError("--auto", expected="KEY=VALUE", got=repr(text), do="Say e.g. optimizer.params.lr=1e-4.")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _format_file_endings() -> str:
    return ", ".join(f"{ending} ({engine})" for ending, (engine, _) in DOORS.items())
