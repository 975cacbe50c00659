"""Optimizer states on a disk, under a cap on memory: the same losses as with all of them in memory, and a picture.

    make demo-offload              DISK=/mnt/nvme RANKS=1 ARGS="--dim 1024" make demo-offload

Two runs of train.py under stage 3. The first keeps everything in memory; it tells how much that takes. The second has
its states in files on ``--disk``: npuzero may hold a quarter of their size on the host (``host_bytes``), and the
processes have a cap: what the first run took, less the states, plus that quarter. The kernel holds them to it where a
control group can be made (Linux, as root), else their memory is looked at, ten times a second, and a run that exceeds
the cap is ended. Leaves in ``--out``:

    summary.json    result.json of both runs, their memory over time, the cap, the difference between their losses
    offload.png     losses beside memory
    <run>/          what each run left
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo import TRAIN, Result
from plot import draw_offload, plot

from npuzero.bench.group import open_control_group

MODEL = ("--dim", "768", "--layers", "12", "--heads", "12", "--steps", "40", "--batch", "2", "--seq", "64")
#: Of the states' bytes, so many may be in memory at once: what is read, updated and written.
SHARE = 0.25
CHUNKS = 16  # as many fit into that: several are under way at a time
EVERY_S = 0.1


@dataclass
class Watched:
    """A run of train.py, and what its processes held while it ran.

    Attributes:
        seconds, held: when memory was looked at, and bytes then: each page once, whoever shares it.
        by_kernel: whether the kernel held it to its cap.
    """

    result: Result = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    by_kernel: bool = False

    @property
    def peak(self) -> int:
        return max(self.held, default=0)


def family(root: int) -> list[int]:
    """The process ``root`` and those that it has started, and they."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = path.read_text().rpartition(")")[2].split()  # proc(5): the name before it may have spaces
            parents[int(path.parent.name)] = int(words[1])
    found = [root]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def memory_of(root: int) -> int:
    """Bytes that a family of processes holds: the sum of their proportional set sizes."""
    total = 0
    for member in family(root):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def run(name: str, options: argparse.Namespace, arguments: list[str], cap: int | None = None) -> Watched:
    """Train, and look at the memory that it takes.

    Raises:
        SystemExit: the run failed, or took more than ``cap`` bytes.
    """
    out = options.out / name
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    command = [*launcher, str(TRAIN), "--preset", "zero3", "--no-export", "--out", str(out), *MODEL, *arguments]
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.ranks))}
    variables = {**threads, **os.environ, "NPUZERO_NVME_PATHS": str(options.disk)}
    watched = Watched()
    with open_control_group(cap) if cap is not None else contextlib.nullcontext() as capped:
        watched.by_kernel = capped is not None
        if capped is not None:
            command = capped.command(command)
        begin_s = time.perf_counter()
        process = subprocess.Popen(command, env=variables, start_new_session=True)
        try:
            while process.poll() is None:
                watched.held.append(memory_of(process.pid))
                watched.seconds.append(time.perf_counter() - begin_s)
                if cap is not None and watched.peak > cap:
                    raise SystemExit(f"{name}: {watched.peak / 1e6:.0f} MB in memory, and a cap of {cap / 1e6:.0f} MB")
                time.sleep(EVERY_S)
        finally:
            for member in (
                family(process.pid) if process.poll() is None else ()
            ):  # torchrun's ranks lead groups of their own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise SystemExit(f"demo-offload: the run {name!r} ended with exit code {process.returncode}")
    watched.result = json.loads((out / "result.json").read_text())
    return watched


def states_bytes(result: Result) -> int:
    """What the optimizer states of all ranks take."""
    return int(result["ranks"] * result["bytes_held"]["predicted"]["states"])


def difference_of(one: Result, other: Result) -> float:
    """The largest difference between two runs' losses, held-out ones included."""
    series = [[*result["losses"], result["held_out_loss"]] for result in (one, other)]
    return max(abs(float(a) - float(b)) for a, b in zip(*series, strict=True))


def summarize(runs: dict[str, Watched], cap: int) -> dict[str, Any]:
    """What summary.json holds."""
    resident, far = (each.result for each in runs.values())
    return {
        "runs": {name: {**vars(each), "peak": each.peak} for name, each in runs.items()},
        "states_bytes": states_bytes(resident),
        "states_cap_bytes": int(SHARE * states_bytes(resident)),
        "cap_bytes": cap,
        "difference": difference_of(resident, far),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train with optimizer states on a disk. Further options go to train.py as they are.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--disk", type=Path, default=Path("runs/offload/disk"), help="folder on an NVMe, or other disk")
    parser.add_argument("--out", type=Path, default=Path("runs/offload"), help="folder for the results")
    options, arguments = parser.parse_known_args()
    options.disk.mkdir(parents=True, exist_ok=True)

    resident = run("resident", options, arguments)
    states = states_bytes(resident.result)
    room = int(SHARE * states)
    cap = resident.peak - states + room
    print(
        f"states of {states / 1e6:.0f} MB on {options.disk}; for them there are {room / 1e6:.0f} MB of memory",
        flush=True,
    )
    far = ["--states", "nvme", "--host-bytes", str(room // options.ranks)]
    chunk = ["--chunk-bytes", str(room // options.ranks // CHUNKS)]
    runs = {"resident": resident, "nvme": run("nvme", options, [*arguments, *far, *chunk], cap)}

    summary = summarize(runs, cap)
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot(summary, options.out / "offload.png", draw_offload)
    peaks = ", ".join(f"{name} {each.peak / 1e6:.0f} MB" for name, each in runs.items())
    held = "the kernel's" if runs["nvme"].by_kernel else "watched"
    print(f"in memory at most: {peaks}; cap {cap / 1e6:.0f} MB, {held}")
    print(f"largest difference between the losses: {summary['difference']:g}")
    print(f"left in {options.out}: summary.json, offload.png")
    if summary["difference"]:
        raise SystemExit("demo-offload: states on a disk do not train alike to the bit; see summary.json")


if __name__ == "__main__":
    main()
