"""Start the updates of an optimizer with ``early`` inside backward: see :mod:`npuzero.shard.step.early_update`."""

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
    """Update like :class:`~npuzero.optim.workers.base.OptimizerWorker`, but also before the step."""

    def begin(self, optimizer: torch.optim.Optimizer, engine: Engine) -> Begun | None:
        """Return the state stores and the launch of an update that starts now; None if it cannot."""


class EarlyUpdateStarter:
    """Start updates of one model before their step. Holds no strong reference to optimizer or model.

    Args:
        passes: backward passes of a step, if the user has set it.
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
        """Return whether the optimizer is still alive."""
        return self._optimizer() is not None

    def is_of(self, worker: object) -> bool:
        """Return whether ``worker`` belongs to the optimizer."""
        return self._worker() is worker

    def begin(self) -> Begun | None:
        """Return the state stores and the launch of an update that starts now; None if it cannot."""
        worker, optimizer, engine = self._worker(), self._optimizer(), self._engine()
        if worker is None or optimizer is None or engine is None:
            return None
        return worker.begin(optimizer, engine)


def check_early(early: bool | int) -> bool | int:
    """Check ``early``, an option of a fused optimizer, and return it.

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
