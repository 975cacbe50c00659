"""Digests of inputs: check that ranks of one batch have equal inputs, and that data ranks have different ones.

Ranks along ``tensor``, and the stages of one pipeline, compute one model on one batch. A rank with another batch
(chosen by rank instead of by the index along the data axes) would silently make results meaningless. So each rank keeps
a digest of the inputs of a step's first forward, and sends it in the step's vote, an all_reduce. For each bit the first
rank of a group contributes (ranks - 1) times its bit and each further rank subtracts its bit, so that equal digests sum
to 0.

Data ranks should have different batches. One further number in the vote, of the same kind, tells whether all have the
same; only in the first steps, since a program without a sampler repeats it in each.

A digest reads a bounded number of elements: all of a small tensor, else evenly spaced ones, different ones in each
step. On an accelerator it is computed on the device, copied to the host asynchronously, and sent in the next step's
vote, so that the host never waits for unfinished work.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from npuzero import device
from npuzero.comm import Mesh
from npuzero.errors import ConfigError
from npuzero.plan import DATA, DIGEST_BITS, SEQUENCE, Axes
from npuzero.shard.layout.nested_tensors import find_nested_tensors
from npuzero.shard.parameters.user_writes import digest_integers

#: Maximum number of elements of a tensor that a digest reads.
MOST_ELEMENTS = 2**16

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

#: Consecutive steps with one batch on all data ranks before rank 0 warns: one may be a warm-up, or chance.
_REPEATED_STEPS = 3
#: Votes that check for it; on an accelerator the first vote has no digest yet.
_REPEATED_VOTES = 4
#: Upper bound of digests in these votes, so that sums over thousands of ranks are exact in float32.
_REPEATED_BELOW = 2**12

#: A rank's report of its inputs: the first rank of its group, and the digest in its last ballot.
Said = tuple[int, int]


class RepeatedBatch:
    """Warn if all data ranks have the same batch in each step, as without a DistributedSampler.

    It is only a warning: constant inputs, or one batch on all ranks on purpose, are legal.
    """

    def __init__(self, mesh: Mesh) -> None:
        readers = mesh.ranks(DATA)[:: mesh.size((SEQUENCE,))]
        rank = mesh.world.rank
        # One reader per batch: ranks along sequence share it, and each place along tensor votes separately.
        self._weight = 0 if rank not in readers else len(readers) - 1 if rank == readers[0] else -1
        self._rank = rank
        self._ranks = len(readers)
        self._votes = _REPEATED_VOTES if len(readers) > 1 else 0
        self._said = 0
        self._steps = 0

    @property
    def watching(self) -> bool:
        return self._votes > 0

    def ballot(self, digest: int) -> int:
        """Return this rank's number in the vote: the sum over all ranks is 0 if all digests are equal.

        Args:
            digest: digest of inputs with elements; 0: no such inputs.
        """
        self._said = 1 + digest % (_REPEATED_BELOW - 1) if digest and self.watching else 0
        return self._weight * self._said

    def look(self, total: float) -> None:
        """Take the sum over all ranks; warn on rank 0, once, if it was 0 in several consecutive steps."""
        if not self.watching:
            return
        self._votes -= 1
        self._steps = self._steps + 1 if self._said and not total else 0
        if self._steps < _REPEATED_STEPS:
            return
        self._votes = 0
        if self._rank == 0:
            warnings.warn(
                f"Every data rank is given the same batch: the inputs of {_REPEATED_STEPS} steps in a row were equal "
                f"on all {self._ranks}, which together compute what one would. Give each a part: DistributedSampler("
                "data, num_replicas=mesh.size(npuzero.plan.DATA), rank=mesh.index(npuzero.plan.DATA)), or "
                "npuzero.GlobalBatch; seed random inputs by that index. Where it is meant: "
                "warnings.filterwarnings('ignore', message='Every data rank').",
                RuntimeWarning,
                stacklevel=2,
            )


class SharedInputs:
    """Check that the ranks along ``axes`` have the same inputs.

    Args:
        axes: mesh axes with shared inputs; ``()``: nothing is compared.
        repeated: checks the same digests over the data ranks in the first steps.
    """

    def __init__(self, mesh: Mesh, axes: Axes, repeated: RepeatedBatch | None = None) -> None:
        ranks = mesh.ranks(axes)
        self._axes = axes
        self._first = ranks[0]
        self._weight = len(ranks) - 1 if mesh.world.rank == ranks[0] else -1
        self._device = mesh.world.device
        self._now: _Pending | None = None
        self._before: _Pending | None = None
        self._votes = 0
        self._said = 0
        self._elements = False  # whether the digest read any elements
        self._repeated = repeated
        self.many = len(ranks) > 1

    def note(self, inputs: Any) -> None:
        """Take the digest of ``inputs``, a forward's nested arguments, if they are the first since the last vote."""
        wanted = self.many or (self._repeated is not None and self._repeated.watching)
        if wanted and self._now is None and not device.get(self._device).capturing():
            self._now = begin_digest(inputs, self._votes, self._device)

    def begin_vote(self) -> None:
        """Take the digest for the next vote: on an accelerator that of the previous step."""
        late = self._device.type != "cpu"
        ready, self._before, self._now = (self._before if late else self._now), self._now, None
        self._votes += 1
        self._said, self._elements = (0, False) if ready is None else (ready.read(), ready.elements)

    def ballot_of_data(self) -> int:
        """Return this rank's number in the vote on whether all data ranks have one batch."""
        return self._repeated.ballot(self._said if self._elements else 0) if self._repeated else 0

    def look_at_data(self, total: float) -> None:
        """Take the sum of these numbers over all ranks."""
        if self._repeated:
            self._repeated.look(total)

    def ballot(self) -> list[int]:
        """Return this rank's numbers in the vote, one per bit: they sum to 0 over a group with equal digests."""
        if not self.many:
            return [0] * DIGEST_BITS
        # Mix in the group: two groups with the same two batches, exchanged, must not cancel.
        mixed = zlib.crc32(f"{self._first} {self._said}".encode()) if self._said else 0
        return [self._weight * (mixed >> place & 1) for place in range(DIGEST_BITS)]

    def said(self) -> Said:
        """Return the group and digest of the last ballot."""
        return self._first, self._said

    def compare(self, said: Sequence[Said], ranks: Sequence[int]) -> None:
        """Compare the reports of all ranks.

        Raises:
            ConfigError: digests differ in a group; names the group, and its ranks that differ from the first.
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


class _Pending(NamedTuple):
    """Hold a digest in progress.

    Attributes:
        read: returns the digest; waits at most for the digest's own copy.
        elements: whether the digest reads any elements.
    """

    read: Callable[[], int]
    elements: bool


def begin_digest(inputs: Any, step: int, where: torch.device) -> _Pending:
    """Start the digest of all tensors in ``inputs``."""
    tensors = find_nested_tensors(inputs)[0]
    # Shapes and dtypes of all tensors, since elements of some cannot be read.
    shapes = zlib.crc32(repr([(tuple(tensor.shape), tensor.dtype) for tensor in tensors]).encode())
    here: list[Tensor] = []
    there: list[Tensor] = []
    elements = False
    for tensor in tensors:
        if _is_readable(tensor):
            elements = elements or tensor.numel() > 0
            (here if tensor.device.type == "cpu" else there).append(_sample_digest(tensor, step))
    if not there:
        return _Pending(lambda: _combine_digests(shapes, here), elements)
    host = torch.empty(len(there), 2, dtype=torch.int64, pin_memory=True)
    host.copy_(torch.stack(there), non_blocking=True)
    event = device.get(where).make_event()
    event.record()

    def read() -> int:
        event.synchronize()
        return _combine_digests(shapes, [*here, host])

    return _Pending(read, elements)


def _combine_digests(shapes: int, digests: Sequence[Tensor]) -> int:
    """Combine digests into one number; never 0, which means no digest."""
    return zlib.crc32(repr([shapes, *(each.tolist() for each in digests)]).encode()) or 1


def _is_readable(tensor: Tensor) -> bool:
    """Return whether elements of ``tensor`` can be read directly."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized and not tensor.is_meta
    functional = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return plain and not functional and not is_traceable_wrapper_subclass(tensor)


@torch.no_grad()
def _sample_digest(tensor: Tensor, step: int) -> Tensor:
    """Return the digest, [2] int64, of at most :data:`MOST_ELEMENTS` elements, on the tensor's device."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.numel() <= MOST_ELEMENTS:
            sample = tensor.detach().reshape(-1)
        else:  # do not copy the full tensor, for any strides; an odd stride does not stay in one column
            stride = -(-tensor.numel() // MOST_ELEMENTS) | 1
            places = torch.arange(step % stride, tensor.numel(), stride, device=tensor.device)
            sample = torch.take(tensor.detach(), places)
        sample = sample.contiguous()
        return digest_integers(sample.view(_INTEGERS.get(sample.element_size(), torch.int64)))
