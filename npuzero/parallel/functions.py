"""Collectives that autograd differentiates: pure functions of a tensor over a communicator.

They come in conjugate pairs: the backward of each is its partner's forward, so derivatives of any order are right.

    ======================  =================  =================  ============================================
    function                forward            backward           from, to (on the ranks of the group)
    ======================  =================  =================  ============================================
    ``copy_to_ranks``       nothing            all_reduce         the same, the same: each uses a part
    ``all_reduce_sum``      all_reduce         nothing            partial sums, the sum
    ``all_gather_dim``      all_gather         reduce_scatter     slices, the full tensor: each uses a part
    ``reduce_scatter_dim``  reduce_scatter     all_gather         partial sums, slices of the sum
    ``gather_replicated``   all_gather         this rank's slice  slices, the full tensor: all use it alike
    ``split_replicated``    this rank's slice  all_gather         the same, slices
    ``all_to_all_dims``     all_to_all         all_to_all         slices of one dimension, slices of another
    ======================  =================  =================  ============================================

Megatron-LM's f and g are ``copy_to_ranks`` and ``all_reduce_sum`` (Shoeybi et al. 2019, section 3), its
sequence-parallel g and g-bar ``all_gather_dim`` and ``reduce_scatter_dim`` (Korthikanti et al. 2022, section 4.2.2);
``all_to_all_dims`` is DeepSpeed-Ulysses' all-to-all (Jacobs et al. 2023, section 3.1).

Invariants:
    * all ranks of the group call the same functions in the same order, also in backward, on equal shapes and dtypes;
    * sums run as the communicator's: in rank order, bf16 and f16 added in f32 and rounded once; values that are the
      same on all ranks have the same bits;
    * results are contiguous and may be written into, except the view from ``copy_to_ranks``; no tensor is saved for
      backward; a group of one rank returns ``x`` itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from npuzero.comm import Communicator
from npuzero.comm.checks import WIRES
from npuzero.errors import ContractError
from npuzero.plan import divisors

_Map = Callable[[Tensor], Tensor]


class _ConjugateMap(torch.autograd.Function):
    """Apply a linear map over all ranks' tensors, and its conjugate to gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, maps: tuple[_Map, _Map]) -> Tensor:
        ctx.maps = maps
        return maps[0](x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        there, back = ctx.maps
        return _apply_linear_map(grad, back, there), None


def _apply_linear_map(x: Tensor, there: _Map, back: _Map) -> Tensor:
    # Without autograd a Python Function would cost more than the map.
    if not (x.requires_grad and torch.is_grad_enabled()):
        return there(x)
    return cast(Tensor, _ConjugateMap.apply(x, (there, back)))  # type: ignore[no-untyped-call]


def copy_to_ranks(x: Tensor, group: Communicator) -> Tensor:
    """Return ``x``, the same on all ranks; its gradient is the sum of the ranks' gradients.

    Use it before layers that each rank computes in part, such as Linears with sharded outputs. Megatron-LM's f.

    Args:
        x: [...], float; the same on all ranks.
    """
    if group.size == 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    y = x.view_as(x)
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(partial(_sum_gradients, group))  # cheaper than a Python Function
    return y


def all_reduce_sum(x: Tensor, group: Communicator) -> Tensor:
    """Return the sum of the ranks' ``x``; its gradient, the same on all ranks, is the gradient of each ``x``.

    Use it after layers that each rank computes in part, such as Linears with sharded inputs. Megatron-LM's g.

    Args:
        x: [...], float; a partial sum on each rank.
    """
    return x if group.size == 1 else _apply_linear_map(x, partial(_all_reduce_copy, group), _identity_view)


def all_gather_dim(x: Tensor, group: Communicator, dim: int) -> Tensor:
    """All-gather the ranks' ``x`` along ``dim``; backward reduce-scatters the gradients.

    Use it before layers that each rank computes in part, where the sequence is sharded outside them.

    Args:
        x: [..., n, ...], float; a slice on each rank.

    Returns:
        Tensor[..., n * ranks, ...] in the order of the group.

    Raises:
        ContractError: ``x`` has no dimension ``dim``.
    """
    return _apply_map_along(x, group, "all_gather_dim: dim", dim, _all_gather_along, _reduce_scatter_along)


def reduce_scatter_dim(x: Tensor, group: Communicator, dim: int) -> Tensor:
    """Reduce-scatter the ranks' ``x`` along ``dim``; backward all-gathers the gradients.

    Use it after layers that each rank computes in part, where the sequence is sharded outside them.

    Args:
        x: [..., n, ...], float; a partial sum on each rank.

    Returns:
        Tensor[..., n / ranks, ...].

    Raises:
        ContractError: ``x`` has no dimension ``dim``, or the group does not divide it.
    """
    return _apply_map_along(
        x, group, "reduce_scatter_dim: dim", dim, _reduce_scatter_along, _all_gather_along, divides=True
    )


def gather_replicated(x: Tensor, group: Communicator, dim: int) -> Tensor:
    """All-gather the ranks' ``x`` along ``dim``, if all ranks use the result in the same way.

    The gradient is then the same on all ranks, and each takes its slice without communication.

    Args:
        x: [..., n, ...], float; a slice on each rank.

    Returns:
        Tensor[..., n * ranks, ...] in the order of the group.

    Raises:
        ContractError: ``x`` has no dimension ``dim``.
    """
    return _apply_map_along(x, group, "gather_replicated: dim", dim, _all_gather_along, _copy_rank_slice)


def split_replicated(x: Tensor, group: Communicator, dim: int) -> Tensor:
    """Return this rank's slice along ``dim`` of ``x``, the same on all ranks; backward all-gathers the gradients.

    Args:
        x: [..., n, ...], float; the same on all ranks.

    Returns:
        Tensor[..., n / ranks, ...].

    Raises:
        ContractError: ``x`` has no dimension ``dim``, or the group does not divide it.
    """
    return _apply_map_along(x, group, "split_replicated: dim", dim, _copy_rank_slice, _all_gather_along, divides=True)


def all_to_all_dims(x: Tensor, group: Communicator, split_dim: int, gather_dim: int) -> Tensor:
    """Reshard ``x`` from ``gather_dim`` to ``split_dim`` by an all-to-all; backward reverses it.

    Use it before attention, from slices of the sequence to slices of the heads, and reversed after attention.

    Args:
        x: [..., n, ..., m, ...], float: n along ``split_dim`` and m along ``gather_dim``, in either order.

    Returns:
        Tensor[..., n / ranks, ..., m * ranks, ...].

    Raises:
        ContractError: ``x`` lacks a dimension, both are the same, or the group does not divide ``split_dim``.
    """
    splits, gathers = (
        _normalize_dimension(x, "all_to_all_dims: split_dim", split_dim),
        _normalize_dimension(x, "all_to_all_dims: gather_dim", gather_dim),
    )
    if splits == gathers:
        raise ContractError(
            "swap",
            expected="split_dim and gather_dim that differ",
            got=f"{split_dim} and {gather_dim} of {tuple(x.shape)}",
            do="Split one dimension, and gather another.",
        )
    _check_divides(x, group, "all_to_all_dims: split_dim", splits)
    if group.size == 1:
        return x
    return _apply_linear_map(
        x, partial(_all_to_all_along, group, splits, gathers), partial(_all_to_all_along, group, gathers, splits)
    )


def _apply_map_along(
    x: Tensor,
    group: Communicator,
    subject: str,
    dim: int,
    there: Callable[[Communicator, int, Tensor], Tensor],
    back: Callable[[Communicator, int, Tensor], Tensor],
    *,
    divides: bool = False,
) -> Tensor:
    """Check ``dim``, and apply a pair of maps along it."""
    dim = _normalize_dimension(x, subject, dim)
    if divides:
        _check_divides(x, group, subject, dim)
    if group.size == 1:
        return x
    return _apply_linear_map(x, partial(there, group, dim), partial(back, group, dim))


# -- the maps, with x as the last argument -----------------------------------------------------------------------------


def _identity_view(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum_gradients(group: Communicator, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (gradient,) = gradients
    return (all_reduce_sum(gradient, group) if torch.is_grad_enabled() else _all_reduce_copy(group, gradient),)


def _all_reduce_copy(group: Communicator, x: Tensor) -> Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(result.ravel()).wait()
    return result


def _copy_rank_slice(group: Communicator, dim: int, x: Tensor) -> Tensor:
    part = x.shape[dim] // group.size  # a copy, because a view would keep all of x alive
    return x.narrow(dim, group.rank * part, part).clone(memory_format=torch.contiguous_format)


def _all_gather_along(group: Communicator, dim: int, x: Tensor) -> Tensor:
    return _unpack_slices(group.gathered(x.ravel()), group.size, x.shape, dim)


def _reduce_scatter_along(group: Communicator, dim: int, x: Tensor) -> Tensor:
    if x.dtype not in WIRES:  # float64, which reduce_scatter does not support
        return _copy_rank_slice(group, dim, _all_reduce_copy(group, x))
    part = group.scattered(_pack_slices(x, group.size, dim)).view(_resize_dimension(x.shape, dim, 1, group.size))
    return part.data  # not a view to autograd, so that a program may write into it


def _all_to_all_along(group: Communicator, splits: int, gathers: int, x: Tensor) -> Tensor:
    parts = _pack_slices(x, group.size, splits)
    received = torch.empty_like(parts)
    group.all_to_all(received, parts).wait()
    return _unpack_slices(received, group.size, _resize_dimension(x.shape, splits, 1, group.size), gathers)


def _pack_slices(x: Tensor, ranks: int, dim: int) -> Tensor:
    """Return the slices along ``dim`` one after another, without a copy if all dimensions before it are 1."""
    if math.prod(x.shape[:dim]) > 1:
        x = x.unflatten(dim, (ranks, x.shape[dim] // ranks)).movedim(dim, 0)
    return x.ravel()


def _unpack_slices(parts: Tensor, ranks: int, shape: Sequence[int], dim: int) -> Tensor:
    """Return the inverse of ``_pack_slices`` for parts of ``shape``, without a copy in the same case."""
    if math.prod(shape[:dim]) > 1:
        whole = parts.view(ranks, *shape).movedim(0, dim).flatten(dim, dim + 1)
    else:
        whole = parts.view(_resize_dimension(shape, dim, ranks, 1))
    return whole.data  # not a view, as above


def _resize_dimension(shape: Sequence[int], dim: int, times: int, over: int) -> list[int]:
    """Return ``shape`` with ``dim`` multiplied by ``times`` and divided by ``over``."""
    sizes = list(shape)
    sizes[dim] = sizes[dim] * times // over
    return sizes


# -- checks ------------------------------------------------------------------------------------------------------------


def _normalize_dimension(x: Tensor, subject: str, dim: int) -> int:
    dims = x.dim()
    if not -dims <= dim < dims:
        raise ContractError(
            subject,
            expected=f"a dimension of {tuple(x.shape)}, {-dims} to {dims - 1}" if dims else "a dimension",
            got=f"{dim} of shape {tuple(x.shape)}",
            do="Name the dimension that is sharded.",
        )
    return dim % dims


def _check_divides(x: Tensor, group: Communicator, subject: str, dim: int) -> None:
    size = x.shape[dim]
    if size % group.size:
        raise ContractError(
            subject,
            expected=f"a size that the {group.size} ranks of {group.name!r} divide",
            got=f"{size}, dimension {dim} of {tuple(x.shape)}",
            do=f"Use {_format_alternatives(divisors(size))} ranks, or pad to {-(-size // group.size) * group.size}.",
            size=size,
            ranks=group.size,
            divisors=divisors(size),
        )


def _format_alternatives(numbers: list[int]) -> str:
    return " or ".join(filter(None, (", ".join(map(str, numbers[:-1])), str(numbers[-1]))))
