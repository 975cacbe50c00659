"""Pipeline stages, one engine each: parameters tied across both ends, and calls over all stages, equal one process."""

from __future__ import annotations

import queue
import re
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import npuzero
from npuzero import ConfigError, comm
from npuzero.comm import Mesh, World
from npuzero.plan import DATA, MeshShape, Relation
from npuzero.shard.layout.axis_relations import relate_parameter
from world.toy import EPS, build_seeded_model
from world.train import assert_same_bits, assert_states_close

VOCABULARY, DIM, BLOCKS, MICRO_BATCHES, STEPS = 23, 16, 3, 2, 10


class EndsBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class WholeModel(nn.Module):
    """Tied embedding and head around blocks; a separate scale at either end."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleDict({str(i): EndsBlock() for i in range(BLOCKS)})
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, head: bool = True) -> Tensor:
        x = self.embed(x) * self.scale if hasattr(self, "scale") else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") and head else x


def build_ends_stage(mesh: Mesh, seed: int = 0) -> nn.Module:
    """Build this rank's stage: names and values are the full model's."""
    model, stage, last = build_seeded_model(seed, WholeModel), mesh.index(("pipe",)), mesh.size(("pipe",)) - 1
    for i in range(BLOCKS):
        if i * (last + 1) // BLOCKS != stage:
            del model.blocks[str(i)]
    if stage != last:
        del model.norm, model.head
    if stage:
        del model.scale
    if 0 < stage < last:
        del model.embed
    elif last:
        relate_parameter(model.embed.weight, "pipe", Relation.SUMMED)
    return model


class StageQueues:
    """Pass values between stages on ranks that are threads."""

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)

    def send(self, tensor: Tensor, begin: int, end: int) -> None:
        self._queues[begin, end].put(tensor)

    def receive(self, begin: int, end: int) -> Tensor:
        return self._queues[begin, end].get(timeout=300)


def ends_batch(step: int, micro_batch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    return torch.randint(VOCABULARY, (3, 7), generator=generator)


def ends_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    if logits.shape[-1] == DIM:
        return logits.square().mean() / MICRO_BATCHES
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) / MICRO_BATCHES


def run_ends_passes(
    model: nn.Module,
    mesh: Mesh,
    lines: StageQueues,
    step: int,
    head: bool = True,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> float:
    """Run forward of all micro-batches, then backward; return the loss on the last stage."""
    (stage, last), data = (mesh.index(("pipe",)), mesh.size(("pipe",)) - 1), mesh.size(DATA)
    rank, total, kept = mesh.world.rank, 0.0, []
    for micro_batch in range(MICRO_BATCHES):
        tokens = ends_batch(step, micro_batch, mesh.index(DATA))
        x = lines.receive(rank - data, rank).requires_grad_() if stage else tokens
        y = model(x, head)
        if stage == last:
            y = ends_loss(y, tokens)
            total += y.item()
            y = scale(y)
        else:
            lines.send(y.detach(), rank, rank + data)
        kept.append((x, y))
    for x, y in kept:
        if y.requires_grad:
            y.backward(None if stage == last else lines.receive(rank + data, rank))
        if stage:
            lines.send(torch.zeros_like(x) if x.grad is None else x.grad, rank, rank - data)
    return total


SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
ADAM = (torch.optim.AdamW, {"lr": 1e-2, "eps": EPS})


def build_ends_optimizer(kind: Any, options: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    if kind is torch.optim.AdamW:
        return npuzero.AdamW(parameters, **options)
    return npuzero.ZeroOptimizer(kind, parameters, **options)


@cache
def train_ends_plain(data: int, adam: bool, clip: float, frozen: str = "none", heads: int = 1) -> dict[str, Tensor]:
    model, (kind, options) = build_seeded_model(make=WholeModel), ADAM if adam else SGD
    freeze_all_but(model, frozen)
    optimizer, norms = kind(model.parameters(), **options), []
    for step in range(STEPS):
        for rank in range(data):
            for micro_batch in range(MICRO_BATCHES):
                tokens = ends_batch(step, micro_batch, rank)
                (ends_loss(model(tokens, step % heads == 0), tokens) / data).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": torch.stack(norms), **{name: p.detach() for name, p in model.named_parameters()}}


def freeze_all_but(model: nn.Module, words: str) -> None:
    """Freeze all parameters without one of ``words`` in the name."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(words == "none" or any(word in name for word in words.split()))


def gathered_values(model: nn.Module) -> dict[str, Tensor]:
    with npuzero.gathered(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_ends_rank(  # noqa: PLR0917 - what a run differs in
    world: World,
    lines: StageQueues,
    pipe: int,
    plan: Any,
    adam: bool = False,
    clip: float = 0.5,
    frozen: str = "none",
    heads: int = 1,
    **options: Any,
) -> dict[str, Tensor]:
    mesh = npuzero.mesh(pipe=pipe, local_size=1, world=world)
    stage = build_ends_stage(
        mesh, mesh.index(("pipe",)) // (pipe - 1)
    )  # the last stage begins with other values of the tied parameters
    whole = dict(build_seeded_model(make=WholeModel).named_parameters())
    freeze_all_but(stage, frozen)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if name != "embed.weight":
                parameter.copy_(whole[name])
    model = npuzero.zero(stage, plan=plan, mesh=mesh, **options)
    optimizer, norms = build_ends_optimizer(*(ADAM if adam else SGD), model.parameters()), []
    for step in range(STEPS):
        run_ends_passes(model, mesh, lines, step, step % heads == 0)
        norms.append(npuzero.clip_grad_norm_(model, clip).clone())
        optimizer.step()
        optimizer.zero_grad()
    report = npuzero.report(model)
    moments = 2 if adam else 1
    predicted = npuzero.predict(model, plan, mesh, micro_batches=MICRO_BATCHES, clip=True, moments=moments, **options)
    assert report.bytes_sent["control"] == predicted.bytes_sent["control"]
    if frozen == "none":
        assert (report.bytes_sent, report.sent_along) == (predicted.bytes_sent, predicted.sent_along)
    return {"norms": torch.stack(norms), **gathered_values(model)}


def join_stage_states(states: list[dict[str, Tensor]], pipe: int) -> dict[str, Tensor]:
    """Join the stages' parts to the full model; ranks of a stage have equal bits, and so have both ends."""
    data = len(states) // pipe
    for stage in range(pipe):
        for state in states[stage * data : (stage + 1) * data]:
            assert_same_bits(state, states[stage * data])
    first, last = states[0], states[-1]
    for name in ("norms", "embed.weight"):
        assert_same_bits({name: last[name]}, {name: first[name]})
    whole = {name: value for state in states for name, value in state.items()}
    for state in states:
        assert_same_bits({"norms": state["norms"]}, {"norms": first["norms"]})
    return whole


def check_ends(
    pipe: int,
    data: int,
    plan: str,
    adam: bool = False,
    clip: float = 0.5,
    frozen: str = "none",
    heads: int = 1,
    **options: Any,
) -> None:
    lines = StageQueues()
    states = comm.run_threads(
        pipe * data, lambda world: train_ends_rank(world, lines, pipe, plan, adam, clip, frozen, heads, **options)
    )
    assert_states_close(
        join_stage_states(states, pipe), train_ends_plain(data, adam, clip, frozen, heads), 1e-4 if adam else 1e-6
    )


@pytest.mark.parametrize(
    ("pipe", "data", "plan", "adam", "clip"),
    [
        (2, 1, "zero0", False, 0.5),
        (2, 1, "zero3", True, 0.5),
        (2, 2, "zero0", True, 0.5),
        (2, 2, "zero1", False, 0.5),
        (2, 2, "zero2", True, 100.0),
        (2, 2, "zero3", False, 0.5),
        (3, 1, "zero2", False, 0.5),
    ],
)
def test_a_parameter_of_both_ends_is_one(pipe: int, data: int, plan: str, adam: bool, clip: float) -> None:
    check_ends(pipe, data, plan, adam, clip)


def test_an_end_that_does_not_use_it_takes_the_others_gradient() -> None:
    check_ends(2, 1, "zero2", heads=2)


def test_neither_end_waits_for_the_other_within_a_pass() -> None:
    """Without overlap, a sum is awaited where it begins: inside backward the far end would never join it."""
    settings = npuzero.Settings(overlap=False)
    check_ends(2, 1, "zero0", settings=settings)


def test_both_ends_round_alike() -> None:
    """Random bits depend on a parameter's name, not on its index in a stage."""
    precision = npuzero.Precision(torch.bfloat16, masters="none")
    plan, lines = npuzero.Plan.preset("zero2", precision=precision), StageQueues()
    join_stage_states(comm.run_threads(2, lambda world: train_ends_rank(world, lines, 2, plan, adam=True)), 2)


@pytest.mark.parametrize(
    ("pipe", "data", "plan", "adam", "trains"),
    [(2, 2, "zero3", True, "blocks.0"), (2, 1, "zero1", False, "blocks.2"), (3, 1, "zero2", False, "blocks.1.up")],
)
def test_stages_may_be_frozen(pipe: int, data: int, plan: str, adam: bool, trains: str) -> None:
    """A rank without gradients takes part in norms, and in the agreement on a step."""
    check_ends(pipe, data, plan, adam, frozen=trains)


def run_ends_ranks(
    size: int, pipe: int, body: Callable[[nn.Module, Mesh, StageQueues], Any], trains: str = "none"
) -> list[Any]:
    """Return the result of ``body`` on each rank's stage under zero3."""
    lines = StageQueues()

    def rank(world: World) -> Any:
        mesh = npuzero.mesh(pipe=pipe, local_size=1, world=world)
        stage = build_ends_stage(mesh)
        freeze_all_but(stage, trains)
        return body(npuzero.zero(stage, stage=3, mesh=mesh), mesh, lines)

    return comm.run_threads(size, rank, timeout_s=20)


def plain_gradients(data: int, trains: str) -> nn.Module:
    model = build_seeded_model(make=WholeModel)
    freeze_all_but(model, trains)
    for rank in range(data):
        for micro_batch in range(MICRO_BATCHES):
            tokens = ends_batch(0, micro_batch, rank)
            (ends_loss(model(tokens), tokens) / data).backward()
    return model


@pytest.mark.parametrize("trains", ["none", "blocks.0"])
def test_norms_are_the_whole_models_on_every_rank(trains: str) -> None:
    def rank(
        model: nn.Module, mesh: Mesh, lines: StageQueues
    ) -> tuple[list[float], dict[str, float], dict[str, float]]:
        run_ends_passes(model, mesh, lines, 0)
        found = [npuzero.clip_grad_norm_(model, 1e30, p).item() for p in (1.0, 2.0, 3.5, float("inf"))]
        norms = npuzero.grad_norms(model)
        npuzero.clip_grad_value_(model, 1e-3)
        return [*found, npuzero.clip_grad_norm_(model, 1e30).item()], norms, npuzero.grad_norms(model, 1.0)

    whole = plain_gradients(2, trains)
    named = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    expected = [nn.utils.clip_grad_norm_(whole.parameters(), 1e30, p).item() for p in (1.0, 2.0, 3.5, float("inf"))]
    norms = {name: p.grad.norm().item() for name, p in named.items()}
    nn.utils.clip_grad_value_(whole.parameters(), 1e-3)
    expected.append(nn.utils.clip_grad_norm_(whole.parameters(), 1e30).item())
    after = {name: p.grad.norm(1.0).item() for name, p in named.items()}
    ranks = run_ends_ranks(4, 2, rank, trains)
    for found in ranks:
        assert found == ranks[0]
    assert ranks[0][0] == pytest.approx(expected, rel=1e-5)
    assert ranks[0][1] == pytest.approx(norms, rel=1e-5) and ranks[0][2] == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize("trains", ["none", "blocks.0", "blocks.2"])
def test_an_overflow_in_one_stage_skips_the_step_of_all(trains: str) -> None:
    """A scaler on each rank; the last stage scales its loss, all find the same."""

    def rank(model: nn.Module, mesh: Mesh, lines: StageQueues) -> list[Any]:
        optimizer = npuzero.AdamW(model.parameters(), lr=0.1)
        scaler = npuzero.LossScaler(init_scale=8.0)
        found = [gathered_values(model)]
        named = dict(model.named_parameters())
        spoilt = named.get("blocks.0.up.weight" if trains != "blocks.2" else "blocks.2.up.weight")
        for step in range(2):
            if spoilt is not None and step == 0:
                handle = spoilt.register_hook(lambda gradient: gradient * float("inf"))
            run_ends_passes(model, mesh, lines, step, scale=scaler.scale)
            if step:
                scaler.unscale_(optimizer)
                found.append(npuzero.clip_grad_norm_(model, 1.0).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if spoilt is not None and step == 0:
                handle.remove()
            found += [gathered_values(model), scaler.get_scale()]
        return found

    ranks = run_ends_ranks(2, 2, rank, trains)
    for before, after, scale, norm, _, again in ranks:
        assert_same_bits(after, before)
        assert scale == again == 4.0 and norm == ranks[0][3] > 0
    moved = [name for r in ranks for name in r[4] if not torch.equal(r[4][name], r[1][name])]
    assert {"none": len(moved) > 20, "blocks.0": all("blocks.0" in n for n in moved)}.get(trains, bool(moved))


@pytest.mark.parametrize("name", ["blocks.0.up.weight", "blocks.2.up.weight"])
def test_a_guard_names_a_parameter_of_any_stage(name: str) -> None:
    """The same error on all ranks, and no step anywhere."""

    def rank(model: nn.Module, mesh: Mesh, lines: StageQueues) -> tuple[str, bool]:
        optimizer = npuzero.AdamW(model.parameters(), lr=0.1)
        before = gathered_values(model)
        with npuzero.FiniteGuard(model) as guard:
            if name in (named := dict(model.named_parameters())):
                named[name].register_hook(lambda gradient: gradient * float("inf"))
            run_ends_passes(model, mesh, lines, 0)
            guard.check()
            optimizer.step()
            with pytest.raises(npuzero.NonFiniteError) as caught:
                guard.look()
        assert_same_bits(gathered_values(model), before)
        return str(caught.value), caught.value.facts["parameter"] == name

    found = run_ends_ranks(4, 2, rank)
    assert len(set(found)) == 1 and found[0][1]


def test_what_one_stage_alone_calls_is_told_on_every_rank() -> None:
    def rank(model: nn.Module, mesh: Mesh, lines: StageQueues) -> list[str]:
        optimizer, stage = npuzero.AdamW(model.parameters()), mesh.index(("pipe",))
        said = []
        for call in (
            lambda: stage and npuzero.clip_grad_norm_(model, 1.0),
            lambda: npuzero.clip_grad_norm_(model, 1.0 + stage),
        ):
            run_ends_passes(model, mesh, lines, 0)
            with pytest.raises(ConfigError) as caught:
                call()
                optimizer.step()
            said.append(str(caught.value))
            optimizer.zero_grad()
        run_ends_passes(model, mesh, lines, 1)
        npuzero.clip_grad_norm_(model, 1.0)
        optimizer.step()  # and on
        return said

    for left_out, differs in run_ends_ranks(3, 3, rank):
        assert "clip_grad_norm_ on every rank" in left_out and "rank 1, 2 is in clip_grad_norm_" in left_out
        assert "rank 0 went on to optimizer.step at test_ends.py" in left_out
        assert "clip_grad_norm_: max_norm" in differs and "2.0 on rank 1" in differs


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("one end alone", "parameters that stages have in common.*in stage 2, on rank 2"),
        ("a stage between", r"none in others; got in stage 1, on rank 1: .*blocks.1.up.weight"),
        ("a stage that cannot", "rank 1: parameter blocks.1.up.weight.*int"),
        ("another plan", "plan.name: expected the same on every rank, as on rank 0: 'zero2'; got on rank 2: 'zero3'"),
    ],
)
def test_stages_that_do_not_fit_are_told_on_every_rank(mistake: str, message: str) -> None:
    def rank(world: World) -> str:
        mesh = npuzero.mesh(pipe=3, world=world)
        model = build_ends_stage(mesh)
        if mistake == "one end alone" and world.rank == 2:
            del model.embed.weight.__dict__["_npuzero_relations"]
        elif world.rank == 1:
            up = model.blocks["1"].up
            if mistake == "a stage between":
                relate_parameter(up.weight, "pipe", Relation.SUMMED)
            elif mistake == "a stage that cannot":
                up.weight = nn.Parameter(up.weight.int(), requires_grad=False)
        plan = "zero3" if mistake == "another plan" and world.rank == 2 else "zero2"
        with pytest.raises(ConfigError) as caught:
            npuzero.zero(model, plan=plan, mesh=mesh)
        return str(caught.value)

    for text in comm.run_threads(3, rank):
        assert re.search(message, text) or (mistake == "a stage that cannot" and "int" in text), text


def test_ends_are_a_view_of_pipe() -> None:
    shape = MeshShape(node=2, local=1, pipe=3, tensor=2)
    assert shape.size(("ends",)) == 2 and shape.size(("ends", "node")) == 4
    assert [shape.place(rank).get("ends") for rank in range(12)] == [0] * 4 + [None] * 4 + [1] * 4
    assert MeshShape(node=2, local=1).size(("ends",)) == 1

    def rank(world: World) -> None:
        mesh = npuzero.mesh(pipe=3, tensor=2, local_size=1, world=world)
        place = shape.place(world.rank)
        if place["pipe"] == 1:
            with pytest.raises(ConfigError, match=f"mesh: ends: .*got rank {world.rank}, of stage 1 of 3"):
                mesh.ranks(("ends",))
        else:
            own = place["node"] * 2 + place["tensor"]
            assert mesh.ranks(("ends",)) == (own, 8 + own) and mesh.index(("ends",)) == place["ends"]
            ranks = mesh.ranks(("ends", "node"))
            assert ranks == tuple(stage + node + place["tensor"] for stage in (0, 8) for node in (0, 2))
            assert ranks[mesh.index(("ends", "node"))] == world.rank
            assert mesh.ranks(("node",)) == tuple(place["pipe"] * 4 + node + place["tensor"] for node in (0, 2))
            assert mesh.ranks(("pipe",)) == (own, 4 + own, 8 + own)
        with pytest.raises(ConfigError, match="mesh: axes"):
            mesh.ranks(("ends", "pipe"))

    comm.run_threads(12, rank)


@pytest.mark.slow
@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2", "zero3", "hsdp", "zero1.5"])
@pytest.mark.parametrize(("pipe", "data"), [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_a_parameter_of_both_ends_is_one_under_every_preset(pipe: int, data: int, plan: str, adam: bool) -> None:
    check_ends(pipe, data, plan, adam, 0.5)
