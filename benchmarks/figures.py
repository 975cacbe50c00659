"""The tables of figures: what is claimed, its goal, and what the records say. From the repository's root, or installed:

    python -m benchmarks.figures runs/bench                     # prints the tables, draws runs/bench/figures.png
    python -m benchmarks.figures benchmarks/results --readme    # and puts them into README.md and docs/

README has five of them and the picture, docs/benchmarks.md has all.

A figure is a ratio within a round, at the median over the rounds. Where it covers several benchmarks, their range is
shown, and the worst of them is held against the goal. Figures whose benchmarks are not among the records are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from npuzero.bench import Record, Result, median
from npuzero.cli.table import table
from npuzero.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
README, PAGE, PICTURE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "figures.png"
DISK_PICTURE = ROOT / "docs" / "nvme.png"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"

Results = Mapping[str, Result]

_OWN, _FLATS, _IN_PLACE = "npuzero", "npuzero, in flats", "npuzero, read in place"
_COMPUTE = "compute only"
_DEEPSPEED_ADAM, _DEEPSPEED_SHM = "DeepSpeed CPU Adam's passes", "DeepSpeed shared memory"
_DEEPSPEED_NVME, _UNVERIFIED, _EARLY = "DeepSpeed, stage 3, NVMe", "npuzero, without verify", "npuzero, early"
_TENSOR = "a step over 2 tensor ranks"
_SHARED, _OF_EACH = "isp, sequences of 4,096 tokens that 2 ranks share", "zero3, a sequence of 2,048 for each"
_HOW = {_OWN: "", _IN_PLACE: ", read in place"}
_LARGE_KIB = (16384, 32768, 65536)
_CUT_LESS, _CUT_MORE = ("zero0", "zero1", "zero2"), ("zero3", "zero3-keep")


#: Contenders by the names that their own users know.
_CALLED = {
    "ddp": "DDP",
    "ddp-autocast": "DDP under autocast",
    "ddp-shm": 'DDP on the backend "shm"',
    "fsdp2": "FSDP2",
    "fsdp2-keep": "FSDP2, reshard_after_forward=False",
    "fsdp2-shm": 'FSDP2 on the backend "shm"',
    "zero-redundancy": "ZeroRedundancyOptimizer",
    "torch passes": "torch's passes",
    "deepspeed-1": "DeepSpeed, stage 1",
    "deepspeed-2": "DeepSpeed, stage 2",
    "deepspeed-3": "DeepSpeed, stage 3",
}


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


def costs(result: Result) -> dict[str, float]:
    """Return what contenders add to the seconds of the baseline, which computes and updates nothing."""
    base = result.seconds[result.baseline]
    return {
        name: median([one - other for one, other in zip(seconds, base, strict=True)])
        for name, seconds in result.seconds.items()
        if name != result.baseline
    }


def exact(result: Result) -> str:
    """Return the contender with the fewest bytes of float32 masters and moments: split masters, where there are any."""
    return "npuzero-split" if result.parameters["precision"] == "bf16" else "npuzero"


def _on_disk(storage: str, against: str, goal: float, precisions: Sequence[str], *others: str) -> list[Figure]:
    """Two rows beside the quickest of ``others``: what states add to a step, and updates to the end of their writes.

    Args:
        storage: as in the contender's name; empty: float32 states, whichever way npuzero has to keep them exactly.
    """

    def added(result: Result) -> list[float]:
        found = costs(result)
        own = f"npuzero{storage}" if storage else exact(result)
        there = [found[name] / found[own] for name in others if name in found and own in found]
        return [min(there)] if there else []

    def alone(result: Result) -> list[float]:
        own = f"npuzero{storage}-blocking" if storage else f"{exact(result)}-blocking"
        there = [name for name in others if name in result.seconds and own in result.seconds]
        return [min(result.speedup(own, name).median for name in there)] if there else []

    kind = "bf16-8bit states" if storage else "float32 states"
    rows = {"step": (f"what {kind} add to a step", added), "update": (f"an update alone of {kind}", alone)}
    return [
        Figure("disk", name, against, goal, tuple(f"nvme/{what}-{each}-1" for each in precisions), values)
        for what, (name, values) in rows.items()
    ]


def _far(name: str, against: str, goal: float, benchmark: str, contender: str) -> Figure:
    """A row of steps that keep something off the device."""

    def values(result: Result) -> list[float]:
        return [result.slowdown(contender).median] if contender in result.seconds else []

    return Figure("far", name, against, goal, (benchmark,), values, at_most=True)


def _axes(name: str, against: str, goal: float, benchmarks: Sequence[str], value: Callable[[Result], float]) -> Figure:
    """A row of tensor and sequence ranks."""
    return Figure("axes", name, against, goal, tuple(benchmarks), lambda result: [value(result)], at_most=True)


def _pair(name: str, mode: str) -> Figure:
    def value(result: Result) -> float:
        return float(result.values[mode]["pair_s"]) / 15e-6

    return _axes(f"host's work of {name}, forward and backward", "15 µs a pair", 1.0, [f"host_axes/{mode}"], value)


def _over_tensor_ranks(other: str, backend: str) -> list[Figure]:
    def held(result: Result) -> float:
        return float(result.values[_OWN]["held_bytes"] / result.values[other]["held_bytes"])

    against = f"parallelize_module and FSDP2, {backend}"
    names = [f"tensor/{precision}-{ranks}" for ranks in (2, 4) for precision in ("fp32", "bf16")]
    timed = _axes(_TENSOR, against, 0.8, names, lambda result: result.slowdown(_OWN, other).median)
    return [timed, _axes("memory of that step", against, 1.0, names, held)]


def _op(
    name: str, against: str, goal: float, benchmark: str, contender: str = _OWN, baseline: str | None = None
) -> Figure:
    return Figure("ops", name, against, goal, (benchmark,), _faster(contender, baseline))


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
    _op("the mixed step beside DeepSpeed's", _DEEPSPEED_ADAM, 2.0, "deepspeed/mixed_step", baseline=_DEEPSPEED_ADAM),
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
    *_on_disk("", _DEEPSPEED_NVME, 2.0, ("bf16", "fp32"), "deepspeed"),
    *_on_disk("-8bit", _DEEPSPEED_NVME, 5.0, ("bf16",), "deepspeed"),
    *_on_disk("", "torch fused, memory-mapped", 3.0, ("bf16", "fp32"), "mapped", "mapped-dropped"),
    Figure("disk", "chunks that stream", "raw reads and writes", 0.85, ("disk/stream",), _share("raw")),
    Figure(
        "disk",
        "the same without checksums",
        "raw reads and writes",
        0.9,
        ("disk/stream",),
        lambda result: [result.share(_UNVERIFIED, "raw").median],
    ),
    _far("states on NVMe, forward as long as the update", "resident", 1.1, "farstep/forward", _OWN),
    _far("states on NVMe, forward and backward as long", "resident", 1.1, "farstep/whole", _OWN),
    _far("the same, `AdamW(early=True)`", "resident", 1.05, "farstep/whole", _EARLY),
    _far("checkpointed activations on the host", "on the device", 1.05, "activations", "host"),
    _far("checkpointed activations on NVMe", "on the device", 1.05, "activations", "nvme"),
    Figure(
        "far",
        "memory of a process beyond its imports and the plan, states on NVMe",
        "imports and plan",
        0.05,
        ("highwater",),
        lambda result: [result.values[_OWN]["beyond_plan"]],
        at_most=True,
    ),
    _pair("copy before and total behind cut Linears", "mtp"),
    _pair("gather before and scatter behind them", "msp"),
    *_over_tensor_ranks("torch", "gloo"),
    *_over_tensor_ranks('torch on "shm"', 'the backend "shm"'),
    _axes(_SHARED, _OF_EACH, 1.1, ["sequence"], lambda result: result.slowdown("isp").median),
)

GROUPS = {
    "ops": "Ops: times as fast",
    "share": "Ops: share of memory's bandwidth",
    "comm": "Collectives, shared memory, 16–64 MiB: times as fast",
    "step": "A training step: times as long",
    "disk": "States on a disk: times as fast",
    "far": "A step that keeps something off the device: times as long",
    "axes": "Tensor and sequence ranks: times as long, or as much",
}


def _time(over: str) -> Callable[[Result, str], str]:
    return lambda result, contender: f"{result.slowdown(contender, over).median:.2f}"


def _held_mb(result: Result, contender: str) -> float:
    looked = result.values[contender]
    return (looked["peak_bytes"] - looked["base_bytes"]) / 1e6


@dataclass(frozen=True)
class Headline:
    """One row of README's table.

    Attributes:
        what: is measured.
        benchmark: whose result holds it.
        own: the contender that is npuzero.
        others: those it is held against; those there are.
        value: of a contender, as it is shown.
    """

    what: str
    benchmark: str
    own: str
    others: tuple[str, ...]
    value: Callable[[Result, str], str]

    def line(self, result: Result) -> list[str]:
        """Return the row's cells."""
        others = [f"{called(name)}: {self.value(result, name)}" for name in self.others if name in result.seconds]
        return [self.what, self.value(result, self.own), "; ".join(others)]


_STAGE_3, _STAGE_3_PEERS = "npuzero zero3", ("fsdp2", "deepspeed-3")
HEADLINES = (
    Headline(
        "a training step of `zero3`, bf16, batch 4 a rank: time over computing alone",
        "peers/bf16-batch4",
        _STAGE_3,
        _STAGE_3_PEERS,
        _time(_COMPUTE),
    ),
    Headline("the same, batch 1 a rank", "peers/bf16-batch1", _STAGE_3, _STAGE_3_PEERS, _time(_COMPUTE)),
    Headline(
        "memory of that step, batch 4: MB a rank",
        "peers/bf16-batch4",
        _STAGE_3,
        _STAGE_3_PEERS,
        lambda result, contender: f"{_held_mb(result, contender):.0f}",
    ),
    Headline("AdamW on bf16 parameters: time over npuzero's", "mixed_step", _OWN, ("torch passes",), _time(_OWN)),
    Headline(
        "reduce_scatter of 64 MiB: time over npuzero's",
        "reduce_scatter/fp32/65536/2",
        _IN_PLACE,
        ("gloo",),
        _time(_IN_PLACE),
    ),
)


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


def called(contender: str) -> str:
    """Return what a reader calls a contender, and could type: a preset, and where it is not bf16 the precision."""
    preset, split, _ = contender.partition("-split")
    return f"{preset}, bf16-split" if split else _CALLED.get(contender, contender)


def headlines(records: Sequence[Record], results: Results) -> str:
    """Return what README has: the figures that matter most, and the picture."""
    lines = [headline.line(results[headline.benchmark]) for headline in HEADLINES if headline.benchmark in results]
    names = {headline.benchmark for headline in HEADLINES}
    picture = f"![The figures, drawn]({PICTURE.relative_to(ROOT).as_posix()})"
    tabled = tabular(["2 CPU ranks", "npuzero", "others"], lines)
    return "\n\n".join([tabled, measured_on(records, names), picture])


def markdown(records: Sequence[Record], results: Results) -> str:
    """Return what docs/benchmarks.md has: a table a group, each with what it was measured on."""
    blocks = []
    for group, lines in rows(results).items():
        blocks.append(tabular([GROUPS[group], "against", "measured", "goal"], lines))
        blocks.append(measured_on(records, names_of(group)))
        if group == "disk" and any(name.startswith("nvme/") for name in results):
            blocks.append(f"![Updates and memory with states on a disk, drawn]({DISK_PICTURE.name})")
    for name, result in sorted(results.items()):
        if name.startswith("peers/"):
            blocks += [beside(result), measured_on(records, {name})]
    return "\n\n".join(blocks)


def names_of(group: str) -> set[str]:
    """Return the benchmarks that a group's table is about."""
    return {name for figure in FIGURES if figure.group == group for name in figure.benchmarks}


def beside(result: Result) -> str:
    """Return a comparison with the peers as a table, the fastest first."""
    lines = [
        [called(name), f"{result.slowdown(name).median:.2f}", f"{_held_mb(result, name):.0f}"]
        for name in sorted(result.seconds, key=lambda name: result.slowdown(name).median)
    ]
    return tabular([result.title, f"time over {_COMPUTE}", "memory, MB a rank"], lines)


def tabular(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in markdown."""
    return "\n".join(f"| {' | '.join(line)} |" if line else "|---" * len(header) + "|" for line in (header, [], *lines))


def measured_on(records: Sequence[Record], names: set[str]) -> str:
    """Return machine, software, dates and commits of the records that hold one of the benchmarks, in a sentence."""
    held = [record for record in records if any(result.name in names for result in record.results)]
    machines = {(m["cpu"], m["cores"], m["isa"], m["torch"]) for m in (record.machine for record in held)}
    where = "; ".join(f"{cpu}, {cores} cores, {isa}, torch {torch}" for cpu, cores, isa, torch in sorted(machines))
    days = sorted({record.date[:10] for record in held})
    return f"Measured on {where}; {', '.join(days)}; commit {', '.join(commits(held))}."


def commits(records: Sequence[Record]) -> list[str]:
    """Return the commits that records were taken at, with a + where sources had changed since."""
    return sorted({record.machine["commit"] or "a release" for record in records})


def put(document: str, block: str) -> str:
    """``document`` with ``block`` between its markers."""
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
    records, results = read(options.folder)
    if options.readme and any(record.quick for record in records):
        raise SystemExit("figures: README takes none of a quick run; measure without --quick")
    from benchmarks.plot import plot, tiers  # matplotlib is needed for the pictures alone

    plot(results, PICTURE if options.readme else options.folder / "figures.png", measured_on(records, set(results)))
    far = {name: result for name, result in results.items() if name.startswith("nvme/") or name == "highwater"}
    if far:
        picture = DISK_PICTURE if options.readme else options.folder / DISK_PICTURE.name
        tiers.plot(far, picture, measured_on(records, set(far)))
    if options.readme:
        for document, block in ((README, headlines(records, results)), (PAGE, markdown(records, results))):
            document.write_text(put(document.read_text("utf-8"), block), "utf-8")
    print(text(results) + "\n(a quick run: these mean nothing)" * any(record.quick for record in records))


if __name__ == "__main__":
    main()
