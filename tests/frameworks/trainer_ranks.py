"""Ranks that train by transformers' Trainer, sharded and by DistributedDataParallel: FOLDER CASE...

For each case FOLDER gets CASE.pt: both final weights and histories, and what a second Trainer got by resuming.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import npuzero
from npuzero import adopt
from npuzero.transformers import ZeroTrainer

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
STEPS = 8


class ReferenceTrainer(Trainer):
    """The plain Trainer, which on CPU ranks computes in float32 where it is asked for float16: here as on a GPU."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.accelerator.mixed_precision == "fp16":
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)


class OwnLossTrainer:
    """A Trainer of a library's kind: a loss and an optimizer of its own."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = 0.5 * outputs.loss
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate, momentum=0.9)
        return self.optimizer


class OwnTrainer(OwnLossTrainer, ReferenceTrainer):
    pass


class OwnZeroTrainer(ZeroTrainer, OwnTrainer):
    zero: ClassVar[dict[str, float]] = {"stage": 1.5}


def build_trainer_llama(tied: bool = False) -> LlamaForCausalLM:
    """The same values wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = LlamaConfig(vocab_size=32, use_cache=False, tie_word_embeddings=tied, **SIZES)
        return LlamaForCausalLM(config)


def build_lora_llama() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(4)
        return get_peft_model(
            build_trainer_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )


def given_optimizers(model: nn.Module) -> dict[str, Any]:
    """An optimizer and its scheduler, made before the Trainer."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8))}


@dataclass
class TrainerCase:
    """What is trained, how, and by which classes."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] | None = None
    model: Callable[[], nn.Module] = build_trainer_llama
    options: Callable[[nn.Module], dict[str, Any]] = lambda _: {}
    plain: type[Trainer] = ReferenceTrainer
    sharded: type[ZeroTrainer] = ZeroTrainer
    resumes: bool = True


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
CASES = {
    "best": TrainerCase({**BEST, "greater_is_better": True, "lr_scheduler_type": "cosine"}, {"stage": 3}),
    # In 16 bits a last place now and then rounds a product to its neighbour, and Adam makes steps of lr of it.
    "bf16": TrainerCase({"bf16": True, "gradient_accumulation_steps": 1, "learning_rate": 1e-3}, {"stage": 2}),
    "fp16": TrainerCase({"fp16": True, "weight_decay": 0.1, "learning_rate": 1e-3}, {"stage": 3}),
    "stops": TrainerCase(
        BEST,
        options=lambda _: {"callbacks": [EarlyStoppingCallback(1, early_stopping_threshold=10.0)]},
        resumes=False,
    ),
    "own": TrainerCase(plain=OwnTrainer, sharded=OwnZeroTrainer),
    "given": TrainerCase({"activation_checkpointing": True}, options=given_optimizers, zero={"stage": 1}),
    "compiled": TrainerCase({"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    "tied": TrainerCase(
        {**BEST, "greater_is_better": True, "save_only_model": True},
        model=functools.partial(build_trainer_llama, tied=True),
        resumes=False,
    ),
    "lora": TrainerCase(model=build_lora_llama),
}


def token_rows() -> list[dict[str, Tensor]]:
    tokens = torch.randint(32, (64, 8), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in tokens]


def build_hf_trainer(kind: type[Trainer], case: TrainerCase, folder: Path, **more: Any) -> Trainer:
    base = {
        "use_cpu": True,
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "warmup_steps": 2,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
    }
    model, data = case.model(), token_rows()
    arguments = TrainingArguments(str(folder), **{**base, **case.arguments})
    return kind(model, arguments, train_dataset=data, eval_dataset=data[:8], **case.options(model), **more)


def trainer_weights(trainer: Trainer) -> dict[str, Tensor]:
    model = trainer.model
    state = npuzero.full_state_dict(model) if adopt.is_sharded(model) else model.state_dict()
    return {name: value.clone() for name, value in state.items()}


def train_then_evaluate(trainer: Trainer, resume: str | None = None) -> dict[str, Any]:
    trainer.train(resume_from_checkpoint=resume)
    told = ("loss", "grad_norm", "learning_rate", "eval_loss")
    history = [{name: entry[name] for name in told if name in entry} for entry in trainer.state.log_history]
    evaluated = trainer.evaluate()["eval_loss"]
    return {
        "weights": trainer_weights(trainer),
        "history": history,
        "steps": trainer.state.global_step,
        "loss": evaluated,
    }


def generate_uneven_sequences(folder: Path) -> None:
    """Ranks whose sequences end at 4 and at 9 tokens, under stage 3."""

    class Both(ZeroTrainer, Seq2SeqTrainer):
        pass

    class Stops(StoppingCriteria):
        def __call__(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
            return torch.full((tokens.shape[0],), tokens.shape[1] >= (4, 9)[rank])

    torch.manual_seed(3)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    common = {"use_cpu": True, "ddp_backend": "gloo", "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    arguments = Seq2SeqTrainingArguments(
        str(folder / "generates"), max_steps=1, predict_with_generate=True, per_device_eval_batch_size=2, **common
    )
    trainer = Both(T5ForConditionalGeneration(T5Config(vocab_size=32, **sizes)), arguments, train_dataset=token_rows())
    trainer.train()
    rank = trainer.accelerator.process_index
    batch = {name: value[None] for name, value in token_rows()[0].items()}
    own, generate = [], trainer.model.generate

    def noted(**options: Any) -> Tensor:
        tokens = generate(**options)
        own.append(tokens.shape[1])
        return tokens

    trainer.model.generate = noted
    trainer.prediction_step(trainer.model, batch, False, max_length=12, stopping_criteria=[Stops()])
    lengths = trainer.accelerator.gather(torch.tensor(own))
    if rank == 0:
        torch.save({"lengths": lengths.tolist()}, folder / "generates.pt")


def main() -> None:
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        if name == "generates":
            generate_uneven_sequences(folder)
            continue
        case = CASES[name]
        plain = build_hf_trainer(case.plain, case, folder / f"{name}.ddp")
        found = {"ddp": train_then_evaluate(plain)}
        more = {} if case.zero is None else {"zero": case.zero}
        sharded = build_hf_trainer(case.sharded, case, folder / f"{name}.zero", **more)
        found["zero"] = train_then_evaluate(sharded)
        sharded.save_model(str(folder / f"{name}.saved"))
        if case.resumes:
            found |= {
                kind: train_then_evaluate(
                    build_hf_trainer(case.sharded, case, folder / f"{name}.again", **more),
                    str(folder / f"{name}.{origin}" / "checkpoint-4"),
                )
                for kind, origin in (("resumed", "zero"), ("taken over", "ddp"))
            }
        if sharded.is_world_process_zero():
            torch.save(found, folder / f"{name}.pt")
            shutil.rmtree(folder / f"{name}.again", ignore_errors=True)


if __name__ == "__main__":
    main()
