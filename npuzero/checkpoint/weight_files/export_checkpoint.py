"""Export unsharded weights from a checkpoint into safetensors files, one tensor at a time, without a model."""

from __future__ import annotations

from pathlib import Path

import torch

from npuzero.checkpoint.layout.dcp_metadata import Tensors
from npuzero.checkpoint.layout.parts import MODEL
from npuzero.checkpoint.public import resolve_checkpoint
from npuzero.checkpoint.source import CheckpointReader, ReadRequest
from npuzero.checkpoint.weight_files.export import FILE_BYTES, Facts, SafetensorsWriter
from npuzero.errors import CheckpointError
from npuzero.shard.layout.tensor_slices import PIECE


def export_checkpoint(folder: Path, path: Path, dtype: torch.dtype | None, file_bytes: int = FILE_BYTES) -> list[Facts]:
    """Write the weights in a checkpoint, or in the latest one of a run.

    A tied tensor in a checkpoint of npuzero is written once, under its first name.

    Args:
        dtype: of all floating-point tensors (a checkpoint does not mark buffers); None keeps the stored dtype, which is
            float32 (masters) for trainable parameters.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it has no model.
        StorageError: the files cannot be written.
    """
    source = CheckpointReader(resolve_checkpoint(folder))
    found: dict[object, str] = {}
    for key, described in source.tensors.items():
        if key.startswith(f"{MODEL}.") and type(described) is Tensors:
            # names of a tied tensor share their places in the files; a tensor without elements has no place, so its key
            # counts
            found.setdefault(source.places(key) or key, key)
    if not found:
        raise CheckpointError(
            f"export {source.path}",
            expected=f"tensors named {MODEL}.*",
            got="none",
            do="Save the model's state under that name, as npuzero.checkpoint.save does.",
        )
    facts: list[Facts] = []
    for key in found.values():
        stored = source.tensors[key].properties.dtype
        kind = dtype if dtype is not None and stored.is_floating_point else stored
        facts.append((key.removeprefix(f"{MODEL}."), kind, tuple(source.tensors[key].size)))
    with SafetensorsWriter(path, facts, file_bytes) as writer:
        for key, (_, kind, shape) in zip(found.values(), facts, strict=True):
            whole = torch.empty(shape, dtype=source.tensors[key].properties.dtype)
            source.fill([ReadRequest.all_of(key, whole)])
            for piece in whole.reshape(-1).split(PIECE):
                writer.put(piece, kind)
        writer.commit()
    return facts
