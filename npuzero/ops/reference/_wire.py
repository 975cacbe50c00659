"""Sizes of the messages that quantize writes."""

from __future__ import annotations

_LINE = 512  # csrc/core/wire.h
BLOCK = {8: 256, 4: 128}


def reference_message_bytes(numel: int, bits: int) -> int:
    """Return the bytes of a message."""
    return -(-(numel * bits // 8 + numel // BLOCK[bits] * 2) // _LINE) * _LINE
