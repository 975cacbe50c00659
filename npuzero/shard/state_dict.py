"""A sharded model's state dict: unsharded tensors by name, out of it and into it, and torch's own way in."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from npuzero.comm.calls import collective
from npuzero.config import strict_word
from npuzero.errors import CheckpointError, StateError, differing_names
from npuzero.shard.cuts import assembled, portion_of, whole_shape
from npuzero.shard.engine import Engine
from npuzero.shard.extra import is_extra, set_extra
from npuzero.shard.ownership import engine_of
from npuzero.shard.tiles import TiledTensor


def attach(engine: Engine, model: nn.Module) -> None:
    """Make ``engine`` the model's; refuse torch's own ``load_state_dict``, or let masters follow it."""
    model._npuzero = engine  # type: ignore[assignment]
    model.register_load_state_dict_pre_hook(_check_loadable)
    model.register_load_state_dict_post_hook(_refresh_masters)


@collective("full_state_dict")
def full_state_dict(model: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
    """Return ``model.state_dict()`` as a plain model would: unsharded tensors on the CPU, by name. Collective.

    At most one unit is gathered at a time.

    Returns:
        On rank 0 (or all ranks without ``rank0_only``) the tensors, each storage once however many names it has, and
        what else modules give as their extra state; ``{}`` elsewhere.

    Example::

        state = npuzero.full_state_dict(model)  # on every rank: gathering is collective
        if world.rank == 0:
            torch.save(state, "model.pt")
    """
    engine = engine_of(model)
    wanted = engine.world.rank == 0 or not rank0_only
    copies: dict[int, Tensor] = {}  # by parameter, so that tied names share one copy
    for unit in engine.units:
        with engine.values.whole(unit):
            wholes = ((id(p), _whole_copy(engine, p)) for p in unit.parameters() if wanted or portion_of(p) is not None)
            copies.update(whole for whole in wholes if wanted)
    if not wanted:
        return {}
    named = model.state_dict(keep_vars=True)
    return {name: _copied(value, copies) for name, value in named.items()}


def _whole_copy(engine: Engine, parameter: Tensor) -> Tensor:
    """Return a copy on the CPU of a parameter that is unsharded; collective where it is cut."""
    portion = portion_of(parameter)
    if portion is None:
        return parameter.detach().to("cpu", copy=True)
    return assembled(portion, engine.mesh, parameter.detach().cpu())


def _copied(value: Any, copies: Mapping[int, Tensor]) -> Any:
    if isinstance(value, TiledTensor):
        return torch.cat([copies[id(tile)] for tile in value.tiles])
    if id(value) in copies:
        return copies[id(value)]
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


@collective("load_full_state_dict")
def load_full_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load unsharded tensors by name (from :func:`full_state_dict`) into a sharded model; rank 0's values count.

    Collective: every rank calls it with the same names; the values matter on rank 0. Extra states are each rank's own.

    Raises:
        CheckpointError: names or shapes that do not fit the model.

    Example::

        state = npuzero.full_state_dict(model, rank0_only=False)
        npuzero.load_full_state_dict(model, state)
    """
    engine = engine_of(model)
    named = model.state_dict(keep_vars=True)
    problem = _misfit(named, state)
    # Before anything is written: a rank that raised alone would leave the others waiting, with half of the values.
    said = engine.world.exchange(problem and str(problem))
    if problem is not None:
        raise problem
    for rank, other in enumerate(said):
        if other is not None:
            raise CheckpointError(
                "load_full_state_dict",
                expected="a state that fits on every rank",
                got=f"rank {rank}: {other}",
                do="Give every rank the same names; only rank 0's values count.",
                rank=rank,
            )
    values: dict[int, Any] = {}
    for name, tensor in named.items():
        tiles = tensor.by_tile(state[name]) if isinstance(tensor, TiledTensor) else [(tensor, state[name])]
        values.update((id(tile), value) for tile, value in tiles)
    engine.values.load(values)
    buffers = {n: tensor for n, tensor in named.items() if not (isinstance(tensor, nn.Parameter) or is_extra(n))}
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(state[name])
        engine.values.share(buffers.values())
    for name in filter(is_extra, named):
        set_extra(model, name, state[name])


def _misfit(named: Mapping[str, Any], state: object) -> CheckpointError | None:
    """Return why ``state`` cannot be loaded into the tensors ``named``; None if it can."""
    do = "Load a state of the same model, as npuzero.full_state_dict gives it."
    if not isinstance(state, Mapping):
        return CheckpointError(
            "load_full_state_dict", expected="a mapping from names to tensors", got=type(state).__name__, do=do
        )
    missing, unknown = sorted(named.keys() - state.keys()), sorted(state.keys() - named.keys())
    if missing or unknown:
        return CheckpointError(
            "load_full_state_dict",
            expected="the names of model.state_dict()",
            got=differing_names(missing, unknown),
            do=do,
            missing=missing,
            unknown=unknown,
        )
    for name, tensor in named.items():
        if is_extra(name):
            continue
        value: object = state[name]
        shape = whole_shape(tensor)
        expected = f"a tensor of shape {tuple(shape)} with data"
        if not isinstance(value, Tensor):
            return CheckpointError(f"load_full_state_dict: {name}", expected=expected, got=type(value).__name__, do=do)
        if value.shape != shape or value.is_meta:
            got = f"shape {tuple(value.shape)} on {value.device}"
            return CheckpointError(f"load_full_state_dict: {name}", expected=expected, got=got, do=do)
    return None


def _check_loadable(model: nn.Module, state: object, prefix: str, metadata: Mapping[str, object], *_: object) -> None:
    """Refuse torch's load_state_dict for sharded parameters: it copies into unsharded ones, or assigns others.

    Raises:
        StateError: the model's parameters are sharded, or ``assign=True``.
    """
    engine = engine_of(model)
    engine.values.check_here()
    cut = any(portion_of(parameter) for unit in engine.units for parameter in unit.parameters())
    guarded = cut or any(unit.guarded for unit in engine.units)
    if guarded or metadata.get("assign_to_params_buffers"):
        raise StateError(
            f"load_state_dict of {type(model).__name__}",
            expected="unsharded parameters to copy into, in place",
            got="parameters sharded over the ranks, or off the device"
            if guarded
            else "assign=True, which would put others in their place",
            do="Use npuzero.load_full_state_dict(model, state) on every rank, or load before npuzero.zero(); "
            "npuzero.full_state_dict is the way out."
            + (strict_word(engine.world.size, any(unit.strict for unit in engine.units)) if guarded else ""),
        )


def _refresh_masters(model: nn.Module, _: object) -> None:
    """Update masters from the unsharded parameters, into which torch's load_state_dict has copied."""
    engine_of(model).values.refresh_masters()
