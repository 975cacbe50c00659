"""Builds the libraries that stand for CANN's, and loads them, so that torch_npu's find them by their names.

    python tests/npu/fake/libraries.py FOLDER     builds them there

The real torch_npu is linked against these names; whoever has loaded a library of that name before is whom the dynamic
loader takes. So nothing needs LD_LIBRARY_PATH, and nothing of CANN is needed.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
#: Where they are built unless a folder is given.
BUILT = ROOT / "build" / "fake-npu"

_COMPILE = ("g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-pthread")
#: By name, in the order in which they are loaded: sources. The empty ones only need to be there; what torch_npu looks
#: up in them, it finds in libascendcl.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "libascendcl.so": ("ascendcl.cpp", "refused.cpp"),
    "libhccl.so": ("hccl.cpp",),
    **{f"lib{name}.so": () for name in ("acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")},
}


def build(folder: Path = BUILT) -> Path:
    """Compiles what is older than its sources; returns the folder. Processes that build at once take turns."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max(path.stat().st_mtime for path in HERE.iterdir())
        for name, sources in LIBRARIES.items():
            target = folder / name
            if not target.exists() or target.stat().st_mtime < newest:
                _compile(folder, name, sources)
    return folder


def _compile(folder: Path, name: str, sources: tuple[str, ...]) -> None:
    below = [] if name == "libascendcl.so" else ["-Wl,--no-as-needed", f"-L{folder}", "-lascendcl"]
    inputs = [str(HERE / source) for source in sources] or ["-xc++", os.devnull]
    command = [*_COMPILE, f"-I{ROOT / 'csrc'}", f"-Wl,-soname,{name}", *inputs, *below, "-ldl", "-lrt"]
    subprocess.run([*command, "-o", str(folder / name)], check=True)


@functools.cache
def kernels(folder: Path = BUILT) -> Path:
    """The emulated kernels' library, by `npuzero build-npu` with a CANN whose compiler makes them; it is cached."""
    variables = {"ASCEND_HOME_PATH": str(HERE / "cann"), "XDG_CACHE_HOME": str(build(folder) / "cache")}
    newest = max(path.stat().st_mtime for path in (*HERE.glob("*.*"), *(HERE.parent / "emulator").iterdir()))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for library in folder.glob("cache/npuzero/npu/*/*.so"):
            if library.stat().st_mtime < newest:
                library.unlink()
        command = [sys.executable, "-m", "npuzero", "build-npu"]
        done = subprocess.run(command, env={**os.environ, **variables}, check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.splitlines()[0].removeprefix("there already: "))


def load(folder: Path = BUILT) -> None:
    """Makes this process's torch_npu a binding of the fake device; before torch_npu is imported."""
    for name in LIBRARIES:
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
