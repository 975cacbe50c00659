"""The tensor shapes of a GPT, for benchmarks of ops on many tensors."""

from __future__ import annotations

import math

from npuzero.errors import ConfigError

_VOCABULARY, _POSITIONS, _BLOCKS = 256, 1024, 33
_STEP = 8  # widths are multiples of it


def gpt_shapes(elements: int) -> list[tuple[int, ...]]:
    """Return the shapes of the 400 tensors of a 33-block GPT-2, biases included, with at most ``elements`` in total.

    The width is the largest multiple of eight that fits.

    Raises:
        ConfigError: too few elements for the smallest width.
    """
    width = _STEP
    if _count_elements(_gpt_shapes_of_width(width)) > elements:
        least = _count_elements(_gpt_shapes_of_width(width))
        expected = f"at least {least:,}, for 400 tensors of a GPT"
        raise ConfigError("benchmark: elements", expected=expected, got=f"{elements:,}", do="Ask for more.")
    while _count_elements(_gpt_shapes_of_width(width + _STEP)) <= elements:
        width += _STEP
    return _gpt_shapes_of_width(width)


def _gpt_shapes_of_width(width: int) -> list[tuple[int, ...]]:
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    attention: list[tuple[int, ...]] = [(3 * width, width), (3 * width,), (width, width), (width,)]
    feed_forward: list[tuple[int, ...]] = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    block = norm + attention + norm + feed_forward
    return [(_VOCABULARY, width), (_POSITIONS, width), *block * _BLOCKS, *norm]


def _count_elements(shapes: list[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))
