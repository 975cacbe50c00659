"""The examples of frameworks: with the line that they had before they train by DistributedDataParallel, and alike."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file

from examples.pages import AT_ONCE, ROOT, run_script

for package in ("accelerate", "transformers", "lightning"):
    pytest.importorskip(package)


class FrameworkExample(NamedTuple):
    """The line that makes it npuzero's, and the one it was; options that go on from the first run."""

    ours: str
    theirs: str
    longer: tuple[str, ...]


EXAMPLES = {
    "accelerate": FrameworkExample(
        "from npuzero.accelerate import ZeroAccelerator as Accelerator",
        "from accelerate import Accelerator",
        ("--epochs", "1"),
    ),
    "trainer": FrameworkExample(
        "from npuzero.transformers import ZeroTrainer as Trainer",
        "from transformers import Trainer",
        ("--steps", "16"),
    ),
    "lightning": FrameworkExample('STRATEGY = "npuzero"', 'STRATEGY = "ddp"', ("--epochs", "3")),
}
pytestmark = [pytest.mark.slow, pytest.mark.world]
every_example = pytest.mark.parametrize("name", EXAMPLES)


def example_script(name: str) -> Path:
    return ROOT / "examples" / name / "train.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an example as it stands, run on two ranks."""
    folders: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            run_script(example_script(name), 2, folders[name], "--out", "out")
        return folders[name] / "out"

    return folder_of


@every_example
def test_it_ends_with_the_weights_of_ddp(name: str, trained: Callable[[str], Path], tmp_path: Path) -> None:
    example, text = EXAMPLES[name], example_script(name).read_text("utf-8")
    line = re.search(rf"^{re.escape(example.ours)}  # it was: (.*)$", text, re.MULTILINE)
    assert line is not None and line[1] in example.theirs
    (tmp_path / "before.py").write_text(text.replace(line[0], example.theirs) + AT_ONCE)
    run_script(tmp_path / "before.py", 2, tmp_path, "--out", "out")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (trained(name), tmp_path / "out"))
    assert ours.keys() == theirs.keys()
    assert all((ours[key] - theirs[key]).abs().max() < 1e-5 for key in theirs)


@every_example
def test_one_rank_goes_on_from_two_and_from_pretrained_loads_it(name: str, trained: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    folder = trained(name)
    before = load_file(folder / "model.safetensors")
    run_script(example_script(name), 1, folder.parent, "--out", "out", "--resume", *EXAMPLES[name].longer)
    after = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert max((after[key] - before[key]).abs().max() for key in before) > 1e-4


def test_accelerate_launch_starts_it(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    how = ["--num_machines", "1", "--mixed_precision", "bf16", "--dynamo_backend", "no", "--main_process_port", "0"]
    program = tmp_path / "program.py"
    program.write_text(
        example_script("accelerate").read_text("utf-8").replace("mixed_precision=options.precision", "")
        + 'print(f"rank {accelerator.process_index} computes in {accelerator.mixed_precision}\\n")\n'
    )
    ended = subprocess.run(
        [*launch, *how, str(program), "--out", str(tmp_path / "out")],
        timeout=300,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert {"rank 0 computes in bf16", "rank 1 computes in bf16"} <= set(ended.stdout.splitlines())
    assert (tmp_path / "out" / "model.safetensors").is_file()
