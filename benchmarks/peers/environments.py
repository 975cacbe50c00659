"""A virtual environment for each kind of peer, in build/peers; one that is there is used again."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.step.compare import ROOT

FOLDER = ROOT / "build" / "peers"


class NotInstalled(Exception):
    """An environment could not be made; the message says why."""


@dataclass(frozen=True)
class Environment:
    """What is installed, one pip call after the other, each with its arguments."""

    name: str
    installs: tuple[tuple[str, ...], ...]

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        """What processes in it need in their environment, PATH aside: what is compiled at first use stays in it."""
        return (("DS_ACCELERATOR", "cpu"), ("TORCH_EXTENSIONS_DIR", str(self.folder / "extensions")))

    def ensure(self, pip: Sequence[str] = ()) -> None:
        """Makes it, unless it is there as it should be.

        Args:
            pip: further arguments of every ``pip install``, such as ``--index-url`` of the CPU builds of torch.

        Raises:
            NotInstalled: pip failed.
        """
        stamp, wanted = self.folder / "installed.txt", repr(self.installs)
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        print(f"making {self.folder.relative_to(ROOT)}", file=sys.stderr)
        venv.create(self.folder, clear=True, with_pip=True)
        for packages in self.installs:
            command = [str(self.python), "-m", "pip", "--quiet", "install", *pip, *packages]
            done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
            if done.returncode:
                raise NotInstalled(
                    f"pip install {' '.join(packages)}: {(done.stderr.strip() or 'no reason').splitlines()[-1]}"
                )
        stamp.write_text(wanted)


_TORCH = ("torch==2.13.0", "numpy")

TORCH = Environment("torch", (_TORCH,))
#: It imports torch as it is built, and compiles its Adam with ninja as it is first used.
DEEPSPEED = Environment(
    "deepspeed", ((*_TORCH, "setuptools", "wheel", "ninja"), ("--no-build-isolation", "deepspeed==0.19.8"))
)
