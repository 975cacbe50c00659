"""A virtual environment for each kind of peer, in build/peers; an existing one is reused.

Code that a peer compiles at first use is compiled when its environment is created, and the seconds are recorded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.step.compare import ROOT

FOLDER = ROOT / "build" / "peers"


class NotInstalled(Exception):
    """An environment could not be created; the message contains the reason."""


@dataclass(frozen=True)
class PeerEnvironment:
    """A virtual environment.

    Attributes:
        installs: arguments of consecutive ``pip install`` calls.
        first_use: a program that triggers compilation at first use.
    """

    name: str
    installs: tuple[tuple[str, ...], ...]
    first_use: str = ""

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables of its processes; compiled files stay in the folder."""
        return {
            "PATH": os.pathsep.join((str(self.python.parent), os.environ["PATH"])),
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(self.folder / "extensions"),
        }

    def ensure(self, pip: Sequence[str] = ()) -> dict[str, Any]:
        """Create it unless it exists with the same contents; return the installed packages and the seconds taken.

        Args:
            pip: further arguments of every ``pip install``, such as ``--index-url`` of the CPU builds of torch.

        Raises:
            NotInstalled: it could not be created.
        """
        stamp = self.folder / "made.json"
        wanted = {"installs": [list(packages) for packages in self.installs], "first_use": self.first_use}
        if stamp.is_file():
            made: dict[str, Any] = json.loads(stamp.read_text())
            if made.items() >= wanted.items():
                return made
        print(f"making {self.folder}", file=sys.stderr)
        begin_s = time.perf_counter()
        venv.create(self.folder, clear=True, with_pip=True)
        for packages in self.installs:
            self.run("-m", "pip", "--quiet", "install", *pip, *packages)
        installed_s = time.perf_counter()
        if self.first_use:
            self.run("-c", self.first_use)
        compiled_s = time.perf_counter()
        made = wanted | {"install_s": installed_s - begin_s, "first_use_s": compiled_s - installed_s}
        stamp.write_text(json.dumps(made))
        return made

    def run(self, *arguments: str) -> None:
        """Run its Python to the end; raise NotInstalled with the last line of output if that fails."""
        command = [self.python, *arguments]
        try:
            subprocess.run(
                command, env=os.environ | self.variables, capture_output=True, text=True, timeout=1800, check=True
            )
        except subprocess.SubprocessError as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            raise NotInstalled(f"python {' '.join(arguments)}: {said[-1]}") from error


_TORCH = ("torch==2.13.0", "numpy")

TORCH = PeerEnvironment("torch", (_TORCH,))
#: Its build imports torch.
DEEPSPEED = PeerEnvironment(
    "deepspeed",
    ((*_TORCH, "setuptools", "wheel", "ninja"), ("--no-build-isolation", "deepspeed==0.19.8")),
    "from deepspeed.ops.op_builder import CPUAdamBuilder as a, ShareMemCommBuilder as c; a().load(); c().load()",
)
