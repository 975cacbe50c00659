"""Medians over rounds, and their standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

# Standard error of the median of n values, from their MAD: 1.4826 MAD estimates the standard deviation of a normal
# distribution, and its median has sqrt(pi / 2) times the mean's error.
_ERROR_OF_MAD = 1.4826 * math.sqrt(math.pi / 2)


@dataclass(frozen=True)
class Summary:
    """Hold the median, the median absolute deviation, and the median's relative standard error."""

    median: float
    mad: float
    error: float

    def as_dict(self) -> dict[str, float]:
        """Return a dict for JSON."""
        return asdict(self)


def median(values: Sequence[float]) -> float:
    """Return the middle value; of an even number of values the mean of the middle two."""
    return float(statistics.median(values))


def summarize(values: Sequence[float]) -> Summary:
    """Return the Summary of one or more values. The error of a single value is infinite."""
    middle = median(values)
    mad = median([abs(value - middle) for value in values])
    sure = len(values) > 1 and middle != 0
    return Summary(middle, mad, _ERROR_OF_MAD * mad / abs(middle) / math.sqrt(len(values)) if sure else math.inf)


def per_round(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio within each round, which is robust to speed changes between rounds."""
    return [one / other for one, other in zip(above, below, strict=True)]
