"""What a disk can do is told as it is: ``npuzero check --nvme``, and the stream that the benchmark measures."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
import torch

from benchmarks.disk import measure_folder
from npuzero import _native
from npuzero.bench import Effort, run_benchmark
from npuzero.bench.suites.disk import disk_step_seconds, stream_store
from npuzero.cli import main
from npuzero.memory.file import BLOCK, FileStore
from npuzero.plan import FAR_CHUNK_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if _native.io.is_memory(str(tmp_path)):
        pytest.skip("the temporary folder is in memory")
    return tmp_path


def test_check_tells_what_a_disk_can_do(folder, capsys):
    assert main(["check", "--quick", "--nvme", str(folder), "--parameters", "2B"]) == 0
    printed = capsys.readouterr()
    for name in ("write", "read", "read [+] write", "CRC32C"):
        assert float(re.search(rf"^{name} +([\d.]+)$", printed.out, re.MULTILINE)[1]) > 0
    assert str(folder) in printed.out and "2,000,000,000 parameters" in printed.out
    assert re.search(r"^fp32 +[\d.]+$", printed.out, re.MULTILINE)
    assert "page cache" in printed.out and printed.err.count("GB/s") == 4, "what is measured is told as it goes"
    assert not list(folder.iterdir())


def test_check_says_that_bytes_go_through_the_cache(folder, capsys):
    _native.io.inject(_native.io.Call.direct, error=errno.EINVAL)
    try:
        assert main(["check", "--quick", "--nvme", str(folder)]) == 0
    finally:
        _native.io.heal()
    assert "no O_DIRECT" in capsys.readouterr().out


def test_check_refuses_what_is_no_disk(folder, capsys):
    assert main(["check", "--nvme", str(folder / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_step_moves_all_states_both_ways():
    n = 1 << 26
    seconds = disk_step_seconds(n, 1.0)
    assert seconds["fp32"] == pytest.approx(2 * 8 * n / 1e9, rel=1e-3), "two moments; the parameters rest elsewhere"
    assert seconds["bf16"] == pytest.approx(2 * 12 * n / 1e9, rel=1e-3), "and masters"
    assert disk_step_seconds(n, 4.0)["bf16"] == seconds["bf16"] / 4


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_a_stream_leaves_all_bytes_where_they_were(folder, chunks, slots):
    store = FileStore([folder], chunks * 2 * BLOCK)
    data = store.aligned(store.nbytes)
    data.random_()
    store.write(0, data).wait()
    stream_store(store, [store.aligned(2 * BLOCK) for _ in range(slots)])
    back = store.aligned(store.nbytes)
    store.read(0, back).wait()
    assert torch.equal(back, data)
    assert store.moved == {"read": 2 * store.nbytes, "write": 2 * store.nbytes}


def test_the_benchmark_measures_the_same_bytes_thrice(folder):
    result = run_benchmark(measure_folder(folder, 2 * FAR_CHUNK_BYTES, 2), Effort.quick())
    assert set(result.nbytes.values()) == {4 * FAR_CHUNK_BYTES} and len(result.nbytes) == 3
