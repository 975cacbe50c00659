"""The scripts for clusters: shells can read them, a cluster's schema accepts them, and torchrun's runs here.

Slurm's runs in tests/cluster.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from npuzero.bench import Record

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "benchmarks" / "cluster"


@pytest.mark.parametrize("path", sorted(CLUSTER.iterdir()), ids=lambda path: path.name)
def test_bash_can_read_it(path):
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", path], check=True)


SCHEMA = json.loads(Path(__file__).with_name("pytorchjob.json").read_text())["schema"]


def job_of(nodes: int, **variables: str) -> dict:
    """What pytorchjob.sh writes."""
    given = {"IMAGE": "some/image:1", "RESOURCE": "huawei.com/Ascend910", "NODES": str(nodes)} | variables
    command = [CLUSTER / "pytorchjob.sh", "--dim", "64"]
    made = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=True)
    return yaml.safe_load(made.stdout)


def test_the_operators_schema_accepts_the_job():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for nodes in (1, 3):
        jsonschema.validate(job_of(nodes, SUITES="train", TRAIN_ARGUMENTS="--steps 9", PIPE="2"), SCHEMA)


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        ("spec", "pytorchReplicaSpec", {}, "was unexpected"),
        ("spec/pytorchReplicaSpecs/Master", "replicas", "1", "is not of type 'integer'"),
        ("spec/pytorchReplicaSpecs/Master/template/spec", "container", [], "was unexpected"),
        ("spec/pytorchReplicaSpecs/Master/template/spec/containers/0", "command", "bash", "is not of type 'array'"),
        ("spec/pytorchReplicaSpecs/Master/template/spec/containers/0/env/0", "value", 3, "is not of type 'string'"),
        ("spec/pytorchReplicaSpecs/Master/template/spec/containers/0/resources/limits", "x", "8 of", "does not match"),
    ],
)
def test_the_schema_would_see_a_mistake(where, name, value, said):
    at = job = job_of(1)
    for key in where.split("/"):
        at = at[int(key) if isinstance(at, list) else key]
    at[name] = value
    with pytest.raises(jsonschema.ValidationError, match=said):
        jsonschema.validate(job, SCHEMA)


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_job_has_a_pod_per_node(nodes):
    job = job_of(nodes)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert sum(role["replicas"] for role in roles.values()) == nodes
    for role in roles.values():
        (container,) = role["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator looks for it
        assert container["image"] == "some/image:1"
        assert container["args"] == ["torchrun.sh", "--dim", "64"]
        assert container["resources"]["limits"] == {"huawei.com/Ascend910": 8}
        assert {"name": "NODES", "value": str(nodes)} in container["env"]


def test_the_job_passes_the_mesh_on():
    job = job_of(1, SUITES="mesh", PIPE="2", MESH_ARGUMENTS="--steps 8")
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"]}
    assert given == {"NODES": "1", "DEVICES": "8", "SUITES": "mesh", "PIPE": "2", "MESH_ARGUMENTS": "--steps 8"}


def test_torchrun_passes_the_mesh_on(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/seen\necho cpu 8\n')
    python.chmod(0o755)
    mesh = {"SUITES": "mesh", "PIPE": "2", "TENSOR": "2", "LOCAL_SIZE": "1", "MESH_ARGUMENTS": "--chunks 2"}
    variables = os.environ | {"PYTHON": str(python), "OUT": str(tmp_path)} | mesh
    subprocess.run([CLUSTER / "torchrun.sh"], env=variables, capture_output=True, check=True)
    *_, line = (tmp_path / "seen").read_text().splitlines()
    script, _, options = line.partition("train.py ")
    assert script.endswith("examples/pipeline_gpt/")
    assert options == "--pipe 2 --tensor 2 --local-size 1 --chunks 2"


def test_the_job_needs_an_image():
    variables = {key: value for key, value in os.environ.items() if key not in ("IMAGE", "RESOURCE")}
    made = subprocess.run([CLUSTER / "pytorchjob.sh"], env=variables, capture_output=True, text=True)
    assert made.returncode != 0 and "IMAGE" in made.stderr and not made.stdout


SEEN = (
    *("ASCEND_HOME_PATH", "HCCL_CONNECT_TIMEOUT", "HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"),
    "NPUZERO_TIMEOUT_S",
)


def seen_by_python(folder: Path, **variables: str) -> list[str]:
    """What torchrun.sh gives its first Python in SEEN."""
    python = folder / "python"
    values = " ".join(f'"${{{name}:-}}"' for name in SEEN)
    python.write_text(f"#!/bin/sh\nprintf '%s\\n' {values} > {folder}/seen\nexit 1\n")
    python.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if name not in SEEN}
    subprocess.run([CLUSTER / "torchrun.sh"], env=clean | {"PYTHON": str(python)} | variables, capture_output=True)
    return (folder / "seen").read_text().splitlines()


def test_hccl_is_told_with_and_without_a_folder_of_cann(tmp_path):
    told = ["1200", "auto", "auto", "1300"]
    assert seen_by_python(tmp_path, ASCEND_ENV=str(tmp_path / "none")) == ["", *told]
    script = tmp_path / "set_env.sh"
    script.write_text("export ASCEND_HOME_PATH=/some/cann$UNSET\n")
    assert seen_by_python(tmp_path, ASCEND_ENV=str(script)) == ["/some/cann", *told]
    assert seen_by_python(tmp_path, ASCEND_ENV="none", HCCL_CONNECT_TIMEOUT="600") == ["", "600", "auto", "auto", "700"]


@pytest.mark.slow
@pytest.mark.world
def test_torchrun_measures_steps_and_collectives_on_two_ranks(tmp_path):
    tiny = shlex.split("--presets zero2 --dim 32 --layers 2 --heads 2 --sequence 16 --batch 1 --rounds 1 --checked 1")
    subprocess.run(
        [CLUSTER / "torchrun.sh", *tiny],
        env=os.environ
        | {"OUT": str(tmp_path), "PYTHON": sys.executable, "DEVICES": "2", "MASTER_PORT": "29471"}
        | {"COMM_ARGUMENTS": "--quick --only barrier"},
        check=True, timeout=300,
    )  # fmt: skip
    step = Record.read(tmp_path / "step.json").result("step/bf16-batch1")
    assert step.parameters["ranks"] == 2 and "npuzero zero2" in step.seconds
    assert Record.read(tmp_path / "comm.json").results
