"""The interface of collectives, and the checks that every implementation shares.

A communicator joins an ordered group of ranks. Its collectives are asynchronous: they return a :class:`Handle` at once
and run in the order of the calls; the caller keeps the tensors alive and untouched until ``wait()``. All ranks of the
group call the same collectives in the same order with the same sizes, dtypes and tags.

Invariants:
    * arguments are checked before anything is sent: a :class:`ContractError` leaves the communicator as it was;
    * sums run in ascending order of the global ranks, whatever the group's order; bf16 and f16 are added in f32 and
      rounded once (nccl and hccl sum as they do: see process_group.py);
    * after a :class:`CollectiveError` the communicator is broken, and every further call raises the same error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch

from npuzero.comm.board import Board, Failure, Meeting, Watch, aborted
from npuzero.comm.checks import (
    INTEGERS,
    WIRES,
    check_apart,
    check_dtype,
    check_equal_dtypes,
    check_flats,
    check_parts,
    is_part,
)
from npuzero.device import Handle
from npuzero.errors import ContractError


class Communicator(ABC):
    """Run collectives over an ordered group of ranks, for one of them.

    Attributes:
        ranks: of the run, in the order of the group.
        rank: this rank's index in it.
        size: how many there are.
        name: of the channel: two communicators of the same ranks do not disturb each other.
        device: where the tensors live.
        place: its name on the board, the same on all ranks.
        started: operations that this rank has started.
        board: where this rank says that it waits, in a world.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str, device: torch.device) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.name = name
        self.device = device
        self.place = f"{name}/{'-'.join(map(str, self.ranks))}"
        self.started = 0
        self.board: Board | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, ranks={self.ranks}, rank={self.rank})"

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of ``numel`` zeros, in memory that the other ranks can read in place where possible.

        The input of a collective (the shard of all_gather, the whole of reduce_scatter, the input of all_to_all, the
        buffer of all_reduce and broadcast) is then not copied on its way: over shared memory the other ranks read it,
        or a view of it, in its place. Results need no such buffer. Ranks need not agree on which of them use one. The
        memory goes back when the last view of it does; it cannot be resized. Elsewhere: an ordinary tensor.

        Raises:
            OutOfSpace: no memory is left.
        """
        return torch.zeros(numel, dtype=dtype, device=self.device)

    @final
    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, *, tag: str = "") -> Handle:
        """Gather the shards[n] of all ranks into whole[size * n], in group order; any dtype.

        ``shard`` may be this rank's own part of ``whole``.
        """
        check_flats("all_gather", self.device, whole=whole, shard=shard)
        check_parts("all_gather", whole, shard, self.size)
        check_equal_dtypes("all_gather", whole=whole, shard=shard)
        if not is_part(whole, shard, self.rank):
            check_apart("all_gather", whole=whole, shard=shard)
        return self._all_gather(whole, shard, tag)

    @final
    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, *, accumulate: bool = False, tag: str = ""
    ) -> Handle:
        """Set shard[n] to the sum over all ranks of this rank's part of whole[size * n]; f32, bf16 or f16.

        ``shard`` has the dtype of ``whole``, or float32. ``accumulate``: the sum is added to ``shard`` (the sum first,
        then the addition, then one rounding). ``shard`` may be this rank's own part of ``whole``, then without
        ``accumulate``. The rest of ``whole`` keeps its values.
        """
        check_flats("reduce_scatter", self.device, shard=shard, whole=whole)
        check_dtype("reduce_scatter: whole", whole, WIRES)
        check_dtype("reduce_scatter: shard", shard, (whole.dtype, torch.float32))
        check_parts("reduce_scatter", whole, shard, self.size)
        if accumulate or not is_part(whole, shard, self.rank):
            check_apart("reduce_scatter", shard=shard, whole=whole)
        return self._reduce_scatter(shard, whole, accumulate, tag)

    @final
    def all_reduce(self, buffer: torch.Tensor, *, tag: str = "") -> Handle:
        """Sum all ranks' buffers[n] in place, to the same bits on every rank. Integers wrap around."""
        check_flats("all_reduce", self.device, buffer=buffer)
        check_dtype("all_reduce: buffer", buffer, (*WIRES, torch.float64, *INTEGERS))
        return self._all_reduce(buffer, tag)

    @final
    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, *, tag: str = "") -> Handle:
        """Send part j of inp[size * n] to rank j; part i of out[size * n] comes from rank i; any dtype."""
        check_flats("all_to_all", self.device, out=out, inp=inp)
        check_equal_dtypes("all_to_all", out=out, inp=inp)
        if out.numel() != inp.numel() or inp.numel() % self.size:
            raise ContractError(
                "all_to_all",
                expected=f"out and inp of the same size, a multiple of {self.size} ranks",
                got=f"{out.numel()} and {inp.numel()} elements",
                do="Pad both to equal parts.",
            )
        check_apart("all_to_all", out=out, inp=inp)
        return self._all_to_all(out, inp, tag)

    @final
    def broadcast(self, buffer: torch.Tensor, *, root: int, tag: str = "") -> Handle:
        """Copy the buffer[n] of the rank with index ``root`` in the group to all ranks, in place; any dtype."""
        check_flats("broadcast", self.device, buffer=buffer)
        if not 0 <= root < self.size:
            raise ContractError(
                "broadcast: root",
                expected=f"an index in the group, 0 to {self.size - 1}",
                got=str(root),
                do="Give the position in communicator.ranks, not the global rank.",
            )
        return self._broadcast(buffer, root, tag)

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called it; operations that were under way are done then."""

    def meeting(self, number: int, verb: str, tag: str) -> Meeting:
        """Return the operation ``number`` as a place where ranks meet."""
        what = f"{verb} #{number}" + (f" tagged {tag!r}" if tag else "")
        return Meeting(self.place, number, self.ranks, f"{what} of {self.name!r}")

    def watch(self, number: int, verb: str, tag: str) -> Watch:
        """Return the watch for a wait of the calling thread for the operation ``number``."""
        return Watch(self.board, self.meeting(number, verb, tag), self.ranks[self.rank])

    @final
    def abort(self, reason: str) -> None:
        """Break the communicator, on every rank where the implementation can."""
        self.fail(aborted(self.ranks[self.rank], reason))

    @abstractmethod
    def fail(self, failure: Failure) -> None:
        """Break it likewise, for ``failure``; the first one stays."""

    def drain(self) -> None:
        """Wait until operations started here are done or have failed: other ranks may need this one's part."""
        return

    @abstractmethod
    def close(self) -> None:
        """Free resources; operations not waited for fail. Calling it again does nothing."""

    @abstractmethod
    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor, tag: str) -> Handle: ...

    @abstractmethod
    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, accumulate: bool, tag: str) -> Handle: ...

    @abstractmethod
    def _all_reduce(self, buffer: torch.Tensor, tag: str) -> Handle: ...

    @abstractmethod
    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: str) -> Handle: ...

    @abstractmethod
    def _broadcast(self, buffer: torch.Tensor, root: int, tag: str) -> Handle: ...
