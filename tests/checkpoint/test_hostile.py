"""Malicious indexes and manifests: refused within bounds of memory and time, and nothing changes."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

import npuzero
from npuzero import checkpoint, comm
from npuzero.checkpoint.formats import item_files as files
from npuzero.checkpoint.formats import safe_pickle
from npuzero.checkpoint.layout import dcp_metadata as metadata
from npuzero.errors import CheckpointError

from .hostile_pickles import (
    HOSTILE,
    WEAVE,
    index_of_tensors,
    pickle_program,
    pickled_global,
    pickled_int,
    pickled_text,
    tensor_metadata,
)

#: Cases that another check would refuse later, or for another reason.
SAYS = {
    "fields of a stranger": "fields that StorageMeta does not have",
    "a state twice": "a state of StorageMeta that is a second one",
    "fields of other types": "MetadataIndex.fqn of type list",
    "a tensor of 4 TiB in 64 bytes": "64 bytes for a part of sizes",
    "many tensors of one list of many parts": "more parts than lie anywhere",
    "marks as deep as they come": "more than 256 marks",
    "many arguments": "a call of a PickleFunction",
    "a key that hashes for ever": "a key that is a tuple",
    "ten bytes that ask for 4 GB of memo": "a memo out of order",
    "a text of 2^62": "bytes announced",
}


def test_there_are_enough() -> None:
    assert len(HOSTILE) >= 60


# -- what must hold ----------------------------------------------------------------------------------------------------


class SmallTraining:
    """Build a small model to save and load."""

    def __init__(self) -> None:
        self.model: Any = npuzero.zero(nn.Linear(4, 4), plan="zero3", world=comm.SingleWorld())
        self.optimizer = npuzero.AdamW(self.model.parameters())
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()

    def save(self, folder: Path) -> Path:
        return checkpoint.save(folder, self.model, self.optimizer, step=1, rng=False).wait()

    def load(self, path: Path) -> None:
        checkpoint.load(path, self.model, self.optimizer, rng=False)


@pytest.fixture(scope="module")
def trained() -> SmallTraining:
    return SmallTraining()


def forge_checkpoint_file(path: Path, name: str, raw: bytes) -> None:
    """Replace a file, and update the manifest to match."""
    (path / name).write_bytes(raw)
    rewrite_manifest(path, lambda content: content["files"].update({name: [len(raw), zlib.crc32(raw)]}))


def rewrite_manifest(path: Path, change: Any) -> None:
    """Change the manifest's contents, with a correct checksum."""
    content = json.loads((path / files.MANIFEST).read_bytes().splitlines()[0])
    content = change(content) or content
    text = json.dumps(content).encode()
    (path / files.MANIFEST).write_bytes(text + b"\n%08x\n" % zlib.crc32(text))


@pytest.mark.parametrize(
    ("case", "ours"),
    [pytest.param(case, False, id=case) for case in HOSTILE]
    + [pytest.param(case, True, id=f"{case}, vouched for", marks=pytest.mark.slow) for case in HOSTILE],
)
def test_a_hostile_index_is_refused_and_the_process_saves_and_loads_on(
    case: str, ours: bool, trained: SmallTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = trained.save(tmp_path / "hostile")
    forge_checkpoint_file(path, files.METADATA, HOSTILE[case])
    if not ours:
        (path / files.MANIFEST).unlink()
    began_s = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as raised:
            trained.load(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(str(raised.value)) < 2000 and SAYS.get(case, "") in str(raised.value)
    assert peak < 100 * len(HOSTILE[case]) + (4 << 20), f"{peak:,} bytes"
    assert time.process_time() - began_s < 20.0
    assert not (tmp_path / "evil").exists()
    good = trained.save(tmp_path / "good")
    checkpoint.verify(good)
    trained.load(good)
    assert not vars(dcp.MetadataIndex("a")).keys() - {"fqn", "index", "offset"}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_torch_writes_is_read_by_every_protocol(protocol: int) -> None:
    """Load also after pickletools has removed unused opcodes."""
    import pickletools

    index = dcp.MetadataIndex("a.weight", torch.Size([0, 0]), 0)
    written = dcp.Metadata(
        {"a.weight": tensor_metadata((300, 2)), "b": dcp.BytesStorageMetadata()},
        {"a.weight": ("a", "weight", 3), "b": ("b",)},
        {index: _StorageInfo("__0_0.distcp", 2**33, 70_000), dcp.MetadataIndex("b"): _StorageInfo("x", 0, 5)},
        dcp.StorageMeta(Path("/somewhere"), "é" * 300, None, []),
        "1.0.0",
    )
    raw = pickle.dumps(written, protocol=protocol)
    expected = pickle.loads(raw)
    expected.storage_meta.checkpoint_id = None
    for form in (raw, pickletools.optimize(raw)):
        assert safe_pickle.load_pickle(form, metadata.ALLOWED) == expected


# -- manifests ---------------------------------------------------------------------------------------------------------


def list_file_in_manifest(name: str) -> Any:
    return lambda content: content["files"].update({name: [1, 0]})


MANIFESTS = {
    "an absolute path": list_file_in_manifest("/etc/hostname"),
    "above": list_file_in_manifest("../outside"),
    "deep above": list_file_in_manifest("a/../../outside"),
    "below": list_file_in_manifest("a/b"),
    "itself": list_file_in_manifest("."),
    "the folder above": list_file_in_manifest(".."),
    "no name": list_file_in_manifest(""),
    "a nul": list_file_in_manifest("a\0b"),
    "no facts": lambda content: content["files"].update({".metadata": [1]}),
    "facts of other types": lambda content: content["files"].update({".metadata": ["1", None]}),
    "a negative length": lambda content: content["files"].update({".metadata": [-1, 0]}),
    "no files": lambda content: content.pop("files") and None,
    "files in a list": lambda content: content.update({"files": [".metadata"]}),
    "no index": lambda content: content["files"].pop(".metadata") and None,
    "no table": lambda content: content["files"].pop("__0_0.crc32") and None,
    "ranks without files": lambda content: content.update({"world": 10**12}),
    "no ranks": lambda content: content.update({"world": 0}),
    "a world in words": lambda content: content.update({"world": "1"}),
    "no format": lambda content: content.pop("format") and None,
    "a list": lambda content: [content],
    "a number": lambda content: 7,
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_hostile_manifest_is_refused(case: str, trained: SmallTraining, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"x")
    path = trained.save(tmp_path / "run")
    rewrite_manifest(path, MANIFESTS[case])
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        trained.load(path)


@pytest.mark.parametrize("raw", (b"", b"\n", b"[" * 100_000, b"{" * 100_000, b"9" * 10_000, b"\xff\xfe"))
def test_a_manifest_that_is_no_json_is_refused(raw: bytes, trained: SmallTraining, tmp_path: Path) -> None:
    path = trained.save(tmp_path)
    (path / files.MANIFEST).write_bytes(raw + b"\n%08x\n" % zlib.crc32(raw))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        trained.load(path)


@pytest.mark.parametrize("ours", (True, False), ids=("manifest", "none"))
@pytest.mark.parametrize("file", (".metadata", "__0_0.distcp"))
def test_links_to_files_elsewhere_are_refused(file: str, ours: bool, trained: SmallTraining, tmp_path: Path) -> None:
    path = trained.save(tmp_path / "run")
    (path / file).rename(tmp_path / "outside")
    (path / file).symlink_to(tmp_path / "outside")
    if not ours:
        (path / files.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"a file in this folder; got a link to .*outside"):
        trained.load(path)
    (path / file).unlink()
    os.mkfifo(path / file)
    with pytest.raises(CheckpointError, match="a file in this folder; got no regular file"):
        trained.load(path)


def test_links_within_the_folder_are_files(trained: SmallTraining, tmp_path: Path) -> None:
    path = trained.save(tmp_path / "run")
    (path / "__0_0.distcp").rename(path / "data")
    (path / "__0_0.distcp").symlink_to("data")
    (tmp_path / "linked").symlink_to(path)
    trained.load(tmp_path / "linked")


# -- parts that overlap ------------------------------------------------------------------------------------------------


def chunk_metadata(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    return dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


QUARTERS = [chunk_metadata((row, column), (2, 2)) for row in (0, 2) for column in (0, 2)]
OVERLAPS = {
    r"two have elements \[1:2, 0:4\]": [chunk_metadata((0, 0), (2, 4)), chunk_metadata((1, 0), (2, 4))],
    r"none has element \[0, 0\]": [chunk_metadata((row, 0), (1, 4)) for row in (1, 2, 3, 3)],
    r"two have elements \[0:2, 1:2\]": [*QUARTERS[:1], chunk_metadata((0, 1), (2, 2)), *QUARTERS[2:]],
    r"two have elements \[2:4, 2:3\]": [*QUARTERS[:2], chunk_metadata((2, 1), (2, 2)), QUARTERS[3]],
}


@pytest.mark.parametrize("says", OVERLAPS)
def test_parts_that_overlap_and_leave_as_much_out_are_refused(says: str, tmp_path: Path) -> None:
    """A file as torch writes it, without checksums: all parts exist, with as many elements as the tensor has."""
    raw = stored_tensor(pickle_program(pickled_rebuild_call(STORAGE, pickled_int(0), FOUR, UNIT)))
    (tmp_path / "__0_0.distcp").write_bytes(raw)
    stored = {
        dcp.MetadataIndex(key, part.offsets): _StorageInfo("__0_0.distcp", 0, len(raw))
        for key, some in {"weight": OVERLAPS[says], "other": QUARTERS}.items()
        for part in some
    }
    index = dcp.Metadata({"weight": tensor_metadata((4, 4), OVERLAPS[says])}, None, stored)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index, protocol=4))
    model: Any = npuzero.zero(nn.Linear(4, 4, bias=False), plan="zero3", world=comm.SingleWorld())
    with pytest.raises(CheckpointError, match=f"weight.*{says}"):
        checkpoint.load(tmp_path, model)
    with pytest.raises(CheckpointError, match=f"weight.*{says}"):
        checkpoint.verify(tmp_path)


# -- items of others ---------------------------------------------------------------------------------------------------


def stored_tensor(pickled: bytes) -> bytes:
    """Write an item as torch.save does, with another pickle and 64 bytes of elements."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", bytes(64))
    return written.getvalue()


def pickled_rebuild_call(storage: bytes, offset: bytes, size: bytes, stride: bytes) -> bytes:
    return pickled_global("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + offset + size + stride + b"\x89}tR"


STORAGE = (
    b"("
    + pickled_text("storage")
    + pickled_global("torch", "FloatStorage")
    + pickled_text("0")
    + pickled_text("cpu")
    + pickled_int(16)
    + b"tQ"
)
FOUR = pickled_int(4) * 2 + b"\x86"
UNIT = pickled_int(4) + pickled_int(1) + b"\x86"
ITEMS = {
    "a storage that prints for ever": pickle_program(
        pickled_rebuild_call(b"(NN" + WEAVE + b"NNtQ", pickled_int(0), FOUR, UNIT)
    ),
    "a storage that is not there": pickle_program(
        pickled_rebuild_call(STORAGE.replace(pickled_text("0"), pickled_text("1")), pickled_int(0), FOUR, UNIT)
    ),
    "a storage that is a list": pickle_program(pickled_rebuild_call(b"]", pickled_int(0), FOUR, UNIT)),
    "sizes that print for ever": pickle_program(pickled_rebuild_call(STORAGE, pickled_int(0), WEAVE + b"\x85", UNIT)),
    "beyond the elements": pickle_program(pickled_rebuild_call(STORAGE, pickled_int(1), FOUR, UNIT)),
    "before the elements": pickle_program(pickled_rebuild_call(STORAGE, pickled_int(-1), FOUR, UNIT)),
    "another shape": pickle_program(
        pickled_rebuild_call(STORAGE, pickled_int(0), pickled_int(16) + b"\x85", pickled_int(1) + b"\x85")
    ),
    "os.system": pickle_program(pickled_global("posix", "system"), pickled_text("touch evil"), b"\x85R"),
    "no tensor": pickle_program(b"]"),
}


def write_foreign_file(folder: Path, pickled: bytes) -> Path:
    raw = stored_tensor(pickled)
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(raw)
    (folder / ".metadata").write_bytes(index_of_tensors({"weight": tensor_metadata((4, 4))}, length=len(raw)))
    return folder


@pytest.mark.parametrize("case", [None, *ITEMS])
def test_a_hostile_item_is_refused(case: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model: Any = npuzero.zero(nn.Linear(4, 4, bias=False), plan="zero3", world=comm.SingleWorld())
    if case is None:  # check the trap itself: without the malicious part it is a checkpoint
        checkpoint.load(
            write_foreign_file(
                tmp_path / "a", pickle_program(pickled_rebuild_call(STORAGE, pickled_int(0), FOUR, UNIT))
            ),
            model,
        )
        assert not npuzero.full_state_dict(model)["weight"].any()
        return
    with pytest.raises(CheckpointError):
        checkpoint.load(write_foreign_file(tmp_path / "a", ITEMS[case]), model)
    assert not (tmp_path / "evil").exists()


def compressed_archive() -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 24))
    return written.getvalue()


BOMBS = {
    "compressed": compressed_archive(),
    "a bytearray": stored_tensor(b"\x80\x02cbuiltins\nbytearray\nJ\0\0\0\x40\x85R."),
}


@pytest.mark.parametrize("reason", BOMBS)
def test_an_item_that_unpacks_to_more_than_it_is_is_refused(
    reason: str, trained: SmallTraining, tmp_path: Path
) -> None:
    """The manifest's checksums are right."""
    path = trained.save(tmp_path)
    index = pickle.loads((path / ".metadata").read_bytes())
    whole = (path / "__0_0.distcp").read_bytes()
    place = index.storage_data[dcp.MetadataIndex("step")]
    bomb = BOMBS[reason]
    offsets = sorted({info.offset for info in index.storage_data.values()})
    after = place.offset + place.length
    for info in index.storage_data.values():
        if info.offset == place.offset:
            info.length = len(bomb)
        elif info.offset > place.offset:
            info.offset += len(bomb) - (after - place.offset)
    data = whole[: place.offset] + bomb + whole[after:]
    table = bytearray((path / "__0_0.crc32").read_bytes())
    struct.pack_into("<I", table, 4 * offsets.index(place.offset), zlib.crc32(bomb))
    forge_checkpoint_file(path, "__0_0.distcp", data)
    forge_checkpoint_file(path, "__0_0.crc32", bytes(table))
    forge_checkpoint_file(path, ".metadata", pickle.dumps(index))
    with pytest.raises(CheckpointError, match=f"item step.*{reason}"):
        trained.load(path)
