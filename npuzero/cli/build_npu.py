"""``npuzero build-npu``: compiles the npu kernels with this machine's CANN."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npuzero.config import Toolkit, find_toolkit
from npuzero.device import kernels
from npuzero.errors import ConfigError, KernelUnavailable

_EPILOG = """\
Needs CANN 8.1 or later (ASCEND_HOME_PATH, which its set_env.sh sets), cmake and make; neither an NPU nor torch_npu. The
library goes into the user's cache, by release of CANN, architecture and text of the sources, and is found there by the
next process. Emulated and binding tested; not yet run on NPU hardware."""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "build-npu",
        help="compile the npu kernels with this machine's CANN",
        description="Compiles the npu kernels with this machine's CANN, unless that has been done.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"for {kernels.LIBRARY} (the user's cache)")
    parser.add_argument("--arch", default=kernels.ARCHITECTURE, help=f"of the processor ({kernels.ARCHITECTURE})")
    parser.add_argument("--soc", default="Ascend910B1", help="its name, for CANN before 9.0 (Ascend910B1)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """The command's output."""
    toolkit = find_toolkit("cann")
    if toolkit is None:
        raise ConfigError(
            "npuzero build-npu",
            expected="CANN 8.1 or later",
            got="none in ASCEND_HOME_PATH, nor where its installer puts it",
            do="Install the CANN toolkit, and source its set_env.sh.",
        )
    target = options.out / kernels.LIBRARY if options.out else kernels.cached(toolkit, options.arch)
    if target.is_file() and not options.out:
        return f"there already: {target}"
    build(toolkit, target, options.arch, options.soc)
    return f"{target}\nbuilt with CANN {toolkit.version or '(version unknown)'} in {toolkit.root} for {options.arch}"


def build(toolkit: Toolkit, target: Path, architecture: str, soc: str) -> None:
    """Compiles the library; what is at ``target`` is whole, whatever ends this process.

    Raises:
        ConfigError: there is no cmake.
        KernelUnavailable: the compiler refuses.
    """
    cmake = shutil.which("cmake")
    if cmake is None:
        raise ConfigError("npuzero build-npu", expected="cmake", got="none in PATH", do="pip install cmake")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        configure = [
            *(cmake, "-S", str(kernels.sources()), "-B", f"{folder}/build", f"-DASCEND_HOME_PATH={toolkit.root}"),
            *(f"-DNPUZERO_OUTPUT={folder}", f"-DNPUZERO_NPU_ARCH={architecture}", f"-DNPUZERO_SOC_VERSION={soc}"),
        ]
        _call(configure, toolkit)
        _call([cmake, "--build", f"{folder}/build"], toolkit)
        (Path(folder) / kernels.LIBRARY).replace(target)


def _call(command: Sequence[str], toolkit: Toolkit) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise KernelUnavailable(
            "npuzero build-npu",
            expected=f"CANN {toolkit.version} in {toolkit.root} to compile the kernels",
            got=f"`{' '.join(command)}` failed:\n{done.stdout[-3000:]}",
            do="See the compiler's first error; please report it with CANN's version.",
        )
