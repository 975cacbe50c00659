"""``npuzero plan``: offloading to the host and NVMe: options, rows, transfers and their time."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from npuzero.cli.arguments import parse_rate
from npuzero.cli.output.table import format_bytes
from npuzero.errors import ConfigError
from npuzero.plan import FROM_DISK, LINKS, OFFLOADS, TO_DEVICE, TO_DISK, TO_HOST, Memory, Plan, Report

#: Links by rate option: --disk covers both directions together, --link each direction separately.
DISK, LINK = (TO_DISK, FROM_DISK), (TO_HOST, TO_DEVICE)
# By option, what it requires in addition to --offload or --states.
_FURTHER = {"disk": " nvme", "lag": " with --gradients"}

_ON_DISK = [name for name, parts in OFFLOADS.items() if Memory.NVME in parts.values()]


def add_tier_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of placement and transfer rates for states and gradients."""
    where = parser.add_argument_group("off the device (rows named zero3+nvme and so on come on top)")
    where.add_argument("--offload", choices=tuple(OFFLOADS), help="states there, gradients on the host: zero(offload=)")
    where.add_argument("--states", choices=("host", "nvme"), help="states there")
    where.add_argument("--gradients", choices=("host",), help="gradients, too, where they are sharded as states are")
    where.add_argument("--lag", type=int, choices=(0, 1), default=0, help="1: updates a step late (0)")
    where.add_argument("--link", type=parse_rate, metavar="GB/S", help="of a rank between device and host, each way")
    where.add_argument("--disk", type=parse_rate, metavar="GB/S", help="of a rank on NVMe, both ways together")


def offload_plan(plan: Plan, options: argparse.Namespace) -> Plan | None:
    """Return ``plan`` offloaded as the options require; None without offloading.

    Also None if the options offload parameters that the plan shards less than states.

    Raises:
        ConfigError: the options contradict each other.
    """
    if options.offload and (options.states or options.gradients):
        raise ConfigError(
            "--offload", expected="neither --states nor --gradients beside it", got="both", do="Give one of them."
        )
    offload = options.offload or options.states
    # --offload places gradients on the host as well; --states leaves them on the device unless --gradients is given.
    homed = options.offload or options.gradients
    for option, needed in (("gradients", offload), ("lag", homed), ("link", offload), ("disk", offload in _ON_DISK)):
        if getattr(options, option) and not needed:
            raise ConfigError(
                f"--{option}",
                expected=f"--offload or --states{_FURTHER.get(option, '')} beside it",
                got="none",
                do="Say where states rest, or leave it out.",
            )
    if offload is None or ("parameters" in OFFLOADS[offload] and plan.parameters.axes != plan.states.axes):
        return None
    placed = plan.offloaded(offload)
    placed = placed if homed else replace(placed, gradients=plan.gradients)
    if not options.lag:
        return placed
    return replace(placed, lag=1, name=f"{placed.name}, lag 1") if placed.gradients.far else None


def offloaded_columns(rows: Mapping[str, Report]) -> dict[str, dict[str, str]]:
    """Return columns of bytes on the host and on NVMe, where any are used."""
    columns = {memory.value: {n: r.memory[memory.value] for n, r in rows.items()} for memory in Memory}
    del columns[Memory.DEVICE.value]
    return {
        memory: {n: format_bytes(b) for n, b in column.items()}
        for memory, column in columns.items()
        if any(column.values())
    }


def bytes_moved_by_link(rows: Mapping[str, Report]) -> dict[str, dict[str, int]]:
    """Return bytes by link, for links and rows with any traffic."""
    used = [link for link in LINKS if any(report.bytes_moved[link] for report in rows.values())]
    return {n: {link: r.bytes_moved[link] for link in used} for n, r in rows.items() if any(r.bytes_moved.values())}


def transfer_seconds(report: Report, options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds per step that links and disk are busy, for the given rates."""
    found = {}
    if options.link:
        found["link"] = max(report.bytes_moved[link] for link in LINK) / options.link
    if options.disk:
        found["disk"] = sum(report.bytes_moved[link] for link in DISK) / options.disk
    return found
