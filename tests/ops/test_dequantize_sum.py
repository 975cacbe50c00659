from __future__ import annotations

import pytest
import torch

from npuzero import ops
from ops import grid, wires

BITS = (8, 4)


def _rows(count: int, n: int, bits: int) -> list[torch.Tensor]:
    """What ranks send: blocks of every kind, other kinds beside them in each row."""
    return [wires.values(n, wires.BLOCK[bits], first=5 * i) for i in range(count)]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", grid.FLOATS)
def test_equals_reference_on_the_grid(isa: str, dtype: torch.dtype, bits: int) -> None:
    block = wires.BLOCK[bits]
    for number, (pieces, blocks) in enumerate(wires.SHAPES):
        n = pieces * blocks * block
        for rows in (1, 2, 4) if blocks < 100 else (1 + number % 3,):
            messages = wires.made(_rows(rows, n, bits), bits, pieces, ops.quantize)
            messages = grid.Guarded.around(messages, wires.ALIGNED).inner
            start = wires.values(n, block, dtype, first=3)
            for offset in grid.OFFSETS:
                for accumulate in (False, True):
                    sums = [grid.Guarded.around(start, offset) for _ in "ab"]

                    def run(i: int, sums=sums, messages=messages, rows=rows, pieces=pieces, add=accumulate) -> None:
                        ops.dequantize_sum(messages, sums[i].inner, bits=bits, rows=rows, pieces=pieces, accumulate=add)

                    run(0)
                    grid.with_reference(lambda run=run: run(1))
                    grid.assert_same(sums[0].inner, sums[1].inner, f"{rows} * {pieces} * {blocks}+{offset}")
                    sums[0].assert_guards()


_BYTES = torch.zeros(4096, dtype=torch.uint8)


def _sum(messages: object = None, out: object = None, **options: object) -> None:
    options = {"bits": 8, **options}
    ops.dequantize_sum(
        torch.zeros(512, dtype=torch.uint8) if messages is None else messages,  # type: ignore[arg-type]
        torch.zeros(256) if out is None else out,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


BAD = {
    "no tensor": (lambda: _sum(out=[1.0]), "dequantize_sum: out"),
    "float64": (lambda: _sum(out=torch.zeros(256).double()), "dequantize_sum: out"),
    "two dimensions": (lambda: _sum(out=torch.zeros(2, 128)), "dequantize_sum: out"),
    "not contiguous": (lambda: _sum(out=torch.zeros(512)[::2]), "dequantize_sum: out"),
    "half a block": (lambda: _sum(out=torch.zeros(128)), "dequantize_sum: out"),
    "half a block in a piece": (lambda: _sum(pieces=2), "dequantize_sum: out"),
    "two bits": (lambda: _sum(bits=2), "dequantize_sum: bits"),
    "no row": (lambda: _sum(rows=0), "dequantize_sum: rows"),
    "rows of text": (lambda: _sum(rows="1"), "dequantize_sum: rows"),
    "no piece": (lambda: _sum(pieces=0), "dequantize_sum: pieces"),
    "one row for two": (lambda: _sum(rows=2), "dequantize_sum: messages"),
    "messages too long": (lambda: _sum(_BYTES[:1024]), "dequantize_sum: messages"),
    "messages of floats": (lambda: _sum(torch.zeros(512)), "dequantize_sum: messages"),
    "messages between lines": (lambda: _sum(_BYTES[1:513]), "dequantize_sum: messages"),
    "messages elsewhere": (lambda: _sum(_BYTES[:512].to("meta")), "dequantize_sum: messages"),
    "accumulate of text": (lambda: _sum(accumulate="yes"), "dequantize_sum: accumulate"),
    "overlap": (lambda: _sum(_BYTES[512:1024], _BYTES[:1024].view(torch.float32)), "dequantize_sum: messages"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    call, subject = BAD[name]
    grid.assert_refused(call, subject)
