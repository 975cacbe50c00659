"""What every update is tested on: buffers stored in each way, the kernel against its reference, cuts and threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from npuzero import _native
from npuzero.ops import storage
from ops import grid

F32, BF16, F16 = grid.FLOATS

# How p is stored, by its dtype and whether there is a remainder; how moments are.
MASTERS = {"fp32": F32, "split": BF16, "none": BF16}
MOMENTS = {"fp32": F32, "bf16": BF16, "int8": torch.uint8}
STORED = [(masters, moments) for masters in MASTERS for moments in MOMENTS if (masters, moments) != ("fp32", "fp32")]

Buffers = dict[str, grid.GuardedBuffer]


@dataclass(frozen=True)
class UpdateOp:
    """An op, its moments and whether they have a sign, and segments of each kind."""

    op: Callable[..., None]
    signed: dict[str, bool]
    kinds: Sequence[Any]

    def segments(self, n: int) -> list[Any]:
        """All kinds over [0, n), with a gap before, between and after."""
        bounds = torch.linspace(0, n, len(self.kinds) + 1).int().tolist()
        return [
            replace(kind, begin=min(begin + 1, end), end=max(end - 1, min(begin + 1, end)))
            for kind, begin, end in zip(self.kinds, bounds[:-1], bounds[1:], strict=True)
        ]

    def state(self, n: int, low: torch.dtype | None, offset: int = 0) -> Buffers:
        """Buffers by the op's names."""
        content = {name: grid.grid_values(n) for name in ("master", *self.signed)}
        for name, signed in self.signed.items():
            if not signed:  # the larger of 0.0 and -0.0 is whichever comes first
                content[name].abs_()
        if low is not None:
            content["low"] = torch.zeros(n, dtype=low)
        return {name: grid.GuardedBuffer.around(value, offset) for name, value in content.items()}

    def stored(self, n: int, masters: str, moments: str, offset: int = 0, special: bool = True) -> Buffers:
        """`state`, without low, stored like that."""
        named = {}
        for name, item in self.state(n, None, offset).items():
            value = item.inner if special else item.inner.nan_to_num(0.0, 1.0, -1.0)
            if name == "master":
                upper, rest = storage.split_halves(value)
                named[name] = value if masters == "fp32" else upper
                if masters == "split":
                    named["remainder"] = rest
            else:
                named[name] = torch.zeros(storage.stored_numel(n, MOMENTS[moments]), dtype=MOMENTS[moments])
                storage.encode_moment(value, named[name], signed=self.signed[name])
        return {name: grid.GuardedBuffer.around(value, offset) for name, value in named.items()}

    def wide(self, buffers: Buffers, n: int) -> dict[str, torch.Tensor]:
        """Masters and moments in float32."""
        found = {name: item.inner for name, item in buffers.items()}
        rest, master = found.pop("remainder", None), found.pop("master")
        values = {name: storage.decode_moment(found[name], n, signed=signed) for name, signed in self.signed.items()}
        return {**values, "master": master.float() if rest is None else storage.join_halves(master, rest)}

    def __call__(self, buffers: Buffers, grad: torch.Tensor, parts: list[Any], **options: Any) -> None:
        self.op(grad=grad, segments=parts, **{name: item.inner for name, item in buffers.items()}, **options)

    def assert_grid(self, dtype: torch.dtype, low: torch.dtype | None) -> None:
        """The kernel gives the reference's bits on the grid."""
        for n, offset in grid.grid_shapes():
            grad = grid.GuardedBuffer.around(grid.grid_values(n, dtype), offset).inner
            options = {"grad_scale": torch.tensor([0.3]) if offset else None}
            torch.manual_seed(n)
            actual = self.state(n, low, offset)
            torch.manual_seed(n)
            expected = self.state(n, low, offset)
            whole = [replace(self.kinds[n % len(self.kinds)], begin=0, end=n)]
            parts = self.segments(n) if n >= 64 else whole
            self(actual, grad, parts, **options)
            grid.with_reference(lambda e=expected, g=grad, p=parts, kw=options: self(e, g, p, **kw))
            for name in actual:
                grid.assert_same(actual[name].inner, expected[name].inner, f"{name} {n}+{offset}")
                actual[name].assert_guards()

    def assert_stored(self, masters: str, moments: str) -> None:
        """So it does where masters and moments are stored in fewer bits."""
        for i, (n, offset) in enumerate(grid.grid_shapes()):
            grad = grid.GuardedBuffer.around(grid.grid_values(n, grid.FLOATS[i % 3]), offset).inner
            kind = self.kinds[i % len(self.kinds)]
            parts = [replace(kind, begin=0, end=n, stream=2**31 - 1, place=2**40 - 3)]
            if n >= 64 * len(self.kinds):
                parts = [
                    replace(k, begin=min(-(-k.begin // 64) * 64, k.end // 64 * 64), stream=j, step=k.step + i)
                    for j, k in enumerate(self.segments(n))
                ]
            both = []
            for backend in ("native", "reference"):
                _native.use_backend(backend)
                torch.manual_seed(n)
                both.append(self.stored(n, masters, moments, offset))
                self(both[-1], grad, parts, seed=2**64 - 3)
            for name, item in both[0].items():
                grid.assert_same(item.inner, both[1][name].inner, f"{name} {n}+{offset}")
                item.assert_guards()

    def assert_halves(self) -> None:
        """Masters in two halves have the bits of whole ones, over several steps."""
        n = 5003
        for special in (True, False):
            torch.manual_seed(7)
            whole = self.state(n, BF16)
            torch.manual_seed(7)
            halves = self.stored(n, "split", "fp32", special=special)
            if not special:
                for name in ("master", *self.signed):
                    whole[name].inner.nan_to_num_(0.0, 1.0, -1.0)
            for step in range(1, 8):
                grad = grid.grid_values(n, BF16, special=special)
                parts = [replace(k, step=step) for k in self.segments(n)]
                self(whole, grad, parts)
                self(halves, grad, parts)
            for name, value in self.wide(halves, n).items():
                grid.assert_same(value, whole[name].inner, name)
            covered = torch.cat([torch.arange(part.begin, part.end) for part in parts])
            grid.assert_same(halves["master"].inner[covered], whole["low"].inner[covered], "low")

    def assert_uncut(self, masters: str, moments: str, kind: Any) -> None:
        """Bits depend on neither cut nor threads."""
        n, results = 100_000, []
        grad = torch.randn(n)
        for threads, bounds in ((1, [0, n]), (3, [0, n]), (2, [0, 640, 64_000, 99_968, n])):
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            whole = self.stored(n, masters, moments, special=False)
            values = self.wide(whole, n)
            pieces = []
            for begin, end in itertools.pairwise(bounds):
                cut = slice(begin, end)
                piece = {name: item.inner[cut] for name, item in whole.items() if name in ("master", "remainder")}
                for name, signed in self.signed.items():
                    dtype = MOMENTS[moments]
                    piece[name] = torch.zeros(storage.stored_numel(end - begin, dtype), dtype=dtype)
                    storage.encode_moment(values[name][cut], piece[name], signed=signed)
                part = replace(kind, begin=0, end=end - begin, place=begin)
                self.op(grad=grad[cut], segments=[part], seed=9, **piece)
                guarded = {name: grid.GuardedBuffer.around(value, 0) for name, value in piece.items()}
                pieces.append(self.wide(guarded, end - begin))
            results.append({name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]})
        for other in results[1:]:
            for name, value in other.items():
                grid.assert_same(value, results[0][name], name)

    def assert_one_call_of_many_tensors_equals_one_call_of_each(self) -> None:
        sizes = [*grid.SMALL, 40_001]
        hypers = [replace(self.kinds[i % len(self.kinds)], begin=0, end=n) for i, n in enumerate(sizes)]
        lows, grads = (None, BF16, F16), grid.FLOATS
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [replace(hyper, begin=at, end=at + hyper.end) for hyper, at in zip(hypers, starts, strict=True)]
        results = []
        for together in (True, False):
            torch.manual_seed(0)
            buffers = [self.state(n, lows[i % 3], offset=i % 4) for i, n in enumerate(sizes)]
            grad = [grid.grid_values(n, grads[i // 3 % 3]) for i, n in enumerate(sizes)]
            scale = torch.tensor([0.3])
            if together:
                names = ("master", *self.signed, "low")
                lists = {name: [b[name].inner if name in b else None for b in buffers] for name in names}
                if "max_exp_avg_sq" in lists:
                    lists["max_exp_avg_sq"][0] = None  # of an empty tensor
                self.op(grad=grad, segments=parts, grad_scale=scale, **lists)
            else:
                for each, g, hyper in zip(buffers, grad, hypers, strict=True):
                    self(each, g, [hyper], grad_scale=scale)
            results.append(buffers)
        for i, (actual, expected) in enumerate(zip(*results, strict=True)):
            for name, item in actual.items():
                grid.assert_same(item.inner, expected[name].inner, f"{name}[{i}]")
                item.assert_guards()

    def assert_uncovered_untouched(self, kind: Any) -> None:
        """Uncovered elements are neither read nor written."""
        n = 3000
        buffers, grad = self.state(n, BF16), torch.full((n,), torch.nan)
        grad[100:200] = 1.0
        before = {name: item.inner.clone() for name, item in buffers.items()}
        self(buffers, grad, [replace(kind, begin=100, end=200)])
        outside = torch.ones(n, dtype=torch.bool)
        outside[100:200] = False
        for name, item in buffers.items():
            grid.assert_same(item.inner[outside], before[name][outside])
        assert (buffers["master"].inner[100:200] != before["master"][100:200]).any()

    def assert_skip(self, kind: Any, flag: float, skips: bool) -> None:
        """All is as it was, or nothing."""
        buffers = {
            name: grid.GuardedBuffer.around(item.inner.nan_to_num(0, 1, 1), 0)
            for name, item in self.state(2000, BF16).items()
        }
        before = {name: item.inner.clone() for name, item in buffers.items()}
        self(buffers, torch.ones(2000), [replace(kind, end=2000)], skip=torch.tensor([flag]))
        for name in ("master", "exp_avg", "low"):
            assert torch.equal(buffers[name].inner, before[name]) == skips
