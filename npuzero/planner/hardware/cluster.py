"""Clusters: rates of devices and of the links between them; each number with its source."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeGuard

from npuzero.config import check_keys, read_json
from npuzero.errors import ConfigError, did_you_mean

#: Levels of links: between devices of a node, between nodes, device to host memory, and a rank's disk.
LEVELS = ("local", "node", "host", "disk_read", "disk_write")
#: Folder of the clusters in the package, one file each.
_FOLDER = Path(__file__).with_name("clusters")
_MEASURE = "Measure it with `npuzero bench cluster`."
#: ``64xa100-80g/4``: total devices, the kind of device, devices per node.
_NAMED = re.compile(r"(?:(?P<ranks>\d+)x)?(?P<name>[^/]+?)(?:/(?P<local>\d+))?")


def _check_number(subject: str, value: object, least: float = 0.0, most: float = math.inf) -> None:
    """Raise ConfigError unless ``value`` is a finite number between ``least`` and ``most``."""
    if not _is_finite_number(value) or not least <= value <= most:
        bound = f"from {least:g} on" if most == math.inf else f"from {least:g} to {most:g}"
        raise ConfigError(subject, expected=f"a number {bound}", got=repr(value), do=_MEASURE)


def _check_rate(subject: str, value: object, most: float = math.inf) -> None:
    """Raise ConfigError unless ``value`` is a finite number above 0 and up to ``most``."""
    if not _is_finite_number(value) or not 0 < value <= most:
        bound = "above 0" if most == math.inf else f"above 0 and up to {most:g}"
        raise ConfigError(subject, expected=f"a number {bound}", got=repr(value), do=_MEASURE)


def _is_finite_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a finite number; a bool is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_whole_number(subject: str, value: object, least: int = 1) -> None:
    """Raise ConfigError unless ``value`` is an int of at least ``least``."""
    if type(value) is not int or value < least:
        raise ConfigError(
            subject, expected=f"a whole number from {least} on", got=repr(value), do="Count devices and bytes."
        )


@dataclass(frozen=True)
class LinkSpec:
    """Describe a link between two ranks, or between two memories of one rank.

    Attributes:
        bytes_per_s: sustained bandwidth of one rank in collectives, each way.
        latency_s: latency of one message.
        peers: number of peers that bytes_per_s is divided among, each with a separate wire, as in a full mesh without a
            switch: a group of n ranks then has (n - 1) / peers of it. 0: every group has all of it.

    Raises:
        ConfigError: a bandwidth that is not above 0, a latency below 0, or a number that is not finite.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    peers: int = 0

    def __post_init__(self) -> None:
        _check_rate("LinkSpec.bytes_per_s", self.bytes_per_s)
        _check_number("LinkSpec.latency_s", self.latency_s)
        _check_whole_number("LinkSpec.peers", self.peers, 0)

    def among(self, ranks: int) -> float:
        """Return the bytes per second that each rank of a group of ``ranks`` sends."""
        return self.bytes_per_s * min(1.0, (ranks - 1) / self.peers) if self.peers and ranks > 1 else self.bytes_per_s


@dataclass(frozen=True)
class DevicePace:
    """Describe measured rates of a device in one dtype, instead of those derived from its peak.

    Attributes:
        sustained: fraction of the peak that products of many tokens reach in training.
        ramp_tokens: constant cost of a pass in tokens: weights are read and packed, and their gradients written, for
            few tokens as for many.
        bytes_per_s: bytes per second, reads plus writes, of a model's element-wise work: on a CPU less than memory
            bandwidth, since it is partly compute-bound.

    Raises:
        ConfigError: a number out of its range.
    """

    sustained: float
    ramp_tokens: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check_rate("DevicePace.sustained", self.sustained, most=1.0)
        _check_number("DevicePace.ramp_tokens", self.ramp_tokens)
        _check_rate("DevicePace.bytes_per_s", self.bytes_per_s)


@dataclass(frozen=True)
class DeviceSpec:
    """Describe the device of a rank.

    Attributes:
        flops: peak FLOPs per second of matrix products, by dtype: ``"bf16"``, ``"fp16"``, ``"fp32"``.
        sustained: fraction of the peak that large products reach in training.
        memory_bytes: memory available to programs.
        memory_bytes_per_s: sustained memory bandwidth of element-wise work, reads plus writes.
        paces: measured rates, by dtype.

    Raises:
        ConfigError: a number that is not above 0 or not finite, or an unsupported dtype.
    """

    flops: Mapping[str, float]
    sustained: float
    memory_bytes: int
    memory_bytes_per_s: float
    paces: Mapping[str, DevicePace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_keys("DeviceSpec.flops", self.flops, ("bf16", "fp16", "fp32"))
        if not self.flops:
            raise ConfigError(
                "DeviceSpec.flops", expected="a peak by dtype", got="none", do="Give bf16 or fp32 at least."
            )
        for dtype, peak in self.flops.items():
            _check_rate(f"DeviceSpec.flops[{dtype!r}]", peak)
        _check_rate("DeviceSpec.sustained", self.sustained, most=1.0)
        _check_whole_number("DeviceSpec.memory_bytes", self.memory_bytes)
        _check_rate("DeviceSpec.memory_bytes_per_s", self.memory_bytes_per_s)
        check_keys("DeviceSpec.paces", self.paces, self.flops)

    def pace(self, dtype: str) -> DevicePace:
        """Return the rates of the device in ``dtype``: measured ones, else those derived from its peak."""
        return self.paces.get(dtype) or DevicePace(self.sustained, 0.0, self.memory_bytes_per_s)

    def flops_per_s(self, dtype: str) -> float:
        """Return the FLOPs per second that large products in ``dtype`` reach in training.

        Raises:
            ConfigError: the device's peak in this dtype is unknown.
        """
        check_keys("DeviceSpec.flops", (dtype,), self.flops)
        return self.flops[dtype] * self.pace(dtype).sustained


@dataclass(frozen=True)
class Cluster:
    """Describe nodes of equal devices.

    Attributes:
        name: name, such as ``910b-64g``.
        ranks: total number of devices.
        local: devices per node.
        links: by level: ``"local"`` within a node, ``"node"`` between nodes, ``"host"`` between a device and its host's
            memory, ``"disk_read"`` and ``"disk_write"`` of a rank.
        host_memory_bytes: host memory per rank.
        contention: slowdown of overlapping work: the fraction of the shorter duration by which both together take
            longer than the longer one alone.
        sources: source of each number, by its path such as ``"links.node.bytes_per_s"``.

    Raises:
        ConfigError: an incomplete node, a missing or unknown level, or a number out of its range.

    Example::

        from npuzero.planner import Cluster

        cluster = Cluster.named("64x910b-64g")  # eight nodes of eight
        cluster = cluster.with_link("node", bytes_per_s=40e9)
        print(cluster.nodes, cluster.device.memory_bytes, cluster.sources["links.node.latency_s"])
    """

    name: str
    device: DeviceSpec
    links: Mapping[str, LinkSpec]
    local: int
    ranks: int
    host_memory_bytes: int = 0
    contention: float = 0.2
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _check_whole_number("Cluster.local", self.local)
        _check_whole_number("Cluster.ranks", self.ranks)
        _check_whole_number("Cluster.host_memory_bytes", self.host_memory_bytes, 0)
        _check_number("Cluster.contention", self.contention, most=1.0)
        if self.ranks % self.local:
            raise ConfigError(
                f"Cluster {self.name}",
                expected=f"a multiple of the {self.local} devices of a node",
                got=f"{self.ranks} devices",
                do=f"Take {_format_multiples_near(self.ranks, self.local)}, or say how many a node has: "
                f"{self.ranks}x{self.name}/{math.gcd(self.ranks, self.local)}.",
                ranks=self.ranks,
                local=self.local,
            )
        check_keys(f"Cluster {self.name}: links", self.links, LEVELS)
        for level, needed in (("local", self.local > 1), ("node", self.nodes > 1)):
            if needed and level not in self.links:
                raise ConfigError(
                    f"Cluster {self.name}: links",
                    expected=f"{level!r}, which {self.ranks} devices in {self.nodes} nodes have",
                    got=", ".join(self.links) or "none",
                    do="Measure it with `npuzero bench cluster`, on as many nodes as you mean to plan for.",
                    level=level,
                )

    @property
    def nodes(self) -> int:
        return self.ranks // self.local

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names of the clusters in the package."""
        return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))

    @classmethod
    def named(cls, spec: str) -> Cluster:
        """Return a cluster by its name.

        Args:
            spec: ``[devices]x[name]/[devices per node]``: ``910b-64g`` is one node, ``64x910b-64g`` are eight,
                ``64x910b-64g/4`` sixteen of four; or the path of a JSON file that ends in ``.json``.

        Raises:
            ConfigError: an unknown name, with the nearest known one, or an incomplete node.
        """
        if spec.endswith(".json"):
            return cls.load(spec)
        match = _NAMED.fullmatch(spec)
        name, known = (match["name"] if match else spec), cls.names()
        if match is None or name not in known:
            # A name without its memory size ("a100") is a common slip: suggest the full name for it.
            spellings = {spelling: each for each in known for spelling in (each.partition("-")[0], each)}
            raise ConfigError(
                f"cluster {spec!r}",
                expected=f"one of {', '.join(known)}, as in 64xa100-80g or 64xa100-80g/4, or a .json file",
                got=repr(name),
                do=did_you_mean(name, spellings, "Measure yours with `npuzero bench cluster`."),
            )
        cluster = cls.load(_FOLDER / f"{name}.json")
        ranks, local = match["ranks"], match["local"]
        if ranks or local:
            cluster = cluster.with_ranks(int(ranks or local), int(local) if local else None)
        return cluster

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster from a JSON file in the format of `npuzero bench cluster`.

        Raises:
            ConfigError: no such file, not JSON, an unknown or missing key, or a number out of its range.
        """
        return _parse_cluster(os.fspath(path), read_json(path))

    def as_dict(self) -> dict[str, Any]:
        """Return the cluster in the format that :meth:`load` reads."""
        links = {
            level: {key: value for key, value in vars(link).items() if value} for level, link in self.links.items()
        }
        device = {**vars(self.device), "flops": dict(self.device.flops)}
        device["paces"] = {dtype: vars(pace) for dtype, pace in self.device.paces.items()}
        return {**vars(self), "device": device, "links": links, "sources": dict(self.sources)}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def with_ranks(self, ranks: int, local: int | None = None) -> Cluster:
        """Return a cluster of the same kind with ``ranks`` devices.

        Args:
            ranks: total number of devices.
            local: devices per node; None: as before, or all if there are fewer.

        Raises:
            ConfigError: an incomplete node.
        """
        _check_whole_number("Cluster.ranks", ranks)
        return replace(self, ranks=ranks, local=min(self.local, ranks) if local is None else local)

    def with_link(self, level: str, *, bytes_per_s: float | None = None, latency_s: float | None = None) -> Cluster:
        """Return the cluster with another bandwidth or latency, or both, of one of :data:`LEVELS`.

        Raises:
            ConfigError: an unknown level, or a number out of its range.
        """
        check_keys("Cluster.with_link(level=...)", (level,), LEVELS)
        given = {"bytes_per_s": bytes_per_s, "latency_s": latency_s}
        given = {key: value for key, value in given.items() if value is not None}
        before = self.links.get(level)
        link = replace(before, **given) if before else LinkSpec(**{"bytes_per_s": math.nan, **given})  # type: ignore[arg-type]
        sources = {**self.sources, **{f"links.{level}.{key}": "given by the caller" for key in given}}
        return replace(self, links={**self.links, level: link}, sources=sources)


def _format_multiples_near(ranks: int, local: int) -> str:
    """Return the multiples of ``local`` nearest to ``ranks``, as text."""
    below = ranks // local * local
    return f"{below} or {below + local}" if below else str(local)


def _parse_cluster(subject: str, data: Mapping[str, Any]) -> Cluster:
    """Make a cluster from the contents of its file."""
    _check_record(subject, data, fields(Cluster), optional=("ranks", "host_memory_bytes", "contention", "sources"))
    device, links = (
        _check_json_object(f"{subject}: device", data["device"]),
        _check_json_object(f"{subject}: links", data["links"]),
    )
    _check_record(f"{subject}: device", device, fields(DeviceSpec), ("paces",))
    check_keys(f"{subject}: links", links, LEVELS)
    for level, link in links.items():
        where = f"{subject}: links.{level}"
        _check_record(where, _check_json_object(where, link), fields(LinkSpec), ("latency_s", "peers"))
    flops = _check_json_object(f"{subject}: device.flops", device["flops"])
    paces = _check_json_object(f"{subject}: device.paces", device.get("paces", {}))
    for dtype, pace in paces.items():
        _check_record(
            f"{subject}: device.paces.{dtype}",
            _check_json_object(f"{subject}: device.paces.{dtype}", pace),
            fields(DevicePace),
        )
    return Cluster(
        **{
            "ranks": data["local"],
            **data,
            "device": DeviceSpec(
                **{**device, "flops": flops, "paces": {dtype: DevicePace(**pace) for dtype, pace in paces.items()}}
            ),
            "links": {level: LinkSpec(**link) for level, link in links.items()},
        }
    )


def _check_json_object(subject: str, value: object) -> Mapping[str, Any]:
    """Return a JSON object, or raise ConfigError."""
    if not isinstance(value, dict):
        raise ConfigError(subject, expected="a JSON object", got=repr(value), do="Put it between braces.")
    return value


def _check_record(subject: str, data: Mapping[str, Any], known: Iterable[Any], optional: Iterable[str] = ()) -> None:
    """Raise ConfigError for a key that is not a field's name, or a missing field."""
    names = [each.name for each in known]
    check_keys(subject, data, names)
    for name in names:
        if name not in data and name not in optional:
            raise ConfigError(
                subject,
                expected=f"the key {name!r}",
                got=", ".join(map(repr, data)) or "no key",
                do="Add it, or measure with `npuzero bench cluster`.",
                key=name,
            )
