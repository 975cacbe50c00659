"""The fine-tuning example: from files that transformers wrote to files that transformers, or PEFT, loads."""

from __future__ import annotations

import json
from pathlib import Path

import adapters
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from examples.test_gpt_train import run_process_group

LONGER = ["--steps", "40", "--lr", "1e-2"]
FOLDER = Path(__file__).parents[2] / "examples" / "finetune"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    run_process_group([str(FOLDER / "pretrained.py"), str(folder)])
    assert len(list(folder.glob("*.safetensors"))) > 1, "several files, to be read by their index"
    return folder


def dialect_losses(model: torch.nn.Module) -> list[float]:
    """Over sentences of either dialect: those it was trained on before, and those it was fine-tuned on."""
    small = torch.tensor([list(b"the red fox jumps over the hill and sleeps till ")])
    large = torch.tensor([list(b"THE RED FOX JUMPS OVER THE HILL AND SLEEPS TILL ")])
    with torch.no_grad():
        return [float(model(input_ids=tokens, labels=tokens).loss) for tokens in (small, large)]


def fine_tune(ranks: int, pretrained: Path, out: Path, *how: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    run_process_group([*torchrun, str(FOLDER / "finetune.py"), str(pretrained), "--out", str(out), *how])
    result = json.loads((out / "result.json").read_text())
    assert result["ranks"] == ranks and result["losses"][-1] < 0.5 * result["losses"][0]


@pytest.mark.world
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fine_tuning(ranks: int, pretrained: Path, tmp_path: Path) -> None:
    fine_tune(ranks, pretrained, tmp_path)
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (pretrained, tmp_path))
    assert dialect_losses(after)[1] < 0.5 * dialect_losses(before)[1]


@pytest.mark.world
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's, of transformers' names
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_adapters_of_peft(ranks: int, pretrained: Path, tmp_path: Path) -> None:
    fine_tune(ranks, pretrained, tmp_path, "--lora", "8", "--precision", "fp32", *LONGER)
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    assert adapter and all("lora_" in name for name in adapter)
    base = AutoModelForCausalLM.from_pretrained(pretrained)
    before = dialect_losses(base)
    assert dialect_losses(PeftModel.from_pretrained(base, tmp_path))[1] < 0.7 * before[1]


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_of_ones_own_are_merged_under_the_names_of_the_base(
    ranks: int, pretrained: Path, tmp_path: Path
) -> None:
    """What the merged files compute is what the adapted model does."""
    fine_tune(ranks, pretrained, tmp_path / "own", "--adapters", "8", *LONGER)
    own = tmp_path / "own/adapters.safetensors"
    trained = load_file(own)
    assert len(trained) == 2 * 3 * 7 and {name.rpartition(".")[2] for name in trained} == set(adapters.THIN)

    adapters.merge(pretrained, own, tmp_path / "merged")
    merged, base = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "merged", pretrained))
    before = dialect_losses(base)
    adapters.adapt(base, 8)
    missing, unexpected = base.load_state_dict(trained, strict=False)
    assert not unexpected and not any(name.endswith(adapters.THIN) for name in missing)
    assert dialect_losses(merged) == pytest.approx(dialect_losses(base), rel=1e-5)
    assert dialect_losses(merged)[1] < 0.7 * before[1]
    assert {file.name for file in pretrained.iterdir()} == {file.name for file in (tmp_path / "merged").iterdir()}


def test_adapters_of_another_base_are_refused(pretrained: Path, tmp_path: Path) -> None:
    save_file({"model.layers.7.mlp.up_proj.up": torch.zeros(2, 2)}, tmp_path / "adapters.safetensors")
    with pytest.raises(KeyError, match=r"has not: model\.layers\.7\.mlp\.up_proj\.up"):
        adapters.merge(pretrained, tmp_path / "adapters.safetensors", tmp_path / "merged")
