"""Axes other than data: parameters that ranks replicate, sum and cut equal one process, under every preset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import npuzero
from npuzero import ConfigError, comm, parallel
from npuzero.comm import Communicator, Mesh, World
from npuzero.parallel.functions import all_reduce_sum, copy_to_ranks
from npuzero.plan import DATA, PRESETS, Relation
from npuzero.shard.layout.axis_relations import get_relations, relate_parameter
from world.toy import build_seeded_model
from world.train import assert_same_bits, assert_states_close

DIM, HIDDEN, STEPS = 12, 48, 4


class PerceptronNet(nn.Module):
    """An MLP with hidden elements that may be cut over ranks; its ``scale`` sees a part of them on each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.scale = nn.Parameter(torch.ones(1))
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.group: Communicator | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = h if self.group is None else copy_to_ranks(h, self.group)
        h = self.down(F.gelu(self.up(h)) * self.scale)
        return x + (h if self.group is None else all_reduce_sum(h, self.group))


class PerceptronNets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PerceptronNet() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def divide_perceptrons(mesh: Mesh, make: Callable[[], nn.Module] = PerceptronNets) -> nn.Module:
    """Return this rank's part: hidden elements are cut, ``scale``'s gradients are summed, norms are replicated."""
    model, n, index = build_seeded_model(make=make), mesh.size(("tensor",)), mesh.index(("tensor",))
    for net in model.blocks:
        net.group = mesh.communicator(("tensor",), "tensor")
        for owner, name, dim in ((net.up, "weight", 0), (net.up, "bias", 0), (net.down, "weight", 1)):
            part = nn.Parameter(getattr(owner, name).detach().chunk(n, dim)[index].clone())
            relate_parameter(part, "tensor", Relation.CUT)
            setattr(owner, name, part)
        relate_parameter(net.scale, "tensor", Relation.SUMMED)
    return model


def axes_batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, DIM, generator=torch.Generator().manual_seed(100 * step + rank))


def train_axes_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], clip: Callable[[], Tensor]
) -> Tensor:
    norms = []
    for step in range(STEPS):
        torch.stack([model(axes_batch(step, rank)).square().mean() for rank in ranks]).mean().backward()
        norms.append(clip().detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(norms)


@cache
def train_axes_plain(ranks: int) -> dict[str, Tensor]:
    model = build_seeded_model(make=PerceptronNets)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = train_axes_model(
        model, optimizer, [*range(ranks)], lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    )
    return {"norms": norms, **{name: value.detach() for name, value in model.state_dict().items()}}


def train_axes_rank(
    world: World, tensor: int, plan: str, make: Callable[[Mesh], nn.Module] = divide_perceptrons
) -> dict[str, Tensor]:
    mesh = npuzero.mesh(tensor=tensor, local_size=1 if world.size // tensor < 4 else 2, world=world)
    model = npuzero.zero(make(mesh), plan=plan, mesh=mesh)
    optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
    norms = train_axes_model(model, optimizer, [mesh.index(DATA)], lambda: npuzero.clip_grad_norm_(model, 0.05))
    own = mesh.index(("tensor",))
    state = npuzero.full_state_dict(model, rank0_only=False)
    report, predicted = npuzero.report(model), npuzero.predict(model, plan, mesh, clip=True, moments=0)
    assert (report.bytes_sent, report.sent_along) == (predicted.bytes_sent, predicted.sent_along)
    assert report.bytes_held == predicted.bytes_held
    return {"norms": norms, "own": torch.tensor(own), **state}


def join_cut_tensors(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the cut tensors of tensor ranks."""
    found = dict(states[0])
    for name in found:
        dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name.split(".", 2)[-1])
        if dim is not None:
            found[name] = torch.cat([state[name] for state in states], dim)
    found.pop("own")
    return found


def check_axes_training(size: int, tensor: int, plan: str) -> None:
    states = comm.run_threads(size, lambda world: train_axes_rank(world, tensor, plan))
    expected = train_axes_plain(size // tensor)
    groups = [states[i : i + tensor] for i in range(0, size, tensor)]
    for group in groups:
        assert [state["own"] for state in group] == [*range(tensor)]
        for mine, first in zip(group, groups[0], strict=True):
            assert_same_bits(mine, first)
        repeated = [name for name in group[0] if "norm" in name or "scale" in name]
        for state in group:
            assert_same_bits({name: state[name] for name in repeated}, {name: group[0][name] for name in repeated})
        assert_states_close(join_cut_tensors(group), expected, 1e-6)


@pytest.mark.parametrize(("size", "tensor"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3", "hpz"])
def test_tensor_ranks_train_one_model(plan: str, size: int, tensor: int) -> None:
    check_axes_training(size, tensor, plan)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "tensor"), [(3, 3), (4, 4), (6, 2), (6, 3), (8, 2), (8, 4)])
@pytest.mark.parametrize("plan", PRESETS)
def test_more_tensor_ranks_train_one_model(plan: str, size: int, tensor: int) -> None:
    check_axes_training(size, tensor, plan)


class DifferingRows(nn.Module):
    """A layer with different rows on each data rank, between layers that ranks share."""

    def __init__(self, group: Communicator | None = None, own: slice = slice(None)) -> None:
        super().__init__()
        self.enter = nn.Linear(DIM, DIM)
        self.rows = nn.Parameter(torch.randn(8, DIM)[own])
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        h = h if self.group is None else copy_to_ranks(h, self.group)
        y = torch.tanh(h @ self.rows.T).square().sum(-1)
        return y if self.group is None else all_reduce_sum(y, self.group)


@pytest.mark.parametrize("plan", ["zero1", "zero3", "hsdp"])
def test_a_parameter_may_be_cut_over_data_ranks(plan: str) -> None:
    """Its gradients are this rank's own, from all ranks' computations; it is neither sharded nor sent."""

    def rank(world: World) -> dict[str, Tensor]:
        mesh = npuzero.mesh(local_size=2, world=world)
        everyone = mesh.communicator(DATA, "rows")
        own = slice(2 * world.rank, 2 * world.rank + 2)
        model = build_seeded_model(make=lambda: DifferingRows(everyone, own))
        for axis in ("node", "local"):
            relate_parameter(model.rows, axis, Relation.CUT)
        model = npuzero.zero(model, plan=plan, mesh=mesh)
        optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
        norms = train_axes_model(model, optimizer, [0], lambda: npuzero.clip_grad_norm_(model, 0.05))
        assert npuzero.report(model).bytes_sent == npuzero.predict(model, plan, mesh, clip=True).bytes_sent
        return {"norms": norms, **npuzero.full_state_dict(model, rank0_only=False)}

    model = build_seeded_model(make=DifferingRows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = train_axes_model(model, optimizer, [0], lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    states = comm.run_threads(4, rank)
    rows = torch.cat([state.pop("rows") for state in states])
    for state in states:
        assert_same_bits(state, states[0])
    assert_states_close({**states[0], "rows": rows}, {"norms": norms, **model.state_dict()}, 1e-6)


def test_an_inf_in_one_ranks_part_skips_the_step_everywhere() -> None:
    def rank(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = npuzero.zero(divide_perceptrons(mesh), stage=3, mesh=mesh)
        optimizer = npuzero.AdamW(model.parameters(), lr=0.1)
        scaler = npuzero.LossScaler("cpu", init_scale=8.0)
        before = npuzero.full_state_dict(model, rank0_only=False)
        spoil = float("inf") if world.rank == 3 else 1.0
        handle = model.blocks[1].up.register_full_backward_hook(lambda _, gradients, __: (gradients[0],))
        loss = scaler.scale(model(axes_batch(0, world.rank // 2)).square().mean())
        model.blocks[1].up.weight.register_hook(lambda gradient: gradient * spoil)
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        handle.remove()
        return before, npuzero.full_state_dict(model, rank0_only=False), scaler.get_scale()

    for before, after, scale in comm.run_threads(4, rank):
        assert_same_bits(after, before)
        assert scale == 4.0


def test_a_guard_names_a_rank_of_any_axis() -> None:
    """The same error on all ranks, and no step anywhere."""

    def rank(world: World) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = npuzero.zero(divide_perceptrons(mesh), stage=3, mesh=mesh)
        optimizer = npuzero.AdamW(model.parameters(), lr=0.1)
        before = npuzero.full_state_dict(model, rank0_only=False)
        spoil = float("inf") if world.rank == 3 else 1.0
        with npuzero.FiniteGuard(model) as guard:
            loss = model(axes_batch(0, world.rank // 2)).square().mean()
            model.blocks[1].up.weight.register_hook(lambda gradient: gradient * spoil)
            loss.backward()
            guard.check(loss)
            optimizer.step()
            with pytest.raises(npuzero.NonFiniteError) as caught:
                guard.look()
        return str(caught.value), before, npuzero.full_state_dict(model, rank0_only=False)

    found = comm.run_threads(4, rank)
    assert len({text for text, _, _ in found}) == 1 and "blocks.1.up.weight" in found[0][0]
    for _, before, after in found:
        assert_same_bits(after, before)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 3}, r"mesh: tensor: expected a positive divisor of the 4 ranks: 1, 2, 4; got 3"),
        ({"tensor": 2, "pipe": 4}, r"mesh: tensor: .*divisor of the 1 ranks that the other axes leave of 4"),
        ({"tensor": 2, "data": 4}, r"multiply to the world of 4: data=2, or None; got pipe=1, data=4, tensor=2"),
        ({"sequence": 3}, "mesh: sequence: .*: 1, 2, 4; got 3"),
        ({"pod": 0}, "mesh: pod"),
        ({"tensor": 2, "local_size": 4}, "mesh: local_size: .*divisor of the 2 ranks that the other axes leave of 4"),
    ],
)
def test_sizes_that_do_not_multiply(sizes: dict[str, int], message: str) -> None:
    def rank(world: World) -> None:
        with pytest.raises(ConfigError, match=message):
            npuzero.mesh(world=world, **sizes)

    comm.run_threads(4, rank)


def test_ranks_that_say_different_things_are_told() -> None:
    def rank(world: World) -> None:
        mesh = npuzero.mesh(tensor=1 + world.rank % 2, local_size=1, world=world)
        with pytest.raises(ConfigError, match="mesh: expected the same on every rank"):
            npuzero.zero(build_seeded_model(make=PerceptronNets), mesh=mesh)
        mesh = npuzero.mesh(tensor=2, world=world)
        model = build_seeded_model(make=PerceptronNets)
        if world.rank:
            relate_parameter(model.blocks[0].scale, "tensor", Relation.SUMMED)
        with pytest.raises(ConfigError, match=r"blocks.0.scale .*summed along tensor"):
            npuzero.zero(model, mesh=mesh)
        with pytest.raises(ConfigError, match="the world of the mesh"):
            npuzero.zero(model, mesh=mesh, world=comm.SingleWorld())
        mesh = npuzero.mesh(local_size=2, world=world)
        with pytest.raises(ConfigError, match="2, as the mesh has it"):
            npuzero.zero(model, mesh=mesh, plan="hsdp", local_size=1)

    comm.run_threads(2, rank)


@pytest.mark.parametrize(
    "sizes",
    [{"tensor": 2}, {"tensor": 2, "pod": 2, "local_size": 3}, {"pipe": 3, "tensor": 4}, {"sequence": 4, "pipe": 2}],
)
def test_a_mesh_is_rank_arithmetic(sizes: dict[str, int]) -> None:
    def rank(world: World) -> None:
        mesh = npuzero.mesh(world=world, **sizes)
        shape, axes = mesh.shape, ("pipe", "pod", "node", "local", "tensor")
        assert shape.world == 24 and mesh.ranks(axes) == tuple(range(24)) and mesh.index(axes) == world.rank
        for axis in (*axes, "sequence"):
            ranks = mesh.ranks((axis,))
            assert len(ranks) == mesh.size((axis,)) == sizes.get(axis, len(ranks))
            assert ranks[mesh.index((axis,))] == world.rank
        first = world.rank // shape.tensor * shape.tensor
        assert mesh.ranks(("tensor",)) == tuple(range(first, first + shape.tensor))
        assert {rank // (24 // shape.pipe) for rank in mesh.ranks(DATA)} == {world.rank // (24 // shape.pipe)}
        data, share = mesh.ranks(DATA), shape.sequence
        assert mesh.ranks(("sequence",)) == data[mesh.index(DATA) // share * share :][:share]

    comm.run_threads(24, rank)


def test_pods_hold_what_a_plan_does_not_shard_over_them() -> None:
    """Parameters within groups of two, states over two groups, and the same in the other pod: equal numbers."""
    within, across = npuzero.Placement(("local",)), npuzero.Placement(("local", "node"))
    plan = npuzero.Plan(within, within, within, across, name="weights and states")

    def rank(world: World) -> dict[str, Tensor]:
        mesh = npuzero.mesh(pod=2, local_size=2, world=world)
        model = npuzero.zero(build_seeded_model(make=PerceptronNets), plan=replace(plan, name="mine"), mesh=mesh)
        optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
        norms = train_axes_model(model, optimizer, [mesh.index(DATA)], lambda: npuzero.clip_grad_norm_(model, 0.05))
        report, predicted = npuzero.report(model), npuzero.predict(model, plan, mesh, clip=True, moments=0)
        assert report.bytes_sent == predicted.bytes_sent and report.bytes_held == predicted.bytes_held
        return {"norms": norms, **npuzero.full_state_dict(model, rank0_only=False)}

    states = comm.run_threads(8, rank)
    for state in states:
        assert_same_bits(state, states[0])
    assert_states_close(states[0], train_axes_plain(8), 1e-6)


def test_relations_are_said_of_modules() -> None:
    net = PerceptronNet()
    parallel.relate(net.up, tensor="cut")
    parallel.relate(net.up.bias, tensor="repeated", node="cut")
    assert get_relations(net.up.weight) == {"tensor": Relation.CUT}
    assert get_relations(net.up.bias) == {"node": Relation.CUT}, "what is usual is not said"
    assert not get_relations(net.scale)
    with pytest.raises(ConfigError, match=r"relate: tensor: expected one of averaged, .*cut.*; got 'cuts'"):
        parallel.relate(net, tensor="cuts")
    with pytest.raises(ConfigError, match=r"an axis of .*tensor"):
        parallel.relate(net, tenser="cut")
    with pytest.raises(ConfigError, match="a module or a parameter"):
        parallel.relate("up", tensor="cut")


class CheckpointedNets(PerceptronNets):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("memory", [npuzero.Memory.DEVICE, npuzero.Memory.HOST])
def test_of_activations_that_tensor_ranks_hold_alike_each_keeps_a_part(memory: npuzero.Memory) -> None:
    """ZeRO-R's P_a: the same bits, half the bytes, and one all-gather of each before backward."""
    plain_plan = npuzero.Plan.preset("zero2")
    divided_plan = replace(plain_plan, activations=npuzero.Placement(("tensor",), memory))

    def rank(world: World, plan: npuzero.Plan, differ: float = 0.0) -> tuple[dict[str, Tensor], int, int]:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = npuzero.zero(divide_perceptrons(mesh, CheckpointedNets), plan=plan, mesh=mesh)
        optimizer = npuzero.AdamW(model.parameters())
        x = torch.randn(2048, DIM, generator=torch.Generator().manual_seed(0)) + differ * world.rank
        for _ in range(2):  # in the first the ranks compare
            model(x.requires_grad_()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        report = npuzero.report(model)
        held = report.held.get(memory, {}).get("activations", 0)
        return npuzero.full_state_dict(model, rank0_only=False), held, report.bytes_sent["all_gather"]

    expected = comm.run_threads(2, lambda world: rank(world, plain_plan))
    found = comm.run_threads(2, lambda world: rank(world, divided_plan))
    nbytes = 2048 * DIM * 4
    for (state, held, sent), (other, nothing, before) in zip(found, expected, strict=True):
        assert_same_bits(state, other)
        assert nothing == 0 and held >= nbytes and sent - before == 2 * nbytes // 2
    with pytest.raises(ConfigError, match=r"activations.axes: .*mode='mtp'; got different ones"):
        comm.run_threads(2, lambda world: rank(world, divided_plan, differ=1.0))
