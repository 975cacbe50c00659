"""Clusters: what devices reach, and what lies between them; each number with its source."""

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

#: Between what a link is: devices of a node, nodes, a device and its host's memory, a rank and its disk.
LEVELS = ("local", "node", "host", "disk_read", "disk_write")
#: Where the clusters are that come with the package, a file each.
_FOLDER = Path(__file__).with_name("clusters")
_MEASURE = "Measure it with `npuzero bench cluster`."
#: ``64xa100-80g/4``: devices in all, what they are, devices of a node.
_NAMED = re.compile(r"(?:(?P<ranks>\d+)x)?(?P<name>[^/]+?)(?:/(?P<local>\d+))?")


def _check_number(subject: str, value: object, least: float = 0.0, most: float = math.inf) -> None:
    """Raise ConfigError unless ``value`` is a finite number from ``least`` on and up to ``most``."""
    if not _is_finite_number(value) or not least <= value <= most:
        bound = f"from {least:g} on" if most == math.inf else f"from {least:g} to {most:g}"
        raise ConfigError(subject, expected=f"a number {bound}", got=repr(value), do=_MEASURE)


def _check_rate(subject: str, value: object, most: float = math.inf) -> None:
    """Raise ConfigError unless ``value`` is a finite number above 0 and up to ``most``."""
    if not _is_finite_number(value) or not 0 < value <= most:
        bound = "above 0" if most == math.inf else f"above 0 and up to {most:g}"
        raise ConfigError(subject, expected=f"a number {bound}", got=repr(value), do=_MEASURE)


def _is_finite_number(value: object) -> TypeGuard[float]:
    """Return whether it is a finite number; True is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_whole_number(subject: str, value: object, least: int = 1) -> None:
    """Raise ConfigError unless ``value`` is an int from ``least`` on."""
    if type(value) is not int or value < least:
        raise ConfigError(
            subject, expected=f"a whole number from {least} on", got=repr(value), do="Count devices and bytes."
        )


@dataclass(frozen=True)
class LinkSpec:
    """Describe what carries bytes between two ranks, or two memories of one.

    Attributes:
        bytes_per_s: of one rank, each way, as its collectives sustain it.
        latency_s: of one message.
        peers: among how many others a rank's bytes_per_s are divided, each with a wire of its own, as in a full mesh
            without a switch: a group of n ranks then has (n - 1) / peers of it. 0: any group has all of it.

    Raises:
        ConfigError: a bandwidth that is not above 0, a latency below 0, neither finite.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    peers: int = 0

    def __post_init__(self) -> None:
        _check_rate("Link.bytes_per_s", self.bytes_per_s)
        _check_number("Link.latency_s", self.latency_s)
        _check_whole_number("Link.peers", self.peers, 0)

    def among(self, ranks: int) -> float:
        """Return the bytes a second that one of a group of so many ranks sends."""
        return self.bytes_per_s * min(1.0, (ranks - 1) / self.peers) if self.peers and ranks > 1 else self.bytes_per_s


@dataclass(frozen=True)
class DevicePace:
    """Describe how a device trains in one dtype, where that was measured rather than taken from its peak.

    Attributes:
        sustained: the part of the peak that products of many tokens reach in training.
        ramp_tokens: so many tokens more a pass takes, whatever its own number: weights are read and packed, and their
            gradients written, for few tokens as for many.
        bytes_per_s: read and written together, of the element-wise work of models: on a CPU less than its memory
            sustains, since values are also computed.

    Raises:
        ConfigError: a number out of its range.
    """

    sustained: float
    ramp_tokens: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check_rate("Pace.sustained", self.sustained, most=1.0)
        _check_number("Pace.ramp_tokens", self.ramp_tokens)
        _check_rate("Pace.bytes_per_s", self.bytes_per_s)


@dataclass(frozen=True)
class DeviceSpec:
    """Describe one device: a rank's.

    Attributes:
        flops: peak of matrix products a second, by dtype: ``"bf16"``, ``"fp16"``, ``"fp32"``.
        sustained: the part of the peak that large products reach in training.
        memory_bytes: that programs can have.
        memory_bytes_per_s: of its memory, read and written together, as element-wise work sustains it.
        paces: by dtype, how it trains, where that was measured.

    Raises:
        ConfigError: a number that is not above 0 or not finite, or a dtype that nothing computes in.
    """

    flops: Mapping[str, float]
    sustained: float
    memory_bytes: int
    memory_bytes_per_s: float
    paces: Mapping[str, DevicePace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_keys("Device.flops", self.flops, ("bf16", "fp16", "fp32"))
        if not self.flops:
            raise ConfigError("Device.flops", expected="a peak by dtype", got="none", do="Give bf16 or fp32 at least.")
        for dtype, peak in self.flops.items():
            _check_rate(f"Device.flops[{dtype!r}]", peak)
        _check_rate("Device.sustained", self.sustained, most=1.0)
        _check_whole_number("Device.memory_bytes", self.memory_bytes)
        _check_rate("Device.memory_bytes_per_s", self.memory_bytes_per_s)
        check_keys("Device.paces", self.paces, self.flops)

    def pace(self, dtype: str) -> DevicePace:
        """Return how the device trains in ``dtype``: as measured, or as all of its numbers say."""
        return self.paces.get(dtype) or DevicePace(self.sustained, 0.0, self.memory_bytes_per_s)

    def flops_per_s(self, dtype: str) -> float:
        """Return what large products in ``dtype`` reach a second in training.

        Raises:
            ConfigError: the device's peak in this dtype is not known.
        """
        check_keys("Device.flops", (dtype,), self.flops)
        return self.flops[dtype] * self.pace(dtype).sustained


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

    Raises:
        ConfigError: nodes that are not whole, a level that is missing or unknown, a number out of its range.

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
        """Return the clusters that come with the package."""
        return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))

    @classmethod
    def named(cls, spec: str) -> Cluster:
        """Return a cluster by its name.

        Args:
            spec: ``[devices]x[name]/[devices of a node]``: ``910b-64g`` is one node, ``64x910b-64g`` are eight,
                ``64x910b-64g/4`` sixteen of four; or the path of a JSON file, one that ends in ``.json``.

        Raises:
            ConfigError: unknown, with the nearest name, or nodes that are not whole.
        """
        if spec.endswith(".json"):
            return cls.load(spec)
        match = _NAMED.fullmatch(spec)
        name, known = (match["name"] if match else spec), cls.names()
        if match is None or name not in known:
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
        """Read a cluster from a JSON file, such as `npuzero bench cluster` writes.

        Raises:
            ConfigError: no such file, no JSON, a key that is unknown or missing, a number out of its range.
        """
        return _parse_cluster(os.fspath(path), read_json(path))

    def as_dict(self) -> dict[str, Any]:
        """Return it as :meth:`load` reads it."""
        links = {
            level: {key: value for key, value in vars(link).items() if value} for level, link in self.links.items()
        }
        device = {**vars(self.device), "flops": dict(self.device.flops)}
        device["paces"] = {dtype: vars(pace) for dtype, pace in self.device.paces.items()}
        return {**vars(self), "device": device, "links": links, "sources": dict(self.sources)}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def with_ranks(self, ranks: int, local: int | None = None) -> Cluster:
        """Return as many of its devices.

        Args:
            ranks: in all.
            local: devices of a node; None: as it has, or all where they are fewer.

        Raises:
            ConfigError: nodes that are not whole.
        """
        _check_whole_number("Cluster.ranks", ranks)
        return replace(self, ranks=ranks, local=min(self.local, ranks) if local is None else local)

    def with_link(self, level: str, *, bytes_per_s: float | None = None, latency_s: float | None = None) -> Cluster:
        """Return it with another bandwidth or latency, or both, of one of :data:`LEVELS`.

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
    """Return the multiples of ``local`` beside ``ranks``, in words."""
    below = ranks // local * local
    return f"{below} or {below + local}" if below else str(local)


def _parse_cluster(subject: str, data: Mapping[str, Any]) -> Cluster:
    """Make a cluster of what its file has."""
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
    """Raise ConfigError for a key that is not a field's name, or a field that is missing."""
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
