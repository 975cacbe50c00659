"""The demo of states on a disk: what it sees of memory, and its picture; and, slow, the demo itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import offload
import pytest
from plot import draw_offload

from npuzero.cli.output.palette import STYLE

#: Lives until its input ends, with so many bytes that it has written into.
HOLDER = "import sys; held = bytearray(64 << 20); print(flush=True); sys.stdin.read()"


def test_memory_is_of_a_process_and_of_those_that_it_starts() -> None:
    shell = ["sh", "-c", f"{sys.executable} -c '{HOLDER}'; :"]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == b"\n"
        assert len(offload.family(process.pid)) == 2
        assert 64 << 20 < offload.memory_of(process.pid) < 128 << 20
        process.stdin.close()
    assert offload.memory_of(process.pid) == 0


def watched_result(*losses: float, peak: int = 900) -> offload.Watched:
    result: dict[str, Any] = {
        "options": {"precision": "fp32"},
        "parameters": 1000,
        "ranks": 2,
        "losses": list(losses),
        "bytes_held": {"predicted": {"states": 200_000_000}},
        "held_out_loss": losses[-1],
    }
    return offload.Watched(result, [0.1, 0.2], [10_000_000, peak * 1_000_000])


def test_the_picture_says_what_is_where_and_that_losses_are_equal() -> None:
    summary = offload.summarize(
        {"resident": watched_result(3.0, 2.0), "nvme": watched_result(3.0, 2.0, peak=500)}, 600_000_000
    )
    assert summary["difference"] == 0 and summary["states_bytes"] == 400_000_000
    with matplotlib.rc_context(STYLE):
        figure = draw_offload(summary)
    title = "Optimizer states of 400 MB on a disk, 100 MB of memory for them: the same losses"
    assert figure.get_suptitle().strip() == title
    labels = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert labels == ["resident, at most 900 MB", "nvme, at most 500 MB", "cap, 600 MB"]


def test_the_least_difference_is_seen() -> None:
    runs = {"resident": watched_result(3.0, 2.0), "nvme": watched_result(3.0, 2.0 + 2**-51)}
    assert offload.summarize(runs, 1)["difference"] == 2**-51


@pytest.mark.slow
@pytest.mark.world
def test_the_demo(tmp_path: Path) -> None:
    """States several times as large as the memory for them; more than its cap ends it."""
    sizes = ["--dim", "768", "--layers", "8", "--steps", "4"]
    command = [
        sys.executable,
        offload.__file__,
        "--ranks",
        "2",
        "--out",
        str(tmp_path),
        "--disk",
        str(tmp_path),
        *sizes,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["difference"] == 0 and summary["runs"]["nvme"]["peak"] <= summary["cap_bytes"]
    assert (tmp_path / "offload.png").read_bytes().startswith(b"\x89PNG")
