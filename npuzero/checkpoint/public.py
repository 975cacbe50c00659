"""Provide the checkpoint API: save, load, latest, verify, and a Checkpointer that saves every N steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from npuzero.arguments import as_path, check_count, check_flag
from npuzero.checkpoint import folder as folders
from npuzero.checkpoint import loading
from npuzero.checkpoint import rng as generators
from npuzero.checkpoint.cut import CutTensor as CutTensor  # re-exported for the package's __getattr__
from npuzero.checkpoint.cut import load_state_dict as load_state_dict
from npuzero.checkpoint.cut import state_dict as state_dict
from npuzero.checkpoint.formats import item_files as files
from npuzero.checkpoint.layout import parts
from npuzero.checkpoint.layout.across_stages import StageShare
from npuzero.checkpoint.layout.parts import UnshardedEntry
from npuzero.checkpoint.loading import CheckpointLoader, Loaded
from npuzero.checkpoint.saving import CHANNEL, SaveJob, Saving, agree_on_save, get_saver
from npuzero.checkpoint.source import CheckpointReader
from npuzero.comm.watchdog.call_names import collective_call
from npuzero.errors import CheckpointError, refuse_unknown_keywords
from npuzero.plan import DATA, STAGE
from npuzero.shard.engine import Engine
from npuzero.shard.find_engine import engine_of
from npuzero.shard.parameters import across_stages as everyone
from npuzero.shard.parameters.check_repeated import check_replicated

PathLike = str | os.PathLike[str]


class Stateful(Protocol):
    """Describe a scheduler, loss scaler or data loader: any object with a state dict."""

    def state_dict(self) -> Any:
        """Return tensors, numbers, strings, and containers of these."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Load a state that ``state_dict`` returned."""


@refuse_unknown_keywords(async_save="asynchronous")
@torch.no_grad()
@collective_call("checkpoint.save")
def save(  # noqa: PLR0913 - what is to be saved, by name
    folder: PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    data: Stateful | None = None,
    rng: bool = True,
    extra: Any = None,
    keep_last: int | None = None,
    asynchronous: bool = False,
) -> Saving:
    """Write the checkpoint ``folder/step-<step>``, which any plan on any number of ranks can load. Collective.

    The folder gets this name when it is complete and durable on all ranks. If anything fails earlier, the previous
    checkpoint stays the latest. ``torch.distributed.checkpoint`` can read it.

    Args:
        folder: of the run, the same for all ranks, on a file system that their hosts share.
        model: made by :func:`npuzero.zero`.
        optimizer: an npuzero optimizer over its parameters.
        step: number of optimizer steps taken.
        scheduler, scaler: rank 0's state is saved.
        data: the position in the data, one for each rank that reads its own data.
        rng: whether to save the random number generators of each rank.
        extra: any further value; rank 0's is saved.
        keep_last: number of complete checkpoints to keep once this one is complete; older ones are removed. None keeps
            all.
        asynchronous: return once tensors in memory are copied to host memory; a thread writes them while training
            continues. Tensors on NVMe are not copied: training writes to other extents until the thread has read them.
            Later errors are raised by ``wait()`` and by the next save or load of this model.

    Raises:
        CheckpointError: on every rank, if one cannot write its part or passes other parts than rank 0, or if another
            job is saving into the folder.
        StateError: on every rank: tensor ranks hold different values of a replicated parameter.
        OutOfSpace: ``asynchronous``, and a disk has no room for the extents that training writes during the save;
            training can continue.
        ConfigError: ``step`` or ``keep_last`` is out of range, or the optimizer belongs to another model.

    Example::

        npuzero.checkpoint.save("run", model, optimizer, step=100, keep_last=3)  # writes run/step-100
    """
    _check_save_count("step", step, 0)
    asynchronous = check_flag("save: asynchronous", asynchronous)
    if keep_last is not None:
        _check_save_count("keep_last", keep_last, 1)
    engine = engine_of(model)
    saver = get_saver(engine)
    saver.finish()
    run = as_path("save: folder", folder)
    check_replicated(engine, f"save {run}", CHANNEL)
    job = SaveJob(run, step, keep_last, StageShare([], [], {}, None, []))
    # A local error must not leave the remaining ranks waiting: it goes to the saver, which exchanges it first.
    problem: Exception | None = None
    try:
        cut_optimizer = parts.get_cut_optimizer(model, optimizer)
        engine.values.settle()
        tensors, entries = parts.model_parts(model, engine), parts.model_entries(model)
        if cut_optimizer is not None:
            states, numbers = parts.optimizer_parts(model, engine, cut_optimizer)
            tensors, entries = tensors + states, entries + numbers
        stateful = {"scheduler": scheduler, "scaler": scaler}
        shared = [UnshardedEntry((name,), kept.state_dict()) for name, kept in stateful.items() if kept is not None]
        shared += [
            UnshardedEntry((name,), value)
            for name, value in {"extra": extra, "step": step}.items()
            if value is not None
        ]
        own = {} if data is None else {"data": data.state_dict()}
        if rng:
            own["rng"] = generators.capture_rng_state(engine.world.device)
        job = replace(
            job,
            share=parts.describe_stage(model, cut_optimizer),
            parts=tensors,
            entries=entries,
            shared=shared,
            groups=[] if cut_optimizer is None else cut_optimizer.param_groups,
            own=own,
            facts={"plan": engine.plan.name, "torch": torch.__version__},
        )
    except Exception as error:
        problem = error
    return saver.save(job, asynchronous=asynchronous, problem=problem)


@refuse_unknown_keywords()
@torch.no_grad()
@collective_call("checkpoint.load")
def load(
    folder: PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    data: Stateful | None = None,
    rng: bool = True,
) -> Loaded:
    """Resume from a checkpoint that any plan, precision and number of ranks wrote. Collective.

    Reads checkpoints of :func:`save`, and models with optimizers that ``torch.distributed.checkpoint`` wrote (FSDP2
    and plain torch). No code in a checkpoint is run. Data that npuzero wrote is used only after its checksum
    is verified.

    Args:
        folder: a checkpoint, or the folder of a run, for its latest complete checkpoint.
        model, optimizer: as for :func:`save`; without an optimizer only the weights are read.
        scheduler, scaler: load the state that was saved for them.
        data: loads this rank's position. If another number of ranks saved positions that differ, its
            ``load_state_dicts(positions)`` gets all positions.
        rng: whether to restore the random number generators, if the checkpoint has them. Ranks beyond the saved number
            get generators seeded from a saved state.

    Returns:
        The checkpoint, its step, and the ``extra`` that was saved.

    Raises:
        CheckpointError: on every rank: no checkpoint is found, it is damaged, or it does not fit. If damage is found
            during reading, the model is partly loaded and refuses to run until another load, as complete, succeeds.
        StateError: on every rank: the model is incomplete for another reason.

    Example::

        npuzero.checkpoint.save("run", model, optimizer, step=100)
        loaded = npuzero.checkpoint.load("run", model, optimizer)
        print(loaded.step)
    """
    # Three agreements: the path, the fit of names and shapes before the model changes, and the end of the reads. A
    # rank's error travels in the next one, so that all ranks raise.
    engine = engine_of(model)
    get_saver(engine).finish()
    world = engine.mesh.world
    problem: Exception | None = None
    share: dict[str, Any] | None = None
    try:
        engine.restorer.check_loadable(states=optimizer is not None)
        cut_optimizer = parts.get_cut_optimizer(model, optimizer)
        share = None if engine.mesh.index(STAGE) else asdict(parts.describe_stage(model, cut_optimizer))
    except Exception as error:
        problem = error
    path, shares = _agree_on_path(as_path("load: folder", folder), engine, problem, share)
    try:
        source = CheckpointReader(path)
        loader = CheckpointLoader(source, model, engine, cut_optimizer, shares)
        extra, taken = (source.read_object(k) if k in source.tensors else None for k in ("extra", "step"))
    except Exception as error:
        problem = error
    agree_on_save(world, f"load {path}", problem)
    with engine.restorer.loading("checkpoint.load", states=optimizer is not None):
        engine.values.settle()
        try:
            loader.load()
            if scheduler is not None:
                loader.load_scheduler(scheduler)
            if scaler is not None:
                scaler.load_state_dict(loading.read_shared_state(source, "scaler"))
            if data is not None:
                loading.restore_data(source, data, engine.mesh.index(DATA), engine.mesh.size(DATA))
            if rng and source.manifest is not None and "rng.0" in source.tensors:
                loading.restore_rng(source, world.rank, world.size, world.device)
        except Exception as error:
            problem = error
        agree_on_save(world, f"load {path}", problem)
        engine.values.restore_parameters()
    return Loaded(path, taken, extra)


def latest(folder: PathLike) -> Path | None:
    """Return the latest complete checkpoint in the folder of a run; None if it has none.

    Example::

        npuzero.checkpoint.save("run", model, step=100)
        print(npuzero.checkpoint.latest("run"))
    """
    return folders.latest_checkpoint(folder)


def verify(folder: PathLike) -> None:
    """Read all of a checkpoint, or of the latest one of a run, and verify it. Not collective; needs no model.

    Raises:
        CheckpointError: it is damaged; names the file and the item.

    Example::

        npuzero.checkpoint.save("run", model, step=100)
        npuzero.checkpoint.verify("run")
    """
    CheckpointReader(resolve_checkpoint(as_path("verify: folder", folder))).verify()


class Checkpointer:
    """Save every N steps, and resume from the latest save.

    Args:
        folder: of the run.
        every: steps between saves.
        keep_last, asynchronous: as for :func:`save`.
        kept: objects to save and load: ``model``, and any of ``optimizer``, ``scheduler``, ``scaler``, ``data``.

    Use it in a ``with`` block: at its end the last save is complete.

    Example::

        with npuzero.checkpoint.Checkpointer("run", every=100, keep_last=3, model=model, optimizer=optimizer) as saves:
            for step in range(saves.resume(), 200):
                train_step()
                saves.after(step + 1)
    """

    def __init__(
        self,
        folder: PathLike,
        *,
        every: int,
        keep_last: int | None = None,
        asynchronous: bool = True,
        **kept: Any,
    ) -> None:
        _check_save_count("Checkpointer: every", every, 1)
        self._folder = as_path("Checkpointer: folder", folder)
        self._every = every
        asynchronous = check_flag("Checkpointer: asynchronous", asynchronous)
        self._options: Mapping[str, Any] = {"keep_last": keep_last, "asynchronous": asynchronous}
        self._kept = kept
        self._last: Saving | None = None

    @collective_call("Checkpointer.resume")
    def resume(self) -> int:
        """Load the latest complete checkpoint, if any, and return its step; 0 without one. Collective."""
        world = engine_of(self._kept["model"]).mesh.world
        found = False
        problem: Exception | None = None
        try:
            found = world.rank == 0 and latest(self._folder) is not None
        except Exception as error:
            problem = error
        there, *_ = agree_on_save(world, f"resume {self._folder}", problem, found)
        return (load(self._folder, **self._kept).step or 0) if there else 0

    def after(self, step: int, *, extra: Any = None) -> None:
        """Save if ``step`` is a multiple of ``every``. Collective.

        Raises:
            CheckpointError: this save failed, or the previous asynchronous one.
        """
        if step % self._every == 0:
            self._last = save(self._folder, **self._kept, **self._options, step=step, extra=extra)

    def close(self) -> None:
        """Wait for the save in progress.

        Raises:
            CheckpointError: it failed.
        """
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _agree_on_path(
    folder: Path, engine: Engine, problem: Exception | None, share: dict[str, Any] | None
) -> tuple[Path, list[StageShare]]:
    """Return the checkpoint that rank 0 finds, and the share of each stage. Collective.

    Rank 0 decides for all: a checkpoint may become complete between two ranks' listings.
    """
    world, name = engine.mesh.world, ""
    try:
        if world.rank == 0:
            name = str(resolve_checkpoint(folder).relative_to(folder))
    except Exception as error:
        problem = problem or error
    said = agree_on_save(world, f"load {folder}", problem, [name, share])
    return folder / str(said[0][0]), [StageShare(**facts) for _, facts in everyone.pick_per_stage(engine.mesh, said)]


def resolve_checkpoint(folder: Path) -> Path:
    """Return ``folder`` itself if it is a checkpoint, else its latest complete one.

    Raises:
        CheckpointError: it is neither, or cannot be read.
    """
    if any(os.path.lexists(folder / name) for name in (files.METADATA, files.MANIFEST)):
        return folder
    found, others = folders.find_checkpoints(folder)
    if not found:
        raise CheckpointError(
            f"load {folder}",
            expected="a complete checkpoint",
            got="none" + (f", but {'; '.join(others)}" if others else "" if folder.exists() else ": no such folder"),
            do="Name a checkpoint, or a run's folder.",
        )
    return found[-1]


def _check_save_count(name: str, value: object, least: int) -> None:
    check_count(f"save: {name}", value, "Give such a one.", least=least)
