"""Run collectives through torch.distributed: gloo on the host, nccl and hccl on accelerators.

gloo only moves bytes. Sums are made here, in ascending order of the ranks and in f32, so that their bits equal those
over shared memory; any order of the group works, by permuting parts. nccl and hccl sum in their order and (for bf16 and
f16) their precision, and need ascending groups: hierarchical.py composes other orders. Dtypes that hccl cannot sum
(mainly float64, used for the gradient norm) are gathered and summed here.

torch sorts the ranks of a group; ``places`` map its k-th rank to a part of the gathered buffer. Collectives are not
compared between ranks: a mismatch ends in gloo's error or in a timeout. Only the two ends of a send over gloo exchange
a description first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from npuzero.comm.backends.channels import ChannelCommunicator
from npuzero.comm.checks import INTEGERS
from npuzero.comm.communicator import Communicator
from npuzero.comm.watchdog import fork
from npuzero.comm.watchdog.call_names import error_subject
from npuzero.comm.watchdog.hang_detector import CommunicatorFailure, make_patient_wait
from npuzero.device import AsyncHandle, HostLane
from npuzero.errors import CollectiveError, ConfigError

#: Up to this many elements an all_reduce gathers all buffers: one step instead of two.
_SMALL_NUMEL = 8192

#: Bytes of the description that the two ends of a send over gloo exchange.
_SAID_BYTES = 256

_DIFFERS = "Look for a branch that differs between ranks, or sends that are received in another order."

#: Dtypes of hccl's reductions. Its average is not used: gradients are scaled as they are packed.
_HCCL_SUMS = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)


def make_group(
    ranks: Sequence[int], backend: str, name: str, *, timeout_s: float, buffer_mb: int | None = None
) -> dist.ProcessGroup:
    """Return a process group of ``ranks``. Only members call it, and make groups of equal ranks in the same order.

    Args:
        buffer_mb: hccl's buffer of the group (it takes two; 200 MB each by default).
    """
    group: dist.ProcessGroup = dist.new_group(
        sorted(ranks),
        timeout=timedelta(seconds=timeout_s),
        backend=backend,
        pg_options=_hccl_options(buffer_mb) if backend == "hccl" and buffer_mb is not None else None,
        use_local_synchronization=True,
        group_desc=f"npuzero:{name}",
    )
    return group


class ProcessGroupCommunicator(Communicator):
    """Share numbers of operations and errors between gloo and the accelerators."""

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int, name: str, device: torch.device, backend: str
    ) -> None:
        super().__init__(ranks, rank, name, device)
        self.group = group
        self.backend = backend
        self._errors: list[CollectiveError] = []  # the first one stays

    def fail(self, failure: CommunicatorFailure) -> None:
        self._errors.append(failure.error(f"{self.name!r} on rank {self.ranks[self.rank]}"))

    def _check_unbroken(self) -> None:
        if self._errors:
            raise self._errors[0]

    def _next(self) -> int:
        self._check_unbroken()
        self.started += 1
        return self.started

    def _fail(self, verb: str, sequence: int, tag: str, error: BaseException) -> CollectiveError:
        if not self._errors:
            mine = self._error(verb, sequence, tag, f"{type(error).__name__}: {error}")
            failure = self.board and self.board.cause(mine.expected, mine.got)
            self._errors.append(failure.error(mine.subject, verb=verb, sequence=sequence, tag=tag) if failure else mine)
        return self._errors[0]

    def _error(self, verb: str, sequence: int, tag: str, got: str) -> CollectiveError:
        return CollectiveError(
            error_subject(self.meeting(sequence, verb, tag).text, self.ranks[self.rank]),
            expected=f"{self.backend} to complete it with ranks {self.ranks}",
            got=got,
            do=_ADVICE[self.backend],
            verb=verb,
            sequence=sequence,
            tag=tag,
        )


_ADVICE = {
    "gloo": "See the first error among the ranks: one that ended or differs makes the others fail.",
    "nccl": "See the first error among the ranks; NCCL_DEBUG=INFO says more.",
    "hccl": "See the first error among the ranks; if it came at the group's first operation, the ranks started too far "
    "apart: raise HCCL_CONNECT_TIMEOUT (120 s by default; 900 and more is usual). Later: HCCL_EXEC_TIMEOUT.",
}


class GlooCommunicator(ProcessGroupCommunicator, ChannelCommunicator):
    """Run collectives on host tensors over gloo, in order, on a separate thread; each channel has another thread."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int, name: str) -> None:
        super().__init__(group, ranks, rank, name, torch.device("cpu"), "gloo")
        self._places = [self.ranks.index(member) for member in sorted(self.ranks)]
        self._ascending = self._places == list(range(self.size))
        self._lane = HostLane(name, fork.make_fork_check(name))

    def barrier(self) -> None:
        self._run("barrier", "", 1, lambda: dist.barrier(group=self.group)).wait()

    def close(self) -> None:
        self._lane.close(timeout_s=1.0)
        super().close()

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor, tag: str) -> AsyncHandle:
        return self._run("all_gather", tag, whole.numel(), lambda: self._gather(whole, shard))

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, accumulate: bool, tag: str) -> AsyncHandle:
        def step() -> None:
            add_in_order(shard, self._swap(whole), accumulate)

        return self._run("reduce_scatter", tag, whole.numel(), step)

    def _all_reduce(self, buffer: torch.Tensor, tag: str) -> AsyncHandle:
        def small() -> None:
            rows = buffer.new_empty(self.size, buffer.numel())
            self._gather_ascending(rows.view(-1), buffer)
            add_in_order(buffer, rows)

        def large() -> None:
            each = -(-buffer.numel() // self.size)
            padded = buffer.new_zeros(self.size * each)
            padded[: buffer.numel()] = buffer
            shard = buffer.new_empty(each)
            add_in_order(shard, self._swap(padded))
            self._gather(padded, shard)
            buffer.copy_(padded[: buffer.numel()])

        return self._run("all_reduce", tag, buffer.numel(), small if buffer.numel() <= _SMALL_NUMEL else large)

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: str) -> AsyncHandle:
        def step() -> None:
            out.view(self.size, -1)[self._places] = self._swap(inp)

        return self._run("all_to_all", tag, inp.numel(), step)

    def _broadcast(self, buffer: torch.Tensor, root: int, tag: str) -> AsyncHandle:
        source = self.ranks[root]
        return self._run(
            "broadcast", tag, buffer.numel(), lambda: dist.broadcast(_view_as_uint8(buffer), source, group=self.group)
        )

    def _run(self, verb: str, tag: str, numel: int, step: Callable[[], None]) -> AsyncHandle:
        sequence = self._next()

        def guarded() -> None:
            self._check_unbroken()
            try:
                if numel:
                    step()
            except RuntimeError as error:
                raise self._fail(verb, sequence, tag, error) from error

        return self._lane.run(guarded, make_patient_wait(lambda: self.watch(sequence, verb, tag), self._check_unbroken))

    def _make_channel(self, ranks: tuple[int, int], name: str) -> GlooCommunicator:
        made = GlooCommunicator(self.group, ranks, ranks.index(self.ranks[self.rank]), name)
        made._errors = self._errors
        return made

    def _carry(self, verb: str, buffer: torch.Tensor, tag: str) -> AsyncHandle:
        here, peer = self.ranks[self.rank], self.ranks[1 - self.rank]
        sequence = self.started + 1
        what = f"send #{sequence} of {buffer.numel()} {buffer.dtype}".replace("torch.", "")
        mine = _truncate_text(what + (f" tagged {tag!r}" if tag else ""))
        move, way = (dist.send if verb == "send" else dist.recv), int(self._ascending)

        def step() -> None:
            theirs = self._tell(mine, peer, way)
            if theirs != mine:
                got = "; ".join(f"rank {rank}: {said}" for rank, said in sorted({here: mine, peer: theirs}.items()))
                failure = CommunicatorFailure(
                    "mismatch", here, "the same size, dtype and tag on both ranks", got, _DIFFERS
                )
                about = error_subject(self.meeting(sequence, verb, tag).text, here)
                self._errors.append(failure.error(about, verb=verb, sequence=sequence, tag=tag))
                self._check_unbroken()
            if buffer.numel():
                move(_view_as_uint8(buffer), peer, group=self.group, tag=way)

        return self._run(verb, tag, 1, step)

    def _tell(self, said: str, peer: int, way: int) -> str:
        """Exchange descriptions of a send with the peer of a channel; ``way`` is gloo's tag. Return the peer's."""
        mine = torch.frombuffer(bytearray(said.encode().ljust(_SAID_BYTES)), dtype=torch.uint8)
        theirs = torch.empty_like(mine)
        told = dist.isend(mine, peer, group=self.group, tag=way)
        dist.recv(theirs, peer, group=self.group, tag=way)
        if told is not None:
            told.wait()
        return bytes(theirs.tolist()).decode().rstrip()

    def _gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        if self._ascending:
            self._gather_ascending(whole, shard)
            return
        rows = torch.empty_like(whole).view(self.size, -1)
        self._gather_ascending(rows.view(-1), shard)
        whole.view(self.size, -1)[self._places] = rows

    def _gather_ascending(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        # A copy, since gloo does not support an input inside its output.
        all_gather_single(_view_as_uint8(whole), _view_as_uint8(shard.clone()), group=self.group)

    def _swap(self, whole: torch.Tensor) -> torch.Tensor:
        """Return [size, n]: the part of each rank's input for this rank, in ascending order of the ranks."""
        sent = whole.view(self.size, -1)
        received = torch.empty_like(sent)
        sent = sent if self._ascending else sent[self._places]
        dist.all_to_all_single(_view_as_uint8(received.view(-1)), _view_as_uint8(sent.view(-1)), group=self.group)
        return received


class WorkHandle(AsyncHandle):
    """Wrap torch's work on an accelerator; run ``after`` when the current stream sees the result."""

    def __init__(
        self,
        communicator: AcceleratorCommunicator,
        work: Any,
        where: tuple[str, int, str],
        after: Callable[[], None] | None,
    ) -> None:
        self._communicator = communicator
        self._work = work
        self._where = where
        self._after = after

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            self._work.wait()
            if self._after is not None:
                self._after()
        except RuntimeError as error:
            raise self._communicator._fail(*self._where, error) from error
        self._work = self._after = None

    def done(self) -> bool:
        return self._work is None or bool(self._work.is_completed())


class AcceleratorCommunicator(ProcessGroupCommunicator):
    """Run collectives on device tensors over nccl or hccl, on the backend's stream, without blocking the host.

    Raises:
        ConfigError: the group's order is not ascending.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int, name: str, device: torch.device, backend: str
    ) -> None:
        if list(ranks) != sorted(ranks):
            raise ConfigError(
                f"communicator {name!r}",
                expected=f"ascending ranks, as {backend} numbers them",
                got=str(tuple(ranks)),
                do="Compose it of one communicator per axis (comm.hierarchical).",
            )
        super().__init__(group, ranks, rank, name, device, backend)
        self.barrier()  # connects the ranks now: here a late rank is easy to name

    def barrier(self) -> None:
        flag = torch.zeros(1, dtype=torch.int32).to(self.device)  # a copy: no operator has to be compiled or loaded
        self._start("barrier", "", lambda: dist.all_reduce(flag, group=self.group, async_op=True)).wait()
        flag.item()

    def close(self) -> None:
        return

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor, tag: str) -> AsyncHandle:
        return self._start(
            "all_gather",
            tag,
            lambda: all_gather_single(
                _view_as_transferable(whole), _view_as_transferable(shard), group=self.group, async_op=True
            ),
        )

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, accumulate: bool, tag: str) -> AsyncHandle:
        direct = shard.dtype == whole.dtype and not accumulate
        result = shard if direct else torch.empty(shard.numel(), dtype=whole.dtype, device=self.device)

        def after() -> None:
            with torch.no_grad():
                shard.add_(result) if accumulate else shard.copy_(result)

        return self._start(
            "reduce_scatter",
            tag,
            lambda: reduce_scatter_single(result, whole, group=self.group, async_op=True),
            None if direct else after,
        )

    def _all_reduce(self, buffer: torch.Tensor, tag: str) -> AsyncHandle:
        if self.backend == "hccl" and buffer.dtype not in _HCCL_SUMS:
            return self._gather_and_add(buffer, tag)
        return self._start("all_reduce", tag, lambda: dist.all_reduce(buffer, group=self.group, async_op=True))

    def _gather_and_add(self, buffer: torch.Tensor, tag: str) -> AsyncHandle:
        rows = torch.empty(self.size * buffer.numel(), dtype=buffer.dtype, device=self.device)
        return self._start(
            "all_reduce",
            tag,
            lambda: all_gather_single(
                _view_as_transferable(rows), _view_as_transferable(buffer), group=self.group, async_op=True
            ),
            lambda: add_in_order(buffer, rows.view(self.size, -1)),
        )

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: str) -> AsyncHandle:
        return self._start(
            "all_to_all",
            tag,
            lambda: dist.all_to_all_single(
                _view_as_transferable(out), _view_as_transferable(inp), group=self.group, async_op=True
            ),
        )

    def _broadcast(self, buffer: torch.Tensor, root: int, tag: str) -> AsyncHandle:
        source = self.ranks[root]
        return self._start(
            "broadcast",
            tag,
            lambda: dist.broadcast(_view_as_transferable(buffer), source, group=self.group, async_op=True),
        )

    # torch connects two ranks at their first send, and runs both directions on one queue.
    def _send(self, buffer: torch.Tensor, to: int, tag: str) -> AsyncHandle:
        peer = self.ranks[to]
        return self._start("send", tag, lambda: dist.isend(_view_as_transferable(buffer), peer, group=self.group))

    def _recv(self, buffer: torch.Tensor, from_: int, tag: str) -> AsyncHandle:
        peer = self.ranks[from_]
        return self._start("recv", tag, lambda: dist.irecv(_view_as_transferable(buffer), peer, group=self.group))

    def _start(
        self, verb: str, tag: str, call: Callable[[], Any], after: Callable[[], None] | None = None
    ) -> AsyncHandle:
        where = (verb, self._next(), tag)
        try:
            return WorkHandle(self, call(), where, after)
        except RuntimeError as error:
            raise self._fail(*where, error) from error


def add_in_order(out: torch.Tensor, rows: torch.Tensor, accumulate: bool = False) -> None:
    """Set out[n] to the sum of rows[size, n], row by row, in f32 (f64 and integers in their dtype), rounded once."""
    kind = rows.dtype if rows.dtype in (torch.float64, *INTEGERS) else torch.float32
    total = rows[0].to(kind, copy=True)
    for row in rows[1:]:
        total += row
    out.copy_(total.add_(out) if accumulate else total)


def _truncate_text(text: str) -> str:
    return text.encode()[:_SAID_BYTES].decode(errors="ignore").rstrip()


def _view_as_uint8(tensor: torch.Tensor) -> torch.Tensor:
    # A transfer needs no dtype, and gloo supports few.
    return tensor.view(torch.uint8)


def _view_as_transferable(tensor: torch.Tensor) -> torch.Tensor:
    # nccl and hccl move one-byte dtypes (bool, float8) as bytes, and support the rest.
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def all_gather_single(whole: torch.Tensor, shard: torch.Tensor, **options: Any) -> Any:
    """Call torch's function by its name in this version: 2.13 renamed it and deprecates the old name."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(whole, shard, **options)


def reduce_scatter_single(shard: torch.Tensor, whole: torch.Tensor, **options: Any) -> Any:
    """Call torch's function by its name in this version, as :func:`all_gather_single` does."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(shard, whole, **options)


def _hccl_options(buffer_mb: int) -> Any:
    import torch_npu

    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": buffer_mb}
    return options
