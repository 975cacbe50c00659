"""Steps beside what the planner says of them: what is planned is arithmetic, the record holds both, a run works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import goals
from benchmarks.planning import against_steps as planned
from benchmarks.step.workload import GPTWorkload
from npuzero.bench import Record, Result
from npuzero.planner import Cluster, DevicePace, DeviceSpec, LinkSpec

SIZES = GPTWorkload(dim=64, layers=2, heads=2, sequence=64, batch=2)
FAST = 1e30
PLACE = {"kind": "cpu", "local": 2, "ranks": 2, "memory_bytes": 16 * 10**9, "host_bytes": 16 * 10**9}


def count_product_flops(sizes: GPTWorkload) -> float:
    """FLOPs of a step's matrix products, by hand: 12 D² a block and token, scores, and the head."""
    tokens = sizes.batch * sizes.sequence
    block = 2 * 12 * sizes.dim**2 + 4 * sizes.sequence * sizes.dim
    return 3.0 * tokens * (sizes.layers * block + 2 * sizes.dim * sizes.vocabulary)


def free_links_cluster(sustained: float = 1.0, ramp: float = 0.0, work: float = FAST) -> Cluster:
    """One whose links and memory take no time."""
    device = DeviceSpec({"bf16": 1e12}, 1.0, 10**10, FAST, {"bf16": DevicePace(sustained, ramp, work)})
    return Cluster("test", device, {"local": LinkSpec(FAST), "host": LinkSpec(FAST)}, local=2, ranks=2, contention=0.0)


@pytest.mark.parametrize("preset", planned.PRESETS)
def test_a_step_without_bytes_is_its_products(preset: str) -> None:
    wanted_s = count_product_flops(SIZES) / 1e12
    assert planned.plan_step(SIZES, preset, free_links_cluster()).step_s == pytest.approx(wanted_s)
    assert planned.plan_step(SIZES, preset, free_links_cluster(sustained=0.25)).step_s == pytest.approx(4 * wanted_s)
    tokens = SIZES.batch * SIZES.sequence
    assert planned.plan_step(SIZES, preset, free_links_cluster(ramp=tokens)).step_s == pytest.approx(2 * wanted_s)


def test_work_of_models_takes_its_own_bandwidth() -> None:
    slow, slower = (planned.plan_step(SIZES, "zero2", free_links_cluster(work=work)).step_s for work in (1e9, 5e8))
    nothing = planned.plan_step(SIZES, "zero2", free_links_cluster()).step_s
    assert slower - nothing == pytest.approx(2 * (slow - nothing)) and slow > 1.5 * nothing


def steps_and_probes() -> Result:
    """Probes of a machine, and steps, as a run of the benchmark has them."""
    seconds, values = {}, {}
    for name, took, of in (
        ("large/bf16/1", 1.0, {"flops": 1e12}),
        ("products/bf16/1", 0.25, {"flops": 1e11, "nbytes": 1e9, "tokens": 64.0}),
        ("passes/bf16/1", 0.5, {"flops": 1e11, "nbytes": 1e9, "tokens": 64.0}),
        ("update", 0.1, {"nbytes": 1e9}),
        ("host/to_device", 0.1, {"nbytes": 1e9}),
        ("host/to_host", 0.1, {"nbytes": 1e9}),
        *((f"local/{verb}/short", 1e-5, {"nbytes": 1.0, "messages": 1.0}) for verb in ("all_gather", "reduce_scatter")),
        *((f"local/{verb}/long", 0.1, {"nbytes": 1e9, "messages": 1.0}) for verb in ("all_gather", "reduce_scatter")),
        ("local/all_reduce/short", 2e-5, {"nbytes": 1.0, "messages": 2.0}),
        ("local/all_reduce/long", 0.2, {"nbytes": 2e9, "messages": 2.0}),
        ("beside/compute", 0.2, {}),
        ("beside/traffic", 0.1, {}),
        ("beside/both", 0.25, {}),
        (f"{planned.planned_benchmark_name(SIZES)} zero0", 0.02, {}),
        (f"{planned.planned_benchmark_name(SIZES)} zero3", 0.03, {}),
    ):
        seconds[name], values[name] = [took, 1.5 * took, took], of
    nothing = dict.fromkeys(seconds)
    return Result("x", "X", "update", "equal", {}, "time", seconds, dict.fromkeys(seconds, 1), nothing, values)  # type: ignore[arg-type]


def test_a_record_holds_the_probes_their_cluster_and_each_step_beside_its_plan(tmp_path: Path) -> None:
    record = Record.begin(planned.SUITE, "x", {})
    record.results += planned.planned_results([SIZES], ["zero0", "zero3"], steps_and_probes(), PLACE)
    record.write(tmp_path / "planned.json")
    probes, steps = Record.read(tmp_path / "planned.json").results
    kept = probes.parameters["cluster"]
    assert kept["device"]["flops"] == {"bf16": 1e12} and kept["contention"] == 0.5
    assert all(kept["sources"][path].startswith("measured by") for path in ("contention", "links.local.bytes_per_s"))
    assert list(steps.seconds) == ["npuzero zero0", "npuzero zero3"]
    for name, took in (("zero0", 0.02), ("zero3", 0.03)):
        planned_s = steps.values[f"npuzero {name}"]["planned_s"]
        assert planned.planned_errors(steps)[f"npuzero {name}"] == pytest.approx(planned_s / took - 1)
    assert "npuzero zero3" in planned.planned_table([probes, steps])


def test_the_goal_is_held_against_the_farther_side() -> None:
    figure = next(figure for figure in goals.FIGURES if figure.group == "planner")
    result = planned.planned_results([SIZES], ["zero0", "zero3"], steps_and_probes(), PLACE)[1]
    result.values = {"npuzero zero0": {"planned_s": 0.018}, "npuzero zero3": {"planned_s": 0.0315}}
    assert figure.measured({figure.benchmarks[0]: result}) == pytest.approx([0.1, 0.05])
    assert figure.meets([0.1, 0.05]) and not figure.meets([0.05, 0.12])


def test_sizes_of_a_run_have_names_of_their_own() -> None:
    assert planned.planned_benchmark_name(SIZES) == "planned/bf16-batch2"
    assert planned.planned_benchmark_name(replace(SIZES, precision="fp32", batch=1)) == "planned/fp32-batch1"


@pytest.mark.slow
@pytest.mark.world
def test_a_run_leaves_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "planned.json"
    planned.main(["--quick", "--presets", "zero2", "--batches", "1", "--out", str(path)])
    record = Record.read(path)
    assert record.quick and [result.name for result in record.results] == ["planned/probes", "planned/bf16-batch1"]
    assert record.results[1].values["npuzero zero2"]["planned_s"] > 0
    assert "bf16-batch1 npuzero zero2" in capsys.readouterr().out
