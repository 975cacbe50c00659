"""Connect ranks that are processes, on one host or several, through the launcher's store.

Selects the backend of a group: shared memory for host tensors within a host, Gloo for host tensors across hosts, and
the device's backend (nccl, hccl) for device tensors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from npuzero import device
from npuzero.comm.backends import shared_memory
from npuzero.comm.backends.hierarchical import HierarchicalCommunicator, find_transposed_size
from npuzero.comm.backends.process_group import AcceleratorCommunicator, GlooCommunicator, make_group
from npuzero.comm.communicator import Communicator
from npuzero.comm.rendezvous.exchange_values import ValueExchange
from npuzero.comm.rendezvous.roll_call import DO, EXPECTED, RollCall, describe_missing_ranks
from npuzero.comm.rendezvous.store import PrefixedStore, SharedStatusStore
from npuzero.comm.watchdog.hang_detector import SLICE_S, CommunicatorFailure
from npuzero.comm.world import TIMEOUT_S, World
from npuzero.errors import CollectiveError, ConfigError

#: Seconds that rank 0 waits for remaining ranks at its end, if it keeps the store.
_OUTLIVES_S = 5.0

#: hccl's buffer of a group for small messages; a group takes two.
_CONTROL_BUFFER_MB = 8


class ProcessWorld(World):
    """Represent ranks that are processes, on one host or several.

    Args:
        store: the launcher's key-value store. The n-th world that a rank makes on it matches the n-th of every rank,
            under separate keys: ranks that are still in the previous world are not met.
        backend: of the groups: "shm", "gloo", "nccl" or "hccl"; None: by device, and shared memory for groups of CPU
            ranks on one host.
        buffer_mb: hccl's buffer per group, except groups for small messages.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        *,
        backend: str | None = None,
        timeout_s: float = TIMEOUT_S,
        buffer_mb: int | None = None,
    ) -> None:
        self._store = PrefixedStore(store).within(f"{PrefixedStore(store).count(f'worlds/{rank}')}")
        self._backend = backend
        self._buffer_mb = buffer_mb
        self._pulses: dict[int, Any] = {}
        self._slots = SharedStatusStore(self._store, rank, size, self._dead)
        super().__init__(rank, size, device, (), timeout_s, self._slots)
        self._exchanges = ValueExchange(self._store, self.board, size, timeout_s, self._dead)
        try:
            with RollCall(self._slots, timeout_s):
                self._meet()
        except CollectiveError as error:
            unjoined = self._unjoined(error)
            if unjoined is None:
                raise
            raise unjoined from error

    def _exchange(self, value: object, channel: str, group: tuple[int, ...]) -> list[Any]:
        return self._exchanges.run(value, channel, group)

    def fail(self, failure: CommunicatorFailure) -> None:
        with suppress(CollectiveError):  # the store may be gone
            failure = self._slots.fail(failure)
        super().fail(failure)

    def outlive(self) -> None:
        """Wait a little for ranks that have not left, if the store ends with this process: they may need it."""
        deadline_s = time.monotonic() + _OUTLIVES_S
        while self._store.of_rank_0 and self.rank == 0 and time.monotonic() < deadline_s:
            if all(slot.ended for slot in self._slots.read()):
                return
            time.sleep(SLICE_S)

    def _arrived(self) -> dict[str, int]:
        return {**super()._arrived(), **self._exchanges.arrived()}

    def _dead(self, rank: int) -> bool:
        return rank in self._pulses and self._pulses[rank].dead()

    def _make(self, ranks: tuple[int, ...], name: str) -> Communicator:
        here = ranks.index(self.rank)
        on_host = self._place(name).type == "cpu"
        if on_host and self._backend != "gloo" and set(ranks) <= set(self.local):
            pids = [self._pids[rank] for rank in ranks]
            return shared_memory.connect_shared_memory(
                self._store,
                ranks,
                here,
                name,
                pids=pids,
                timeout_s=self.timeout_s,
                make=self._make,
                named=self._named,
            )
        if self._backend == "shm":
            raise ConfigError(
                f"communicator {name!r}",
                expected=f"ranks of one host (here: {self.local}), since the backend is shm",
                got=str(ranks),
                do="Use the backend gloo, or none.",
            )
        if on_host:
            return GlooCommunicator(self._group(ranks, "gloo", name), ranks, here, name)
        return self._make_on_accelerator(ranks, here, name)

    def _make_on_accelerator(self, ranks: tuple[int, ...], here: int, name: str) -> Communicator:
        backend = self._backend or device.get(self.device).backend
        inner_size = find_transposed_size(ranks)
        if inner_size is None:
            group = self._group(ranks, backend, name)
            return AcceleratorCommunicator(group, ranks, here, name, self.device, backend)
        outer_place, inner_place = divmod(here, inner_size)

        def part(members: Sequence[int], axis: str) -> Communicator:
            group = self._group(members, backend, f"{name}.{axis}")
            return AcceleratorCommunicator(
                group, members, members.index(self.rank), f"{name}.{axis}", self.device, backend
            )

        return HierarchicalCommunicator(
            part(ranks[inner_place::inner_size], "outer"),
            part(ranks[outer_place * inner_size : (outer_place + 1) * inner_size], "inner"),
            part(sorted(ranks), "flat"),
            ranks,
            name,
        )

    def _group(self, ranks: Sequence[int], backend: str, name: str) -> dist.ProcessGroup:
        # Wait for all members here: within torch a rank could not learn that another one will never arrive.
        self._exchanges.run(None, f"the group {name!r}", ranks)
        buffer_mb = _CONTROL_BUFFER_MB if name.startswith("control") else self._buffer_mb
        try:
            return make_group(ranks, backend, name, timeout_s=self.timeout_s, buffer_mb=buffer_mb)
        except RuntimeError as error:
            raise CollectiveError(
                f"communicator {name!r} on rank {self.rank}",
                expected=f"{backend} to connect ranks {tuple(ranks)}, which meet by {self._store.home}",
                got=f"{type(error).__name__}: {error}",
                do="See the first error among the ranks: one that ended makes the others fail.",
            ) from error

    def _unjoined(self, error: CollectiveError) -> CollectiveError | None:
        """Return the error of a rank that waited for others to join; None if all have joined."""
        with suppress(CollectiveError):  # the store may be gone
            missing = self._slots.missing()
            if missing:
                got = describe_missing_ranks(missing, self.size)
                return CollectiveError("init", expected=EXPECTED, got=got, do=DO, **error.facts)
        return None

    def _meet(self) -> None:
        """Find the ranks on this host and their processes, and test if they can open each other's memory."""
        probe = shared_memory.native.Region.create(1, 64, self.rank, False)
        met = self.exchange([_get_host_identity(), os.getpid(), probe.address])
        self.local = tuple(rank for rank, (host, _, _) in enumerate(met) if host == met[self.rank][0])
        self._pids = {rank: met[rank][1] for rank in self.local}
        self._pulses = {rank: shared_memory.native.Pulse(pid) for rank, pid in self._pids.items() if rank != self.rank}
        opened = all(_can_open_region(met[rank][2], rank) for rank in self.local)
        self._named = not all(self.exchange(opened))


def _get_host_identity() -> str:
    """Return a name shared exactly by processes that can reach each other's memory: boot id and pid namespace."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"unknown-{os.getpid()}-{time.time_ns()}"


def _can_open_region(address: str, nonce: int) -> bool:
    try:
        shared_memory.native.Region.open(address, 1, 64, nonce)
    except CollectiveError:
        return False
    return True
