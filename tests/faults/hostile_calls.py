"""Call the extension in ways that no checked API allows; every call must be refused. Run by test_hostile_calls.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from npuzero import _C, _native

comm, host, core = _native.comm, _native.host, _C
SLOT = 4096
MAX = 2**63 - 1

_here = torch.zeros(64)
AT = _here.data_ptr()


def thread_region(size: int = 2) -> Any:
    return comm.Region.in_threads(size, SLOT)


def build_core_communicator(
    of: Any = None, index: int = 0, ranks: Any = (0, 1), pids: Any = (), timeout_s: Any = 1.0
) -> Any:
    return comm.Communicator(of or thread_region(), index, list(ranks), list(pids), "by hand", timeout_s)


def single_rank_communicator() -> Any:
    return build_core_communicator(thread_region(1), ranks=[0])


def submit_call(**some: Any) -> Callable[[], object]:
    """Return a call with valid arguments except ``some``."""
    right = {"verb": int(comm.Verb.all_reduce), "input": AT, "output": AT, "numel": 4, "itemsize": 4}
    right |= {"wire": 0, "result": 0, "accumulate": False, "root": 0, "dtype": "float32", "tag": ""}
    return lambda: build_core_communicator().submit(**{**right, **some})


def submit_verb(name: str, **some: Any) -> Callable[[], object]:
    return submit_call(verb=int(getattr(comm.Verb, name)), **some)


def handle_of_another() -> Any:
    other = single_rank_communicator()
    return other.submit(int(comm.Verb.barrier), 0, 0, 0, 1, 0, 0, False, 0, "uint8", "")


def core_view(data: Any = AT, count: Any = 4, dtype: Any = 0, device: Any = 0) -> Any:
    return core.View(data, count, dtype, device)


def flat_adam_call(row: Any = None, ranges: Any = None, device: int = 0) -> Callable[[], object]:
    row = row or (AT, AT + 64, AT + 128, 0, 0, 0, AT + 192, 4, 0, 0, 0, 0)
    group = (*[0.5] * 9, False, False, False, 1, -1)
    return lambda: core.flat_adam([row], ranges or [(0, 4, 0, 0, 0)], [group], None, None, None, 0, device, 0)


CALLS: dict[str, Callable[[], object]] = {
    "a region of no rank": lambda: comm.Region.in_threads(0, SLOT),
    "a region of -1 ranks": lambda: comm.Region.in_threads(-1, SLOT),
    "a region of 2^31 - 1 ranks": lambda: comm.Region.in_threads(2**31 - 1, SLOT),
    "a region without slots": lambda: comm.Region.in_threads(2, 0),
    "a region with slots of -1": lambda: comm.Region.in_threads(2, -1),
    "a region whose bytes overflow": lambda: comm.Region.in_threads(2, 2**63),
    "a region with slots for no element": lambda: comm.Region.in_threads(66, SLOT),
    "a region with slots that are not aligned": lambda: comm.Region.in_threads(2, 100),
    "a shared region of no rank": lambda: comm.Region.create(0, SLOT, 1, False),
    "a shared region with slots of 2^62": lambda: comm.Region.create(2, 2**62, 1, False),
    "a region at None": lambda: comm.Region.open(None, 2, SLOT, 1),
    "a region opened for -1 ranks": lambda: comm.Region.open("/proc/self/mem", -1, SLOT, 1),
    "rank 2 of 2 leaves": lambda: thread_region().leave(2),
    "rank -1 leaves": lambda: thread_region().leave(-1),
    "rank 2^30 leaves": lambda: thread_region().leave(2**30),
    "no region": lambda: comm.Communicator(None, 0, [0, 1], [], "by hand", 1.0),
    "index 2 of 2": lambda: build_core_communicator(index=2),
    "index -1": lambda: build_core_communicator(index=-1),
    "more ranks than the region has": lambda: build_core_communicator(ranks=range(3)),
    "no ranks": lambda: build_core_communicator(ranks=[]),
    "a rank twice": lambda: build_core_communicator(ranks=[1, 1]),
    "a rank below 0": lambda: build_core_communicator(ranks=[-1, 0]),
    "too few pids": lambda: build_core_communicator(pids=[os.getpid()]),
    "a pid of -1": lambda: build_core_communicator(pids=[os.getpid(), -1]),
    "a timeout of NaN": lambda: build_core_communicator(timeout_s=float("nan")),
    "a timeout of -1": lambda: build_core_communicator(timeout_s=-1.0),
    "an endless timeout": lambda: build_core_communicator(timeout_s=float("inf")),
    "a place that is taken": lambda: (lambda of: (build_core_communicator(of), build_core_communicator(of)))(
        thread_region()
    ),
    "the pulse of process -1": lambda: comm.Pulse(-1),
    "a block of -1 bytes": lambda: comm.Block(-1),
    "a block of 2^64 - 1 bytes": lambda: comm.Block(2**64 - 1),
    "an operation by hand": lambda: comm.Operation(),
    "verb -1": submit_call(verb=-1),
    "verb 99": submit_call(verb=99),
    "elements of 0 bytes": submit_call(itemsize=0),
    "elements of 3 bytes": submit_call(itemsize=3),
    "elements of 2^62 bytes": submit_call(itemsize=2**62),
    "-1 elements": submit_call(numel=-1),
    "elements that overflow": submit_call(numel=2**62),
    "elements of all ranks that overflow": submit_verb("all_gather", numel=2**62 - 1, itemsize=2),
    "a sum of dtype 99": submit_call(wire=99, result=99),
    "a sum of dtype -1": submit_call(wire=-1, result=-1),
    "a sum of another size": submit_call(wire=1, result=1),
    "a sum of integers into floats": submit_verb("reduce_scatter", wire=4, result=0),
    "a sum into doubles": submit_verb("reduce_scatter", wire=0, result=3),
    "a sum that is not aligned": submit_call(input=AT + 1, output=AT + 1),
    "no input": submit_verb("all_gather", input=0),
    "no output": submit_verb("all_gather", output=0),
    "an input in the first page": submit_verb("all_to_all", input=8),
    "an output of -4": submit_verb("broadcast", output=-4),
    "an output at the end of memory": submit_verb("broadcast", output=2**64 - 4),
    "root 2 of 2": submit_verb("broadcast", root=2),
    "root -1": submit_verb("broadcast", root=-1),
    "a sender 2 of 2": submit_verb("send", root=2),
    "nothing to receive into": submit_verb("recv", output=0),
    "a tag of None": submit_call(tag=None),
    "waits for nothing": lambda: build_core_communicator().wait(None, lambda: None),
    "watched by nobody": lambda: (lambda of: of.wait(handle_of_another(), None))(single_rank_communicator()),
    "waits for another's operation": lambda: single_rank_communicator().wait(handle_of_another(), lambda: None),
    "asks for nothing": lambda: build_core_communicator().done(None),
    "asks for another's operation": lambda: single_rank_communicator().done(handle_of_another()),
    "pages of no stock": lambda: host.Pages(None, 4096),
    "pages of -1 bytes": lambda: host.Pages(host.Stock(), -1),
    "pages of 2^64 - 1 bytes": lambda: host.Pages(host.Stock(), 2**64 - 1),
    "a view of dtype 99": lambda: core_view(dtype=99),
    "a view of device -1": lambda: core_view(device=-1),
    "a view of device 99": lambda: core_view(device=99),
    "a view of -1 elements": lambda: core_view(count=-1),
    "a view of bytes that overflow": lambda: core_view(count=MAX),
    "a view of nothing": lambda: core_view(data=0),
    "cast of None": lambda: core.cast(None, core_view(), 0, 0, 0, 0),
    "cast into fewer elements": lambda: core.cast(core_view(), core_view(AT + 64, 2), 0, 0, 0, 0),
    "cast of doubles": lambda: core.cast(core_view(dtype=3), core_view(AT + 64), 0, 0, 0, 0),
    "cast rounded by mode 9": lambda: core.cast(core_view(), core_view(AT + 64), 9, 0, 0, 0),
    "norm into floats": lambda: core.norm(core_view(), core_view(AT + 64, 2), core_view(AT + 128, 2, 3), None, 1.0, 0),
    "norm without room": lambda: core.norm(
        core_view(), core_view(AT + 64, 2, 3), core_view(AT + 128, 0, 3), None, 1.0, 0
    ),
    "norm of fewer": lambda: core.norm(
        core_view(), core_view(AT + 64, 2, 3), core_view(AT + 128, 2, 3), core_view(count=2), 1.0, 0
    ),
    "pack of dtype 99": lambda: core.pack([(AT, AT + 64, 4, 99, 0)], 1.0, None, False, False, 0, 0),
    "pack of -1 elements": lambda: core.pack([(AT, AT + 64, -1, 0, 0)], 1.0, None, False, False, 0, 0),
    "pack from nowhere": lambda: core.pack([(0, AT + 64, 4, 0, 0)], 1.0, None, False, False, 0, 0),
    "pack on device 99": lambda: core.pack([(AT, AT + 64, 4, 0, 0)], 1.0, None, False, False, 99, 0),
    "pack scaled by an integer": lambda: core.pack(
        [(AT, AT + 64, 4, 0, 0)], 1.0, core_view(dtype=4), True, False, 0, 0
    ),
    "an update without a master": flat_adam_call((0, AT, AT, 0, 0, 0, AT, 4, 0, 0, 0, 0)),
    "an update of -1 elements": flat_adam_call((AT, AT, AT, 0, 0, 0, AT, -1, 0, 0, 0, 0)),
    "an update of dtype 99": flat_adam_call((AT, AT, AT, 0, 0, 0, AT, 4, 99, 0, 0, 0)),
    "an update by a group that is not there": flat_adam_call(ranges=[(0, 4, 7, 0, 0)]),
    "an update of a range below 0": flat_adam_call(ranges=[(-4, 4, 0, 0, 0)]),
    "an update on device 99": flat_adam_call(device=99),
    "spans without sizes": lambda: core.overlap([AT, AT], [], 1),
}


def serve_hostile_calls(pipe: Connection, names: list[str]) -> None:
    """Make the calls ``names`` one after another, and print the error of each."""
    for name in names:
        try:
            CALLS[name]()
            pipe.send("nothing")
        except (TypeError, ValueError):
            pipe.send("refused")
        except BaseException as error:
            pipe.send(f"{type(error).__name__}: {error}")
