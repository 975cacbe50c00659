"""The ranks of all stages of a pipeline, as a model's state goes in or out: each stage knows its own modules alone.

The first rank of each stage speaks for it, and gives what the stage has to the rank, or the ranks, that want all of it.
Without a pipeline there is one stage, and nothing is sent.
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
    """Exchange what every rank says, if none has a problem. Collective.

    Raises:
        CheckpointError: on every rank, if one has; on that one the problem itself, if it is one of ours.
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
    """Return of what the ranks of all stages said, by rank, that of the first rank of each stage, in their order."""
    return list(said[:: mesh.size(STAGE)])  # pipe is the outermost axis


def merge_state_names(names: Iterable[str]) -> list[str]:
    """Return each of ``names`` once, in the order of one model that has them all.

    Parts of the model come in the order in which ``names`` have them first; numbered ones, which stages may have in
    turn, by their numbers.
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
    """Move tensors between the ranks at this rank's place in all stages, over the host.

    Args:
        to_all: what a stage gives is for the ranks of all other stages; else for rank 0 alone, from the first ranks of
            the other stages.

    Attributes:
        stage: this rank's place in the pipeline.
        first: whether it is its stage's first rank.
        many: whether there are other stages.
        gives: whether this rank gives what its stage has.
        takes: whether it takes what other stages have.
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
        """Give ``tensor``, which this stage has, to those that take it."""
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
        """Return, on the host, what ``stage`` gives, or sends."""
        found = torch.empty(tuple(shape), dtype=dtype)
        if found.numel():
            line, raw = self._mesh.host((PIPE,)), _host_bytes(found)
            (
                line.broadcast(raw, root=stage, tag="state") if self._to_all else line.recv(raw, stage, tag="state")
            ).wait()
        return found


def _host_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, on the host; of one that lies there in one piece a view."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
