"""``npuzero build-npu``: compile the npu kernels with this machine's CANN."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from npuzero import cann
from npuzero.config import Toolkit, build_child_environment, find_toolkit
from npuzero.device import kernels
from npuzero.errors import ConfigError, KernelUnavailable

_EPILOG = f"""\
Needs CANN {cann.OLDEST} or later (ASCEND_HOME_PATH, which its set_env.sh sets), cmake and make; neither an NPU nor
torch_npu. The library goes into the user's cache, by release of CANN, architecture and text of the sources, and is
found there by the next process, before one of the installation. One library serves Atlas A2 and A3: --soc rarely needs
a value. Emulated and binding tested; not yet run on NPU hardware."""

# A2: Ascend910B1 and so on; A3: Ascend910_9392 and so on. Other names with Ascend910 are older processors.
_PROCESSORS = re.compile(r"Ascend910(B[1-9]|_93)[\w-]*")
_QUOTED_LINES = 30
# As the extension opens it, in a process that has not loaded any CANN library.
_LOAD = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW | os.RTLD_LOCAL)"


def add_build_npu_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "build-npu",
        help="compile the npu kernels with this machine's CANN",
        description="Compiles the npu kernels with this machine's CANN, unless that has been done.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"for {cann.LIBRARY} (the user's cache)")
    parser.add_argument("--arch", default=cann.ARCHITECTURE, help=f"of the processor ({cann.ARCHITECTURE})")
    parser.add_argument(
        "--soc",
        default=cann.PROCESSOR,
        help=f"its name, for CANN before 9.0 ({cann.PROCESSOR}): on A2 Ascend and what `npu-smi info` calls Name; on "
        "A3 Chip Name, _ and NPU Name of `npu-smi info -t board -i ID -c CHIP`, as Ascend910_9392",
    )
    parser.set_defaults(run=run_npu_build)


def run_npu_build(options: argparse.Namespace) -> str:
    """Return the command's output."""
    toolkit = find_toolkit("cann")
    if toolkit is None:
        raise ConfigError(
            "npuzero build-npu",
            expected=f"CANN {cann.OLDEST} or later",
            got="none in ASCEND_HOME_PATH, nor where its installer puts it",
            do="Install the CANN toolkit, and source its set_env.sh.",
        )
    if not _PROCESSORS.fullmatch(options.soc):
        raise ConfigError(
            "npuzero build-npu: --soc",
            expected="an Atlas A2 or A3, as Ascend910B3 or Ascend910_9392",
            got=options.soc,
            do="Leave it out: one library serves them all.",
        )
    target = options.out / cann.LIBRARY if options.out else kernels.cached_library_path(toolkit, options.arch)
    there = target.is_file() and not options.out
    if not there:
        _build_library(toolkit, target, options.arch, options.soc)
    release = toolkit.version or "(version unknown)"
    lines = [
        f"there already: {target}" if there else str(target),
        f"built with CANN {release} in {toolkit.root} for {options.arch}, by "
        f"{cann.get_build_method(toolkit.root, toolkit.version)}",
        *_find_build_warnings(toolkit, target),
    ]
    return "\n".join(lines)


def _build_library(toolkit: Toolkit, target: Path, architecture: str, processor: str) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        raise ConfigError("npuzero build-npu", expected="cmake", got="none in PATH", do="pip install cmake")
    try:
        cann.build_npu_kernels(
            toolkit.root, kernels.kernel_sources(), target, cmake, build_child_environment({}), architecture, processor
        )
    except cann.CannotBuild as error:
        raise KernelUnavailable(
            "npuzero build-npu",
            expected=f"CANN {toolkit.version or '(version unknown)'} in {toolkit.root} to compile the kernels",
            got=_quote_failure(str(error)),
            do=f"All that was said is in {cann.get_failure_file(target)}; please report it.",
        ) from error


def _quote_failure(text: str) -> str:
    """Return the reason, and the output from the first error on."""
    head, *lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if "error" in line.lower()), -_QUOTED_LINES)
    return "\n".join([head, *lines[first:][:_QUOTED_LINES]])


def _find_build_warnings(toolkit: Toolkit, library: Path) -> list[str]:
    try:
        package: str | None = metadata.version("torch_npu")
    except metadata.PackageNotFoundError:
        package = None
    loaded = subprocess.run([sys.executable, "-c", _LOAD, str(library)], capture_output=True, text=True)
    found = []
    if too_old := cann.find_cann_mismatch(toolkit.version, package):
        found.append(f"{too_old['why']}. {too_old['do']}")
    if loaded.returncode:
        found.append(f"it cannot be loaded here, as where there is no driver: {loaded.stderr.strip().splitlines()[-1]}")
    return [f"warning: {text}" for text in found]
