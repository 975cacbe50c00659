"""Whether an installed npuzero is whole: `make test-wheel`. It needs torch and numpy, and no tools of tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

import npuzero

README = Path(__file__).resolve().parents[2] / "README.md"
SCRIPTS = Path(sysconfig.get_path("scripts"))


def run_installed(folder: str, *command: str) -> str:
    """What a command prints, in `folder`; other commands and packages are this environment's."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, f"{command}: {ended.stdout[-4000:]}{ended.stderr[-4000:]}"
    return ended.stdout


def main() -> None:
    installed = Path(npuzero.__file__).resolve()
    assert installed.is_relative_to(Path(sysconfig.get_path("platlib")).resolve()), f"{installed} is not installed"
    assert metadata.version("npuzero") == npuzero.__version__
    with tempfile.TemporaryDirectory() as folder:
        facts = json.loads(run_installed(folder, "npuzero", "info", "--json"))
        assert len(facts["openmp"]) == 1, f"a process has one OpenMP runtime, not {facts['openmp']}"
        assert facts["isa"]["chosen"] == facts["isa"]["supported"][-1], facts["isa"]
        run_installed(folder, "npuzero", "check", "--quick")
        question = "plan --parameters 7B --on 8x910b-64g --seq 4096 --tokens 0.5M"
        assert "zero3" in run_installed(folder, "npuzero", *question.split())
        program = re.search(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE)
        assert program is not None
        (Path(folder) / "train.py").write_text(program[1])
        printed = run_installed(folder, "torchrun", "--standalone", "--nproc-per-node", "2", "train.py")
        assert {"0", "1"} == set(re.findall(r"rank (\d) of 2, step 29", printed)), printed
    versions = facts["versions"]
    print(f"npuzero {versions['npuzero']}: whole, beside torch {versions['torch']}, Python {versions['python']}")
    print(f"instruction set {facts['isa']['chosen']}, OpenMP of {facts['openmp'][0]}")


if __name__ == "__main__":
    main()
