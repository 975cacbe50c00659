"""The npu kernels, compiled for this machine against the emulator, as functions like those of `npuzero._C`.

Every call runs under every schedule, from the same content of its buffers, and all results must have the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import struct
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npuzero import _C
from npuzero.errors import KernelUnavailable

ROOT = Path(__file__).resolve().parent.parent.parent
KERNELS = tuple(sorted((ROOT / "csrc" / "npu").glob("*.cpp")))
MACHINE = tuple(sorted((ROOT / "tests" / "npu" / "emulator").rglob("*.cpp")))
BUILD = ROOT / "build" / "emulator"
SCHEDULES = ("in order", "stores late", "loads early", "loads late", "random")  # emulator/run.h
CORES = 3
OPS = ("cast", "dequantize_sum", "flat_adam", "flat_lion", "norm", "pack", "quantize")
_SIZES = (4, 2, 2, 8, 4, 8, 1, 2)  # bytes, csrc/core/view.h
_F32, _U8, _I16 = 0, 6, 7
# Without unique symbols, of which a process takes one: constants of a mutant would be those of every library after it.
_FLAGS = ("-std=c++17", "-fPIC", "-fno-gnu-unique", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno")


class EmulatorFault(AssertionError):
    """What the emulator found; `check` is which of its checks did."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.check = text.partition(":")[0]


def build_emulated_kernels(op: str = "", changes: Mapping[Path, str] | None = None) -> Path:
    """A library of all kernels, or of one op's alone with other texts for some files of csrc/npu."""
    changes = changes or {}
    sources = [path for path in KERNELS if not op or path.stem in (op, "launch")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile_kernel(source, changes), (*sources, *MACHINE)))
    digest = hashlib.sha256("".join(path.name for path in objects).encode()).hexdigest()[:16]
    library = BUILD / f"lib{digest}.so"
    if not library.exists():
        _run_compiler(["g++", "-shared", *map(str, objects), "-o", str(library)], library)
    return library


def _compile_kernel(source: Path, changes: Mapping[Path, str]) -> Path:
    """An object file; of changed texts where the source is one of them, or includes one."""
    included = _included_files(source)
    changes = {path: text for path, text in changes.items() if path in included}
    texts = [changes.get(path) or path.read_text() for path in sorted(included)]
    digest = hashlib.sha256("\0".join((*_FLAGS, *texts)).encode()).hexdigest()[:16]
    target = BUILD / f"{source.stem}-{digest}.o"
    if target.exists():
        return target
    # Changed files lie in a folder of their own that is looked at first; an include of "npu/..." finds them there.
    place, includes = source, [ROOT / "csrc", ROOT / "tests" / "npu" / "emulator"]
    other = BUILD / f"changed-{digest}"
    (other / "npu").mkdir(parents=True, exist_ok=True)
    for path, text in changes.items():
        (other / "npu" / path.name).write_text(text)
    if source in changes:
        place = other / "npu" / source.name
    # The arithmetic is the machine's; of the rest, compiling takes longer than running.
    optimize = "-O3" if source.parent.name == "machine" else "-O0"
    folders = [f"-I{path}" for path in (other, *includes)]
    _run_compiler(["g++", *_FLAGS, optimize, *folders, "-c", str(place), "-o", str(target)], target)
    return target


def _included_files(source: Path) -> set[Path]:
    """The source and all of this project's files that it includes."""
    found, new = set(), {source}
    while new:
        path = new.pop()
        found.add(path)
        for name in re.findall(r'#include "([^"]+)"', path.read_text()):
            places = (ROOT / "csrc" / name, ROOT / "tests" / "npu" / "emulator" / name)
            new |= {place for place in places if place.exists()} - found
    return found


def _run_compiler(command: Sequence[str], target: Path) -> None:
    partial = target.with_suffix(f".{os.getpid()}")
    done = subprocess.run(
        [str(partial) if part == str(target) else part for part in command], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    partial.replace(target)


class _EmulatorCall:
    """The buffers of one call: by address, their bytes, and whether a kernel may write them."""

    def __init__(self) -> None:
        self.buffers: dict[int, tuple[int, bool]] = {}

    def buffer(self, address: int, count: int, dtype: int, *, writes: bool = False) -> int:
        if address and count:
            size = max(count * _SIZES[dtype], self.buffers.get(address, (0, False))[0])
            self.buffers[address] = (size, writes or self.buffers.get(address, (0, False))[1])
        return address

    def view(self, view: Any, *, writes: bool = False) -> Any:
        words = (0, 0, _F32) if view is None else (view.data, view.count, view.dtype)
        self.buffer(*words, writes=writes)
        return (ctypes.c_int64 * 3)(*words)


@dataclass(frozen=True)
class KernelCounts:
    """What the kernels did since it was last asked: emulator/run.h."""

    loaded: int
    stored: int
    moves: int
    vector_instructions: int
    repeats: int
    slow_repeats: int
    conflicts: int
    steps: int
    scalar_accesses: int
    ub_bytes: int
    launches: int


class Emulator:
    """One library. `schedules` are those that every call runs under."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.emulator_sites.restype = ctypes.c_char_p
        self.schedules: Sequence[int] = range(len(SCHEDULES))
        self.cores = CORES
        self.seed = 0
        self.dropped = (0, "")
        self.sites: set[tuple[str, str]] = set()

    def functions(self) -> dict[str, Callable[..., None]]:
        """By the names that they have in `npuzero._native`."""
        return {op: getattr(self, op) for op in OPS}

    def counts(self) -> KernelCounts:
        found = (ctypes.c_int64 * len(KernelCounts.__dataclass_fields__))()
        self._library.emulator_counts(found)
        return KernelCounts(*found)

    @contextmanager
    def without(self, how: int, site: str) -> Iterator[None]:
        """One synchronization has no effect: at all (1), or on the order alone (2)."""
        self.dropped = (how, site)
        try:
            yield
        finally:
            self.dropped = (0, "")

    def cast(self, source: _C.View, target: _C.View, rounding: int, seed: int, offset: int, stream: int) -> None:
        call = _EmulatorCall()
        views = (call.view(source), call.view(target, writes=True))
        words = (ctypes.c_int(rounding), ctypes.c_uint64(seed), ctypes.c_uint64(offset))
        self._run("cast", call, *views, *words)

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
        call = _EmulatorCall()
        rows = list(parts)
        for source, target, count, source_dtype, target_dtype in rows:
            call.buffer(source, count, source_dtype)
            call.buffer(target, count, target_dtype, writes=True)
        scale = call.view(scale_at)[0]
        words = _int64_words(word for row in rows for word in row)
        options = (ctypes.c_float(factor), ctypes.c_void_p(scale or None), int(scaled), int(accumulate))
        self._run("pack", call, words, ctypes.c_int64(len(rows)), *options)

    def norm(self, x: _C.View, out: _C.View, workspace: _C.View, addend: Any, scale: float, stream: int) -> None:
        call = _EmulatorCall()
        views = (
            call.view(x, writes=addend is not None),
            call.view(out, writes=True),
            call.view(workspace, writes=True),
            call.view(addend),
        )
        self._run("norm", call, *views, ctypes.c_float(scale), unwritten={workspace.data})

    def quantize(self, source: _C.View, message: _C.View, residual: Any, pieces: int, bits: int, stream: int) -> None:
        call = _EmulatorCall()
        views = (call.view(source), call.view(message, writes=True), call.view(residual, writes=True))
        self._run("quantize", call, *views, ctypes.c_int64(pieces), bits)

    def dequantize_sum(
        self, messages: _C.View, out: _C.View, rows: int, pieces: int, bits: int, accumulate: bool, stream: int
    ) -> None:
        call = _EmulatorCall()
        views = (call.view(messages), call.view(out, writes=True))
        words = (ctypes.c_int64(rows), ctypes.c_int64(pieces))
        self._run("dequantize_sum", call, *views, *words, bits, int(accumulate))

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
        call = _EmulatorCall()
        rows: list[int] = []
        start = count_of_parts = 0
        for *addresses, count, master, moment, low, grad in line:
            for begin, end, group, stream_of, place in ranges:
                first, last = max(begin - start, 0), min(end - start, count)
                if first < last:
                    rows += _emulator_part(call, addresses, count, (master, moment, low, grad), first, last)
                    rows += [last - first, master, moment, low, grad, group, stream_of, place + start + first - begin]
                    count_of_parts += 1
            start += count
        words = [word for group in groups for word in (*map(_emulator_bits, group[:floats]), *map(int, group[floats:]))]
        scalars = [ctypes.c_void_p(call.view(view)[0] or None) for view in (grad_scale, skip, dynamic)]
        counts = (ctypes.c_int64(count_of_parts), ctypes.c_int64(len(groups)))
        arguments = (_int64_words(rows), counts[0], _int64_words(words), counts[1], *scalars, ctypes.c_uint64(seed))
        self._run(op, call, *arguments)

    def _run(self, op: str, call: _EmulatorCall, *arguments: Any, unwritten: Collection[int] = ()) -> None:
        function = getattr(self._library, f"run_{op}")
        function.restype = ctypes.c_char_p
        written = [(address, size) for address, (size, writes) in call.buffers.items() if writes]
        before = [ctypes.string_at(address, size) for address, size in written]
        results = None
        for schedule in self.schedules:
            for (address, size), content in zip(written, before, strict=True):
                ctypes.memmove(address, content, size)
            how, site = self.dropped
            self._library.emulator_configure(self.cores, schedule, ctypes.c_int64(self.seed), how, site.encode())
            for address, (size, writes) in call.buffers.items():
                self._library.emulator_extent(ctypes.c_int64(address), ctypes.c_int64(size), int(writes))
            error = function(*arguments)
            if error and error.startswith(b"KernelUnavailable"):
                raise KernelUnavailable(op, expected="a kernel", got=error.decode(), do="Skip the test.")
            if error:
                raise EmulatorFault(error.decode())
            for line in self._library.emulator_sites().decode().splitlines():
                place, name, _ = line.split()
                self.sites.add((place, name))
            after = [ctypes.string_at(address, size) for address, size in written if address not in unwritten]
            if results is not None and after != results:
                raise EmulatorFault(f"schedule: {op} gives other bits where pipes run {SCHEDULES[schedule]}")
            results = after


def _emulator_part(
    call: _EmulatorCall, addresses: Sequence[int], count: int, dtypes: tuple[int, int, int, int], first: int, last: int
) -> Iterator[int]:
    """The buffers of [first, last) of a tensor, as parts_of in csrc/bindings.cpp has them."""
    master, moment, low, grad = dtypes
    moments = len(addresses) - 4
    kinds = (master, *(moment,) * moments, low, _I16, grad)
    for i, (address, kind) in enumerate(zip(addresses, kinds, strict=True)):
        yield call.buffer(address and address + first * _SIZES[kind], last - first, kind, writes=i < len(kinds) - 1)
        if 0 < i <= moments:
            blocks = address if moment == _U8 else 0
            numel = -(-last // 64) - first // 64
            yield call.buffer(blocks and blocks + count + first // 64, numel, _U8, writes=True)


def _emulator_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _int64_words(values: Iterable[int]) -> Any:
    values = [value if value < 2**63 else value - 2**64 for value in values]
    return (ctypes.c_int64 * len(values))(*values)


@functools.cache
def default_emulator() -> Emulator:
    """Of the kernels as they are."""
    return Emulator(build_emulated_kernels())
