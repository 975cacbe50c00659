"""Digests of inputs: ranks that share a batch compare what they were given.

Ranks along ``tensor``, and the stages of one pipeline, compute one model on one batch. A rank that is fed another one
(by its own rank, where the index along the data axes is meant) makes numbers that belong to no batch at all. So each
keeps a digest of the inputs of a step's first forward, and the vote that the step has anyway carries it: of each bit
the first rank of a group adds (ranks - 1) times its own, the others take theirs away, so that equal ones sum to 0.

A digest reads a bounded number of elements: all of a small tensor, else evenly spaced ones, others in each step. On an
accelerator it is computed there, copied to the host beside training, and part of the next step's vote, so that the
host waits for nothing that is not long done.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from npuzero import device
from npuzero.comm import Mesh
from npuzero.errors import ConfigError
from npuzero.plan import DIGEST_BITS, Axes
from npuzero.shard.nested import tensors_of
from npuzero.shard.writes import digest

#: Elements of a tensor that a digest reads at most.
MOST_ELEMENTS = 2**16

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

#: What a rank says of its inputs: the first rank of its group, and the digest that its last ballot had.
Said = tuple[int, int]


class SharedInputs:
    """Compare what the ranks along ``axes`` are given; they are to be given the same.

    Args:
        axes: ``()``: no rank shares its inputs, and nothing is done.
    """

    def __init__(self, mesh: Mesh, axes: Axes) -> None:
        ranks = mesh.ranks(axes)
        self._axes = axes
        self._first = ranks[0]
        self._weight = len(ranks) - 1 if mesh.world.rank == ranks[0] else -1
        self._device = mesh.world.device
        self._now: Callable[[], int] | None = None
        self._before: Callable[[], int] | None = None
        self._votes = 0
        self._said = 0
        self.many = len(ranks) > 1

    def note(self, inputs: Any) -> None:
        """Take the digest of ``inputs``, nested as a forward takes them, if they are the first since the last vote."""
        if self.many and self._now is None and not device.get(self._device).capturing():
            self._now = _begin_digest(inputs, self._votes, self._device)

    def ballot(self) -> list[int]:
        """Return what this rank puts into the vote, one number a bit: over the group they sum to 0 where it agrees."""
        if not self.many:
            return [0] * DIGEST_BITS
        late = self._device.type != "cpu"
        ready, self._before, self._now = (self._before if late else self._now), self._now, None
        self._votes += 1
        self._said = 0 if ready is None else ready()
        # By group: two groups with the same two batches, the other way round, must not cancel each other.
        mixed = zlib.crc32(f"{self._first} {self._said}".encode()) if self._said else 0
        return [self._weight * (mixed >> place & 1) for place in range(DIGEST_BITS)]

    def said(self) -> Said:
        """Return what the last ballot was about."""
        return self._first, self._said

    def compare(self, said: Sequence[Said], ranks: Sequence[int]) -> None:
        """Raise where ranks of a group have said different things.

        Raises:
            ConfigError: some have; it names a group, and the ranks in it that differ from its first.
        """
        groups: dict[int, dict[int, int]] = {}
        for rank, (first, theirs) in zip(ranks, said, strict=True):
            groups.setdefault(first, {})[rank] = theirs
        for group in groups.values():
            usual = next(iter(group.values()))
            others = [rank for rank, theirs in group.items() if theirs != usual]
            if others:
                raise self._different([*group], others)

    def _different(self, group: list[int], others: list[int]) -> ConfigError:
        along = " and ".join(self._axes)
        late = ", in the step before" if self._device.type != "cpu" else ""
        return ConfigError(
            f"inputs of a step's first forward along {along}",
            expected=f"the same on ranks {', '.join(map(str, group))}, which compute one batch together",
            got=f"others on rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} than on rank {group[0]}{late}",
            do="Seed and divide data by the index along the data axes, not by the rank: "
            "index = mesh.index(npuzero.plan.DATA) of mesh.size(npuzero.plan.DATA), as in "
            "DistributedSampler(data, num_replicas=..., rank=index); or take npuzero.GlobalBatch(..., mesh=mesh). "
            "zero_grad() drops these gradients.",
            ranks=group,
            rank=others[0],
            axes=self._axes,
        )


def _begin_digest(inputs: Any, step: int, where: torch.device) -> Callable[[], int]:
    """Return what gives the digest of all tensors in ``inputs``; it waits, if at all, for this work alone."""
    tensors = tensors_of(inputs)[0]
    shapes = zlib.crc32(repr([(tuple(tensor.shape), tensor.dtype) for tensor in tensors]).encode())
    here: list[Tensor] = []
    there: list[Tensor] = []
    for tensor in tensors:
        if _readable(tensor):
            (here if tensor.device.type == "cpu" else there).append(_digest(tensor, step))
    if not there:
        return lambda: _joined(shapes, here)
    host = torch.empty(len(there), 2, dtype=torch.int64, pin_memory=True)
    host.copy_(torch.stack(there), non_blocking=True)
    event = device.get(where).make_event()
    event.record()

    def read() -> int:
        event.synchronize()
        return _joined(shapes, [*here, host])

    return read


def _joined(shapes: int, digests: Sequence[Tensor]) -> int:
    """Return one number of all digests; never 0, which stands for none."""
    return zlib.crc32(repr([shapes, *(each.tolist() for each in digests)]).encode()) or 1


def _readable(tensor: Tensor) -> bool:
    """Return whether elements of ``tensor`` can be read as they lie."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized and not tensor.is_meta
    functional = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return plain and not functional and not is_traceable_wrapper_subclass(tensor)


@torch.no_grad()
def _digest(tensor: Tensor, step: int) -> Tensor:
    """Return [2] int64 over at most :data:`MOST_ELEMENTS` elements, where they lie."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.numel() <= MOST_ELEMENTS:
            sample = tensor.detach().reshape(-1)
        else:  # without a copy of all of it, whatever its strides; odd, so as not to stay in one column of it
            stride = -(-tensor.numel() // MOST_ELEMENTS) | 1
            places = torch.arange(step % stride, tensor.numel(), stride, device=tensor.device)
            sample = torch.take(tensor.detach(), places)
        sample = sample.contiguous()
        return digest(sample.view(_INTEGERS.get(sample.element_size(), torch.int64)))
