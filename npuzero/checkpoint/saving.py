"""Save checkpoints: every rank writes its part, then rank 0 renames the folder."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from npuzero import observe
from npuzero.checkpoint import folder as folders
from npuzero.checkpoint.beside import BackgroundSnapshot, SnapshotMemory
from npuzero.checkpoint.folder import PartialCheckpoint
from npuzero.checkpoint.formats.item_files import (
    METADATA,
    DataFile,
    FileFacts,
    Manifest,
    checksum_file_name,
    damaged_file_error,
    data_file_name,
    encode_object,
    host_tensor_memory,
    read_file,
    write_durably,
    write_manifest,
)
from npuzero.checkpoint.formats.torch_zip import item_bytes
from npuzero.checkpoint.layout.across_stages import StageShare, merge_group_names
from npuzero.checkpoint.layout.dcp_metadata import MetadataBuilder, parse_metadata
from npuzero.checkpoint.layout.parts import MODEL, OPTIMIZER, SavedBox, SavedPart, UnshardedEntry
from npuzero.comm import World
from npuzero.errors import CheckpointError
from npuzero.plan import PIPE, STAGE, TENSOR, MeshShape
from npuzero.shard.engine import Engine
from npuzero.shard.parameters import across_stages as everyone
from npuzero.shard.state.snapshot import NOW, Later, StateSnapshot

#: Channel of saves, separate from training's: both may run at the same time.
CHANNEL = "checkpoint"


@dataclass(frozen=True)
class SaveJob:
    """Describe one save, as one rank knows it.

    ``entries`` are the same on all ranks of a stage, and its first rank writes them; ``shared`` are the same on all
    ranks, and rank 0 writes them. ``own`` are values of each rank, by name; ``share`` are this stage's names for the
    remaining stages; ``facts`` go into the manifest. ``keep_last`` None keeps all checkpoints.
    """

    folder: Path
    step: int
    keep_last: int | None
    share: StageShare
    parts: Sequence[SavedPart] = ()
    entries: Sequence[UnshardedEntry] = ()
    shared: Sequence[UnshardedEntry] = ()
    groups: Sequence[Mapping[str, Any]] = ()
    own: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / folders.step_folder_name(self.step)

    def outline(self) -> dict[str, str]:
        """Return a digest of the structure of each part, by its name; values are not included."""
        found: dict[str, list[object]] = defaultdict(list)
        for part in self.parts:
            layout = part.flat.layout.numel, part.rest.group.axes, str(part.dtype)
            for cut in part.cuts:
                kind, *_, state = cut.paths[0]
                name = MODEL if kind == MODEL else f"{kind}.{state}"
                found[name].append((cut.paths, cut.slot.begin, tuple(cut.slot.shape), *layout))
        if self.share.groups is not None:
            found[OPTIMIZER].append((self.share.groups, self.share.options))
        for entry in (*self.entries, *self.shared):
            if len(entry.path) > 1:
                found[str(entry.path[0])].append(entry.path)
        for name in self.own:
            found[name].append(name)
        return {name: f"{zlib.crc32(repr(facts).encode()):08x}" for name, facts in sorted(found.items())}

    def written_by(self, rank: int, shape: MeshShape, shares: Sequence[StageShare]) -> list[UnshardedEntry]:
        """Return the unsharded entries that ``rank`` writes; ``shares``: of all stages, in their order."""
        # The first rank of a stage writes. An entry of several stages (tied parameters) belongs to the first of these
        # stages, and the options of the optimizer to the first stage that has an optimizer.
        stage = shape.index((PIPE,), rank)
        if shape.index(STAGE, rank):
            return []
        before = {key for share in shares[:stage] for key in share.entries}
        entries = [entry for entry in self.entries if entry.key not in before]
        if self.share.groups is not None and all(share.groups is None for share in shares[:stage]):
            names = merge_group_names(shares, f"save {self.path}")
            entries += [
                UnshardedEntry((OPTIMIZER, "param_groups", g, key), names[g] if key == "params" else group[key])
                for g, group in enumerate(self.groups)
                for key in group
            ]
        return entries + (list(self.shared) if rank == 0 else [])


class Saving:
    """Represent a save that may still be in progress; ``path`` is the checkpoint, once it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Tell whether it has ended, with or without an error."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete; return its path.

        Raises:
            CheckpointError: some rank could not write its part; no checkpoint of this step exists then.
            CollectiveError: some rank is gone.
        """
        if self._thread is not None:
            self._thread.join()
            _unheard.discard(self)
        if self._error is not None:
            raise self._error
        return self.path

    def run(self, work: Callable[[], None], *, beside: bool) -> None:
        """Run ``work`` now, or with ``beside`` in a thread, which the interpreter joins at exit."""
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


#: Asynchronous saves that were not waited for; their errors were not raised.
_unheard: set[Saving] = set()
os.register_at_fork(after_in_child=_unheard.clear)  # their threads are the parent's


@atexit.register
def _report_unraised() -> None:
    """Raise errors of saves that were not waited for. The interpreter has joined their threads."""
    for saving in list(_unheard):
        saving.wait()


class CheckpointSaver:
    """Hold the state that all saves of one model share; ``copies`` is the host memory of snapshots."""

    def __init__(self, engine: Engine) -> None:
        self._world = engine.mesh.world
        self._shape = engine.mesh.shape
        self.copies = SnapshotMemory(engine.world.device)
        self._last: Saving | None = None
        self._world.companions.add(self)

    def finish(self) -> None:
        """Wait for the save in progress, and raise its error."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def end(self) -> None:
        """Wait for the save in progress, and raise its error if ``wait()`` has not."""
        if self._last in _unheard:
            self.finish()

    def save(self, job: SaveJob, *, asynchronous: bool, problem: Exception | None = None) -> Saving:
        """Save, or with ``asynchronous`` copy and return; ``problem``: this rank's error, raised on all. Collective."""
        with contextlib.ExitStack() as undo:
            items = self._items(job.parts, NOW)
            if asynchronous:
                snapshot = BackgroundSnapshot(self.copies)
                undo.callback(snapshot.release)
                with observe.span("snapshot", job.path.name):
                    try:
                        items = iter([*self._items(job.parts, snapshot)])
                    except Exception as error:
                        problem = error
            place = begin_checkpoint(self._world, self._shape, job, problem)
            # Encode now, as tensors are copied now: training changes buffers, schedules and options.
            objects = place.encode(job, self._world.rank, self._shape)
            done = undo.pop_all().close

        def write() -> None:
            try:
                place.write(job, items, objects, self._world, self._shape)
            finally:
                done()

        saving = self._last = Saving(job.path)
        saving.run(write, beside=asynchronous)
        return saving

    def _items(self, parts: Sequence[SavedPart], snapshot: StateSnapshot) -> Iterator[tuple[SavedBox, Later]]:
        """Yield the boxes that this rank writes, each with a function that returns its elements."""
        for part in parts:
            for item in part.items(self._world.rank, self._shape):
                own = slice(*(at - part.rest.begin for at in item.site.range))
                yield item, part.later(own, snapshot)


def get_saver(engine: Engine) -> CheckpointSaver:
    """Return the saver of a model; the first call makes it."""
    return _savers.setdefault(engine, CheckpointSaver(engine))


_savers: weakref.WeakKeyDictionary[Engine, CheckpointSaver] = weakref.WeakKeyDictionary()


def agree_on_save(world: World, subject: str, problem: Exception | None, value: object = None) -> list[Any]:
    """Exchange a value on the channel of saves: see :mod:`npuzero.shard.parameters.across_stages`."""
    return everyone.exchange_or_raise(world, subject, problem, value, CHANNEL)


def begin_checkpoint(
    world: World, shape: MeshShape, job: SaveJob, problem: Exception | None = None
) -> CheckpointWriter:
    """Create a hidden folder, and check that every rank sees it and saves the same parts. Collective.

    Raises:
        CheckpointError: on every rank: one passed a ``problem``, another job is saving into the run's folder, the step
            was saved before, some rank sees another folder, or ranks are at different steps or pass different parts.
    """
    subject = f"save {job.path}"
    partial: PartialCheckpoint | None = None
    try:
        if world.rank == 0 and problem is None:
            partial = PartialCheckpoint(job.folder, job.step)
    except (CheckpointError, OSError) as error:
        problem = error
    try:
        # Send the problem instead of raising it: otherwise the remaining ranks would wait for this one.
        share = None if shape.index(STAGE, world.rank) else asdict(job.share)
        said = agree_on_save(world, subject, problem, [job.step, partial and partial.path.name, share, job.outline()])
        path = job.folder / str(said[0][1])
        ranks = shape.size(STAGE)
        shares = [StageShare(**facts) for _, _, facts, _ in said[::ranks]]
        agree_on_save(
            world,
            subject,
            _find_save_conflict(subject, [step for step, *_ in said], [parts for *_, parts in said], path, ranks),
        )
        merge_group_names(shares, subject)
    except BaseException:
        if partial is not None:
            partial.drop()
        raise
    return CheckpointWriter(path, partial, shares)


def _find_save_conflict(
    subject: str, steps: Sequence[int], outlines: Sequence[Mapping[str, str]], path: Path, ranks: int
) -> CheckpointError | None:
    """Return why the ranks cannot save together, or None; ``ranks``: number of ranks of a stage."""
    if any(step != steps[0] for step in steps):
        do = "Save at the same time on every rank."
        return CheckpointError(subject, expected="one step", got=f"steps {steps}, by rank", do=do)
    # Ranks of one stage compare model and optimizer with the first rank of the stage, since stages have different
    # tensors. All remaining parts are compared with rank 0.
    for part in sorted(set().union(*outlines)):
        without = [rank for rank, outline in enumerate(outlines) if part not in outline]
        staged = part.partition(".")[0] in (MODEL, OPTIMIZER)
        firsts = [outlines[rank - rank % ranks if staged else 0] for rank in range(len(outlines))]
        other = [rank for rank, outline in enumerate(outlines) if outline.get(part) != firsts[rank].get(part)]
        if other:
            with_it = [rank for rank in range(len(outlines)) if rank not in without]
            got = f"{part} on ranks {with_it}, and none on ranks {without}" if without else f"another {part} on {other}"
            do = "Pass the same model, optimizer, data and rng on every rank."
            return CheckpointError(subject, expected="the same parts on every rank", got=got, do=do, part=part)
    if not path.is_dir():
        do = "Give all ranks one folder, in a file system that all hosts share."
        return CheckpointError(subject, expected="the folder that rank 0 has made", got="none", do=do)
    return None


@dataclass(frozen=True)
class SaveReport:
    """Report the files that a rank wrote.

    ``data`` and ``table`` are length and CRC-32 of the data file and of its checksum table. The data file has ``items``
    tensors; ``signature`` is the CRC-32 of their names and boxes, in order. The rank's objects follow, each with
    offset, length and CRC-32.
    """

    data: tuple[int, int]
    table: tuple[int, int]
    items: int
    signature: int
    objects: Sequence[Sequence[int]]


def _extend_signature(item: SavedBox, signature: int) -> int:
    """Return ``signature`` extended by ``item``."""
    return zlib.crc32(repr((item.cut.paths, item.box)).encode(), signature)


class SavedObjects(NamedTuple):
    """Hold a rank's encoded unsharded objects: its own, in the order of names, and shared entries."""

    own: list[bytes]
    shared: list[tuple[UnshardedEntry, bytes]]


@dataclass(frozen=True)
class CheckpointWriter:
    """Write a checkpoint into its hidden folder; ``partial`` is set on rank 0, ``shares`` cover all stages."""

    path: Path
    partial: PartialCheckpoint | None
    shares: Sequence[StageShare]

    def encode(self, job: SaveJob, rank: int, shape: MeshShape) -> SavedObjects | Exception:
        """Encode the unsharded objects of ``rank``, or return the error, which ``write`` raises on all ranks."""
        try:
            own = [encode_object(name, value) for name, value in job.own.items()]
            shared = job.written_by(rank, shape, self.shares)
            return SavedObjects(own, [(entry, encode_object(entry.key, entry.value)) for entry in shared])
        except Exception as error:
            return error

    def write(
        self,
        job: SaveJob,
        items: Iterator[tuple[SavedBox, Later]],
        objects: SavedObjects | Exception,
        world: World,
        shape: MeshShape,
    ) -> None:
        """Write this rank's file, and on rank 0 the metadata and the manifest. Collective."""
        try:
            self._write(job, items, objects, world, shape)
        finally:
            if self.partial is not None:
                self.partial.drop()

    def _write(
        self,
        job: SaveJob,
        items: Iterator[tuple[SavedBox, Later]],
        objects: SavedObjects | Exception,
        world: World,
        shape: MeshShape,
    ) -> None:
        # Every rank takes part in each agreement, with an error or without: none returns early while others still wait.
        draft = MetadataBuilder()
        report: SaveReport | None = None
        problem: Exception | None = None
        try:
            with observe.span("write", job.path.name):
                if isinstance(objects, Exception):
                    raise objects
                report = self._write_own(items, objects, world.rank, draft)
        except Exception as error:
            problem = error
        reports = [
            SaveReport(*r) for r in agree_on_save(world, f"save {job.path}", problem, report and astuple(report))
        ]
        drawn: FileFacts | None = None
        try:
            if shape.index(STAGE, world.rank) == 0:
                self._draw_up(job, shape, draft, reports, world.rank)
                if self.partial is None:
                    drawn = write_durably(
                        self.path / _stage_metadata_name(shape.index((PIPE,), world.rank)), draft.dump()
                    )
        except Exception as error:
            problem = error
        others: list[Any] = [None]
        if shape.pipe > 1:
            others = agree_on_save(world, f"save {job.path}", problem, drawn and astuple(drawn))[:: shape.size(STAGE)]
        try:
            if problem is None and self.partial is not None:
                with observe.span("commit", job.path.name):
                    for stage, facts in enumerate(others[1:], 1):
                        self._add(draft, stage, FileFacts(*facts))
                    self._commit(self.partial, job, shape, draft, reports)
        except Exception as error:
            problem = error
        if self.partial is not None:
            self.partial.drop()
        agree_on_save(world, f"save {job.path}", problem)

    def _write_own(
        self, items: Iterator[tuple[SavedBox, Later]], written: SavedObjects, rank: int, draft: MetadataBuilder
    ) -> SaveReport:
        count = signature = 0
        with DataFile(self.path / data_file_name(rank)) as file:
            for item, later in items:
                file.add_tensor(
                    item.cut.dtype, item.box.sizes, host_tensor_memory(item.site.of(later().cpu()).contiguous())
                )
                count, signature = count + 1, _extend_signature(item, signature)
            places: dict[bytes, tuple[int, int]] = {}
            for entry, raw in written.shared:
                place = places[raw] if raw in places else places.setdefault(raw, file.add_object(raw))
                draft.add_object(entry.path, entry.value, data_file_name(rank), *place)
            objects = [[*file.add_object(raw), zlib.crc32(raw)] for raw in written.own]
        data, table = ((facts.nbytes, facts.crc) for facts in file.facts)
        return SaveReport(data, table, count, signature, objects)

    def _draw_up(
        self, job: SaveJob, shape: MeshShape, draft: MetadataBuilder, reports: Sequence[SaveReport], first: int
    ) -> None:
        """Add to ``draft`` the places of all items that a stage's ranks wrote, as its ``first`` rank computes them."""
        here = [part for part in job.parts if part.of_stage(first, shape)]
        for part in here:
            for cut in part.cuts:
                draft.add_cut(cut)
        for rank in range(first, first + shape.size(STAGE)):
            report, name = reports[rank], data_file_name(rank)
            offset = count = signature = 0
            # Places are computed from the parts, not sent. A rank with other parts has another signature.
            for item in chain.from_iterable(part.items(rank, shape) for part in here):
                length = item_bytes(item.nbytes)
                draft.add_box(item.cut, item.box, name, offset, length)
                offset += length
                count, signature = count + 1, _extend_signature(item, signature)
            for kind, (start, length, _) in zip(job.own, report.objects, strict=True):
                draft.add_object((kind, str(rank)), None, name, start, length)
            if (report.items, report.signature) != (count, signature):
                raise CheckpointError(
                    f"save {job.path}",
                    expected=f"{count} items from rank {rank}, as rank {first} has sharded the model",
                    got=f"{report.items}" + (" others" if report.items == count else ""),
                    do="Pass the same model and optimizer on every rank.",
                    rank=rank,
                )

    def _add(self, draft: MetadataBuilder, stage: int, facts: FileFacts) -> None:
        """Add another stage's metadata to ``draft``, and remove its file."""
        path = self.path / _stage_metadata_name(stage)
        raw = read_file(path)
        if FileFacts(len(raw), zlib.crc32(raw)) != facts:
            raise damaged_file_error(path, f"CRC-32 {facts.crc:08x}", f"{zlib.crc32(raw):08x}")
        draft.add_draft(parse_metadata(raw, path))
        path.unlink()
        for alias, name in self.shares[stage].aliases.items():
            draft.add_alias((MODEL, alias), (MODEL, name))

    def _commit(
        self,
        partial: PartialCheckpoint,
        job: SaveJob,
        shape: MeshShape,
        draft: MetadataBuilder,
        reports: Sequence[SaveReport],
    ) -> None:
        listed: dict[str, FileFacts] = {}
        for rank, report in enumerate(reports):
            name = data_file_name(rank)
            listed |= {name: FileFacts(*report.data), checksum_file_name(name): FileFacts(*report.table)}
        listed[METADATA] = write_durably(self.path / METADATA, draft.dump())
        own = [{tuple(report.objects[i][1:]) for report in reports} for i in range(len(job.own))]
        alike = [kind for kind, found in zip(job.own, own, strict=True) if len(found) == 1]
        # Tensor ranks read the same data, and so do stages.
        readers = [rank for rank in range(len(reports)) if not shape.index((PIPE, TENSOR), rank)]
        facts = {"step": job.step, "world": len(reports), "readers": readers, "alike": alike, **job.facts}
        write_manifest(self.path, facts, listed)
        # Before the rename: a folder with its final name counts as complete.
        _verify_written(self.path, listed)
        path = partial.commit()
        if job.keep_last is not None:
            folders.remove_old_checkpoints(job.folder, job.keep_last, path)


def _stage_metadata_name(stage: int) -> str:
    return f"{METADATA}.{stage}"


def _verify_written(path: Path, listed: Mapping[str, FileFacts]) -> None:
    """Check the lengths of all files, and the content of manifest, metadata and checksum tables, on disk."""
    manifest = Manifest(path)
    for name in listed:
        if name in (METADATA, checksum_file_name(name)):
            manifest.read(name)
