"""Clusters by name and by file: each number has its source, and what cannot be is refused at the door."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from npuzero.errors import ConfigError
from npuzero.planner import Cluster, DeviceSpec, LinkSpec

NAMES = Cluster.names()


def number_paths(tree: dict, path: str = "") -> list[str]:
    """Paths of all numbers of a JSON object."""
    found = []
    for key, value in tree.items():
        where = f"{path}{key}"
        if isinstance(value, dict):
            found += number_paths(value, f"{where}.")
        elif not isinstance(value, str):
            found.append(where)
    return found


def test_the_clusters_that_come_with_the_package():
    assert set(NAMES) == {"a100-80g", "h100", "h200", "910b-64g", "910c", "950", "cpu"}


@pytest.mark.parametrize("name", NAMES)
def test_each_number_has_its_source_and_each_source_its_number(name: str):
    tree = Cluster.named(name).as_dict()
    sources = tree.pop("sources")
    del tree["ranks"]  # how many one asks for
    assert set(number_paths(tree)) == set(sources)
    assert all(len(text) > 10 or text == "unsourced: estimate" for text in sources.values())


@pytest.mark.parametrize(
    ("name", "dtype", "peak", "memory_bytes_per_s", "local"),
    [
        # peaks of the datasheets and white papers, dense; nominal bandwidth of the memory
        ("a100-80g", "bf16", 312e12, 2.039e12, 8),
        ("h100", "bf16", 989e12, 3.35e12, 8),
        ("h200", "bf16", 989e12, 4.8e12, 8),
        ("910b-64g", "bf16", 353.9e12, 1.6e12, 8),
        ("910c", "bf16", 752e12 / 2, 3.2e12 / 2, 768),
        ("950", "bf16", 432e12 * 36 / 32, 4.0e12, 64),
    ],
)
def test_peaks_are_the_published_ones_and_memory_sustains_a_part_of_its_own(
    name: str, dtype: str, peak: float, memory_bytes_per_s: float, local: int
):
    cluster = Cluster.named(name)
    assert cluster.device.flops[dtype] == pytest.approx(peak, rel=1e-3)
    assert 0.79 < cluster.device.memory_bytes_per_s / memory_bytes_per_s < 0.9
    assert cluster.local == cluster.ranks == local
    assert cluster.device.flops_per_s(dtype) == cluster.device.flops[dtype] * cluster.device.sustained


@pytest.mark.parametrize(
    ("spec", "ranks", "local", "nodes"),
    [
        ("910b-64g", 8, 8, 1),
        ("8x910b-64g", 8, 8, 1),
        ("64x910b-64g", 64, 8, 8),
        ("64x910b-64g/4", 64, 4, 16),
        ("4xa100-80g", 4, 4, 1),
        ("1xh100", 1, 1, 1),
        ("8x950", 8, 8, 1),
        ("a100-80g/4", 4, 4, 1),
        ("1024xa100-80g", 1024, 8, 128),
    ],
)
def test_a_spec_says_how_many_devices_and_how_many_of_a_node(spec: str, ranks: int, local: int, nodes: int):
    cluster = Cluster.named(spec)
    assert (cluster.ranks, cluster.local, cluster.nodes) == (ranks, local, nodes)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("a100-80gb", "Did you mean 'a100-80g'?"),
        ("64x910b", "Did you mean '910b-64g'?"),
        ("tpu-v4", "npuzero bench cluster"),
        ("7xcpu/2", "Take 6 or 8"),
        ("12xa100-80g", "12xa100-80g/4"),
        ("0xa100-80g", "whole number from 1"),
        ("8xa100-80g/0", "whole number from 1"),
        ("", "one of"),
        ("8xa100-80g/4/2", "one of"),
        ("nowhere.json", "nowhere.json"),
    ],
)
def test_a_spec_that_cannot_be_is_refused_with_a_way_out(spec: str, words: str):
    with pytest.raises(ConfigError, match=r".") as caught:
        Cluster.named(spec)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_again(name: str, tmp_path: Path):
    cluster = Cluster.named(name)
    cluster.write(tmp_path / "mine.json")
    assert Cluster.load(tmp_path / "mine.json") == cluster
    assert Cluster.named(str(tmp_path / "mine.json")) == cluster


def test_a_file_needs_no_more_than_was_measured(tmp_path: Path):
    """One device on its own: no links, no disk, no sources."""
    device = {"flops": {"fp32": 1e11}, "sustained": 1.0, "memory_bytes": 1 << 30, "memory_bytes_per_s": 1e10}
    (tmp_path / "mine.json").write_text(json.dumps({"name": "mine", "local": 1, "device": device, "links": {}}))
    cluster = Cluster.load(tmp_path / "mine.json")
    assert cluster.ranks == 1
    with pytest.raises(ConfigError, match="'node'"):
        cluster.with_ranks(2)  # two nodes, and nothing between them
    with pytest.raises(ConfigError, match="'local'"):
        cluster.with_ranks(2, local=2)


def change_tree_value(tree: dict, path: str, value: object) -> dict:
    """The object with another value at a path; of None nothing is left there."""
    key, _, rest = path.partition(".")
    inner = change_tree_value(tree.get(key, {}), rest, value) if rest else value
    return {**tree, key: inner} if inner is not None else {k: v for k, v in tree.items() if k != key}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("links.node.bytes_per_s", -1e9, "above 0"),
        ("links.node.bytes_per_s", 0, "above 0"),
        ("links.node.bytes_per_s", math.nan, "above 0"),
        ("links.node.bytes_per_s", math.inf, "above 0"),
        ("links.node.bytes_per_s", "fast", "above 0"),
        ("links.node.bytes_per_s", True, "above 0"),
        ("links.node.latency_s", -1e-6, "from 0"),
        ("links.node.latency_s", math.nan, "from 0"),
        ("links.local.peers", -1, "whole number"),
        ("links.node.bytes_per_s", None, "the key 'bytes_per_s'"),
        ("links.node.bandwith", 1e9, "keys among"),
        ("links.nodes", {"bytes_per_s": 1e9}, "Did you mean 'node'?"),
        ("links.node", 25e9, "JSON object"),
        ("device.flops.bf16", -1.0, "above 0"),
        ("device.flops.bf17", 1e12, "Did you mean 'bf16'?"),
        ("device.flops", {}, "a peak by dtype"),
        ("device.sustained", 1.5, "up to 1"),
        ("device.memory_bytes", 8.5, "whole number"),
        ("device.memory_bytes", 0, "whole number"),
        ("device.memory_bytes_per_s", math.nan, "above 0"),
        ("device.memory_byte", 1, "Did you mean 'memory_bytes'?"),
        ("device", None, "the key 'device'"),
        ("host_memory_bytes", -1, "whole number"),
        ("contention", -0.1, "from 0 to 1"),
        ("contention", 2, "from 0 to 1"),
        ("local", 3, "a multiple of the 3"),
        ("ranks", 7, "a multiple of the 8"),
        ("devices", 8, "'devices'"),
    ],
)
def test_a_file_that_cannot_be_is_refused(path: str, value: object, words: str, tmp_path: Path):
    tree = change_tree_value(Cluster.named("64xa100-80g").as_dict(), path, value)
    (tmp_path / "mine.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=r".") as caught:
        Cluster.load(tmp_path / "mine.json")
    assert words in str(caught.value)


def test_who_builds_one_by_hand_is_checked_too():
    with pytest.raises(ConfigError, match="above 0"):
        LinkSpec(-1.0)
    with pytest.raises(ConfigError, match="from 0"):
        LinkSpec(1e9, -1.0)
    with pytest.raises(ConfigError, match="up to 1"):
        DeviceSpec({"bf16": 1e12}, 2.0, 1 << 30, 1e12)
    with pytest.raises(ConfigError, match="keys among"):
        Cluster.named("a100-80g").device.flops_per_s("fp8")


def test_a_link_of_its_own_says_so():
    cluster = Cluster.named("16xa100-80g").with_link("node", bytes_per_s=12.5e9)
    assert cluster.links["node"] == LinkSpec(12.5e9, Cluster.named("a100-80g").links["node"].latency_s)
    assert cluster.sources["links.node.bytes_per_s"] == "given by the caller"
    with pytest.raises(ConfigError, match="Did you mean 'node'"):
        cluster.with_link("nodes", bytes_per_s=1e9)
    with pytest.raises(ConfigError, match="above 0"):
        cluster.with_link("node", bytes_per_s=-1e9)


@pytest.mark.parametrize(("ranks", "measured"), [(2, 18e9), (4, 45e9), (8, 126e9)])
def test_a_full_mesh_gives_few_ranks_few_wires(ranks: int, measured: float):
    """Of 910B's seven links a group of n has n - 1: all_reduce as measured (gameofdimension/limulidae)."""
    assert Cluster.named("910b-64g").links["local"].among(ranks) == pytest.approx(measured, rel=0.21)
    assert Cluster.named("a100-80g").links["local"].among(ranks) == 230e9
