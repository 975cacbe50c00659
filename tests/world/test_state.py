"""Full tensors in and out of a sharded model, and the end of its life."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import npuzero
from npuzero import comm
from npuzero.comm import World
from npuzero.errors import CheckpointError, StateError
from npuzero.shard.find_engine import engine_of
from world.test_modules import TiedBlocksGPT
from world.toy import ToyGPT, TrainingRecipe, build_seeded_model, toy_loss, toy_tokens
from world.train import CutSession, PlainSession, State, assert_same_bits, assert_states_close, train_by_recipe

every_plan = pytest.mark.parametrize("plan", npuzero.PRESETS)
CUT = ("zero3", "hpz", "hsdp", "zero3-keep")


class NormalizedModel(nn.Module):
    """Buffers of several dtypes, some of them not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)))
        self.register_buffer("steps", torch.randint(100, (3,)))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


_collecting = threading.Lock()


def collect_garbage() -> None:
    """gc.collect() does nothing while another thread is in it."""
    with _collecting:
        gc.collect()


def bits_of_plain(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("plan", ["zero1", "zero3", "hsdp", "delayed", "offload3"])
def test_a_part_of_a_state_is_loaded_and_the_rest_stays_with_its_masters(plan: str) -> None:
    """In bf16, where masters have bits that no parameter shows."""

    def rank(world: World, part: bool) -> State:
        model = npuzero.zero(build_seeded_model(), plan=plan, precision="bf16", world=world)
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        toy_loss(model, toy_tokens(0, 0, world.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        name = next(name for name in model.state_dict(keep_vars=True) if name.endswith("weight"))
        value = torch.full_like(build_seeded_model().state_dict()[name], 0.25)
        if part:
            npuzero.load_full_state_dict(model, {name: value, "elsewhere": torch.ones(1)}, strict=False)
        else:
            npuzero.apply_pending(model)
            with npuzero.gathered(model, write=True), torch.no_grad():
                model.get_parameter(name).copy_(value)
        toy_loss(model, toy_tokens(1, 0, world.rank)).backward()
        optimizer.step()
        npuzero.apply_pending(model)
        return npuzero.full_state_dict(model, rank0_only=False)

    loaded, written = (comm.run_threads(2, functools.partial(rank, part=part))[0] for part in (True, False))
    assert_same_bits(loaded, written)

    def other(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan=plan, world=world)
        names = sorted(model.state_dict(keep_vars=True))[: 1 + world.rank]
        with pytest.raises(CheckpointError, match=names[-1] if world.rank else "missing|unknown"):
            npuzero.load_full_state_dict(
                model, {name: build_seeded_model().state_dict()[name] for name in names}, strict=False
            )

    comm.run_threads(2, other)


@every_plan
@pytest.mark.parametrize("make", [ToyGPT, TiedBlocksGPT, NormalizedModel])
def test_full_state_dict_is_that_of_the_plain_model(make: type[nn.Module], plan: str) -> None:
    """By every name, tied ones too, in torch's order; tied names share a tensor."""
    expected = build_seeded_model(make=make).state_dict()

    def both_ways(world: World) -> tuple[State, State]:
        model = npuzero.zero(build_seeded_model(make=make), plan=plan, local_size=2, world=world)
        return npuzero.full_state_dict(model), npuzero.full_state_dict(model, rank0_only=False)

    outcomes = comm.run_threads(4, both_ways)
    assert [bool(rank0) for rank0, _ in outcomes] == [True, False, False, False]
    for state in (outcomes[0][0], *(everywhere for _, everywhere in outcomes)):
        assert list(state) == list(expected)
        assert_same_bits(state, bits_of_plain(build_seeded_model(make=make)))
        for name, value in expected.items():
            assert state[name].dtype == value.dtype
            tied = {
                other for other, tensor in expected.items() if value.numel() and tensor.data_ptr() == value.data_ptr()
            }
            assert {other for other in state if state[other] is state[name]} >= tied


@every_plan
def test_all_ranks_start_from_rank_0(plan: str) -> None:
    """Parameters and buffers, saved or not, for any seed on each rank."""

    def start(world: World) -> State:
        model = npuzero.zero(
            build_seeded_model(seed=world.rank, make=NormalizedModel), plan=plan, local_size=2, world=world
        )
        return npuzero.full_state_dict(model, rank0_only=False) | {"scratch": model.scratch}

    plain = build_seeded_model(make=NormalizedModel)
    for state in comm.run_threads(4, start):
        assert_same_bits(state, bits_of_plain(plain) | {"scratch": plain.scratch})


@every_plan
def test_load_full_state_dict(plan: str) -> None:
    """Rank 0's values arrive everywhere, and training goes on from them."""
    recipe = TrainingRecipe(steps=2)

    def load(world: World) -> tuple[State, State]:
        session = CutSession(build_seeded_model(seed=1), world, plan=plan, local_size=2)
        train_by_recipe(session, recipe)
        session.load(build_seeded_model(seed=7 + world.rank).state_dict())
        loaded = session.state()
        train_by_recipe(session, recipe)
        return loaded, session.state()

    expected = PlainSession(build_seeded_model(seed=7), range(4), 4)
    train_by_recipe(expected, recipe)
    for loaded, trained in comm.run_threads(4, load):
        assert_same_bits(loaded, bits_of_plain(build_seeded_model(seed=7)))
        assert_states_close(trained, expected.state())


def test_buffers_and_extra_states_come_whole() -> None:
    """A buffer has rank 0's values; extra states, tensors or not, are each rank's own."""

    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("table", torch.zeros(2))
            self.note: object = "first"

        def get_extra_state(self) -> object:
            return self.note

        def set_extra_state(self, state: object) -> None:
            self.note = state

    def rank(world: World) -> None:
        plain = nn.Sequential(Noted(), Noted())
        plain[0].table.fill_(world.rank + 1)
        plain[0].note, plain[1].note = {"scale": [2.0]}, torch.ones(world.rank + 1)
        model = npuzero.zero(nn.Sequential(Noted(), Noted()), plan="zero3", world=world)
        npuzero.load_full_state_dict(model, plain.state_dict())
        whole = npuzero.full_state_dict(model, rank0_only=False)
        assert whole.keys() == plain.state_dict().keys()
        assert whole["0.table"].tolist() == [1.0, 1.0]
        assert model[0].note == {"scale": [2.0]} == whole["0._extra_state"]
        assert whole["0._extra_state"] is not model[0].note
        assert model[1].note.shape == whole["1._extra_state"].shape == (world.rank + 1,)

    comm.run_threads(2, rank)


def test_loading_what_does_not_fit_is_an_error() -> None:
    def load(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan="zero3", world=world)
        state = build_seeded_model().state_dict()
        with pytest.raises(CheckpointError, match="missing"):
            npuzero.load_full_state_dict(model, {name: value for name, value in state.items() if name != "scale"})
        with pytest.raises(CheckpointError, match="unknown"):
            npuzero.load_full_state_dict(model, state | {"more": torch.zeros(1)})
        with pytest.raises(CheckpointError, match="shape"):
            npuzero.load_full_state_dict(model, state | {"scale": torch.zeros(2)})
        assert_same_bits(npuzero.full_state_dict(model, rank0_only=False), state)

    comm.run_threads(2, load)


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2"])
def test_torchs_load_state_dict_works_where_parameters_are_whole(plan: str) -> None:
    for precision in (None, "bf16"):

        def load(world: World, precision: str | None = precision) -> State:
            session = CutSession(build_seeded_model(seed=1), world, plan=plan, precision=precision)
            train_by_recipe(session, TrainingRecipe(steps=1))
            session.model.load_state_dict(build_seeded_model(seed=7).state_dict())
            optimizer = npuzero.AdamW(session.model.parameters(), lr=0.0, weight_decay=0.0)
            session.loss(0).backward()
            optimizer.step()  # writes the masters into the parameters
            return session.state()

        kind = torch.bfloat16 if precision else torch.float32
        expected = {name: value.to(kind) for name, value in build_seeded_model(seed=7).named_parameters()}
        for state in comm.run_threads(2, load):
            assert_same_bits({name: state[name] for name in expected}, expected)


@pytest.mark.parametrize("plan", ["zero0", "zero1"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-split"])
def test_after_torchs_load_state_dict_nothing_is_left_of_what_was_trained(plan: str, precision: str) -> None:
    """Masters are the loaded values: training goes on, to the bit, as that of a model which began with them."""

    def trained(world: World, before: int) -> State:
        session = CutSession(build_seeded_model(seed=1), world, plan=plan, precision=precision)
        train_by_recipe(session, TrainingRecipe(steps=before))
        session.model.load_state_dict(build_seeded_model(seed=7).state_dict())
        train_by_recipe(session, TrainingRecipe(steps=2))
        return session.state()

    for found, expected in comm.run_threads(2, lambda world: (trained(world, 2), trained(world, 0))):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("precision", ["bf16", "bf16-split", "fp16"])
def test_loaded_parameters_are_rounded_as_an_update_rounds_them(precision: str) -> None:
    """Also those between two values of the precision: an update that changes nothing moves no bit of them."""

    def load(world: World) -> tuple[State, State]:
        session = CutSession(build_seeded_model(), world, plan="zero1", precision=precision)
        between = {"bf16": 2.0**-8, "bf16-split": 2.0**-8, "fp16": 2.0**-11}[precision]
        session.load(
            {name: torch.full_like(value, 1 + between) for name, value in build_seeded_model().state_dict().items()}
        )
        loaded = session.state()
        optimizer = npuzero.AdamW(session.model.parameters(), lr=0.0, weight_decay=0.0)
        session.loss(0).backward()
        optimizer.step()
        return session.state(), loaded

    for stepped, loaded in comm.run_threads(2, load):
        assert_same_bits(stepped, loaded)


@every_plan
def test_gathered_parameters_are_whole(plan: str) -> None:
    def look(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan=plan, local_size=2, world=world)
        with npuzero.gathered(model):
            for name, parameter in build_seeded_model().named_parameters():
                assert torch.equal(model.get_parameter(name), parameter)
            assert model.tokens.weight.norm() > 0
        toy_loss(model, toy_tokens(0, 0, world.rank)).backward()
        with npuzero.gathered(model):
            assert torch.equal(model.head.weight, build_seeded_model().head.weight)
        if plan in CUT:
            with pytest.raises(StateError, match="while it is"):
                model.tokens.weight.norm()

    comm.run_threads(4, look)


@every_plan
def test_a_deleted_model_is_freed(plan: str) -> None:
    def live_and_die(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan=plan, local_size=2, world=world)
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            toy_loss(model, toy_tokens(step, 0, world.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            toy_loss(model, toy_tokens(2, 0, world.rank))  # waits for the pending work of the last step
        died = {"model": weakref.ref(model), "engine": weakref.ref(engine_of(model))}
        died |= {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
        died |= {f"flat {i}": weakref.ref(flat.whole) for i, flat in enumerate(engine_of(model).flats())}
        del model, optimizer
        collect_garbage()
        assert [name for name, reference in died.items() if reference() is not None] == []

    comm.run_threads(2, live_and_die)


def test_an_optimizer_over_a_deleted_model_says_so() -> None:
    def outlive(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan="zero3", world=world)
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        del model
        collect_garbage()
        with pytest.raises(StateError, match="deleted"):
            optimizer.step()

    comm.run_threads(2, outlive)


def test_a_cut_model_cannot_be_copied() -> None:
    def try_it(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan="zero3", world=world)
        with pytest.raises(StateError, match="full_state_dict"):
            copy.deepcopy(model)
        with pytest.raises(StateError, match="full_state_dict"):
            pickle.dumps(model)
        for kind in (npuzero.AdamW, functools.partial(npuzero.ZeroOptimizer, torch.optim.SGD)):
            with pytest.raises(StateError, match="full_state_dict"):
                copy.deepcopy(kind(model.parameters(), lr=0.1))

    comm.run_threads(2, try_it)
