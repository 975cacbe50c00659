"""What rests farther away than the device: bytes held and moved, by independent formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npuzero.plan import (
    LOCAL,
    MOMENT_BLOCK,
    NODE,
    OFFLOADED,
    FlatSize,
    Memory,
    MeshShape,
    Placement,
    Plan,
    Precision,
    StepSpec,
    divide_shards,
    flatten_moves,
    offloaded_block_bytes,
    predict_bytes,
    ring_section_bytes,
    round_up_pages,
    steady_step,
)
from npuzero.plan.table.step_moves import CopyBytes, HostUpdate, StartCollective, WaitCollective

RANKS = MeshShape(1, 8)
LINKS = ("device>host", "host>device", "host>nvme", "nvme>host")


def round_to_page(nbytes: int) -> int:
    return (nbytes + 4095) // 4096 * 4096


def test_seven_billion_parameters_on_eight_ranks_with_states_on_nvme_by_hand():
    """A rank has 7e9 / 8 elements: bf16 parameters there, float32 sums at home on the host, 12 bytes on the disk."""
    units, numel = 35, 200_000_000
    flats = [FlatSize(unit, numel, torch.bfloat16) for unit in range(units)]
    report = predict_bytes(Plan.preset("infinity-states", precision="bf16"), flats, RANKS, StepSpec(units))
    own = units * numel // 8
    assert own == 875_000_000
    # 32 MiB of masters and moments, 12 bytes an element in blocks of 64: so many elements go through the ring at once.
    chunk = 32 * 2**20 // (12 * 64) * 64
    ring = 3 * (
        round_to_page(2 * chunk) + round_to_page(4 * chunk) + round_to_page(2 * 4 * chunk)
    )  # parameters, masters, two moments
    assert report.held[Memory.NVME] == {"parameters": 0, "gradients": 0, "states": 12 * own, "buffers": 0}
    assert report.held[Memory.HOST] == {"parameters": 0, "gradients": 4 * own, "states": 0, "buffers": ring}
    device = report.held[Memory.DEVICE]
    # Sums of one flat at a time; the root, a unit and the next are gathered, one is sent while the next is packed.
    assert device == {"parameters": 2 * own, "gradients": 4 * numel // 8, "states": 0, "buffers": 5 * 2 * numel}
    last = own % chunk
    record = (
        own // chunk * (round_to_page(4 * chunk) + round_to_page(8 * chunk))
        + round_to_page(4 * last)
        + round_to_page(8 * last)
    )
    assert report.bytes_moved == {
        "device>host": 4 * own,
        "host>device": 2 * own,
        "host>nvme": record,
        "nvme>host": record,
    }
    assert record == pytest.approx(12 * own, rel=1e-3)


# Bytes an element: of states far, parameters to the host, parameters to the device.
BY_PRECISION = {
    "fp32": (8, 4, 4),
    "bf16": (12, 0, 2),
    "bf16-split": (10, 2, 2),
    "bf16-stochastic": (8, 2, 2),
    "bf16-8bit": (2 + 2 * 65 / 64, 2, 2),
}


@pytest.mark.parametrize("precision", BY_PRECISION)
@pytest.mark.parametrize("passes", [1, 2, 4])
@pytest.mark.parametrize("name", OFFLOADED)
def test_what_is_moved_in_a_step(name, precision, passes):
    """Sums go home after each pass and come back before the next; parameters go as their masters need it."""
    plan = Plan.preset(name, precision=precision)
    dtype = plan.precision.parameters
    flats = [FlatSize(unit, 8 * 4096 * (1 + unit), dtype) for unit in range(3)]
    own = sum(flat.numel for flat in flats) // 8
    states, fetched, stored = BY_PRECISION[precision]
    if plan.lag:  # parameters beside them, which come once they are updated
        states, fetched = states + dtype.itemsize, 0
    report = predict_bytes(plan, flats, RANKS, StepSpec(3, passes))
    resting = dtype.itemsize * own if plan.parameters.far else 0  # gathered from there, and updated where they are
    gathered = 2 * passes * resting
    near = not plan.parameters.far
    assert report.bytes_moved["device>host"] == passes * 4 * own + near * fetched * own
    assert report.bytes_moved["host>device"] == (passes - 1) * 4 * own + near * stored * own + gathered
    assert report.held[plan.states.memory]["states"] == states * own
    disk = round_to_page(
        int((4 if precision == "bf16" else 2 if "split" in precision or "8bit" in precision else 0) * own)
    )
    moments = sum(
        2 * -(-(flat.numel // 8) * (65 if precision == "bf16-8bit" else 256) // 64 // 64) * 64 for flat in flats
    )
    on_disk = plan.states.memory is Memory.NVME
    record = on_disk * (disk + round_to_page(moments))
    assert report.bytes_moved["host>nvme"] == record + resting
    # What is rounded anew from float32 masters need not be read for that.
    assert report.bytes_moved["nvme>host"] == record + gathered + (precision != "bf16") * resting


@pytest.mark.parametrize("memory", [Memory.HOST, Memory.NVME])
@pytest.mark.parametrize("homed", [False, True])
def test_a_share_keeps_the_front_of_each_shard_on_the_device(memory, homed):
    gradients = Placement((NODE, LOCAL), Memory.HOST if homed else Memory.DEVICE)
    plan = Plan(gradients=gradients, states=Placement((NODE, LOCAL), memory, 0.7), precision=Precision(torch.bfloat16))
    flat = FlatSize(0, 8 * 64 * 1000, torch.bfloat16)
    near, far = 64 * 300, 64 * 700
    report = predict_bytes(plan, [flat], RANKS, StepSpec(1))
    assert report.held[Memory.DEVICE]["states"] == 12 * near
    assert report.held[memory]["states"] == 12 * far
    assert report.held[Memory.DEVICE]["gradients"] == 4 * (near + far)
    if homed:  # all goes home, and what is near comes back for the update
        assert report.bytes_moved["device>host"] == 4 * (near + far)
        assert report.bytes_moved["host>device"] == 4 * near + 2 * far
    else:
        assert report.bytes_moved["device>host"] == 4 * far
        assert report.bytes_moved["host>device"] == 2 * far


def test_a_device_that_updates_reads_the_host_and_moves_gradients_alone():
    flats = [FlatSize(0, 8 * 4096, torch.bfloat16)]
    for name, on_disk in (("offload3", 0), ("infinity-states", 12 * 4096)):
        report = predict_bytes(Plan.preset(name, precision="bf16"), flats, RANKS, StepSpec(1, on_device=True))
        assert [report.bytes_moved[link] for link in LINKS] == [4 * 4096, 0, on_disk, on_disk]
        assert report.held[Memory.HOST]["buffers"] == on_disk


def test_gradients_on_their_way_home_are_on_the_device_one_flat_at_a_time():
    flats = [FlatSize(unit, 8 * 4096, torch.bfloat16) for unit in range(4) for _ in range(12)]
    for name in OFFLOADED:
        for passes in (1, 3):
            report = predict_bytes(Plan.preset(name, precision="bf16"), flats, RANKS, StepSpec(4, passes))
            assert report.held[Memory.DEVICE]["gradients"] == 4 * 4096, (name, passes)
            homes = 2 if name == "delayed" else 1
            assert report.held[Memory.HOST]["gradients"] == homes * len(flats) * 4 * 4096


@pytest.mark.parametrize("overlap", [True, False])
def test_units_go_to_the_other_ranks_when_the_next_forward_waits_for_them(overlap):
    flats = [FlatSize(unit, 8 * 4096, torch.bfloat16) for unit in range(3)]
    step = StepSpec(3, overlaps_parameters=overlap)
    moves = list(flatten_moves(steady_step(flats, Plan.preset("offload", precision="bf16"), RANKS, step)))
    restores = [
        i
        for i, move in enumerate(moves)
        if isinstance(move, StartCollective) and move.collective.purpose.value == "restore"
    ]
    updated = next(i for i, move in enumerate(moves) if isinstance(move, HostUpdate))
    assert len(restores) == 3 and all((i > updated) is not overlap for i in restores)
    for i in restores:
        awaited = moves[i + 1]
        assert isinstance(awaited, WaitCollective) and awaited.unit == moves[i].collective.unit


def test_a_chunk_comes_is_updated_and_goes():
    numel = 8 * 64 * 1000
    plan = Plan.preset("infinity-states", precision="bf16-split")
    block = 64 * (2 + 2 + 4 + 4)
    moves = steady_step([FlatSize(0, numel, torch.bfloat16)], plan, RANKS, StepSpec(1, chunk_bytes=250 * block + 1))
    stream = [move for move in flatten_moves(moves) if isinstance(move, (CopyBytes, HostUpdate))][
        1:
    ]  # after gradients went home
    elements, extent = 250 * 64, round_to_page(2 * 250 * 64) + round_to_page(8 * 250 * 64)
    assert stream == 4 * [
        CopyBytes("nvme>host", extent),
        CopyBytes("device>host", 2 * elements),
        HostUpdate(elements),
        CopyBytes("host>device", 2 * elements),
        CopyBytes("host>nvme", extent),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40), st.sampled_from([130, 512, 1024])), max_size=8),
    st.integers(0, 20_000),
)
def test_chunks_cover_every_shard_in_order_and_none_is_too_large(shards, chunk_bytes):
    shards = [(first * 64, (first + blocks) * 64, cost) for first, blocks, cost in shards]
    chunks = list(divide_shards(shards, chunk_bytes))
    parts = [part for chunk in chunks for part in chunk]
    for index, (first, end, _) in enumerate(shards):
        mine = [part for part in parts if part.shard == index]
        assert [part.begin for part in mine] == [first, *(part.end for part in mine[:-1])]
        assert mine[-1].end == end and all(part.begin % 64 == 0 for part in mine)
    assert [part.shard for part in parts] == sorted(part.shard for part in parts)
    sizes = [sum((part.end - part.begin) // 64 * shards[part.shard][2] for part in chunk) for chunk in chunks]
    if chunk_bytes:
        for chunk, size in zip(chunks, sizes, strict=True):
            assert size <= chunk_bytes or (len(chunk) == 1 and chunk[0].end - chunk[0].begin == 64)
        for (chunk, size), after in zip(zip(chunks, sizes, strict=True), chunks[1:], strict=False):
            assert size + shards[after[0].shard][2] > chunk_bytes, "no room is left for the block that comes next"
            assert chunk
    else:
        assert len(chunks) <= 1


@pytest.mark.parametrize("precision", BY_PRECISION)
def test_what_an_element_counts_for_in_a_chunk(precision):
    chosen = Plan.preset("offload", precision=precision).precision
    states, fetched, _ = BY_PRECISION[precision]
    assert offloaded_block_bytes(chosen, chosen.parameters) == MOMENT_BLOCK * (states + fetched)


def test_pieces_of_eight_bits_begin_on_bounds():
    """A moment of 100 blocks is 6,400 codes and 100 exponents: what comes behind is rounded up to 64 bytes."""
    plan = Plan.preset("infinity-states", precision="bf16-8bit")
    assert ring_section_bytes(plan, torch.bfloat16, 6400, 2) == (0, 2 * 6400, 2 * 6400, 2 * 6528)
    assert round_up_pages(1) == 4096 and round_up_pages(4096) == 4096 and round_up_pages(0) == 0
