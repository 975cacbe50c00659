"""Provide the torch.distributed backend ``"shm"``: process groups over shared memory, for CPU ranks of one host.

    import npuzero                                  # registers it
    torch.distributed.init_process_group("shm")     # then DDP, FSDP2, ... as over gloo

Collectives of npuzero's communicators are used directly, and run asynchronously. All others are composed: a reduction
other than a sum is an all_gather and a reduction in ascending order of the ranks; gather and scatter are an all_gather
and a broadcast. An all_to_all with split sizes agrees on the largest part first, on a separate thread and communicator.

Differences from gloo: sums of bf16 and f16 are made in f32 and rounded once; AVG divides that sum; a send ends when it
is received; sparse tensors and receiving from any source are not supported.
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
