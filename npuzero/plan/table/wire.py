"""The arithmetic of thin wires: what values take that travel in 8 or 4 bits, and over which axes they do.

Two things may travel so: parameters that are gathered before a unit computes (qwZ), and gradients that are reduced
(qgZ). Both are ZeRO++'s (Wang et al., 2023, arXiv:2306.10209); the engine, its communicators' counts and the prediction
all read this module. The format of a message, and how it is rounded, is in csrc/core/wire.h and csrc/ops/quantize.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

from npuzero.errors import ConfigError, did_you_mean
from npuzero.plan.table.placement import DATA, Axes

#: Bits of an element, by the name that a :class:`~npuzero.plan.Precision` has for the wire.
THIN = {"int8": 8, "int4": 4}
#: Elements that share a scale, by bits. Parameters start on a block and shards are whole blocks: so no code depends on
#: which parameters share a flat, nor on the number of shards.
BLOCKS = {8: 256, 4: 128}
#: Messages begin on multiples of this many bytes.
MESSAGE_LINE = 512
_SCALE_BYTES = 2

#: What travels along an axis: a dtype, or a name of :data:`THIN`.
Wire = torch.dtype | str
#: The same along all axes, or by axis.
Wires = Wire | Mapping[str, Wire] | tuple[tuple[str, Wire], ...] | None


def thin_message_bytes(numel: int, bits: int) -> int:
    """Return the bytes of ``numel`` elements, whole blocks of them, in a message: codes, scales, and what rounds it up.

    Example: 1024 elements of 4 bits are 512 bytes of codes and 8 scales of 2, in 1024 bytes.
    """
    used = numel * bits // 8 + numel // BLOCKS[bits] * _SCALE_BYTES
    return -(-used // MESSAGE_LINE) * MESSAGE_LINE


class WireLevel(NamedTuple):
    """Describe one collective of a sum that goes level by level.

    Attributes:
        axes: over whose ranks.
        bits: of an element on a thin wire; None: it travels in the communication dtype.
        feedback: whether what rounding loses is added the next time.
    """

    axes: Axes
    bits: int | None = None
    feedback: bool = False


class AxisWireLevels(Protocol):
    """Say of each axis how gradients travel along it, as a :class:`~npuzero.plan.Precision` does."""

    def level_of(self, axis: str) -> WireLevel: ...


def levels_of(precision: AxisWireLevels, axes: Axes, size: Callable[[Axes], int]) -> tuple[WireLevel, ...]:
    """Return the levels of a reduce_scatter over ``axes``, in their order; none where these are one rank.

    A thin axis is a level; plain axes in a row are one, and where all are plain that is the collective over ``axes``.

    Args:
        size: of axes, the number of ranks.
    """
    if size(axes) == 1:
        return ()
    alone = [precision.level_of(axis) for axis in axes if size((axis,)) > 1]
    return tuple(_merge_plain_levels(alone)) if any(level.bits for level in alone) else (WireLevel(axes),)


def levels_beyond(precision: AxisWireLevels, axes: Axes, size: Callable[[Axes], int]) -> tuple[WireLevel, ...]:
    """Return the levels of a sum of which every rank along ``axes`` keeps all: as for a reduce_scatter, after which
    each gathers what the others have summed; where one is thin, innermost first, so that the least goes far.
    """
    levels = levels_of(precision, axes, size)
    return levels_of(precision, axes[::-1], size) if any(level.bits for level in levels) else levels


def residual_numels(numel: int, levels: Iterable[WireLevel], size: Callable[[Axes], int]) -> Iterator[int]:
    """Yield for each level the elements whose rounding error it keeps, of ``numel`` that the first one sends."""
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
    """Return what is said by axis as pairs in the mesh's order, so that equal precisions compare equal."""
    try:
        said: dict[str, Wire | None] = dict(wires)
    except (TypeError, ValueError):
        said = {repr(wires): None}  # which is no axis
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
    """Return what is said of wires: the name under which it is, and the wire."""
    if isinstance(wires, tuple):
        return [(f"wires[{axis!r}]", wire) for axis, wire in wires]
    assert not isinstance(wires, Mapping)
    return [("wires", wires)]


def check_plain_wires(wires: Wires) -> None:
    """Raise ConfigError where wires that are not thin are of several dtypes."""
    plain = {wire for _, wire in iter_named_wires(wires) if isinstance(wire, torch.dtype)}
    if len(plain) > 1:
        raise ConfigError(
            "precision.wires",
            expected="one dtype along all axes that are not thin, in which gradients are packed",
            got=", ".join(sorted(map(str, plain))),
            do="Name one of them.",
        )
