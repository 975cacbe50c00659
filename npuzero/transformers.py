"""Integration with transformers: a Trainer that shards the model it trains.

Needs the packages transformers and accelerate, which only npuzero's integrations import.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from npuzero import adopt
from npuzero.api import load_full_state_dict
from npuzero.errors import CheckpointError, ConfigError, describe_differing_names

try:
    import safetensors.torch
    from transformers import Seq2SeqTrainer, Trainer, __version__
    from transformers.trainer import SCHEDULER_NAME
    from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME

    if not hasattr(Trainer, "_build_accelerator_args"):
        raise ImportError(f"transformers {__version__}, which is older than 5.3")
except ImportError as error:
    raise adopt.package_missing_error("npuzero.transformers", "transformers", error) from error

from npuzero.accelerate import ZeroAccelerator
from npuzero.checkpoint.weight_files.read_weights import find_weight_tensors
from npuzero.shard.state_dict import override_state_dict

__all__ = ["ZeroTrainer"]


class ZeroTrainer(Trainer):
    """Extend transformers' Trainer to shard the model when training begins.

    A script changes only the class name. To shard with a Trainer subclass of the program or of a library, make this the
    first base: ``class MyTrainer(ZeroTrainer, SFTTrainer)``. Optimizer, scheduler, accumulation, clipping, mixed
    precision, evaluation, early stopping and the arguments are the Trainer's. On CPU ranks set ``ddp_backend="gloo"``,
    as for any Trainer.

    ``save_model`` writes the files that ``from_pretrained`` loads, gathered on rank 0. A ``checkpoint-N`` also contains
    each rank's shards; ``resume_from_checkpoint`` loads them under any plan and number of ranks, and continues
    bit-identically on the same plan and ranks. Checkpoints of the plain Trainer can also be resumed.

    Args:
        zero: keyword arguments of :func:`npuzero.zero`, such as ``{"stage": 2}``; None: those of the class attribute
            ``zero``, by default stage 3.
        args, kwargs: the Trainer's own.

    Raises:
        ConfigError: the training arguments also request DeepSpeed or FSDP.

    Example::

        trainer = ZeroTrainer(model, arguments, train_dataset=rows, zero={"stage": 3})
        trainer.train()
        trainer.save_model("weights")
    """

    zero: Mapping[str, Any] | None = None

    def __init__(self, *args: Any, zero: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if zero is not None:
            self.zero = zero
        super().__init__(*args, **kwargs)

    # -- preparing -------------------------------------------------------------------------------------------------

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return self._accelerator_arguments

    def create_accelerator_and_postprocess(self) -> None:
        """Create a ZeroAccelerator from the arguments that the Trainer builds for its accelerator."""
        if self.args.deepspeed or self.args.fsdp:
            raise ConfigError(
                "ZeroTrainer",
                expected="training arguments that leave sharding to npuzero",
                got="deepspeed" if self.args.deepspeed else "fsdp",
                do="Leave it out, and choose the plan by zero={...}.",
            )
        super().create_accelerator_and_postprocess()
        self.accelerator = ZeroAccelerator(zero=self.zero, **self._accelerator_arguments)
        self.gather_function = self.accelerator.gather_for_metrics
        if "use_gather_object" in inspect.signature(self.gather_function).parameters:
            self.gather_function = functools.partial(
                self.gather_function, use_gather_object=self.args.eval_use_gather_object
            )

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Create the scheduler, or check the scheduler that was passed to the Trainer."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        adopt.check_scheduler(scheduler)
        return scheduler

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Evaluate a batch. If forward all-gathers parameters, ranks of a Seq2SeqTrainer generate equally long."""
        if isinstance(self, Seq2SeqTrainer) and adopt.gathers_parameters(self.model):
            gen_kwargs = {"synced_gpus": True, **(gen_kwargs or getattr(self, "_gen_kwargs", {}))}
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)

    # -- saving and loading ----------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the files that ``from_pretrained`` loads. Collective if the model is sharded (once it trains)."""
        if not adopt.is_sharded(self.model):
            super().save_model(output_dir, _internal_call)
            return
        # Every rank takes part in the gather; the writing rank holds the full state in host memory.
        state = self.accelerator.get_state_dict(self.model)
        with override_state_dict(self.model, state):
            self._save(output_dir or self.args.output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not adopt.is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        adopt.save_adopted(Path(output_dir, adopt.FOLDER), self.model, _unwrap_optimizer(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not adopt.is_sharded(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif not _has_shards(resume_from_checkpoint):  # otherwise they are loaded with the optimizer's
            _load_weights(self.model, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _has_shards(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        adopt.load_adopted(Path(checkpoint, adopt.FOLDER), self.model, _unwrap_optimizer(self.optimizer))
        state = torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(state)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if not adopt.is_sharded(self.model):
            super()._load_best_model()
        elif _has_shards(best):
            adopt.load_adopted(Path(best, adopt.FOLDER), self.model, None)
        else:
            _load_weights(self.model, Path(best))


def _load_adapters(model: Any, folder: Path) -> None:
    """Load the files written by PEFT's ``save_pretrained`` into the adapters of a sharded model. Collective."""
    import peft

    named = model.state_dict(keep_vars=True)
    state: dict[str, torch.Tensor] = {}
    for adapter in model.peft_config:
        path = folder if adapter == "default" else folder / adapter
        stored = _adapter_tensors(path)
        if not isinstance(model, peft.PeftModel):  # transformers' own adapter, stored with the names of PEFT's wrapper
            stored = {key.removeprefix("base_model.model."): tensor for key, tensor in stored.items()}
        # PEFT leaves the adapter's name out of the stored names: this maps each tensor to its stored name.
        with override_state_dict(model, named):
            names = {id(tensor): name for name, tensor in named.items()}
            saved = peft.get_peft_model_state_dict(model, state_dict={**named}, adapter_name=adapter)
        if saved.keys() != stored.keys():
            missing, unknown = sorted(saved.keys() - stored.keys()), sorted(stored.keys() - saved.keys())
            raise CheckpointError(
                f"adapter {adapter!r} in {path}",
                expected="the tensors of the model's adapter",
                got=describe_differing_names(missing, unknown),
                do="Load the files of an adapter of the same configuration.",
            )
        state |= {names[id(tensor)]: stored[key] for key, tensor in saved.items()}
    load_full_state_dict(model, state, strict=False)


def _adapter_tensors(folder: Path) -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor]
    if (file := folder / ADAPTER_SAFE_WEIGHTS_NAME).is_file():
        stored = safetensors.torch.load_file(file)
    elif (file := folder / ADAPTER_WEIGHTS_NAME).is_file():
        stored = torch.load(file, map_location="cpu", weights_only=True)
    else:
        raise CheckpointError(
            f"adapters in {folder}",
            expected=f"{ADAPTER_SAFE_WEIGHTS_NAME} or {ADAPTER_WEIGHTS_NAME}",
            got="no such file",
            do="Load a folder that save_pretrained of a model with adapters has written.",
        )
    return stored


def _unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return npuzero's optimizer from inside accelerate's wrapper."""
    inner: torch.optim.Optimizer = optimizer.optimizer
    return inner


def _has_shards(folder: str) -> bool:
    return Path(folder, adopt.FOLDER).is_dir()


def _load_weights(model: nn.Module, folder: Path) -> None:
    """Load the files written by ``save_pretrained`` into a sharded model: weights or adapters. Collective.

    Raises:
        CheckpointError: the files do not exist, or do not fit.
    """
    if isinstance(getattr(model, "peft_config", None), dict):
        _load_adapters(model, folder)
        return
    files = {entry.file for entry in find_weight_tensors(folder).values()}
    state = {name: value for file in sorted(files) for name, value in safetensors.torch.load_file(file).items()}
    # The files store tied tensors under one name.
    names: dict[int, str] = {}
    named = model.state_dict(keep_vars=True)
    for name, tensor in named.items():
        if name in state:
            names[id(tensor)] = name
    state.update({name: state[names[id(t)]] for name, t in named.items() if name not in state and id(t) in names})
    load_full_state_dict(model, state)
