"""Shard sequences over ranks: each rank has a slice of every sequence, and within attention a slice of the heads.

Outside attention a token is computed independently, so a rank with ``1 / q`` of the tokens computes and stores ``1 /
q`` of the activations. Around attention two all_to_alls reshard (DeepSpeed-Ulysses, Jacobs et al. 2023)::

    [batch, heads, seq / q, dim]  ->  [batch, heads / q, seq, dim]  ->  attention  ->  [batch, heads, seq / q, dim]

With ``t`` query and ``k`` key heads a layer's forward sends ``batch * seq * (2 t + 2 k) * dim / q * (q - 1) / q``
elements from each rank, and its backward as many. Ranks that share a sequence are still data ranks: each sees different
tokens, so gradients are averaged over them, and :func:`token_loss` makes that the mean over all tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from npuzero.comm import Communicator, Mesh
from npuzero.comm.mesh import check_mesh
from npuzero.errors import ConfigError
from npuzero.parallel.functions import all_to_all_dims
from npuzero.plan import DATA, SEQUENCE, divisors

_Attention = TypeVar("_Attention", bound=Callable[..., Tensor])

#: The label of tokens that do not count in a loss, as in torch.
IGNORED = -100
#: The packed sequence that each token of the unsharded sequence belongs to: [batch, seq] int64.
PACKED = "sequence_ids"


def attention(function: _Attention, mesh: Mesh) -> _Attention:
    """Wrap an attention function for slices of sequences: it sees full sequences and some of the heads.

    Args:
        function: ``(q, k, v, ...) -> out`` of [batch, heads / ranks, seq, dim]; k and v may have fewer heads than q.
            Other arguments are passed on unchanged. Heads of k and v are repeated if the ranks do not divide them.
        mesh: from :func:`npuzero.mesh`; every rank of its ``sequence`` axis calls the returned function.

    Returns:
        The same function on slices: [batch, heads, seq / ranks, dim].

    Raises:
        ConfigError: when it is called, the ranks do not divide the heads.

    Example::

        mesh = npuzero.mesh(sequence=1)
        attend = npuzero.parallel.attention(torch.nn.functional.scaled_dot_product_attention, mesh)
        q = k = v = torch.randn(2, 4, 16, 8)
        out = attend(q, k, v, is_causal=True)
    """
    group = sequence_group(mesh)
    if group.size == 1:
        return function

    @functools.wraps(function)
    def over_slices(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        return all_to_all_dims(function(*exchange_for_heads(q, k, v, group), *args, **options), group, 2, 1)

    return cast(_Attention, over_slices)


def exchange_for_heads(q: Tensor, k: Tensor, v: Tensor, group: Communicator) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's heads of full sequences, from all heads of its slice: [batch, heads, seq, dim]."""
    check_sequence_heads("attention", q.shape[1], group.size)
    # The fewest copies that make the ranks divide the key heads. They divide the query heads, so each key head serves
    # equally many.
    copies = group.size // math.gcd(k.shape[1], group.size)
    if copies > 1:
        k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    q, k, v = (all_to_all_dims(x, group, 1, 2) for x in (q, k, v))
    return q, k, v


def check_sequence_heads(subject: str, heads: int, ranks: int) -> None:
    """Raise ConfigError if the ranks do not divide the heads."""
    if heads % ranks:
        raise ConfigError(
            subject,
            expected=f"heads that the {ranks} ranks of the sequence axis divide",
            got=f"{heads} heads",
            do=f"Choose sequence among {', '.join(map(str, divisors(heads)))}.",
            heads=heads,
            sequence=ranks,
            divisors=divisors(heads),
        )


@overload
def slice(batch: Tensor, mesh: Mesh) -> Tensor: ...


@overload
def slice(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]: ...


def slice(batch: Tensor | Mapping[str, Any], mesh: Mesh) -> Tensor | dict[str, Any]:
    """Return this rank's slice of unsharded sequences, the same on all ranks of the ``sequence`` axis.

    In a mapping, such as the arguments of a transformers model, tensors [batch, seq, ...] are sliced. First ``labels``
    are shifted so that a token's label is the next token. Missing ``position_ids`` are added. An ``attention_mask`` is
    not sliced, since attention sees full sequences. If position ids restart within a row, the row packs several
    sequences: ``sequence_ids`` are added for :func:`sequence`. Other entries stay unchanged.

    Args:
        batch: [batch, seq, ...], or tensors by name, ``input_ids``, ``inputs_embeds`` or ``labels`` among them.
        mesh: from :func:`npuzero.mesh`.

    Raises:
        ConfigError: the ranks do not divide the sequence; no entry has its length.

    Example::

        mesh = npuzero.mesh(sequence=1)
        tokens = torch.randint(100, (2, 16))
        part = npuzero.parallel.slice({"input_ids": tokens, "labels": tokens}, mesh)
        assert part["position_ids"].shape == part["labels"].shape == (2, 16 // mesh.size(("sequence",)))
    """
    group = sequence_group(mesh)
    if isinstance(batch, Tensor):
        return _slice_sequence(batch, group)
    names = [name for name in ("input_ids", "inputs_embeds", "labels") if isinstance(batch.get(name), Tensor)]
    if not names:
        raise ConfigError(
            "parallel.slice",
            expected="input_ids, inputs_embeds or labels, which say how long sequences are",
            got=f"{', '.join(map(repr, batch)) or 'nothing'}",
            do="Name one of the tensors so, or slice each by itself.",
        )
    example = batch[names[0]]
    whole = dict(batch)
    # Shifting and packing need neighbours across slices, and default positions the offset, so all precede slicing.
    if "labels" in whole:
        whole["labels"] = F.pad(whole["labels"][:, 1:], (0, 1), value=IGNORED)
    packed = _packed_sequence_ids(whole["position_ids"]) if whole.get("position_ids") is not None else None
    if whole.get("position_ids") is None:
        whole["position_ids"] = torch.arange(example.shape[1], device=example.device).expand(example.shape[:2])
    parts = {
        name: _slice_sequence(value, group)
        if isinstance(value, Tensor) and value.shape[1:2] == example.shape[1:2] and name != "attention_mask"
        else value
        for name, value in whole.items()
    }
    return parts if packed is None else {**parts, PACKED: packed}


def _packed_sequence_ids(positions: Tensor) -> Tensor | None:
    """Return the index of each token's sequence within its row, [batch, seq]; None if no row packs sequences."""
    begins = positions.diff(dim=1) != 1
    return F.pad(begins.cumsum(1), (1, 0)) if begins.any() else None


def _slice_sequence(x: Tensor, group: Communicator) -> Tensor:
    length = x.shape[1] if x.dim() > 1 else 0
    if not length or length % group.size:
        raise ConfigError(
            "parallel.slice",
            expected=f"[batch, seq, ...] with a seq that the {group.size} ranks of the sequence axis divide",
            got=str(list(x.shape)),
            do=f"Choose sequence among {', '.join(map(str, divisors(length)))}, or pad to "
            f"{-(-length // group.size) * group.size}."
            if length
            else "Give whole sequences.",
            seq=length,
            sequence=group.size,
            divisors=divisors(length) if length else [],
        )
    return x.chunk(group.size, 1)[group.rank].contiguous()


def token_loss(logits: Tensor, labels: Tensor, mesh: Mesh, *, tokens: float | Tensor | None = None) -> Tensor:
    """Return the mean loss over the tokens of all ranks, with the same bits on each. Every data rank calls it.

    Slices may differ in their number of labels. The gradient of each rank's tokens is weighted so that the mean over
    data ranks, which training takes, is the gradient of the mean over all tokens.

    Args:
        logits: [batch, seq, classes], for a cross entropy in float32; or losses: [batch, seq], one a token.
        labels: [batch, seq] int64, of the same tokens, shifted by :func:`slice`; -100 does not count.
        mesh: from :func:`npuzero.mesh`.
        tokens: the number of labels that count, over all ranks; None: in this call. For gradient accumulation pass the
            number in all micro-batches of the step: the step is then the mean over all its tokens.

    Returns:
        () float32. NaN if no label counts, as in torch.

    Raises:
        ConfigError: shapes that differ.

    Example::

        mesh = npuzero.mesh(sequence=1)
        logits, labels = torch.randn(2, 16, 100, requires_grad=True), torch.randint(100, (2, 16))
        npuzero.parallel.token_loss(logits, labels, mesh).backward()
    """
    counts = labels != IGNORED
    if logits.shape[:-1] == labels.shape:
        losses = F.cross_entropy(
            logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="none"
        )
    elif logits.shape == labels.shape:
        losses = logits.float().masked_fill(~counts, 0.0)
    else:
        raise ConfigError(
            "parallel.token_loss",
            expected=f"logits {[*labels.shape, 'classes']} or losses {list(labels.shape)}, as labels are",
            got=str(list(logits.shape)),
            do="Give what the model makes of the same slice.",
        )
    sums = torch.stack((losses.sum(dtype=torch.float64), counts.sum(dtype=torch.float64)))
    sums = cast(Tensor, _SumOverRanks.apply(sums, _get_axis_communicator(mesh, DATA)))  # type: ignore[no-untyped-call]
    return (sums[0] / (sums[1] if tokens is None else tokens)).float()


class _SumOverRanks(torch.autograd.Function):
    """All-reduce sums. Backward multiplies by the number of ranks, since the engine averages gradients over them."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, everyone: Communicator) -> Tensor:
        ctx.ranks = everyone.size
        sums = sums.clone()
        everyone.all_reduce(sums, tag="token loss").wait()
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.ranks, None


def sequence_group(mesh: Mesh) -> Communicator:
    """Return the communicator of the ranks that share this rank's sequences.

    Raises:
        ConfigError: ``mesh`` is not a mesh.
    """
    return _get_axis_communicator(mesh, (SEQUENCE,))


def _get_axis_communicator(mesh: Mesh, axes: tuple[str, ...]) -> Communicator:
    check_mesh("npuzero.parallel", mesh)
    return mesh.communicator(axes, SEQUENCE)
