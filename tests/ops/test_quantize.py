from __future__ import annotations

import pytest
import torch

from npuzero import _native, ops
from npuzero.errors import ContractError
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
                source = grid.GuardedBuffer.around(wires.wire_values(n, block, dtype), offset).inner
                size = pieces * wires.expected_message_bytes(n // pieces, bits)
                sent = [
                    grid.GuardedBuffer.around(torch.full((size,), 90, dtype=torch.uint8), wires.ALIGNED) for _ in "ab"
                ]
                rests = [grid.GuardedBuffer.around(wires.wire_values(n, block, first=offset), offset) for _ in "a"]
                rests.append(grid.GuardedBuffer.around(rests[0].inner, offset))

                def run(i: int, source=source, sent=sent, rests=rests, pieces=pieces, fed_back=fed_back) -> None:
                    rest = rests[i].inner if fed_back else None
                    ops.quantize(source, sent[i].inner, bits=bits, pieces=pieces, residual=rest)

                run(0)
                grid.with_reference(lambda run=run: run(1))
                what = f"{pieces} * {blocks}+{offset}"
                grid.assert_same(sent[0].inner, sent[1].inner, what)
                assert (wires.unwritten_bytes(sent[0].inner, bits, pieces, n) == 90).all()
                assert torch.equal(*(grid.bit_patterns(rest.inner) for rest in rests)), what
                for guarded in (*sent, *rests):
                    guarded.assert_guards()


def _quantized_message(
    source: torch.Tensor, bits: int, pieces: int = 1, residual: torch.Tensor | None = None
) -> torch.Tensor:
    message = torch.zeros(pieces * wires.expected_message_bytes(source.numel() // pieces, bits), dtype=torch.uint8)
    ops.quantize(source, message, bits=bits, pieces=pieces, residual=residual)
    return message


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", grid.FLOATS)
def test_no_code_is_clipped_and_what_is_lost_is_the_residual(isa: str, dtype: torch.dtype, bits: int) -> None:
    block, k = wires.BLOCK[bits], wires.LARGEST[bits]
    n = 3 * len(wires.KINDS) * block
    source, residual = wires.wire_values(n, block, dtype), torch.zeros(n)
    codes, scales = wires.decode_message(_quantized_message(source, bits, 3, residual), bits, 3, n)
    x, rest = source.double().view(-1, block), residual.double().view(-1, block)
    kept = x.isfinite().all(1)
    assert 0 < kept.sum() < len(kept)
    assert torch.equal(scales.isnan(), ~kept) and not codes[~kept].any() and not rest[~kept].any()
    x, codes, scales, rest = x[kept], codes[kept], scales[kept].unsqueeze(1), rest[kept]
    largest = x.abs().amax(1, keepdim=True)
    assert (codes.abs() <= k).all() and (scales >= 2.0**-120).all()
    assert (scales >= largest / k * (1 - 2.0**-23)).all()
    assert ((scales <= largest / k * (1 + 2.0**-7)) | (scales == 2.0**-120)).all()
    assert ((x - codes * scales).abs() <= scales * (0.5 + 2.0**-16)).all()  # 1 / scale, and its product, are rounded
    assert torch.equal(rest, (x - (codes * scales).float()).float().double())  # a code's value may be infinite


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_rounded_to_even(isa: str, bits: int) -> None:
    k, block = wires.LARGEST[bits], wires.BLOCK[bits]
    x = torch.zeros(block)
    x[:6] = torch.tensor([k, 0.5, 1.5, 2.5, -0.5, -1.5]) * 4
    codes, scales = wires.decode_message(_quantized_message(x, bits), bits, 1, block)
    assert scales.tolist() == [4.0]
    assert codes[0, :6].tolist() == [k, 0, 2, 2, 0, -2]


@pytest.mark.parametrize("bits", BITS)
def test_pieces_move_blocks_and_change_none(isa: str, bits: int) -> None:
    n = 12 * wires.BLOCK[bits]
    source, start = wires.wire_values(n, wires.BLOCK[bits]), torch.randn(n)
    residual = start.clone()
    codes, scales = wires.decode_message(_quantized_message(source, bits, 1, residual), bits, 1, n)
    for pieces in (2, 3, 12):
        other = start.clone()
        again = wires.decode_message(_quantized_message(source, bits, pieces, other), bits, pieces, n)
        assert torch.equal(again[0], codes) and torch.equal(residual, other)
        grid.assert_same(again[1], scales)


@pytest.mark.parametrize("bits", BITS)
def test_no_bit_depends_on_threads_isa_or_mode(bits: int) -> None:
    """With denormals among what is added, and as results; also where the caller's thread flushes them."""
    block = wires.BLOCK[bits]
    n = 3 * 401 * block
    small = torch.randn(n) * 2.0**-120
    source, start = torch.where(torch.rand(n) < 0.5, small, wires.wire_values(n, block)), torch.randn(n) * 2.0**-125
    wanted = start.clone()
    expected = _quantized_message(source, bits, 3, wanted)
    assert ((wanted != 0) & (wanted.abs() < 2.0**-126)).any()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for isa in _native.supported_isas():
            _native.use_isa(isa)
            for flushing in (False, True):
                message, residual = torch.zeros_like(expected), start.clone()
                torch.set_flush_denormal(flushing)
                try:
                    ops.quantize(source, message, bits=bits, pieces=3, residual=residual)
                    flushes = (torch.tensor([2.0**-126]) * 0.5).view(torch.int32).item() == 0
                finally:
                    torch.set_flush_denormal(False)
                assert flushes == flushing  # the caller's mode is as it was
                assert torch.equal(message, expected)
                assert torch.equal(grid.bit_patterns(residual), grid.bit_patterns(wanted))


@pytest.mark.parametrize("bits", BITS)
def test_neighbouring_blocks_do_not_touch(isa: str, bits: int) -> None:
    block = wires.BLOCK[bits]
    one = torch.randn(block)
    x = torch.cat([one * 1e30, one * 1e-30, one, torch.full((block,), torch.inf), one * 1e30])
    codes, scales = wires.decode_message(_quantized_message(x, bits), bits, 1, len(x))
    lone = [wires.decode_message(_quantized_message(part, bits), bits, 1, block) for part in x.split(block)]
    assert torch.equal(codes, torch.cat([part[0] for part in lone]))
    grid.assert_same(scales, torch.cat([part[1] for part in lone]))
    assert codes[1].any() and torch.equal(codes[0], codes[4]) and not codes[3].any()


@pytest.mark.parametrize("bits", BITS)
def test_a_sum_that_overflows_loses_its_block_alone_and_is_forgotten(isa: str, bits: int) -> None:
    block = wires.BLOCK[bits]
    most = torch.finfo(torch.float32).max
    source, residual = torch.randn(3 * block), torch.randn(3 * block)
    source[block + 5] = residual[block + 5] = most  # each is finite
    residual[0] = -most
    before = residual.clone()
    message = _quantized_message(source, bits, 1, residual)
    codes, scales = wires.decode_message(message, bits, 1, 3 * block)
    assert scales.isnan().tolist() == [False, True, False]
    split = 3 * block * bits // 8
    assert message[split + 2 : split + 4].tolist() == [0xC0, 0x7F]
    assert not codes[1].any() and not residual[block : 2 * block].any()
    assert residual[0] == before[0] + source[0] + codes[0, 0].neg().float() * scales[0].float()
    assert _quantized_message(source, bits, 1, residual)[split + 2 : split + 4].tolist() != [
        0xC0,
        0x7F,
    ]  # the next step goes on


@pytest.mark.parametrize("bits", BITS)
def test_zeros_and_what_is_below_the_least_scale(isa: str, bits: int) -> None:
    block = wires.BLOCK[bits]
    least = 2.0**-120
    x = torch.tensor([0.0, -0.0, 2.0**-149, 2.0**-126, least / 2, least * (0.5 + 2.0**-20), -least, least * 1.5])
    source, residual = torch.zeros(block), torch.full((block,), -0.0)
    source[: len(x)] = x
    codes, scales = wires.decode_message(_quantized_message(source, bits, 1, residual), bits, 1, block)
    assert scales.tolist() == [least] and codes[0, : len(x)].tolist() == [0, 0, 0, 0, 0, 1, -1, 2]
    rest = x - codes[0, : len(x)].float() * least
    assert rest[1].signbit() and torch.equal(grid.bit_patterns(residual[: len(x)]), grid.bit_patterns(rest))
    assert not residual[len(x) :].signbit().any()  # 0 + -0


def test_what_is_streamed_past_the_caches_is_the_same() -> None:
    """From 16 MiB of codes on."""
    part = torch.randn(4096)
    expected, n = _quantized_message(part, 8)[:4096], 2**24
    for isa in _native.supported_isas():
        _native.use_isa(isa)
        assert torch.equal(
            _quantized_message(part.repeat(n // 4096), 8)[:n].view(-1, 4096), expected.expand(n // 4096, -1)
        )


def test_bytes_of_a_message() -> None:
    for bits, block in wires.BLOCK.items():
        for blocks in (0, 1, 2, 3, 7, 64, 1000, 2**40):
            assert _native.message_bytes(blocks * block, bits) == wires.expected_message_bytes(blocks * block, bits)


_BOTH = torch.zeros(1024)
_BYTES = torch.zeros(4096, dtype=torch.uint8)


def _call_quantize(source: object = None, message: object = None, **options: object) -> None:
    options = {"bits": 8, **options}
    ops.quantize(
        torch.zeros(256) if source is None else source,  # type: ignore[arg-type]
        torch.zeros(512, dtype=torch.uint8) if message is None else message,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


BAD = {
    "no tensor": (lambda: _call_quantize([1.0]), "quantize: source"),
    "integers": (lambda: _call_quantize(torch.zeros(256).int()), "quantize: source"),
    "float64": (lambda: _call_quantize(torch.zeros(256).double()), "quantize: source"),
    "two dimensions": (lambda: _call_quantize(torch.zeros(2, 128)), "quantize: source"),
    "not contiguous": (lambda: _call_quantize(torch.zeros(512)[::2]), "quantize: source"),
    "half a block": (lambda: _call_quantize(torch.zeros(128)), "quantize: source"),
    "half a block in a piece": (lambda: _call_quantize(torch.zeros(256), pieces=2), "quantize: source"),
    "two bits": (lambda: _call_quantize(bits=2), "quantize: bits"),
    "bits of text": (lambda: _call_quantize(bits="8"), "quantize: bits"),
    "bits of a list": (lambda: _call_quantize(bits=[8]), "quantize: bits"),
    "no piece": (lambda: _call_quantize(pieces=0), "quantize: pieces"),
    "half a piece": (lambda: _call_quantize(pieces=0.5), "quantize: pieces"),
    "pieces beyond 31 bits": (lambda: _call_quantize(_BOTH[:0], _BYTES[:0], pieces=2**31), "quantize: pieces"),
    "message too short": (lambda: _call_quantize(message=_BYTES[:258]), "quantize: message"),
    "message too long": (lambda: _call_quantize(message=_BYTES[:1024]), "quantize: message"),
    "message of floats": (lambda: _call_quantize(message=torch.zeros(512)), "quantize: message"),
    "message of signed bytes": (lambda: _call_quantize(message=_BYTES[:512].view(torch.int8)), "quantize: message"),
    "message between lines": (lambda: _call_quantize(message=_BYTES[32:544]), "quantize: message"),
    "message elsewhere": (lambda: _call_quantize(message=_BYTES[:512].to("meta")), "quantize: message"),
    "residual in bf16": (lambda: _call_quantize(residual=torch.zeros(256).bfloat16()), "quantize: residual"),
    "short residual": (lambda: _call_quantize(residual=torch.zeros(255)), "quantize: residual"),
    "message in the source": (
        lambda: _call_quantize(_BOTH[:256], _BOTH[128:256].view(torch.uint8)),
        "quantize: message",
    ),
    "message in the residual": (
        lambda: _call_quantize(residual=_BOTH[:256], message=_BOTH[128:256].view(torch.uint8)),
        "quantize: message",
    ),
    "residual in place": (lambda: _call_quantize(_BOTH[:256], residual=_BOTH[:256]), "quantize: source"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    call, subject = BAD[name]
    grid.assert_refused(call, subject)


BAD_DOOR = {
    "two bits": (1, 2, 256, 512),
    "no piece": (0, 8, 256, 512),
    "negative pieces": (-1, 8, 256, 512),
    "pieces without whole blocks": (3, 8, 256, 512),
    "a message too short": (1, 8, 256, 511),
    "a message too long": (1, 8, 256, 1024),
    "no message": (1, 8, 256, 0),
}


@pytest.mark.parametrize("name", BAD_DOOR)
def test_bad_calls_of_the_core_are_refused(name: str) -> None:
    pieces, bits, n, size = BAD_DOOR[name]
    source, message = torch.zeros(n), torch.zeros(size, dtype=torch.uint8)
    views = [_native.tensor_view(tensor) for tensor in (source, message)]
    with pytest.raises(ContractError, match="quantize: "):
        _native.quantize(*views, None, pieces, bits, 0)
    with pytest.raises(ContractError, match="dequantize_sum: "):
        _native.dequantize_sum(*reversed(views), 1, pieces, bits, False, 0)
    right = _native.tensor_view(torch.zeros(512, dtype=torch.uint8))
    with pytest.raises(ContractError, match="quantize: residual"):
        _native.quantize(views[0], right, _native.tensor_view(torch.zeros(n).half()), 1, 8, 0)
    with pytest.raises(ContractError, match="dequantize_sum: rows"):
        _native.dequantize_sum(right, views[0], 0, 1, 8, False, 0)


def test_bytes_of_no_message_are_refused() -> None:
    for numel, bits in ((255, 8), (-256, 8), (256, 2), (2**63 - 256, 8)):
        with pytest.raises(ContractError, match="message_bytes: "):
            _native.message_bytes(numel, bits)
