"""Bad inputs: ops and communicators (tests/ops and tests/world have the rest)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from npuzero import CollectiveError, ContractError, ops
from npuzero.comm import World

from .case import BadInputTable

TABLE = BadInputTable()
bad = TABLE.bad


def _call_flat_adam(**changed: Any) -> None:
    arguments: dict[str, Any] = {
        "master": torch.ones(8),
        "exp_avg": torch.zeros(8),
        "exp_avg_sq": torch.zeros(8),
        "grad": torch.ones(8),
    }
    segment = ops.AdamSegment(0, 8, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, True, False, False)
    segments = [replace(segment, **s) for s in changed.pop("segments", [{}])]
    arguments.update(changed)
    ops.flat_adam(
        arguments.pop("master"),
        arguments.pop("exp_avg"),
        arguments.pop("exp_avg_sq"),
        arguments.pop("grad"),
        segments,
        **arguments,
    )


_SHARED = torch.ones(12)
for _name, _make, _says in [
    ("flat_adam: moment of another dtype", lambda: _call_flat_adam(exp_avg=torch.zeros(8).half()), ("exp_avg",
        "float16")),
    ("flat_adam: gradient of another size", lambda: _call_flat_adam(grad=torch.ones(9)), ("grad", "8", "9")),
    ("flat_adam: gradient on meta", lambda: _call_flat_adam(grad=torch.ones(8, device="meta")), ("grad", "meta")),
    ("flat_adam: overlap", lambda: _call_flat_adam(master=_SHARED[:8], grad=_SHARED[4:]), ("overlap|apart",)),
    ("flat_adam: segment beyond the end", lambda: _call_flat_adam(segments=[{"end": 9}]), ("9",)),
    ("flat_adam: segments overlap", lambda: _call_flat_adam(segments=[{"end": 5}, {"begin": 4}]),
        ("ascending|overlap",)),
    ("flat_adam: step 0", lambda: _call_flat_adam(segments=[{"step": 0}]), ("step", "0")),
    ("cast: another size", lambda: ops.cast(torch.ones(3), torch.ones(4)), ("3", "4")),
    ("cast: unknown rounding", lambda: ops.cast(torch.ones(3), torch.ones(3), rounding="up"), ("rounding", "up")),
    ("cast: not contiguous", lambda: ops.cast(torch.ones(6)[::2], torch.ones(3)), ("contiguous",)),
    ("norm: out of another size", lambda: ops.norm(torch.ones(3), torch.ones(3)), ("out",)),
    ("pack: an offset too few", lambda: ops.pack([torch.ones(3)], [], torch.ones(4)), ("offset",)),
    ("pack: beyond the wire", lambda: ops.pack([torch.ones(3)], [2], torch.ones(4)), ("4",)),
    ("pack: double", lambda: ops.pack([torch.ones(3, dtype=torch.float64)], [0], torch.ones(4)), ("float64",)),
    ("unpack: tensors overlap", lambda: ops.unpack(torch.ones(8), [_SHARED[:4], _SHARED[2:6]], [0, 4]), ("apart",)),
]:  # fmt: skip
    bad(_name, ContractError, *_says)(lambda world, make=_make: make())

for _name, _call, _says in [
    ("all_gather: wrong size", lambda group: group.all_gather(torch.ones(5), torch.ones(2)), ("5", "2")),
    ("reduce_scatter: int", lambda group: group.reduce_scatter(torch.ones(1).int(), torch.ones(2).int()), ("int32",)),
    ("all_reduce: on meta", lambda group: group.all_reduce(torch.ones(2, device="meta")), ("meta",)),
    ("all_to_all: not divisible", lambda group: group.all_to_all(torch.ones(3), torch.ones(3)), ("3",)),
    ("broadcast: root outside", lambda group: group.broadcast(torch.ones(3), root=2), ("root", "2")),
    ("send: to oneself", lambda group: group.send(torch.ones(3), group.rank), ("send: to", "another rank")),
    ("recv: from nobody", lambda group: group.recv(torch.ones(3), -1), ("recv: from_", "another rank", "-1")),
]:
    bad(_name, ContractError, *_says, ranks=2)(lambda world, call=_call: call(world.communicator((0, 1), "all")))

bad("communicator without oneself", ContractError, r"with rank \d among", ranks=2)(
    lambda world: world.communicator((1 - world.rank,), "all")
)
bad("communicator of a rank twice", ContractError, "different", ranks=2)(
    lambda world: world.communicator((0, 0), "all")
)


@bad("ranks send different sizes", CollectiveError, "rank 0", "rank 1", "3", "4", ranks=2)
def _(world: World) -> None:
    world.communicator((0, 1), "all").all_reduce(torch.ones(3 + world.rank)).wait()


@bad("ranks send what is not received", CollectiveError, "rank 0", "rank 1", "ahead", "back", ranks=2)
def _(world: World) -> None:
    group = world.communicator((0, 1), "all")
    (group.recv(torch.ones(3), 0, "back") if world.rank else group.send(torch.ones(3), 1, "ahead")).wait()


bad("the mean of a text", ContractError, r"world\.mean", r"'x' \(str\)", r"world\.exchange", ranks=2)(
    lambda world: world.mean("x")  # type: ignore[arg-type]
)
bad("an exchange of a tensor", ContractError, r"world\.exchange", r"\(Tensor\)", r"world\.mean", ranks=2)(
    lambda world: world.exchange(torch.ones(2))
)
