"""Overlap: all-gathers ahead of compute, reductions inside backward, the all-gather after the update in forward.

Events of one rank are in the rank's order; the test adds marks between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import npuzero
from npuzero import Settings, comm, observe
from npuzero.api.model import engine_of
from npuzero.comm import Mesh, World
from npuzero.observe import Events, Instant, Span
from npuzero.plan import OFFLOADED, THINNED, FlatSize, Placement, Plan, StepSpec, flatten_moves, steady_step
from npuzero.plan.table.step_moves import ComputePass, LaunchReduction, Move, StartCollective, WaitCollective
from world.toy import TrainingRecipe, build_seeded_model
from world.train import CutSession

#: The kind of event, and its unit.
Happening = tuple[str, str]
BLOCKS = [f"blocks.{i}" for i in range(3)]
UNITS = ["root", *BLOCKS]


def step_events(plan: str, steps: int = 3, **settings: object) -> list[list[Happening]]:
    """Return rank 0's events of each step, in order, of two ranks. A span counts at its beginning."""

    def mark(what: str, name: str) -> Callable[..., None]:
        return lambda *_: observe.instant(what, name)

    def rank(world: World) -> None:
        session = CutSession(build_seeded_model(), world, plan=plan, local_size=2, settings=Settings(**settings))
        for name, block in session.model.blocks.named_children():
            block.register_forward_pre_hook(mark("forward begins", f"blocks.{name}"))
            block.register_forward_hook(mark("forward ends", f"blocks.{name}"), prepend=True)
        for name, parameter in session.model.named_parameters():
            if name.endswith("mlp.1.weight"):
                parameter.register_hook(mark("backward within", name.removesuffix(".mlp.1.weight")))
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(steps):
            observe.instant("step", str(step))
            loss = session.loss(step)
            observe.instant("backward", "begins")
            loss.backward()
            observe.instant("backward", "ends")
            optimizer.step()
            optimizer.zero_grad()
        observe.instant("step", "none")
        session.state()

    with observe.recording(Events()) as sink:
        comm.run_threads(2, rank)
    events = [event for event in sink.events if isinstance(event, (Span, Instant)) and event.rank == 0]
    events.sort(key=lambda event: event.begin_s if isinstance(event, Span) else event.at_s)
    order = [(event.category, event.name) for event in events]
    starts = [i for i, (what, _) in enumerate(order) if what == "step"]
    return [order[begin:end] for begin, end in pairwise(starts)]


def find_event(order: list[Happening], what: str, name: str, after: int = -1) -> int:
    """Return the index of an event after ``after``."""
    assert (what, name) in order[after + 1 :], f"no {what} {name} in {order[after + 1 :]}"
    return order.index((what, name), after + 1)


def launched_reductions(order: list[Happening]) -> list[str]:
    """Return the units by the launch of their gradients' reductions, in order."""
    return [name.partition("[")[0] for what, name in order if what == "launch reduction"]


def during_backward(order: list[Happening]) -> list[Happening]:
    return order[find_event(order, "backward", "begins") : find_event(order, "backward", "ends")]


@pytest.mark.parametrize("plan", ["zero3", "hpz", "hsdp"])
def test_the_next_unit_is_gathered_while_the_present_one_computes(plan: str) -> None:
    order = step_events(plan)[1]
    backward = find_event(order, "backward", "begins")
    for present, following in pairwise(BLOCKS):
        ahead = find_event(order, "prefetch", following)
        assert (
            ahead
            < find_event(order, "forward ends", present)
            < find_event(order, "forward begins", following)
            < backward
        )
        ahead = find_event(order, "prefetch", present, backward)
        assert ahead < find_event(order, "backward within", following, backward)
        assert ahead < find_event(order, "backward within", present, backward)


def test_the_first_forward_has_no_forecast_but_its_backward_has() -> None:
    order = step_events("zero3", steps=1)[0]
    backward = find_event(order, "backward", "begins")
    assert not [name for what, name in order[:backward] if what == "prefetch"]
    assert [name for what, name in order[backward:] if what == "prefetch"][:3] == ["blocks.2", "blocks.1", "blocks.0"]


@pytest.mark.parametrize("settings", [{"overlap": False}, {"prefetch": 0}], ids=["no overlap", "prefetch=0"])
def test_without_overlap_nothing_is_gathered_ahead(settings: dict[str, object]) -> None:
    for order in step_events("zero3", **settings):
        assert not [name for what, name in order if what == "prefetch"]
        assert {name for what, name in order if what == "wait for gather"} == set(UNITS)


def test_prefetch_2_gathers_two_ahead() -> None:
    order = step_events("zero3", prefetch=2)[1]
    assert find_event(order, "prefetch", "blocks.2") < find_event(order, "forward ends", "blocks.0")


@pytest.mark.parametrize("plan", ["zero2", "zero3", "hpz", "hsdp"])
def test_cut_gradients_are_reduced_inside_every_backward(plan: str) -> None:
    for order in step_events(plan):
        inside = during_backward(order)
        assert list(dict.fromkeys(launched_reductions(inside))) == [*reversed(BLOCKS), "root"], "backward's own order"
        # The last block's reduction is launched before autograd has reached the first block.
        first = next(i for i, (what, _) in enumerate(inside) if what == "launch reduction")
        assert first < find_event(inside, "backward within", "blocks.0")


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero1.5"])
def test_whole_gradients_are_reduced_inside_backward_once_it_is_known_to_be_the_last(plan: str) -> None:
    first, *later = step_events(plan)
    assert not launched_reductions(during_backward(first)) and set(launched_reductions(first)) == set(UNITS)
    for order in later:
        inside = during_backward(order)
        assert set(launched_reductions(inside)) == set(UNITS) and launched_reductions(inside) == launched_reductions(
            order
        )
        assert find_event(inside, "launch reduction", "blocks.2[0]") < find_event(inside, "backward within", "blocks.0")


def test_overlap_decides_when_a_reduction_ends_and_not_where_it_stands() -> None:
    """The contents of a bucket must not depend on it: bits would change."""
    for order, alone in zip(step_events("zero1"), step_events("zero1", overlap=False), strict=True):
        assert launched_reductions(during_backward(order)) == launched_reductions(during_backward(alone))
        assert launched_reductions(order) == launched_reductions(alone)


@pytest.mark.parametrize("plan", ["zero1", "zero2"])
def test_the_gather_after_the_update_is_awaited_by_the_next_forward(plan: str) -> None:
    first, *later = step_events(plan)
    assert not [name for what, name in first if what == "wait for restore"]
    for order in later:
        assert [name for what, name in order if what == "wait for restore"] == UNITS
        for earlier, unit in pairwise(BLOCKS):
            awaited = find_event(order, "wait for restore", unit)
            assert find_event(order, "forward ends", earlier) < awaited < find_event(order, "forward begins", unit), (
                "no sooner"
            )


def test_without_overlap_the_update_ends_with_its_gather() -> None:
    for order in step_events("zero1", overlap=False):
        ended = find_event(order, "backward", "ends")
        assert [name for what, name in order[ended:] if what == "wait for restore"] == UNITS
        assert not [name for what, name in order[:ended] if what == "wait for restore"]


def test_every_preset_reduces_each_flat_once_a_step() -> None:
    for plan in npuzero.PRESETS:
        for order in step_events(plan, steps=2):
            flats = [name for what, name in order if what == "launch reduction"]
            assert len(flats) == len(set(flats)), plan


#: A move that leaves an event: its kind, and facts. A collective has its verb, channel, ranks and bytes.
Trace = list[tuple[object, ...]]


@dataclass(frozen=True)
class ComparedTraces:
    """Return a steady step of rank 0: the engine's moves, and the schedule's."""

    done: Trace
    scheduled: Trace


def compare_steady_step(
    plan: str, recipe: TrainingRecipe, between: Placement | None = None, **settings: object
) -> ComparedTraces:
    """The last of three steps on 2 x 2 ranks."""
    chosen = Settings(**settings)
    row = replace(Plan.preset(plan, precision="bf16", local_size=2), between=between)

    def rank(world: World) -> Trace:
        session = CutSession(build_seeded_model(), world, plan=row, settings=chosen)
        for name, block in session.model.blocks.named_children():
            block.register_forward_pre_hook(lambda *_, name=name: observe.instant("forward", f"blocks.{name}"))
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(3):
            observe.instant("step", str(step))
            for micro_batch in range(recipe.micro_batches):
                session.loss(step, micro_batch).backward()
            if recipe.clip is not None:
                session.clip(recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
        observe.instant("step", "none")
        engine, mesh = engine_of(session.model), Mesh(world, 2)
        flats = [
            FlatSize(unit.index, flat.layout.numel, flat.dtype, flat.trainable)
            for unit in engine.units
            for flat in unit.flats
        ]
        how = StepSpec(
            sum(parameter.requires_grad for parameter in session.model.parameters()),
            recipe.micro_batches,
            chosen.prefetch,
            chosen.overlaps_gradients,
            chosen.overlaps_parameters,
            recipe.clip is not None,
        )
        found = schedule_trace(steady_step(flats, row, mesh.shape, how), mesh) if world.rank == 0 else []
        session.state()
        return found

    with observe.recording(Events()) as sink:
        scheduled = comm.run_threads(4, rank)[0]
    events = [event for event in sink.events if isinstance(event, (Span, Instant)) and event.rank == 0]
    events.sort(key=lambda event: event.begin_s if isinstance(event, Span) else event.at_s)
    begin, end = (i for i, event in enumerate(events) if event.category == "step" and event.name in ("2", "none"))
    return ComparedTraces([trace for event in events[begin:end] for trace in trace_of_event(event)], scheduled)


def trace_of_event(event: Span | Instant) -> Trace:
    """Convert an event of the engine to a move."""
    facts = event.facts
    if event.category == "start":
        unit = event.name.removeprefix("gather ").removeprefix("restore ").removeprefix("reduce ").partition("[")[0]
        who = unit if facts["channel"] != "control" else "all"
        return [("start", facts["verb"], facts["channel"], facts["ranks"], facts["nbytes"], who)]
    if event.category in ("wait for gather", "wait for restore", "forward"):
        return [(event.category, event.name)]
    return [("launch", event.name.partition("[")[0])] if event.category == "launch reduction" else []


def schedule_trace(moves: list[Move], mesh: Mesh) -> Trace:
    """Return the moves of a schedule that leave an event."""
    found: Trace = []
    for move in flatten_moves(moves):
        if isinstance(move, StartCollective):
            said = move.collective
            channel = said.purpose.channel
            who = UNITS[said.unit] if channel != "control" else "all"
            found += [("start", said.verb, channel, mesh.ranks(said.axes), said.nbytes, who)] * move.count
        elif isinstance(move, WaitCollective) and move.purpose.channel in ("gather", "restore"):
            found.append((f"wait for {move.purpose.value}", UNITS[move.unit]))
        elif isinstance(move, LaunchReduction):
            found.append(("launch", UNITS[move.unit]))
        elif isinstance(move, ComputePass) and move.unit and not move.backward:
            found.append(("forward", UNITS[move.unit]))
    return found


@pytest.mark.checkered
@pytest.mark.parametrize("plan", [*npuzero.PRESETS, *THINNED])
@pytest.mark.parametrize("micro_batches", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "overlap",
    [True, False, *(pytest.param(only, marks=pytest.mark.slow) for only in ("gradients", "parameters"))],
)
def test_the_engine_keeps_to_the_schedule(plan: str, micro_batches: int, overlap: object) -> None:
    step = compare_steady_step(plan, TrainingRecipe(micro_batches=micro_batches, clip=0.5), overlap=overlap)
    assert step.done == step.scheduled


@pytest.mark.parametrize(("plan", "between"), [("zero3", ()), ("zero3-keep", ("node",)), ("hpz", ("local",))])
@pytest.mark.parametrize(
    ("micro_batches", "overlap"),
    [(2, True), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((1, True), (2, False), (4, True)))],
)
def test_what_stays_between_micro_batches_keeps_to_the_schedule(
    plan: str, between: tuple[str, ...], micro_batches: int, overlap: bool
) -> None:
    step = compare_steady_step(plan, TrainingRecipe(micro_batches=micro_batches), Placement(between), overlap=overlap)
    assert step.done == step.scheduled


def split_restores(trace: Trace) -> tuple[Trace, Counter[tuple[object, ...]]]:
    """Split moves with a fixed place from R4's starts, which have none if the update overlaps the next forward."""
    late = [happened for happened in trace if happened[:3] == ("start", "all_gather", "restore")]
    return [happened for happened in trace if happened not in late], Counter(late)


@pytest.mark.parametrize("plan", OFFLOADED)
@pytest.mark.parametrize(
    ("micro_batches", "overlap"),
    [(2, True), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((1, True), (1, False), (3, "parameters")))],
)
def test_what_rests_off_the_device_keeps_to_the_schedule(
    plan: str, micro_batches: int, overlap: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPUZERO_NVME_PATHS", str(tmp_path))
    step = compare_steady_step(
        plan, TrainingRecipe(micro_batches=micro_batches, clip=0.5), overlap=overlap, chunk_bytes=8192
    )
    assert split_restores(step.done) == split_restores(step.scheduled)


@pytest.mark.parametrize("settings", [{"prefetch": 0}, {"prefetch": 2}, {"bucket_bytes": 1024}], ids=str)
@pytest.mark.parametrize("plan", ["zero3", "hpz", "zero1.5"])
def test_the_schedule_follows_the_settings(plan: str, settings: dict[str, object]) -> None:
    step = compare_steady_step(plan, TrainingRecipe(micro_batches=2), **settings)
    assert step.done == step.scheduled


def test_disks_are_read_a_unit_further_ahead_than_gathers_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPUZERO_NVME_PATHS", str(tmp_path))
    order = step_events("infinity")[1]
    backward = find_event(order, "backward", "begins")
    read, gathered = (find_event(order, what, "blocks.0", backward) for what in ("read", "prefetch"))
    assert read < find_event(order, "backward within", "blocks.2", backward) < gathered
    reads = Counter(name for what, name in order if what == "read")
    assert reads == dict.fromkeys(UNITS, 2), "once for forward and once for backward"
