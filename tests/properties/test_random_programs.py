"""Training programs nobody would write, by chance: whatever is legal in torch, npuzero does as plain torch does.

A program is a model, a plan, settings and a sequence of statements, all of it drawn from one seed, which a failing
test names. It runs three times: by plain torch, by npuzero, and by npuzero with other settings, none of which may move
a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from npuzero import comm
from npuzero.comm import World
from properties.interpreter import execute_program
from properties.programs import RandomProgram
from world.train import CutSession, PlainSession, State, assert_same_bits, assert_states_close

#: What another order of sums may make of a program in float32, relative to each tensor's largest magnitude.
BOUND = 5e-5
#: What rounding to bfloat16 may make of it, relative to how far training has moved the model.
BF16_BOUND = 0.08


def run_random_program(program: RandomProgram) -> State:
    """The program's outcome by npuzero, the same to the bit on every rank."""
    size, local_size = program.shape
    models = [program.model() for _ in range(size)]  # made here: the generator that fills them is the process's own

    def rank(world: World) -> State:
        options = {"plan": program.plan, "local_size": local_size, "settings": program.settings}
        return execute_program(CutSession(models[world.rank], world, precision=program.precision, **options), program)

    states = comm.run_threads(size, rank)
    for state in states[1:]:
        assert_same_bits(state, states[0])
    return states[0]


def check_random_program(seed: int, twice: bool = False) -> None:
    program = RandomProgram.of(seed)
    try:
        found = run_random_program(program)
        assert_same_bits(run_random_program(replace(program, settings=program.others)), found)
        if twice:
            assert_same_bits(run_random_program(program), found)
        size = program.shape[0]
        expected = execute_program(PlainSession(program.model(), range(size), size), program)
        if program.precision == "fp32":
            assert_states_close(found, expected, BOUND)
        else:
            assert_moved_alike(program.model().state_dict(), found, expected)
    except BaseException as error:
        error.add_note(str(program))
        raise


def assert_moved_alike(first: State, found: State, expected: State) -> None:
    """The model has moved as far as in float32, and to the same place, but for rounding."""
    assert found.keys() == expected.keys()

    def distance(of: Callable[[str], Tensor]) -> float:
        return float(torch.cat([of(name).double().reshape(-1) for name in first]).norm())

    moved = distance(lambda name: expected[name] - first[name])
    apart = distance(lambda name: found[name].float() - expected[name])
    rounding = distance(lambda name: first[name]) * 2**-8
    assert apart <= BF16_BOUND * moved + rounding, f"{apart} apart after a way of {moved}"


@pytest.fixture(autouse=True, scope="module")
def _one_thread_per_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(25))
def test_a_random_program_runs_as_by_plain_torch(seed: int) -> None:
    check_random_program(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_many_random_programs_run_as_by_plain_torch(seed: int) -> None:
    check_random_program(seed, twice=seed % 4 == 0)
