"""README's figures are what the committed records say; figures name benchmarks that there are."""

from __future__ import annotations

import re

import pytest

from benchmarks import figures
from benchmarks.contenders import contender_label, describe_records, record_commits
from npuzero.bench import Result
from npuzero.bench.suites import comm, ops
from npuzero.cli.output import palette
from npuzero.errors import ConfigError
from npuzero.plan import PRECISIONS, PRESETS

#: Benchmarks of scripts of their own.
OTHERS = (
    r"step/(bf16|fp32)-batch[14]|host/(8|32)|nvme/(step|update)-(bf16|fp32)-1|disk/stream|farstep/(whole|forward)"
    r"|activations|highwater|host_axes/(mtp|msp)|tensor/(fp32|bf16)-[24]|sequence|pipeline/(fp32|bf16)-[24]"
    r"|wires/(namespaces|shared)/bf16/1|planned/bf16-batch[14]"
)
RESULTS = figures.ROOT / "benchmarks" / "results"


def figure_result(name="x", **seconds) -> Result:
    zero: dict = dict.fromkeys(seconds)
    return Result(
        name, "X", next(iter(seconds)), "equal", {}, "spread", seconds, zero, zero, {name: {} for name in seconds}
    )


@pytest.mark.parametrize("document, block", [("README", figures.headlines), ("PAGE", figures.markdown)])
def test_documents_say_what_the_committed_records_say(document, block):
    records, results = figures.read_records(RESULTS)
    text = getattr(figures, document).read_text("utf-8")
    assert figures.replace_block(text, block(records, results)) == text, "run: make figures"
    assert not any(record.quick for record in records)


def test_readme_has_five_figures():
    assert len(figures.HEADLINES) == 5
    _, results = figures.read_records(RESULTS)
    for headline in figures.HEADLINES:
        assert all(headline.line(results[headline.benchmark])), headline.what


def test_who_is_measured_has_a_name_that_can_be_typed():
    _, results = figures.read_records(RESULTS)
    contenders = [name for result in results.values() if result.name.startswith("peers/") for name in result.seconds]
    own = [contender_label(name).split(", ") for name in contenders if name.startswith("npuzero ")]
    assert ["npuzero zero3", "bf16-split"] in own
    for preset, *precision in own:
        assert preset.removeprefix("npuzero ") in PRESETS and set(precision) <= set(PRECISIONS)
    assert contender_label("fsdp2-keep") == "FSDP2, reshard_after_forward=False"


def test_the_figures_of_one_table_are_of_one_clean_commit():
    records, results = figures.read_records(RESULTS)
    groups = figures.figure_groups(results)  # those of which there are records
    tables = [{headline.benchmark for headline in figures.HEADLINES}, *map(figures.names_of, groups)]
    for names in [*tables, *({name} for name in results if name.startswith("peers/"))]:
        found = record_commits([record for record in records if any(item.name in names for item in record.results)])
        assert len(found) == 1 and not found[0].endswith("+"), f"{sorted(names)}: {found}"


def test_a_table_names_the_records_that_it_is_from():
    records = [figures.Record.begin("ops", "x", {}) for _ in range(2)]
    for record, name, commit in zip(records, ("pack", "peers/x"), ("aaaa", "bbbb+"), strict=True):
        record.results.append(figure_result(name, a=[1.0, 2.0], b=[1.0, 2.0]))
        record.machine.update(cpu="cpu", cores=2, isa="avx2", torch="2.13", commit=commit)
    assert describe_records(records, {"pack"}).endswith("commit aaaa.")
    assert describe_records(records, {"pack", "peers/x"}).endswith("commit aaaa, bbbb+.")


def test_every_figure_names_benchmarks_of_its_suite():
    known = {
        *ops.ops_benchmark_names(False),
        *(f"{name}/{ranks}" for name in comm.comm_benchmark_names(False) for ranks in comm.RANKS),
    }
    known |= {f"deepspeed/{name}" for name in known if name.startswith(("mixed_step", "all_reduce/"))}
    for figure in figures.FIGURES:
        assert figure.group in figures.GROUPS
        for benchmark in figure.benchmarks:
            assert benchmark in known or re.fullmatch(OTHERS, benchmark), benchmark


def test_the_worst_of_a_range_is_held_against_the_goal():
    figure = figures.GoalFigure("ops", "n", "a", 2.0, ("x", "y", "z"), lambda found: [found.speedup("b").median])
    results = {"x": figure_result("x", a=[4.0], b=[2.0]), "y": figure_result("y", a=[9.0], b=[3.0])}
    values = figure.measured(results)
    assert values == [2.0, 3.0]  # z is not there
    assert figures.format_range(figure, values) == "2.00–3.00 ✓"
    assert figures.format_range(figure, [1.994, 3.0]) == "1.99–3.00 ✗"
    assert figures.format_range(figure, [1.996]) == "2.00 ✓"  # as it is shown


def test_a_peer_that_was_missing_is_no_figure():
    figure = next(figure for figure in figures.FIGURES if figure.benchmarks == ("deepspeed/mixed_step",))
    there = {figure.against: [6.0, 6.0], "npuzero": [2.0, 3.0]}
    assert figure.measured({"deepspeed/mixed_step": figure_result(**there)}) == [2.5]
    assert figure.measured({"deepspeed/mixed_step": figure_result(npuzero=[2.0, 3.0])}) == []


def test_some_goals_are_upper_bounds():
    figure = figures.GoalFigure("step", "n", "a", 1.04, ("x",), lambda found: [], at_most=True)
    assert figure.meets([1.0, 1.04]) and not figure.meets([1.0, 1.06])


def test_figures_of_a_step_are_of_the_presets_there_are():
    seconds = {"compute only": [1.0, 2.0, 1.0], "npuzero zero1": [1.5, 3.0, 1.5], "npuzero zero3": [3.0, 6.0, 3.0]}
    lines = figures.figure_groups({"step/bf16-batch4": figure_result("step/bf16-batch4", **seconds)})["step"]
    assert lines == [
        ["bf16, batch 4, stages 0–2", "compute only", "1.50 ✗", "≤ 1.04"],
        ["bf16, batch 4, stage 3", "compute only", "3.00 ✗", "≤ 1.06"],
    ]


def test_the_block_goes_between_its_markers():
    document = f"a\n{figures.BEGIN}\nold\n{figures.END}\nb\n"
    assert figures.replace_block(document, "new") == f"a\n{figures.BEGIN}\nnew\n{figures.END}\nb\n"
    with pytest.raises(ValueError, match="no <!-- figures"):
        figures.replace_block("a", "new")


def test_a_smoke_run_is_no_figure_for_readme(tmp_path, monkeypatch):
    record = figures.Record.begin("ops", "x", {}, quick=True)
    record.write(tmp_path / "ops.json")
    with pytest.raises(SystemExit, match="quick"):
        figures.main([str(tmp_path), "--readme"])


def test_a_benchmark_is_recorded_once(tmp_path):
    for name in ("a", "b"):
        record = figures.Record.begin("ops", "x", {})
        record.results.append(figure_result("pack", a=[1.0, 2.0], b=[1.0, 2.0]))
        record.write(tmp_path / f"{name}.json")
    with pytest.raises(ConfigError, match="pack twice"):
        figures.read_records(tmp_path)


def test_the_picture_names_each_panel_once_and_says_which_side_is_better():
    matplotlib = pytest.importorskip("matplotlib")
    from benchmarks.plot import draw_figures

    _, results = figures.read_records(RESULTS)
    with matplotlib.rc_context(palette.STYLE):
        figure = draw_figures(results)
    titles = [axes.get_title("left") for axes in figure.axes]
    assert len(titles) == len(set(titles)) == 6
    for axes in figure.axes:
        assert re.search("right is better →|← left is better", axes.get_xlabel())
        assert (axes.get_xscale() == "log") == ("log scale" in axes.get_xlabel())
    assert any(axes.get_xscale() == "log" for axes in figure.axes)
    said = r"A training step \(bf16, batch 1 a rank\) takes .* under npuzero, .* under its peers"
    assert re.match(said, figure.get_suptitle())


def test_the_picture_has_both_ways_of_a_collective_in_one_row():
    pytest.importorskip("matplotlib")
    from benchmarks.plot import NPUZERO, SLOTS, figure_rows

    _, results = figures.read_records(RESULTS)
    rows = {row.label: row for row in figure_rows(results, "comm")}
    assert not any("in place" in label for label in rows)
    assert set(rows["reduce_scatter, 2 ranks"].dots) == {SLOTS, NPUZERO}
    assert len(rows["reduce_scatter, 2 ranks"].dots[NPUZERO]) == 3


def test_a_part_of_the_figures_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.plot import draw_figures, plot_figures

    step = figure_result("step/bf16-batch4", **{"compute only": [1.0], "npuzero zero2": [1.1], "ddp": [1.3]})
    own = figure_result("cast/nearest", **{"torch fused": [1.0], "npuzero": [0.9]})
    results = {found.name: found for found in (step, own)}
    plot_figures(results, tmp_path / "figures.png", "a source")
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    assert draw_figures(results).get_suptitle().strip() == "npuzero's figures, and their goals"


def test_without_records_there_is_nothing_to_draw(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    figures.main([str(tmp_path)])
    assert capsys.readouterr().out == "no figures among these records\n"
    assert list(tmp_path.iterdir()) == []
