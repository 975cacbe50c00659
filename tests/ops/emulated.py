"""Kernels of another processor, or on a GPU, under the ordinary op tests: csrc/driver behind a pipe, by any command."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from npuzero import _C

_OPS = tuple(sorted(_C.kernels()))  # csrc/ops/ops.h has them in this order
_SIZES = (4, 2, 2, 8, 4, 8, 1, 2)  # bytes, csrc/core/view.h
_F32, _U8, _I16 = 0, 6, 7


class _DriverCall:
    """Buffers of this process by address, and the words that name them."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, int], int] = {}

    def buffer(self, address: int, count: int, dtype: int) -> int:
        if not address:
            return -1
        return self.buffers.setdefault((address, count * _SIZES[dtype]), len(self.buffers))

    def view(self, view: Any) -> list[int]:
        if view is None:
            return [-1, 0, _F32]
        return [self.buffer(view.data, view.count, view.dtype), view.count, view.dtype]

    def scalar(self, view: Any) -> int:
        return self.view(view)[0]


class KernelDriver:
    """Functions like those of `npuzero._C`, whose kernels run in the driver."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        self._process.communicate(timeout=300)
        assert self._process.returncode == 0, f"the driver, or what it ran under, ended with {self._process.returncode}"

    def functions(self) -> dict[str, Callable[..., None]]:
        """By the names that they have in `npuzero._native`."""
        return {op: getattr(self, op) for op in _OPS}

    def cast(self, source: _C.View, target: _C.View, rounding: int, seed: int, offset: int, stream: int) -> None:
        call = _DriverCall()
        self._run("cast", call, [*call.view(source), *call.view(target), rounding, seed, offset])

    def norm(self, x: _C.View, out: _C.View, workspace: _C.View, addend: Any, scale: float, stream: int) -> None:
        call = _DriverCall()
        views = [word for view in (x, out, workspace, addend) for word in call.view(view)]
        self._run("norm", call, [*views, _driver_bits(scale)])

    def quantize(self, source: _C.View, message: _C.View, residual: Any, pieces: int, bits: int, stream: int) -> None:
        call = _DriverCall()
        views = [word for view in (source, message, residual) for word in call.view(view)]
        self._run("quantize", call, [*views, pieces, bits])

    def dequantize_sum(
        self, messages: _C.View, out: _C.View, rows: int, pieces: int, bits: int, accumulate: bool, stream: int
    ) -> None:
        call = _DriverCall()
        self._run("dequantize_sum", call, [*call.view(messages), *call.view(out), rows, pieces, bits, int(accumulate)])

    def pack(
        self,
        parts: Iterable[tuple[int, int, int, int, int]],
        factor: float,
        scale_at: Any,
        scaled: bool,
        accumulate: bool,
        device: int,
        stream: int,
    ) -> None:
        call = _DriverCall()
        words = [_driver_bits(factor), call.scalar(scale_at), int(scaled), int(accumulate)]
        for source, target, count, source_dtype, target_dtype in parts:
            if count:
                ends = (call.buffer(source, count, source_dtype), call.buffer(target, count, target_dtype))
                words += [*ends, count, source_dtype, target_dtype]
        self._run("pack", call, words)

    def flat_adam(self, *arguments: Any) -> None:
        self._update("flat_adam", 9, *arguments)

    def flat_lion(self, *arguments: Any) -> None:
        self._update("flat_lion", 6, *arguments)

    def _update(
        self,
        op: str,
        floats: int,
        line: Sequence[tuple[int, ...]],
        ranges: Sequence[tuple[int, int, int, int, int]],
        groups: Sequence[Sequence[float]],
        *rest: Any,
    ) -> None:
        """`floats`: how many of a group's fields come first and are floats. `rest`: what is no table."""
        grad_scale, skip, dynamic, seed, _, _ = rest
        call = _DriverCall()
        words = [call.scalar(grad_scale), call.scalar(skip), call.scalar(dynamic), seed, len(groups)]
        for group in groups:
            words += [*map(_driver_bits, group[:floats]), *map(int, group[floats:])]
        start = 0
        for *addresses, count, master, moment, low, grad in line:
            for begin, end, group, stream, place in ranges:
                first, last = max(begin - start, 0), min(end - start, count)
                if first < last:
                    words += _driver_part(call, addresses, count, (master, moment, low, grad), first, last)
                    words += [last - first, master, moment, low, grad, group, stream, place + start + first - begin]
            start += count
        self._run(op, call, words)

    def _run(self, op: str, call: _DriverCall, words: Sequence[int]) -> None:
        pipe, answer = self._process.stdin, self._process.stdout
        assert pipe is not None and answer is not None
        pipe.write(struct.pack("<qq", _OPS.index(op), len(call.buffers)))
        for address, size in call.buffers:
            pipe.write(struct.pack("<qq", size, address % 64))
            pipe.write(ctypes.string_at(address, size))
        pipe.write(struct.pack(f"<{len(words) + 1}Q", len(words), *(word % 2**64 for word in words)))
        pipe.flush()
        head = answer.read(8)
        assert len(head) == 8, f"{op} ended the driver with {self._process.wait(60)}"
        (guarded,) = struct.unpack("<q", head)
        assert guarded, f"{op} wrote outside its buffers"
        for address, size in call.buffers:
            ctypes.memmove(address, answer.read(size), size)


def _driver_part(
    call: _DriverCall, addresses: Sequence[int], count: int, dtypes: tuple[int, int, int, int], first: int, last: int
) -> Iterable[int]:
    """The buffers of [first, last) of a tensor, as parts_of in csrc/bindings.cpp has them."""
    master, moment, low, grad = dtypes
    moments = len(addresses) - 4
    kinds = (master, *(moment,) * moments, low, _I16, grad)
    for i, (address, kind) in enumerate(zip(addresses, kinds, strict=True)):
        yield call.buffer(address and address + first * _SIZES[kind], last - first, kind)
        if 0 < i <= moments:
            blocks = address if moment == _U8 else 0
            yield call.buffer(blocks and blocks + count + first // 64, -(-last // 64) - first // 64, _U8)


def _driver_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
