"""Saving: every rank writes its part, and rank 0 gives the whole its name once all have."""

from __future__ import annotations

import atexit
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npuzero import observe
from npuzero.checkpoint import folder as folders
from npuzero.checkpoint.archive import item_bytes
from npuzero.checkpoint.files import (
    METADATA,
    DataFile,
    Facts,
    as_bytes,
    data_name,
    encode,
    table_name,
    write,
    write_manifest,
)
from npuzero.checkpoint.metadata import Draft
from npuzero.checkpoint.parts import Entry, Item, Part
from npuzero.comm import World
from npuzero.errors import CheckpointError, NpuZeroError
from npuzero.plan import MeshShape
from npuzero.shard.engine import Engine

#: Saves talk to each other apart from training, since they may run beside it.
CHANNEL = "checkpoint"


@dataclass(frozen=True)
class Job:
    """One save, as one rank knows it.

    Attributes:
        parts: the cut tensors.
        entries: what is the same on all ranks; rank 0 writes it.
        own: what each rank has for itself, by name.
        facts: for the manifest.
        keep_last: complete checkpoints to keep; None: all.
    """

    folder: Path
    step: int
    parts: Sequence[Part]
    entries: Sequence[Entry]
    own: Mapping[str, Any]
    facts: Mapping[str, Any]
    keep_last: int | None

    @property
    def path(self) -> Path:
        return self.folder / folders.name_of(self.step)


class Saving:
    """A save that may still be under way.

    Attributes:
        path: the checkpoint, once it is complete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Until the checkpoint is complete; its path.

        Raises:
            CheckpointError: some rank could not write its part; there is no such checkpoint then.
            CollectiveError: some rank is gone.
        """
        if self._thread is not None:
            self._thread.join()
            _unheard.discard(self)
        if self._error is not None:
            raise self._error
        return self.path

    def run(self, work: Callable[[], None], *, beside: bool) -> None:
        """Do it now, or ``beside`` the caller in a thread, which the interpreter waits for at its end."""
        if not beside:
            work()
            return
        rank = observe.current_rank()

        def body() -> None:
            observe.set_rank(rank)
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=body, name=f"save {self.path.name}")
        _unheard.add(self)
        self._thread.start()


#: Saves beside training whose end nobody has heard of.
_unheard: set[Saving] = set()


@atexit.register
def _hear() -> None:
    """The interpreter has waited for their threads: what went wrong and was raised nowhere is shown here."""
    for saving in list(_unheard):
        saving.wait()


class Saver:
    """What saves of one model share: the host memory of the snapshot, and the save that is under way."""

    def __init__(self, engine: Engine) -> None:
        self._world = engine.world
        self._shape = engine.mesh.shape
        self._snapshot = torch.empty(0, dtype=torch.uint8)
        self._last: Saving | None = None

    def finish(self) -> None:
        """Wait for the save under way, and raise what went wrong with it."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def save(self, job: Job, *, asynchronous: bool) -> Saving:
        """Collective. Asynchronous: returns as soon as nothing that training changes is needed any more."""
        begin(self._world, job)
        items = self._items(job.parts)
        if asynchronous:
            with observe.span("snapshot", job.path.name):
                items = iter(self._copied(items, job.parts))
        saving = self._last = Saving(job.path)
        saving.run(lambda: write_job(job, items, self._world, self._shape), beside=asynchronous)
        return saving

    def _items(self, parts: Sequence[Part]) -> Iterator[tuple[Item, Tensor]]:
        """What this rank writes, and its elements."""
        for part in parts:
            begin, end = part.written_by(self._world.rank, self._shape)
            shard = part.flat.shard(part.placed)[0]
            values = part.read(slice(begin - shard, end - shard))
            for item in part.items(self._world.rank, self._shape):
                yield item, values[item.begin - begin : item.begin - begin + item.box.numel]

    def _copied(self, items: Iterator[tuple[Item, Tensor]], parts: Sequence[Part]) -> list[tuple[Item, Tensor]]:
        """The same, in host memory that is kept from save to save."""
        needed = sum(_aligned(item.nbytes) for part in parts for item in part.items(self._world.rank, self._shape))
        if self._snapshot.numel() < needed:
            pinned = self._world.device.type != "cpu"
            self._snapshot = torch.empty(needed, dtype=torch.uint8, pin_memory=pinned)
        copies, start = [], 0
        for item, values in items:
            copy = self._snapshot[start : start + item.nbytes].view(item.cut.dtype)
            copies.append((item, copy.copy_(values)))
            start += _aligned(item.nbytes)
        return copies


def _aligned(nbytes: int) -> int:
    """So many bytes and up to 63 more, so that what follows may be of any dtype."""
    return -(-nbytes // 64) * 64


def saver_of(engine: Engine) -> Saver:
    """The saver of a model, made at its first save."""
    return _savers.setdefault(engine, Saver(engine))


_savers: weakref.WeakKeyDictionary[Engine, Saver] = weakref.WeakKeyDictionary()


def agree(world: World, subject: str, problem: Exception | None, value: object = None) -> list[Any]:
    """What every rank says, if none has a problem. Collective.

    Raises:
        CheckpointError: on every rank, if one has; on that one the problem itself, if it is one of ours.
    """
    said = world.exchange([problem and f"{type(problem).__name__}: {problem}", value], CHANNEL)
    if isinstance(problem, NpuZeroError):
        raise problem
    for rank, (other, _) in enumerate(said):
        if other is not None:
            raise CheckpointError(
                subject,
                expected="every rank to do its part",
                got=f"on rank {rank}: {other}",
                do="Mend it on that rank.",
                rank=rank,
            ) from problem
    return [value for _, value in said]


def begin(world: World, job: Job) -> None:
    """A fresh folder that every rank sees. Collective."""
    subject = f"save {job.path}"
    problem: Exception | None = None
    try:
        if world.rank == 0:
            folders.begin(job.folder, job.step)
    except (CheckpointError, OSError) as error:
        problem = error
    steps = agree(world, subject, problem, job.step)
    if any(step != steps[0] for step in steps):
        do = "Save at the same time on every rank."
        problem = CheckpointError(subject, expected="one step", got=f"steps {steps}, by rank", do=do)
    elif not _partial(job).is_dir():
        do = "Give all ranks one folder, in a file system that all hosts share."
        problem = CheckpointError(subject, expected="the folder that rank 0 has made", got="none", do=do)
    agree(world, subject, problem)


def _partial(job: Job) -> Path:
    return folders.partial(job.folder, job.step)


def write_job(job: Job, items: Iterator[tuple[Item, Tensor]], world: World, shape: MeshShape) -> None:
    """Write this rank's file, and on rank 0 what says where everything is. Collective."""
    draft = Draft()
    report: Any = None
    problem: Exception | None = None
    try:
        with observe.span("write", job.path.name):
            report = _write_own(job, items, world.rank, draft)
    except Exception as error:
        problem = error
    reports = agree(world, f"save {job.path}", problem, report)
    try:
        if world.rank == 0:
            with observe.span("commit", job.path.name):
                _commit(job, shape, draft, reports)
    except Exception as error:
        problem = error
    agree(world, f"save {job.path}", problem)


def _write_own(job: Job, items: Iterator[tuple[Item, Tensor]], rank: int, draft: Draft) -> Any:
    """This rank's file; its facts, and those of each object of its own: offset, length and CRC-32."""
    own = {name: encode(name, value) for name, value in job.own.items()}
    shared = [(entry, encode(entry.key, entry.value)) for entry in job.entries] if rank == 0 else []
    with DataFile(_partial(job) / data_name(rank)) as file:
        for item, values in items:
            file.add_tensor(item.cut.dtype, item.box.sizes, as_bytes(values.cpu()))
        places: dict[bytes, tuple[int, int]] = {}
        for entry, raw in shared:
            place = places[raw] if raw in places else places.setdefault(raw, file.add_object(raw))
            draft.add_object(entry.path, entry.value, data_name(rank), *place)
        objects = [[*file.add_object(raw), zlib.crc32(raw)] for raw in own.values()]
    return [*(part for facts in file.facts for part in (facts.nbytes, facts.crc)), objects]


def _commit(job: Job, shape: MeshShape, draft: Draft, reports: Sequence[Any]) -> None:
    listed: dict[str, Facts] = {}
    for part in job.parts:
        for cut in part.cuts:
            draft.add_cut(cut)
    for rank, (nbytes, crc, table_bytes, table_crc, objects) in enumerate(reports):
        name = data_name(rank)
        offset = 0
        for item in chain.from_iterable(part.items(rank, shape) for part in job.parts):
            length = item_bytes(item.nbytes)
            draft.add_box(item.cut, item.box, name, offset, length)
            offset += length
        for kind, (start, length, _) in zip(job.own, objects, strict=True):
            draft.add_object((kind, str(rank)), None, name, start, length)
        listed |= {name: Facts(nbytes, crc), table_name(name): Facts(table_bytes, table_crc)}
    partial = _partial(job)
    listed[METADATA] = write(partial / METADATA, draft.dump())
    alike = [kind for i, kind in enumerate(job.own) if len({tuple(report[-1][i][1:]) for report in reports}) == 1]
    facts = {"step": job.step, "world": shape.world, "alike": alike, **job.facts}
    write_manifest(partial, facts, listed)
    folders.commit(job.folder, job.step)
    if job.keep_last is not None:
        folders.keep_last(job.folder, job.keep_last)
