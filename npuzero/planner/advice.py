"""Advice: whether a model fits, which plan trains it fastest and why; and if nothing fits, which changes would help."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from npuzero.config import describe_value, read_json
from npuzero.errors import ConfigError, StateError, refuse_unknown_keywords
from npuzero.plan import NODE, PIPE, PRECISIONS, SEQUENCE, TENSOR, Memory
from npuzero.planner.hardware.cluster import Cluster
from npuzero.planner.model_work.job import TrainingJob
from npuzero.planner.models import ModelShape, from_config
from npuzero.planner.search import Choices, SearchResult, choices_over_axes, search_runs, state_bytes
from npuzero.planner.timing.estimate import Estimate, Estimator
from npuzero.planner.ways import WayOut, ways_out
from npuzero.shard.build import get_unit_parameters, nested_unit_spans
from npuzero.shard.layout.find_units import discover_units

_GIB = 2**30
#: Largest number of plans named in a reason.
_NAMED = 4


@dataclass(frozen=True)
class Advice:
    """Hold the answer for a job: whether it fits, the fastest run, reasons and alternatives. ``str(advice)`` is text.

    Attributes:
        job: the job.
        choices: options that the search chose from.
        found: the runs that fit, the fastest first, and the runs that do not.
        ways_out: if nothing fits, changes that would help: single ones, or pairs if no single one does.
        reasons: sentences.
    """

    job: TrainingJob
    choices: Choices
    found: SearchResult = field(repr=False)
    ways_out: tuple[WayOut, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Tell whether any run fits."""
        return bool(self.found.fitting)

    @property
    def best(self) -> Estimate:
        """Return the fastest run that fits.

        Raises:
            ConfigError: no run fits; the error names changes that would help.
        """
        if not self.fits:
            ways = "; ".join(way.what for way in self.ways_out)
            raise ConfigError(
                f"{self.job.model.name} on {self.job.cluster.name}",
                expected="a plan that fits",
                got=self.answer,
                do=f"Take one of these: {ways}." if ways else "Take more devices.",
            )
        return self.found.fitting[0]

    @property
    def others(self) -> tuple[Estimate, ...]:
        """Return the remaining runs that fit, one per plan with and without recomputation, the fastest first."""
        return self.found.fitting[1:]

    @property
    def answer(self) -> str:
        """Return the answer in one line."""
        return (
            f"Fits: {format_estimate(self.found.fitting[0])}" if self.fits else f"Does not fit: {_format_misfit(self)}"
        )

    def __str__(self) -> str:
        return "\n".join([self.answer, *(f"- {reason}" for reason in self.reasons)])


def format_estimate(estimate: Estimate) -> str:
    """Return a run as text: its plan, batch, memory, speed and bound."""
    run, device = estimate.run, Memory.DEVICE.value
    limit = estimate.job.cluster.device.memory_bytes
    words = [
        plan_name(estimate),
        f"micro-batch {run.micro_batch} × {run.micro_batches}",
        "recompute" if run.recompute else "no recompute",
        f"{_format_gib(estimate.memory[device])} of {_format_gib(limit)} GiB",
        *(
            f"{_format_gib(nbytes)} GiB on {memory}"
            for memory, nbytes in estimate.memory.items()
            if memory != device and nbytes
        ),
        f"about {_format_three_digits(estimate.tokens_per_s)} tokens/s a device",
    ]
    return f"{', '.join(words)}; {estimate.bound}-bound"


@refuse_unknown_keywords(
    sequence="seq", seq_len="seq", sequence_length="seq", tokens="tokens_per_step", dtype="precision"
)
def advise(
    model: nn.Module | ModelShape | Mapping[str, Any] | str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    *,
    seq: int | None = None,
    tokens_per_step: int | None = None,
    precision: Any = None,
    attention: str = "flash",
    clip: bool = True,
    axes: bool = False,
    choices: Choices | None = None,
) -> Advice:
    """Find the fastest plan and batch to train ``model`` on ``cluster``, whether they fit, and the bottleneck.

    Nothing is executed. Memory is that of :func:`npuzero.predict` plus the activations of a pass on the meta device;
    time comes from a simulation of the step's schedule with the cluster's rates.

    Args:
        model: a module, on any device or on meta; or the ``config.json`` of a transformers model, as a mapping or a
            file; or a shape of :mod:`npuzero.planner.models`.
        cluster: a :class:`npuzero.planner.Cluster`; or a number and a name such as ``"8x910b-64g"``; or the JSON file
            that ``npuzero bench cluster`` writes.
        seq: tokens of a sequence.
        tokens_per_step: tokens of all ranks together, from which the number of micro-batches follows. None: one
            micro-batch per rank, as large as fits.
        precision: as for :func:`npuzero.zero`; None: ``"bf16"``.
        attention: ``"flash"`` keeps no scores, ``"plain"`` keeps them.
        clip: whether the gradient norm is computed.
        axes: whether to also try tensor, sequence and pipeline ranks; the program then needs more than
            :func:`npuzero.zero`: see :meth:`npuzero.planner.timing.estimate.Estimate.axes`.
        choices: presets, group sizes, offloads, axis sizes and so on to choose from; None: all presets that keep the
            state on the devices and do not quantize communication.

    Raises:
        ConfigError: an unknown model, cluster, precision or size, or a combination that is not possible.
        StateError: the model is already sharded.

    Example::

        llama = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
                 "num_hidden_layers": 32, "vocab_size": 32000}
        advice = npuzero.advise(llama, cluster="8x910b-64g", seq=4096, tokens_per_step=2**19)
        print(advice)  # Fits: ...
        net = npuzero.zero(net, **advice.best.arguments())
    """
    job = TrainingJob(
        _get_model_shape(model), _resolve_cluster(cluster), check_sequence_length(seq), tokens_per_step, attention, clip
    )
    chosen = _with_precision(choices, precision)
    return advise_on(job, choices_over_axes(job.cluster, chosen) if axes else chosen)


def advise_on(
    job: TrainingJob,
    choices: Choices | None = None,
    every: bool = False,
    tell: Callable[[int, int], None] | None = None,
) -> Advice:
    """Return the advice for an existing job; ``every``, ``tell``: as for :func:`npuzero.planner.search.search_runs`."""
    choices = Choices() if choices is None else choices
    found = search_runs(job, choices, every, tell)
    advice = Advice(job, choices, found)
    if advice.fits:
        return replace(advice, reasons=tuple(_explain_best(advice)))
    ways = tuple(ways_out(job, choices))
    advice = replace(advice, ways_out=ways)
    return replace(advice, reasons=tuple(_explain_nearest(advice)))


# -- inputs ------------------------------------------------------------------------------------------------------------


def _get_model_shape(model: object) -> ModelShape:
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, nn.Module):
        return build_model_shape(model)
    if isinstance(model, Mapping):
        return from_config(model, str(model.get("_name_or_path") or "model"))
    if isinstance(model, (str, os.PathLike)):
        return from_config(read_json(model), str(model))
    raise ConfigError(
        "npuzero.advise(): model",
        expected="an nn.Module, the values of a config.json, or its file",
        got=describe_value(model),
        do="Pass the model itself, also on meta.",
    )


def build_model_shape(model: nn.Module) -> ModelShape:
    """Return the shapes of a module's units, with a copy of it on meta; no data is copied.

    Raises:
        StateError: the model is already sharded.
    """
    if any(getattr(parameter, "_npuzero_engine", None) is not None for parameter in model.parameters()):
        raise StateError(
            "npuzero.advise()",
            expected="a model that npuzero.zero() has not seen",
            got=f"{type(model).__name__}, which is sharded",
            do="Ask before, of the model as it was built.",
        )
    copied = _copy_to_meta(model)
    spans = nested_unit_spans([unit.name for unit in discover_units(copied, None)])
    return ModelShape(type(model).__name__, get_unit_parameters(copied), spans, lambda: copied)


def _copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` with its parameters and buffers on meta."""
    there: dict[int, Any] = {}
    for parameter in model.parameters():
        there[id(parameter)] = made = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        vars(made).update(vars(parameter))
    there |= {id(buffer): buffer.detach().to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, there)


def _resolve_cluster(cluster: object) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, (str, os.PathLike)):
        return Cluster.named(os.fspath(cluster))
    raise ConfigError(
        "npuzero.advise(): cluster",
        expected='a Cluster, a number and a name such as "8x910b-64g", or a JSON file',
        got=describe_value(cluster),
        do="Say on how many devices of which kind.",
    )


def check_sequence_length(seq: object) -> int:
    """Return the tokens of a sequence.

    Raises:
        ConfigError: the value is missing or not a positive integer.
    """
    if isinstance(seq, bool) or not isinstance(seq, int) or seq < 1:
        raise ConfigError(
            "seq",
            expected="the tokens of a sequence, a positive integer",
            got="nothing" if seq is None else describe_value(seq),
            do="Say seq=4096: activations and the batch depend on it.",
        )
    return seq


def _with_precision(choices: Choices | None, precision: Any) -> Choices:
    chosen = Choices() if choices is None else choices
    return chosen if precision is None else replace(chosen, precisions=(precision,))


# -- reasons -----------------------------------------------------------------------------------------------------------


def _explain_best(advice: Advice) -> Iterator[str]:
    """Yield reasons why the best run is the best."""
    best, found = advice.best, advice.found
    assert best.timeline is not None
    busy = ", ".join(f"{lane} {part:.0%}" for lane, part in _busy_shares(best) if part >= 0.005)
    yield f"A step takes {best.step_s:.3g} s for {best.tokens:,} tokens; busy in it: {busy}."
    others = _fastest_by_plan(found.fitting)[1:]
    if others:
        shown = ", ".join(f"{plan_name(each)} {_format_slowdown(each, best)}" for each in others[:_NAMED])
        yield f"Next: {shown}{_format_remaining_count(len(others))}."
    if not best.run.recompute and True in advice.choices.recompute:
        yield from _explain_recomputation(advice, best)
    elif best.run.recompute:
        why = "without it nothing fits" if all(e.run.recompute for e in found.fitting) else "it lets more fit at once"
        yield f"Blocks compute their forward again in backward: {why}."
    # Compare like with like: where runs without recomputation were tried, name the plans that do not fit without it.
    misfits = [each for each in found.misfits if each.run.recompute == min(advice.choices.recompute)]
    if misfits:
        without = "" if advice.choices.recompute == (True,) else " without recomputation"
        yield (
            f"Not{without}: "
            f"{', '.join(map(plan_name, misfits[:_NAMED]))}{_format_remaining_count(len(misfits))}: too much memory."
        )
    if advice.job.cluster.nodes > 1:
        yield _format_node_traffic(found)
    if best.axes():
        yield f"In a program: {format_program(best)}."


def format_program(estimate: Estimate) -> str:
    """Return the calls of a program that trains with tensor, sequence or pipe ranks."""
    axes, run = estimate.axes(), estimate.run
    named = [f"{key}={value!r}" for key, value in estimate.arguments().items() if isinstance(value, (str, int))]
    mode = "" if estimate.job.model.mode in ("", "mtp") else f", {estimate.job.model.mode!r}"
    calls = [f"mesh = npuzero.mesh({', '.join(f'{axis}={ranks}' for axis, ranks in axes.items())})"]
    calls += [f"npuzero.parallel.tensor(model, mesh{mode})"] * (TENSOR in axes)
    calls += ["npuzero.parallel.sequence(model, mesh)"] * (SEQUENCE in axes)
    if PIPE in axes:
        calls.append(f"npuzero.pipeline(model, mesh, micro_batches={run.micro_batches}, {', '.join(named)})")
    else:
        calls.append(f"npuzero.zero(model, mesh=mesh, {', '.join(named)})")
    calls += ["npuzero.parallel.slice(batch, mesh) of each batch"] * (SEQUENCE in axes)
    return "; ".join(calls)


def _explain_recomputation(advice: Advice, best: Estimate) -> Iterator[str]:
    """Yield how the best run would perform with recomputation."""
    twin = next((e for e in (*advice.found.fitting, *advice.found.slower) if _differ_by_recompute(e, best)), None)
    if twin is not None:
        timed = twin if twin.timeline else Estimator(twin.job).time(twin)
        batch = f"micro-batch {twin.run.micro_batch} × {twin.run.micro_batches}"
        held = _format_gib(twin.memory[Memory.DEVICE.value])
        yield f"Recomputation would take {held} GiB at {batch}, {_format_slowdown(timed, best)}."


def _differ_by_recompute(one: Estimate, other: Estimate) -> bool:
    return (one.run.plan, one.run.mesh) == (other.run.plan, other.run.mesh) and one.run.recompute != other.run.recompute


def _explain_nearest(advice: Advice) -> Iterator[str]:
    """Yield how much memory is missing, and the result of each change."""
    if advice.found.misfits:
        least = advice.found.misfits[0]
        over = ", ".join(
            f"{_format_gib(n)} GiB too much on {m}" for m, n in least.over(advice.choices.spare).items() if n
        )
        recompute = "with recomputation" if least.run.recompute else "without recomputation"
        yield f"Nearest is {plan_name(least)}, micro-batch {least.run.micro_batch}, {recompute}: {over}."
    for way in advice.ways_out:
        yield f"With {way.what}: {format_estimate(way.estimate)}."
    if not advice.ways_out:
        yield "No single change of those tried would do, and no two: give it many more devices, or a smaller model."


def _format_misfit(advice: Advice) -> str:
    """Return the memory that is missing, and the names of the changes that would help."""
    state = state_bytes(advice.job.model, advice.choices.precisions[0])
    least = advice.found.misfits[0]
    held = sum(least.report.held[Memory.DEVICE][part] for part in ("parameters", "gradients", "states"))
    what = f"{_format_gib(state)} GiB of states"
    if held <= advice.job.cluster.device.memory_bytes * (1 - advice.choices.spare):
        rest = max(0, least.memory[Memory.DEVICE.value] - held)
        what += f", and beside a rank's part of them {_format_gib(rest)} GiB of activations and buffers"
    if not advice.ways_out:
        return what
    first, *more = (way.what for way in advice.ways_out)
    return f"{what}; {first} would{''.join(f', or {each}' for each in more)}"


def _busy_shares(estimate: Estimate) -> list[tuple[str, float]]:
    assert estimate.timeline is not None
    return [(lane, busy_s / estimate.step_s) for lane, busy_s in estimate.timeline.busy.items()]


def _fastest_by_plan(estimates: tuple[Estimate, ...]) -> list[Estimate]:
    """Return the fastest estimate of each plan."""
    fastest: dict[str, Estimate] = {}
    for each in estimates:
        fastest.setdefault(plan_name(each), each)
    return list(fastest.values())


def _format_node_traffic(found: SearchResult) -> str:
    """Return the traffic between nodes of the best plan, and of further plans with node-sized groups."""
    best, *others = _fastest_by_plan(found.fitting)
    usual = [each for each in others if each.run.plan.local_size is None]
    sent = {plan_name(each): bytes_between_nodes(each) for each in (best, *usual)}
    shown = ", ".join(f"{name} {nbytes / _GIB:.3g}" for name, nbytes in sent.items())
    return f"GiB that a rank sends between nodes in a step: {shown}."


def bytes_between_nodes(estimate: Estimate) -> int:
    """Return the bytes that a rank sends to other nodes in a step."""
    return estimate.sent_by_level[NODE]


def plan_name(estimate: Estimate) -> str:
    """Return the name of a run's plan, with group size and precision if not the default, and any further axes."""
    plan, default = estimate.run.plan, Choices().precisions[0]
    size = f" of {plan.local_size}" if plan.local_size else ""
    names = [name for name, precision in PRECISIONS.items() if precision == plan.precision]
    precision = f" in {names[0]}" if names and names[0] != default else ""
    axes = " × ".join(f"{axis} {ranks}" for axis, ranks in estimate.axes().items())
    return f"{plan.name}{size}{precision}{axes and f' ({axes})'}"


def _format_slowdown(each: Estimate, best: Estimate) -> str:
    part = each.tokens_per_s / best.tokens_per_s - 1
    return "as fast" if abs(part) < 0.0005 else f"{part:+.1%}"


def _format_remaining_count(count: int) -> str:
    return f" and {count - _NAMED} more" if count > _NAMED else ""


def _format_gib(nbytes: float) -> str:
    gib = nbytes / _GIB
    return f"{gib:,.0f}" if gib >= 10 else f"{gib:.2g}"


def _format_three_digits(value: float) -> str:
    """Return a number with three significant digits and thousands separators."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"
