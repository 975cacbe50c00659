"""Argument types shared by several commands."""

from __future__ import annotations

import argparse
import re
from decimal import Decimal

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)*)"
_NUMBER = rf"((?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]{{1,2}})?)"
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BYTES = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("", 1024), ("i", 1024), ("ib", 1024), ("b", 1000))
}


def parse_number(text: str) -> int:
    """Parse a positive integer: ``64``, ``7e9``, ``7_000_000_000``, ``7B``, ``1.5B``, ``350M``."""
    value = _parse_unit(text, _COUNTS)
    if value is None or not 1 <= value <= 10**18 or value != int(value):
        raise argparse.ArgumentTypeError(f"expected a positive whole number such as 64, 7e9, 7B or 350M; got {text!r}")
    return int(value)


def parse_memory_size(text: str) -> int:
    """Parse bytes, at least 1 MiB: ``64GiB``, ``64g`` (the same), ``80GB`` (of 10^9), ``512MiB``, ``68719476736``."""
    value = _parse_unit(text, _BYTES)
    if value is None or not 2**20 <= value <= 10**18:
        raise argparse.ArgumentTypeError(f"expected a memory's size such as 64GiB, 80GB or 512MiB; got {text!r}")
    return int(value)


def parse_rate(text: str) -> float:
    """Parse a rate in GB/s (10^9 bytes) to bytes per second: ``6``, ``2.5``."""
    value = _parse_unit(text, {"": 10**9, "gb/s": 10**9, "mb/s": 10**6})
    if value is None or not 10**6 <= value <= 10**15:
        raise argparse.ArgumentTypeError(f"expected a rate in GB/s such as 6 or 2.5; got {text!r}")
    return float(value)


def parse_named_number(text: str) -> tuple[str, int]:
    """Parse a name and a positive integer: ``lm_head=8``."""
    name, _, value = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"expected a name and a number such as lm_head=8; got {text!r}")
    return name, parse_number(value)


def _parse_unit(text: str, units: dict[str, int]) -> Decimal | None:
    """Return a number times its unit, case-insensitive; None if it does not parse."""
    found = re.fullmatch(rf"\s*{_NUMBER}\s*([a-z/]*)\s*", text, re.IGNORECASE)
    if found is None or found[2].lower() not in units:
        return None
    return Decimal(re.sub("[_,]", "", found[1])) * units[found[2].lower()]
