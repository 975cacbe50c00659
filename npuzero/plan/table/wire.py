"""Arithmetic of quantized communication: message sizes of 8-bit and 4-bit values, and the axes that use them.

Parameters may be quantized for the all-gather before a unit computes (qwZ), gradients for their reduction (qgZ). Both
are ZeRO++'s (Wang et al., 2023, arXiv:2306.10209). The engine, its communicators' byte counts and the prediction all
use this module. The message format and the rounding are in csrc/core/wire.h and csrc/ops/quantize.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

from npuzero.errors import ConfigError, did_you_mean
from npuzero.plan.table.placement import DATA, Axes

#: Bits per element, by the wire's name in a :class:`~npuzero.plan.Precision`.
THIN = {"int8": 8, "int4": 4}
#: Elements that share a scale, by bits. Parameters start on a block and shards are full blocks: so quantized values
#: depend neither on which parameters share a flat parameter nor on the number of shards.
BLOCKS = {8: 256, 4: 128}
#: Messages start on multiples of this many bytes.
MESSAGE_LINE = 512
_SCALE_BYTES = 2

#: Wire format along an axis: a dtype, or a name of :data:`THIN`.
Wire = torch.dtype | str
#: One wire format for all axes, or one per axis.
Wires = Wire | Mapping[str, Wire] | tuple[tuple[str, Wire], ...] | None


def thin_message_bytes(numel: int, bits: int) -> int:
    """Return the bytes of a message of ``numel`` elements, a number of full blocks: codes, scales and padding.

    Example: 1024 elements of 4 bits are 512 bytes of codes and 8 scales of 2, in 1024 bytes.
    """
    used = numel * bits // 8 + numel // BLOCKS[bits] * _SCALE_BYTES
    return -(-used // MESSAGE_LINE) * MESSAGE_LINE


class WireLevel(NamedTuple):
    """Describe one collective of a hierarchical sum.

    Attributes:
        axes: axes of its group.
        bits: bits per element if quantized; None: sent in the communication dtype.
        feedback: whether the rounding error is added in the next reduction.
    """

    axes: Axes
    bits: int | None = None
    feedback: bool = False


class AxisWireLevels(Protocol):
    """Return the wire level of gradients for each axis; implemented by :class:`~npuzero.plan.Precision`."""

    def level_of(self, axis: str) -> WireLevel: ...


def levels_of(precision: AxisWireLevels, axes: Axes, size: Callable[[Axes], int]) -> tuple[WireLevel, ...]:
    """Return the levels of a reduce-scatter over ``axes``, in order; none if the group is one rank.

    Each quantized axis is a level, and adjacent plain axes are merged. If all axes are plain, one collective runs over
    ``axes``.

    Args:
        size: function that returns the number of ranks of some axes.
    """
    if size(axes) == 1:
        return ()
    alone = [precision.level_of(axis) for axis in axes if size((axis,)) > 1]
    return tuple(_merge_plain_levels(alone)) if any(level.bits for level in alone) else (WireLevel(axes),)


def levels_beyond(precision: AxisWireLevels, axes: Axes, size: Callable[[Axes], int]) -> tuple[WireLevel, ...]:
    """Return the levels of an all-reduce over ``axes``: a reduce-scatter over each level, then all-gathers.

    If a level is quantized, the innermost comes first, so that the fewest bytes cross the outer axes.
    """
    levels = levels_of(precision, axes, size)
    return levels_of(precision, axes[::-1], size) if any(level.bits for level in levels) else levels


def residual_numels(numel: int, levels: Iterable[WireLevel], size: Callable[[Axes], int]) -> Iterator[int]:
    """Yield the elements of rounding error that each level stores; the first level sends ``numel`` elements."""
    for level in levels:
        yield numel if level.feedback else 0
        numel //= size(level.axes)


def _merge_plain_levels(levels: Iterable[WireLevel]) -> list[WireLevel]:
    joined: list[WireLevel] = []
    for level in levels:
        if joined and joined[-1].bits is None is level.bits:
            joined[-1] = WireLevel(joined[-1].axes + level.axes)
        else:
            joined.append(level)
    return joined


def sort_wires_by_axis(wires: Mapping[str, Wire] | tuple[tuple[str, Wire], ...]) -> tuple[tuple[str, Wire], ...]:
    """Return wires by axis as pairs in mesh order, so that equal precisions compare equal."""
    try:
        said: dict[str, Wire | None] = dict(wires)
    except (TypeError, ValueError):
        said = {repr(wires): None}  # fails the check below: not an axis
    for axis in said:
        if axis not in DATA:
            raise ConfigError(
                "precision.wires",
                expected=f"wires by axes among {', '.join(DATA)}",
                got=repr(axis),
                do=did_you_mean(axis, DATA, "Write e.g. {'node': 'int4', 'local': torch.bfloat16}."),
            )
    return tuple((axis, wire) for axis in DATA if (wire := said.get(axis)) is not None)


def iter_named_wires(wires: Wires) -> Iterable[tuple[str, Wire | None]]:
    """Return pairs of a display name and a wire."""
    if isinstance(wires, tuple):
        return [(f"wires[{axis!r}]", wire) for axis, wire in wires]
    assert not isinstance(wires, Mapping)
    return [("wires", wires)]


def check_plain_wires(wires: Wires) -> None:
    """Raise ConfigError if wires that are not quantized have several dtypes."""
    plain = {wire for _, wire in iter_named_wires(wires) if isinstance(wire, torch.dtype)}
    if len(plain) > 1:
        raise ConfigError(
            "precision.wires",
            expected="one dtype along all axes that are not thin, in which gradients are packed",
            got=", ".join(sorted(map(str, plain))),
            do="Name one of them.",
        )
