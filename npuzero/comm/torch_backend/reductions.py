"""Implement torch.distributed's reductions by npuzero's sums, or in ascending order of the ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from npuzero.comm.checks import INTEGERS, WIRES
from npuzero.comm.communicator import Communicator
from npuzero.comm.torch_backend.members import ShmGroupBase
from npuzero.comm.torch_backend.tensors import NAME, After, copy_flat_to_tensors, flatten_tensor, make_flat_buffers
from npuzero.comm.torch_backend.work import ShmWork
from npuzero.device import AsyncHandle
from npuzero.errors import ContractError

_Op = dist.ReduceOp

_SUMS = (_Op.SUM, _Op.AVG)

#: Reductions that npuzero's communicators lack, for two tensors.
_FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    _Op.SUM: torch.add,
    _Op.PRODUCT: torch.mul,
    _Op.MAX: torch.maximum,
    _Op.MIN: torch.minimum,
    _Op.BAND: torch.bitwise_and,
    _Op.BOR: torch.bitwise_or,
    _Op.BXOR: torch.bitwise_xor,
}


class ReductionCollectives(ShmGroupBase):
    """Run reductions, under torch's names and with its arguments."""

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        op = _get_reduce_op(opts)
        flats, landed = make_flat_buffers(tensors)
        handles, afters = zip(*(all_reduce_flat(self._group, flat, op) for flat in flats), strict=True)
        return self._work(handles, [*afters, *landed], tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        (tensor,) = tensors
        total = flatten_tensor(tensor).clone()
        handle, after = all_reduce_flat(self._group, total, _get_reduce_op(opts))
        results = [tensor] if self._group.rank == opts.rootRank else []
        return self._work([handle], [after, lambda: copy_flat_to_tensors(total, results)], tensors)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ShmWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None
    ) -> ShmWork:
        op = _get_reduce_op(opts)
        shards, landed = make_flat_buffers(output_tensors)
        pairs = zip(shards, input_tensors, strict=True)
        handles, afters = zip(
            *(reduce_scatter_flat(self._group, shard, flatten_tensor(whole), op) for shard, whole in pairs), strict=True
        )
        return self._work(handles, [*afters, *landed], output_tensors)

    def reduce_scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> ShmWork:
        ((output,), (inputs,)) = output_tensors, input_tensors
        most = max(part.numel() for part in inputs)
        whole = inputs[0].new_zeros(len(inputs), most)
        for row, part in zip(whole, inputs, strict=True):
            row[: part.numel()].copy_(flatten_tensor(part))
        shard = inputs[0].new_empty(most)
        handle, after = reduce_scatter_flat(self._group, shard, whole.view(-1), _get_reduce_op(opts))
        return self._work([handle], [after, lambda: copy_flat_to_tensors(shard[: output.numel()], [output])], [output])

    def barrier(self, opts: Any = None) -> ShmWork:
        return self._work([self._group.all_reduce(torch.zeros(1, dtype=torch.uint8))], [], [])

    # Names before torch 2.13.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def all_reduce_flat(group: Communicator, flat: Tensor, op: Any) -> tuple[AsyncHandle, After]:
    """Reduce ``flat`` in place: wait for the returned handle, then call the returned function."""
    if op in _SUMS and flat.dtype in (*WIRES, torch.float64, *INTEGERS, torch.int8):
        # Integers wrap around, signed or not.
        wire = flat.view(torch.uint8) if flat.dtype == torch.int8 else flat
        after = _make_average(flat, op, group.size)
        return group.all_reduce(wire), after
    rows = flat.new_empty(group.size, flat.numel())
    after = _make_fold(rows, flat, op)
    return group.all_gather(rows.view(-1), flat), after


def reduce_scatter_flat(group: Communicator, shard: Tensor, whole: Tensor, op: Any) -> tuple[AsyncHandle, After]:
    """Reduce this rank's part of every rank's ``whole`` into ``shard``; returns as :func:`all_reduce_flat`."""
    if op in _SUMS and whole.dtype in WIRES:
        after = _make_average(shard, op, group.size)
        return group.reduce_scatter(shard, whole), after
    rows = torch.empty_like(whole).view(group.size, -1)
    after = _make_fold(rows, shard, op)
    return group.all_to_all(rows.view(-1), whole), after


def _make_average(total: Tensor, op: Any, size: int) -> After:
    if op != _Op.AVG:
        return lambda: None
    if not total.dtype.is_floating_point:
        raise ContractError(f"AVG on {NAME}", expected="floats", got=str(total.dtype), do="Sum, then divide.")
    return lambda: total.div_(size)


def _make_fold(rows: Tensor, total: Tensor, op: Any) -> After:
    """Return the function that folds the rows into ``total``, one by one in ascending order of the ranks."""
    fold = _FOLDS.get(op)
    if fold is None:
        raise ContractError(
            f"reduction on {NAME}",
            expected="SUM, AVG (of f32, bf16, f16, f64), PRODUCT, MAX, MIN, BAND, BOR or BXOR",
            got=f"{op} of {total.dtype}",
            do="Reduce with one of these; scale before a sum instead of PREMUL_SUM.",
        )
    return lambda: total.copy_(functools.reduce(fold, rows))


def _get_reduce_op(opts: Any) -> Any:
    """Return the member of ReduceOp that the options name."""
    return _Op.SUM if opts is None else opts.reduceOp.op
