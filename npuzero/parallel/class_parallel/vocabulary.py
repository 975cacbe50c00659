"""Shard a vocabulary over ranks: the rows of an embedding, and a cross entropy of sharded logits.

Each rank of a group of t holds rows [rank * v/t, (rank + 1) * v/t) of an embedding or of an output Linear, the same
number on all. Rows from ``vocabulary`` on are padding, so that v is a multiple of t: they are never looked up, and have
no share in a softmax. The softmax over ranks is one all_gather of (maximum, sum of exponentials, logit of the target)
per row, merged in rank order, identically on all ranks (Milakov and Gimelshein 2018, section 3.1, for the merge).

Notation:
    z        logits, [n, local] on each rank
    lse      log of the sum over all classes of exp(z), [n]
    eps      label smoothing: the target gets 1 - eps, and every class another eps / classes
    loss     lse - (1 - eps) * z[target] - eps / classes * sum of z,     per row
    d loss   exp(z - lse) - (1 - eps) * [class is target] - eps / classes
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from npuzero.comm import Communicator
from npuzero.errors import ContractError
from npuzero.parallel import functions

REDUCTIONS = ("mean", "sum", "none")


def lookup_local_rows(ids: Tensor, weight: Tensor, group: Communicator, *, vocabulary: int | None = None) -> Tensor:
    """Look up the rows of ``ids`` on this rank, and zeros for other ranks' rows: a partial sum of the embedding.

    Args:
        ids: [...], integers; the same on all ranks.
        weight: [v / ranks, h], float; this rank's rows.
        vocabulary: rows without padding; None: all.

    Returns:
        Tensor[..., h], for ``functions.all_reduce_sum`` or ``functions.reduce_scatter_dim``.

    Raises:
        ContractError: there are fewer rows than ``vocabulary``.
        IndexError: an id is outside the vocabulary; raised on every rank, as by ``F.embedding``.
    """
    rows = weight.shape[0]
    vocabulary = _check_class_count("lookup_local_rows", vocabulary, rows, group)
    own = ids - group.rank * rows
    inside = (ids >= 0) & (ids < vocabulary)
    elsewhere = inside & ((own < 0) | (own >= rows))
    # An id outside the vocabulary becomes -1 even if a padding row has it, so that the lookup refuses it.
    own = torch.where(inside, own.masked_fill(elsewhere, 0), -1)
    return F.embedding(own, weight).masked_fill(elsewhere[..., None], 0.0)


def sharded_embedding(ids: Tensor, weight: Tensor, group: Communicator, *, vocabulary: int | None = None) -> Tensor:
    """Look up the rows of ``ids`` in an embedding sharded over the group; all ranks get the same.

    Args:
        ids: [...], integers; the same on all ranks.
        weight: [v / ranks, h], float; this rank's rows. Its gradient covers these rows.
        vocabulary: rows without padding; None: all.

    Returns:
        Tensor[..., h].

    Raises:
        ContractError: there are fewer rows than ``vocabulary``.
        IndexError: an id is outside the vocabulary.
    """
    return functions.all_reduce_sum(lookup_local_rows(ids, weight, group, vocabulary=vocabulary), group)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: Communicator,
    *,
    vocabulary: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Compute ``F.cross_entropy`` of logits that are sharded over the group, with the same bits on all ranks.

    Computed in float32 (float64 for float64), with one float copy of ``logits`` at a time and none between forward and
    backward. Backward sends nothing.

    Args:
        logits: [..., v / ranks], float; this rank's classes. Its gradient covers these classes.
        target: [...], integers; the same on all ranks.
        vocabulary: classes without padding; None: all.
        ignore_index: the target of rows that do not count.
        label_smoothing: in [0, 1].
        reduction: "mean" over the rows that count, "sum" or "none".

    Returns:
        A scalar, or Tensor[...] with zeros where rows do not count.

    Raises:
        ContractError: shapes or options do not fit; on the CPU also a target outside the vocabulary, which gives a loss
            of inf on other devices.
    """
    local = logits.shape[-1] if logits.dim() else 0
    vocabulary = _check_class_count("cross_entropy", vocabulary, local, group)
    if logits.shape[:-1] != target.shape:
        _refuse_cross_entropy(
            "target", f"{tuple(logits.shape[:-1])}, as logits without classes", str(tuple(target.shape))
        )
    if not 0.0 <= label_smoothing <= 1.0:
        _refuse_cross_entropy("label_smoothing", "a number from 0 to 1", repr(label_smoothing))
    if reduction not in REDUCTIONS:
        _refuse_cross_entropy("reduction", f"one of {REDUCTIONS}", repr(reduction))
    counts = target != ignore_index
    outside = counts & ((target < 0) | (target >= vocabulary))
    if outside.device.type == "cpu" and outside.any():  # on a device this would synchronize
        _refuse_cross_entropy("target", f"0 to {vocabulary - 1}, or {ignore_index}", str(int(target[outside][0])))
    first = group.rank * local
    own = torch.where(counts & (target >= first) & (target < first + local), target - first, -1)
    present = min(max(vocabulary - first, 0), local)  # padding is at the end
    flat = logits.reshape(-1, local)[:, :present]
    losses = softmax_loss(flat, own.reshape(-1), group, vocabulary, label_smoothing).view(target.shape)
    losses = losses.masked_fill(~counts, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


def softmax_loss(
    logits: Tensor, own: Tensor, group: Communicator, classes: int, label_smoothing: float = 0.0
) -> Tensor:
    """Compute each row's cross entropy over the classes of all ranks, with the same bits on all ranks.

    Args:
        logits: [n, local], float; ``local`` may differ between ranks, and be 0.
        own: [n], int64: the target's column in ``logits``, or -1 if another rank has it.
        classes: over all ranks.
        label_smoothing: in [0, 1].

    Returns:
        Tensor[n], float32 (float64 for float64); inf if no rank has the target.
    """
    return cast(Tensor, _SoftmaxLoss.apply(logits, own, group, classes, label_smoothing))  # type: ignore[no-untyped-call]


class _SoftmaxLoss(torch.autograd.Function):
    """Compute the loss of rows; backward recomputes the softmax from the logits instead of saving it."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, own: Tensor, group: Communicator, classes: int, smoothing: float) -> Tensor:
        found = torch.stack(_row_statistics(z, own, smooth=smoothing > 0))
        every = found.new_empty(group.size, *found.shape)
        group.all_gather(every.view(-1), found.view(-1)).wait()
        tops, sums, targets, *totals = every.unbind(1)
        top = tops.amax(0)
        lse = top + _sum_in_rank_order(sums * (tops - top).exp()).log()
        loss = lse - (1.0 - smoothing) * targets.amax(0)
        if totals:
            loss -= smoothing / classes * _sum_in_rank_order(totals[0])
        ctx.save_for_backward(z, own, lse)
        ctx.smoothing, ctx.share = smoothing, smoothing / classes
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        z, own, lse = ctx.saved_tensors
        p = (z - lse[:, None]).exp_()
        if ctx.smoothing:
            p.sub_(ctx.share)
        if z.shape[1]:
            mine = (own >= 0).to(p.dtype)[:, None]
            p.scatter_add_(1, own.clamp(min=0)[:, None], mine * (ctx.smoothing - 1.0))
        return p.mul_(grad[:, None]).to(z.dtype), None, None, None, None


def _row_statistics(z: Tensor, own: Tensor, *, smooth: bool) -> list[Tensor]:
    """Return each row's maximum, sum of exp(z - maximum), target logit or -inf, and sum of z if ``smooth``.

    All are float32 or wider. z is converted once, where it is exponentiated.
    """
    dtype = torch.promote_types(z.dtype, torch.float32)
    nothing = torch.full(own.shape, -torch.inf, dtype=dtype, device=z.device)
    if not z.shape[1]:
        top, target = nothing, nothing
    else:
        top = z.amax(1).to(dtype)
        target = torch.where(own >= 0, z.gather(1, own.clamp(min=0)[:, None])[:, 0].to(dtype), nothing)
    top = top.clamp(min=torch.finfo(dtype).min)  # not -inf: if all logits are -inf, exp(-inf - top) must be 0, not NaN
    total = (z - top[:, None]).exp_().sum(1)
    return [top, total, target, *([z.sum(1, dtype=dtype)] if smooth else [])]


def _sum_in_rank_order(parts: Tensor) -> Tensor:
    """Return the sum of parts[ranks, n] in rank order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _check_class_count(name: str, vocabulary: int | None, local: int, group: Communicator) -> int:
    """Return the number of classes without padding, over all ranks, after checking it."""
    if vocabulary is None:
        return local * group.size
    if not 0 < vocabulary <= local * group.size:
        raise ContractError(
            f"{name}: vocabulary",
            expected=f"1 to {local * group.size}: {group.size} ranks of {group.name!r} with {local} classes each",
            got=str(vocabulary),
            do=f"Pad to {-(-vocabulary // group.size)} classes on each rank."
            if vocabulary > 0
            else "Count the classes.",
        )
    return vocabulary


def _refuse_cross_entropy(what: str, expected: str, got: str) -> NoReturn:
    raise ContractError(f"cross_entropy: {what}", expected=expected, got=got, do="As torch's own cross_entropy has it.")
