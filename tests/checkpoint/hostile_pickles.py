"""Pickles by hand and malicious indexes: contents that neither pickle.dump nor a checkpoint's writer produces."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

META = "torch.distributed.checkpoint.metadata"
FILES = "torch.distributed.checkpoint.filesystem"
CLASSES = [
    *((META, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    *((META, name) for name in ("MetadataIndex", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    (FILES, "_StorageInfo"),
]
OTHERS = [
    *(("torch", "Size"), ("torch", "float32"), ("torch.serialization", "_get_layout"), ("builtins", "getattr")),
    *(("collections", "OrderedDict"), ("pathlib", "PosixPath")),
]


def pickled_text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def pickled_global(module: str, attribute: str) -> bytes:
    return pickled_text(module) + pickled_text(attribute) + b"\x93"


def pickled_int(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def pickle_program(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def pickled_dict(**values: bytes) -> bytes:
    return b"}(" + b"".join(pickled_text(key) + value for key, value in values.items()) + b"u"


def pickled_instance(kind: str, state: bytes, module: str = META) -> bytes:
    return pickled_global(module, kind) + b")\x81" + state + b"b"


SLOTS = (
    b"N" + pickled_dict(__init__=pickled_int(1), fqn=pickled_int(1), dtype=pickled_int(1)) + b"\x86"
)  # (None, {...}): set by setattr
MEMBER = pickled_global(META, "_MEM_FORMAT_ENCODING") + pickled_int(0) + b"\x85R"
LAYOUT = pickled_global("torch.serialization", "_get_layout") + pickled_text("torch.strided") + b"\x85R"
#: A list of lists, each twice in the next: short to store, endless to print.
WEAVE = b"]\x94]\x94a" + b"".join(b"](h" + bytes([i]) + b"h" + bytes([i]) + b"e\x94a" for i in range(1, 60))

HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "no pickle": b"not a pickle at all",
    "the end at once": b".",
    "nothing on the stack": pickle_program(b"0"),
    "cut off": pickle.dumps(dcp.Metadata({}), protocol=4)[:-20],
    **{f"attributes of {kind}": pickle_program(pickled_global(module, kind), SLOTS, b"b") for module,
        kind in CLASSES + OTHERS},
    **{f"a dict for {kind}": pickle_program(pickled_global(module, kind), pickled_dict(a=pickled_int(1)),
        b"b") for module, kind in CLASSES},
    "attributes of an enum's member": pickle_program(MEMBER, SLOTS, b"b"),
    "attributes of a layout": pickle_program(LAYOUT, SLOTS, b"b"),
    "attributes of an instance": pickle_program(pickled_instance("StorageMeta", SLOTS)),
    "another class for an instance": pickle_program(pickled_instance("StorageMeta",
        pickled_dict(__class__=pickled_global(META, "Metadata")))),
    "another dict for an instance": pickle_program(pickled_instance("StorageMeta", pickled_dict(__dict__=b"}"))),
    "fields of a stranger": pickle_program(pickled_instance("StorageMeta", pickled_dict(modules=b"]", more=b"N"))),
    "a list for a state": pickle_program(pickled_instance("StorageMeta", b"]")),
    "a state twice": pickle_program(pickled_instance("StorageMeta", pickled_dict(modules=b"]")),
        pickled_dict(modules=b"]"), b"b"),
    "fields of other types": pickle_program(pickled_instance("MetadataIndex", pickled_dict(fqn=WEAVE))),
    "properties of other types": pickle_program(pickled_instance("TensorProperties", b"(" + WEAVE + b"NNNNt")),
    "ten bytes that ask for 4 GB of memo": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "a memo at 255": pickle_program(b"Nq\xff"),
    "a memo that is not there": pickle_program(b"j\xff\xff\xff\xff"),
    "a frame of 2^62": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"\x8c\x7fa.",
    "a text of 2^62": pickle_program(b"\x8d" + struct.pack("<Q", 2**62)),
    "a text of 4 GB": pickle_program(b"X\xff\xff\xff\xff"),
    "bytes of 2^62": pickle_program(b"\x8e" + struct.pack("<Q", 2**62)),
    "a byte array of 2^62": pickle_program(b"\x96" + struct.pack("<Q", 2**62)),
    "a number of 2 GB": pickle_program(b"\x8b\xff\xff\xff\x7f"),
    "a number in digits": pickle_program(b"I" + b"9" * 100_000 + b"\n"),
    "marks as deep as they come": pickle_program(b"(" * 100_000),
    "lists as deep as they come": pickle_program(b"]" * 100_000 + b"a" * 99_999),
    "a key that hashes for ever": pickle_program(b"})" + b"\x85" * 200_000 + b"Ns"),
    "keys that are numbers": pickle_program(b"}(", *(pickled_int(i) + b"N" for i in range(99)), b"u"),
    "os.system": pickle_program(pickled_global("posix", "system"), pickled_text("touch evil"), b"\x85R"),
    "eval": pickle_program(pickled_global("builtins", "eval"), pickled_text("1"), b"\x85R"),
    "eval, by protocol 0": b"cbuiltins\neval\n(S'1'\ntR.",
    "eval, by INST": b"(S'1'\nibuiltins\neval\n.",
    "its subclasses": pickle_program(
        pickled_global("builtins", "getattr"), pickled_global(META, "Metadata"), pickled_text("__subclasses__"),
            b"\x86R"
    ),
    "a name in a name": pickle_program(pickled_global(META, "Metadata.__init__"), b")R"),
    "a class by NEWOBJ_EX": pickle_program(pickled_global(META, "Metadata"), b")}\x92"),
    "a class that is called": pickle_program(pickled_global(META, "StorageMeta"), b")R"),
    "a class that is no class": pickle_program(pickled_global("torch", "Size"), b")\x81"),
    "an extension": pickle_program(b"\x82\x01"),
    "an extension of 2 bytes": pickle_program(b"\x83\x01\x01"),
    "an extension of 4 bytes": pickle_program(b"\x84\x01\x01\x01\x01"),
    "a persistent id": pickle_program(pickled_text("0"), b"Q"),
    "a persistent id in a line": b"P0\n.",
    "an enum of what prints for ever": pickle_program(pickled_global(META, "_MEM_FORMAT_ENCODING"), WEAVE, b"\x85R"),
    "a layout of what prints for ever": pickle_program(pickled_global("torch.serialization", "_get_layout"), WEAVE,
        b"\x85R"),
    "a size of many dimensions": pickle_program(pickled_global("torch", "Size"), b"(" + b"K\x01" * 100_000 + b"t\x85R"),
    "a size of sizes": pickle_program(pickled_global("torch", "Size"), b"(" + b"]" * 3 + b"t\x85R"),
    "many arguments": pickle_program(pickled_global("pathlib", "PosixPath"), b"(" + b"K\x01" * 100_000 + b"tR"),
    "something else": pickle_program(b"N"),
    "a list": pickle_program(b"]"),
    "a module that is no text": pickle_program(b"]]\x93"),
}  # fmt: skip


def tensor_metadata(shape: tuple[int, ...], chunks: list[Any] | None = None) -> Any:
    whole = [dcp.ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))]
    return dcp.TensorStorageMetadata(dcp.TensorProperties(torch.float32), torch.Size(shape), chunks or whole)


def index_of_tensors(tensors: dict[str, Any], length: int = 64, **changes: Any) -> bytes:
    """Return a well-formed index over the first bytes of the one data file."""
    stored = {}
    for key, value in tensors.items():
        for chunk in value.chunks[:4]:
            info = _StorageInfo("__0_0.distcp", 0, length)
            vars(info).update(changes)
            stored[dcp.MetadataIndex(key, chunk.offsets)] = info
    return pickle.dumps(dcp.Metadata(tensors, None, stored), protocol=4)


_MANY = [dcp.ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))] * 5000
_MANY_TENSORS = tensor_metadata((0,), _MANY)
HOSTILE |= {
    "a tensor of 4 TiB in 64 bytes": index_of_tensors({"model.weight": tensor_metadata((2**40,))}),
    "a tensor of 2^70 elements": index_of_tensors({"model.weight": tensor_metadata((2**35, 2**35))}),
    "a tensor of negative size": index_of_tensors({"model.weight": tensor_metadata((-4, -4))}),
    "many tensors of one list of many parts": index_of_tensors({f"model.{i}": _MANY_TENSORS for i in range(5000)}),
    "an item beyond its file": index_of_tensors({"model.weight": tensor_metadata((4, 4))}, length=2**60),
    "a file above the folder": index_of_tensors(
        {"model.weight": tensor_metadata((4, 4))}, relative_path="../__0_0.distcp"
    ),
    "a file at the root": index_of_tensors({"model.weight": tensor_metadata((4, 4))}, relative_path="/etc/passwd"),
    "an extension that prints for ever": pickle_program(
        pickled_instance(
            "_StorageInfo",
            pickled_dict(
                relative_path=pickled_text("a"),
                offset=pickled_int(0),
                length=pickled_int(1),
                transform_descriptors=WEAVE,
            ),
            FILES,
        )
    ),
}
