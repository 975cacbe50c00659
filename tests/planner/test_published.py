"""The clock against published runs: Narayanan et al. 2021, table 1, and InternEvo's tokens a second.

Constants are those of the cluster ``a100-80g``, none fitted to these tables.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from benchmarks.planning import against_papers as published
from benchmarks.planning.published import PublishedRun, PublishedTable, count_ordered_pairs, count_published_flops
from npuzero.errors import ConfigError

MEAN, MOST = 0.06, 0.15
CALIBRATED_MEAN, NEAR, NEAR_SHARE, ORDER = 0.04, 0.05, 0.8, 0.95
#: One named row each, on which one constant is calibrated: the part of the peak that products sustain.
CALIBRATION = {"narayanan2021": "18.4B", "internevo": "tp=1 zero1=8, 8"}
#: petaFLOP/s of all devices together, as the paper prints them beside those of one.
AGGREGATE = {"39.1B": 70.8, "76.1B": 143.8, "145.6B": 227.1, "310.1B": 297.4, "529.6B": 410.2, "1008.0B": 502.0}


def error_sizes(table: PublishedTable) -> list[float]:
    return [abs(error) for error in table.errors().values()]


@pytest.fixture(params=PublishedTable.names())
def table(request: pytest.FixtureRequest) -> PublishedTable:
    return PublishedTable.named(request.param)


def test_with_the_shipped_constants_the_goals_are_met(table: PublishedTable):
    found = error_sizes(table)
    assert statistics.mean(found) <= MEAN
    assert max(found) <= MOST


def test_calibrated_on_one_row_the_others_come_near(table: PublishedTable):
    row = table.row(CALIBRATION[find_table_name(table)])
    calibrated = table.calibrated(row.name)
    assert calibrated.predict(row) == pytest.approx(row.published, rel=1e-6)
    found = error_sizes(calibrated)
    assert statistics.mean(found) <= CALIBRATED_MEAN
    assert sum(size <= NEAR for size in found) / len(found) >= NEAR_SHARE


def test_what_one_table_is_calibrated_on_holds_for_the_other():
    for name, row in CALIBRATION.items():
        (other,) = set(CALIBRATION) - {name}
        sustained = PublishedTable.named(name).calibrated(row).cluster.device.sustained
        assert statistics.mean(error_sizes(PublishedTable.named(other).sustaining(sustained))) <= CALIBRATED_MEAN


def test_pairs_that_differ_are_in_the_right_order(table: PublishedTable):
    right, count = count_ordered_pairs([(row.published, table.predict(row)) for row in table.judged])
    assert count > 20
    assert right / count >= ORDER


def test_narayanans_rows_are_the_papers():
    """Sizes give the parameters that name the rows (equation 2), and devices times each one's FLOPS the printed sum."""
    rows = PublishedTable.named("narayanan2021").rows
    assert len(rows) == 10
    assert [row.published for row in rows] == [137, 138, 142, 135, 138, 140, 148, 155, 163, 163]
    for row in rows:
        h, layers = row.hidden, row.layers
        parameters = 12 * layers * h * h * (1 + 13 / (12 * h) + (row.vocabulary + row.sequence) / (12 * layers * h))
        assert parameters / 1e9 == pytest.approx(float(row.name.removesuffix("B")), abs=0.051)
        if row.name in AGGREGATE:
            assert row.ranks * row.published / 1000 == pytest.approx(AGGREGATE[row.name], rel=0.5 / row.published)
        assert layers % (row.pipe * row.chunks) == 0
        assert row.tokens == row.data * row.micro_batches * row.micro_batch * 2048


def test_flops_are_equation_3():
    row = PublishedTable.named("narayanan2021").row("18.4B")
    expected = 96 * 1024 * 2048 * 40 * 6144**2 * (1 + 2048 / (6 * 6144) + 51200 / (16 * 40 * 6144))
    assert count_published_flops(row) == pytest.approx(expected)
    assert count_published_flops(replace(row, recompute=False)) == pytest.approx(expected * 72 / 96)


def test_doubtful_rows_contradict_their_neighbours_and_no_others_do():
    """Fewer tokens a step save less than they would take where next to nothing is sent."""
    table = PublishedTable.named("internevo")
    alone = {True: table.row("recompute, 8").published, False: table.row("packed, 8").published}
    full = {
        (512, True): "recompute, 512",
        (1024, True): "recompute, 1024",
        (512, False): "packed, 512",
        (1024, False): "tp=1 zero1=8, 1024",
    }
    few = [row for row in table.rows if row.tokens // row.ranks < 16384]
    assert len(few) == 6
    for row in few:
        whole = table.row(full[row.ranks, row.recompute])
        own, tokens = row.tokens / row.ranks, whole.tokens / whole.ranks
        saved_s, usual_s = tokens / whole.published - own / row.published, (tokens - own) / alone[row.recompute]
        assert (saved_s < 0.95 * usual_s) == bool(row.doubt), row.name
    assert [row for row in table.rows if row.doubt] == [row for row in few if row.doubt]
    assert len(table.judged) == len(table.rows) - 5


def test_rows_that_cannot_be_had_have_their_reason():
    missing = PublishedTable.named("internevo").missing
    assert missing
    assert all(len(reason) > 20 for reason in missing.values())


def test_what_brings_zero1_down_on_many_devices_is_broadcasts_owner_by_owner():
    table = PublishedTable.named("internevo")
    everywhere, near = table.row("tp=1 zero1=-1, 1024"), table.row("tp=1 zero1=8, 1024")
    without = replace(table, system=replace(table.system, owners=False))
    assert table.predict(everywhere) < 0.65 * table.predict(near)
    assert without.predict(everywhere) == pytest.approx(without.predict(near), rel=0.02)


@pytest.mark.parametrize("level", ["local", "node"])
def test_faster_links_never_slow_a_run(table: PublishedTable, level: str):
    for row in table.rows[::5]:
        link = table.cluster.links[level]
        faster = replace(table, cluster=table.cluster.with_link(level, bytes_per_s=3 * link.bytes_per_s))
        assert faster.step_s(row) <= table.step_s(row)


def test_an_unknown_table_gets_the_nearest_name():
    with pytest.raises(ConfigError, match="narayanan2021"):
        PublishedTable.named("narayanan2020")


def find_table_name(table: PublishedTable) -> str:
    """Return under which name a table is found."""
    return next(name for name in PublishedTable.names() if PublishedTable.named(name).name == table.name)


def test_a_pipelines_bubble_is_the_published_one():
    """Without sends and around the layers nothing: (p - 1) / (m * v) of the rest (Narayanan et al., section 2.2)."""
    table = PublishedTable.named("narayanan2021")
    free = table.cluster.with_link("node", bytes_per_s=1e18, latency_s=0.0).with_link("local", bytes_per_s=1e18)
    quick = replace(table.system, update=0.0, accumulate=0.0, reduced=0.0, root_forward={}, root_backward={})
    ideal = replace(table, cluster=free.with_link("local", latency_s=0.0), system=quick)
    usual = {"vocabulary": 1, "pipe": 8, "layers": 64, "ranks": 64, "micro_batches": 16}
    row: PublishedRun = replace(table.row("145.6B"), chunks=1, **usual)
    alone = ideal.step_s(replace(row, pipe=1, layers=8, ranks=8))
    assert ideal.step_s(row) / alone - 1 == pytest.approx(7 / 16, rel=1e-3)
    assert ideal.step_s(replace(row, chunks=4)) / alone - 1 == pytest.approx(7 / 64, rel=1e-3)


def test_the_command_lists_every_row(capsys: pytest.CaptureFixture[str]):
    published.main([])
    told = capsys.readouterr().out
    for name in PublishedTable.names():
        for row in PublishedTable.named(name).rows:
            assert f"  {row.name} " in told
    assert told.count("not judged:") == 5
    assert published.CALIBRATION == CALIBRATION
