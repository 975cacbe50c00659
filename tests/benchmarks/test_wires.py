"""A step over a slow link: wires between namespaces that hold their rate and go, whole runs in tiny sizes, the picture.

What links over shared memory do is in tests/world/test_links.py.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks import figures
from benchmarks.wires import __main__ as wires
from benchmarks.wires import picture
from benchmarks.wires.namespaces import WIRE, WiredNodes, lay_wire
from npuzero.bench import Record, Result
from npuzero.errors import BenchmarkError

TINY = shlex.split("--dim 64 --layers 2 --heads 2 --rates unlimited,1 --rounds 1 --peers=")
LISTEN = """
import socket
with socket.create_server(("", 4321)) as server:
    print("ready", flush=True)
    link, _ = server.accept()
    got = 0
    while part := link.recv(1 << 16):
        got += len(part)
    print(got)
"""
SEND = "import socket; socket.create_connection(('{}', 4321)).sendall(bytes(4_000_000))"


def list_namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def wire() -> Iterator[WiredNodes]:
    """A wire between nodes of two ranks; skips where none can be laid."""
    try:
        with lay_wire(2) as made:
            yield made
    except BenchmarkError as error:
        if error.subject != "network namespaces":
            raise
        pytest.skip(f"network namespaces are not allowed here: {error.got}")


@pytest.mark.world
def test_a_wire_holds_its_rate_and_counts_what_it_carries(wire):
    wire.limit(10)
    wire.limit(0.1)  # 12.5 MB a second
    python = [sys.executable, "-c"]
    at = {"text": True, "stdout": subprocess.PIPE, "env": {"RANK": "3", "PATH": "/usr/sbin:/sbin:/usr/bin:/bin"}}
    with subprocess.Popen(wire.command([*python, LISTEN]), **at) as there:
        assert there.stdout.readline() == "ready\n"
        before = wire.carried()
        here = {**at["env"], "RANK": "1"}
        begin_s = time.monotonic()
        subprocess.run(wire.command([*python, SEND.format(wire.addresses[1])]), env=here, check=True, timeout=300)
        assert there.stdout.readline() == "4000000\n"
    assert time.monotonic() - begin_s > 0.3, "all but a burst"
    assert 4_000_000 <= wire.carried() - before < 4_400_000
    wire.limit(None)
    shown = subprocess.run(["tc", "-n", wire.names[0], "qdisc", "show", "dev", WIRE], capture_output=True, text=True)
    assert "tbf" not in shown.stdout


def test_nothing_is_left_of_a_wire(wire):
    with pytest.raises(ZeroDivisionError), lay_wire(2) as other:
        assert all(name in list_namespaces() for name in other.names + wire.names)
        raise ZeroDivisionError
    assert not any(name in list_namespaces() for name in other.names)
    assert all(name in list_namespaces() for name in wire.names)
    wire.remove()
    assert not any(name in list_namespaces() for name in wire.names)


def test_where_there_are_no_namespaces_the_reason_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchmarkError, match="No such file or directory: 'ip'"), lay_wire(2):
        pass


def run_wires_benchmark(path: Path, links: str) -> Record:
    wires.main([*TINY, "--links", links, "--out", str(path)])
    record = Record.read(path)
    assert [result.name for result in record.results] == [f"wires/{links}/bf16/{rate}" for rate in ("unlimited", "1")]
    return record


@pytest.mark.slow
@pytest.mark.world
def test_plans_are_compared_over_links_of_shared_memory(tmp_path, capsys):
    record = run_wires_benchmark(tmp_path / "record.json", "shared")
    assert "beside plain torch's" in record.results[0].checked
    zero3, hpz = (record.results[0].values[f"npuzero {plan}"]["carried_bytes"] for plan in ("zero3", "hpz"))
    assert zero3 / hpz == pytest.approx(4.5 / 2, rel=0.05), "a ring thrice, or half of it twice; and control messages"
    for plan in ("hpz", "zero++", "thin"):
        values = record.results[0].values[f"npuzero {plan}"]
        assert values["carried_bytes"] == pytest.approx(values["planned_bytes"], rel=0.05), plan
    assert "MB planned" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.world
def test_plans_are_compared_over_a_wire(wire, tmp_path):
    wire.remove()  # it was to see whether there can be one
    record = run_wires_benchmark(tmp_path / "record.json", "namespaces")
    zero3, hpz = (record.results[0].values[f"npuzero {plan}"]["carried_bytes"] for plan in ("zero3", "hpz"))
    assert zero3 / hpz == pytest.approx(5.0 / 3.5, rel=0.15), "gloo's ring, and to each rank what it sums; with headers"
    assert wires.PEERS[0] not in record.results[0].seconds


def wires_result(rate: str, seconds: dict[str, float], links: str = "namespaces") -> Result:
    return Result(
        f"wires/{links}/bf16/{rate}", "a step, bf16", "npuzero zero3", "checked",
        {"links": links, "precision": "bf16", "gbit_per_s": None if rate[0] == "u" else float(rate), "missing": {}},
        "rounds", {name: [value] * 3 for name, value in seconds.items()}, dict.fromkeys(seconds, 1),
        dict.fromkeys(seconds), {name: {"carried_bytes": 1e6} for name in seconds},
    )  # fmt: skip


def test_the_goals_are_of_one_rate_and_a_picture_of_all(tmp_path):
    results = [
        wires_result(
            rate, {"npuzero zero3": 1.8 * slow, "npuzero hpz": slow, "npuzero thin": 0.4 * slow, "deepspeed-3": 2.0}
        )
        for rate, slow in (("unlimited", 0.1), ("1", 1.0), ("0.1", 10.0))
    ]
    rows = figures.figure_groups({each.name: each for each in results})["wires"]
    assert [(against, value) for _, against, value, _ in rows] == [("hpz", "2.50 ✓"), ("zero3", "4.50 ✓")]
    assert picture.rate_points(results, "npuzero hpz") == [(0.1, 10.0), (1.0, 1.0), (100.0, 0.1)]
    assert picture.summarize_wires(results) == "Over 1 Gbit/s a step of thin is 2.5 times as fast as one of hpz"
    text = wires.format_results(results)
    assert "thin beside hpz at 1: 2.50 times as fast, goal 2.0" in text and "deepspeed-3" in text
    picture.plot_wires([*results, wires_result("1", {"npuzero hpz": 1.0}, "shared")], tmp_path / "wires.png")
    assert (tmp_path / "wires.png").stat().st_size > 10_000
