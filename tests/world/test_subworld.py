"""Worlds of a part of the ranks: each trains its model as if it were alone."""

from __future__ import annotations

import os
import signal
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import npuzero
from faults.fault_ranks import run_faulty_ranks as run_seen
from npuzero import checkpoint, comm
from npuzero.comm import Mesh, World
from npuzero.errors import CollectiveError, ConfigError, ContractError, StateError

from .comm_ranks import rank_results, run_comm_ranks
from .parity_ranks import state_digest
from .toy import TrainingRecipe, build_seeded_model
from .train import (
    CutSession,
    PlainSession,
    State,
    assert_same_bits,
    assert_states_close,
    train_by_recipe,
    train_plain,
    train_sharded,
)

#: The ranks as 2 x 2; along each axis there are two groups of two.
RANKS, LOCAL_SIZE = 4, 2
AXES = ("node", "local")
RECIPE = TrainingRecipe(steps=4, micro_batches=2, clip=0.5)


def axis_subworld(world: World, axis: str) -> tuple[World, int]:
    """Return this rank's group along ``axis``, and the group's index."""
    mesh = Mesh(world, LOCAL_SIZE)
    (other,) = set(AXES) - {axis}
    return mesh.part((axis,)), mesh.index((other,))


def train_part(world: World, axis: str, plan: str) -> State:
    """One group trains model 0, the other model 1."""
    part, group = axis_subworld(world, axis)
    return train_sharded(part, RECIPE, build_seeded_model(seed=group), plan=plan, local_size=1)[0]


@cache
def train_group_plain(group: int) -> State:
    return train_plain(build_seeded_model(seed=group), 2, RECIPE)


@cache
def train_group_alone(group: int, plan: str) -> State:
    """The same model in a run of two ranks."""
    return comm.run_threads(
        2, lambda world: train_sharded(world, RECIPE, build_seeded_model(seed=group), plan=plan, local_size=1)[0]
    )[0]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2", "zero3", "hsdp"])
def test_each_group_trains_its_own_model(plan: str, axis: str) -> None:
    states = comm.run_threads(RANKS, lambda world: train_part(world, axis, plan))
    for rank, state in enumerate(states):
        node, local = divmod(rank, LOCAL_SIZE)
        group = local if axis == "node" else node
        assert_states_close(state, train_group_plain(group))
        assert_same_bits(state, train_group_alone(group, plan))  # rank by rank, equal to a separate run


def digest_part(world: World, axis: str, plan: str) -> str:
    return state_digest(train_part(world, axis, plan))


@pytest.mark.world
@pytest.mark.parametrize(
    ("axis", "plan", "backend"),
    [("node", "zero3", None), pytest.param("local", "hsdp", "gloo", marks=pytest.mark.slow)],
)
def test_processes_train_a_model_in_each_group(axis: str, plan: str, backend: str | None, tmp_path: Path) -> None:
    digests = rank_results(run_comm_ranks(RANKS, digest_part, axis, plan, folder=tmp_path, backend=backend))
    own = [state_digest(train_group_alone(group, plan)) for group in (0, 1)]
    assert digests == (own * 2 if axis == "node" else [own[0], own[0], own[1], own[1]])


def test_a_model_on_all_ranks_beside_one_on_some() -> None:
    """Their collectives do not meet, in whatever order the two are used."""

    def step(session: CutSession | PlainSession, optimizer: torch.optim.Optimizer) -> None:
        session.loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    def rank(world: World) -> tuple[State, State]:
        part, group = axis_subworld(world, "local")
        both = [CutSession(build_seeded_model(), world, stage=3), CutSession(build_seeded_model(seed=1), part, stage=3)]
        optimizers = [session.optimizer(torch.optim.AdamW, lr=1e-2) for session in both]
        for _ in range(2):
            for i in (0, 1) if group else (1, 0):
                step(both[i], optimizers[i])
        return both[0].state(), both[1].state()

    expected = []
    for seed, size in ((0, RANKS), (1, LOCAL_SIZE)):
        session = PlainSession(build_seeded_model(seed=seed), range(size), size)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        for _ in range(2):
            step(session, optimizer)
        expected.append(session.state())
    for states in comm.run_threads(RANKS, rank):
        for state, oracle in zip(states, expected, strict=True):
            assert_states_close(state, oracle)


def _build_subworld_session(world: World, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, CutSession]:
    session = CutSession(build_seeded_model(seed=seed), world, stage=3)
    return session.model, session.optimizer(torch.optim.AdamW, lr=1e-2), session


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_group_has_checkpoints_of_its_own(asynchronous: bool, tmp_path: Path) -> None:
    """Written and read by the ranks of a part, for any choice of the run's ranks."""

    def rank(world: World) -> tuple[State, State]:
        part, group = axis_subworld(world, "node")
        model, optimizer, session = _build_subworld_session(part, group)
        session.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(tmp_path / f"{group}", model, optimizer, step=1, asynchronous=asynchronous).wait()
        other, other_optimizer, resumed = _build_subworld_session(part, 7)
        assert checkpoint.load(tmp_path / f"{group}", other, other_optimizer).step == 1
        for going, its in ((session, optimizer), (resumed, other_optimizer)):
            going.loss(1).backward()
            its.step()
        return resumed.state(), session.state()

    states = comm.run_threads(RANKS, rank)
    for resumed, went_on in states:
        assert_same_bits(resumed, went_on)
    assert not torch.equal(states[0][0]["head.weight"], states[1][0]["head.weight"])


def test_each_group_exports_its_weights(tmp_path: Path) -> None:
    def rank(world: World) -> State:
        part, group = axis_subworld(world, "node")
        model = npuzero.zero(build_seeded_model(seed=group), stage=3, world=part)
        npuzero.export(model, tmp_path / f"{group}.safetensors")
        read = npuzero.zero(build_seeded_model(seed=7), stage=3, world=part, weights=tmp_path / f"{group}.safetensors")
        return {name: value.detach() for name, value in npuzero.full_state_dict(read, rank0_only=False).items()}

    for place, state in enumerate(comm.run_threads(RANKS, rank)):
        expected = build_seeded_model(seed=place % LOCAL_SIZE).state_dict()
        assert_same_bits(state, {name: expected[name] for name in state})


def test_a_part_is_a_world_of_its_own() -> None:
    def rank(world: World) -> None:
        pair = (world.rank % 2, world.rank % 2 + 2)
        part = world.part(pair)
        assert part is world.part(list(pair)) and part.part((0, 1)) is part
        assert (part.rank, part.size, part.ranks) == (world.rank // 2, 2, pair)
        assert (part.device, part.local, part.timeout_s) == (world.device, (0, 1), world.timeout_s)
        assert repr(part) == f"SubWorld(rank={part.rank}, size=2, device=cpu, ranks={pair})"
        assert world.part(range(4)) is world
        # In another order the ranks have other indices, and nothing is shared.
        turned = part.part((1, 0))
        assert turned is world.part(pair[::-1]) and turned is not part and turned.rank == 1 - part.rank
        assert turned.exchange(world.rank) == list(pair[::-1])
        alone = part.part((part.rank,))
        assert alone is world.part((world.rank,)) and alone.exchange([1, None]) == [[1, None]]
        # Each has separate channels over the same ranks as well.
        groups = [within.communicator((0, 1), "gather") for within in (part, turned)]
        groups += [world.communicator(pair, "gather"), alone.communicator((0,), "gather")]
        assert len({group.place for group in groups}) == len(groups) == len(set(map(id, groups)))
        assert part.communicator((0, 1), "gather") is groups[0] and groups[0].ranks == pair
        total = torch.full((3,), float(world.rank))
        groups[0].all_reduce(total).wait()
        assert total.eq(sum(pair)).all()
        assert part.communicator((1, 0), "gather").ranks == pair[::-1]

    comm.run_threads(RANKS, rank)


def test_others_need_not_come() -> None:
    """Ranks 0 and 1 meet again and again; rank 2 is elsewhere."""

    def rank(world: World) -> list[list[int]]:
        if world.rank == 2:
            return []
        part = world.part((0, 1))
        return [part.exchange(10 * n + part.rank) for n in range(20)]

    found = comm.run_threads(3, rank)
    assert found[0] == found[1] == [[10 * n, 10 * n + 1] for n in range(20)]


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1, 4), (-1, 0), (), (2, 3)])
def test_what_is_no_part_is_refused(ranks: tuple[int, ...]) -> None:
    def rank(world: World) -> None:
        if world.rank < 2:
            with pytest.raises(ContractError, match=rf"part: expected different ranks below 4, with rank {world.rank}"):
                world.part(ranks)

    comm.run_threads(RANKS, rank)


def test_a_rank_alone_has_one_part() -> None:
    world = comm.SingleWorld()
    assert world.part((0,)) is world and Mesh(world).part(("node", "local")) is world
    with pytest.raises(ContractError, match="different ranks below 1"):
        world.part((0, 1))
    with pytest.raises(ConfigError, match="different axes"):
        Mesh(world).part(("gpu",))


def test_a_part_ends_with_the_world_and_alone() -> None:
    kept: list[World] = []

    def rank(world: World) -> None:
        pairs = [world.part((world.rank - world.rank % 2, world.rank - world.rank % 2 + 1)) for _ in range(2)]
        pairs[0].communicator((0, 1), "gather").barrier()
        across = world.part((world.rank % 2, world.rank % 2 + 2))
        across.exchange(None)
        across.close()
        assert across.closed and not world.closed and not pairs[0].closed
        pairs[0].communicator((0, 1), "gather").barrier()
        world.communicator(range(4), "gather").barrier()
        kept.append(pairs[0])

    comm.run_threads(RANKS, rank)
    assert len(kept) == RANKS and all(part.closed for part in kept)
    with pytest.raises(CollectiveError):
        kept[0].communicator((0, 1), "gather").barrier()


def test_parts_are_those_of_the_thread() -> None:
    def rank(world: World) -> None:
        part, group = axis_subworld(world, "node")
        with comm.entered(part):
            assert comm.current_world() is part
            model = npuzero.zero(build_seeded_model(seed=group), stage=3)
        assert comm.current_world() is world
        assert len(npuzero.full_state_dict(model, rank0_only=False)) > 0

    comm.run_threads(RANKS, rank)


def test_ranks_that_wait_for_each_other_in_different_parts_are_told() -> None:
    """0 waits for 1 in one part, 1 for 2 in another, 2 for 0 in a third; rank 3 is told when it comes."""
    met: dict[int, CollectiveError] = {}

    def rank(world: World) -> None:
        if world.rank == 3:
            return
        right = (world.rank + 1) % 3
        part = world.part(sorted((world.rank, right)))
        try:
            if world.rank:
                part.communicator((0, 1), "gather").barrier()
            else:
                part.exchange(None)
        except CollectiveError as error:
            met[world.rank] = error
            raise

    begin_s = time.monotonic()
    with pytest.raises(CollectiveError):
        comm.run_threads(RANKS, rank)
    assert sorted(met) == [0, 1, 2] and time.monotonic() - begin_s < 5.0
    for error in met.values():
        assert error.facts["kind"] == "diverged"
        assert "rank 0: waits in exchange #1 among rank 0, 1" in error.got
        assert "rank 1: waits in barrier #1 of 'gather@1-2' among rank 1, 2" in error.got
        assert "rank 2: waits in barrier #1 of 'gather@0-2' among rank 0, 2" in error.got


def test_a_rank_that_never_comes_to_its_part_is_a_timeout() -> None:
    """Threads that compute may still come: only time tells."""

    def rank(world: World) -> None:
        if world.rank == 1:
            world.communicator(range(2), "known").barrier()
            time.sleep(1.5)
            return
        world.communicator(range(2), "known").barrier()
        with pytest.raises(CollectiveError, match="rank"):
            world.part((0, 1)).part((1, 0)).exchange(None)

    comm.run_threads(2, rank, timeout_s=0.8)


def test_an_abort_in_a_part_is_the_runs() -> None:
    def rank(world: World) -> None:
        part, _ = axis_subworld(world, "local")
        if world.rank == 3:
            part.abort("no more")
        else:
            with pytest.raises(CollectiveError, match="rank 3 aborted: no more"):
                while True:
                    part.exchange(None)
                    time.sleep(0.01)

    comm.run_threads(RANKS, rank)


CULPRIT = 1


def trains_or_dies(world: World) -> None:
    """Kill the culprit in the middle of its part's training; a part without it trains to the end."""
    part, group = axis_subworld(world, "node")
    model = npuzero.zero(build_seeded_model(seed=group), stage=3, world=part)
    if world.rank == CULPRIT:
        model.blocks[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    session = CutSession(build_seeded_model(seed=group + 2), part, stage=3)
    with comm.entered(part):
        train_by_recipe(session, RECIPE)
        model(torch.arange(12)[None]).square().mean().backward()


@pytest.mark.world
def test_a_rank_that_dies_ends_the_waiting_of_its_part() -> None:
    begin_s = time.monotonic()
    outcomes = run_seen(trains_or_dies, RANKS)
    assert outcomes[CULPRIT].exit_code == -signal.SIGKILL
    assert outcomes[3].seen.kind == "CollectiveError" and f"rank {CULPRIT} is dead" in outcomes[3].seen.text
    assert outcomes[3].ended_s - outcomes[CULPRIT].ended_s < 4.0
    for rank in (0, 2):
        assert outcomes[rank].seen.kind == "" and outcomes[rank].exit_code == 0, outcomes[rank]
    assert time.monotonic() - begin_s < 30.0


@pytest.mark.world
def test_a_part_does_not_survive_a_fork(tmp_path: Path) -> None:
    assert (
        rank_results(run_comm_ranks(2, refuses_in_a_child, folder=tmp_path)) == ["StateError StateError StateError"] * 2
    )


def refuses_in_a_child(world: World) -> str:
    """Return the errors in a forked child of the rank; its end ends nothing here."""
    part = world.part((1, 0))
    group = part.communicator((0, 1), "gather")
    read, write = os.pipe()
    child = os.fork()
    if not child:
        said = []
        for call in (lambda: part.exchange(1), lambda: part.communicator((1, 0), "other"), lambda: part.part((1, 0))):
            try:
                call()
            except StateError as error:
                said.append(type(error).__name__)
        part.abort("of a child")
        part.close()
        os.write(write, " ".join(said).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    group.barrier()
    assert part.exchange(world.rank) == [1, 0]
    return os.read(read, 1000).decode()
