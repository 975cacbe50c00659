"""The grid that every op is tested on: sizes x start offsets x dtypes x values, with guards around each output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from npuzero import _native
from npuzero.errors import ContractError

VECTOR = 16  # f32 lanes of the widest instruction set, and norm's lanes
TILE = 1024  # flat_adam's
SMALL = (0, 1, VECTOR - 1, VECTOR, VECTOR + 1, TILE - 1, TILE + 1, 3 * TILE + 5)
LARGE = 1_000_003  # several threads, no multiple of anything
OFFSETS = (0, 1, 3)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
GUARD = 32
_PATTERN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def grid_shapes() -> Iterator[tuple[int, int]]:
    """(size, start offset); large is what starts at an aligned address, and at another."""
    yield from ((size, offset) for size in SMALL for offset in OFFSETS)
    yield from ((LARGE, offset) for offset in (OFFSETS[0], OFFSETS[-1]))


def bit_patterns(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers."""
    return tensor.view(_PATTERN[tensor.element_size()])


def special_values(dtype: torch.dtype) -> torch.Tensor:
    """Zeros, ones, denormals, largest and smallest finite, infinities, NaN."""
    info = torch.finfo(dtype)
    denormal = info.tiny * info.eps
    positive = torch.tensor([0.0, 1.0, denormal, 3 * denormal, info.tiny / 2, info.tiny, info.max, 1 + info.eps])
    return torch.cat([positive, -positive, torch.tensor([torch.inf, -torch.inf, torch.nan])]).to(dtype)


@functools.cache
def _value_pool(dtype: torch.dtype, special: bool) -> torch.Tensor:
    n = LARGE + 4 * TILE
    with torch.random.fork_rng(devices=[]):  # neither what a test draws nor the pool depends on who asks first
        torch.manual_seed(0)
        x = (torch.randn(n) * torch.exp2(torch.randint(-20, 12, (n,)).float())).to(dtype)
        if special:
            odd = special_values(dtype)
            x[::7] = odd[torch.randint(len(odd), (len(x[::7]),))]
    return x


def grid_values(n: int, dtype: torch.dtype = torch.float32, *, special: bool = True) -> torch.Tensor:
    """n values over many magnitudes; with `special`, every seventh one is one of `special_values`."""
    pool = _value_pool(dtype, special)
    start = int(torch.randint(len(pool) - n, ()))
    return pool[start : start + n].clone()


@dataclass
class GuardedBuffer:
    """A buffer inside a larger one, starting `offset` elements after an aligned address."""

    whole: torch.Tensor
    inner: torch.Tensor
    before: torch.Tensor

    @classmethod
    def around(cls, content: torch.Tensor, offset: int) -> GuardedBuffer:
        whole = torch.full((GUARD + offset + content.numel() + GUARD,), 7, dtype=content.dtype)
        inner = whole[GUARD + offset : GUARD + offset + content.numel()]
        inner.copy_(content)
        return cls(whole, inner, whole.clone())

    def assert_guards(self) -> None:
        """Nothing but `inner` changed."""
        mine = torch.ones_like(self.whole, dtype=torch.bool)
        start = self.inner.storage_offset()
        mine[start : start + self.inner.numel()] = False
        assert torch.equal(self.whole[mine], self.before[mine]), "an op wrote outside its output"


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Bit for bit, but that one NaN is as good as another."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    same = (bit_patterns(actual) == bit_patterns(expected)) | (actual.isnan() & expected.isnan())
    if not same.all():
        i = int((~same).nonzero()[0])
        count = int((~same).sum())
        pytest.fail(f"{what}: {count} of {same.numel()} differ, first [{i}]: {actual[i]!r}, expected {expected[i]!r}")


def with_reference(call: Callable[[], None]) -> None:
    """Runs `call` with every op forced to its reference."""
    _native.use_backend("reference")
    try:
        call()
    finally:
        _native.use_backend("native")


def assert_refused(call: Callable[[], None], subject: str) -> None:
    """`call` raises a ContractError about `subject` that says what was expected, what came, and what to do."""
    with pytest.raises(ContractError) as caught:
        call()
    error = caught.value
    assert error.subject == subject
    assert error.expected and error.got and error.do
    assert error.expected != error.got
