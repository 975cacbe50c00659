"""What a program calls to end a delayed update."""

from __future__ import annotations

from torch import nn

from npuzero.shard.ownership import engine_of


def apply_pending(model: nn.Module) -> None:
    """Let the parameters be what the last ``step()`` makes of them, where a plan with ``lag=1`` would leave that to the
    next one. Collective.

    Call it when training ends, and before parameters are written. Elsewhere, and where nothing is pending, it does
    nothing.

    Raises:
        NpuZeroError: the update has failed.

    Example::

        model = npuzero.zero(net, plan="delayed")
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
        model(x).mean().backward()
        optimizer.step()  # changes nothing yet
        npuzero.apply_pending(model)  # now it has
    """
    engine_of(model).apply_pending()
