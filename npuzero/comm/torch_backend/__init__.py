"""The torch.distributed backend ``"shm"``: torch's own process groups over shared memory, for CPU ranks of one host.

    import npuzero                                  # registers it
    torch.distributed.init_process_group("shm")     # then DDP, FSDP2, ... as over gloo

A collective that npuzero's communicators have is theirs, and runs beside the caller. The others are composed of them:
a reduction other than a sum is an all_gather and a reduction in ascending order of the ranks; gather and scatter travel
as all_gather and broadcast. An all_to_all with split sizes agrees on the largest part first, on a thread and a
communicator of its own.

Differences from gloo: sums of bf16 and f16 are made in f32 and rounded once; AVG is that sum, divided; a send ends when
it is received; no sparse tensors and no receiving from any source.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from npuzero.comm.torch_backend.group import ShmGroup
from npuzero.comm.torch_backend.tensors import NAME

__all__ = ["NAME", "ShmGroup", "register_shm_backend"]


def register_shm_backend() -> None:
    """Register ``"shm"`` with torch.distributed."""
    dist.Backend.register_backend(NAME, _make_shm_group, devices=["cpu"])


def _make_shm_group(store: Any, rank: int, size: int, timeout: timedelta) -> ShmGroup:
    return ShmGroup(store, rank, size, timeout)
