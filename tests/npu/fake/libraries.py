"""Builds the libraries that stand for CANN's, and folders as its installer leaves them; loads the libraries.

    python tests/npu/fake/libraries.py FOLDER     builds the libraries there

The real torch_npu is linked against these names; whoever has loaded a library of that name before is whom the dynamic
loader takes. So nothing needs LD_LIBRARY_PATH, and nothing of CANN is needed.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
#: What a CANN is made of here.
CANN = HERE / "cann"
#: Where they are built unless a folder is given.
BUILT = ROOT / "build" / "fake-npu"

_COMPILE = ("g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-pthread")
#: By name, in the order in which they are loaded: sources. The empty ones only need to be there; what torch_npu looks
#: up in them, it finds in libascendcl.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "libascendcl.so": ("ascendcl.cpp", "pinned.cpp", "refused.cpp"),
    "libhccl.so": ("hccl.cpp",),
    **{f"lib{name}.so": () for name in ("acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")},
}
#: What generated launches of kernels call beside libascendcl: nobody loads these before the kernels' library does.
CALLED = ("runtime", "profapi", "error_manager", "mmpa")

MACHINE = f"{platform.machine()}-linux"
#: Where things lie in a CANN: in ascend-toolkit/latest until 8.3, and in cann since 8.5.
LAYOUTS = {
    "latest": {
        "bisheng": "compiler/ccec_compiler/bin",
        "cann-objdump": "compiler/ccec_compiler/bin",
        "ascendc.cmake": "compiler/tikcpp/ascendc_kernel_cmake",
        "libraries": "lib64",
    },
    "cann": {
        "bisheng": "bin",
        "cann-objdump": f"{MACHINE}/ccec_compiler/bin",
        "ascendc.cmake": f"{MACHINE}/tikcpp/ascendc_kernel_cmake",
        "libraries": f"{MACHINE}/lib64",
    },
}
#: Files of a CANN that look as if they told its version, before and behind the one that does.
DECOYS = {
    "compiler/version.info": "Version=7.7.0.1.238\nversion_dir=8.1.RC1\n",
    "opp_kernel/ascend_kernels_install.info": "package_name=Ascend-cann-kernels-910b\nversion=7.7.0.1.238\n",
    f"{MACHINE}/ascend_ops_install.info": "version=7.6.0.1.220\n",
    f"{MACHINE}/runtime_version.info": "version=7.7.0.1.238\n",
}


def build_fake_cann(folder: Path = BUILT) -> Path:
    """Compiles what is older than its sources; returns the folder. Processes that build at once take turns."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max(path.stat().st_mtime for path in (*HERE.glob("*.*"), *CANN.iterdir()))
        linked = ("-Wl,--no-as-needed", f"-L{folder}", "-lascendcl")
        inputs = {
            name: (*(sources or ("-xc++", os.devnull)), *(linked if name != "libascendcl.so" else ()))
            for name, sources in LIBRARIES.items()
        } | {f"lib{name}.so": (f"-DNAME=fake_{name}", "cann/called.cpp") for name in CALLED}
        for name, words in inputs.items():
            target = folder / name
            if not target.exists() or target.stat().st_mtime < newest:
                command = [*_COMPILE, f"-I{ROOT / 'csrc'}", f"-Wl,-soname,{name}", *words, "-ldl", "-lrt"]
                subprocess.run([*command, "-o", str(target)], check=True, cwd=HERE)
    return folder


def make_cann_folder(folder: Path, version: str = "9.0.0", layout: str = "cann") -> Path:
    """Makes ``folder`` a CANN of this version, where it is not: compilers, libraries, files that tell versions."""
    places = LAYOUTS[layout]
    links = {f"{places[name]}/{name}": CANN / name for name in ("bisheng", "cann-objdump", "ascendc.cmake")}
    links |= {f"{places['libraries']}/lib{name}.so": BUILT / f"lib{name}.so" for name in ("ascendcl", *CALLED)}
    info = f"package_name=Ascend-cann-toolkit\ninnerversion=V100R001C25\nversion={version}\narch=any\n"
    texts = DECOYS | {f"{MACHINE}/ascend_toolkit_install.info": info}
    for path in (folder / name for name in (*links, *texts)):
        path.parent.mkdir(parents=True, exist_ok=True)
    for name, target in links.items():
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(target)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


@functools.cache
def build_fake_kernels(folder: Path = BUILT) -> Path:
    """The emulated kernels' library, by `npuzero build-npu` with a CANN whose compiler makes them; it is cached."""
    variables = {"ASCEND_HOME_PATH": str(folder / "cann"), "XDG_CACHE_HOME": str(build_fake_cann(folder) / "cache")}
    sources = (*HERE.glob("*.*"), *CANN.iterdir(), *(HERE.parent / "emulator").rglob("*.*"))
    newest = max(path.stat().st_mtime for path in sources)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_cann_folder(folder / "cann")
        for library in folder.glob("cache/npuzero/npu/*/*.so"):
            if library.stat().st_mtime < newest:
                library.unlink()
        command = [sys.executable, "-m", "npuzero", "build-npu"]
        done = subprocess.run(command, env={**os.environ, **variables}, check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.splitlines()[0].removeprefix("there already: "))


def load_fake_cann(folder: Path = BUILT) -> None:
    """Makes this process's torch_npu a binding of the fake device; before torch_npu is imported."""
    for name in LIBRARIES:
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    build_fake_cann(Path(sys.argv[1]))
