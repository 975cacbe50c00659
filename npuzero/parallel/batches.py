"""Divide the global batch of a step over any number of ranks: the same samples in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch

from npuzero import comm
from npuzero.comm import Mesh
from npuzero.config import SettingRule
from npuzero.errors import ConfigError, refuse_unknown_keywords
from npuzero.parallel.mesh import check_given_ranks
from npuzero.plan import DATA, divisors

_COUNT = SettingRule(int, "how many", least=1, most=2**62)
_STEP = SettingRule(int, "steps taken before", least=0, most=2**62)
_SEED = SettingRule(int, "where the order of samples begins", least=0, most=2**31 - 1)


@refuse_unknown_keywords(
    train_batch_size="size",
    global_batch_size="size",
    micro_batch_size="micro",
    train_micro_batch_size_per_gpu="micro",
    shuffle="seed",
)
class GlobalBatch:
    """Divide each step's batch over the data ranks, as micro-batches of equal size.

    The samples of a step and their order depend on ``samples``, ``size`` and ``seed`` only. A run resumed on fewer or
    more ranks takes the same steps, in more or fewer micro-batches. The object has no state between steps, so the step
    number is the full position in the data. Ranks that share batches (along the tensor, pipe or sequence axis) get the
    same.

    Args:
        samples: in the data set; every epoch visits each once; a batch may span two epochs.
        size: samples in a step, over all ranks.
        micro: the most samples in a micro-batch; fewer if it does not divide a rank's share.
        seed: of each epoch's order (8 bytes a sample are cached); None: the order of the data in every epoch.
        mesh: the ranks; None: all ranks of this run, each with different data.

    Attributes:
        size: as given.
        micro: samples in each micro-batch.
        accumulate: micro-batches in each step, the same number on every rank.

    Raises:
        ConfigError: the data ranks do not divide ``size``, or an argument is out of range.

    Example::

        batch = npuzero.GlobalBatch(samples=100, size=16, micro=4)
        for step in range(3):
            for rows in batch.micro_batches(step):  # indices into the data set
                loss = torch.ones(len(rows)).mean() / batch.accumulate
    """

    def __init__(self, samples: int, size: int, *, micro: int, seed: int | None = 0, mesh: Mesh | None = None) -> None:
        for name, value in {"samples": samples, "size": size, "micro": micro}.items():
            _COUNT.check(f"GlobalBatch: {name}", value)
        if seed is not None:
            _SEED.check("GlobalBatch: seed", seed)
        check_given_ranks(None, mesh, "GlobalBatch")
        mesh = Mesh(comm.current_world(), 1) if mesh is None else mesh
        sharing = mesh.shape.sequence
        self._rank, ranks = mesh.index(DATA) // sharing, mesh.size(DATA) // sharing
        if size % ranks:
            raise ConfigError(
                "GlobalBatch: size",
                expected=f"a multiple of the {ranks} ranks with data of their own",
                got=str(size),
                do=f"Start as many as divide it: {', '.join(map(str, divisors(size)))}; or choose another size.",
            )
        self.size = size
        self.micro = max(divisor for divisor in divisors(size // ranks) if divisor <= micro)
        self.accumulate = size // ranks // self.micro
        self._samples = samples
        self._seed = seed

    def micro_batches(self, step: int) -> Iterator[list[int]]:
        """Yield this rank's part of a step: for each micro-batch its indices into the data set.

        Args:
            step: from 0.

        Raises:
            ConfigError: ``step`` is not a number from 0.

        Example::

            batch = npuzero.GlobalBatch(samples=100, size=16, micro=4)
            rows = (rows for step in range(3) for rows in batch.micro_batches(step))
            loader = torch.utils.data.DataLoader(torch.arange(100), batch_sampler=rows)
        """
        _STEP.check("micro_batches: step", step)
        share = self.accumulate * self.micro
        first = step * self.size + self._rank * share
        return (
            [self._sample(place) for place in range(begin, begin + self.micro)]
            for begin in range(first, first + share, self.micro)
        )

    def _sample(self, place: int) -> int:
        """Return the index of the sample at ``place``, counted from the start of the first epoch."""
        epoch, index = divmod(place, self._samples)
        return index if self._seed is None else int(_epoch_order(self._samples, self._seed, epoch)[index])


@lru_cache(maxsize=2)  # a batch may span two epochs
def _epoch_order(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return an epoch's permutation of the samples: int64[samples], the same on every machine."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(samples, generator=generator)
