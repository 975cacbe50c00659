"""The torch.distributed backend ``"shm"``: torch's own process groups over shared memory, for CPU ranks of one host.

    import npuzero                                  # registers it
    torch.distributed.init_process_group("shm")     # then DDP, FSDP2, ... as over gloo

What npuzero's communicators do goes to them directly, and runs beside the caller. The rest is composed of it: other
reductions than sums are an all_gather and a reduction in ascending order of the ranks; gather and scatter travel as
all_gather and broadcast; a send is a broadcast between two. An all_to_all with split sizes agrees on the largest part
first, on a thread and a communicator of its own.

Differences from gloo: sums of bf16 and f16 are made in f32 and rounded once; AVG is that sum, divided; a send ends when
it is received; no sparse tensors and no receiving from any source.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from npuzero.comm import fork
from npuzero.comm.communicator import INTEGERS, WIRES, Communicator
from npuzero.comm.process_world import ProcessWorld
from npuzero.device import Handle, HostLane
from npuzero.errors import CollectiveError, ContractError
from npuzero.ops.storage.lazy import settled

NAME = "shm"

_Op = dist.ReduceOp
# torch's stubs know the many ways to call a group; torch itself calls the one with options, in each method below.
_ProcessGroup: Any = dist.ProcessGroup
_After = Callable[[], object]

_SUMS = (_Op.SUM, _Op.AVG)

#: Reductions that our communicators lack, two tensors at a time.
_FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    _Op.SUM: torch.add,
    _Op.PRODUCT: torch.mul,
    _Op.MAX: torch.maximum,
    _Op.MIN: torch.minimum,
    _Op.BAND: torch.bitwise_and,
    _Op.BOR: torch.bitwise_or,
    _Op.BXOR: torch.bitwise_xor,
}


def register() -> None:
    """Makes ``"shm"`` known to torch.distributed."""
    dist.Backend.register_backend(NAME, _make_group, devices=["cpu"])


class ShmWork(dist.Work):
    """Operations under way and what is left to do once they are done, by whoever waits first."""

    def __init__(
        self, lane: HostLane, handles: Sequence[Handle], afters: Sequence[_After], result: list[Tensor]
    ) -> None:
        super().__init__()
        self._lane = lane
        self._handles = handles
        self._afters = afters
        self._result = result
        self._finishing = threading.Lock()
        self._finished = False
        self._error: BaseException | None = None
        self._future: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # torch: 0 is no limit but the group's own
        deadline_s = time.monotonic() + timeout.total_seconds()
        while timeout and not self.is_completed():
            if time.monotonic() > deadline_s:
                raise CollectiveError(
                    f"wait on {NAME}",
                    expected=f"every rank within {timeout.total_seconds()} s",
                    got="an operation that is not done",
                    do="See what the other ranks do, or wait longer.",
                    kind="timeout",
                )
            time.sleep(0.001)
        self._finish()
        return True

    def is_completed(self) -> bool:
        if not all(handle.done() for handle in self._handles):
            return False
        self.exception()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Why it failed; waits until it is known."""
        try:
            self._finish()
        except CollectiveError as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        return self._result

    def synchronize(self) -> None:
        self._finish()

    def get_future(self) -> Any:
        """A future of the tensors, completed on a thread of the group."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._lane.run(self._complete_future)
        return self._future

    def _complete_future(self) -> None:
        error = self.exception()
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)

    def _finish(self) -> None:
        with self._finishing:
            if not self._finished:
                try:
                    self._run_to_the_end()
                except CollectiveError as error:
                    self._error = error
                self._finished = True
        if self._error is not None:
            raise self._error

    def _run_to_the_end(self) -> None:
        for handle in self._handles:
            handle.wait()
        with torch.no_grad():
            for after in self._afters:
                after()


class ShmGroup(_ProcessGroup):  # type: ignore[misc]
    """One rank of a process group over shared memory. The methods are those that torch.distributed calls.

    Raises:
        ConfigError: the ranks do not share a host.
        CollectiveError: the ranks did not find each other.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._world = ProcessWorld(
            store, rank, size, torch.device("cpu"), backend="shm", timeout_s=timeout.total_seconds()
        )
        self._group = self._world.communicator(range(size), "ops")
        self._lane = HostLane("shm", fork.door("shm"))
        self._name = ""
        self._group.barrier()  # all have opened it before any of them may end

    # -- what torch asks of a group --------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        self._name = str(dist.distributed_c10d._world.pg_names.get(self, self._name))
        return self._name

    @property
    def group_name(self) -> Any:
        return self.getGroupName()

    def shutdown(self) -> None:
        self.getGroupName()  # torch forgets the name, and then asks for it once more
        self._lane.close(timeout_s=1.0)
        self._world.close()

    def abort(self) -> None:
        self.getGroupName()
        self._world.abort("torch.distributed aborted the group")

    # -- movements -------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        flats, afters = _landings(tensors)
        handles = [self._group.broadcast(flat, root=opts.rootRank) for flat in flats]
        return self._work(handles, afters, tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ShmWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> ShmWork:
        wholes, afters = _landings(output_lists)
        handles = [self._group.all_gather(w, _flat(i)) for w, i in zip(wholes, input_list, strict=True)]
        return self._work(handles, afters, output_lists)

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> ShmWork:
        ((outputs,), (shard,)) = output_tensors, input_tensors
        if all(output.numel() == shard.numel() for output in outputs):
            whole = shard.new_empty(self._group.size * shard.numel())
            handle = self._group.all_gather(whole, _flat(shard))
            return self._work([handle], [lambda: _spread(whole, outputs)], outputs)
        flats, afters = _landings(outputs)
        flats[self._group.rank].copy_(_flat(shard))
        handles = [self._group.broadcast(flat, root=root) for root, flat in enumerate(flats)]
        return self._work(handles, afters, outputs)

    def allgather_coalesced(self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None) -> Any:
        works = [
            self.allgather([[outputs[k] for outputs in output_lists]], [shard]) for k, shard in enumerate(input_list)
        ]
        return self._work([_AsHandle(work) for work in works], [], [out for outputs in output_lists for out in outputs])

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> ShmWork:
        (shard,) = input_tensors
        whole = shard.new_empty(self._group.size * shard.numel())
        handle = self._group.all_gather(whole, _flat(shard))
        outputs = output_tensors[0] if self._group.rank == opts.rootRank else []
        return self._work([handle], [lambda: _spread(whole, outputs)], outputs)

    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> ShmWork:
        (output,) = output_tensors
        root = self._group.rank == opts.rootRank
        whole = _joined(input_tensors[0]) if root else output.new_empty(self._group.size * output.numel())
        handle = self._group.broadcast(whole, root=opts.rootRank)
        own = whole[self._group.rank * output.numel() :][: output.numel()]
        return self._work([handle], [lambda: _spread(own, [output])], [output])

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> ShmWork:
        if not output_split_sizes and not input_split_sizes:
            (flat,), afters = _landings([output])
            return self._work([self._group.all_to_all(flat, _flat(input))], afters, [output])
        return self.alltoall(_split(output, output_split_sizes, self), _split(input, input_split_sizes, self))

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> ShmWork:
        handle = self._lane.run(lambda: self._exchange_parts(output_tensors, input_tensors))
        return self._work([handle], [], output_tensors)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> ShmWork:
        return self._carry(tensors, self._group.rank, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> ShmWork:
        return self._carry(tensors, src, self._group.rank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        raise ContractError(
            f"recv on {NAME}", expected="a source rank", got="none: any source", do="Name src, or use gloo."
        )

    # -- reductions ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        op = _kind(opts)
        flats, landed = _landings(tensors)
        handles, afters = zip(*(self._reduce_all(flat, op) for flat in flats), strict=True)
        return self._work(handles, [*afters, *landed], tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        (tensor,) = tensors
        total = _flat(tensor).clone()
        handle, after = self._reduce_all(total, _kind(opts))
        results = [tensor] if self._group.rank == opts.rootRank else []
        return self._work([handle], [after, lambda: _spread(total, results)], tensors)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ShmWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None
    ) -> ShmWork:
        op = _kind(opts)
        shards, landed = _landings(output_tensors)
        pairs = zip(shards, input_tensors, strict=True)
        handles, afters = zip(*(self._reduce_parts(shard, _flat(whole), op) for shard, whole in pairs), strict=True)
        return self._work(handles, [*afters, *landed], output_tensors)

    def reduce_scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> ShmWork:
        ((output,), (inputs,)) = output_tensors, input_tensors
        most = max(part.numel() for part in inputs)
        whole = inputs[0].new_zeros(len(inputs), most)
        for row, part in zip(whole, inputs, strict=True):
            row[: part.numel()].copy_(_flat(part))
        shard = inputs[0].new_empty(most)
        handle, after = self._reduce_parts(shard, whole.view(-1), _kind(opts))
        return self._work([handle], [after, lambda: _spread(shard[: output.numel()], [output])], [output])

    def barrier(self, opts: Any = None) -> ShmWork:
        return self._work([self._group.all_reduce(torch.zeros(1, dtype=torch.uint8))], [], [])

    # -- how -------------------------------------------------------------------------------------------------------

    def _work(self, handles: Sequence[Handle], afters: Sequence[_After], result: list[Tensor]) -> ShmWork:
        return ShmWork(self._lane, handles, afters, result)

    def _reduce_all(self, flat: Tensor, op: Any) -> tuple[Handle, _After]:
        """The reduction of ``flat`` in place, once the second is called after the first is done."""
        if op in _SUMS and flat.dtype in (*WIRES, torch.float64, *INTEGERS, torch.int8):
            # Integers wrap around, signed or not.
            wire = flat.view(torch.uint8) if flat.dtype == torch.int8 else flat
            after = self._divider(flat, op)
            return self._group.all_reduce(wire), after
        rows = flat.new_empty(self._group.size, flat.numel())
        after = self._folder(rows, flat, op)
        return self._group.all_gather(rows.view(-1), flat), after

    def _reduce_parts(self, shard: Tensor, whole: Tensor, op: Any) -> tuple[Handle, _After]:
        """The reduction of this rank's part of all wholes into ``shard``, likewise."""
        if op in _SUMS and whole.dtype in WIRES:
            after = self._divider(shard, op)
            return self._group.reduce_scatter(shard, whole), after
        rows = torch.empty_like(whole).view(self._group.size, -1)
        after = self._folder(rows, shard, op)
        return self._group.all_to_all(rows.view(-1), whole), after

    def _divider(self, total: Tensor, op: Any) -> _After:
        if op != _Op.AVG:
            return lambda: None
        if not total.dtype.is_floating_point:
            raise ContractError(f"AVG on {NAME}", expected="floats", got=str(total.dtype), do="Sum, then divide.")
        return lambda: total.div_(self._group.size)

    def _folder(self, rows: Tensor, total: Tensor, op: Any) -> _After:
        """total = the rows, one after another in ascending order of the ranks."""
        fold = _FOLDS.get(op)
        if fold is None:
            raise ContractError(
                f"reduction on {NAME}",
                expected="SUM, AVG (of f32, bf16, f16, f64), PRODUCT, MAX, MIN, BAND, BOR or BXOR",
                got=f"{op} of {total.dtype}",
                do="Reduce with one of these; scale before a sum instead of PREMUL_SUM.",
            )
        return lambda: total.copy_(functools.reduce(fold, rows))

    def _carry(self, tensors: list[Tensor], src: int, dst: int, tag: int) -> ShmWork:
        """One tensor from ``src`` to ``dst``, on a communicator of their own: pairs do not wait for others."""
        pair = self._world.communicator((src, dst), f"send {tag}")
        flats, afters = _landings(tensors)
        return self._work([pair.broadcast(flat, root=0) for flat in flats], afters, tensors)

    def _exchange_parts(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """Part j of the inputs goes to rank j, whatever its size: all travel as long as the longest."""
        group: Communicator = self._world.communicator(range(self._group.size), "parts")
        longest = torch.tensor([max(part.numel() for part in (*outputs, *inputs))])
        lengths = longest.new_empty(group.size)
        group.all_gather(lengths, longest).wait()
        sent = inputs[0].new_empty(group.size, int(lengths.max()))
        for row, part in zip(sent, inputs, strict=True):
            row[: part.numel()].copy_(_flat(part))
        received = torch.empty_like(sent)
        group.all_to_all(received.view(-1), sent.view(-1)).wait()
        for row, output in zip(received, outputs, strict=True):
            _spread(row[: output.numel()], [output])

    # The names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class _AsHandle(Handle):
    """A work as a handle, for works made of works."""

    def __init__(self, work: ShmWork) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def done(self) -> bool:
        return self._work.is_completed()


def _make_group(store: Any, rank: int, size: int, timeout: timedelta) -> ShmGroup:
    return ShmGroup(store, rank, size, timeout)


def _kind(opts: Any) -> Any:
    """The member of ReduceOp that the options name."""
    return _Op.SUM if opts is None else opts.reduceOp.op


def _flat(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        raise ContractError(
            f"tensor for {NAME}", expected="a dense tensor", got=str(tensor.layout), do="Call to_dense(), or use gloo."
        )
    return settled(tensor.detach()).view(-1)


def _landings(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[_After]]:
    """1-D buffers that the tensors' values are in, and what brings results back where a buffer is a copy."""
    flats = [_flat(tensor) for tensor in tensors]
    copies = [(f, t) for f, t in zip(flats, tensors, strict=True) if f.numel() and f.data_ptr() != t.data_ptr()]
    return flats, [functools.partial(_spread, flat, [tensor]) for flat, tensor in copies]


def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """The tensors, one after another, from ``flat``."""
    begin = 0
    for tensor in tensors:
        tensor.copy_(flat[begin : begin + tensor.numel()].view(tensor.shape))
        begin += tensor.numel()


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([_flat(tensor) for tensor in tensors])


def _split(tensor: Tensor, sizes: list[int], group: ShmGroup) -> list[Tensor]:
    """Parts of ``tensor`` along its first dimension; equal ones where no sizes are given."""
    if not sizes:
        return list(tensor.chunk(group.size())) if tensor.numel() else [tensor] * group.size()
    return list(tensor.split(sizes))
