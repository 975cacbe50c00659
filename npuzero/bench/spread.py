"""Medians of rounds and how sure they are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

# Standard error of the median of n values, by their MAD: 1.4826 MAD estimates the standard deviation of a normal
# distribution, and its median has sqrt(pi / 2) times the mean's error.
_ERROR_OF_MAD = 1.4826 * math.sqrt(math.pi / 2)


@dataclass(frozen=True)
class Summary:
    """Hold median, median absolute deviation, and the median's standard error as a share of it."""

    median: float
    mad: float
    error: float

    def as_dict(self) -> dict[str, float]:
        """Return a dict for JSON."""
        return asdict(self)


def median(values: Sequence[float]) -> float:
    """Return the middle value; of an even number the mean of the two in the middle."""
    return float(statistics.median(values))


def summarize(values: Sequence[float]) -> Summary:
    """Return the Summary of at least one value; one value alone says nothing of its error, which is infinite then."""
    middle = median(values)
    mad = median([abs(value - middle) for value in values])
    sure = len(values) > 1 and middle != 0
    return Summary(middle, mad, _ERROR_OF_MAD * mad / abs(middle) / math.sqrt(len(values)) if sure else math.inf)


def per_round(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio within each round: what survives a machine whose speed changes between rounds."""
    return [one / other for one, other in zip(above, below, strict=True)]
