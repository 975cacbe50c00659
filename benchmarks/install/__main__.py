"""Seconds to install and to import. From the repository's root, or installed:

    python -m benchmarks.install --out runs/bench/install.json
    python -m benchmarks.install --deepspeed PYTHON      # and DeepSpeed's CPU Adam, which is compiled at first use

``pip install .`` runs as for a user, in a new virtual environment that sees this one's torch; its time includes the
downloads of build dependencies. ``pip wheel`` without build isolation times the build alone. Both run once; the
installed package must work before a figure is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from npuzero.bench import Benchmark, Contender, Effort, Record, format_command, machine_fingerprint, run_benchmark
from npuzero.config import build_child_environment
from npuzero.errors import BenchmarkError

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 900.0
_ADAM = """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
parameter = torch.nn.Parameter(torch.ones(1000))
optimizer = DeepSpeedCPUAdam([parameter], lr=0.1)
parameter.grad = torch.ones(1000)
optimizer.step()
assert parameter.mean() < 1
"""


def run_command(command: Sequence[str], variables: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command and return its stdout.

    Raises:
        BenchmarkError: it failed, or took too long.
    """
    try:
        done = subprocess.run(
            command, env=build_child_environment(variables or {}), cwd=cwd, timeout=_TIMEOUT_S, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        raise BenchmarkError(
            shlex.join(command), expected="success", got=f"status {error.returncode}", do=error.stderr[-2000:]
        ) from None
    except subprocess.TimeoutExpired:
        raise BenchmarkError(
            shlex.join(command), expected=f"an end within {_TIMEOUT_S:g} s", got="none", do="See what it waits for."
        ) from None
    return done.stdout


def time_command(command: Sequence[str], variables: Mapping[str, str] | None = None, cwd: Path | None = None) -> float:
    """Return the seconds that a command takes."""
    begin = time.perf_counter()
    run_command(command, variables, cwd)
    return time.perf_counter() - begin


def make_environment(folder: Path) -> str:
    """Create a virtual environment that sees the packages of this one; return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    seen = Path(run_command([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    (seen / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(python)


def time_install(scratch: Path, deepspeed: str | None) -> Benchmark:
    """Time everything between a clone and the first step, once."""
    python = make_environment(scratch / "venv")
    pip = ["-m", "pip", "--disable-pip-version-check", "--no-input"]
    wheels = scratch / "wheels"
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels)]
    once: dict[str, tuple[list[str], dict[str, str]]] = {
        "pip install .": ([python, *pip, "install", "--no-deps", "--force-reinstall", str(ROOT)], {}),
        "the build alone": ([sys.executable, *pip, *build, str(ROOT)], {}),
    }
    if deepspeed is not None:
        variables = {
            "PATH": os.pathsep.join((str(Path(deepspeed).parent.absolute()), os.environ["PATH"])),  # it looks for ninja
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(scratch / "extensions"),
        }
        once["DeepSpeed CPU Adam at first use"] = ([deepspeed, "-c", _ADAM], variables)
    found = {name: time_command(command, variables) for name, (command, variables) in once.items()}
    (wheel,) = wheels.glob("npuzero-*.whl")

    def check() -> str:
        facts = json.loads(run_command([python, "-m", "npuzero", "info", "--json"], cwd=scratch))
        if not all(kinds["cpu"] for kinds in facts["kernels"].values()):
            raise BenchmarkError(
                "npuzero info", expected="every kernel", got=str(facts["kernels"]), do="See the build."
            )
        return "the installed package has every kernel of the CPU"

    contenders = [Contender(name, lambda count, name=name: found[name]) for name in found]  # type: ignore[misc]
    benchmark = Benchmark("install", "install into an environment that has torch", contenders, "pip install .", check)
    contenders[0].values["wheel_bytes"] = wheel.stat().st_size
    return benchmark


def time_imports() -> Benchmark:
    """Time new processes that import npuzero, or only torch, which npuzero needs."""
    programs = {"import torch": "import torch", "import npuzero": "import npuzero"}
    contenders = [
        Contender(name, lambda count, program=program: time_command([sys.executable, "-c", program], cwd=ROOT))  # type: ignore[misc]
        for name, program in programs.items()
    ]
    return Benchmark("import", "import in a fresh process", contenders, "import torch", lambda: "both end well")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", metavar="PYTHON", help="of an environment that has DeepSpeed")
    parser.add_argument("--rounds", type=int, default=9, help="of imports")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/install.json"), metavar="FILE", help="for JSON")
    options = parser.parse_args()
    record = Record.begin("install", format_command(), machine_fingerprint())
    with tempfile.TemporaryDirectory() as scratch:
        once = Effort(least_rounds=1, most_rounds=1, warm_up=0)
        record.results.append(run_benchmark(time_install(Path(scratch), options.deepspeed), once))
    rounds = Effort(least_rounds=1, most_rounds=options.rounds, most_s=60.0, error=0.002, warm_up=1)
    record.results.append(run_benchmark(time_imports(), rounds))
    record.write(options.out)
    for result in record.results:
        for name in result.seconds:
            print(f"{name}: {sorted(result.seconds[name])[len(result.seconds[name]) // 2]:.2f} s")
    print(f"wheel: {record.results[0].values['pip install .']['wheel_bytes']:,} bytes")


if __name__ == "__main__":
    main()
