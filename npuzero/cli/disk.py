"""``npuzero check --nvme FOLDER``: measure disks for offloaded training state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from npuzero.bench.suites.disk import DiskSpeeds, disk_step_seconds, measure_disk_speeds
from npuzero.cli.output.table import format_table
from npuzero.config import Settings

_QUICK = {"seconds": 0.1, "nbytes": 1 << 27}
_FULL = {"seconds": 5.0, "nbytes": 4 << 30}
_DIRECT = "Bytes go past the page cache (O_DIRECT)."
_CACHED = (
    "Bytes go through the page cache: this file system has no O_DIRECT. These are the memory's figures as well as the "
    "disk's; take a folder on ext4 or XFS."
)


def check_disks(folders: Sequence[Path], parameters: int, quick: bool, say: Callable[[str], None]) -> str:
    """Measure the folders and return the results as text.

    Args:
        parameters: of the model; the time of a step is estimated for it.
        quick: a smoke run.
        say: receives progress messages.

    Raises:
        ConfigError: a folder does not exist, cannot be written, or is in memory.
        OutOfSpace: there is no room for the measurement.
        StorageError: a disk failed.
    """
    settings = Settings()
    effort = _QUICK if quick else _FULL
    found = measure_disk_speeds(folders, threads=settings.io_threads, verify=settings.verify, say=say, **effort)  # type: ignore[arg-type]
    return render_disk_speeds(found, parameters)


def render_disk_speeds(found: DiskSpeeds, parameters: int) -> str:
    """Return the measurements as text."""
    free = [[folder, f"{nbytes / 1e9:,.1f}"] for folder, nbytes in found.free.items()]
    mixed = found.gbs["read + write"]
    steps = [[name, f"{seconds:.2f}"] for name, seconds in disk_step_seconds(parameters, mixed).items()]
    parts = [
        format_table(["folder, on a disk", "GB free"], free),
        _DIRECT if found.direct else _CACHED,
        format_table(
            ["", "GB/s"], [[name, f"{gbs:.2f}"] for name, gbs in (found.gbs | {"CRC32C": found.crc_gbs}).items()]
        ),
        f"A step of a model of {parameters:,} parameters whose states all rest here takes these disks:",
        format_table(["precision", "seconds"], steps),
        "Over several machines, each takes its part of that. The same beside the table of a plan: "
        f"npuzero plan --disk {mixed:.2f}",
    ]
    return "\n\n".join(parts)
