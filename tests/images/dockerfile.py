"""Read a Dockerfile: its instructions, what they hand on to each other, and which files COPY leaves out."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from string import Template


@dataclass
class ImageSettings:
    """What earlier instructions have said for later ones, and for the container's command."""

    arguments: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "root"
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    def filled(self, text: str) -> str:
        """``text`` with the values of ``$NAME`` and ``${NAME}``."""
        filled = Template(text).safe_substitute(self.arguments | self.variables)
        if "$" in filled:
            raise ValueError(f"a value is missing, or in a form that is not read here: {text}")
        return filled

    def words(self, text: str) -> tuple[str, ...]:
        """A command in either form: a JSON list of words, or a line for the shell."""
        return tuple(json.loads(text)) if text.startswith("[") else (*self.shell, text)


def parse_instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction's name and what it says, on one line, in order."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name.upper(), rest.strip()


def parse_instruction_options(text: str) -> tuple[dict[str, str], list[str]]:
    """The ``--name=value`` at the beginning of an instruction, and its other words."""
    words = shlex.split(text)
    named = {name: value for name, _, value in (word[2:].partition("=") for word in words if word.startswith("--"))}
    return named, [word for word in words if not word.startswith("--")]


def make_copy_filter(path: Path) -> Callable[[str, list[str]], set[str]]:
    """What shutil.copytree shall leave out of the folder ``path`` lies below, by that file (a .dockerignore)."""
    patterns = [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    strange = [pattern for pattern in patterns if pattern.startswith("!") or "/" in pattern.removeprefix("**/")]
    if strange:
        raise ValueError(f"{path.name}: not read here: {strange}")
    context = path.resolve().parent.parent

    def ignored(folder: str, names: list[str]) -> set[str]:
        top = Path(folder).resolve() == context
        told = [pattern.removeprefix("**/") for pattern in patterns if top or pattern.startswith("**/")]
        return {name for name in names if any(PurePath(name).match(pattern) for pattern in told)}

    return ignored
