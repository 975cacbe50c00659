"""The fine-tuning example: from files that transformers wrote to files that transformers, or PEFT, loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from examples.test_gpt_train import launch

FOLDER = Path(__file__).parents[2] / "examples" / "finetune"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    launch([str(FOLDER / "pretrained.py"), str(folder)])
    assert len(list(folder.glob("*.safetensors"))) > 1, "several files, to be read by their index"
    return folder


def losses(model: torch.nn.Module) -> list[float]:
    """Over sentences of either dialect: those it was trained on before, and those it was fine-tuned on."""
    small = torch.tensor([list(b"the red fox jumps over the hill and sleeps till ")])
    large = torch.tensor([list(b"THE RED FOX JUMPS OVER THE HILL AND SLEEPS TILL ")])
    with torch.no_grad():
        return [float(model(input_ids=tokens, labels=tokens).loss) for tokens in (small, large)]


@pytest.mark.world
def test_fine_tuning_on_two_ranks(pretrained: Path, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch([*torchrun, str(FOLDER / "finetune.py"), str(pretrained), "--out", str(tmp_path)])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ranks"] == 2 and result["losses"][-1] < 0.5 * result["losses"][0]
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (pretrained, tmp_path))
    assert losses(after)[1] < 0.5 * losses(before)[1]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's, of transformers' names
def test_adapters(pretrained: Path, tmp_path: Path) -> None:
    how = ["--lora", "8", "--steps", "40", "--lr", "1e-2", "--precision", "fp32"]
    launch([str(FOLDER / "finetune.py"), str(pretrained), "--out", str(tmp_path), *how])
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    assert adapter and all("lora_" in name for name in adapter)
    base = AutoModelForCausalLM.from_pretrained(pretrained)
    before = losses(base)
    assert losses(PeftModel.from_pretrained(base, tmp_path))[1] < 0.7 * before[1]
