"""The tables of figures: the claim, its goal, and the records' result. From the repository's root, or installed:

    python -m benchmarks.figures runs/bench                     # prints the tables, draws runs/bench/figures.png
    python -m benchmarks.figures benchmarks/results --readme    # and puts them into README.md and docs/

README contains five of them and the picture, docs/benchmarks.md all.

benchmarks.goals defines the figures; figures without records are omitted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import plot, tiers
from benchmarks.contenders import contender_label, describe_records
from benchmarks.goals import COMPUTE, FIGURES, GROUPS, IN_PLACE, OWN, GoalFigure, Results
from npuzero.bench import Record, Result
from npuzero.cli.output.table import format_table
from npuzero.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
README, PAGE, PICTURE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "figures.png"
DISK_PICTURE = ROOT / "docs" / "nvme.png"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def _time_formatter(over: str) -> Callable[[Result, str], str]:
    return lambda result, contender: f"{result.slowdown(contender, over).median:.2f}"


def _format_held_mb(result: Result, contender: str) -> float:
    looked = result.values[contender]
    return (looked["peak_bytes"] - looked["base_bytes"]) / 1e6


@dataclass(frozen=True)
class HeadlineRow:
    """One row of README's table.

    Attributes:
        what: description of the measurement.
        benchmark: name of the benchmark.
        own: npuzero's contender.
        others: competing contenders; missing ones are omitted.
        value: formats the value of a contender.
    """

    what: str
    benchmark: str
    own: str
    others: tuple[str, ...]
    value: Callable[[Result, str], str]

    def line(self, result: Result) -> list[str]:
        """Return the row's cells."""
        others = [
            f"{contender_label(name)}: {self.value(result, name)}" for name in self.others if name in result.seconds
        ]
        return [self.what, self.value(result, self.own), "; ".join(others)]


_STAGE_3, _STAGE_3_PEERS = "npuzero zero3", ("fsdp2", "deepspeed-3")
HEADLINES = (
    HeadlineRow(
        "a training step of `zero3`, bf16, batch 4 a rank: time over computing alone",
        "peers/bf16-batch4",
        _STAGE_3,
        _STAGE_3_PEERS,
        _time_formatter(COMPUTE),
    ),
    HeadlineRow("the same, batch 1 a rank", "peers/bf16-batch1", _STAGE_3, _STAGE_3_PEERS, _time_formatter(COMPUTE)),
    HeadlineRow(
        "memory of that step, batch 4: MB a rank",
        "peers/bf16-batch4",
        _STAGE_3,
        _STAGE_3_PEERS,
        lambda result, contender: f"{_format_held_mb(result, contender):.0f}",
    ),
    HeadlineRow(
        "AdamW on bf16 parameters: time over npuzero's", "mixed_step", OWN, ("torch passes",), _time_formatter(OWN)
    ),
    HeadlineRow(
        "reduce_scatter of 64 MiB: time over npuzero's",
        "reduce_scatter/fp32/65536/2",
        IN_PLACE,
        ("gloo",),
        _time_formatter(IN_PLACE),
    ),
)


def read_records(folder: Path) -> tuple[list[Record], dict[str, Result]]:
    """Return the records in a folder, and all their results by name.

    Raises:
        ConfigError: two of them hold the same benchmark.
    """
    records = [Record.read(path) for path in sorted(folder.glob("*.json"))]
    results: dict[str, Result] = {}
    for record in records:
        for result in record.results:
            if result.name in results:
                raise ConfigError(
                    f"records in {folder.name}", expected="one of each benchmark", got=f"{result.name} twice",
                    do="Remove the older record.",
                )  # fmt: skip
            results[result.name] = result
    return records, results


def format_range(figure: GoalFigure, values: Sequence[float]) -> str:
    """Return the range of the values, and whether the worst reaches the goal."""
    ends = dict.fromkeys(f"{round(value, 2) + 0.0:.2f}" for value in (min(values), max(values)))
    return f"{'–'.join(ends)} {'✓' if figure.meets(values) else '✗'}"


def figure_groups(results: Results) -> dict[str, list[list[str]]]:
    """Return name, against, measured and goal of each figure, by group."""
    found: dict[str, list[list[str]]] = {group: [] for group in GROUPS}
    for figure in FIGURES:
        if values := figure.measured(results):
            goal = f"{'≤' if figure.at_most else '≥'} {figure.goal:g}"
            found[figure.group].append([figure.name, figure.against, format_range(figure, values), goal])
    return {group: lines for group, lines in found.items() if lines}


def format_figures(results: Results) -> str:
    """Format the tables for a terminal."""
    blocks = [
        format_table([GROUPS[group], "against", "measured", "goal"], lines)
        for group, lines in figure_groups(results).items()
    ]
    return "\n\n".join(blocks) or "no figures among these records"


def headlines(records: Sequence[Record], results: Results) -> str:
    """Return README's part: the most important figures, and the picture."""
    lines = [headline.line(results[headline.benchmark]) for headline in HEADLINES if headline.benchmark in results]
    names = {headline.benchmark for headline in HEADLINES}
    picture = f"![The figures, drawn]({PICTURE.relative_to(ROOT).as_posix()})"
    tabled = markdown_table(["2 CPU ranks", "npuzero", "others"], lines)
    return "\n\n".join([tabled, describe_records(records, names), picture])


def markdown(records: Sequence[Record], results: Results) -> str:
    """Return the part of docs/benchmarks.md: a table per group, each with its machine."""
    blocks = []
    for group, lines in figure_groups(results).items():
        blocks.append(markdown_table([GROUPS[group], "against", "measured", "goal"], lines))
        blocks.append(describe_records(records, names_of(group)))
        if group == "disk" and any(name.startswith("nvme/") for name in results):
            blocks.append(f"![Updates and memory with states on a disk, drawn]({DISK_PICTURE.name})")
    for name, result in sorted(results.items()):
        if name.startswith("peers/"):
            blocks += [format_peers(result), describe_records(records, {name})]
    return "\n\n".join(blocks)


def names_of(group: str) -> set[str]:
    """Return the benchmarks in a group's table."""
    return {name for figure in FIGURES if figure.group == group for name in figure.benchmarks}


def format_peers(result: Result) -> str:
    """Return a comparison with the peers as a table, fastest first."""
    lines = [
        [contender_label(name), f"{result.slowdown(name).median:.2f}", f"{_format_held_mb(result, name):.0f}"]
        for name in sorted(result.seconds, key=lambda name: result.slowdown(name).median)
    ]
    return markdown_table([result.title, f"time over {COMPUTE}", "memory, MB a rank"], lines)


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in markdown."""
    return "\n".join(f"| {' | '.join(line)} |" if line else "|---" * len(header) + "|" for line in (header, [], *lines))


def replace_block(document: str, block: str) -> str:
    """Return ``document`` with ``block`` between its markers."""
    before, _, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the document has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with records")
    parser.add_argument("--readme", action="store_true", help="write them into README.md and docs/")
    options = parser.parse_args(arguments)
    records, results = read_records(options.folder)
    # README must only contain figures of full runs; a quick run may still be printed and drawn.
    if options.readme and any(record.quick for record in records):
        raise SystemExit("figures: README takes none of a quick run; measure without --quick")
    plot.plot_figures(
        results, PICTURE if options.readme else options.folder / "figures.png", describe_records(records, set(results))
    )
    far = {name: result for name, result in results.items() if name.startswith("nvme/") or name == "highwater"}
    if far:
        picture = DISK_PICTURE if options.readme else options.folder / DISK_PICTURE.name
        tiers.plot_tiers(far, picture, describe_records(records, set(far)))
    if options.readme:
        for document, block in ((README, headlines(records, results)), (PAGE, markdown(records, results))):
            document.write_text(replace_block(document.read_text("utf-8"), block), "utf-8")
    print(format_figures(results) + "\n(a quick run: these mean nothing)" * any(record.quick for record in records))


if __name__ == "__main__":
    main()
