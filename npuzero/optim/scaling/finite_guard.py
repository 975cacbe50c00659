"""Stop training as soon as a value is inf or NaN."""

from __future__ import annotations

from types import TracebackType

from torch import Tensor, nn

from npuzero.optim.scaling.loss_scaler import LossScaler
from npuzero.shard.find_engine import engine_of


class FiniteGuard:
    """Stop at an output, a loss or a gradient that is inf or NaN, and name the unit and parameter where it began.

    As long as all values are finite it costs one read of each unit's output, and of the gradients unless they are
    clipped; the host does not wait for the device. A bad step changes neither parameters nor states; then the next
    forward, :meth:`look`, or the end of the block raises on every rank, with the same text.

    Args:
        model: made by :func:`npuzero.zero`.
        scaler: the loss scaler in use. It handles gradients that overflow, until it is at its floor.

    Raises:
        StateError: the model is not sharded.

    Example::

        with npuzero.FiniteGuard(model) as guard:
            for batch in torch.randn(3, 4, 8, device=world.device):
                loss = model(batch).square().mean()
                loss.backward()
                guard.check(loss)
                optimizer.step()
                optimizer.zero_grad()
    """

    def __init__(self, model: nn.Module, scaler: LossScaler | None = None) -> None:
        self._engine = engine_of(model)
        self._scaler = scaler
        self._engine.finite.watch(True)

    def check(self, loss: Tensor | None = None) -> None:
        """Check the gradients, after the step's backward passes and before the optimizer. Collective.

        Args:
            loss: this rank's unscaled loss; for several micro-batches, any sum of theirs.

        Raises:
            NonFiniteError: the previous step was bad, and :meth:`look` was not called.
        """
        self._engine.finite.check(loss, None if self._scaler is None else self._scaler.at_floor())

    def look(self) -> None:
        """Wait for the result of the last check. Collective.

        Raises:
            NonFiniteError: inf or NaN on any rank; ``facts`` has ``unit``, ``parameter`` and ``rank`` as far as known.
        """
        self._engine.finite.look()

    def remove(self) -> None:
        """Stop watching."""
        self._engine.finite.watch(False)

    def __enter__(self) -> FiniteGuard:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        try:
            if kind is None:
                self.look()
        finally:
            self.remove()
