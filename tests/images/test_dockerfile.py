"""What the images' runner reads of a Dockerfile; that it builds one is `make test-docker`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from images.chroot import ChrootImage, named_paths
from images.dockerfile import ImageSettings, make_copy_filter, parse_instruction_options, parse_instructions

DOCKER = Path(__file__).resolve().parents[2] / "docker"


def test_lines_that_go_on_are_one_instruction():
    text = '# a comment\nFROM python:3.11-slim\nRUN one \\\n    # another\n    && two\n\nCMD ["a", "b"]\n'
    assert [*parse_instructions(text)] == [("FROM", "python:3.11-slim"), ("RUN", "one && two"), ("CMD", '["a", "b"]')]


@pytest.mark.parametrize("path", sorted(DOCKER.glob("*.Dockerfile")), ids=lambda path: path.name)
def test_every_instruction_of_our_images_is_known(path):
    names = [name for name, _ in parse_instructions(path.read_text())]
    assert {"FROM", "RUN", "COPY", "CMD"} <= set(names)
    assert [name for name in names if not hasattr(ChrootImage, f"_{name.lower()}")] == []


def test_an_instruction_that_is_not_performed_is_an_error(tmp_path):
    image = ChrootImage(tmp_path, tmp_path, shutil.ignore_patterns())
    with pytest.raises(ValueError, match="HEALTHCHECK is not performed here"):
        image.perform("HEALTHCHECK", "NONE")
    with pytest.raises(ValueError, match=r"only python:3\.N"):
        image.perform("FROM", "ubuntu:24.04")


def test_settings_of_earlier_instructions_count(tmp_path):
    image = ChrootImage(tmp_path, tmp_path, shutil.ignore_patterns())
    for name, text in [
        ("ARG", "BASE"),
        ("ARG", 'TORCH="torch==1"'),
        ("ENV", "A=1 B=${A}-$TORCH"),
        ("WORKDIR", "/opt"),
        ("WORKDIR", "npuzero"),
        ("USER", "npuzero"),
        ("SHELL", '["/bin/bash", "-c"]'),
        ("CMD", "make test"),
        ("ENTRYPOINT", '["env"]'),
    ]:
        image.perform(name, text)
    made = image.settings
    assert made.arguments == {"BASE": "", "TORCH": "torch==1"} and made.variables == {"A": "1", "B": "1-torch==1"}
    assert (made.folder, made.user) == ("/opt/npuzero", "npuzero") and (tmp_path / "opt/npuzero").is_dir()
    assert (made.entrypoint, made.command) == (("env",), ("/bin/bash", "-c", "make test"))
    with pytest.raises(ValueError, match="a value is missing"):
        ImageSettings().filled("${NONE}")


def test_copy_leaves_out_what_the_file_says(tmp_path):
    context = tmp_path / "context"
    for name in (
        ".git/config",
        "docs/build/kept.md",
        "build/gone.o",
        "a/__pycache__/gone.pyc",
        "a/kept.py",
        "a/gone.so",
    ):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).touch()
    (context / "docker").mkdir()
    told = shutil.copy(DOCKER / "cpu.Dockerfile.dockerignore", context / "docker")
    image = ChrootImage(tmp_path / "root", context, make_copy_filter(Path(told)))
    image.perform("WORKDIR", "/opt")
    image.perform("COPY", ". here")
    here = tmp_path / "root/opt/here"
    found = {path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file()}
    assert found == {"docs/build/kept.md", "a/kept.py", "docker/cpu.Dockerfile.dockerignore"}
    assert parse_instruction_options("--chown=npuzero . .") == ({"chown": "npuzero"}, [".", "."])


def test_what_pip_is_told_to_look_in_is_lent(tmp_path):
    wheels, index = tmp_path / "wheels", tmp_path / "mirror" / "simple"
    wheels.mkdir()
    index.mkdir(parents=True)
    told = [f"{wheels} file://{index}", "https://somewhere/simple", "180", "/not/there"]
    assert named_paths(told) == [index.parent, wheels]
