"""Kinds of arguments that several commands take."""

from __future__ import annotations

import argparse


def number(text: str) -> int:
    """A positive whole number, also as ``7e9``."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1e18 or value != int(value):
        raise argparse.ArgumentTypeError(f"expected a positive whole number such as 64 or 7e9; got {text!r}")
    return int(value)
