"""State dict of a sharded model: save and load unsharded tensors by name, and torch's ``load_state_dict``."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from npuzero.comm.watchdog.call_names import collective_call
from npuzero.config import explain_strict_refusal
from npuzero.errors import CheckpointError, StateError, describe_differing_names
from npuzero.shard.engine import Engine
from npuzero.shard.find_engine import engine_of
from npuzero.shard.layout.tensor_slices import full_tensor_shape, gather_full_tensor, get_portion
from npuzero.shard.layout.tiled_linear import TiledTensor
from npuzero.shard.parameters.across_stages import StageRelay, exchange_or_raise, merge_state_names, pick_per_stage
from npuzero.shard.parameters.check_repeated import check_replicated
from npuzero.shard.state.extra_state import is_extra_state, load_extra_state


@contextlib.contextmanager
def override_state_dict(model: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Make ``state_dict()`` of all modules in a sharded ``model`` return the values of ``state``, inside.

    For libraries that receive the gathered state and also call ``state_dict()`` of a module.
    """
    parameters = {name: value for name, value in model.state_dict(keep_vars=True).items() if name in state}
    for name, parameter in parameters.items():
        parameter.__dict__["_npuzero_given"] = state[name]
    try:
        yield
    finally:
        for parameter in parameters.values():
            parameter.__dict__.pop("_npuzero_given", None)


def attach_engine(engine: Engine, model: nn.Module) -> None:
    """Set ``engine`` on the model; refuse torch's ``load_state_dict``, or update masters after it."""
    model._npuzero = engine  # type: ignore[assignment]
    model.register_load_state_dict_pre_hook(_check_loadable)
    model.register_load_state_dict_post_hook(_refresh_masters)


@collective_call("full_state_dict")
def full_state_dict(model: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
    """Return ``model.state_dict()`` as a plain model would: unsharded tensors on the CPU, by name. Collective.

    At most one unit is unsharded at a time.

    Returns:
        On rank 0 (on all ranks if ``rank0_only`` is False) the tensors, with one copy per tied tensor, and the modules'
        extra states; ``{}`` elsewhere. For a pipeline, those of all stages, which send them one at a time.

    Raises:
        StateError: on every rank: tensor ranks hold different values of a replicated parameter.

    Example::

        state = npuzero.full_state_dict(model)  # on every rank: gathering is collective
        if world.rank == 0:
            torch.save(state, "model.pt")
    """
    engine = engine_of(model)
    check_replicated(engine, "npuzero.full_state_dict")
    line = StageRelay(engine.mesh, to_all=not rank0_only)
    here = _stage_contents(model, engine)
    stages = [(here.names, here.members)]
    if line.many:
        stages = _exchange_contents(engine, line, here)
    found: dict[str, dict[int, Any]] = {}  # by name: the value as {0: value}, or its tiles by index
    seen: set[str] = set()
    for stage, (names, members) in enumerate(stages):
        fresh = [member for member in members if seen.isdisjoint(member.names)]
        for member, value in (
            _give_members(engine, line, here, fresh) if stage == line.stage else _take_members(line, stage, fresh)
        ):
            for name in member.names:
                found.setdefault(name, {})[member.tile] = value
        for member in members if line.takes else ():  # further names, in this stage, of tensors in earlier ones
            value = next(found[name] for name in member.names if name in found)
            found.update((name, value) for name in member.names)
        seen.update(names)
    if not line.takes:
        return {}
    order = merge_state_names(name for names, _ in stages for name in names) if line.many else here.names
    return {name: _join_tiles(found[name]) for name in order}


class _StateMember(NamedTuple):
    """Describe one transferred item: a tensor of the state dict, a tile of one, or a module's extra state.

    Attributes:
        names: its names in the state dict; several for a tied tensor.
        dtype: torch's name of the dtype; empty: not a tensor.
        tile: index of the tile in its tensor.
    """

    names: tuple[str, ...]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    tile: int = 0


@dataclass(frozen=True)
class _StageContents:
    """Hold a stage's part of the state dict.

    Attributes:
        names: in state dict order.
        parameters: by ``id``, in the order of all-gathers.
        others: buffers and extra states, with their values.
    """

    names: list[str]
    parameters: dict[int, _StateMember]
    others: list[tuple[_StateMember, Any]]

    @property
    def members(self) -> list[_StateMember]:
        return [*self.parameters.values(), *(member for member, _ in self.others)]


def _stage_contents(model: nn.Module, engine: Engine) -> _StageContents:
    named = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = defaultdict(list)  # by parameter, so that tied names share one copy
    tiles: dict[int, int] = {}
    values: dict[int, Any] = {}
    for name, value in named.items():
        for i, each in enumerate(value.tiles if isinstance(value, TiledTensor) else [value]):
            names[id(each)].append(name)
            tiles[id(each)] = i
            values[id(each)] = each
    parameters = {
        id(p): _StateMember(tuple(names[id(p)]), _dtype_name(p), tuple(full_tensor_shape(p)), tiles[id(p)])
        for unit in engine.units
        for p in unit.parameters()
        if id(p) in names
    }
    others = [
        (
            _StateMember(
                tuple(names[key]), *((_dtype_name(each), tuple(each.shape)) if isinstance(each, Tensor) else ())
            ),
            each,
        )
        for key, each in values.items()
        if key not in parameters
    ]
    return _StageContents(list(named), parameters, others)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _exchange_contents(
    engine: Engine, line: StageRelay, here: _StageContents
) -> list[tuple[list[str], list[_StateMember]]]:
    """Return the names and members of each stage. Collective."""
    problem: Exception | None = None
    try:
        engine.values.check_here()
    except StateError as error:
        problem = error
    said = exchange_or_raise(
        engine.mesh.world, "full_state_dict", problem, [here.names, here.members] if line.first else None
    )
    return [
        (names, [_StateMember(tuple(its), dtype, tuple(shape), tile) for its, dtype, shape, tile in members])
        for names, members in pick_per_stage(engine.mesh, said)
    ]


def _give_members(
    engine: Engine, line: StageRelay, here: _StageContents, fresh: Sequence[_StateMember]
) -> Iterator[tuple[_StateMember, Any]]:
    """Send this stage's members in ``fresh`` to other stages, and yield them on ranks that keep them. Collective.

    At most one unit is unsharded at a time.
    """
    # Every rank of the stage unshards each unit, since the all-gather is collective, but only ranks that send or keep
    # values copy them. A parameter that is cut over tensor ranks is gathered by all of these.
    wanted, chosen = line.takes or line.gives, set(fresh)
    for unit in engine.units:
        with engine.values.whole(unit):
            for parameter in unit.parameters():
                member = here.parameters.get(id(parameter))
                if member in chosen and (wanted or get_portion(parameter) is not None):
                    whole = _unsharded_copy(engine, parameter)
                    line.give(whole)
                    if line.takes:
                        yield member, whole
    for member, value in here.others:
        if member in chosen and wanted:
            whole = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
            if line.gives:
                _give_object(line, whole)
            if line.takes:
                yield member, whole


def _give_object(line: StageRelay, value: Any) -> None:
    if isinstance(value, Tensor):
        line.give(value)
        return
    raw = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    line.give(torch.tensor([raw.numel()]))
    line.give(raw)


def _take_members(line: StageRelay, stage: int, fresh: Sequence[_StateMember]) -> Iterator[tuple[_StateMember, Any]]:
    """Receive the members in ``fresh`` from another stage and yield them, on ranks that keep them."""
    for member in fresh if line.takes else ():
        if member.dtype:
            yield member, line.take(stage, getattr(torch, member.dtype), member.shape)
        else:
            length = int(line.take(stage, torch.int64, (1,)))
            yield member, pickle.loads(line.take(stage, torch.uint8, (length,)).numpy().tobytes())


def _unsharded_copy(engine: Engine, parameter: Tensor) -> Tensor:
    """Return a CPU copy of an unsharded parameter; collective if it is cut over tensor ranks."""
    portion = get_portion(parameter)
    if portion is None:
        return parameter.detach().to("cpu", copy=True)
    return gather_full_tensor(portion, engine.mesh, parameter.detach().cpu())


def _join_tiles(tiles: Mapping[int, Any]) -> Any:
    return tiles[0] if len(tiles) == 1 else torch.cat([tiles[i] for i in sorted(tiles)])


@collective_call("load_full_state_dict")
def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load unsharded tensors by name (from :func:`full_state_dict`) into a sharded model; rank 0's values count.

    Collective: every rank passes the same names; the values matter on rank 0. Each rank loads its own extra states.
    For a pipeline the names are those of all stages.

    Args:
        model: made by :func:`npuzero.zero`.
        state: unsharded tensors by name.
        strict: whether the names must equal those of ``model.state_dict()``. If False, as for torch's
            ``load_state_dict``, tensors missing in ``state`` are unchanged, and names that the model lacks are ignored.

    Raises:
        CheckpointError: names or shapes do not fit the model, or names differ between ranks.

    Example::

        state = npuzero.full_state_dict(model, rank0_only=False)
        npuzero.load_full_state_dict(model, state)
    """
    engine = engine_of(model)
    line = StageRelay(engine.mesh)
    named = model.state_dict(keep_vars=True)
    stages: list[dict[str, tuple[int, ...] | None]] = [
        {name: None if is_extra_state(name) else tuple(full_tensor_shape(tensor)) for name, tensor in named.items()}
    ]
    if line.many:
        stages = pick_per_stage(engine.mesh, engine.mesh.world.exchange(stages[0] if line.first else None))
    shapes = {name: shape for stage in stages for name, shape in stage.items()}
    if not strict and isinstance(state, Mapping):
        shapes = {name: shape for name, shape in shapes.items() if name in state}
        state = {name: state[name] for name in shapes}
        stages = [{name: shape for name, shape in stage.items() if name in shapes} for stage in stages]
        named = {name: tensor for name, tensor in named.items() if name in shapes}
    problem = _load_mismatch_error(shapes, state)
    kinds = None if problem or not line.many else {n: _dtype_name(v) for n, v in state.items() if isinstance(v, Tensor)}
    # Before anything is written: if one rank raised alone, the rest would wait, with half of the values loaded.
    names = None if strict else sorted(shapes)
    said = engine.mesh.world.exchange([problem and str(problem), kinds if engine.mesh.world.rank == 0 else None, names])
    if problem is not None:
        raise problem
    for rank, (other, _, its) in enumerate(said):
        if other is None and its != said[0][2]:
            other = describe_differing_names(sorted({*said[0][2]} - {*its}), sorted({*its} - {*said[0][2]}))
        if other is not None:
            raise CheckpointError(
                "load_full_state_dict",
                expected="a state that fits on every rank",
                got=f"rank {rank}: {other}",
                do="Give every rank the same names; only rank 0's values count.",
                rank=rank,
            )
    if line.many and line.first:
        state = {**state, **_receive_from_rank0(line, stages, state, said[0][1])}
    values: dict[int, Any] = {}
    for name, tensor in named.items():
        tiles = tensor.by_tile(state[name]) if isinstance(tensor, TiledTensor) else [(tensor, state[name])]
        values.update((id(tile), value) for tile, value in tiles)
    if not strict:
        engine.apply_pending()  # tensors that are not loaded keep their pending update
    engine.values.load(values)
    buffers = {n: tensor for n, tensor in named.items() if not (isinstance(tensor, nn.Parameter) or is_extra_state(n))}
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(state[name])
        engine.values.share(buffers.values())
    for name in filter(is_extra_state, named):
        load_extra_state(model, name, state[name])


def _receive_from_rank0(
    line: StageRelay,
    stages: Sequence[Mapping[str, Sequence[int] | None]],
    state: Mapping[str, Any],
    dtypes: Mapping[str, str],
) -> dict[str, Tensor]:
    """Return rank 0's values of this stage's tensors, on its first rank; {} in the first stage, which has them."""
    if line.stage > 0:
        mine = stages[line.stage].items()
        return {name: line.take(0, getattr(torch, dtypes[name]), s) for name, s in mine if s is not None}
    for number, stage in enumerate(stages[1:], 1):
        for name in (name for name, shape in stage.items() if shape is not None):
            line.send(state[name], number)
    return {}


def _load_mismatch_error(shapes: Mapping[str, Sequence[int] | None], state: object) -> CheckpointError | None:
    """Return the error if ``state`` does not fit tensors of these shapes (None: not a tensor); None if it fits."""
    do = "Load a state of the same model, as npuzero.full_state_dict gives it."
    if not isinstance(state, Mapping):
        return CheckpointError(
            "load_full_state_dict", expected="a mapping from names to tensors", got=type(state).__name__, do=do
        )
    missing, unknown = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys())
    if missing or unknown:
        return CheckpointError(
            "load_full_state_dict",
            expected="the names of model.state_dict()",
            got=describe_differing_names(missing, unknown),
            do=do,
            missing=missing,
            unknown=unknown,
        )
    for name, shape in shapes.items():
        if shape is None:
            continue
        value: object = state[name]
        expected = f"a tensor of shape {tuple(shape)} with data"
        if not isinstance(value, Tensor):
            return CheckpointError(f"load_full_state_dict: {name}", expected=expected, got=type(value).__name__, do=do)
        if tuple(value.shape) != tuple(shape) or value.is_meta:
            got = f"shape {tuple(value.shape)} on {value.device}"
            return CheckpointError(f"load_full_state_dict: {name}", expected=expected, got=got, do=do)
    return None


def _check_loadable(model: nn.Module, state: object, prefix: str, metadata: Mapping[str, object], *_: object) -> None:
    """Refuse torch's load_state_dict for sharded parameters: it copies into unsharded parameters, or replaces them.

    Raises:
        StateError: the model's parameters are sharded, or ``assign=True``.
    """
    engine = engine_of(model)
    engine.values.check_here()
    cut = any(get_portion(parameter) for unit in engine.units for parameter in unit.parameters())
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
            + (explain_strict_refusal(engine.world.size, any(unit.strict for unit in engine.units)) if guarded else ""),
        )


def _refresh_masters(model: nn.Module, _: object) -> None:
    """Update masters from the unsharded parameters after torch's load_state_dict has written them."""
    engine_of(model).values.refresh_masters()
