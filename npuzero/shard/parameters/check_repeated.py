"""Compare parameters replicated over tensor ranks before a checkpoint stores one rank's values.

The gradients of a parameter that is replicated along ``tensor`` are not summed: they are equal because activations are.
If a program breaks that (different random numbers in a forward, another loss, another batch in a later micro-batch),
the ranks diverge, and only a comparison detects it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from npuzero.errors import StateError
from npuzero.ops import storage
from npuzero.plan import TENSOR
from npuzero.shard.parameters.across_stages import exchange_or_raise
from npuzero.shard.parameters.user_writes import digest_integers

if TYPE_CHECKING:
    from npuzero.shard.engine import Engine


def check_replicated(engine: Engine, subject: str, channel: str = "") -> None:
    """Compare replicated parameters between tensor ranks, each its shard. Collective; sends nothing without them.

    Raises:
        StateError: on every rank: the values of a parameter differ between ranks. If kernels may add in any order (an
            accelerator without ``torch.use_deterministic_algorithms``), rank 0 warns instead.
    """
    mesh = engine.mesh
    ranks = mesh.size((TENSOR,))
    if ranks == 1:
        return
    problem: Exception | None = None
    mine: dict[str, list[int]] = {}
    try:
        engine.values.settle()
        mine = _replica_digests(engine)
    except Exception as error:
        problem = error
    said: list[dict[str, list[int]]] = exchange_or_raise(mesh.world, subject, problem, mine, channel)
    for rank, theirs in enumerate(said):
        first = rank - rank % ranks  # tensor is the innermost axis
        name = next((name for name in theirs if theirs[name] != said[first].get(name)), None)
        if name is not None:
            _report_divergence(subject, name, first, rank, engine.device.type == "cpu", mesh.world.rank)
            return


@torch.no_grad()
def _replica_digests(engine: Engine) -> dict[str, list[int]]:
    """Return the digest of this rank's shard of each parameter replicated over tensor ranks, by name."""
    found: dict[str, list[int]] = {}
    for flat in engine.flats():
        if TENSOR in flat.rests.alike.axes:
            own = storage.view_bits(flat.own.raw(slice(0, flat.rests.states.numel)))
            for slot, range_ in zip(flat.layout.slots, flat.own_slots, strict=True):
                found[slot.name] = digest_integers(own[range_]).tolist()
    return found


def _report_divergence(subject: str, name: str, first: int, rank: int, on_cpu: bool, here: int) -> None:
    error = StateError(
        subject,
        expected="the same values on tensor ranks of what they hold alike",
        got=f"others of parameter {name} on rank {rank} than on rank {first}",
        do="Give tensor ranks the same batches and the same random numbers in forward (seed by "
        "mesh.index(npuzero.plan.DATA)); say 'summed' by parallel.relate() of what sees a part of the tokens. Then go "
        "on from the last good checkpoint.",
        parameter=name,
        rank=rank,
    )
    if on_cpu or torch.are_deterministic_algorithms_enabled():
        raise error
    if here == 0:
        warnings.warn(f"{error} The file has the values of rank {first}.", RuntimeWarning, stacklevel=4)
