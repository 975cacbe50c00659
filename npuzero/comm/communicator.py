"""Define the interface of collectives and sends, and the checks that every implementation shares.

A communicator joins an ordered group of ranks. Its collectives are asynchronous: they return an :class:`AsyncHandle` at
once and run in the order of the calls; the caller keeps the tensors alive and unchanged until ``wait()``. All ranks of
the group call the same collectives in the same order with the same sizes, dtypes and tags.

A send involves two ranks. Sends and receives of a pair run in the order of their calls, with the same sizes, dtypes and
tags on both sides, concurrently with all other operations.

Invariants:
    * arguments are checked before anything is sent: a :class:`ContractError` leaves the communicator unchanged;
    * sums run in ascending order of the global ranks, for any order of the group; bf16 and f16 are added in f32 and
      rounded once (nccl and hccl use their order and precision: see process_group.py);
    * after a :class:`CollectiveError` the communicator is broken, and every further call raises the same error.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import final

import torch

from npuzero.comm.checks import (
    SUMS,
    WIRES,
    check_dtype,
    check_equal_dtypes,
    check_flat,
    check_no_aliasing,
    check_peer,
    check_shard_sizes,
)
from npuzero.comm.member import GroupRank
from npuzero.device import AsyncHandle
from npuzero.errors import ContractError


class Communicator(GroupRank):
    """Run collectives over an ordered group of ranks, and sends between two of them, for one rank of the group."""

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of ``numel`` zeros, in shared memory that remaining ranks can read in place, if possible.

        Inputs in such a buffer (the shard of all_gather, the unsharded input of reduce_scatter, the input of
        all_to_all, the buffer of all_reduce, broadcast and send) are then not copied: over shared memory the remaining
        ranks read the buffer, or a view of it, in place. Results need no such buffer. Ranks need not agree on using
        one. Its memory is freed with the last view; it cannot be resized. Without shared memory it is an ordinary
        tensor.

        Raises:
            OutOfSpace: no memory is left.
        """
        return torch.zeros(numel, dtype=dtype, device=self.device)

    @final
    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, *, tag: str = "") -> AsyncHandle:
        """Run an all-gather of the shards[n] of all ranks into whole[size * n], in group order; any dtype.

        ``shard`` may be this rank's part of ``whole``.
        """
        check_flat("all_gather", "whole", whole, self.device)
        check_flat("all_gather", "shard", shard, self.device)
        check_shard_sizes("all_gather", whole, shard, self.size)
        check_equal_dtypes("all_gather", whole=whole, shard=shard)
        check_no_aliasing("all_gather", self.rank, whole=whole, shard=shard)
        return self._all_gather(whole, shard, tag)

    @final
    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, *, accumulate: bool = False, tag: str = ""
    ) -> AsyncHandle:
        """Run a reduce-scatter: set shard[n] to the sum of this rank's part of whole[size * n] over all ranks.

        ``whole`` is f32, bf16 or f16; ``shard`` has the same dtype, or float32. With ``accumulate`` the sum is added to
        ``shard`` (the sum first, then the addition, then one rounding). Without it ``shard`` may be this rank's part of
        ``whole``. The rest of ``whole`` keeps its values.
        """
        check_flat("reduce_scatter", "shard", shard, self.device)
        check_flat("reduce_scatter", "whole", whole, self.device)
        check_dtype("reduce_scatter: whole", whole, WIRES)
        check_dtype("reduce_scatter: shard", shard, (whole.dtype, torch.float32))
        check_shard_sizes("reduce_scatter", whole, shard, self.size)
        check_no_aliasing("reduce_scatter", None if accumulate else self.rank, whole=whole, shard=shard)
        return self._reduce_scatter(shard, whole, accumulate, tag)

    @final
    def all_reduce(self, buffer: torch.Tensor, *, tag: str = "") -> AsyncHandle:
        """Run an all-reduce: sum buffer[n] over all ranks in place, to the same bits on each. Integers wrap around."""
        check_flat("all_reduce", "buffer", buffer, self.device)
        check_dtype("all_reduce: buffer", buffer, SUMS)
        return self._all_reduce(buffer, tag)

    @final
    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, *, tag: str = "") -> AsyncHandle:
        """Send part j of inp[size * n] to rank j, and receive part i of out[size * n] from rank i; any dtype."""
        check_flat("all_to_all", "out", out, self.device)
        check_flat("all_to_all", "inp", inp, self.device)
        check_equal_dtypes("all_to_all", out=out, inp=inp)
        if out.numel() != inp.numel() or inp.numel() % self.size:
            raise ContractError(
                "all_to_all",
                expected=f"out and inp of the same size, a multiple of {self.size} ranks",
                got=f"{out.numel()} and {inp.numel()} elements",
                do="Pad both to equal parts.",
            )
        check_no_aliasing("all_to_all", out=out, inp=inp)
        return self._all_to_all(out, inp, tag)

    @final
    def gathered(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the shards[n] of all ranks in a new tensor[size * n]; waits for the :meth:`all_gather`."""
        # The new tensor is valid without checks. Checks take half of the host's time of such a call.
        check_flat("all_gather", "shard", shard, self.device)
        whole = shard.new_empty(self.size * shard.numel())
        self._all_gather(whole, shard, "").wait()
        return whole

    @final
    def scattered(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the sum of this rank's part of whole[size * n] in a new tensor[n]: a :meth:`reduce_scatter`, done."""
        check_flat("reduce_scatter", "whole", whole, self.device)
        check_dtype("reduce_scatter: whole", whole, WIRES)
        shard = whole.new_empty(whole.numel() // self.size)
        check_shard_sizes("reduce_scatter", whole, shard, self.size)
        self._reduce_scatter(shard, whole, False, "").wait()
        return shard

    @final
    def broadcast(self, buffer: torch.Tensor, *, root: int, tag: str = "") -> AsyncHandle:
        """Copy the buffer[n] of the rank with index ``root`` in the group to all ranks, in place; any dtype."""
        check_flat("broadcast", "buffer", buffer, self.device)
        if not 0 <= root < self.size:
            raise ContractError(
                "broadcast: root",
                expected=f"an index in the group, 0 to {self.size - 1}",
                got=str(root),
                do="Give the position in communicator.ranks, not the global rank.",
            )
        return self._broadcast(buffer, root, tag)

    @final
    def send(self, buffer: torch.Tensor, to: int, tag: str = "") -> AsyncHandle:
        """Send buffer[n] to the rank with index ``to`` in the group, which must call :meth:`recv`; any dtype.

        The transfer begins once the receiver has reached that recv, without a waiting thread, and ``wait()`` returns
        once the receiver has all of it. Any number of sends may be in progress; they run in the order of the calls.

        Each direction between two ranks is a separate queue, independent of the collectives: neighbours that both send
        first and receive later do not deadlock. Over nccl and hccl both directions share one queue, so they
        deadlock. One communicator per direction works with all backends::

            ahead, back = (world.communicator((0, 1), f"stage {way}") for way in ("ahead", "back"))

        Raises:
            ContractError: ``to`` is not another rank of the group.
            CollectiveError: as for collectives. A recv of another size, dtype or tag is an error on both ranks (nccl
                and hccl do not compare them), and a missing recv is one after the timeout at the latest.
        """
        check_flat("send", "buffer", buffer, self.device)
        check_peer("send: to", to, self.rank, self.size)
        return self._send(buffer, to, tag)

    @final
    def recv(self, buffer: torch.Tensor, from_: int, tag: str = "") -> AsyncHandle:
        """Receive buffer[n] from the rank with index ``from_`` in the group, see :meth:`send`; any dtype.

        Raises:
            ContractError: ``from_`` is not another rank of the group.
            CollectiveError: as for :meth:`send`.
        """
        check_flat("recv", "buffer", buffer, self.device)
        check_peer("recv: from_", from_, self.rank, self.size)
        return self._recv(buffer, from_, tag)

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called it; operations started before are done then."""

    @abstractmethod
    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor, tag: str) -> AsyncHandle: ...

    @abstractmethod
    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, accumulate: bool, tag: str) -> AsyncHandle: ...

    @abstractmethod
    def _all_reduce(self, buffer: torch.Tensor, tag: str) -> AsyncHandle: ...

    @abstractmethod
    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: str) -> AsyncHandle: ...

    @abstractmethod
    def _broadcast(self, buffer: torch.Tensor, root: int, tag: str) -> AsyncHandle: ...

    @abstractmethod
    def _send(self, buffer: torch.Tensor, to: int, tag: str) -> AsyncHandle: ...

    @abstractmethod
    def _recv(self, buffer: torch.Tensor, from_: int, tag: str) -> AsyncHandle: ...
