"""What an optimizer with ``early`` promises to the engine of a model: see :mod:`npuzero.shard.step.early_update`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from npuzero.config import describe_value
from npuzero.errors import ConfigError
from npuzero.shard.engine import Engine
from npuzero.shard.offload.host_states import StateStore
from npuzero.shard.offload.offloaded_update import Launch

Begun = tuple[Sequence[StateStore], Launch]


class EarlyWorker(Protocol):
    """Update, as :class:`~npuzero.optim.workers.base.OptimizerWorker` does, and before the step, too."""

    def begin(self, optimizer: torch.optim.Optimizer, engine: Engine) -> Begun | None:
        """Return the banks and the launch of an update that begins now; None where it cannot."""


class EarlyUpdateStarter:
    """Begin updates of one model before their step. It keeps neither optimizer nor model alive.

    Args:
        passes: backward passes of a step, if the user has said how many.
    """

    def __init__(
        self, worker: EarlyWorker, optimizer: torch.optim.Optimizer, engine: Engine, passes: int | None
    ) -> None:
        self.passes = passes
        self._worker = weakref.ref(worker)
        self._optimizer = weakref.ref(optimizer)
        self._engine = weakref.ref(engine)

    @property
    def holds(self) -> bool:
        """Tell whether the optimizer is still there."""
        return self._optimizer() is not None

    def is_of(self, worker: object) -> bool:
        """Tell whether ``worker`` is the optimizer's."""
        return self._worker() is worker

    def begin(self) -> Begun | None:
        """Return the banks and the launch of an update that begins now; None where it cannot."""
        worker, optimizer, engine = self._worker(), self._optimizer(), self._engine()
        if worker is None or optimizer is None or engine is None:
            return None
        return worker.begin(optimizer, engine)


def check_early(early: bool | int) -> bool | int:
    """Return ``early``, an option of a fused optimizer.

    Raises:
        ConfigError: it is neither True nor False, nor a number of backward passes.
    """
    if not isinstance(early, int) or (early is not False and early < 1):
        raise ConfigError(
            "early",
            expected="True or False, or how many backward passes a step has, 1 or more",
            got=describe_value(early),
            do="Give early=True to have updates begin inside the last backward pass of a step.",
        )
    return early
