"""Save and load checkpoints by tag as DeepSpeed's engine does, in npuzero's own files."""

from __future__ import annotations

import argparse
import os
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from npuzero import checkpoint
from npuzero.api import export, full_state_dict
from npuzero.arguments import read_text
from npuzero.comm import World
from npuzero.compat.deepspeed.recipe import EngineRecipe
from npuzero.errors import CheckpointError, ConfigError
from npuzero.optim import LossScaler

#: The file that holds the last tag.
LATEST = "latest"
_COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def _convert_to_plain(value: Any) -> Any:
    """Return ``value`` converted to types that load without running code; programs often pass other ones."""
    if isinstance(value, argparse.Namespace):
        return _convert_to_plain(vars(value))
    if type(value) in (dict, defaultdict) or (isinstance(value, Mapping) and not isinstance(value, dict)):
        return {_convert_to_plain(key): _convert_to_plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_convert_to_plain, value))
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


class EngineCheckpoints:
    """Save and load an engine's training state."""

    module: nn.Module
    optimizer: Any
    lr_scheduler: Any
    recipe: EngineRecipe
    world: World
    scaler: LossScaler | None
    global_steps: int

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Write the training state under ``save_dir/tag``. Collective.

        The files are npuzero's own, which any stage on any number of ranks loads; see :func:`npuzero.checkpoint.save`.

        Args:
            save_dir: a folder that all ranks share.
            tag: the same on every rank; None means ``global_step<n>``.
            client_state: numbers, texts, tensors and containers of them; rank 0's are saved. NumPy's numbers are loaded
                as Python's, a ``defaultdict`` and an ``argparse.Namespace`` as dicts.
            save_latest: whether a load without a tag takes this one.

        Returns:
            True.

        Raises:
            ConfigError: ranks pass different tags.
            CheckpointError: a rank cannot write.

        Example::

            engine.save_checkpoint("run", client_state={"epoch": 3})
        """
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        said = self.world.exchange(name)
        if set(said) != {name}:
            raise ConfigError(
                "save_checkpoint", expected="one tag on all ranks", got=", ".join(said), do="Pass the same everywhere."
            )
        extra = {
            "counts": {count: getattr(self, count) for count in _COUNTS},
            "client_state": _convert_to_plain(client_state or {}),
        }
        folder = Path(save_dir) / name
        checkpoint.save(
            folder,
            self.module,
            self.optimizer,
            step=self.global_steps,
            scheduler=self.lr_scheduler,
            scaler=self.scaler,
            extra=extra,
            keep_last=1,
        )
        if save_latest and self.world.rank == 0:
            new = Path(save_dir) / f".{LATEST}"
            new.write_text(name, encoding="utf-8")
            new.replace(Path(save_dir) / LATEST)
        self.world.exchange(None)  # no rank looks for the file before it exists
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from a checkpoint of :meth:`save_checkpoint`, written by any stage on any number of ranks. Collective.

        Args:
            load_dir: as given to :meth:`save_checkpoint`.
            tag: None means the last tag that was saved as the latest.
            load_optimizer_states: whether moments are loaded; otherwise they start from zero.
            load_lr_scheduler_states: whether the schedule is loaded.
            load_module_only: load only the weights and the client's state.

        Returns:
            The checkpoint's path and the client's state; (None, None), as in DeepSpeed, if no tag is given and none was
            saved.

        Raises:
            CheckpointError: it is damaged, does not fit, or was written by DeepSpeed.

        Example::

            path, client_state = engine.load_checkpoint("run")
        """
        latest = Path(load_dir) / LATEST
        if tag is None and not latest.is_file():
            return None, None
        folder = Path(load_dir) / (read_text(latest).strip() if tag is None else str(tag))
        if any(folder.glob("mp_rank_*_model_states.pt")):
            raise CheckpointError(
                f"checkpoint {folder}",
                expected="one that npuzero has written",
                got="one of DeepSpeed's",
                do="Make weights of it by its zero_to_fp32.py, and load them into the model before initialize().",
            )
        # The loss scaler belongs to the optimizer states: a load without them keeps the present scale.
        whole = not load_module_only
        loaded = checkpoint.load(
            folder,
            self.module,
            self.optimizer if whole and load_optimizer_states else None,
            scheduler=self.lr_scheduler if whole and load_lr_scheduler_states else None,
            scaler=self.scaler if whole and load_optimizer_states else None,
            rng=whole,
        )
        extra = loaded.extra or {}
        for count, value in extra.get("counts", {}).items() if whole else ():
            setattr(self, count, value)
        return str(loaded.path), extra.get("client_state", {})

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the unsharded weights into one file, in the parameters' dtype. Collective.

        Args:
            save_dir: created if missing.
            save_filename: ``*.safetensors`` is written by :func:`npuzero.export`, any other name by ``torch.save``.
            exclude_frozen_parameters: leave out parameters that do not train.

        Returns:
            Whether the file was written. If parameters are sharded and the configuration lacks
            ``stage3_gather_16bit_weights_on_model_save``, the call only warns and returns False, as in DeepSpeed.

        Example::

            engine.save_16bit_model("exported", "model.safetensors")
        """
        if self.recipe.plan.parameters.axes and not self.recipe.conduct.gathers_on_save:
            if self.world.rank == 0:
                warnings.warn(
                    f"save_16bit_model() wrote nothing into {save_dir}: parameters are sharded, and the configuration "
                    "lacks zero_optimization.stage3_gather_16bit_weights_on_model_save: true. Say it, or call "
                    "npuzero.export(engine.module, path).",
                    UserWarning,
                    stacklevel=2,
                )
            return False
        frozen = {name for name, parameter in self.module.named_parameters() if not parameter.requires_grad}
        left_out = frozen if exclude_frozen_parameters else set()
        path = Path(save_dir) / save_filename
        if self.world.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
        # export() and full_state_dict() are collective: every rank calls them.
        if path.suffix == ".safetensors":
            export(self.module, path, rename=lambda name: None if name in left_out else name)
            return True
        state = full_state_dict(self.module)
        if self.world.rank == 0:
            torch.save({name: value for name, value in state.items() if name not in left_out}, path)
        self.world.exchange(None)
        return True

    save_fp16_model = save_16bit_model
