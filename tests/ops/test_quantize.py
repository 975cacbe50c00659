from __future__ import annotations

import pytest
import torch

from npuzero import ops
from ops import grid, wires

BITS = (8, 4)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", grid.FLOATS)
def test_equals_reference_on_the_grid(isa: str, dtype: torch.dtype, bits: int) -> None:
    block = wires.BLOCK[bits]
    for pieces, blocks in wires.SHAPES:
        n = pieces * blocks * block
        for offset in grid.OFFSETS:
            for fed_back in (False, True):
                source = grid.Guarded.around(wires.values(n, block, dtype), offset).inner
                size = pieces * wires.message_bytes(n // pieces, bits)
                sent = [grid.Guarded.around(torch.full((size,), 90, dtype=torch.uint8), wires.ALIGNED) for _ in "ab"]
                rests = [grid.Guarded.around(wires.values(n, block, first=offset), offset) for _ in "a"]
                rests.append(grid.Guarded.around(rests[0].inner, offset))

                def run(i: int, source=source, sent=sent, rests=rests, pieces=pieces, fed_back=fed_back) -> None:
                    rest = rests[i].inner if fed_back else None
                    ops.quantize(source, sent[i].inner, bits=bits, pieces=pieces, residual=rest)

                run(0)
                grid.with_reference(lambda run=run: run(1))
                what = f"{pieces} * {blocks}+{offset}"
                grid.assert_same(sent[0].inner, sent[1].inner, what)
                assert (wires.pad(sent[0].inner, bits, pieces, n) == 90).all()
                assert torch.equal(*(grid.patterns(rest.inner) for rest in rests)), what
                for guarded in (*sent, *rests):
                    guarded.assert_guards()


_BOTH = torch.zeros(1024)
_BYTES = torch.zeros(4096, dtype=torch.uint8)


def _quantize(source: object = None, message: object = None, **options: object) -> None:
    options = {"bits": 8, **options}
    ops.quantize(
        torch.zeros(256) if source is None else source,  # type: ignore[arg-type]
        torch.zeros(512, dtype=torch.uint8) if message is None else message,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


BAD = {
    "no tensor": (lambda: _quantize([1.0]), "quantize: source"),
    "integers": (lambda: _quantize(torch.zeros(256).int()), "quantize: source"),
    "float64": (lambda: _quantize(torch.zeros(256).double()), "quantize: source"),
    "two dimensions": (lambda: _quantize(torch.zeros(2, 128)), "quantize: source"),
    "not contiguous": (lambda: _quantize(torch.zeros(512)[::2]), "quantize: source"),
    "half a block": (lambda: _quantize(torch.zeros(128)), "quantize: source"),
    "half a block in a piece": (lambda: _quantize(torch.zeros(256), pieces=2), "quantize: source"),
    "two bits": (lambda: _quantize(bits=2), "quantize: bits"),
    "bits of text": (lambda: _quantize(bits="8"), "quantize: bits"),
    "bits of a list": (lambda: _quantize(bits=[8]), "quantize: bits"),
    "no piece": (lambda: _quantize(pieces=0), "quantize: pieces"),
    "half a piece": (lambda: _quantize(pieces=0.5), "quantize: pieces"),
    "pieces beyond 31 bits": (lambda: _quantize(_BOTH[:0], _BYTES[:0], pieces=2**31), "quantize: pieces"),
    "message too short": (lambda: _quantize(message=_BYTES[:258]), "quantize: message"),
    "message too long": (lambda: _quantize(message=_BYTES[:1024]), "quantize: message"),
    "message of floats": (lambda: _quantize(message=torch.zeros(512)), "quantize: message"),
    "message of signed bytes": (lambda: _quantize(message=_BYTES[:512].view(torch.int8)), "quantize: message"),
    "message between lines": (lambda: _quantize(message=_BYTES[32:544]), "quantize: message"),
    "message elsewhere": (lambda: _quantize(message=_BYTES[:512].to("meta")), "quantize: message"),
    "residual in bf16": (lambda: _quantize(residual=torch.zeros(256).bfloat16()), "quantize: residual"),
    "short residual": (lambda: _quantize(residual=torch.zeros(255)), "quantize: residual"),
    "message in the source": (lambda: _quantize(_BOTH[:256], _BOTH[128:256].view(torch.uint8)), "quantize: message"),
    "message in the residual": (
        lambda: _quantize(residual=_BOTH[:256], message=_BOTH[128:256].view(torch.uint8)),
        "quantize: message",
    ),
    "residual in place": (lambda: _quantize(_BOTH[:256], residual=_BOTH[:256]), "quantize: source"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    call, subject = BAD[name]
    grid.assert_refused(call, subject)
