"""What a type checker knows of npuzero where it is installed: the types, and nothing more than the package has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from packages import copy_project

TYPES = {"npuzero/py.typed", "npuzero/_C.pyi"}

HEAD = """
import torch
from torch import nn

import npuzero


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


world = npuzero.init("cpu", timeout_s=60)
model = npuzero.zero(Net(), stage=3, precision="bf16", world=world)
optimizer = npuzero.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), moments="int8")
for step in range(10):
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    norm = npuzero.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item(), norm.item(), npuzero.report(model).bytes_held["parameters"])
    npuzero.checkpoint.save("run", model, optimizer, step=step)
"""

# What somebody writes, and what he is told, or nothing.
LINES = {
    "reveal_type(world.rank)": '"int"',
    "reveal_type(model)": '"prog.Net"',
    "reveal_type(model.inner)": '"torch.nn.modules.linear.Linear"',
    "reveal_type(npuzero.clip_grad_norm_(model, 1.0))": '"torch._tensor.Tensor"',
    "reveal_type(npuzero.report(model))": "Report",
    "reveal_type(npuzero.predict(model, 'zero3', 8).bytes_sent)": "dict[str, int]",
    "reveal_type(npuzero.checkpoint.load('run', model))": "Loaded",
    "reveal_type(npuzero.grad_norms(model))": '"dict[str, float]"',
    "with npuzero.gathered(model) as whole: reveal_type(whole)": '"prog.Net"',
    "npuzero.zero(nn.Linear(2, 2), plan=npuzero.Plan.preset(3))": "",
    "npuzero.zero(nn.Linear(2, 2), plan='hsdp', local_size=2, settings=npuzero.Settings(prefetch=2))": "",
    "npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), lr=0.1).step()": "",
    "npuzero.LossScaler().scale(loss).backward()": "",
    "npuzero.export(model, 'weights', dtype=torch.bfloat16)": "",
    "npuzero.AdamW(model.parameters(), lr='fast')": 'Argument "lr" to "AdamW" has incompatible type "str"',
    "npuzero.AdamW(model.parameters(), momentum=0.9)": 'Unexpected keyword argument "momentum"',
    "npuzero.zero(model, stage='x')": 'Argument "stage" to "zero" has incompatible type "str"',
    "npuzero.zero(model, stages=3)": 'Unexpected keyword argument "stages" for "zero"',
    "npuzero.zero('model')": 'Value of type variable "Model" of "zero" cannot be "str"',
    "npuzero.clip_grad_norm_(model, '1')": 'Argument 2 to "clip_grad_norm_" has incompatible type "str"',
    "npuzero.Settings(prefetch='two')": 'Argument "prefetch" to "Settings" has incompatible type "str"',
    "npuzero.checkpoint.save('run', model)": 'Missing named argument "step"',
    "npuzero.zer0(model)": 'Module has no attribute "zer0"',
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and a source distribution."""
    project = copy_project(tmp_path_factory.mktemp("types") / "project")
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "sdist"]
    done = subprocess.run(
        command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout
    return project / "dist"


def test_packages_have_the_types(packages):
    (wheel,), (sources,) = packages.glob("*.whl"), packages.glob("*.tar.gz")
    assert set(zipfile.ZipFile(wheel).namelist()) >= TYPES
    with tarfile.open(sources) as archive:
        assert {name.partition("/")[2] for name in archive.getnames()} >= TYPES


@pytest.mark.slow
def test_a_type_checker_sees_them_in_a_users_program(packages, tmp_path):
    pytest.importorskip("mypy")
    (wheel,) = packages.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = tmp_path / "user" / "prog.py"
    program.parent.mkdir()
    program.write_text(HEAD + "\n".join(LINES))
    # Beside the program nothing is found but what is on the interpreter's path, and of that only packages with types.
    command = [sys.executable, "-m", "mypy", "--strict", "--hide-error-context", "prog.py"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=program.parent, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1, done.stdout + done.stderr
    said: dict[int, str] = {}
    for line in done.stdout.splitlines():
        if found := re.match(r"prog\.py:(\d+): (.*)", line):
            said[int(found[1])] = said.get(int(found[1]), "") + found[2]
    first = HEAD.count("\n") + 1
    assert not [words for number, words in said.items() if number < first], done.stdout
    for number, (line, expected) in enumerate(LINES.items(), first):
        words = said.get(number, "")
        assert expected in words and bool(expected) == bool(words), f"{line}: {words or 'nothing'}"
