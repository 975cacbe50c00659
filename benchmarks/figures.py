"""The table of figures: what is claimed, its goal, and what the records say. From the repository's root, or installed:

    python -m benchmarks.figures runs/bench                     # prints the table, draws runs/bench/figures.png
    python -m benchmarks.figures benchmarks/results --readme    # and puts table and picture into README.md and docs/

A figure is a ratio within a round, at the median over the rounds. Where it covers several benchmarks, their range is
shown, and the worst of them is held against the goal. Figures whose benchmarks are not among the records are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from npuzero.bench import Record, Result
from npuzero.cli.table import table
from npuzero.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "figures.png"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"

Results = Mapping[str, Result]

_OWN, _FLATS, _IN_PLACE = "npuzero", "npuzero, in flats", "npuzero, read in place"
_COMPUTE = "compute only"
_DEEPSPEED_ADAM, _DEEPSPEED_SHM = "DeepSpeed CPU Adam's passes", "DeepSpeed shared memory"
_HOW = {_OWN: "", _IN_PLACE: ", read in place"}
_LARGE_KIB = (16384, 32768, 65536)
_CUT_LESS, _CUT_MORE = ("zero0", "zero1", "zero2"), ("zero3", "zero3-keep")


@dataclass(frozen=True)
class Figure:
    """One row of the table.

    Attributes:
        group: rows of one group stand together, and are drawn in one panel.
        name: what is measured.
        against: what it is measured against.
        goal: the least value, or where ``at_most`` the greatest.
        benchmarks: whose results hold it.
        values: of such a result; those there are.
        presets: of a training step, those it is about.
    """

    group: str
    name: str
    against: str
    goal: float
    benchmarks: tuple[str, ...]
    values: Callable[[Result], list[float]]
    at_most: bool = False
    presets: tuple[str, ...] = ()

    def measured(self, results: Results) -> list[float]:
        """What the results say, in order; nothing where they do not have it."""
        return [value for name in self.benchmarks if name in results for value in self.values(results[name])]

    def meets(self, values: Sequence[float]) -> bool:
        """Whether the worst of ``values``, as they are shown, reaches the goal."""
        worst = round(max(values), 2) if self.at_most else round(min(values), 2)
        return worst <= self.goal if self.at_most else worst >= self.goal


def _faster(contender: str, against: str | None = None) -> Callable[[Result], list[float]]:
    needed = {contender, against or contender}
    return lambda result: [result.speedup(contender, against).median] if needed <= result.seconds.keys() else []


def _share(probe: str) -> Callable[[Result], list[float]]:
    return lambda result: [result.share(_OWN, probe).median]


def _longer(*presets: str, baseline: str = _COMPUTE) -> Callable[[Result], list[float]]:
    names = [f"npuzero {preset}" for preset in presets]
    return lambda result: [result.slowdown(name, baseline).median for name in names if name in result.seconds]


def _beyond_plan(*presets: str) -> Callable[[Result], list[float]]:
    names = [f"npuzero {preset}" for preset in presets]
    return lambda result: [result.values[name]["beyond_plan"] for name in names if name in result.values]


def _host(result: Result) -> list[float]:
    allowed_s = 1e-3 + 50e-6 * int(result.parameters["units"])
    return [values["more_s"] / allowed_s for name, values in result.values.items() if name != result.baseline]


def _op(name: str, against: str, goal: float, benchmark: str, contender: str = _OWN) -> Figure:
    return Figure("ops", name, against, goal, (benchmark,), _faster(contender))


def _share_of(name: str, probe: str, benchmark: str) -> Figure:
    return Figure("share", name, f"{probe} bandwidth", 0.9, (benchmark,), _share(probe))


def _collective(verb: str, ranks: int, goal: float, contender: str) -> Figure:
    benchmarks = tuple(f"{verb}/fp32/{kib}/{ranks}" for kib in _LARGE_KIB)
    name = f"{verb}, {ranks} ranks{_HOW[contender]}"
    return Figure("comm", name, "gloo", goal, benchmarks, _faster(contender))


def _all_reduce_beside_deepspeed(contender: str) -> Figure:
    benchmarks = tuple(f"deepspeed/all_reduce/fp32/{kib}/2" for kib in _LARGE_KIB)
    name = f"all_reduce beside DeepSpeed's, 2 ranks{_HOW[contender]}"
    return Figure("comm", name, _DEEPSPEED_SHM, 2.5, benchmarks, _faster(contender, _DEEPSPEED_SHM))


def _update(dtype: str, contender: str) -> Figure:
    name = f"gradients to new parameters, {dtype}, 2 ranks{_HOW[contender]}"
    return Figure("comm", name, "gloo + torch fused", 9.0, (f"update/{dtype}/65536/2",), _faster(contender))


def _step(name: str, benchmark: str, goal: float, presets: tuple[str, ...], baseline: str = _COMPUTE) -> Figure:
    values = _longer(*presets, baseline=baseline)
    return Figure("step", name, baseline, goal, (benchmark,), values, at_most=True, presets=presets)


FIGURES = (
    _op("AdamW fp32, one flat tensor", "torch fused", 1.0, "flat_adam/flat"),
    _op("AdamW fp32, 400 tensors of a GPT", "torch fused", 1.2, "flat_adam/400"),
    _op("the same tensors in flats, as zero() lays them", "torch fused", 1.2, "flat_adam/400", _FLATS),
    _op("mixed step: bf16 gradients to bf16 parameters", "torch's passes", 2.0, "mixed_step"),
    Figure(
        "ops",
        "the mixed step beside DeepSpeed's",
        _DEEPSPEED_ADAM,
        2.0,
        ("deepspeed/mixed_step",),
        _faster(_OWN, _DEEPSPEED_ADAM),
    ),
    _op("pack 400 fp32 tensors to flat bf16, scaled", "loop of copy_ and mul_", 1.8, "pack"),
    _op("cast fp32 to bf16", "copy_", 1.2, "cast/nearest"),
    _share_of("AdamW, one flat tensor", "in place", "flat_adam/flat"),
    _share_of("pack", "copy", "pack"),
    _share_of("norm", "copy", "norm"),
    *(
        _collective(verb, ranks, goal, contender)
        for ranks, goals in {2: (15.0, 10.0, 8.0, 3.0), 4: (10.0, 7.0, 6.0, 2.5)}.items()
        for verb, goal in zip(("reduce_scatter", "all_gather", "all_reduce", "all_to_all"), goals, strict=True)
        for contender in (_OWN, _IN_PLACE)
    ),
    *(_all_reduce_beside_deepspeed(contender) for contender in (_OWN, _IN_PLACE)),
    *(_update(dtype, contender) for dtype in ("fp32", "bf16") for contender in (_OWN, _IN_PLACE)),
    _step("bf16, batch 4, stages 0–2", "step/bf16-batch4", 1.04, _CUT_LESS),
    _step("bf16, batch 4, stage 3", "step/bf16-batch4", 1.06, _CUT_MORE),
    _step("bf16, batch 1, stages 0–2", "step/bf16-batch1", 1.12, _CUT_LESS),
    _step("bf16, batch 1, stage 3", "step/bf16-batch1", 1.2, _CUT_MORE),
    _step("fp32, batch 4, all stages", "step/fp32-batch4", 1.02, (*_CUT_LESS, *_CUT_MORE), "independent ranks"),
    Figure(
        "step",
        "memory of that step beyond the plan",
        "the plan",
        0.05,
        ("step/fp32-batch4",),
        _beyond_plan(*_CUT_LESS, *_CUT_MORE),
        at_most=True,
    ),
    Figure(
        "step",
        "host's work beyond plain torch's, world of one, 9 and 33 units",
        "1 ms + 50 µs a unit",
        1.0,
        ("host/8", "host/32"),
        _host,
        at_most=True,
    ),
)

GROUPS = {
    "ops": "Ops: times as fast",
    "share": "Ops: share of memory's bandwidth",
    "comm": "Collectives, shared memory, 16–64 MiB: times as fast",
    "step": "A training step: times as long",
}


def read(folder: Path) -> tuple[list[Record], dict[str, Result]]:
    """The records in a folder, and all their results by name.

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


def shown(figure: Figure, values: Sequence[float]) -> str:
    """The values' range, and whether their worst reaches the goal."""
    ends = dict.fromkeys(f"{round(value, 2) + 0.0:.2f}" for value in (min(values), max(values)))
    return f"{'–'.join(ends)} {'✓' if figure.meets(values) else '✗'}"


def rows(results: Results) -> dict[str, list[list[str]]]:
    """By group: name, against, measured, goal."""
    found: dict[str, list[list[str]]] = {group: [] for group in GROUPS}
    for figure in FIGURES:
        if values := figure.measured(results):
            goal = f"{'≤' if figure.at_most else '≥'} {figure.goal:g}"
            found[figure.group].append([figure.name, figure.against, shown(figure, values), goal])
    return {group: lines for group, lines in found.items() if lines}


def text(results: Results) -> str:
    """For a terminal."""
    blocks = [table([GROUPS[group], "against", "measured", "goal"], lines) for group, lines in rows(results).items()]
    return "\n\n".join(blocks) or "no figures among these records"


def markdown(records: Sequence[Record], results: Results) -> str:
    """For README: a table a group, and what it was measured on."""
    blocks = []
    for group, lines in rows(results).items():
        header = [f"| {GROUPS[group]} | against | measured | goal |", "|---|---|---|---|"]
        blocks.append("\n".join([*header, *(f"| {' | '.join(line)} |" for line in lines)]))
    blocks += [beside(result) for name, result in sorted(results.items()) if name.startswith("peers/")]
    picture = f"![The figures, drawn]({PICTURE.relative_to(ROOT).as_posix()})"
    return "\n\n".join([*blocks, measured_on(records), picture])


def beside(result: Result) -> str:
    """A comparison with the peers as a table, the fastest first."""
    lines = [f"| {result.title} | time over {_COMPUTE} | memory, MB a rank |", "|---|---|---|"]
    for name in sorted(result.seconds, key=lambda name: result.slowdown(name).median):
        looked = result.values[name]
        held = (looked["peak_bytes"] - looked["base_bytes"]) / 1e6
        lines.append(f"| {name} | {result.slowdown(name).median:.2f} | {held:.0f} |")
    return "\n".join(lines)


def measured_on(records: Sequence[Record]) -> str:
    """Machine, software and dates, in a sentence."""
    machines = {(m["cpu"], m["cores"], m["isa"], m["torch"]) for m in (record.machine for record in records)}
    where = "; ".join(f"{cpu}, {cores} cores, {isa}, torch {torch}" for cpu, cores, isa, torch in sorted(machines))
    days = sorted({record.date[:10] for record in records})
    commits = sorted({record.machine["commit"] or "a release" for record in records})
    return f"Measured on {where}; {', '.join(days)}; commit {', '.join(commits)}."


def put(document: str, block: str) -> str:
    """``document`` with ``block`` between its markers."""
    before, _, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"README has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with records")
    parser.add_argument("--readme", action="store_true", help="write the table into README.md, the picture into docs/")
    options = parser.parse_args(arguments)
    records, results = read(options.folder)
    if options.readme and any(record.quick for record in records):
        raise SystemExit("figures: README takes none of a quick run; measure without --quick")
    from benchmarks.plot import plot  # matplotlib is needed for the picture alone

    plot(results, PICTURE if options.readme else options.folder / "figures.png")
    if options.readme:
        README.write_text(put(README.read_text("utf-8"), markdown(records, results)), "utf-8")
    print(text(results) + "\n(a quick run: these mean nothing)" * any(record.quick for record in records))


if __name__ == "__main__":
    main()
