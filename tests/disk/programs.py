"""Programs of these tests around sources of csrc/io: built for this processor, or for one that is emulated."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"

#: By processor, its compiler and what programs run in: as `make test-aarch64` has them.
PROCESSORS = {
    "here": ("g++", ()),
    "aarch64": ("aarch64-linux-gnu-g++", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")),
}


def build_cpp_program(
    name: str, sources: Sequence[str], folder: Path, processor: str = "here", flags: Sequence[str] = ("-O3",)
) -> list[str]:
    """The command that runs ``name``.cpp, built in ``folder``; skips where there is no tool for it."""
    compiler, emulator = PROCESSORS[processor]
    for tool in (compiler, *emulator[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    files = [HERE / f"{name}.cpp", *(CSRC / "io" / f"{source}.cpp" for source in sources)]
    common = ("-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", "-pthread")
    program = str(folder / name)
    done = subprocess.run([compiler, *common, *flags, *map(str, files), "-o", program], capture_output=True, text=True)
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip("the compiler has no such sanitizer")
    assert done.returncode == 0, done.stderr
    return [*emulator, program]
