"""transformers' door: the weights of DistributedDataParallel, checkpoints that go on, what from_pretrained loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

import npuzero
from frameworks.toys import BOUND, ROOT, launch_torchrun, max_difference
from npuzero.shard.find_engine import engine_of

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from frameworks.trainer_ranks import (
    CASES,
    STEPS,
    TrainerCase,
    build_hf_trainer,
    build_lora_llama,
    build_trainer_llama,
    token_rows,
    trainer_weights,
)
from npuzero.transformers import ZeroTrainer
from test_docstrings import find_example

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
RANKS = ROOT / "tests" / "frameworks" / "trainer_ranks.py"
QUICK = ("best",)
REST = tuple(name for name in CASES if name not in QUICK)
every_case = pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in REST)])


@pytest.mark.world
@every_case
def test_two_ranks_train_as_under_ddp(name: str, cases: Callable[[str], Path]) -> None:
    """Schedules, accumulation, clipping, evaluation, early stopping and the best model are the Trainer's."""
    found = torch.load(cases(name) / f"{name}.pt", weights_only=True)
    ddp, zero = found["ddp"], found["zero"]
    begin = (build_lora_llama if name == "lora" else lambda: build_trainer_llama(tied=name == "tied"))().state_dict()
    assert max_difference(zero["weights"], begin) > 1e-3
    assert max_difference(ddp["weights"], zero["weights"]) < BOUND
    assert zero["loss"] == pytest.approx(ddp["loss"], abs=BOUND)
    assert zero["steps"] == ddp["steps"] == (4 if name == "stops" else STEPS)
    assert len(zero["history"]) == len(ddp["history"]) > 4
    for ours, theirs in zip(zero["history"], ddp["history"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.world
@every_case
def test_a_second_trainer_goes_on_from_a_checkpoint(name: str, cases: Callable[[str], Path]) -> None:
    """To the bit from one's own; from one of the plain Trainer's within what both differ."""
    if not CASES[name].resumes:
        pytest.skip("its checkpoints have no optimizer, or it has stopped before")
    found = torch.load(cases(name) / f"{name}.pt", weights_only=True)
    assert max_difference(found["resumed"]["weights"], found["zero"]["weights"]) == 0
    assert max_difference(found["taken over"]["weights"], found["ddp"]["weights"]) < BOUND
    assert found["resumed"]["steps"] == STEPS


@pytest.mark.world
@every_case
def test_from_pretrained_loads_what_save_model_left(name: str, cases: Callable[[str], Path]) -> None:
    folder = cases(name) / f"{name}.saved"
    trained = torch.load(cases(name) / f"{name}.pt", weights_only=True)["zero"]["weights"]
    if name == "lora":
        from peft import PeftModel

        assert {file.name for file in folder.glob("*.safetensors")} == {"adapter_model.safetensors"}
        loaded = PeftModel.from_pretrained(build_trainer_llama(), folder)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert max_difference(loaded.state_dict(), trained) == 0


@pytest.mark.world
def test_a_checkpoint_of_two_ranks_goes_on_on_one(cases: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = cases("best") / "best.zero" / "checkpoint-4"
    trainer = build_hf_trainer(
        ZeroTrainer, TrainerCase({"max_steps": 5, "save_strategy": "no"}), tmp_path, zero={"stage": 2}
    )
    trainer.train(resume_from_checkpoint=str(checkpoint))
    begun = load_file(checkpoint / "model.safetensors")
    assert 1e-4 < max_difference(trainer_weights(trainer), begun) < 0.1 and trainer.state.global_step == 5
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates[-1] == pytest.approx(1e-2 * 0.75), "where the cosine of 8 steps was at step 4, after 2 of warmup"


def test_evaluation_comes_before_training_and_training_again(tmp_path: Path) -> None:
    """The second train() finds the model sharded, and a checkpoint without shards."""
    trainer = build_hf_trainer(ZeroTrainer, TrainerCase({"max_steps": 2, "save_only_model": True}), tmp_path)
    before = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(tmp_path / "whole"))
    assert (
        max_difference(
            AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict(), build_trainer_llama().state_dict()
        )
        == 0
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    trained = trainer_weights(trainer)
    kept = shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "kept")
    trainer.args.max_steps = 4
    trainer.train()
    assert max_difference(trainer_weights(trainer), trained) > 1e-3
    trainer.args.max_steps = 2
    trainer.train(resume_from_checkpoint=str(kept))  # one more step, of a rate that is still zero
    assert max_difference(trainer_weights(trainer), trained) == 0


def test_adapters_and_modules_to_save_are_saved_and_are_the_best_model(tmp_path: Path) -> None:
    """strict, so that one rank's parameters are guarded as those of many; a checkpoint has adapters alone."""
    from peft import LoraConfig, PeftModel, get_peft_model

    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    case = TrainerCase(
        {"max_steps": 4, "save_only_model": True, **best},
        model=lambda: get_peft_model(
            build_trainer_llama(), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        ),
    )
    trainer = build_hf_trainer(
        ZeroTrainer, case, tmp_path, zero={"stage": 3, "settings": npuzero.Settings(strict=True)}
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    first, last = (
        PeftModel.from_pretrained(build_trainer_llama(), tmp_path / f"checkpoint-{n}").state_dict() for n in (2, 4)
    )
    assert max_difference(trainer_weights(trainer), first) == 0 and max_difference(first, last) > 1e-3
    trainer.args.max_steps = 4
    trainer.args.load_best_model_at_end = False
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert max_difference(trainer_weights(trainer), last) == 0
    (tmp_path / "checkpoint-4" / "adapter_model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(npuzero.CheckpointError, match="no such file"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    with pytest.raises(npuzero.StateError, match="full_state_dict"):
        trainer.model.base_model.state_dict()


@pytest.mark.parametrize("gathers", [True, False])
def test_generation_goes_on_until_all_ranks_have_finished(
    gathers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where forwards gather; with the program's own arguments beside it."""
    monkeypatch.setattr("npuzero.adopt.gathers_parameters", lambda _: gathers)

    class Both(ZeroTrainer, Seq2SeqTrainer):
        pass

    arguments = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, predict_with_generate=True, report_to=[])
    trainer, asked = Both(build_trainer_llama(), arguments), []
    trainer.model.config.pad_token_id = 0

    def generate(**options: object) -> torch.Tensor:
        asked.append(options)
        return torch.zeros(2, 9, dtype=torch.long)

    monkeypatch.setattr(trainer.model, "generate", generate)
    trainer.predict(token_rows()[:2], max_length=9)
    trainer.predict(token_rows()[:2], max_length=9, synced_gpus=False)
    assert [options["synced_gpus"] for options in asked] == [gathers, False]
    assert all(options["max_length"] == 9 for options in asked)


@pytest.mark.world
@pytest.mark.slow
def test_ranks_generate_unequal_lengths(tmp_path: Path) -> None:
    launch_torchrun(RANKS, tmp_path, "generates")
    found = torch.load(tmp_path / "generates.pt", weights_only=True)
    assert found["lengths"] == [4, 9], "each rank's own are not longer for the wait"


def test_the_plan_is_said_by_the_class_or_where_it_is_made(tmp_path: Path) -> None:
    class Second(ZeroTrainer):
        zero: ClassVar[dict[str, int]] = {"stage": 2}

    case = TrainerCase({"max_steps": 1, "eval_strategy": "no", "save_strategy": "no"})
    plans = {}
    for name, kind, more in (
        ("default", ZeroTrainer, {}),
        ("class", Second, {}),
        ("made", Second, {"zero": {"plan": "hsdp"}}),
    ):
        trainer = build_hf_trainer(kind, case, tmp_path, **more)
        trainer.train()
        plans[name] = engine_of(trainer.model).plan.name
    assert plans == {"default": "zero3", "class": "zero2", "made": "hsdp"}


@pytest.mark.parametrize("other", ["deepspeed", "fsdp"])
def test_sharding_by_something_else_is_refused(other: str, tmp_path: Path) -> None:
    arguments = build_hf_trainer(Trainer, TrainerCase(), tmp_path).args
    setattr(arguments, other, "full_shard")
    with pytest.raises(npuzero.ConfigError, match=rf"got {other}\. Leave it out"):
        ZeroTrainer(build_trainer_llama(), arguments)


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    trainer = build_hf_trainer(ZeroTrainer, TrainerCase({"max_steps": 1, "save_strategy": "no"}), tmp_path)
    trainer.train()
    build_trainer_llama().model.save_pretrained(tmp_path / "checkpoint-1")
    trainer.state.save_to_json(str(tmp_path / "checkpoint-1" / "trainer_state.json"))
    with pytest.raises(npuzero.CheckpointError, match=r"model\.embed_tokens\.weight"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_the_example_of_its_docstring_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = build_hf_trainer(Trainer, TrainerCase({"max_steps": 1}), tmp_path / "run")
    names = {"ZeroTrainer": ZeroTrainer, "model": build_trainer_llama(), "arguments": plain.args, "rows": token_rows()}
    plain.args.eval_strategy = plain.args.save_strategy = "no"
    exec(find_example(ZeroTrainer), names)
    assert (tmp_path / "weights" / "model.safetensors").is_file()
