"""Lives: torchrun starts ranks again, and its agent's store may still have what those before have left there.

torch.distributed writes addresses into that store under the same keys in every life, so a rank that is quick reads
those of ranks that have ended. Nothing that torchrun tells a rank says which life it is in: agents count their own
restarts, and one that came back counts from 0. So the ranks of a life find each other by words that nobody used before,
and get a part of the store for themselves:

    rank r        here/<r> = its word; waits for welcome/<its word>, which says the name of this life
    rank 0        welcomes each word that it finds, anew where one of a life before has been replaced, until
                  taken/<name>/<r> says of every rank that it has come
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from npuzero.comm.rendezvous.store import PrefixedStore

#: Seconds between two looks of rank 0.
_PAUSE_S = 0.02


def open_restart_store(rank: int, size: int, address: str, timeout_s: float) -> Any:
    """Return the part of the agent's store that the ranks of this life alone use. Collective.

    Args:
        address: ``host:port`` of the store.
        timeout_s: how long to wait for the others, and for the store later on.

    Raises:
        RuntimeError: the store cannot be reached, or rank 0 does not come: torch's DistError.
        TimeoutError: on rank 0: others do not.
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
    """Tell all other ranks the name of this life, and return it."""
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
