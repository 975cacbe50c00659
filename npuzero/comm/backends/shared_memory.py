"""Run collectives over shared memory by the C++ of csrc/comm, for processes of one host and for threads.

The algorithm is described in csrc/comm/verbs.h, waiting and failures in csrc/comm/peers.h. Waiting ranks notice a dead
rank within a tenth of a second.
"""

from __future__ import annotations

import atexit
import json
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from npuzero import _native, observe
from npuzero.comm.backends.channels import ChannelCommunicator
from npuzero.comm.rendezvous.store import PrefixedStore
from npuzero.comm.watchdog.call_names import error_subject
from npuzero.comm.watchdog.hang_detector import CommunicatorFailure, WaitWatcher
from npuzero.device import AsyncHandle
from npuzero.errors import CollectiveError, OutOfSpace

if TYPE_CHECKING:
    from typing_extensions import Self

native = _native.comm

#: Bytes of a slot; each rank fills two in turn. Large enough for few synchronizations, small enough for caches. These
#: slots are all the memory of a communicator.
SLOT_BYTES = 512 * 1024

_CPU = torch.device("cpu")
_live: weakref.WeakSet[SharedMemoryCommunicator] = weakref.WeakSet()


class SharedMemoryHandle(AsyncHandle):
    """Represent an operation of the progress thread.

    Its wait emits a span of the category ``comm <communicator's name>``, named by its tag, with the operation's run
    times.
    """

    def __init__(self, communicator: SharedMemoryCommunicator, operation: Any, verb: str, tag: str) -> None:
        self._communicator = communicator
        self._operation = operation
        self._verb = verb
        self._tag = tag
        self._well = False
        self._watch: WaitWatcher | None = None

    def wait(self) -> None:
        if self._well:
            return
        failure = self.finish()
        if failure is not None:
            raise self._communicator.error(failure, self._verb, self._operation.sequence, self._tag)
        self._well = True
        self._communicator.let_go()
        if observe.enabled():
            self._observe()

    def finish(self) -> tuple[str, int, str, str, str] | None:
        """Wait until it is done; return why it failed, if it has."""
        try:
            failure: tuple[str, int, str, str, str] | None = self._communicator.native.wait(self._operation, self._look)
            return failure
        finally:
            if self._watch is not None:
                self._watch.end()
                self._watch = None

    def _look(self) -> None:
        """Read the status board, which breaks the communicator if the wait can never end; called in long waits only."""
        self._communicator.heed()
        if self._watch is None:
            self._watch = self._communicator.watch(self._operation.sequence, self._verb, self._tag)
        self._watch.look()

    def _observe(self) -> None:
        group, operation = self._communicator, self._operation
        name = self._tag or self._verb
        rank = group.ranks[group.rank]
        facts = {"verb": self._verb, "sequence": operation.sequence}
        observe.emit(observe.Span(f"comm {group.name}", name, operation.begin_s, operation.end_s, rank, facts))

    def done(self) -> bool:
        return self._well or self._communicator.native.done(self._operation)


class SharedMemoryCommunicator(ChannelCommunicator):
    """Run collectives over a region of memory that the ranks of a group share.

    Args:
        region: the native region; all ranks of the group hold the same one.
        pids: of the ranks' processes, in group order; empty for ranks that are threads of one process.
        timeout_s: seconds that an operation may wait for other ranks.
        make: returns a communicator of some of these ranks, with another name and region.
        arena: whether the processes can open each other's memory, so that remaining ranks read buffers in place.
    """

    def __init__(
        self,
        region: Any,
        ranks: Sequence[int],
        rank: int,
        name: str,
        *,
        pids: Sequence[int],
        timeout_s: float,
        make: Callable[[tuple[int, ...], str], Any],
        arena: bool = False,
    ) -> None:
        super().__init__(ranks, rank, name, _CPU)
        self._make = make
        self._arena = arena
        self.native = native.Communicator(region, rank, list(ranks), list(pids), name, timeout_s)
        # Keeps tensors of pending operations alive: the progress thread writes to them even if the caller drops the
        # handle.
        self._kept: deque[tuple[Any, tuple[torch.Tensor, ...]]] = deque()
        _live.add(self)

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if not self._arena or numel == 0:
            return super().buffer(numel, dtype)
        nbytes = numel * dtype.itemsize
        try:
            block = native.Block(nbytes)
        except MemoryError as error:
            raise OutOfSpace(
                "memory that ranks share",
                expected=f"room for {nbytes:,} bytes",
                got="none",
                do="Shard more of the state (a higher preset), use more ranks, or a smaller micro-batch.",
                nbytes=nbytes,
            ) from error
        return torch.frombuffer(block, dtype=dtype)

    def barrier(self) -> None:
        self._submit("barrier", (), (0, 0, 0, 1)).wait()

    def fail(self, failure: CommunicatorFailure) -> None:
        self.native.abort(*failure)

    def drain(self) -> None:
        for operation, _ in list(self._kept):
            SharedMemoryHandle(self, operation, "operation", "").finish()
        super().drain()

    def close(self) -> None:
        self.native.close()
        self._kept.clear()
        super().close()

    def heed(self) -> None:
        """Break a channel if its communicator is broken."""
        failure = self.of.native.failure() if self.of is not None else None
        if failure is not None:
            self.native.abort(*failure)

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor, tag: str) -> AsyncHandle:
        return self._submit("all_gather", (whole, shard), _region_call_arguments(shard, whole, shard), tag, shard.dtype)

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, accumulate: bool, tag: str) -> AsyncHandle:
        call = (whole.data_ptr(), shard.data_ptr(), shard.numel(), whole.element_size())
        return self._submit("reduce_scatter", (whole, shard), call, tag, whole.dtype, shard.dtype, accumulate)

    def _all_reduce(self, buffer: torch.Tensor, tag: str) -> AsyncHandle:
        return self._submit(
            "all_reduce", (buffer,), _region_call_arguments(buffer, buffer, buffer), tag, buffer.dtype, buffer.dtype
        )

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: str) -> AsyncHandle:
        call = (inp.data_ptr(), out.data_ptr(), inp.numel() // self.size, inp.element_size())
        return self._submit("all_to_all", (out, inp), call, tag, inp.dtype)

    def _broadcast(self, buffer: torch.Tensor, root: int, tag: str) -> AsyncHandle:
        return self._submit(
            "broadcast", (buffer,), _region_call_arguments(buffer, buffer, buffer), tag, buffer.dtype, root=root
        )

    def _make_channel(self, ranks: tuple[int, int], name: str) -> Self:
        made: Self = self._make(ranks, name)
        return made

    def _carry(self, verb: str, buffer: torch.Tensor, tag: str) -> AsyncHandle:
        self.heed()
        return self._submit(verb, (buffer,), _region_call_arguments(buffer, buffer, buffer), tag, buffer.dtype)

    def _submit(  # noqa: PLR0917 - as the extension has it
        self,
        verb: str,
        tensors: tuple[torch.Tensor, ...],
        call: tuple[int, int, int, int],
        tag: str = "",
        wire: torch.dtype = torch.uint8,
        result: torch.dtype | None = None,
        accumulate: bool = False,
        root: int = 0,
    ) -> AsyncHandle:
        """Queue one collective.

        Args:
            call: addresses of input and output, number of elements, bytes of an element.
            wire: the dtype that is sent.
            result: the dtype of a sum; None without a sum.
        """
        codes = (_native.DTYPES[wire], _native.DTYPES[result]) if result is not None else (0, 0)
        operation = self.native.submit(
            int(getattr(native.Verb, verb)), *call, *codes, accumulate, root, str(wire).removeprefix("torch."), tag
        )
        handle = SharedMemoryHandle(self, operation, verb, tag)
        if operation.refused:
            handle.wait()
        self.started = operation.sequence
        self.let_go()
        if tensors:
            self._kept.append((operation, tensors))
        return handle

    def let_go(self) -> None:
        """Drop the tensors of finished operations."""
        while self._kept and self.native.done(self._kept[0][0]):
            self._kept.popleft()

    def error(self, failure: tuple[str, int, str, str, str], verb: str, sequence: int, tag: str) -> CollectiveError:
        """Return the error for a native failure that met this rank in the collective ``verb``."""
        found = CommunicatorFailure(*failure)
        if found.kind == "mismatch":
            with self.watch(sequence, verb, tag) as watch:
                found = watch.explain(found)
        if self.of is not None:
            self.of.fail(found)
        about = error_subject(self.meeting(sequence, verb, tag).text, self.ranks[self.rank])
        return found.error(about, verb=verb, sequence=sequence, tag=tag)


def connect_shared_memory(
    store: PrefixedStore,
    ranks: Sequence[int],
    rank: int,
    name: str,
    *,
    pids: Sequence[int],
    timeout_s: float,
    make: Callable[[tuple[int, ...], str], Any],
    named: bool = False,
) -> SharedMemoryCommunicator:
    """Return the communicator of processes on one host. It does not wait: the first rank to arrive makes the region.

    Args:
        store: holds the address of the region.
        make: see :class:`SharedMemoryCommunicator`.
        named: use a named shared-memory object, for hosts that forbid opening another process's descriptors.

    Raises:
        CollectiveError: the region cannot be made or opened.
    """
    key = f"region/{name}/{'-'.join(map(str, ranks))}"
    region, offer = None, ""
    if not store.check(key):
        nonce = secrets.randbits(63)
        region = native.Region.create(len(ranks), SLOT_BYTES, nonce, named)
        offer = json.dumps([region.address, nonce])
    accepted = store.set_first(key, offer) if offer else store.get(key)
    if accepted != offer:
        address, nonce = json.loads(accepted)
        region = native.Region.open(address, len(ranks), SLOT_BYTES, nonce)
    return SharedMemoryCommunicator(
        region, ranks, rank, name, pids=pids, timeout_s=timeout_s, make=make, arena=not named
    )


def _region_call_arguments(count: torch.Tensor, out: torch.Tensor, inp: torch.Tensor) -> tuple[int, int, int, int]:
    return inp.data_ptr(), out.data_ptr(), count.numel(), inp.element_size()


@atexit.register
def _close_communicators() -> None:
    # Joins the progress threads before the interpreter exits; a pending operation ends with an error.
    for communicator in list(_live):
        communicator.close()
