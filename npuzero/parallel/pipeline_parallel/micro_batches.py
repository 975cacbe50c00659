"""Split a batch of a pipeline's step into equal micro-batches, and merge their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from npuzero.errors import ContractError
from npuzero.plan import divisors

#: Arguments of a step: positional arguments, keyword arguments, and targets of the loss.
Batch = tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]


def split_micro_batches(batch: Batch, count: int) -> list[Batch]:
    """Return ``count`` equal parts of a batch along the first dimension of its tensors.

    Raises:
        ContractError: there is no tensor, or its first dimension does not divide.
    """
    leaves, tree = tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    size = tensors[0].shape[0] if tensors else 0
    if not size or size % count:
        raise ContractError(
            "pipeline.step: the batch",
            expected=f"tensors of a first dimension that {count} micro-batches divide",
            got=f"{size}" if tensors else "no tensor",
            do=f"Give a multiple of {count}, or micro_batches={divisors(size)}."
            if size
            else "Give the model's inputs.",
        )
    # A leaf that is no tensor, or has another first dimension, such as a mask shared by all rows, is not split.
    parts = [
        leaf.chunk(count) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size else [leaf] * count
        for leaf in leaves
    ]
    return [tree_unflatten(list(each), tree) for each in zip(*parts, strict=True)]


def merge_micro_batches(outputs: Sequence[Any]) -> Any:
    """Merge the outputs of micro-batches: concatenate tensors along the first dimension.

    A model output is merged by its ``logits``.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else torch.stack(list(outputs))
    if isinstance(first, (tuple, list)):
        return tuple(merge_micro_batches(each) for each in zip(*outputs, strict=True))
    logits = [getattr(output, "logits", None) for output in outputs]
    return list(outputs) if any(each is None for each in logits) else merge_micro_batches(logits)
