"""The npu kernels in the emulator. The whole grid of the ops' own tests runs on them by `make emulate`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from npu import exercise
from npu.conftest import Install
from npu.emulated import Emulator, EmulatorFault, build_emulated_kernels, default_emulator

OPS = tuple(exercise.ALL)


@pytest.mark.parametrize("op", OPS)
def test_equals_the_reference_under_every_schedule(op: str, install: Install) -> None:
    install(default_emulator())
    exercise.ALL[op]()


@pytest.mark.parametrize("op", OPS)
def test_no_bit_depends_on_the_number_of_cores(op: str, install: Install) -> None:
    """Every count of cores equals the reference; for norm, whose sums are its own, see the next test."""
    emulated = install(Emulator(build_emulated_kernels()))
    emulated.schedules = (4,)
    for cores in (1, 2, 5, 48):
        emulated.cores, emulated.seed = cores, cores
        exercise.ALL[op]()


def find_kernel_fault(call: Callable[[], None]) -> str:
    """What finds fault with a call: a check of the emulator, "values" where results are wrong, or nothing."""
    try:
        call()
    except EmulatorFault as fault:
        return fault.check
    except (AssertionError, pytest.fail.Exception):
        return "values"
    return ""


# Where order alone is not needed: the end of a kernel waits for the last stores by itself, and the scalar unit of norm
# for every block's vectors before it issues the next load. The calls are: without them tensors stay in use, flags set.
_UNNEEDED_ORDER = {("flat.h", "WaitFlag"), ("norm.cpp", "FreeTensor")}


@pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.slow if op == "flat_adam" else ()) for op in OPS])
def test_every_synchronization_is_needed(op: str, install: Install) -> None:
    """Each one removed from the kernel, wholly or but for its bookkeeping, is found; one schedule is enough.

    What flat_lion shares with flat_adam is needed by one of them.
    """
    emulated = install(Emulator(build_emulated_kernels()))
    emulated.schedules = (0,)
    if op == "flat_lion":
        exercise.exercise_flat_adam()
    shared = set(emulated.sites)
    emulated.sites.clear()
    exercise.ALL[op]()
    sites = sorted(emulated.sites - shared)
    assert {name for _, name in sites} >= {"PipeBarrier"}
    survived = []
    for place, name in sites:
        for how in (1, 2):
            if how == 1 and name == "AllocTensor":
                continue  # there is no kernel without it
            with emulated.without(how, place):
                if not find_kernel_fault(exercise.ALL[op]):
                    survived.append((place, name, how))
    needed = [one for one in survived if one[2] == 1 or (one[0].partition(":")[0], one[1]) not in _UNNEEDED_ORDER]
    assert needed == [], needed
    assert len(survived) <= 2
