"""Slow links between nodes, as in benchmarks.wires: bytes across, time of arrival, and no spinning."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import npuzero
from benchmarks.wires.links import GBIT, LinkedCommunicator, LinkedWorld, NodeLinks, crossing_bytes
from npuzero.comm import World, run_threads
from npuzero.errors import CollectiveError

from .toy import build_seeded_model, toy_loss, toy_tokens


def run_linked_ranks(path: Path, body: Callable[[World], Any]) -> list[Any]:
    """Return the result of ``body`` on four ranks, two on each node."""

    def on_links(world: World) -> Any:
        here = LinkedWorld(world, NodeLinks(path))
        try:
            return body(here)
        finally:
            here.drain()
            here.close()

    return run_threads(4, on_links)


@pytest.mark.parametrize(
    ("verb", "nodes", "wanted"),
    [
        ("all_gather", (0, 0, 1, 1), 75),  # a ring over four ranks
        ("reduce_scatter", (0, 0, 1, 1), 75),
        ("all_reduce", (0, 0, 1, 1), 150),
        ("all_gather", (0, 1, 0, 1), 50),  # each node sends its half once
        ("all_gather", (0, 1), 50),
        ("all_to_all", (0, 0, 1, 1), 100),  # 25 from each of two to each of two
        ("all_to_all", (0, 1), 50),
        ("send", (0, 1), 100),
    ],
)
def test_what_crosses_is_counted_by_the_groups_order(verb, nodes, wanted):
    back = {} if verb == "send" else {(1, 0): wanted}
    assert crossing_bytes(verb, nodes, 100) == {(0, 1): wanted, **back}


def test_nothing_crosses_within_a_node_and_a_ring_of_three_goes_one_way():
    assert all(not crossing_bytes(verb, (1, 1), 100) for verb in ("all_gather", "all_reduce", "all_to_all", "send"))
    assert crossing_bytes("all_gather", (0, 1, 2), 99) == {(0, 1): 66, (1, 2): 66, (2, 0): 66}


def test_a_link_carries_one_after_another_and_other_links_go_on(tmp_path):
    now_s = 100.0
    links = NodeLinks.make(tmp_path / "links", 3, clock=lambda: now_s)
    assert links.carry({(0, 1): 1e12}) == 100.0, "no limit yet"
    links.limit(8 / GBIT)
    assert links.carry({(0, 1): 16}) == 102.0
    again = NodeLinks(tmp_path / "links", clock=lambda: now_s)  # as another rank has it
    assert again.carry({(0, 1): 8}) == 103.0
    assert again.carry({(1, 0): 8}) == 101.0, "the other way"
    assert again.carry({(0, 2): 8, (1, 2): 16}) == 102.0, "the last of them"
    now_s = 110.0
    assert links.carry({(0, 1): 8}) == 111.0, "what a free link did not carry is not made up for"
    assert links.carry({}) == 110.0
    assert links.carried() == 1e12 + 32


def test_a_collective_between_nodes_takes_its_time_and_nobody_spins(tmp_path):
    NodeLinks.make(tmp_path / "links", 2).limit(0.04)  # 5 MB a second

    def body(world: World) -> tuple[float, bool]:
        across, inside = (world.communicator(range(4), "gather"), world.communicator(world.local, "gather"))
        assert isinstance(across, LinkedCommunicator) and not isinstance(inside, LinkedCommunicator)
        mine = torch.full((2**18,), float(world.rank))
        begin_s = time.monotonic()
        whole, part = torch.empty(4 * len(mine)), torch.empty(2 * len(mine))
        handle = across.all_gather(whole, mine)  # 3 MiB cross
        inside.all_gather(part, mine).wait()
        early = not handle.done()
        handle.wait()
        assert torch.equal(whole, torch.arange(4.0).repeat_interleave(len(mine)))
        return time.monotonic() - begin_s, early

    begin_s = time.process_time()
    told = run_linked_ranks(tmp_path / "links", body)
    assert all(took_s > 0.6 for took_s, _ in told)
    assert any(early for _, early in told), "one at least came back from its node before the link was done"
    assert time.process_time() - begin_s < 0.5, "four ranks waited for 0.6 s each"


def test_a_send_to_another_node_takes_its_time_and_waits_for_no_collective(tmp_path):
    NodeLinks.make(tmp_path / "links", 2).limit(0.08)

    def body(world: World) -> float:
        group = world.communicator(range(4), "any")
        buffer, total = torch.full((2**18,), float(world.rank)), torch.ones(1)
        begin_s = time.monotonic()
        if world.rank == 2:
            sum_ = group.all_reduce(total)
            group.recv(buffer, 1).wait()
        else:
            sent = group.send(buffer, 2) if world.rank == 1 else None
            sum_ = group.all_reduce(total)
            if sent is not None:
                sent.wait()
        took_s = time.monotonic() - begin_s
        sum_.wait()
        assert total.item() == 4 and buffer[0] == min(world.rank, 1 if world.rank == 2 else world.rank)
        return took_s

    assert run_linked_ranks(tmp_path / "links", body)[2] > 0.1


def test_a_rank_that_fails_ends_the_waiting_of_the_others(tmp_path):
    NodeLinks.make(tmp_path / "links", 2)

    def body(world: World) -> None:
        if world.rank == 3:
            raise ZeroDivisionError
        with pytest.raises(CollectiveError, match="ZeroDivisionError"):
            world.communicator(range(4), "gather").all_reduce(torch.ones(9)).wait()

    with pytest.raises(ZeroDivisionError):
        run_linked_ranks(tmp_path / "links", body)


def test_training_over_links_is_training(tmp_path):
    NodeLinks.make(tmp_path / "links", 2)

    def body(world: World) -> list[float]:
        model = npuzero.zero(build_seeded_model(), plan="hpz", world=world)
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(2):
            loss = toy_loss(model, toy_tokens(step, 0, world.rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = run_threads(4, body)
    assert run_linked_ranks(tmp_path / "links", body) == plain
    assert NodeLinks(tmp_path / "links").carried() > 0
