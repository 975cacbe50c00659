"""Plain text tables and byte quantities."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Align columns to their widths: the first ``left`` columns to the left, remaining ones to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (
            text.ljust(width) if column < left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def choose_byte_unit(nbytes: int) -> tuple[str, int]:
    """Return the largest unit with `nbytes` at least ten of it, and its bytes: one unit for a full picture."""
    power = 0
    while power + 1 < len(_UNITS) and nbytes >= 10 * 1024 ** (power + 1):
        power += 1
    return _UNITS[power], 1024**power


def format_bytes(nbytes: int) -> str:
    """Format `nbytes` in its own unit with up to four digits, such as ``13.04 GiB``; zero as a dash."""
    if nbytes == 0:
        return "-"
    power = min((nbytes.bit_length() - 1) // 10, len(_UNITS) - 1)
    if power == 0:
        return f"{nbytes} B"
    value = nbytes / 1024**power
    return f"{value:,.{2 if value < 100 else 1}f} {_UNITS[power]}"
