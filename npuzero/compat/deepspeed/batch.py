"""The batch sizes of a step; a configuration gives one to three of the three numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from npuzero.errors import ConfigError

KEYS = {
    "total": "train_batch_size",
    "micro": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
}


@dataclass(frozen=True)
class BatchSizes:
    """Hold the batch sizes of a step.

    Args:
        total: samples of a step on all ranks together (``train_batch_size``).
        micro: samples of a micro-batch on one rank (``train_micro_batch_size_per_gpu``).
        accumulation: micro-batches between two updates (``gradient_accumulation_steps``).
        world: number of data ranks.

    Raises:
        ConfigError: a number is not positive, or ``total`` is not the product of the rest.
    """

    total: int
    micro: int
    accumulation: int
    world: int

    def __post_init__(self) -> None:
        for name, key in KEYS.items():
            if getattr(self, name) <= 0:
                raise ConfigError(
                    key,
                    expected="a positive number",
                    got=f"{getattr(self, name)}, with {self._said()}",
                    do="Correct the batch sizes.",
                )
        if self.total != self.micro * self.accumulation * self.world:
            raise ConfigError(
                KEYS["total"],
                expected=f"{' * '.join(list(KEYS.values())[1:])} * ranks",
                got=self._said(),
                do="Say two of the three, and leave the third out.",
            )

    def _said(self) -> str:
        return f"{self.total} and {self.micro} * {self.accumulation} * {self.world}"

    def of_total(self, total: int) -> BatchSizes:
        """Return the batch with ``total`` samples per step, changing the number of passes.

        Raises:
            ConfigError: ``total`` is no multiple of the samples in one pass of all ranks.
        """
        a_pass = self.micro * self.world
        if total % a_pass:
            raise ConfigError(
                "set_train_batch_size",
                expected=f"a multiple of {a_pass}, what one pass of all ranks sees",
                got=str(total),
                do="Give such a number, or change the micro-batch by set_train_micro_batch_size().",
            )
        return replace(self, total=total, accumulation=total // a_pass)

    def of_micro(self, micro: int) -> BatchSizes:
        """Return the batch with ``micro`` samples per micro-batch and the same number of passes."""
        return replace(self, total=micro * self.accumulation * self.world, micro=micro)


def complete_batch_sizes(total: int | None, micro: int | None, accumulation: int | None, world: int) -> BatchSizes:
    """Complete the batch sizes as DeepSpeed does; None marks a number that is not given.

    Raises:
        ConfigError: neither ``total`` nor ``micro`` is given, or the numbers do not fit together.
    """
    # The order matters: accumulation is derived before micro, and total last. BatchSizes checks the product.
    if total is None and micro is None:
        raise ConfigError(
            KEYS["total"],
            expected=f"it or {KEYS['micro']}",
            got="neither" if accumulation is None else f"{KEYS['accumulation']} alone",
            do="Say how many samples a rank's forward sees.",
        )
    if accumulation is None:
        accumulation = total // micro // world if total is not None and micro else 1
    if micro is None:
        micro = (total or 0) // world // accumulation if accumulation else 0
    if total is None:
        total = micro * accumulation * world
    return BatchSizes(total, micro, accumulation, world)
