"""Nodes on this machine: network namespaces connected by a wire of limited rate. Needs Linux and root.

Each node has one interface, WIRE, an end of a veth pair; a token bucket (tc-tbf) at each end limits its outgoing rate.
Ranks of one node reach each other by the node's own address, without a bucket.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from npuzero.errors import BenchmarkError

WIRE = "wire"
_NODES = 2
_NUMBERS = itertools.count()


class WiredNodes:
    """Two nodes, and the wire between them; created by :func:`lay_wire`.

    Args:
        each: ranks per node.

    Attributes:
        names: of the namespaces, by node.
        addresses: by node.
        variables: of the ranks' environment.
    """

    def __init__(self, each: int) -> None:
        self._each = each
        made = f"npuzero-{os.getpid()}-{next(_NUMBERS)}"
        self.names = [f"{made}-{node}" for node in range(_NODES)]
        self.addresses = [f"10.0.0.{1 + node}" for node in range(_NODES)]
        self.variables = {"MASTER_ADDR": self.addresses[0], "GLOO_SOCKET_IFNAME": WIRE}

    def lay(self) -> None:
        """Create the namespaces and the unlimited wire; raise BenchmarkError if that is not permitted."""
        for name in self.names:
            _run_ip("ip", "netns", "add", name)
        here, there = self.names
        _run_ip("ip", "-n", here, "link", "add", WIRE, "type", "veth", "peer", "name", WIRE, "netns", there)
        for name, address in zip(self.names, self.addresses, strict=True):
            _run_ip("ip", "-n", name, "address", "add", f"{address}/24", "dev", WIRE)
            for interface in ("lo", WIRE):
                _run_ip("ip", "-n", name, "link", "set", interface, "up")
            _run_ip("ip", "netns", "exec", name, "true")  # it remounts /sys, which some containers refuse

    def remove(self) -> None:
        """Remove what exists of them; the wire is removed with its ends."""
        for name in self.names:
            with suppress(BenchmarkError):
                _run_ip("ip", "netns", "delete", name)

    def limit(self, gbit_per_s: float | None) -> None:
        """Set the wire's rate in each direction from now on; None: unlimited."""
        for name in self.names:
            with suppress(BenchmarkError):  # there may be none
                _run_ip("tc", "-n", name, "qdisc", "delete", "dev", WIRE, "root")
            if gbit_per_s is not None:
                bits = round(gbit_per_s * 1e9)
                burst = max(2**17, bits // 8000)  # a millisecond's bytes, and at least one packet of offloaded segments
                bucket = ("rate", f"{bits}bit", "burst", f"{burst}b", "latency", "50ms")
                _run_ip("tc", "-n", name, "qdisc", "add", "dev", WIRE, "root", "tbf", *bucket)

    def carried(self) -> float:
        """Return the bytes sent by the node that has sent most, headers included."""
        told = [json.loads(_run_ip("ip", "-n", name, "-s", "-j", "link", "show", WIRE)) for name in self.names]
        return float(max(interface["stats64"]["tx"]["bytes"] for (interface,) in told))

    def command(self, command: Sequence[str]) -> list[str]:
        """Return ``command`` for the node of its rank, given by the environment."""
        prefix = self.names[0].removesuffix("0")
        return ["sh", "-c", f'exec ip netns exec {prefix}$((RANK / {self._each})) "$@"', "sh", *command]


@contextmanager
def lay_wire(each: int) -> Iterator[WiredNodes]:
    """Create a wire for the block between nodes of ``each`` ranks.

    Raises:
        BenchmarkError: this machine does not permit it; the error contains the reason.
    """
    wire = WiredNodes(each)
    try:
        wire.lay()
        yield wire
    finally:
        wire.remove()


def _run_ip(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise BenchmarkError(
            "network namespaces",
            expected=f"a machine on which {' '.join(command[:3])} is allowed: Linux, root, iproute2",
            got=said,
            do="Run it as root where namespaces can be made, or take the links of --links shared.",
        ) from error
