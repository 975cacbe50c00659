"""The forge's workflows against the project: what they call is there, and their versions are the project's."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from packages import ROOT

WORKFLOWS = {path.stem: path.read_text("utf-8") for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
EXPRESSION = re.compile(r"\$\{\{ *matrix\.(\w+) *\}\}")


def workflow_jobs(name: str) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(WORKFLOWS[name])["jobs"]


def workflow_steps(name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each step of a workflow, with its job."""
    return [(job, step) for job in workflow_jobs(name).values() for step in job["steps"]]


def workflow_commands(name: str) -> list[str]:
    """What its steps run, once for each value of the matrix that they name."""
    said = []
    for job, step in workflow_steps(name):
        lines = [step.get("run", "")]
        while open_ := [line for line in lines if EXPRESSION.search(line)]:
            key = EXPRESSION.search(open_[0])[1]
            values = job["strategy"]["matrix"][key]
            one = re.compile(rf"\$\{{\{{ *matrix\.{key} *\}}\}}")
            lines = [one.sub(str(value), line) for line in lines for value in values]
        said += dict.fromkeys(lines)
    return [line for line in said if line]


def parse_python_version(version: str) -> tuple[int, ...]:
    """(3, 10) of 3.10 and of cp310."""
    found = re.fullmatch(r"(?:cp)?(\d)\.?(\d+)", version)
    return int(found[1]), int(found[2])


def test_there_are_checks_a_nightly_run_and_wheels_on_a_tag() -> None:
    triggers = {name: yaml.safe_load(text)[True] for name, text in WORKFLOWS.items()}  # YAML reads `on` as true
    assert set(triggers) == {"checks", "nightly", "wheels"}
    assert "pull_request" in triggers["checks"] and triggers["wheels"]["push"] == {"tags": ["v*"]}
    (cron,) = (entry["cron"] for entry in triggers["nightly"]["schedule"])
    assert re.fullmatch(r"\d+ \d+ \* \* \*", cron)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_commands_are_shell_and_make_targets_are_there(name: str) -> None:
    targets = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
    called = [
        target for line in workflow_commands(name) for target in re.findall(r"^make ([\w-]+)", line, re.MULTILINE)
    ]
    assert called and set(called) <= targets
    for line in workflow_commands(name):
        subprocess.run(["bash", "-n", "-c", re.sub(r"\$\{\{.*?\}\}", "value", line)], check=True, timeout=300)


def test_each_kind_of_test_runs_somewhere() -> None:
    called = {name: " ".join(workflow_commands(name)) for name in WORKFLOWS}
    assert {"make lint", "make test "} <= set(re.findall(r"make lint|make test ", called["checks"]))
    for target in ("test-aarch64", "emulate", "test-cuda-source", "test-torch-npu", "test-all"):
        assert f"make {target} " in called["nightly"]
    assert called["wheels"].index("make wheel ") < called["wheels"].index("make test-wheel ")


@pytest.mark.parametrize("name", WORKFLOWS)
def test_whoever_asks_for_an_action_names_a_version_and_nobody_may_write(name: str) -> None:
    workflow = yaml.safe_load(WORKFLOWS[name])
    assert workflow["permissions"] == {"contents": "read"}
    assert {job: said["permissions"] for job, said in workflow["jobs"].items() if "permissions" in said} in (
        {},
        {"publish": {"id-token": "write"}},  # what signs the upload
    )
    used = {step["uses"] for every in WORKFLOWS for _, step in workflow_steps(every) if "uses" in step}
    pinned = dict(action.split("@") for action in used)
    assert len(pinned) == len(used), f"two versions of one action: {used}"
    assert all(re.fullmatch(r"(v|release/v)\d+", version) for version in pinned.values())


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_job_ends_by_itself(name: str) -> None:
    assert [job for job, said in workflow_jobs(name).items() if "timeout-minutes" not in said] == []


def test_versions_are_the_projects() -> None:
    torch = re.search(r"^TORCH \?= (\S+)$", MAKEFILE, re.MULTILINE)[1]
    least_torch = re.search(r'"torch>=([\d.]+)"', PYPROJECT)[1]
    least_python = parse_python_version(re.search(r'^requires-python = ">=([\d.]+)"$', PYPROJECT, re.MULTILINE)[1])
    for name in ("checks", "nightly"):
        assert yaml.safe_load(WORKFLOWS[name])["env"]["TORCH"].split()[0] == torch
    tried = workflow_jobs("wheels")["try"]["strategy"]["matrix"]["torch"]
    assert tried[0].startswith(f"{least_torch}.") and torch == f"torch=={tried[-1]}"
    pythons = [
        parse_python_version(version) for version in workflow_jobs("wheels")["build"]["strategy"]["matrix"]["python"]
    ]
    tested = [
        parse_python_version(version) for version in workflow_jobs("checks")["test"]["strategy"]["matrix"]["python"]
    ]
    assert pythons[0] == tested[0] == least_python and pythons[-1] == tested[-1]
    assert pythons == [(3, minor) for minor in range(least_python[1], pythons[-1][1] + 1)]


def test_a_wheel_brings_no_openmp_runtime_of_its_own() -> None:
    """torch has one already, and two of them compete for the cores: npuzero._native warns of that."""
    recipe = re.search(r"^wheel:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]
    assert "auditwheel repair --exclude libgomp.so.1 " in recipe
