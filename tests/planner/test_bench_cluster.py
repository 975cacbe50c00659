"""npuzero bench cluster: its numbers follow from seconds, counts are right, and it leaves a cluster to be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import npuzero
from npuzero.bench.suites.cluster import build_cluster
from npuzero.bench.suites.probes import ProbeDecoder, ProbeRank, ProbeSizes, count_decoder_work, ranks_by_level
from npuzero.cli import main
from npuzero.planner import Cluster, LinkSpec

PEAK = {"bf16": 100e12, "fp32": 20e12}
SUSTAINED, RAMP, WORK_BYTES, MEMORY = 0.6, 128.0, 0.5e12, 2e12
LINKS = {"local": (200e9, 5e-6), "node": (25e9, 20e-6)}
CONTENTION, HOST = 0.3, 25e9
PLACE = {"kind": "cuda", "local": 8, "ranks": 16, "memory_bytes": 80 * 10**9, "host_bytes": 800 * 10**9}


def probed_machine() -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """What the probes of a machine of these numbers take, and are of."""
    seconds, facts = {}, {}

    def probe(name: str, took: float, **of: float) -> None:
        seconds[name], facts[name] = [1.1 * took, took, 0.9 * took], of

    for dtype, peak in PEAK.items():
        for n, part in ((1024, 0.8), (8192, 1.0)):
            probe(f"large/{dtype}/{n}", 2 * n**3 / peak / part, flops=2 * n**3)
        for batch in (1, 4):
            tokens = 512 * batch
            of = {"flops": 1e10 * tokens, "nbytes": 2e8 * tokens, "tokens": tokens}
            products = of["flops"] / tokens * (tokens + RAMP) / peak / SUSTAINED
            probe(f"products/{dtype}/{batch}", products, **of)
            probe(f"passes/{dtype}/{batch}", products + of["nbytes"] / WORK_BYTES, **of)
    probe("update", 28e6 / MEMORY, nbytes=28e6)
    for level, (rate, latency) in LINKS.items():
        for verb, rings in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
            messages = 7 * rings
            probe(f"{level}/{verb}/short", messages * latency, nbytes=0.0, messages=messages)
            probe(
                f"{level}/{verb}/long", messages * latency + 1e8 * rings / rate, nbytes=1e8 * rings, messages=messages
            )
    for way in ("to_device", "to_host"):
        probe(f"host/{way}", 1e8 / HOST, nbytes=1e8)
    probe("beside/compute", 0.010)
    probe("beside/traffic", 0.004)
    probe("beside/both", 0.010 + CONTENTION * 0.004)
    return seconds, facts


def test_a_machines_numbers_come_back_from_what_its_probes_take() -> None:
    cluster = build_cluster(*probed_machine(), PLACE, {"disk_read": LinkSpec(3e9)}, "measured, says the test")
    assert (cluster.ranks, cluster.local, cluster.nodes) == (16, 8, 2)
    assert (cluster.device.memory_bytes, cluster.host_memory_bytes) == (80 * 10**9, 100 * 10**9)
    assert cluster.device.flops == pytest.approx(PEAK, rel=1e-3)
    assert cluster.device.memory_bytes_per_s == pytest.approx(MEMORY, rel=1e-3)
    for dtype in PEAK:
        pace = cluster.device.pace(dtype)
        found = pace.sustained, pace.ramp_tokens, pace.bytes_per_s
        assert found == pytest.approx((SUSTAINED, RAMP, WORK_BYTES), rel=1e-3)
        assert cluster.device.flops_per_s(dtype) == pytest.approx(SUSTAINED * PEAK[dtype], rel=1e-3)
    for level, (rate, latency) in LINKS.items():
        link = cluster.links[level]
        assert (link.bytes_per_s, link.latency_s) == pytest.approx((rate, latency), rel=1e-3)
    assert cluster.links["host"].bytes_per_s == pytest.approx(HOST)
    assert cluster.links["disk_read"].bytes_per_s == 3e9
    assert cluster.contention == pytest.approx(CONTENTION, rel=1e-3)
    assert set(cluster.sources.values()) == {"measured, says the test"}


def test_an_unsteady_clock_gives_a_cluster_all_the_same() -> None:
    """More tokens take less time than few, passes less than products, a short message more than a long one."""
    seconds, facts = probed_machine()
    seconds["products/bf16/4"] = [0.5 * value for value in seconds["products/bf16/1"]]
    seconds["passes/bf16/1"] = [0.5 * value for value in seconds["products/bf16/1"]]
    seconds["local/all_reduce/short"] = [2 * value for value in seconds["local/all_reduce/long"]]
    seconds["beside/both"] = [0.9 * value for value in seconds["beside/compute"]]
    cluster = build_cluster(seconds, facts, PLACE)
    pace = cluster.device.pace("bf16")
    assert 0 < pace.sustained <= 1 and pace.ramp_tokens >= 0 and 0 < pace.bytes_per_s < float("inf")
    assert cluster.contention == 0


@pytest.mark.parametrize(
    ("rank", "found"),
    [(5, {"local": [4, 5, 6, 7], "node": [1, 5]}), (0, {"local": [0, 1, 2, 3], "node": [0, 4]})],
)
def test_levels_are_of_a_node_and_between_nodes(rank: int, found: dict[str, list[int]]) -> None:
    assert ranks_by_level(rank, 8, 4) == found
    assert ranks_by_level(0, 1, 1) == {}
    assert ranks_by_level(1, 2, 2) == {"local": [0, 1]}


def test_products_are_counted_as_shapes_have_them() -> None:
    sizes = ProbeSizes.of("cpu", quick=True)
    width, sequence, batch = sizes.width, sizes.sequence, 2
    blocks = len(ProbeDecoder(sizes).blocks)
    linears = 2 * batch * sequence * width * (blocks * 12 * width + width)
    attention = blocks * 2 * 2 * batch * sequence**2 * width
    found = count_decoder_work(sizes, "fp32", batch)
    assert found["flops"] == 3 * (linears + attention)
    assert found["tokens"] == batch * sequence
    assert found["nbytes"] > 4 * batch * sequence * width * blocks


def test_products_alone_have_the_products_of_passes() -> None:
    sizes = ProbeSizes.of("cpu", quick=True)
    x = torch.randn(1, sizes.sequence, sizes.width)
    counts = []
    for model, given in (
        (ProbeDecoder(sizes), torch.zeros(1, sizes.sequence, dtype=torch.long)),
        (ProbeDecoder(sizes, True), x),
    ):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:
            model(given)
        counts.append(flops.get_total_flops())
    assert counts[0] == counts[1] == count_decoder_work(sizes, "fp32", 1)["flops"] / 3


def test_one_rank_has_no_collectives_to_measure() -> None:
    npuzero.init().close()  # the world of whatever ran here before, which had other times
    probes = ProbeRank("cpu", quick=True)
    try:
        assert not [name for name in probes.probes if name.startswith(("local", "node", "beside"))]
        seconds = {name: [probes.visit(name, 1)] for name in probes.probes}
        cluster = build_cluster(seconds, probes.facts(), probes.place())
    finally:
        probes.close()
    assert (cluster.ranks, set(cluster.links), cluster.contention) == (1, {"host"}, 0)


@pytest.mark.world
@pytest.mark.slow
def test_the_command_leaves_a_cluster_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "cluster.json"
    assert main(["bench", "cluster", "--quick", "--nvme", str(tmp_path), "--out", str(path)]) == 0
    shown = capsys.readouterr()
    cluster = Cluster.load(path)
    assert cluster == Cluster.named(str(path)) and cluster.ranks == cluster.local
    assert {"host", "disk_read", "disk_write"} <= set(cluster.links)
    assert all(source.startswith("measured by npuzero bench cluster") for source in cluster.sources.values())
    data = json.loads(path.read_text("utf-8"))
    assert set(data["device"]["paces"]) == set(data["device"]["flops"]) == {"bf16", "fp32"}
    assert "figures mean nothing" in shown.out and "link disk_read" in shown.out
    assert "products/bf16/1: about" in shown.err and "rounds" in shown.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cluster", "--only", "large"], "--only"),
        (["ops", "--quick", "--nvme", "."], "--nvme"),
    ],
)
def test_what_is_of_other_suites_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err
