"""Implement torch.distributed's collectives that move elements without changing their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npuzero.comm.communicator import Communicator
from npuzero.comm.torch_backend.members import ShmGroupBase
from npuzero.comm.torch_backend.tensors import (
    NAME,
    concatenate_tensors,
    copy_flat_to_tensors,
    flatten_tensor,
    make_flat_buffers,
    split_first_dimension,
)
from npuzero.comm.torch_backend.work import ShmWork, WorkAsHandle
from npuzero.errors import ContractError


class MovementCollectives(ShmGroupBase):
    """Move elements, under torch's names and with its arguments."""

    def broadcast(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        flats, afters = make_flat_buffers(tensors)
        handles = [self._group.broadcast(flat, root=opts.rootRank) for flat in flats]
        return self._work(handles, afters, tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ShmWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> ShmWork:
        wholes, afters = make_flat_buffers(output_lists)
        handles = [self._group.all_gather(w, flatten_tensor(i)) for w, i in zip(wholes, input_list, strict=True)]
        return self._work(handles, afters, output_lists)

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> ShmWork:
        ((outputs,), (shard,)) = output_tensors, input_tensors
        if all(output.numel() == shard.numel() for output in outputs):
            whole = shard.new_empty(self._group.size * shard.numel())
            handle = self._group.all_gather(whole, flatten_tensor(shard))
            return self._work([handle], [lambda: copy_flat_to_tensors(whole, outputs)], outputs)
        flats, afters = make_flat_buffers(outputs)
        flats[self._group.rank].copy_(flatten_tensor(shard))
        handles = [self._group.broadcast(flat, root=root) for root, flat in enumerate(flats)]
        return self._work(handles, afters, outputs)

    def allgather_coalesced(self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None) -> Any:
        works = [
            self.allgather([[outputs[k] for outputs in output_lists]], [shard]) for k, shard in enumerate(input_list)
        ]
        return self._work(
            [WorkAsHandle(work) for work in works], [], [out for outputs in output_lists for out in outputs]
        )

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> ShmWork:
        (shard,) = input_tensors
        whole = shard.new_empty(self._group.size * shard.numel())
        handle = self._group.all_gather(whole, flatten_tensor(shard))
        outputs = output_tensors[0] if self._group.rank == opts.rootRank else []
        return self._work([handle], [lambda: copy_flat_to_tensors(whole, outputs)], outputs)

    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> ShmWork:
        (output,) = output_tensors
        root = self._group.rank == opts.rootRank
        whole = concatenate_tensors(input_tensors[0]) if root else output.new_empty(self._group.size * output.numel())
        handle = self._group.broadcast(whole, root=opts.rootRank)
        own = whole[self._group.rank * output.numel() :][: output.numel()]
        return self._work([handle], [lambda: copy_flat_to_tensors(own, [output])], [output])

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> ShmWork:
        if not output_split_sizes and not input_split_sizes:
            (flat,), afters = make_flat_buffers([output])
            return self._work([self._group.all_to_all(flat, flatten_tensor(input))], afters, [output])
        return self.alltoall(
            split_first_dimension(output, output_split_sizes, self._group.size),
            split_first_dimension(input, input_split_sizes, self._group.size),
        )

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> ShmWork:
        handle = self._lane.run(lambda: self._exchange_parts(output_tensors, input_tensors))
        return self._work([handle], [], output_tensors)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> ShmWork:
        group = self._tagged(tag)
        return self._work([group.send(flatten_tensor(tensor), dst) for tensor in tensors], [], tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> ShmWork:
        group = self._tagged(tag)
        flats, afters = make_flat_buffers(tensors)
        return self._work([group.recv(flat, src) for flat in flats], afters, tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        raise ContractError(
            f"recv on {NAME}", expected="a source rank", got="none: any source", do="Name src, or use gloo."
        )

    def _tagged(self, tag: int) -> Communicator:
        """Return a separate communicator for each of torch's tags: different tags do not share a queue."""
        return self._world.communicator(range(self._group.size), f"tag {tag}")

    def _exchange_parts(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """Send part j of the inputs to rank j, for parts of any size: each is padded to the longest."""
        group: Communicator = self._world.communicator(range(self._group.size), "parts")
        longest = torch.tensor([max(part.numel() for part in (*outputs, *inputs))])
        lengths = longest.new_empty(group.size)
        group.all_gather(lengths, longest).wait()
        sent = inputs[0].new_empty(group.size, int(lengths.max()))
        for row, part in zip(sent, inputs, strict=True):
            row[: part.numel()].copy_(flatten_tensor(part))
        received = torch.empty_like(sent)
        group.all_to_all(received.view(-1), sent.view(-1)).wait()
        for row, output in zip(received, outputs, strict=True):
            copy_flat_to_tensors(row[: output.numel()], [output])

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
