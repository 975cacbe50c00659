"""CANN, the toolkit of Ascend NPUs: its version, the matching torch_npu, and building the npu kernels with it.

Imports only the standard library: setup.py, which has neither torch nor npuzero, loads this file by path.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

#: The installer's default folders; the first since CANN 8.5.
FOLDERS = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest")
#: The CANN of the oldest torch_npu for torch 2.8, the oldest torch that npuzero supports.
OLDEST = "8.3.RC1"
#: Since this version bisheng launches kernels itself; before it, CANN's ascendc.cmake generates the launch code.
BISHENG_SINCE = "9.0.0.alpha"

#: torch_npu's published version table: since this torch_npu, this CANN.
PAIRS = (
    ("2.8.0", "8.3.RC1"),
    ("2.8.0.post2", "8.5.0"),
    ("2.8.0.post4", "9.0.0"),
    ("2.9.0", "8.5.0"),
    ("2.9.0.post2", "9.0.0"),
    ("2.9.0.post6", "9.1.0"),
    ("2.10.0", "9.0.0"),
    ("2.10.0.post4", "9.1.0"),
    ("2.11.0", "9.1.0"),
)

LIBRARY = "libnpuzero_kernels.so"
#: bisheng's name of Atlas A2 and A3, the architecture that the kernels are written for.
ARCHITECTURE = "dav-2201"
#: A processor of that architecture; the older build method requires one.
PROCESSOR = "Ascend910B1"

_STAGES = {"dev": -4, "alpha": -3, "beta": -2, "rc": -1, "post": 1}


class CannotBuild(Exception):
    """Report that the npu kernels cannot be built, and why, with the compiler's output if it ran."""


def find_cann_version(root: Path, machine: str = "") -> str | None:
    """Return the release of the CANN in ``root``, such as ``8.3.RC1``, ``9.0.0-beta.1`` or ``9.1.0``; None if unknown.

    CANN's installation guide names the source: ``version=`` in ``<machine>-linux/ascend_toolkit_install.info``. If the
    file for this machine (or for ``machine``, such as ``aarch64``) is missing, another machine's is used. Similar files
    exist in each package of a CANN, but hold that package's version.
    """
    own = f"{machine or platform.machine()}-linux"
    files = root.glob("*-linux/ascend_toolkit_install.info")
    for path in sorted(files, key=lambda path: (path.parent.name != own, path)):
        match = re.search(r"^version=\[?([\w.+-]+)", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        if match:
            return match.group(1)
    return None


def version_sort_key(release: str) -> tuple[tuple[int, ...], ...]:
    """Return a sort key for releases of CANN and torch_npu.

    The order is ``8.3.RC1.alpha002 < 8.3.RC1 < 8.3 == 8.3.0 < 8.5.0``.
    """
    words = re.findall(r"\d+|[a-z]+", release.lower().partition("+")[0])
    length = next((index for index, word in enumerate(words) if not word.isdigit()), len(words))
    numbers = [int(word) for word in words[:length]]
    while numbers and not numbers[-1]:
        numbers.pop()
    stages: list[tuple[int, ...]] = []
    for word in words[length:]:
        if word.isdigit() and stages:
            stages[-1] = (stages[-1][0], int(word))
        elif not word.isdigit():
            stages.append((_STAGES.get(word, 0), 0))
    return tuple(numbers), *stages, (0, 0)


def find_matching_cann(torch_npu: str) -> str | None:
    """Return the CANN that a ``torch_npu`` was published for, or needs at least, by PAIRS; None if unknown."""
    mine = version_sort_key(torch_npu)
    rows = [(version_sort_key(package), cann) for package, cann in PAIRS if version_sort_key(package) <= mine]
    own = [cann for package, cann in rows if package[0] == mine[0] or package == version_sort_key(PAIRS[-1][0])]
    return own[-1] if own else None


def find_cann_mismatch(release: str | None, torch_npu: str | None) -> dict[str, str] | None:
    """Return ``why`` a CANN is too old for a torch_npu, and what to ``do``; None if it is not, or if one is unknown."""
    wanted = find_matching_cann(torch_npu) if torch_npu else None
    if release is None or wanted is None or version_sort_key(release) >= version_sort_key(wanted):
        return None
    return {
        "why": f"torch_npu {torch_npu} is published for CANN {wanted}, and this is {release}",
        "do": "Install that CANN, or the torch_npu of this one: docs/npu.md, Versions.",
    }


def get_build_method(root: Path, release: str | None) -> str:
    """Return the build method for the CANN in ``root``: ``"bisheng"`` or ``"ascendc"``, by its ``release`` if known."""
    if release is not None:
        return "bisheng" if version_sort_key(release) >= version_sort_key(BISHENG_SINCE) else "ascendc"
    return "ascendc" if any(root.glob("*/tikcpp/ascendc_kernel_cmake/ascendc.cmake")) else "bisheng"


def get_failure_file(target: Path) -> Path:
    """Return the file with the reason why the library ``target`` is missing.

    It is next to ``target``; installers hide the output of a build.
    """
    return target.with_suffix(".txt")


def build_npu_kernels(
    root: Path,
    sources: Path,
    target: Path,
    cmake: str,
    variables: Mapping[str, str],
    architecture: str = ARCHITECTURE,
    processor: str = PROCESSOR,
) -> None:
    """Compile the kernels in the folder ``sources`` into the library ``target``, with the CANN in ``root``.

    ``variables`` are this process's environment; the variables that CANN's scripts need from its set_env.sh are added.

    An existing ``target`` is removed first and the new one is moved into place, so ``target`` is complete and built
    from these sources even if this process is killed.

    Raises:
        CannotBuild: ``root`` is not a CANN, or is too old, or its compiler fails. The file ``get_failure_file(target)``
            contains the reason with the compiler's output until a build succeeds.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        _compile_npu_kernels(root, sources, target, cmake, _build_environment(variables, root), architecture, processor)
    except (CannotBuild, OSError) as error:
        get_failure_file(target).write_text(f"{error}\n", encoding="utf-8")
        raise CannotBuild(str(error)) from error
    get_failure_file(target).unlink(missing_ok=True)


def _build_environment(variables: Mapping[str, str], root: Path) -> dict[str, str]:
    inside = ("bin", "ccec_compiler/bin", "compiler/ccec_compiler/bin")
    machine = f"{platform.machine()}-linux"
    tools = [path for name in inside for path in (root / name, root / machine / name) if path.is_dir()]
    path = os.pathsep.join([variables.get("PATH", os.defpath), *map(str, tools)])
    # An enclosing make would pass its flags to ours: with `make -i` a failing compiler would succeed.
    mine = {name: value for name, value in variables.items() if name != "MAKEFLAGS"}
    return {**mine, "ASCEND_HOME_PATH": str(root), "PATH": path}


def _compile_npu_kernels(
    root: Path, sources: Path, target: Path, cmake: str, variables: dict[str, str], architecture: str, processor: str
) -> None:
    # Build in a temporary folder next to the target: the final replace() is then atomic.
    if not root.is_dir():
        raise CannotBuild(f"there is no CANN in {root}, where ASCEND_HOME_PATH says")
    release = find_cann_version(root)
    if release is not None and version_sort_key(release) < version_sort_key(OLDEST):
        raise CannotBuild(f"the npu kernels need CANN {OLDEST} or later; found {release} in {root}")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        facts = {
            "ASCEND_HOME_PATH": root,
            "NPUZERO_CANN_VERSION": release or "unknown",
            "NPUZERO_NPU_WAY": get_build_method(root, release),
            "NPUZERO_NPU_ARCH": architecture,
            "NPUZERO_SOC_VERSION": processor,
            "NPUZERO_OUTPUT": folder,
        }
        settings = [f"-D{name}={value}" for name, value in facts.items()]
        for command in (
            [cmake, "-G", "Unix Makefiles", "-S", str(sources), "-B", f"{folder}/build", *settings],
            [cmake, "--build", f"{folder}/build"],
        ):
            done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                lines = [line.strip() for line in done.stdout.splitlines() if line.strip()] or ["nothing said"]
                first = next((line for line in lines if "error" in line.lower()), lines[-1])
                raise CannotBuild(f"the build failed: {first}\n{' '.join(command)}\n{done.stdout}")
        (Path(folder) / LIBRARY).replace(target)
