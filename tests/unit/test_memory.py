"""Buffers that rest, and buffers whose memory comes and goes."""

from __future__ import annotations

import platform
import resource
from pathlib import Path

import pytest
import torch

from npuzero.config import Settings
from npuzero.errors import OutOfSpace
from npuzero.memory import BufferRing, DeviceSpace, MemorySpaces
from npuzero.plan import Memory, Placement

CPU = torch.device("cpu")
N = 3 * 2**20 + 17  # floats: several granules, and a part of one


def test_a_buffer_is_zero_and_counted():
    space = DeviceSpace(CPU)
    for numel in (0, 1, N):
        assert space.allocate(numel, torch.float32, "states").eq(0).all()
    assert space.held["states"] == 4 * (1 + N)
    assert space.allocations == 3


def test_what_no_memory_can_hold_is_named():
    space = DeviceSpace(CPU)
    with pytest.raises(OutOfSpace, match="states"):
        space.allocate(2**60, torch.float32, "states")
    with pytest.raises(OutOfSpace, match="expected room for"):
        space.transient(2**60, torch.float32, "buffers")


def test_a_transient_keeps_its_address_and_views():
    space = DeviceSpace(CPU)
    buffer = space.transient(N, torch.bfloat16, "buffers")
    view = buffer.tensor[5:9].view(2, 2)
    address = view.data_ptr()
    for value in (1.0, 2.0):
        buffer.restore()
        buffer.restore()  # once more changes nothing
        assert space.held["buffers"] == 2 * N
        buffer.tensor.fill_(value)
        assert view.eq(value).all() and view.data_ptr() == address
        buffer.release()
        buffer.release()
        assert space.held["buffers"] == 0


@pytest.mark.skipif(
    tuple(int(part) for part in platform.release().split(".")[:2]) < (5, 7), reason="pages cannot be moved before 5.7"
)
def test_pages_move_from_one_transient_to_the_next():
    space = DeviceSpace(CPU)
    first, second = (space.transient(N, torch.int32, "buffers") for _ in range(2))
    first.restore()
    first.tensor.copy_(torch.arange(N))
    first.release()
    second.restore()
    # Undefined by contract; that they are the same pages is what spares the kernel from zeroing others.
    assert second.tensor.eq(torch.arange(N)).float().mean() > 0.6


@pytest.mark.parametrize("numel", [N, 3 * 2**17 + 2**14 + 1])  # the second: a granule, a half, and the smallest part
def test_two_transients_do_not_share_memory_while_both_are_there(numel):
    space = DeviceSpace(CPU)
    buffers = [space.transient(numel, torch.int64, "buffers") for _ in range(3)]
    for _ in range(3):
        for i, buffer in enumerate(buffers):
            buffer.restore()
            buffer.tensor.fill_(i)
        assert all(buffer.tensor.eq(i).all() for i, buffer in enumerate(buffers))
        buffers = buffers[1:] + buffers[:1]
        for buffer in buffers:
            buffer.release()


def test_the_end_of_a_transient_wastes_little():
    many, numel = 64, 2**20 // 4 + 2**14 // 4  # 1 MiB and 16 KiB, floats
    space = DeviceSpace(CPU)
    buffers = [space.transient(numel, torch.float32, "buffers") for _ in range(many)]
    torch.ones(2**20).fill_(1.0)  # the thread pool, if any
    before_bytes = resident_page_bytes()
    for buffer in buffers:
        buffer.restore()
        buffer.tensor.fill_(1.0)
    held_bytes = resident_page_bytes() - before_bytes
    assert many * numel * 4 <= held_bytes < 1.1 * many * numel * 4


def resident_page_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_a_transient_outlives_its_space():
    buffer = DeviceSpace(CPU).transient(N, torch.float32, "buffers")
    buffer.restore()
    tensor = buffer.tensor.fill_(3.0)
    del buffer
    assert tensor.eq(3).all()


def test_nothing_needs_no_memory():
    empty = DeviceSpace(CPU).transient(0, torch.float32, "buffers")
    empty.restore()
    assert empty.tensor.numel() == 0
    empty.release()


def test_each_memory_has_a_space_with_counts_of_its_own():
    spaces, others = MemorySpaces(CPU), MemorySpaces(CPU)
    resting = spaces[Placement().memory]
    resting.allocate(10, torch.float32, "states")
    with_more = resting.transient(N, torch.float32, "buffers")
    with_more.restore()
    with_more.release()
    high = {"parameters": 0, "gradients": 0, "states": 40, "buffers": 4 * N}
    assert spaces.peaks() == {Memory.DEVICE: high}
    spaces.reset_peaks()
    assert spaces.peaks() == {Memory.DEVICE: {**high, "buffers": 0}}
    assert not any(others[Memory.DEVICE].held.values())


def test_spaces_are_there_when_something_rests_in_them(tmp_path):
    spaces = MemorySpaces(CPU, Settings(nvme_paths=(str(tmp_path),)))
    assert list(spaces) == [Memory.DEVICE] and len(spaces) == 1
    assert spaces[Memory.HOST] is spaces.host and spaces[Memory.NVME] is spaces.disk
    assert list(spaces) == [Memory.DEVICE, Memory.HOST, Memory.NVME]
    assert spaces.disk.store(5000).nbytes == 8192


def test_the_host_may_have_less_room_than_memory():
    host = MemorySpaces(CPU, Settings(host_bytes=100)).host
    host.allocate(25, torch.float32, "states")
    for source in (None, host.pages):
        with pytest.raises(OutOfSpace, match="host_bytes"):
            host.allocate(1, torch.uint8, "states", source)


def test_a_ring_begins_on_pages_and_comes_round():
    ring = BufferRing(MemorySpaces(CPU).host, 5000, 2)
    assert ring.slot(0).numel() == 8192 and ring.slot(0).data_ptr() % 4096 == 0
    assert ring.slot(0).data_ptr() == ring.slot(2).data_ptr() != ring.slot(1).data_ptr()
