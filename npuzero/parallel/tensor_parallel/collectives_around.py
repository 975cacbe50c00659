"""Forward hooks around cut Linears, embeddings and blocks, with the collectives of each mode.

Linears with a common input share its collective: the first one called copies or all-gathers the input, and the
remaining ones take the same tensor. Invariants:

    * an input is released as soon as all Linears of its region, or the row Linear after them, have been called;
    * the bias of a Linear cut by rows is added once, after the sum of the ranks' parts: that Linear runs without it;
    * under ``fsp`` autograd saves this rank's slice of an input; the first unpack in backward all-gathers it for all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from npuzero.comm import Communicator
from npuzero.errors import ContractError
from npuzero.parallel.functions import (
    all_gather_dim,
    all_reduce_sum,
    copy_to_ranks,
    gather_replicated,
    reduce_scatter_dim,
    split_replicated,
)
from npuzero.plan import divisors

#: The sequence dimension of activations.
SEQUENCE_DIM = 1


class ColumnLinearInputs:
    """Prepare the input of Linears cut by columns, which may share one.

    Args:
        sliced: the input is this rank's slice of the sequence.
        thrifty: save only the slice of the gathered input for backward.
        around: the module that must get the gathered input, because it shapes these Linears' outputs by it; None: no
            module does.
    """

    def __init__(self, group: Communicator, sliced: bool, thrifty: bool, around: nn.Module | None = None) -> None:
        self._group = group
        self._sliced = sliced
        self._thrifty = thrifty
        self._linears: set[nn.Module] = set()
        self._waiting: set[nn.Module] = set()  # Linears that have not yet taken the present input
        self._given: Tensor | None = None
        self._version = 0  # autograd version of the given input
        self._taken: Tensor | None = None
        self._saving: saved_tensors_hooks | None = None
        self._open: saved_tensors_hooks | None = None
        self._around = around is not None
        if around is not None:
            around.register_forward_pre_hook(self._before_all, with_kwargs=True)

    def serve(self, linear: nn.Linear) -> None:
        """Register the hooks that give ``linear`` its input."""
        self._linears.add(linear)
        if not self._around:
            linear.register_forward_pre_hook(self._before)
        if self._thrifty:
            linear.register_forward_pre_hook(self._begin_saving)
            linear.register_forward_hook(self._end_saving, always_call=True)

    def forget(self) -> None:
        """Release the present input."""
        self._given = self._taken = self._saving = None
        self._waiting.clear()

    def _before_all(self, _around: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _replace_activations(args, kwargs, self._take)

    def _before(self, linear: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        version = 0 if x.is_inference() else x._version
        if x is not self._given or version != self._version or linear not in self._waiting:
            self._taken = self._take(x)
            self._given, self._version, self._waiting = x, version, self._linears.copy()
        self._waiting.discard(linear)
        taken = self._taken
        if not self._waiting:
            self._given = self._taken = None
        return taken, *args[1:]

    def _begin_saving(self, _linear: nn.Module, _args: tuple[Any, ...]) -> None:
        self._open = self._saving
        if self._open is not None:
            self._open.__enter__()

    def _end_saving(self, _linear: nn.Module, _args: tuple[Any, ...], _output: Tensor | None) -> None:
        if self._open is not None:
            self._open.__exit__()
            self._open = None

    def _take(self, x: Tensor) -> Tensor:
        if not self._sliced:
            return copy_to_ranks(x, self._group)
        whole = all_gather_dim(x, self._group, SEQUENCE_DIM)
        self._saving = None
        if self._thrifty and torch.is_grad_enabled() and self._group.size > 1:
            kept = _SavedInputSlice(x.detach(), whole, self._group)
            self._saving = saved_tensors_hooks(kept.pack, kept.unpack)
        return whole


class _SavedInputSlice:
    """Save this rank's slice of a gathered input for backward, in place of the full input."""

    def __init__(self, own: Tensor, whole: Tensor, group: Communicator) -> None:
        self._own = own
        self._group = group
        self._storage = whole.untyped_storage().data_ptr()
        self._users = 0
        self._left = 0  # unpacks still to come in this backward
        self._whole: Tensor | None = None

    def pack(self, saved: Tensor) -> Any:
        if saved.untyped_storage().data_ptr() != self._storage:
            return saved
        self._users += 1
        return saved.size(), saved.stride(), saved.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._whole is None:
            self._whole, self._left = all_gather_dim(self._own, self._group, SEQUENCE_DIM), self._users
        whole = self._whole.as_strided(*packed)
        self._left -= 1
        if not self._left:
            self._whole = None
        return whole


def gather_output(linear: nn.Linear, group: Communicator) -> None:
    """Make a Linear cut by columns return all features."""
    linear.register_forward_hook(lambda _linear, _args, output: gather_replicated(output, group, -1))


class RowLinearOutputs:
    """Sum the outputs of a Linear cut by rows, which are partial sums.

    Args:
        sliced: reduce-scatter the sum along the sequence; else all-reduce it.
        whole: the Linear's input is full and the same on all ranks.
        inputs: the inputs of its region, to be released.
    """

    def __init__(
        self, linear: nn.Linear, group: Communicator, sliced: bool, whole: bool, inputs: ColumnLinearInputs | None
    ) -> None:
        self._group = group
        self._sliced = sliced
        self._whole = whole
        self._inputs = inputs
        self._biased = linear.bias is not None
        if whole or self._biased:
            linear.register_forward_pre_hook(self._before)
        linear.register_forward_hook(self._after, always_call=True)

    def _before(self, linear: nn.Linear, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        linear.__dict__["bias"] = None  # found before the parameter, which stays registered
        return (split_replicated(args[0], self._group, -1), *args[1:]) if self._whole else None

    def _after(self, linear: nn.Linear, _args: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
        if self._inputs is not None:
            self._inputs.forget()
        linear.__dict__.pop("bias", None)
        if output is None:  # the forward has raised
            return None
        done = reduce_scatter_dim(output, self._group, SEQUENCE_DIM) if self._sliced else self._summed(output)
        return done + linear.bias if self._biased else done

    def _summed(self, output: Tensor) -> Tensor:
        """Return the sum of the ranks' outputs, in place if no other code can see the output.

        The gradient of a sum is the gradient of each part, so autograd needs no function, except for double backward.
        If autograd had saved the output, its version counter would reveal the write.
        """
        if self._group.size == 1 or type(output) is not Tensor or not output.is_contiguous():
            return all_reduce_sum(output, self._group)
        self._group.all_reduce(output.detach().ravel()).wait()
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(partial(self._gradients, output.output_nr))
        return output

    def _gradients(self, own: int, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not torch.is_grad_enabled():
            return None
        return (*gradients[:own], copy_to_ranks(gradients[own], self._group), *gradients[own + 1 :])


class ShardedEmbeddingRows:
    """Look up an embedding with the rows ``[first, first + rows)`` on this rank, and all-reduce the outputs."""

    def __init__(self, embedding: nn.Embedding, group: Communicator, rows: int) -> None:
        self._group = group
        self._rows = rows
        self._first = group.rank * rows
        self._elsewhere: Tensor | None = None
        self._padding: int | None = None
        embedding.register_forward_pre_hook(self._before)
        embedding.register_forward_hook(self._after, always_call=True)

    def _before(self, embedding: nn.Embedding, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids = args[0] - self._first
        self._elsewhere = (ids < 0) | (ids >= self._rows)
        strange = (args[0] < 0) | (args[0] >= self._rows * self._group.size)  # become -1, which the lookup refuses
        self._padding = embedding.padding_idx
        own = -1 if self._padding is None else self._padding - self._first
        embedding.padding_idx = own if 0 <= own < self._rows else None
        return ids.masked_fill(self._elsewhere, 0).masked_fill(strange, -1), *args[1:]

    def _after(self, embedding: nn.Embedding, _args: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
        embedding.padding_idx, elsewhere, self._elsewhere = self._padding, self._elsewhere, None
        if output is None or elsewhere is None:
            return None
        return all_reduce_sum(output.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._group)


def slice_sequence_between(first: nn.Module, last: nn.Module, group: Communicator) -> None:
    """Slice the sequence over ranks from ``first`` to ``last``, which are called in this order."""
    first.register_forward_pre_hook(_make_slicing_hook(group), with_kwargs=True)
    last.register_forward_hook(_make_gathering_hook(group))


def _make_slicing_hook(group: Communicator) -> Callable[..., tuple[Any, Any]]:
    def slice_of(x: Tensor) -> Tensor:
        _check_block_input(x, group)
        return split_replicated(x, group, SEQUENCE_DIM)

    return lambda _module, args, kwargs: _replace_activations(args, kwargs, slice_of)


def _replace_activations(
    args: tuple[Any, ...], kwargs: dict[str, Any], become: Callable[[Tensor], Tensor]
) -> tuple[Any, Any]:
    """Return a call's arguments with the activations replaced: the first argument, or ``hidden_states``."""
    if args:
        return (become(args[0]), *args[1:]), kwargs
    tensors = [name for name, x in kwargs.items() if isinstance(x, Tensor) and x.is_floating_point()]
    if not tensors:
        raise ContractError(
            "parallel.tensor(): mode 'msp'",
            expected="a call with activations",
            got=f"arguments {', '.join(kwargs) or 'of none'}",
            do="Pass activations first, or as hidden_states, or use mode='mtp'.",
        )
    name = "hidden_states" if "hidden_states" in tensors else tensors[0]
    return args, {**kwargs, name: become(kwargs[name])}


def _make_gathering_hook(group: Communicator) -> Callable[..., Any]:
    def leave(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return gather_replicated(output, group, SEQUENCE_DIM)
        return type(output)((gather_replicated(output[0], group, SEQUENCE_DIM), *output[1:]))

    return leave


def _check_block_input(x: Any, group: Communicator) -> None:
    shape = tuple(x.shape) if isinstance(x, Tensor) else None
    if shape is None or len(shape) != 3:
        raise ContractError(
            "parallel.tensor(): mode 'msp': the input of the first block",
            expected="activations of shape [batch, sequence, features], before all else",
            got=f"shape {shape}" if shape is not None else type(x).__name__,
            do="Have blocks take and return such, or use mode='mtp'.",
        )
    if shape[SEQUENCE_DIM] % group.size:
        fitting = divisors(shape[SEQUENCE_DIM])
        raise ContractError(
            "parallel.tensor(): axis tensor: sequence of the first block's input",
            expected=f"a length that {group.size} tensor ranks divide",
            got=f"{shape[SEQUENCE_DIM]}, of shape {shape}",
            do=f"Pad sequences, choose tensor={' or '.join(map(str, fitting))}, or use mode='mtp'.",
            axis="tensor",
            divisors=fitting,
        )
