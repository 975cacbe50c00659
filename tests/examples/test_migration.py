"""docs/migration.md: twelve lines a side, and the same weights by both sides, where the left one runs on CPU ranks."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import documents
from documents import ROOT
from examples.pages import AT_ONCE, run_program_text

PAGE = "docs/migration.md"
TEXT = (ROOT / PAGE).read_text("utf-8")
PAIRS = dict(re.findall(r"^## ([^\n]+)\n\n(<table>.*?</table>)", TEXT, re.DOTALL | re.MULTILINE))
SETUP = documents.find_page_blocks(PAGE)[0].code
#: What the left programs leave, as float32: a package, how to ask for their weights, and what makes both sides float32.
LEFT = {
    "DeepSpeed": (
        "deepspeed",
        "from deepspeed.utils import safe_get_full_fp32_param\n"
        "weights = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}",
        {'"enabled": True': '"enabled": False', ', precision="bf16"': ""},
    ),
    "FSDP2": (
        "torch",
        "weights = {name: value.full_tensor() for name, value in model.state_dict().items()}",
        {"torch.bfloat16": "torch.float32"},
    ),
    "accelerate": ("accelerate", "weights = accelerator.unwrap_model(model).state_dict()", {}),
}
SAVE = "if RANK == 0:\n    __import__('safetensors.torch').torch.save_file(weights, 'left.safetensors')\n"


def pair_programs(pair: str) -> list[str]:
    """Left and right program of a pair."""
    return re.findall(r"^```(?:python|sh)\n(.*?)^```", PAIRS[pair], re.DOTALL | re.MULTILINE)


def test_there_is_a_pair_for_each() -> None:
    assert set(PAIRS) == {"DeepSpeed", "FSDP2", "MindSpeed", "InternEvo", "accelerate"}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_side_has_twelve_lines_and_npuzero_is_the_right_one(pair: str) -> None:
    left, right = pair_programs(pair)
    assert all(len([line for line in side.splitlines() if line]) <= 12 for side in (left, right))
    assert "npuzero." in right and "npuzero" not in left


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize(
    ("pair", "precision"), [(pair, "as shown") for pair in LEFT] + [(pair, "float32") for pair in LEFT if LEFT[pair][2]]
)
def test_both_sides_end_with_the_same_weights(
    pair: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, asked, changes = LEFT[pair]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # as `accelerate launch --cpu`: else CPU ranks do not meet
    left, right = pair_programs(pair)
    rounds = bool(changes) and precision == "as shown"  # in bfloat16, where Adam makes a step of a gradient's last bit
    if precision == "float32":
        for shown, changed in changes.items():
            left, right = left.replace(shown, changed), right.replace(shown, changed)
    run_program_text(f"{SETUP}\n{left}\n{asked}\n{SAVE}{AT_ONCE}", 2, tmp_path)
    run_program_text(f"{SETUP}\nimport npuzero\n{right}\nnpuzero.export(model, 'right', dtype='fp32')\n", 2, tmp_path)
    theirs, ours = load_file(tmp_path / "left.safetensors"), load_file(tmp_path / "right" / "model.safetensors")
    first = _first_weights()
    assert theirs.keys() == ours.keys() == first.keys()
    for name, value in ours.items():
        apart, trained = (value - theirs[name]).abs(), (value - first[name]).abs()
        assert trained.max() > 1e-2
        assert apart.mean() < 0.02 * trained.mean() if rounds else apart.max() < 1e-5


def _first_weights() -> dict[str, torch.Tensor]:
    namespace: dict[str, object] = {}
    exec(SETUP, namespace)
    return namespace["net"]().state_dict()
