"""Build the loader of ``training_data``: micro-batches of this rank's samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from npuzero.comm import World
from npuzero.compat.deepspeed.recipe import EngineRecipe
from npuzero.config import describe_value
from npuzero.errors import ConfigError


def build_data_loader(
    data: Any, collate: Callable[[Any], Any] | None, recipe: EngineRecipe, world: World
) -> DataLoader[Any] | None:
    """Return a loader over ``data`` as DeepSpeed makes one: shuffled equally on all ranks, each with its part.

    An iterable dataset divides itself. Without data the result is None.

    Raises:
        ConfigError: ``data`` is no dataset.
    """
    if data is None:
        return None
    if not isinstance(data, Dataset) and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise ConfigError(
            "training_data",
            expected="a torch.utils.data.Dataset, or what has items and a length",
            got=describe_value(data),
            do="Pass the dataset; a loader of yours needs no initialize().",
        )
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(data, IterableDataset):
        sampler = DistributedSampler(data, world.size, world.rank)
    return DataLoader(
        data,
        recipe.batch.micro,
        sampler=sampler,
        collate_fn=collate,
        drop_last=recipe.drop_last,
        pin_memory=world.device.type != "cpu",
    )
