"""Build and run a Dockerfile's image without a container engine: its steps, in a fresh Debian root, in a chroot.

    python -m images.chroot docker/cpu.Dockerfile [COMMAND ...]      # as root; COMMAND in place of the image's CMD

For images that begin with ``FROM python:3.N``: debootstrap makes this machine's Debian from the mirror that apt is
configured for, with its Python and the headers for it, which must be that 3.N. The steps get what pip here is
configured for, and the folders it names, as one would hand them to a build. Every step has namespaces of its own, for
mounts and process ids, so nothing stays mounted or running. What an engine does beside that (layers, networks, limits)
is not tried.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from images.dockerfile import ImageSettings, make_copy_filter, parse_instruction_options, parse_instructions

TOOLS = ("debootstrap", "unshare", "chroot", "apt-get")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STEP_S = 3600.0
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


class ChrootImage:
    """A root file system that instructions are performed in.

    Args:
        root: an empty folder for it.
        context: the folder that COPY copies from.
        ignored: for shutil.copytree, what it leaves out.
    """

    def __init__(self, root: Path, context: Path, ignored: Callable[[str, list[str]], set[str]]) -> None:
        self.settings = ImageSettings()
        self._root, self._context, self._ignored = root, context, ignored
        self._lent = pip_settings() | {name: os.environ[name] for name in PROXIES if name in os.environ}
        self._bound = [Path("/etc/resolv.conf"), Path("/etc/hosts"), *named_paths(self._lent.values())]

    def perform(self, name: str, text: str) -> None:
        """One instruction."""
        step = getattr(self, f"_{name.lower()}", None)
        if step is None:
            raise ValueError(f"{name} is not performed here")
        print(f"==> {name} {text}", flush=True)
        step(text)

    def run(self, words: Sequence[str]) -> int:
        """The exit status of a command in the image, by its user and in its folder."""
        set_here = self.settings
        home = "/root" if set_here.user == "root" else str(Path("/home", set_here.user))
        variables = {"PATH": PATH, "HOME": home} | self._lent | set_here.arguments | set_here.variables
        given = [f"{name}={value}" for name, value in variables.items()]
        inside = ["chroot", f"--userspec={set_here.user}", str(self._root), "/usr/bin/env", "-i", *given]
        inside += ["/bin/sh", "-c", 'cd "$0" && exec "$@"', set_here.folder, *words]
        mounts = [["mount", "-t", kind, kind, f"{self._root}/{where}"] for kind, where in MOUNTS.items()]
        for path in self._bound:
            target = self._root / path.relative_to("/")
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            mounts.append(["mount", "--bind", "-o", "ro", str(path.resolve()), str(target)])
        script = "\n".join(["set -e", *map(shlex.join, mounts), f"exec {shlex.join(inside)}"])
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", script]
        return subprocess.run(alone, stdin=subprocess.DEVNULL, timeout=STEP_S, check=False).returncode

    def _from(self, text: str) -> None:
        wanted = re.fullmatch(r"python:(3\.\d+)(-slim)?", self.settings.filled(text))
        if wanted is None:
            raise ValueError(f"FROM {text}: only python:3.N and python:3.N-slim can be made here")
        suite, mirror = find_debian()
        packages = "--include=python3,python3-dev,python3-venv,ca-certificates"
        subprocess.run(["debootstrap", "--variant=minbase", packages, suite, self._root, mirror], check=True)
        says = "import sys; sys.exit('%d.%d' % sys.version_info[:2] != sys.argv[1])"
        if self.run(["python3", "-c", says, wanted[1]]):
            raise ValueError(f"FROM {text}: Debian {suite} has another Python")

    def _run(self, text: str) -> None:
        if status := self.run(self.settings.words(text)):
            raise SystemExit(f"exit status {status}: RUN {text}")

    def _copy(self, text: str) -> None:
        named, (*sources, target) = parse_instruction_options(text)
        there = self._root / os.path.join(self.settings.folder, target).lstrip("/")
        for source in sources:
            shutil.copytree(self._context / source, there, symlinks=True, ignore=self._ignored, dirs_exist_ok=True)
        if "chown" in named:
            inside = str(there.relative_to(self._root))
            subprocess.run(["chroot", self._root, "chown", "-R", named["chown"], f"/{inside}"], check=True)

    def _arg(self, text: str) -> None:
        name, _, value = text.partition("=")
        self.settings.arguments[name] = self.settings.filled(shlex.split(value)[0] if value else "")

    def _env(self, text: str) -> None:
        for word in shlex.split(text):
            name, _, value = word.partition("=")
            self.settings.variables[name] = self.settings.filled(value)

    def _workdir(self, text: str) -> None:
        self.settings.folder = os.path.join(self.settings.folder, self.settings.filled(text))
        (self._root / self.settings.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _user(self, text: str) -> None:
        self.settings.user = self.settings.filled(text)

    def _shell(self, text: str) -> None:
        self.settings.shell = self.settings.words(text)

    def _entrypoint(self, text: str) -> None:
        self.settings.entrypoint = self.settings.words(text)

    def _cmd(self, text: str) -> None:
        self.settings.command = self.settings.words(text)


#: What is mounted, and where, in every step.
MOUNTS = {"proc": "proc", "sysfs": "sys", "tmpfs": "dev/shm"}


def find_debian() -> tuple[str, str]:
    """This machine's Debian: its suite, and the mirror that apt is configured for."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    suite = release["VERSION_CODENAME"].strip('"')
    form = ["--format", "$(CODENAME) $(SITE)", "Created-By: Packages"]
    said = subprocess.run(["apt-get", "indextargets", *form], capture_output=True, text=True, check=True).stdout
    mirrors = [site for name, site in (line.split() for line in said.splitlines()) if name == suite]
    if not mirrors:
        raise SystemExit(f"apt is configured for no mirror of {suite}: {said or 'for none at all'}")
    return suite, mirrors[0]


def pip_settings() -> dict[str, str]:
    """What pip is configured for here, as the variables that say the same."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = re.findall(r"^[\w:]+\.([\w-]+)='(.*)'$", said.stdout, re.MULTILINE)
    return {f"PIP_{key.replace('-', '_').upper()}": value for key, value in found}


def named_paths(values: Iterable[str]) -> list[Path]:
    """Files and folders of this machine that values name; of an index what lies beside it, too, to which it links."""
    found = set()
    for word in (word for value in values for word in value.split()):
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            found.add(path.parent if word.startswith("file://") else path)
    return sorted(found)


def build_chroot_image(dockerfile: Path, root: Path) -> ChrootImage:
    """The image of a Dockerfile, whose context is the folder above its own."""
    context = dockerfile.resolve().parent.parent
    image = ChrootImage(root, context, make_copy_filter(dockerfile.with_name(f"{dockerfile.name}.dockerignore")))
    for name, text in parse_instructions(dockerfile.read_text()):
        image.perform(name, text)
    return image


def main() -> None:
    parser = argparse.ArgumentParser(description="Build and run a Dockerfile's image in a chroot.")
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="in place of the image's CMD")
    given = parser.parse_args()
    lacking = [tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ.get('PATH', '')}:{PATH}") is None]
    if lacking or os.geteuid() != 0:
        sys.exit(f"this needs {', '.join([*lacking, 'root'])}: on Debian, apt install debootstrap, and run it as root")
    with tempfile.TemporaryDirectory(prefix="image") as folder:
        root = Path(folder, "root")
        root.mkdir()
        image = build_chroot_image(given.dockerfile, root)
        words = [*image.settings.entrypoint, *(given.command or image.settings.command)]
        print(f"==> {shlex.join(words)}", flush=True)
        sys.exit(image.run(words))


if __name__ == "__main__":
    main()
