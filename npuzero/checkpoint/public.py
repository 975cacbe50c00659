"""What a training program calls: save, load, latest, verify, and a Checkpointer that does it every so many steps."""

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
from npuzero.checkpoint.cut import CutTensor as CutTensor  # here the package finds all that it offers
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
    """Stand for a scheduler, loss scaler or data loader: anything that gives and takes its state."""

    def state_dict(self) -> Any:
        """Return tensors, numbers, texts, and containers of them."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take what ``state_dict`` gave."""


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

    It appears under its name when it is complete and durable on all ranks; if anything fails before, the last one
    stays the last. ``torch.distributed.checkpoint`` reads it.

    Args:
        folder: of the run, the same for all ranks, in a file system that their hosts share.
        model: made by :func:`npuzero.zero`.
        optimizer: an npuzero optimizer over its parameters.
        step: optimizer steps taken.
        scheduler, scaler: their state is rank 0's.
        data: the position in the data, one for each rank with data of its own.
        rng: whether to keep the random number generators, each rank's own.
        extra: whatever else, rank 0's.
        keep_last: remove all complete checkpoints but the last so many, once this one is complete; None keeps all.
        asynchronous: return once what lies in memory is copied to host memory; a thread writes it while training goes
            on. What lies on a disk is kept there: training writes elsewhere until it has been read. What goes wrong
            then is raised by ``wait()`` and by the next save or load of this model.

    Raises:
        CheckpointError: on every rank, if one cannot write its part or passes other parts than the others, or another
            job is saving into the folder.
        StateError: on every rank: tensor ranks hold different values of a parameter that they should hold alike.
        OutOfSpace: ``asynchronous``, and a disk has no room for what training writes meanwhile; training may go on.
        ConfigError: ``step`` or ``keep_last`` is no such number, or an optimizer of another model.

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
    """Go on from a checkpoint, whatever plan, precision and number of ranks wrote it. Collective.

    Reads what :func:`save` wrote, and what ``torch.distributed.checkpoint`` wrote of a model and its optimizer (FSDP2
    and plain torch). Nothing in a checkpoint is run, and nothing of ours is used before its checksum was verified.

    Args:
        folder: a checkpoint, or the folder of a run, of which the last complete one is taken.
        model, optimizer: as for :func:`save`; without an optimizer only the weights are read.
        scheduler, scaler: they get the state that was saved for them.
        data: gets this rank's position. Where another number of ranks had positions that differ, its
            ``load_state_dicts(positions)`` gets those of all.
        rng: whether random numbers go on, where the checkpoint has them. Ranks beyond those that were saved get
            numbers of their own.

    Returns:
        The checkpoint, its step, and what was saved as ``extra``.

    Raises:
        CheckpointError: on every rank: there is none, it is damaged, or it does not fit. If it is found to be damaged
            while it is read, the model has a part of it, and is refused until another load, as complete, succeeds.
        StateError: on every rank: the model is incomplete for another reason.

    Example::

        npuzero.checkpoint.save("run", model, optimizer, step=100)
        loaded = npuzero.checkpoint.load("run", model, optimizer)
        print(loaded.step)
    """
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
    """Return the last complete checkpoint in the folder of a run; None where there is none.

    Example::

        npuzero.checkpoint.save("run", model, step=100)
        print(npuzero.checkpoint.latest("run"))
    """
    return folders.latest_checkpoint(folder)


def verify(folder: PathLike) -> None:
    """Read all of a checkpoint, or of the last one of a run. Not collective; needs no model.

    Raises:
        CheckpointError: it is damaged; names the file and the item.

    Example::

        npuzero.checkpoint.save("run", model, step=100)
        npuzero.checkpoint.verify("run")
    """
    CheckpointReader(resolve_checkpoint(as_path("verify: folder", folder))).verify()


class Checkpointer:
    """Save every so many steps, and resume from the last save.

    Args:
        folder: of the run.
        every: steps between saves.
        keep_last, asynchronous: as for :func:`save`.
        kept: what to save and load: ``model``, and any of ``optimizer``, ``scheduler``, ``scaler``, ``data``.

    Use it in a ``with`` block, at whose end the last save is complete.

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
        """Load the last complete checkpoint, if there is one; the steps that were taken then. Collective."""
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
        """Save, if ``step`` is one of those. Collective.

        Raises:
            CheckpointError: this save failed, or the one before, which ran beside training.
        """
        if step % self._every == 0:
            self._last = save(self._folder, **self._kept, **self._options, step=step, extra=extra)

    def close(self) -> None:
        """Wait for the save under way.

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
    """Return the checkpoint that rank 0 finds: others may see another one that is just becoming complete; and what each
    stage has. Collective.
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
    """Return ``folder`` itself if it is a checkpoint, else its last complete one.

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
