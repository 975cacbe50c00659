"""Ranks that torchrun has started again find each other, whatever those before have left in its agent's store."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from npuzero.comm.rendezvous.restarts import open_restart_store

SIZE = 3


@pytest.fixture
def server() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def join_life(server: dist.TCPStore, size: int = SIZE, absent: tuple[int, ...] = (), timeout_s: float = 20) -> list:
    """What the ranks of a life get, all at a time: a store, or an error."""

    def join(rank: int) -> object:
        try:
            return open_restart_store(rank, size, f"127.0.0.1:{server.port}", timeout_s)
        except (RuntimeError, TimeoutError) as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, [rank for rank in range(size) if rank not in absent]))


def share_address(stores: list) -> bytes:
    """What the first rank writes for the others to see, which they do."""
    stores[0].set("address", repr(stores[0]))
    assert [store.get("address") for store in stores[1:]] == [repr(stores[0]).encode()] * (len(stores) - 1)
    return stores[0].get("address")


def test_each_life_has_a_part_of_its_own(server):
    first = join_life(server)
    share_address(first)
    second = join_life(server, size=2)  # a node is lost
    assert not second[1].check(["address"])
    share_address(second)
    third = join_life(server)  # and comes back
    assert not any(store.check(["address"]) for store in third)
    share_address(third)


def test_a_life_that_ended_while_it_met_leaves_nothing_that_counts(server):
    assert all(
        isinstance(found, RuntimeError) for found in join_life(server, absent=(0,), timeout_s=0.5)
    )  # words remain
    share_address(join_life(server))


def test_ranks_that_do_not_come_are_named(server):
    found = join_life(server, absent=(2,), timeout_s=0.5)
    assert str(found[0]) == "ranks that did not come within 0.5 s: 2"
    assert isinstance(found[1], dist.PrefixStore)  # rank 0 waits for the others on its behalf
