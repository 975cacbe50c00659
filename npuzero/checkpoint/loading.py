"""Load checkpoints: every rank reads the elements that it keeps, however the writers were sharded."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from npuzero.checkpoint import rng
from npuzero.checkpoint.landing import RANGE, LoadTarget, Stored
from npuzero.checkpoint.layout import parts
from npuzero.checkpoint.layout.across_stages import StageShare, merge_group_names
from npuzero.checkpoint.layout.dcp_metadata import Tensors
from npuzero.checkpoint.layout.parts import MODEL, CutOptimizer, SavedPart, SlotPiece
from npuzero.checkpoint.source import CheckpointReader, ReadRequest
from npuzero.errors import CheckpointError, describe_differing_names
from npuzero.shard.engine import Engine
from npuzero.shard.layout.tiled_linear import find_tile_rows
from npuzero.shard.offload.delayed_update import warn_of_delay
from npuzero.shard.state.extra_state import is_extra_state, load_extra_state
from npuzero.shard.state.flat_gradient import drop_rounding_errors
from npuzero.shard.state.flat_parameter import FlatParameter

_DO = "Load a checkpoint of the same model, with the same kind of optimizer and groups."


class CheckpointKeys:
    """Find the keys of a model and its optimizer in a checkpoint, under any prefix: torch's users choose prefixes.

    Attributes:
        parameters: key by name, for parameters and buffers.
        states: for each parameter's name the keys of its optimizer states, by name.
        groups: for each of the optimizer's groups the saved options of the group that it matches; {} without one.
        regrouped: whether the groups differ from the saved ones, or are in another order.
        notice: a warning about optimizer states that are not restored; "" if all are.
    """

    def __init__(
        self, source: CheckpointReader, model: nn.Module, optimizer: CutOptimizer | None, shares: Sequence[StageShare]
    ) -> None:
        """Find all keys; ``shares``: the names in each stage of a pipeline, this one included.

        Raises:
            CheckpointError: a key is missing, or the model or optimizer does not know it.
        """
        self._source = source
        self._shares = shares
        self.parameters = self._find_model(model)
        self.states: dict[str, dict[str, str]] = {}
        self.groups: list[dict[str, Any]] = []
        self.regrouped = False
        self.notice = ""
        if optimizer is not None:
            self._find_optimizer()

    def _find_model(self, model: nn.Module) -> dict[str, str]:
        aliases = defaultdict(list)
        named = model.state_dict(keep_vars=True)
        for name, value in named.items():
            aliases[id(value)].append(name)
        keys = self._source.tensors
        everywhere = {name for share in self._shares for name in share.names}
        if not named:
            return {}  # a stage without parameters and buffers
        # The checkpoint may have the model under another prefix. Take the keys that end with the name of one tensor for
        # candidates: a prefix is right if all tensors have it, each under any of its names.
        some = next(iter(named))
        tied = aliases[id(named[some])]
        prefixes = {key[: len(key) - len(name)] for name in tied for key in keys if key.endswith(name)}
        fitting = [
            prefix
            for prefix in sorted(prefixes)
            if all(any(prefix + other in keys for other in aliases[id(value)]) for value in named.values())
        ]
        if len(fitting) > 1 and f"{MODEL}." in fitting:
            fitting = [f"{MODEL}."]
        if len(fitting) != 1:
            likely = fitting or [max(prefixes, key=lambda p: sum(p + n in keys for n in named), default="model.")]
            missing = [name for name in named if likely[0] + name not in keys]
            strangers = [key.removeprefix(likely[0]) for key in keys if key.startswith(likely[0])]
            others = describe_differing_names(missing, [key for key in strangers if key not in everywhere])
            found = f"those under {fitting}" if fitting else f"{len(named) - len(missing)} of its {len(named)}"
            raise self._misfit("the tensors of the model, once", f"{found}; {others}" if others else found)
        prefix = fitting[0]
        unknown = [key for key in keys if prefix and key.startswith(prefix) and key[len(prefix) :] not in everywhere]
        if unknown:
            raise self._misfit("no tensors that the model does not have", describe_differing_names([], unknown))
        return {
            name: next(prefix + other for other in (name, *aliases[id(value)]) if prefix + other in keys)
            for name, value in named.items()
        }

    def _find_optimizer(self) -> None:
        keys = self._source.tensors
        prefixes = {key[: key.index("param_groups.")] for key in keys if "param_groups." in key}
        if len(prefixes) > 1 and f"{parts.OPTIMIZER}." in prefixes:
            prefixes = {f"{parts.OPTIMIZER}."}
        if len(prefixes) != 1:
            raise self._misfit("one optimizer's state", f"{sorted(prefixes) or 'none'}")
        prefix = prefixes.pop()
        own = merge_group_names(self._shares, f"load {self._source.path}")
        ids = self._find_groups(f"{prefix}param_groups.", own)
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for key in keys:
            if key.startswith(f"{prefix}state."):
                owner, _, state = key.removeprefix(f"{prefix}state.").rpartition(".")
                found[owner][state] = key
        for name, saved in ids.items():
            self.states[name] = found.get(saved, {})

    def _find_groups(self, prefix: str, own: Sequence[Sequence[str]]) -> dict[str, str]:
        """Fill ``groups`` with the options of each group; return the saved name or number of each parameter."""
        options: dict[str, dict[str, str]] = defaultdict(dict)
        for key in self._source.tensors:
            if key.startswith(prefix):
                owner, _, option = key.removeprefix(prefix).rpartition(".")
                options[owner][option] = key
        if not any("params" in group for group in options.values()):  # DCP's flattened form: options by parameter
            if any(name not in options for names in own for name in names):
                raise self._misfit("options for every parameter of the optimizer", f"those of {sorted(options)[:5]}")
            self.groups = [self._read(options[names[0]]) if names else {} for names in own]
            return {name: name for names in own for name in names}
        saved = [self._read(options[str(g)]) for g in range(len(options))]
        if all(isinstance(one, str) for group in saved for one in group["params"]):
            return self._match_names(saved, own)
        return self._match_numbers(saved, own)

    def _match_names(self, saved: Sequence[dict[str, Any]], own: Sequence[Sequence[str]]) -> dict[str, str]:
        """Match groups by the parameters that both the checkpoint and the optimizer have.

        A group without a match keeps its options.
        """
        then = [{*group["params"]} for group in saved]
        before, now = set().union(*then), {name for names in own for name in names}
        common = before & now
        if now and before and not common:
            raise self._misfit(
                "states of parameters of the optimizer", describe_differing_names(sorted(now), sorted(before))
            )
        # A saved group matches if it has the same common parameters. Each is matched once; an empty group matches only
        # an empty one.
        rest, order = [*range(len(saved))], []
        for names in own:
            kept = common.intersection(names)
            fits = [i for i in rest if then[i] & common == kept and (kept or not (then[i] or names))]
            order += fits[:1] or [None]
            rest = [i for i in rest if i != order[-1]]
            self.groups.append({} if not fits else {k: v for k, v in saved[fits[0]].items() if k != "params"})
        self.regrouped = order != [*range(len(saved))]
        self.notice = _format_notice(order, sorted(before - now), sorted(now - before))
        return {name: name for name in common}

    def _match_numbers(self, saved: list[dict[str, Any]], own: Sequence[Sequence[str]]) -> dict[str, str]:
        """Match groups by size: plain torch saves parameters by number."""
        if len(self._shares) > 1:
            raise self._misfit("parameters of groups by name, over the stages of a pipeline", "numbers of them")
        ids: dict[str, str] = {}
        for names in own:
            group = next((s for s in saved if len(s["params"]) == len(names)), None)
            if group is None:
                sizes = ", ".join(str(len(s["params"])) for s in saved)
                got = f"groups of {sizes or 'no'} parameters, by number"
                raise self._misfit(f"a group of the {len(names)} parameters {names[:3]}...", got)
            saved.remove(group)
            self.groups.append({key: value for key, value in group.items() if key != "params"})
            ids.update(zip(names, map(str, group["params"]), strict=True))
        return ids

    def _read(self, keys: Mapping[str, str]) -> dict[str, Any]:
        return {option: self._source.read_object(key) for option, key in keys.items()}

    def _misfit(self, expected: str, got: str) -> CheckpointError:
        return CheckpointError(f"load {self._source.path}", expected=expected, got=got, do=_DO)


def _format_notice(order: Sequence[int | None], left_out: Sequence[str], new: Sequence[str]) -> str:
    """Format a warning about optimizer states that are not restored; "" if all are.

    Args:
        order: for each of the optimizer's groups, the saved group that it matches.
        left_out: saved parameters that the optimizer does not have.
        new: parameters of the optimizer that were not saved.
    """
    unmatched = [str(i) for i, match in enumerate(order) if match is None]
    texts = {
        "has groups of other parameters, so these keep the program's hyperparameters": unmatched,
        "does not have parameters whose saved states are left out": left_out,
        "has parameters without a saved state, which begin without one": new,
    }
    said = [f"{text}: {', '.join(names[:5])}" + ", ..." * (len(names) > 5) for text, names in texts.items() if names]
    return "; it ".join(said)


class CheckpointLoader:
    """Load one checkpoint into a model and an optimizer, as one rank."""

    def __init__(
        self,
        source: CheckpointReader,
        model: nn.Module,
        engine: Engine,
        optimizer: CutOptimizer | None,
        shares: Sequence[StageShare],
    ) -> None:
        self._source = source
        self._model = model
        self._engine = engine
        self._optimizer = optimizer
        self._names = CheckpointKeys(source, model, optimizer, shares)
        self._tiles = find_tile_rows(model)
        self._idle: list[Tensor] = []  # buffers for reuse: fresh pages are slow
        for part in parts.model_parts(model, engine):
            for cut in part.cuts:
                self._check(self._names.parameters[str(cut.paths[0][1])], cut.shape)

    def load(self) -> None:
        """Load masters, frozen parameters, buffers and optimizer states. Parameters follow from the masters by R4."""
        # The constructor has checked keys and shapes, and all ranks agreed, before any rank writes here.
        if self._optimizer is not None:
            saved = {name for state in self._names.states.values() for name in state}
            self._optimizer.check_rule(saved, self._names.groups)
        self._engine.lag.forget()
        for flat in self._engine.flats():
            drop_rounding_errors(flat.gradient)
        for part in parts.model_parts(self._model, self._engine):
            self._load_parameters(part)
        for entry in parts.model_entries(self._model):
            self._load_entry(str(entry.path[1]), entry.value)
        if self._optimizer is not None:
            warn_of_delay(self._names.states.values(), self._engine.lag)
            if self._names.notice and self._engine.mesh.world.rank == 0:
                text = f"load {self._source.path}: the optimizer {self._names.notice}."
                warnings.warn(text, UserWarning, stacklevel=5)
            for group, options in zip(self._optimizer.param_groups, self._names.groups, strict=True):
                group.update(options)
            for flat in self._engine.flats():
                self._load_states(flat)

    def load_scheduler(self, scheduler: Any) -> None:
        """Load a scheduler's state; take its rates from the optimizer's groups if these differ from the saved ones."""
        scheduler.load_state_dict(read_shared_state(self._source, "scheduler"))
        if self._names.regrouped:
            _sync_scheduler_rates(scheduler)

    def _load_parameters(self, part: SavedPart) -> None:
        stored = [(self._names.parameters[str(cut.paths[0][1])], cut.piece) for cut in part.cuts]
        self._fill(part.rest.range, {MODEL: stored}, part.dtype, lambda _, *there: parts.write_saved_part(part, *there))

    def _fill(
        self,
        shard: tuple[int, int],
        stored: Mapping[str, Stored],
        dtype: torch.dtype,
        write: Callable[[str, slice, Tensor], None],
    ) -> None:
        """Read a shard, range by range.

        Args:
            stored: the places of each tensor's pieces, by its name.
            write: takes a name, a range of the shard, and values.
        """
        begin, end = shard
        wanted: list[ReadRequest] = []
        for start in range(begin, end, RANGE):
            own = slice(start - begin, min(start + RANGE, end) - begin)
            for name, pieces in stored.items():
                landing = LoadTarget(self._idle, begin, own, dtype, partial(write, name, own))
                wanted += landing.wanted(pieces)
        self._source.fill(wanted)

    def _load_entry(self, name: str, value: Tensor) -> None:
        loaded = self._source.read_object(self._names.parameters[name])
        if is_extra_state(name):
            load_extra_state(self._model, name, loaded)
        else:
            value.copy_(loaded)

    def _load_states(self, flat: FlatParameter) -> None:
        slots: parts.SlotStates = []
        stored: dict[str, list[tuple[str, SlotPiece]]] = defaultdict(list)
        for piece in parts.slot_pieces(flat, self._tiles):
            state: dict[str, float | None] = {}
            whole = piece.whole
            for name, key in self._names.states.get(whole.name, {}).items():
                described = self._source.tensors[key]
                if type(described) is Tensors and described.size == whole.shape and (whole.shape or name != "step"):
                    state[name] = None
                    stored[name].append((key, piece))
                else:
                    state[name] = self._number(key)
            slots.append(state)
        assert self._optimizer is not None
        try:
            names = self._optimizer.load_cut_state(self._engine, flat, slots)
        except CheckpointError as error:
            subject = f"load {self._source.path}: {error.subject}"
            raise CheckpointError(subject, expected=error.expected, got=error.got, do=error.do) from error
        write = partial(self._optimizer.write_cut_buffer, flat)
        self._fill(flat.rests.states.range, {name: stored[name] for name in names}, torch.float32, write)

    def _number(self, key: str) -> float:
        value = self._source.read_object(key)
        if isinstance(value, Tensor) and value.numel() == 1:
            return float(value)
        if isinstance(value, (int, float)):
            return float(value)
        raise CheckpointError(
            f"load {key}", expected="a number, or a tensor of the parameter's shape", got=str(value)[:80], do=_DO
        )

    def _check(self, key: str, shape: torch.Size) -> None:
        described = self._source.tensors[key]
        if type(described) is not Tensors or described.size != shape:
            got = f"shape {tuple(described.size)}" if type(described) is Tensors else "no tensor"
            raise CheckpointError(f"load {key}", expected=f"shape {tuple(shape)}", got=got, do=_DO)


def _sync_scheduler_rates(scheduler: Any) -> None:
    """Set the base and last rates of a scheduler, and of its parts, to the rates of the optimizer's groups."""
    for part in getattr(scheduler, "_schedulers", ()):
        _sync_scheduler_rates(part)
    if hasattr(scheduler, "base_lrs"):
        groups = scheduler.optimizer.param_groups
        scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in groups]
        scheduler._last_lr = [group["lr"] for group in groups]


@dataclass(frozen=True)
class Loaded:
    """Hold the results of a load.

    Attributes:
        path: the checkpoint.
        step: number of optimizer steps at the save; None if the checkpoint has no step.
        extra: the ``extra`` that was saved; None without one.
    """

    path: Path
    step: int | None
    extra: Any


def read_shared_state(source: CheckpointReader, name: str) -> Any:
    """Return the value that was saved as ``name`` for all ranks.

    Raises:
        CheckpointError: no value was saved.
    """
    if name in source.tensors:
        return source.read_object(name)
    found: dict[str, Any] = {}  # torch flattens mappings and joins their keys with dots
    for key in source.tensors:
        if key.startswith(f"{name}."):
            place = found
            *inner, last = key.split(".")[1:]
            for part in inner:
                place = place.setdefault(part, {})
            place[last] = source.read_object(key)
    if not found:
        raise _missing_state_error(source, name)
    return found


def _missing_state_error(source: CheckpointReader, name: str) -> CheckpointError:
    return CheckpointError(
        f"load {source.path}: {name}", expected="a state of it", got="none", do="Leave it out, or save it too."
    )


def read_rank_states(source: CheckpointReader, name: str, rank: int, world: int) -> list[Any]:
    """Return the saved values of ``name``: this rank's, if as many ranks saved it or all values are equal; else all.

    Args:
        rank, world: among all ranks; for "data", among the ranks that read different data.

    Raises:
        CheckpointError: no value was saved.
    """
    facts: dict[str, Any] = {"world": world, "alike": []} if source.manifest is None else source.manifest.content
    saved = range(int(facts["world"]))
    if name == "data":
        saved = facts.get("readers", saved)
    numbers = [saved[rank]] if len(saved) == world else [0] if name in facts["alike"] else list(saved)
    keys = [f"{name}.{number}" for number in numbers]
    if any(key not in source.tensors for key in keys):
        raise _missing_state_error(source, name)
    return [source.read_object(key) for key in keys]


def restore_rng(source: CheckpointReader, rank: int, world: int, device: torch.device) -> None:
    """Restore the random number generators; ranks beyond the saved ones derive seeds from a saved state."""
    states = read_rank_states(source, "rng", rank, world)
    turn, mine = divmod(rank if len(states) > 1 else 0, len(states))
    if turn:
        rng.set_derived_rng(states[mine], device, turn)
    else:
        rng.load_rng_state(states[mine], device)


def restore_data(source: CheckpointReader, data: Any, rank: int, world: int) -> None:
    """Restore a data position.

    Raises:
        CheckpointError: the saved positions differ and their number is not ``world``, and ``data`` has no
            ``load_state_dicts``.
    """
    states = read_rank_states(source, "data", rank, world)
    if len(states) == 1:
        data.load_state_dict(states[0])
    elif hasattr(data, "load_state_dicts"):
        data.load_state_dicts(states)
    else:
        raise CheckpointError(
            f"load {source.path}: data",
            expected=f"{world} positions, one for each rank, or one for all",
            got=f"{len(states)} that differ",
            do="Keep a position that does not depend on the rank, or give the object a load_state_dicts(states).",
        )
