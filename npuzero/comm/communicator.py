"""The interface of collectives, and the checks that every implementation shares.

A communicator joins an ordered group of ranks. Its verbs are asynchronous: they return a :class:`Handle` at once, run
in the order of the calls, and the caller keeps the tensors alive and untouched until ``wait()``. All ranks of the group
call the same verbs in the same order with the same sizes, dtypes and tags.

Invariants:
    * arguments are checked before anything is sent: a :class:`ContractError` leaves the communicator as it was;
    * sums run in ascending order of the global ranks, whatever the group's order; bf16 and f16 are added in f32 and
      rounded once (nccl and hccl sum as they do: see process_group.py);
    * after a :class:`CollectiveError` the communicator is broken, and every further call raises the same error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NoReturn, final

import torch

from npuzero.comm.board import Board, Failure, Meeting, Watch, aborted
from npuzero.device import Handle
from npuzero.errors import ContractError
from npuzero.ops.storage.lazy import lazy

#: Dtypes a sum may travel in. all_reduce also takes those of INTEGERS, and float64.
WIRES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64, torch.uint8)


class Communicator(ABC):
    """One rank's door to the collectives of a group.

    Attributes:
        ranks: global ranks in the order of the group.
        rank: this rank's index in it.
        size: how many there are.
        name: of the channel: two communicators of the same ranks do not disturb each other.
        device: where the tensors live.
        started: operations that this rank has started.
        board: where this rank says that it waits, in a world.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str, device: torch.device) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.name = name
        self.device = device
        self.started = 0
        self.board: Board | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, ranks={self.ranks}, rank={self.rank})"

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor of ``numel`` zeros, where possible in memory that the other ranks reach themselves.

        What a rank brings to a verb (the shard of all_gather, the whole of reduce_scatter, the input of all_to_all, the
        buffer of all_reduce and broadcast) is then not copied on its way: over shared memory the other ranks read it,
        or a view of it, in its place. Results need no such buffer. Each rank's buffers count for themselves; ranks need
        not agree. The memory goes back when the last view of it does; it cannot be resized. Elsewhere: an ordinary
        tensor.

        Raises:
            OutOfSpace: no memory is left.
        """
        return torch.zeros(numel, dtype=dtype, device=self.device)

    @final
    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, *, tag: str = "") -> Handle:
        """whole[size * n] = the shards[n] of all ranks, in group order; any dtype.

        ``shard`` may be this rank's own part of ``whole``.
        """
        self._check("all_gather", whole=whole, shard=shard)
        self._check_parts("all_gather", whole, shard)
        _check_equal_dtypes("all_gather", whole=whole, shard=shard)
        if not self._is_own_part(whole, shard):
            _check_apart("all_gather", whole=whole, shard=shard)
        return self._all_gather(whole, shard, tag)

    @final
    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, *, accumulate: bool = False, tag: str = ""
    ) -> Handle:
        """shard[n] = the sum over all ranks of this rank's part of whole[size * n]; f32, bf16 or f16.

        ``shard`` has the dtype of ``whole``, or float32. ``accumulate``: the sum is added to ``shard`` (the sum first,
        then the addition, then one rounding). ``shard`` may be this rank's own part of ``whole``, then without
        ``accumulate``. The rest of ``whole`` keeps its values.
        """
        self._check("reduce_scatter", shard=shard, whole=whole)
        _check_dtype("reduce_scatter: whole", whole, WIRES)
        _check_dtype("reduce_scatter: shard", shard, (whole.dtype, torch.float32))
        self._check_parts("reduce_scatter", whole, shard)
        if accumulate or not self._is_own_part(whole, shard):
            _check_apart("reduce_scatter", shard=shard, whole=whole)
        return self._reduce_scatter(shard, whole, accumulate, tag)

    @final
    def all_reduce(self, buffer: torch.Tensor, *, tag: str = "") -> Handle:
        """buffer[n] = the sum of all ranks' buffers, in place, the same bits on every rank. Integers wrap around."""
        self._check("all_reduce", buffer=buffer)
        _check_dtype("all_reduce: buffer", buffer, (*WIRES, torch.float64, *INTEGERS))
        return self._all_reduce(buffer, tag)

    @final
    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, *, tag: str = "") -> Handle:
        """Part j of inp[size * n] goes to rank j; part i of out[size * n] comes from rank i; any dtype."""
        self._check("all_to_all", out=out, inp=inp)
        _check_equal_dtypes("all_to_all", out=out, inp=inp)
        if out.numel() != inp.numel() or inp.numel() % self.size:
            raise ContractError(
                "all_to_all",
                expected=f"out and inp of the same size, a multiple of {self.size} ranks",
                got=f"{out.numel()} and {inp.numel()} elements",
                do="Pad both to equal parts.",
            )
        _check_apart("all_to_all", out=out, inp=inp)
        return self._all_to_all(out, inp, tag)

    @final
    def broadcast(self, buffer: torch.Tensor, *, root: int, tag: str = "") -> Handle:
        """buffer[n] = that of the rank with index ``root`` in the group, in place; any dtype."""
        self._check("broadcast", buffer=buffer)
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
        """Until every rank has called it; operations under way before it are done then."""

    @property
    def place(self) -> str:
        """Its name on the board, the same on all ranks."""
        return f"{self.name}/{'-'.join(map(str, self.ranks))}"

    def meeting(self, number: int, verb: str, tag: str) -> Meeting:
        """The operation ``number``, as a place where ranks meet."""
        what = f"{verb} #{number}" + (f" tagged {tag!r}" if tag else "")
        return Meeting(self.place, number, self.ranks, f"{what} of {self.name!r}")

    def watch(self, number: int, verb: str, tag: str) -> Watch:
        """For the time that the calling thread waits for the operation ``number``."""
        return Watch(self.board, self.meeting(number, verb, tag), self.ranks[self.rank])

    @final
    def abort(self, reason: str) -> None:
        """Breaks the communicator, on every rank where the means allow it."""
        self.fail(aborted(self.ranks[self.rank], reason))

    @abstractmethod
    def fail(self, failure: Failure) -> None:
        """Likewise, for ``failure``; the first one stays."""

    def drain(self) -> None:
        """Until what was started here is done or has failed: other ranks may still need this one's part of it."""
        return

    @abstractmethod
    def close(self) -> None:
        """Gives resources back; operations not waited for fail. Idempotent."""

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

    def _check(self, verb: str, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            check_flat(f"{verb}: {name}", tensor, self.device)

    def _check_parts(self, verb: str, whole: torch.Tensor, shard: torch.Tensor) -> None:
        if whole.numel() != self.size * shard.numel():
            raise ContractError(
                verb,
                expected=f"whole of {self.size} ranks * {shard.numel()} elements of shard",
                got=f"{whole.numel()} elements",
                do="Pad to equal shards.",
            )

    def _is_own_part(self, whole: torch.Tensor, shard: torch.Tensor) -> bool:
        own = whole.data_ptr() + self.rank * shard.numel() * whole.element_size()
        return whole.dtype == shard.dtype and shard.data_ptr() == own


def check_flat(subject: str, tensor: object, device: torch.device) -> None:
    """Raises ContractError unless ``tensor`` is a dense 1-D contiguous tensor on ``device`` whose memory is there."""
    if not isinstance(tensor, torch.Tensor):
        _refuse(subject, "a tensor", type(tensor).__name__, "Hand over the flat buffer itself.")
    if tensor.device != device:
        _refuse(subject, f"a tensor on {device}", f"one on {tensor.device}", "Move it to the device of the group.")
    if tensor.layout != torch.strided or tensor.dim() != 1 or not tensor.is_contiguous():
        got = f"{tensor.layout}, shape {tuple(tensor.shape)}"
        _refuse(subject, "a 1-D contiguous tensor", got, "Send the flat buffer, or tensor.view(-1).")
    if lazy(tensor):
        got = f"a lazy {'negative' if tensor.is_neg() else 'conjugate'}"
        _refuse(subject, "memory that holds the values", got, "Call resolve_conj() and resolve_neg() first.")
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.numel() and tensor.untyped_storage().nbytes() < needed:
        got = f"{tensor.untyped_storage().nbytes()} bytes: it was released"
        _refuse(subject, f"a storage of at least {needed} bytes", got, "Allocate the buffer before sending it.")


def _check_dtype(subject: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in allowed))
        _refuse(
            subject, f"one of {names}", str(tensor.dtype).removeprefix("torch."), "Cast it first (npuzero.ops.cast)."
        )


def _check_equal_dtypes(verb: str, **tensors: torch.Tensor) -> None:
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        got = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items()).replace("torch.", "")
        _refuse(verb, f"{' and '.join(tensors)} of one dtype", got, "Cast one of them first (npuzero.ops.cast).")


def _check_apart(verb: str, **tensors: torch.Tensor) -> None:
    (first, a), (second, b) = tensors.items()
    a_end = a.data_ptr() + a.numel() * a.element_size()
    b_end = b.data_ptr() + b.numel() * b.element_size()
    if a.numel() and b.numel() and a.data_ptr() < b_end and b.data_ptr() < a_end:
        got = f"[{a.data_ptr():#x}, {a_end:#x}) and [{b.data_ptr():#x}, {b_end:#x})"
        _refuse(verb, f"{first} and {second} in memory apart from each other", got, "Use separate buffers.")


def _refuse(subject: str, expected: str, got: str, do: str) -> NoReturn:
    raise ContractError(subject, expected=expected, got=got, do=do)
