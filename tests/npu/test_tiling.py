"""How work is cut: what must hold of any parts at any addresses."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu.emulated import build_emulated_kernels

LINE, TILE = 32, 4096


@dataclass(frozen=True)
class TilingPart:
    count: int
    written: tuple[tuple[int, int, int], ...]  # address, itemsize, elements of an item
    grain: int = 1


@cache
def emulated_library() -> ctypes.CDLL:
    """The library of all kernels."""
    library = ctypes.CDLL(str(build_emulated_kernels()))
    library.cut_line.restype = ctypes.c_int64
    return library


def cut_into_shares(parts: list[TilingPart], cores: int) -> list[tuple[int, int, int]]:
    """(begin, end, part) of each share."""
    words: list[int] = []
    for part in parts:
        words += [part.count, len(part.written), part.grain]
        for buffer in (*part.written, *[(0, 1, 1)] * (8 - len(part.written))):
            words += buffer
    out = (ctypes.c_int64 * (3 * cores))()
    made = emulated_library().cut_line(
        (ctypes.c_int64 * len(words))(*words), ctypes.c_int64(len(parts)), cores, ctypes.c_int64(TILE), out
    )
    return [tuple(out[3 * i : 3 * i + 3]) for i in range(made)]  # type: ignore[misc]


@st.composite
def tiling_lines(draw: st.DrawFn) -> list[TilingPart]:
    """Parts whose buffers lie close to each other, in whatever order, at addresses aligned to nothing but elements."""
    items = draw(st.lists(st.sampled_from([(4, 1), (2, 1), (1, 1), (1, 64)]), min_size=1, max_size=6))
    grain = draw(st.sampled_from([1, 128, 256]))
    counts = draw(st.lists(st.integers(1, 20000) | st.integers(1, 40), min_size=1, max_size=8))
    parts = [TilingPart(count * grain, (), grain) for count in counts]
    address = 1 << 40
    for size, elements in items:
        address += draw(st.sampled_from([0, 4, 32, 508, 512]))
        address += -address % size
        for i in draw(st.permutations(range(len(counts)))):
            parts[i] = TilingPart(parts[i].count, (*parts[i].written, (address, size, elements)), grain)
            address += -(-parts[i].count // elements) * size + draw(st.sampled_from([0, 0, 4, 28, 512]))
            address += -address % size
    return parts


@settings(deadline=None, max_examples=80)
@given(tiling_lines(), st.integers(1, 48))
def test_shares_cover_the_line_and_no_two_cores_write_one_memory_line(parts: list[TilingPart], cores: int) -> None:
    shares = cut_into_shares(parts, cores)
    starts = [sum(part.count for part in parts[:i]) for i in range(len(parts) + 1)]
    assert 1 <= len(shares) <= cores
    assert [begin for begin, _, _ in shares] == [0, *(end for _, end, _ in shares[:-1])]
    assert shares[-1][1] == starts[-1]
    owner: dict[int, int] = {}
    for core, (begin, end, first) in enumerate(shares):
        assert begin < end
        assert starts[first] <= begin < starts[first + 1]
        for part, start in zip(parts, starts, strict=False):
            low, high = max(begin - start, 0), min(end - start, part.count)
            if low < high:
                assert low % part.grain == 0
                for address, size, elements in part.written:
                    assert low % elements == 0
                    last = (high - 1) // elements * size + size - 1
                    for line in ((address + low // elements * size) // LINE, (address + last) // LINE):
                        assert owner.setdefault(line, core) == core


@pytest.mark.parametrize("cores", [1, 7, 40, 48])
def test_a_flat_is_cut_evenly_at_512_bytes(cores: int) -> None:
    count = 25_600_000 + 37
    flat = TilingPart(count, tuple((1 << 40 | i << 36, size, 1) for i, size in enumerate((4, 4, 4, 2))))
    shares = cut_into_shares([flat], cores)
    assert len(shares) == cores
    assert all(begin % 256 == 0 for begin, _, _ in shares)
    assert max(end - begin for begin, end, _ in shares) - min(end - begin for begin, end, _ in shares) <= 512


def test_exponents_are_cut_at_lines_and_the_rest_at_512_bytes() -> None:
    items = ((4, 1), (1, 1), (1, 64), (2, 1))
    shares = cut_into_shares(
        [TilingPart(10_000_000, tuple((1 << 40 | i << 36, *item) for i, item in enumerate(items)))], 48
    )
    assert len(shares) == 48
    assert all(begin % 2048 == 0 for begin, _, _ in shares)


def test_little_work_goes_to_few_cores() -> None:
    assert len(cut_into_shares([TilingPart(TILE, ((1 << 40, 4, 1),))], 48)) == 1
    assert len(cut_into_shares([TilingPart(2 * TILE + 1, ((1 << 40, 4, 1),))], 48)) == 3


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 10**9), st.integers(1, 48))
def test_norms_shares_are_blocks_with_room_for_every_cores_sums(count: int, cores: int) -> None:
    out = (ctypes.c_int64 * (3 * cores))()
    made = emulated_library().cut_norm(ctypes.c_int64(count), cores, out)
    shares = [tuple(out[3 * i : 3 * i + 2]) for i in range(made)]
    assert 1 <= made <= cores
    assert [begin for begin, _ in shares] == [0, *(end for _, end in shares[:-1])] and shares[-1][1] == count
    assert all(begin % 4096 == 0 for begin, _ in shares)
    assert made == 1 or 256 * made <= 16 * (-(-count // 8192))  # 16 bytes a block of the contract: csrc/ops/norm.h


@pytest.mark.parametrize(
    ("moments", "rooms", "drawn", "coded"), list(itertools.product([1, 2, 3], [1, 2], [0, 1], [0, 1]))
)
def test_a_tile_of_an_update_fits(moments: int, rooms: int, drawn: int, coded: int) -> None:
    tile = emulated_library().flat_tile(moments, rooms, drawn, coded)
    assert 2048 <= tile <= TILE and tile % 256 == 0
    assert tile == TILE or rooms > 1 or drawn or coded  # moves of 16 KB wherever nothing is rounded on the way
    used = 4 * tile * (2 * (2 + moments) + rooms) + 32 + 2 * (tile // 8) + 5 * 256  # what is out of step
    if drawn:
        used += 2 * 4 * (2048 + 8) + 2 * 32  # draws.h
    if coded:
        used += 4 * (3 + 2 * 8) * -(-tile // 64 // 8) * 8 + 2 * 32  # codes.h
    assert used <= 188_160
