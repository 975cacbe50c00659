"""Convert the state of a sharded model for torch.distributed.checkpoint: each tensor as this rank's boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import planner

from npuzero.checkpoint.layout import parts
from npuzero.checkpoint.layout.across_stages import StageShare, merge_group_names
from npuzero.checkpoint.layout.boxes import TensorBox
from npuzero.checkpoint.layout.dcp_metadata import Chunk, Index, tensor_properties
from npuzero.checkpoint.layout.parts import (
    MODEL,
    OPTIMIZER,
    CutOptimizer,
    SavedPart,
    SavedTensor,
    SlotPiece,
    UnshardedEntry,
)
from npuzero.errors import CheckpointError, StateError
from npuzero.plan import STAGE
from npuzero.shard.engine import Engine
from npuzero.shard.find_engine import engine_of
from npuzero.shard.layout.tiled_linear import TileRows, find_tile_rows
from npuzero.shard.offload.delayed_update import LAGGING, warn_of_delay
from npuzero.shard.parameters.across_stages import pick_per_stage
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.snapshot import NOW, Later, StateSnapshot


class CutTensor(torch.Tensor):
    """Represent a tensor by this rank's boxes, which DCP saves and loads. It has shape and dtype, but no data.

    Attributes:
        boxes: this rank's boxes in the order of the elements, each with a tensor of its sizes.
    """

    boxes: list[tuple[TensorBox, Tensor]]

    @staticmethod
    def __new__(cls, shape: torch.Size, own: Tensor, boxes: list[tuple[TensorBox, Tensor]]) -> CutTensor:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=own.dtype, device=own.device)
        made.boxes = boxes
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CutTensor(shape={tuple(self.shape)}, dtype={self.dtype}, boxes={[box for box, _ in self.boxes]})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise StateError(
            str(function),
            expected="a whole tensor",
            got="one that is sharded over the ranks",
            do="Hand it to torch.distributed.checkpoint, read its boxes, or use npuzero.full_state_dict(model).",
        )

    def __create_write_items__(self, fqn: str, _: object) -> list[planner.WriteItem]:
        return [
            planner.WriteItem(
                Index(fqn, chunk.offsets),
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, tensor_properties(self.dtype), self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        return [Chunk(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in self.boxes]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return next(tensor for box, tensor in self.boxes if box.offsets == tuple(index.offset))


@torch.no_grad()
def state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return the state of a sharded model and its optimizer, sharded, for ``torch.distributed.checkpoint``. Collective.

    Returns:
        ``{"model": ..., "optim": ...}`` in the form of torch's ``get_state_dict``. Parameters and optimizer states are
        :class:`CutTensor`, in float32 if trainable; buffers are the model's. The boxes may be memory that the next step
        changes. An optimizer without any state gives zeros, for ``torch.distributed.checkpoint.load`` to fill.

    Raises:
        ConfigError: an optimizer of another model.

    Example::

        from torch.distributed import checkpoint as dcp

        state = npuzero.checkpoint.state_dict(model, optimizer)
        dcp.save(state, checkpoint_id="dcp")
    """
    engine = engine_of(model)
    cut_optimizer = parts.get_cut_optimizer(model, optimizer)
    engine.values.settle()
    share = None if engine.mesh.index(STAGE) else asdict(parts.describe_stage(model, cut_optimizer))
    shares = [StageShare(**facts) for facts in pick_per_stage(engine.mesh, engine.mesh.world.exchange(share))]
    state: dict[str, Any] = {MODEL: {entry.path[1]: entry.value for entry in parts.model_entries(model)}}
    _add_cut_tensors(state, parts.model_parts(model, engine))
    if cut_optimizer is not None:
        names = merge_group_names(shares, "state_dict")
        groups = [{**g, "params": own} for g, own in zip(cut_optimizer.param_groups, names, strict=True)]
        state[OPTIMIZER] = {"state": {}, "param_groups": groups}
        tensors, numbers = parts.optimizer_parts(model, engine, cut_optimizer)
        if not tensors and not numbers:
            tensors, numbers = _zero_states(model, engine, cut_optimizer)
        _add_cut_tensors(state, tensors)
        for entry in numbers:
            _, _, name, kind = entry.path
            state[OPTIMIZER]["state"].setdefault(name, {})[kind] = entry.value
    return state


@torch.no_grad()
def load_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, state: Mapping[str, Any]
) -> None:
    """Load a state of :func:`state_dict`, after ``torch.distributed.checkpoint.load`` has filled it. Collective.

    Raises:
        CheckpointError: it is no such state.
        ConfigError: an optimizer of another model.

    Example::

        from torch.distributed import checkpoint as dcp

        state = npuzero.checkpoint.state_dict(model, optimizer)
        dcp.save(state, checkpoint_id="dcp")
        dcp.load(state, checkpoint_id="dcp")
        npuzero.checkpoint.load_state_dict(model, optimizer, state=state)
    """
    engine = engine_of(model)
    cut_optimizer = parts.get_cut_optimizer(model, optimizer)
    engine.values.settle()
    engine.lag.forget()
    # Masters first; the parameters follow at the end, by R4 on all ranks at once. In between a rank has new shards next
    # to its neighbours' old ones.
    for part in parts.model_parts(model, engine):
        begin, end = part.rest.range
        values = torch.zeros(end - begin, dtype=part.dtype, device=engine.device)
        for cut in part.cuts:
            _copy_own_boxes(state[MODEL], str(cut.paths[0][1]), cut.piece, begin, values)
        parts.write_saved_part(part, slice(0, end - begin), values)
    for entry in parts.model_entries(model):
        if isinstance(entry.value, Tensor):
            entry.value.copy_(state[MODEL][entry.path[1]])
    if cut_optimizer is not None:
        for group, options in zip(cut_optimizer.param_groups, state[OPTIMIZER]["param_groups"], strict=True):
            group.update((key, value) for key, value in options.items() if key != "params")
        warn_of_delay(state[OPTIMIZER]["state"].values(), engine.lag)
        tiles = find_tile_rows(model)
        for flat in engine.flats():
            _load_flat_states(engine, cut_optimizer, flat, tiles, state[OPTIMIZER]["state"])
    engine.values.restore_parameters()


def _add_cut_tensors(state: dict[str, Any], tensors: Sequence[SavedPart]) -> None:
    for part in tensors:
        begin, end = part.rest.range
        values = part.later(slice(0, end - begin), NOW)()
        for cut in part.cuts:
            made = CutTensor(cut.shape, values, cut.piece.own_boxes(begin, values))
            for path in cut.paths:
                inner = state
                for name in path[:-1]:
                    inner = inner.setdefault(str(name), {})
                there = inner.setdefault(str(path[-1]), made)
                if there is not made:  # boxes of another tile of the same tensor
                    there.boxes += made.boxes


def _zero_states(
    model: nn.Module, engine: Engine, optimizer: CutOptimizer
) -> tuple[list[SavedPart], list[UnshardedEntry]]:
    """Return the states that an optimizer will have: a step of 0, and moments of zeros.

    With delayed updates the lagging parameters are included: they equal the parameters, since no update is pending.
    """
    tiles = find_tile_rows(model)
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    tensors, numbers = [], []
    # One buffer of zeros serves all slots of a flat parameter, so a name becomes a SavedPart per flat, not per tensor.
    for flat in engine.flats():
        pieces = zip(parts.slot_pieces(flat, tiles), flat.parameters, strict=True)
        own = [piece for piece, parameter in pieces if id(parameter) in members]
        for name in (*optimizer.state_names(), *([LAGGING] if engine.lag else [])):
            paths = [(OPTIMIZER, "state", piece.whole.name, name) for piece in own]
            if name == "step":
                numbers += [UnshardedEntry(path, torch.tensor(0.0)) for path in paths]
            elif own:
                values = torch.zeros(flat.rests.states.numel, device=engine.device)
                if name == LAGGING:
                    values = optimizer.cut_buffer(flat, name, slice(0, values.numel()), NOW)()
                cuts = tuple(SavedTensor((path,), piece, torch.float32) for path, piece in zip(paths, own, strict=True))
                tensors.append(SavedPart(flat, flat.rests.states, cuts, partial(_snapshot_slice, values)))
    return tensors, numbers


def _snapshot_slice(values: Tensor, own: slice, snapshot: StateSnapshot) -> Later:
    return snapshot.copied(values[own])


def _load_flat_states(
    engine: Engine,
    optimizer: CutOptimizer,
    flat: FlatParameter,
    tiles: Mapping[str, TileRows],
    loaded: Mapping[str, Any],
) -> None:
    begin, end = flat.rests.states.range
    buffers: dict[str, Tensor] = {}
    slots: parts.SlotStates = []
    for piece in parts.slot_pieces(flat, tiles):
        state: dict[str, float | None] = {}
        own = loaded.get(piece.whole.name, {})
        for name, value in own.items():
            state[name] = None if isinstance(value, CutTensor) else float(value)
            if state[name] is None:
                buffer = buffers.setdefault(name, torch.zeros(end - begin, device=engine.device))
                _copy_own_boxes(own, name, piece, begin, buffer)
        slots.append(state)
    for name in optimizer.load_cut_state(engine, flat, slots):
        values = buffers[name] if name in buffers else torch.zeros(end - begin, device=engine.device)
        optimizer.write_cut_buffer(flat, name, slice(0, end - begin), values)


def _copy_own_boxes(state: Mapping[str, Any], name: str, piece: SlotPiece, begin: int, values: Tensor) -> None:
    found = state.get(name)
    targets = dict(piece.own_boxes(begin, values))
    sources = dict(found.boxes) if isinstance(found, CutTensor) else None
    if sources is None or not sources.keys() >= targets.keys():
        raise CheckpointError(
            f"load_state_dict: {piece.whole.name}",
            expected=f"a CutTensor with {[*targets]}",
            got=repr(found)[:200],
            do="Pass what npuzero.checkpoint.state_dict gave for the same model on the same ranks.",
        )
    for box, target in targets.items():
        target.copy_(sources[box])
