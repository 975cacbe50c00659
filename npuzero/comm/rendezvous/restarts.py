"""Separate restarts of a job: torchrun starts ranks again, and its agent's store may still have keys of earlier ranks.

torch.distributed writes addresses under the same keys after every restart, so a fast rank could read addresses of ranks
that have ended. No variable of torchrun identifies the restart: agents count their own restarts, and an agent that was
replaced counts from 0. So the ranks of a start find each other by unique words, and use a separate part of the store:

    rank r        sets here/<r> to its word; waits for welcome/<its word>, the name of this start
    rank 0        writes a welcome for each word that it finds, also for later words that replace stale ones, until
                  taken/<name>/<r> exists for every rank
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from npuzero.comm.rendezvous.store import PrefixedStore

#: Seconds between two polls of rank 0.
_PAUSE_S = 0.02


def open_restart_store(rank: int, size: int, address: str, timeout_s: float) -> Any:
    """Return the part of the agent's store that only the ranks of this start use. Collective.

    Args:
        address: ``host:port`` of the store.
        timeout_s: limit of the wait for other ranks, and later of waits for the store.

    Raises:
        RuntimeError: the store cannot be reached, or rank 0 does not arrive: torch's DistError.
        TimeoutError: on rank 0: other ranks do not arrive.
    """
    host, _, port = address.rpartition(":")
    client = dist.TCPStore(  # type: ignore[attr-defined]
        host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )
    if rank == 0:
        name = _share_restart_name(PrefixedStore(client).within("npuzero/lives"), size, timeout_s)
    else:
        word = uuid.uuid4().hex
        client.set(f"npuzero/lives/here/{rank}", word)
        name = client.get(f"npuzero/lives/welcome/{word}").decode()
        client.set(f"npuzero/lives/taken/{name}/{rank}", "")
    return dist.PrefixStore(f"npuzero/lives/{name}", client)  # type: ignore[attr-defined]


def _share_restart_name(store: PrefixedStore, size: int, timeout_s: float) -> str:
    """Send the name of this start to all other ranks, and return it."""
    name = uuid.uuid4().hex
    here = [f"here/{rank}" for rank in range(1, size)]
    taken = [f"taken/{name}/{rank}" for rank in range(1, size)]
    welcomed: set[str] = set()
    deadline_s = time.monotonic() + timeout_s
    while absent := store.missing(taken):
        if time.monotonic() > deadline_s:
            ranks = ", ".join(key.rpartition("/")[2] for key in absent)
            raise TimeoutError(f"ranks that did not come within {timeout_s:g} s: {ranks}")
        there = set(here).difference(store.missing(here))
        for word in {*store.get_all(sorted(there))} - welcomed:
            store.set(f"welcome/{word}", name)
            welcomed.add(word)
        time.sleep(_PAUSE_S)
    return name
