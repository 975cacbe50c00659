"""Clusters: what devices reach, and what lies between them; each number with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    """Describe what carries bytes between two ranks, or two memories of one.

    Attributes:
        bytes_per_s: of one rank, each way, as its collectives sustain it.
        latency_s: of one message.
    """

    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Device:
    """Describe one device: a rank's.

    Attributes:
        flops: peak of matrix products a second, by dtype: ``"bf16"``, ``"fp16"``, ``"fp32"``.
        sustained: the part of the peak that large products reach in training.
        memory_bytes: that programs can have.
        memory_bytes_per_s: of its memory, read and written together, as element-wise work sustains it.
    """

    flops: Mapping[str, float]
    sustained: float
    memory_bytes: int
    memory_bytes_per_s: float


@dataclass(frozen=True)
class Cluster:
    """Describe nodes of equal devices.

    Attributes:
        name: such as ``910b-64g``.
        ranks: devices in all.
        local: devices of one node.
        links: by level: ``"local"`` within a node, ``"node"`` between nodes, ``"host"`` between a device and its host's
            memory, ``"disk_read"`` and ``"disk_write"`` of a rank.
        host_memory_bytes: of a rank's part of its host.
        contention: the part of the shorter of two things that run side by side by which they take longer than the
            longer one alone.
        sources: where each number is from, by its path such as ``"links.node.bytes_per_s"``.
    """

    name: str
    device: Device
    links: Mapping[str, Link]
    local: int
    ranks: int
    host_memory_bytes: int = 0
    contention: float = 0.2
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)
