"""The figures: claims, their benchmarks and goals. benchmarks.figures makes tables of them.

A figure is the median over the rounds of a ratio within a round. For a figure over several benchmarks the range is
shown, and the worst value is compared with the goal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from npuzero.bench import Result, median

Results = Mapping[str, Result]
Value = Callable[[Result], float]

OWN, _FLATS, IN_PLACE = "npuzero", "npuzero, in flats", "npuzero, read in place"
COMPUTE = "compute only"
BUBBLE = "npuzero zero-bubble"
_DEEPSPEED_ADAM, _DEEPSPEED_SHM = "DeepSpeed CPU Adam's passes", "DeepSpeed shared memory"
_DEEPSPEED_NVME, _UNVERIFIED, _EARLY = "DeepSpeed, stage 3, NVMe", "npuzero, without verify", "npuzero, early"
_SHARED, _OF_EACH = "isp, sequences of 4,096 tokens that 2 ranks share", "zero3, a sequence of 2,048 for each"
_HOW = {OWN: "", IN_PLACE: ", read in place"}
_LARGE_KIB = (16384, 32768, 65536)
_CUT_LESS, _CUT_MORE = ("zero0", "zero1", "zero2"), ("zero3", "zero3-keep")


@dataclass(frozen=True)
class GoalFigure:
    """One row of the table.

    Attributes:
        group: rows of a group form one table and one panel.
        name: the measurement.
        against: the competitor.
        goal: the least value, or the greatest if ``at_most``.
        benchmarks: names of its benchmarks.
        values: extracts the available values from a result.
        presets: of a training step, the presets it covers.
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
        """Return the values in the results, in order; empty if there are none."""
        return [value for name in self.benchmarks if name in results for value in self.values(results[name])]

    def meets(self, values: Sequence[float]) -> bool:
        """Return whether the worst of ``values``, as displayed, reaches the goal."""
        worst = round(max(values), 2) if self.at_most else round(min(values), 2)
        return worst <= self.goal if self.at_most else worst >= self.goal


def _speedup_value(contender: str, against: str | None = None) -> Callable[[Result], list[float]]:
    needed = {contender, against or contender}
    return lambda result: [result.speedup(contender, against).median] if needed <= result.seconds.keys() else []


def _share_value(probe: str) -> Callable[[Result], list[float]]:
    return lambda result: [result.share(OWN, probe).median]


def _slowdown_value(*presets: str, baseline: str = COMPUTE) -> Callable[[Result], list[float]]:
    names = [f"npuzero {preset}" for preset in presets]
    return lambda result: [result.slowdown(name, baseline).median for name in names if name in result.seconds]


def _beyond_plan_value(*presets: str) -> Callable[[Result], list[float]]:
    names = [f"npuzero {preset}" for preset in presets]
    return lambda result: [result.values[name]["beyond_plan"] for name in names if name in result.values]


def _host_overhead(result: Result) -> list[float]:
    allowed_s = 1e-3 + 50e-6 * int(result.parameters["units"])
    return [values["more_s"] / allowed_s for name, values in result.values.items() if name != result.baseline]


def added_seconds(result: Result) -> dict[str, float]:
    """Return the seconds that contenders add to the baseline, which computes without updating."""
    base = result.seconds[result.baseline]
    return {
        name: median([one - other for one, other in zip(seconds, base, strict=True)])
        for name, seconds in result.seconds.items()
        if name != result.baseline
    }


def find_exact_contender(result: Result) -> str:
    """Return the contender with the smallest exact states (masters and moments in float32): split masters for bf16."""
    return "npuzero-split" if result.parameters["precision"] == "bf16" else "npuzero"


def _disk_figures(storage: str, against: str, goal: float, precisions: Sequence[str], *others: str) -> list[GoalFigure]:
    """Return rows against the fastest of ``others``: time that states add to a step, and updates with their writes.

    Args:
        storage: as in the contender's name; empty: float32 states, in npuzero's smallest exact layout.
    """

    # Both return [] if a contender is missing from the record: the row is then omitted.
    def added(result: Result) -> list[float]:
        found = added_seconds(result)
        own = f"npuzero{storage}" if storage else find_exact_contender(result)
        there = [found[name] / found[own] for name in others if name in found and own in found]
        return [min(there)] if there else []

    def alone(result: Result) -> list[float]:
        own = f"npuzero{storage}-blocking" if storage else f"{find_exact_contender(result)}-blocking"
        there = [name for name in others if name in result.seconds and own in result.seconds]
        return [min(result.speedup(own, name).median for name in there)] if there else []

    kind = "bf16-8bit states" if storage else "float32 states"
    rows = {"step": (f"what {kind} add to a step", added), "update": (f"an update alone of {kind}", alone)}
    return [
        GoalFigure("disk", name, against, goal, tuple(f"nvme/{what}-{each}-1" for each in precisions), values)
        for what, (name, values) in rows.items()
    ]


def _offload_figure(name: str, against: str, goal: float, benchmark: str, contender: str) -> GoalFigure:
    """Return a row of steps that offload something."""

    def values(result: Result) -> list[float]:
        return [result.slowdown(contender).median] if contender in result.seconds else []

    return GoalFigure("far", name, against, goal, (benchmark,), values, at_most=True)


def _at_most_figure(group: str, name: str, against: str, goal: float, names: Sequence[str], value: Value) -> GoalFigure:
    """Return a row with a maximum as its ``goal``."""
    return GoalFigure(group, name, against, goal, tuple(names), lambda result: [value(result)], at_most=True)


def _host_pair_figure(name: str, mode: str) -> GoalFigure:
    def value(result: Result) -> float:
        return float(result.values[mode]["pair_s"]) / 15e-6

    name = f"host's work of {name}, forward and backward"
    return _at_most_figure("axes", name, "15 µs a pair", 1.0, [f"host_axes/{mode}"], value)


def _torch_comparison_figures(group: str, suite: str, name: str, against: str, goal: float) -> list[GoalFigure]:
    """Return rows of a step that ranks share: time and memory, against torch over gloo and npuzero's backend."""
    names = [f"{suite}/{precision}-{ranks}" for ranks in (2, 4) for precision in ("fp32", "bf16")]
    rows = []
    for other, backend in (("torch", "gloo"), ('torch on "shm"', 'the backend "shm"')):

        def slow(result: Result, other: str = other) -> float:
            return result.slowdown(OWN, other).median

        def held(result: Result, other: str = other) -> float:
            return float(result.values[OWN]["held_bytes"] / result.values[other]["held_bytes"])

        rows.append(_at_most_figure(group, name, f"{against}, {backend}", goal, names, slow))
        rows.append(_at_most_figure(group, "memory of that step", f"{against}, {backend}", 1.0, names, held))
    return rows


def _beyond_bubble_value(result: Result) -> float:
    return result.slowdown(OWN, COMPUTE).median / (1 + float(result.parameters["bubble"]))


def _zero_bubble_value(result: Result) -> float:
    return result.slowdown(BUBBLE, "torch").median


_PIPES = ("pipeline/fp32-2", "pipeline/bf16-2")


def _wire_figure(against: str, goal: float) -> GoalFigure:
    own, other = (f"npuzero {preset}" for preset in ("thin", against))
    names = tuple(f"wires/{links}/bf16/1" for links in ("namespaces", "shared"))
    return GoalFigure("wires", "a step of thin, bf16", against, goal, names, _speedup_value(own, other))


def _planner_figure(batch: int) -> GoalFigure:
    """Return a row of the planner's error: planned minus measured seconds, relative to the measured."""

    def apart(result: Result) -> list[float]:
        planned = {name: values["planned_s"] for name, values in result.values.items()}
        return [abs(planned_s / median(result.seconds[name]) - 1) for name, planned_s in planned.items()]

    name = f"seconds of a step, batch {batch}, stages 0, 2 and 3"
    return GoalFigure("planner", name, "as planned", 0.1, (f"planned/bf16-batch{batch}",), apart, at_most=True)


def _op_figure(
    name: str, against: str, goal: float, benchmark: str, contender: str = OWN, baseline: str | None = None
) -> GoalFigure:
    return GoalFigure("ops", name, against, goal, (benchmark,), _speedup_value(contender, baseline))


def _share_figure(name: str, probe: str, benchmark: str, group: str = "share") -> GoalFigure:
    return GoalFigure(group, name, f"{probe} bandwidth", 0.9, (benchmark,), _share_value(probe))


def _collective_figure(verb: str, ranks: int, goal: float, contender: str) -> GoalFigure:
    benchmarks = tuple(f"{verb}/fp32/{kib}/{ranks}" for kib in _LARGE_KIB)
    name = f"{verb}, {ranks} ranks{_HOW[contender]}"
    return GoalFigure("comm", name, "gloo", goal, benchmarks, _speedup_value(contender))


def _deepspeed_all_reduce_figure(contender: str) -> GoalFigure:
    benchmarks = tuple(f"deepspeed/all_reduce/fp32/{kib}/2" for kib in _LARGE_KIB)
    name = f"all_reduce beside DeepSpeed's, 2 ranks{_HOW[contender]}"
    return GoalFigure("comm", name, _DEEPSPEED_SHM, 2.5, benchmarks, _speedup_value(contender, _DEEPSPEED_SHM))


def _update_figure(dtype: str, contender: str) -> GoalFigure:
    name = f"gradients to new parameters, {dtype}, 2 ranks{_HOW[contender]}"
    return GoalFigure("comm", name, "gloo + torch fused", 9.0, (f"update/{dtype}/65536/2",), _speedup_value(contender))


def _step_figure(
    name: str, benchmark: str, goal: float, presets: tuple[str, ...], baseline: str = COMPUTE
) -> GoalFigure:
    values = _slowdown_value(*presets, baseline=baseline)
    return GoalFigure("step", name, baseline, goal, (benchmark,), values, at_most=True, presets=presets)


FIGURES = (
    _op_figure("AdamW fp32, one flat tensor", "torch fused", 1.0, "flat_adam/flat"),
    _op_figure("AdamW fp32, 400 tensors of a GPT", "torch fused", 1.2, "flat_adam/400"),
    _op_figure("the same tensors in flats, as zero() lays them", "torch fused", 1.2, "flat_adam/400", _FLATS),
    _op_figure("mixed step: bf16 gradients to bf16 parameters", "torch's passes", 2.0, "mixed_step"),
    _op_figure(
        "the mixed step beside DeepSpeed's", _DEEPSPEED_ADAM, 2.0, "deepspeed/mixed_step", baseline=_DEEPSPEED_ADAM
    ),
    _op_figure("pack 400 fp32 tensors to flat bf16, scaled", "loop of copy_ and mul_", 1.8, "pack"),
    _op_figure("cast fp32 to bf16", "copy_", 1.2, "cast/nearest"),
    _share_figure("AdamW, one flat tensor", "in place", "flat_adam/flat"),
    _share_figure("pack", "copy", "pack"),
    _share_figure("norm", "copy", "norm"),
    _share_figure("quantize fp32 to int8", "copy", "quantize/fp32/int8", "codes"),
    _share_figure("quantize bf16 to int4", "copy", "quantize/bf16/int4", "codes"),
    _share_figure("dequantize_sum, int8 to bf16", "copy", "dequantize_sum/int8/1/bf16", "codes"),
    _share_figure("dequantize_sum, 2 rows of int4 to fp32", "copy", "dequantize_sum/int4/2/fp32", "codes"),
    _share_figure("dequantize_sum, 4 rows of int4 to fp32", "copy", "dequantize_sum/int4/4/fp32", "codes"),
    *(
        _collective_figure(verb, ranks, goal, contender)
        for ranks, goals in {2: (15.0, 10.0, 8.0, 3.0), 4: (10.0, 7.0, 6.0, 2.5)}.items()
        for verb, goal in zip(("reduce_scatter", "all_gather", "all_reduce", "all_to_all"), goals, strict=True)
        for contender in (OWN, IN_PLACE)
    ),
    *(_deepspeed_all_reduce_figure(contender) for contender in (OWN, IN_PLACE)),
    *(_update_figure(dtype, contender) for dtype in ("fp32", "bf16") for contender in (OWN, IN_PLACE)),
    _step_figure("bf16, batch 4, stages 0–2", "step/bf16-batch4", 1.04, _CUT_LESS),
    _step_figure("bf16, batch 4, stage 3", "step/bf16-batch4", 1.06, _CUT_MORE),
    _step_figure("bf16, batch 1, stages 0–2", "step/bf16-batch1", 1.12, _CUT_LESS),
    _step_figure("bf16, batch 1, stage 3", "step/bf16-batch1", 1.2, _CUT_MORE),
    _step_figure("fp32, batch 4, all stages", "step/fp32-batch4", 1.02, (*_CUT_LESS, *_CUT_MORE), "independent ranks"),
    GoalFigure(
        "step",
        "memory of that step beyond the plan",
        "the plan",
        0.05,
        ("step/fp32-batch4",),
        _beyond_plan_value(*_CUT_LESS, *_CUT_MORE),
        at_most=True,
    ),
    GoalFigure(
        "step",
        "host's work beyond plain torch's, world of one, 9 and 33 units",
        "1 ms + 50 µs a unit",
        1.0,
        ("host/8", "host/32"),
        _host_overhead,
        at_most=True,
    ),
    *_disk_figures("", _DEEPSPEED_NVME, 2.0, ("bf16", "fp32"), "deepspeed"),
    *_disk_figures("-8bit", _DEEPSPEED_NVME, 5.0, ("bf16",), "deepspeed"),
    *_disk_figures("", "torch fused, memory-mapped", 3.0, ("bf16", "fp32"), "mapped", "mapped-dropped"),
    GoalFigure("disk", "chunks that stream", "raw reads and writes", 0.85, ("disk/stream",), _share_value("raw")),
    GoalFigure(
        "disk",
        "the same without checksums",
        "raw reads and writes",
        0.9,
        ("disk/stream",),
        lambda result: [result.share(_UNVERIFIED, "raw").median],
    ),
    _offload_figure("states on NVMe, forward as long as the update", "resident", 1.1, "farstep/forward", OWN),
    _offload_figure("states on NVMe, forward and backward as long", "resident", 1.1, "farstep/whole", OWN),
    _offload_figure("the same, `AdamW(early=True)`", "resident", 1.05, "farstep/whole", _EARLY),
    _offload_figure("checkpointed activations on the host", "on the device", 1.05, "activations", "host"),
    _offload_figure("checkpointed activations on NVMe", "on the device", 1.05, "activations", "nvme"),
    GoalFigure(
        "far",
        "memory of a process beyond its imports and the plan, states on NVMe",
        "imports and plan",
        0.05,
        ("highwater",),
        lambda result: [result.values[OWN]["beyond_plan"]],
        at_most=True,
    ),
    _host_pair_figure("copy before and total behind cut Linears", "mtp"),
    _host_pair_figure("gather before and scatter behind them", "msp"),
    *_torch_comparison_figures("axes", "tensor", "a step over 2 tensor ranks", "parallelize_module and FSDP2", 0.8),
    _at_most_figure("axes", _SHARED, _OF_EACH, 1.1, ["sequence"], lambda result: result.slowdown("isp").median),
    *_torch_comparison_figures(
        "pipe", "pipeline", "a step over 2 stages, 8 micro-batches", "pipelining and FSDP2", 0.85
    ),
    _at_most_figure("pipe", "that step by zero-bubble", "the same, by 1F1B, gloo", 0.85, _PIPES, _zero_bubble_value),
    _at_most_figure("pipe", "that step", f"{COMPUTE} × (1 + bubble)", 1.05, _PIPES, _beyond_bubble_value),
    _wire_figure("hpz", 2.0),
    _wire_figure("zero3", 4.0),
    *(_planner_figure(batch) for batch in (1, 4)),
)

GROUPS = {
    "ops": "Ops: times as fast",
    "share": "Ops: share of memory's bandwidth",
    "codes": "Ops of thin wires: share of memory's bandwidth",
    "comm": "Collectives, shared memory, 16–64 MiB: times as fast",
    "step": "A training step: times as long",
    "disk": "States on a disk: times as fast",
    "far": "A step that keeps something off the device: times as long",
    "axes": "Tensor and sequence ranks: times as long, or as much",
    "pipe": "Pipelines: times as long, or as much",
    "wires": "Two nodes of two ranks over 1 Gbit/s: times as fast",
    "planner": "Steps beside `npuzero plan`: parts of a step apart",
}
