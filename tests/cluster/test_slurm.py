"""benchmarks/cluster/slurm.sbatch under a real Slurm, on two nodes: trains over Gloo, is requeued, and goes on."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import slurm as slurms
from npuzero.bench import Record
from npuzero.checkpoint import latest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.world,
    pytest.mark.skipif(bool(slurms.find_missing_tools()), reason=slurms.find_missing_tools() or "never"),
]

ROOT = Path(__file__).resolve().parents[2]
BATCH_FILE = ROOT / "benchmarks" / "cluster" / "slurm.sbatch"
STEPS, EVERY = 200, 10
TINY = (
    f"--preset zero2 --steps {STEPS} --checkpoint-every {EVERY} --batch 1 --seq 64 --dim 32 --layers 2 --heads 2 "
    "--sample 0 --no-export"
)
JOB_S = 600  # on a machine that may be busy


@pytest.fixture(scope="module")
def slurm() -> Iterator[slurms.SlurmCluster]:
    with tempfile.TemporaryDirectory(prefix="slurm") as name:  # pytest's folders are closed to munge's users
        folder = Path(name)
        folder.chmod(0o755)
        with slurms.run_slurm_cluster(folder) as cluster:
            yield cluster


def submit_two_nodes(slurm: slurms.SlurmCluster, out: Path, *arguments: str, **variables: str) -> str:
    """A job of two nodes with two CPU ranks each, with its log in ``out``."""
    out.mkdir()
    given = {"PYTHON": sys.executable, "DEVICES": "2", "OUT": str(out)} | variables
    where = ("--chdir", str(ROOT), "--output", str(out / "log"))
    return slurm.submit("--nodes", "2", *where, str(BATCH_FILE), *arguments, **given)


def read_step_losses(out: Path) -> list[float]:
    """Those of all steps that a run of examples/gpt has written down."""
    path = out / "gpt" / "steps.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["loss"] for line in lines]


def test_nodes_reach_each_other_over_gloo_alone(slurm: slurms.SlurmCluster, tmp_path: Path) -> None:
    """Each sees its own ranks' memory; what the other tests train and measure would else be shared memory's."""
    program = tmp_path / "program.py"
    program.write_text(
        "import npuzero\nworld = npuzero.init('cpu')\nprint(f'rank {world.rank}: {world.local}\\n', end='')"
    )
    torchrun = (
        f"{sys.executable} -m torch.distributed.run --nnodes 2 --node-rank $SLURM_NODEID --nproc-per-node 2 "
        f"--master-addr {slurms.NODES[0]} --master-port {slurms.free_ports(1)[0]} {program}"
    )
    asked = ("--nodes", "2", "--ntasks-per-node", "1", "--output", str(tmp_path / "log"))
    job = slurm.submit(*asked, f"--wrap=srun bash -c '{torchrun}'", PYTHONPATH=str(ROOT))
    assert slurm.wait(job, JOB_S) == "COMPLETED", (tmp_path / "log").read_text()
    said = {line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("rank")}
    assert said == {"rank 0: (0, 1)", "rank 1: (0, 1)", "rank 2: (2, 3)", "rank 3: (2, 3)"}


def test_a_requeued_job_goes_on_from_its_checkpoint_to_the_bit(slurm: slurms.SlurmCluster, tmp_path: Path) -> None:
    """The signal is the one that Slurm sends before the time is over; the job requeues itself."""
    disturbed, whole = tmp_path / "disturbed", tmp_path / "whole"
    training = {"SUITES": "train", "TRAIN_ARGUMENTS": TINY}
    job = submit_two_nodes(slurm, disturbed, **training)
    checkpoints = disturbed / "gpt" / "checkpoints"
    slurms.wait_until_met(lambda: latest(checkpoints) is not None, JOB_S, lambda: (disturbed / "log").read_text())
    slurm.ask("scancel", "--batch", "--signal", "USR1", job)
    slurms.wait_until_met(lambda: slurm.facts(job)["Restarts"] == "1", 60, lambda: str(slurm.facts(job)))
    first = latest(checkpoints)
    assert first is not None
    stopped, saved = len(read_step_losses(disturbed)), first.stat().st_mtime_ns
    assert EVERY <= stopped < STEPS, "it was to be stopped in mid-run"

    assert slurm.wait(job, JOB_S) == "COMPLETED", (disturbed / "log").read_text()
    assert first.stat().st_mtime_ns == saved, "the second start goes on after it, and does not take its steps again"

    assert slurm.wait(submit_two_nodes(slurm, whole, **training), JOB_S) == "COMPLETED", (whole / "log").read_text()
    result = json.loads((whole / "gpt" / "result.json").read_text())
    assert result["ranks"] == 4 and len(read_step_losses(whole)) == STEPS
    assert read_step_losses(disturbed) == read_step_losses(whole)


def test_it_measures_steps_and_collectives_over_gloo(slurm: slurms.SlurmCluster, tmp_path: Path) -> None:
    out = tmp_path / "measured"
    tiny = "--presets zero2 --dim 32 --layers 2 --heads 2 --sequence 16 --batch 1 --rounds 1 --checked 1"
    job = submit_two_nodes(slurm, out, *tiny.split(), COMM_ARGUMENTS="--quick --only barrier")
    assert slurm.wait(job, JOB_S) == "COMPLETED", (out / "log").read_text()
    step = Record.read(out / "step.json").result("step/bf16-batch1")
    assert step.parameters["ranks"] == 4 and "npuzero zero2" in step.seconds
    assert Record.read(out / "comm.json").results
