"""The batch of a step, of which a configuration says one to three of three numbers."""

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
    """Say how many samples a step has.

    Args:
        total: of all ranks together (``train_batch_size``).
        micro: that a rank's forward sees (``train_micro_batch_size_per_gpu``).
        accumulation: passes between two updates (``gradient_accumulation_steps``).
        world: ranks with data of their own.

    Raises:
        ConfigError: a number that is not positive, or ``total`` is not the product of the others.
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
        """Return the batch with so many samples a step, by another number of passes.

        Raises:
            ConfigError: ``total`` is no multiple of what a pass of all ranks sees.
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
        """Return the batch with so many samples in a rank's forward, and as many passes."""
        return replace(self, total=micro * self.accumulation * self.world, micro=micro)


def complete_batch_sizes(total: int | None, micro: int | None, accumulation: int | None, world: int) -> BatchSizes:
    """Return the batch that one to three of its numbers say, as DeepSpeed completes them; None: not said.

    Raises:
        ConfigError: neither ``total`` nor ``micro`` is said, or what they come to is no batch.
    """
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
