"""Wrap the launcher's key-value store: the calls that a world needs, and the error of a lost store."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from npuzero import config
from npuzero.comm.watchdog.call_names import CallSite
from npuzero.comm.watchdog.frozen_parameters import FrozenParameters
from npuzero.comm.watchdog.hang_detector import (
    NOWHERE,
    CallExit,
    CommunicatorFailure,
    PendingWait,
    RankStatus,
    Rendezvous,
)
from npuzero.errors import CollectiveError

_Result = TypeVar("_Result")


class PrefixedStore:
    """Use the keys below ``prefix`` of a torch.distributed store; ``home`` describes the store in messages.

    Raises:
        CollectiveError: from every method, if the store is gone; ``facts["kind"]`` is "store".
    """

    def __init__(self, store: Any, prefix: str = "") -> None:
        self._store = store
        self._prefix = prefix
        self.home = describe_store(store)

    @property
    def of_rank_0(self) -> bool:
        """Return whether the store ends with the process of rank 0."""
        return _find_tcp_store(self._store) is not None and not config.agent_keeps_store()

    def within(self, prefix: str) -> PrefixedStore:
        """Return the part of the store below ``prefix``."""
        return PrefixedStore(self._store, f"{self._prefix}{prefix}/")

    def check(self, *keys: str) -> bool:
        """Return whether all keys exist."""
        return bool(self._call(lambda: self._store.check([self._prefix + key for key in keys])))

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that do not exist; bisects, so that few missing keys of many take few requests."""
        if not keys or self.check(*keys):
            return []
        half = len(keys) // 2
        return self.missing(keys[:half]) + self.missing(keys[half:]) if half else list(keys)

    def get(self, key: str) -> str:
        """Wait for the key, and return its value."""
        return str(self._call(lambda: self._store.get(self._prefix + key)).decode())

    def get_all(self, keys: Sequence[str]) -> list[str]:
        """Return the values of existing keys."""
        found = self._call(lambda: self._store.multi_get([self._prefix + key for key in keys]))
        return [value.decode() for value in found]

    def set(self, key: str, value: str) -> None:
        """Set the value."""
        self._call(lambda: self._store.set(self._prefix + key, value))

    def set_first(self, key: str, value: str) -> str:
        """Set the value if there is none; return the value afterwards."""
        return str(self._call(lambda: self._store.compare_set(self._prefix + key, "", value)).decode())

    def count(self, key: str) -> int:
        """Count the calls for ``key`` over all ranks; return the count."""
        return int(self._call(lambda: self._store.add(self._prefix + key, 1)))

    def delete(self, key: str) -> None:
        """Delete the key."""
        self._call(lambda: self._store.delete_key(self._prefix + key))

    def _call(self, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except RuntimeError as error:  # torch's DistError and its subclasses
            raise lost_store_error(self.home, error) from error


def _find_tcp_store(store: Any) -> Any:
    """Return the TCPStore behind a store, if there is one."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None  # type: ignore[attr-defined]


def describe_store(store: Any) -> str:
    """Describe the keeper of a store, and its address."""
    client = _find_tcp_store(store)
    if client is None:
        return "the store that init_process_group() was given"
    keeper = "torchrun's agent on the first node" if config.agent_keeps_store() else "rank 0"
    return f"the store of {keeper} at {client.host}:{client.port}"


def lost_store_error(home: str, error: BaseException) -> CollectiveError:
    """Return the error of a rank that found the store gone."""
    return CollectiveError(
        "the ranks' store",
        expected=f"{home} to answer",
        got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason'}",
        do="See whether that process has ended: it must outlive all ranks. Let every rank run the same steps, or start "
        "with torchrun, whose agent keeps the store.",
        kind="store",
    )


class SharedStatusStore:
    """Store the status board's slots in the launcher's store.

    Args:
        dead: returns whether a rank is known to be dead.
    """

    def __init__(self, store: PrefixedStore, rank: int, size: int, dead: Callable[[int], bool]) -> None:
        self._store = store
        self._rank = rank
        self.size = size
        self._dead = dead
        self.write(NOWHERE)

    def write(self, slot: RankStatus) -> None:
        self._store.set(f"board/{self._rank}", json.dumps(slot))

    def read(self) -> list[RankStatus]:
        keys = self._keys()
        if not self._store.check(*keys):  # some ranks have not joined yet
            return []
        slots = [_parse_rank_status(text) for text in self._store.get_all(keys)]
        return [
            slot._replace(waits=(), ended="is dead") if not slot.ended and self._dead(rank) else slot
            for rank, slot in enumerate(slots)
        ]

    def answer(self) -> None:
        """Do nothing: the slot written by the constructor marks the rank as present."""

    def missing(self) -> list[int]:
        """Return the ranks that have not joined this world yet."""
        return [int(key.rpartition("/")[2]) for key in self._store.missing(self._keys())]

    def failure(self) -> CommunicatorFailure | None:
        return CommunicatorFailure(*json.loads(self._store.get("failure"))) if self._store.check("failure") else None

    def fail(self, failure: CommunicatorFailure) -> CommunicatorFailure:
        """Record why the world is broken, unless it is already; return the first reason."""
        return CommunicatorFailure(*json.loads(self._store.set_first("failure", json.dumps(failure))))

    def _keys(self) -> list[str]:
        return [f"board/{rank}" for rank in range(self.size)]


def _parse_rank_status(text: str) -> RankStatus:
    waits, arrived, ended, left, frozen = json.loads(text)
    return RankStatus(
        tuple(
            PendingWait(Rendezvous(place, number, tuple(ranks), said), since_s, CallSite(*where))
            for (place, number, ranks, said), since_s, where in waits
        ),
        arrived,
        ended,
        left and CallExit(CallSite(*left[0]), *left[1:]),
        tuple(FrozenParameters(model, total, tuple(names)) for model, total, names in frozen),
    )
