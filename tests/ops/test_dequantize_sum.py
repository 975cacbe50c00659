from __future__ import annotations

import pytest
import torch

from npuzero import _native, ops
from npuzero.ops.reference import dequantize_sum as reference
from ops import grid, wires

BITS = (8, 4)


def _wire_rows(count: int, n: int, bits: int) -> list[torch.Tensor]:
    """What ranks send: blocks of every kind, other kinds beside them in each row."""
    return [wires.wire_values(n, wires.BLOCK[bits], first=5 * i) for i in range(count)]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", grid.FLOATS)
def test_equals_reference_on_the_grid(isa: str, dtype: torch.dtype, bits: int) -> None:
    block = wires.BLOCK[bits]
    for number, (pieces, blocks) in enumerate(wires.SHAPES):
        n = pieces * blocks * block
        for rows in (1, 2, 4) if blocks < 100 else (1 + number % 3,):
            messages = wires.make_messages(_wire_rows(rows, n, bits), bits, pieces, ops.quantize)
            messages = grid.GuardedBuffer.around(messages, wires.ALIGNED).inner
            start = wires.wire_values(n, block, dtype, first=3)
            for offset in grid.OFFSETS:
                for accumulate in (False, True):
                    sums = [grid.GuardedBuffer.around(start, offset) for _ in "ab"]

                    def run(i: int, sums=sums, messages=messages, rows=rows, pieces=pieces, add=accumulate) -> None:
                        ops.dequantize_sum(messages, sums[i].inner, bits=bits, rows=rows, pieces=pieces, accumulate=add)

                    run(0)
                    grid.with_reference(lambda run=run: run(1))
                    grid.assert_same(sums[0].inner, sums[1].inner, f"{rows} * {pieces} * {blocks}+{offset}")
                    sums[0].assert_guards()


def _sum_messages(rows: list[torch.Tensor], bits: int, pieces: int = 1) -> torch.Tensor:
    out = torch.empty(rows[0].numel())
    messages = wires.make_messages(rows, bits, pieces, ops.quantize)
    ops.dequantize_sum(messages, out, bits=bits, rows=len(rows), pieces=pieces)
    return out


@pytest.mark.parametrize("bits", BITS)
def test_a_value_is_its_code_times_the_scale_of_its_block(isa: str, bits: int) -> None:
    n = 2 * len(wires.KINDS) * wires.BLOCK[bits]
    source = wires.wire_values(n, wires.BLOCK[bits])
    codes, scales = wires.decode_message(wires.make_messages([source], bits, 2, ops.quantize), bits, 2, n)
    exact = (codes * scales.unsqueeze(1)).flatten()  # but for those beyond the largest finite value
    assert exact.nan_to_num(0, 0, 0).abs().max() > torch.finfo(torch.float32).max or bits == 8
    grid.assert_same(_sum_messages([source], bits, 2), exact.float())
    kept = exact.float().isfinite()
    assert torch.equal(exact[kept], exact[kept].float().double())


@pytest.mark.parametrize("bits", BITS)
def test_rows_are_added_in_their_order_and_before_they_are_accumulated(isa: str, bits: int) -> None:
    n = 9 * wires.BLOCK[bits]
    rows = [torch.randn(n) * 1000.0**i for i in range(4)]
    each = [_sum_messages([row], bits, 3) for row in rows]
    wanted = each[0] + each[1] + each[2] + each[3]
    assert torch.equal(_sum_messages(rows, bits, 3), wanted)
    assert not torch.equal(_sum_messages(rows[::-1], bits, 3), wanted)
    start = torch.randn(n) * 100
    for dtype in grid.FLOATS:
        out = start.to(dtype)
        expected = (out.float() + wanted).to(dtype)
        messages = wires.make_messages(rows, bits, 3, ops.quantize)
        before, theirs = messages.clone(), out.clone()
        ops.dequantize_sum(messages, out, bits=bits, rows=4, pieces=3, accumulate=True)
        assert torch.equal(out, expected) and torch.equal(messages, before)
        reference.reference_dequantize_sum(messages, theirs, bits, 4, 3, True)
        assert torch.equal(theirs, expected)


@pytest.mark.parametrize("bits", BITS)
def test_what_is_not_finite_in_a_row_is_lost_in_its_block_alone(isa: str, bits: int) -> None:
    block = wires.BLOCK[bits]
    rows = [torch.randn(4 * block) for _ in range(3)]
    wanted = _sum_messages(rows, bits, 2)
    rows[1][block + 3] = -torch.inf
    rows[2][3 * block] = torch.nan
    found = _sum_messages(rows, bits, 2).view(4, block)
    assert found[1].isnan().all() and found[3].isnan().all()
    assert torch.equal(found[::2], wanted.view(4, block)[::2])


@pytest.mark.parametrize("bits", BITS)
def test_no_bit_depends_on_threads_isa_or_mode(bits: int) -> None:
    n = 3 * 401 * wires.BLOCK[bits]
    rows = [torch.randn(n) * 2.0**-120 for _ in range(2)]
    messages, start = wires.make_messages(rows, bits, 3, ops.quantize), torch.randn(n) * 2.0**-126
    expected = start.clone()
    ops.dequantize_sum(messages, expected, bits=bits, rows=2, pieces=3, accumulate=True)
    assert ((expected != 0) & (expected.abs() < 2.0**-126)).any()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for isa in _native.supported_isas():
            _native.use_isa(isa)
            for flushing in (False, True):
                out = start.clone()
                torch.set_flush_denormal(flushing)
                try:
                    ops.dequantize_sum(messages, out, bits=bits, rows=2, pieces=3, accumulate=True)
                finally:
                    torch.set_flush_denormal(False)
                assert torch.equal(grid.bit_patterns(out), grid.bit_patterns(expected))


@pytest.mark.parametrize("dtype", grid.FLOATS)
def test_what_is_streamed_past_the_caches_is_the_same(dtype: torch.dtype) -> None:
    """From 16 MiB of results on, where they begin at a line of the cache."""
    n = 2**24 // dtype.itemsize
    part = torch.randn(4096)
    message = wires.make_messages([part.repeat(n // 4096)], 8, 1, ops.quantize)
    expected = _sum_messages([part], 8).to(dtype).expand(n // 4096, -1)
    out = torch.zeros(n + 1, dtype=dtype)
    for isa in _native.supported_isas():
        _native.use_isa(isa)
        for begin in (0, 1):
            found = out[begin : begin + n].zero_()
            ops.dequantize_sum(message, found, bits=8)
            assert torch.equal(found.view(-1, 4096), expected)


_BYTES = torch.zeros(4096, dtype=torch.uint8)


def _call_dequantize_sum(messages: object = None, out: object = None, **options: object) -> None:
    options = {"bits": 8, **options}
    ops.dequantize_sum(
        torch.zeros(512, dtype=torch.uint8) if messages is None else messages,  # type: ignore[arg-type]
        torch.zeros(256) if out is None else out,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


BAD = {
    "no tensor": (lambda: _call_dequantize_sum(out=[1.0]), "dequantize_sum: out"),
    "float64": (lambda: _call_dequantize_sum(out=torch.zeros(256).double()), "dequantize_sum: out"),
    "two dimensions": (lambda: _call_dequantize_sum(out=torch.zeros(2, 128)), "dequantize_sum: out"),
    "not contiguous": (lambda: _call_dequantize_sum(out=torch.zeros(512)[::2]), "dequantize_sum: out"),
    "half a block": (lambda: _call_dequantize_sum(out=torch.zeros(128)), "dequantize_sum: out"),
    "half a block in a piece": (lambda: _call_dequantize_sum(pieces=2), "dequantize_sum: out"),
    "two bits": (lambda: _call_dequantize_sum(bits=2), "dequantize_sum: bits"),
    "no row": (lambda: _call_dequantize_sum(rows=0), "dequantize_sum: rows"),
    "rows of text": (lambda: _call_dequantize_sum(rows="1"), "dequantize_sum: rows"),
    "no piece": (lambda: _call_dequantize_sum(pieces=0), "dequantize_sum: pieces"),
    "one row for two": (lambda: _call_dequantize_sum(rows=2), "dequantize_sum: messages"),
    "messages too long": (lambda: _call_dequantize_sum(_BYTES[:1024]), "dequantize_sum: messages"),
    "messages of floats": (lambda: _call_dequantize_sum(torch.zeros(512)), "dequantize_sum: messages"),
    "messages between lines": (lambda: _call_dequantize_sum(_BYTES[1:513]), "dequantize_sum: messages"),
    "messages elsewhere": (lambda: _call_dequantize_sum(_BYTES[:512].to("meta")), "dequantize_sum: messages"),
    "accumulate of text": (lambda: _call_dequantize_sum(accumulate="yes"), "dequantize_sum: accumulate"),
    "overlap": (
        lambda: _call_dequantize_sum(_BYTES[512:1024], _BYTES[:1024].view(torch.float32)),
        "dequantize_sum: messages",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    call, subject = BAD[name]
    grid.assert_refused(call, subject)
