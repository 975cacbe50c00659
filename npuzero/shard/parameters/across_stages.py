"""Exchange a model's state between pipeline stages when it is saved or loaded. A stage has only its modules.

The first rank of each stage sends the state of the stage to the rank or ranks that need the full state. Without a
pipeline there is one stage, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from npuzero.comm import World
from npuzero.errors import CheckpointError, NpuZeroError
from npuzero.plan import PIPE, STAGE
from npuzero.shard.layout.traffic_meter import CountingMesh

_Value = TypeVar("_Value")


def exchange_or_raise(
    world: World, subject: str, problem: Exception | None, value: object = None, channel: str = ""
) -> list[Any]:
    """Exchange ``value`` between all ranks unless a rank has a ``problem``. Collective.

    Raises:
        CheckpointError: on every rank, if a rank has a problem. That rank raises the problem itself if it is an
            NpuZeroError.
    """
    said = world.exchange([problem and f"{type(problem).__name__}: {problem}", value], channel)
    if isinstance(problem, NpuZeroError):
        raise problem
    for rank, (other, _) in enumerate(said):
        if other is not None:
            raise CheckpointError(
                subject,
                expected="every rank to do its part",
                got=f"on rank {rank}: {other}",
                do="Mend it on that rank.",
                rank=rank,
            ) from problem
    return [value for _, value in said]


def pick_per_stage(mesh: CountingMesh, said: Sequence[_Value]) -> list[_Value]:
    """Return the values of the first rank of each stage, in stage order, from the values of all ranks."""
    return list(said[:: mesh.size(STAGE)])  # pipe is the outermost axis


def merge_state_names(names: Iterable[str]) -> list[str]:
    """Return each of ``names`` once, in the order of the full model.

    Parts of the model keep the order of their first name in ``names``. Numbered parts, which stages may hold
    alternately, are sorted by number.
    """
    tree: dict[str, Any] = {}
    for name in names:
        place = tree
        for part in name.split("."):
            place = place.setdefault(part, {})
        place[""] = name
    return list(_iter_leaves(tree))


def _iter_leaves(tree: dict[str, Any]) -> Iterable[str]:
    numbers = iter(sorted((part for part in tree if part.isdecimal()), key=int))
    for part in [next(numbers) if part.isdecimal() else part for part in tree]:
        if part:
            yield from _iter_leaves(tree[part])
        else:
            yield tree[part]


class StageRelay:
    """Send tensors over the host between the ranks that have the same index in each stage.

    Args:
        to_all: True: a stage broadcasts to the ranks of all stages. False: the first rank of each stage sends to
            rank 0.

    Attributes:
        stage: index of this rank's stage in the pipeline.
        first: whether this is the first rank of its stage.
        many: whether there is more than one stage.
        gives: whether this rank sends the tensors of its stage.
        takes: whether this rank receives the tensors of other stages.
    """

    def __init__(self, mesh: CountingMesh, to_all: bool = False) -> None:
        self._mesh = mesh
        self._to_all = to_all
        self.first = first = mesh.index(STAGE) == 0
        self.stage = mesh.index((PIPE,))
        self.many = mesh.size((PIPE,)) > 1
        self.gives = self.many and (to_all or (first and self.stage > 0))
        self.takes = to_all or (first and self.stage == 0)

    def give(self, tensor: Tensor) -> None:
        """Send ``tensor`` of this stage to the ranks that take it."""
        if not self.gives:
            return
        if not self._to_all:
            self.send(tensor, 0)
        elif tensor.numel():
            self._mesh.host((PIPE,)).broadcast(_host_bytes(tensor), root=self.stage, tag="state").wait()

    def send(self, tensor: Tensor, stage: int) -> None:
        """Send ``tensor`` to ``stage``, which takes it."""
        if tensor.numel():
            self._mesh.host((PIPE,)).send(_host_bytes(tensor), stage, tag="state").wait()

    def take(self, stage: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return, on the host, the tensor that ``stage`` gives or sends."""
        found = torch.empty(tuple(shape), dtype=dtype)
        if found.numel():
            line, raw = self._mesh.host((PIPE,)), _host_bytes(found)
            (
                line.broadcast(raw, root=stage, tag="state") if self._to_all else line.recv(raw, stage, tag="state")
            ).wait()
        return found


def _host_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on the host; a view if the tensor is contiguous there."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
