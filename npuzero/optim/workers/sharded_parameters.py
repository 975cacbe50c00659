"""Run a fused rule over the shards of sharded models: moments by flat parameter, step counts by slot, and launches."""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from npuzero import device as devices
from npuzero.errors import ConfigError, StateError
from npuzero.ops import storage
from npuzero.optim.rules.launch_offloaded import OffloadedLaunch
from npuzero.optim.rules.moments import MOMENT_DTYPES, ShardMoments
from npuzero.optim.rules.rule import Options, ParameterRange, RuleLine, UpdateRule
from npuzero.optim.rules.segments import CoefficientRows, build_segments, is_on_device, ranges_within, shift_ranges
from npuzero.optim.rules.step_counts import TakenSteps
from npuzero.plan import MOMENT_BLOCK, Memory, Precision
from npuzero.shard.engine import Engine
from npuzero.shard.offload.host_states import StateStore
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.snapshot import Later, StateSnapshot
from npuzero.shard.state.tiered_tensor import TieredTensor

#: By id of a parameter: its number in the optimizer, which seeds random bits, and its group.
Members = Mapping[int, tuple[int, Options]]


class ShardedParameterWorker:
    """Update the shards of sharded models, and keep their moments and step counts.

    Args:
        chosen: ``masters`` and ``moments`` if the user has set them; a model's plan must have the same.
        seed: of stochastic rounding.
    """

    def __init__(self, rule: UpdateRule, chosen: Mapping[str, str | None], seed: int) -> None:
        self._rule = rule
        self._chosen = chosen
        self._seed = seed
        self._moments: weakref.WeakKeyDictionary[FlatParameter, ShardMoments] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[FlatParameter, list[int]] = weakref.WeakKeyDictionary()
        # By id of the parameter. The device counts if it is capturable, or a loss scaler may skip its steps.
        self._taken = TakenSteps()
        # offloaded moments
        self._banks: weakref.WeakKeyDictionary[Engine, list[StateStore]] = weakref.WeakKeyDictionary()
        # updates that started inside backward
        self._begun: weakref.WeakKeyDictionary[Engine, OffloadedLaunch] = weakref.WeakKeyDictionary()
        self._lines: weakref.WeakKeyDictionary[Engine, tuple[tuple[list[FlatParameter], int], RuleLine]] = (
            weakref.WeakKeyDictionary()
        )

    # -- a step ----------------------------------------------------------------------------------------------------

    def update(self, optimizer: torch.optim.Optimizer, engine: Engine, members: Members) -> None:
        """Update the parameters of one model: one launch for each chunk of its shards, laid end to end.

        Steps are counted once, before the chunks; a range has the same coefficients and random bits in any chunk.
        Everything that may run out of memory comes before the first count or update.
        """
        self._check_begun(optimizer, engine, members)
        groups: list[Options] = optimizer.param_groups
        counted = self._counted_on_device(groups, engine, members)
        used: dict[FlatParameter, list[bool]] = {}
        for flat in engine.flats():
            flags = [
                anywhere and id(parameter) in members
                for parameter, anywhere in zip(flat.parameters, engine.boundary.used(flat), strict=True)
            ]
            if any(flags):  # also if this rank's shard is all padding: every rank must hold the same moments
                used[flat] = flags
        self._make(optimizer, engine, used, members)  # may run out of memory: before anything is counted
        here: list[int] = []
        if counted:
            here = [id(p) for flat, flags in used.items() for p in itertools.compress(flat.parameters, flags)]
            self._taken.part(here)
        known = not counted and not _any_lr_on_device(groups, engine.device)
        rows = None if known else CoefficientRows(self._rule, engine.device)
        steps = {} if counted else {flat: list(self._steps_of(flat)) for flat in used}
        near, far = self._ranges(used, members, counted, rows, steps.__getitem__)
        dynamic = None if rows is None else rows.table()
        shards = [flat for flat in used if flat.rests.states.near]
        line = self._line(engine, shards) if shards else None
        if far:
            self._update_far(engine, far, dynamic)
            engine.lag.begin(optimizer)
        gradients = [flat.gradient.kept.lend_near() for flat in shards]
        self._steps.update(steps)
        if counted:
            engine.update.begun = True
            self._taken.take(here, engine.boundary.skip)
        if line is not None:
            for chunk in engine.update.chunks(shards, self._block_bytes):
                parts = build_segments(self._rule, ranges_within(near, chunk.begin, chunk.end))
                line.update(gradients, parts, engine.boundary.gradient_scale, engine.boundary.skip, dynamic)
            for flat in shards:
                flat.gradient.kept.drop_near()

    def begin(
        self, optimizer: torch.optim.Optimizer, engine: Engine, members: Members
    ) -> tuple[list[StateStore], OffloadedLaunch] | None:
        """Return the state stores and the launch of an update that starts before its step. None if moments are missing,
        some parameters are not the optimizer's, or only the device knows lr or step counts.
        """
        flats = engine.flats()
        complete = all(
            id(p) in members and (flat in self._moments or not flat.far) for flat in flats for p in flat.parameters
        )
        if not complete or devices.get(engine.device).capturing():
            return None
        groups: list[Options] = optimizer.param_groups
        if self._counted_on_device(groups, engine, members) or _any_lr_on_device(groups, engine.device):
            return None
        launch = self._begun[engine] = self._launch(self._foreseen(engine, members))
        return [*engine.far.updated, *self._banks.get(engine, ())], launch

    def _foreseen(self, engine: Engine, members: Members) -> dict[FlatParameter, list[ParameterRange]]:
        """Return the offloaded ranges of the next step if every parameter is used; count nothing."""
        used = {flat: [True] * len(flat.parameters) for flat in engine.flats() if flat.far}
        return self._ranges(used, members, False, None, lambda flat: list(self._steps_of(flat)))[1]

    def _check_begun(self, optimizer: torch.optim.Optimizer, engine: Engine, members: Members) -> None:
        """Check that an update that started inside backward equals the step's.

        Raises:
            StateError: options, or the set of used parameters, have changed in between.
        """
        begun = engine.early.begun
        if not begun:
            return
        launch, foreseen = self._begun[engine], self._foreseen(engine, members)
        changed = [f for f in begun if not (all(engine.boundary.used(f)) and launch.agrees(foreseen, f))]
        if changed:
            raise StateError(
                f"{type(optimizer).__name__}.step",
                expected="the options and gradients that the update of some flats has begun with, inside backward "
                "(early=True)",
                got=f"others, of {changed[0].name}",
                do="Change options after step(), or before the forward of a step's last micro-batch; set them back to "
                "end this step.",
            )

    def _ranges(
        self,
        used: Mapping[FlatParameter, list[bool]],
        members: Members,
        counted: bool,
        rows: CoefficientRows | None,
        steps_of: Callable[[FlatParameter], list[int]],
    ) -> tuple[list[ParameterRange], dict[FlatParameter, list[ParameterRange]]]:
        """Return in order the ranges on the device, on the line, and by flat parameter the offloaded ranges, on its
        shard. A range is this rank's part of a slot in ``used``, with the number of this update or its row.

        Args:
            counted: whether the device counts steps; otherwise this call counts them on the host.
            rows: None if the host knows all step counts and lr.
            steps_of: gives the step counts of a flat parameter, per slot, which this call increments.
        """
        near: list[ParameterRange] = []
        far: dict[FlatParameter, list[ParameterRange]] = {}
        start = 0
        for flat, flags in used.items():
            mine = far[flat] = [] if flat.far else near
            shift = 0 if flat.far else start
            steps = [] if counted else steps_of(flat)
            drawing = flat.plan.precision.moments != "fp32" or flat.rounds_stochastically
            for i in itertools.compress(flat.slots, flags):
                parameter, own = flat.parameters[i], flat.own_slots[i]
                number, group = members[id(parameter)]
                if not counted:
                    steps[i] += 1
                count = self._taken.counts[id(parameter)] if counted else steps[i]
                step, row = (steps[i], None) if rows is None else rows.row(group, count)
                if flat.rests.tied:  # both stages need the same bits, though their optimizers number it differently
                    number = zlib.crc32(flat.layout.slots[i].name.encode()) >> 1
                random = (number, flat.place_of_own(i)) if drawing else (0, None)
                if own.start < own.stop:
                    mine.append(ParameterRange(shift + own.start, shift + own.stop, group, step, row, *random))
            if flat.far:
                near += shift_ranges(ranges_within(mine, 0, flat.rests.states.near), start)
            start += flat.rests.states.near
        return near, {flat: ranges for flat, ranges in far.items() if flat.far}

    def _update_far(
        self, engine: Engine, far: Mapping[FlatParameter, list[ParameterRange]], dynamic: Tensor | None
    ) -> None:
        """Queue the update of offloaded ranges; arguments that may change before it has run are copied."""
        if devices.get(engine.device).capturing():
            raise StateError(
                "a step in the capture of a graph",
                expected="states on the device",
                got="some that rest off it, and are updated by the host, which no graph can",
                do="Call step() outside of the capture.",
            )
        banks = [*engine.far.updated, *engine.lag.banks, *self._banks.get(engine, ())]
        engine.update.run_far(
            far, banks, self._launch(far), engine.boundary.gradient_scale, engine.boundary.skip, dynamic
        )

    def _launch(self, far: Mapping[FlatParameter, list[ParameterRange]]) -> OffloadedLaunch:
        return OffloadedLaunch(self._rule, self._seed, far, list(self._rule.moments))

    def _line(self, engine: Engine, shards: list[FlatParameter]) -> RuleLine:
        """Return the line with the buffers on the device of ``shards``. It is made again if the shards change, or if
        the model was offloaded in between, which moves its buffers.
        """
        these = shards, engine.absence.times
        last, line = self._lines.get(engine, (None, None))
        if line is None or last != these:
            stored = [self._moments[flat].near for flat in shards]
            line = self._rule.line(
                master=[flat.master for flat in shards],
                **{name: [moments.get(name) for moments in stored] for name in self._rule.moments},
                low=[flat.low for flat in shards],
                remainder=[flat.remainder for flat in shards],
                seed=self._seed,
            )
            self._lines[engine] = these, line
        return line

    def _block_bytes(self, flat: FlatParameter) -> int:
        """Return the bytes of MOMENT_BLOCK elements of masters and moments."""
        masters = [flat.master] if flat.remainder is None else [flat.master, flat.remainder]
        stored = self._moments[flat].near.values()
        return sum(MOMENT_BLOCK * tensor.element_size() for tensor in masters) + sum(
            storage.stored_numel(MOMENT_BLOCK, tensor.dtype) * tensor.element_size() for tensor in stored
        )

    # -- step counts -----------------------------------------------------------------------------------------------

    def _counted_on_device(self, groups: list[Options], engine: Engine, members: Members) -> bool:
        """Return whether the device counts the steps of a model: if an option asks for it, or once a step may be
        skipped without the host knowing. The device continues the host's count.
        """
        # The common case returns before the loop over parameters. A count stays on the device once it is there.
        asked = engine.boundary.skip is not None or any(group["capturable"] for group in groups)
        if not asked and not self._taken.counts:
            return False
        trained = [(flat, i, id(flat.parameters[i])) for flat in engine.flats() for i in flat.slots]
        asked = engine.boundary.skip is not None or any(
            key in members and members[key][1]["capturable"] for *_, key in trained
        )
        counted = asked or any(key in self._taken.counts for *_, key in trained)
        for flat, i, key in trained if counted else ():
            if key not in self._taken.counts:
                self._taken.begin(key, self._steps_of(flat)[i], engine.device)
        return counted

    def _steps_of(self, flat: FlatParameter) -> list[int]:
        """Return the number of updates per slot, as counted by the host."""
        return self._steps.setdefault(flat, [0] * len(flat.parameters))

    def _step_of(self, flat: FlatParameter, i: int) -> int:
        """Return the number of updates of a slot; synchronizes with the device if that counts."""
        count = self._taken.counts.get(id(flat.parameters[i]))
        return self._steps_of(flat)[i] if count is None else int(count.item())

    # -- states ----------------------------------------------------------------------------------------------------

    def kept(self, groups: list[Options]) -> tuple[str, ...]:
        """Return the moments of a flat parameter in order: the union over all groups."""
        needed = {name for group in groups for name in self._rule.kept(group)}
        return tuple(name for name in self._rule.moments if name in needed)

    def _make(
        self, optimizer: torch.optim.Optimizer, engine: Engine, flats: Iterable[FlatParameter], members: Container[int]
    ) -> None:
        """Create missing moments of ``flats``; if one is offloaded, for all offloaded flats with members."""
        missing = [flat for flat in flats if flat not in self._moments]
        if not missing:
            return
        # One store per memory holds the moments of many flats, so all offloaded ones are created together.
        if any(flat.far for flat in missing):
            all_far = [flat for flat in engine.flats() if flat.far and any(id(p) in members for p in flat.parameters)]
            missing = list(dict.fromkeys([*missing, *(flat for flat in all_far if flat not in self._moments)]))
        signs = {name: self._rule.moments[name] for name in self.kept(optimizer.param_groups)}
        dtypes: dict[FlatParameter, torch.dtype] = {}
        for flat in missing:
            self._check_precision(type(optimizer).__name__, flat.plan.precision)
            dtypes[flat] = MOMENT_DTYPES[flat.plan.precision.moments]
        banks = engine.far.banks({flat: dict.fromkeys(signs, dtypes[flat]) for flat in missing if flat.far})
        self._banks.setdefault(engine, []).extend(banks)
        space = engine.spaces[Memory.DEVICE]
        for flat, dtype in dtypes.items():
            numel = flat.rests.states.near
            near = {name: space.allocate(storage.stored_numel(numel, dtype), dtype, "states") for name in signs}
            spreads = {name: TieredTensor.whole(tensor, numel) for name, tensor in near.items()}
            for bank in (bank for bank in banks if bank.has(flat)):
                spreads = {name: spread.extended(bank.spread(flat, name)) for name, spread in spreads.items()}
            self._moments[flat] = ShardMoments(signs, near, spreads)

    def _check_precision(self, name: str, precision: Precision) -> None:
        """Raise ConfigError if the plan's precision differs from the user's choice of masters and moments."""
        for part, chosen in self._chosen.items():
            if chosen not in (None, getattr(precision, part)):
                raise ConfigError(
                    f"{name}({part}={chosen!r})",
                    expected=f"None or {getattr(precision, part)!r} over a model that has a plan, which says it",
                    got=repr(chosen),
                    do=f"Give zero() a Precision with {part}={chosen!r}, or leave it out here.",
                )

    def later(self, flat: FlatParameter, name: str, own: slice, snapshot: StateSnapshot) -> Later | None:
        """Return a function that gives a range of a moment of all slots as float32; None if there is no such moment."""
        moments = self._moments.get(flat)
        return None if moments is None or name not in moments else moments.later(name, own, snapshot)

    def slot_state(self, flat: FlatParameter, i: int) -> Options:
        """Return the step count and the flat's moments on the device; {} if slot ``i`` was never updated."""
        step = self._step_of(flat, i)
        return {"step": step, **self._moments[flat].near} if step else {}

    def write(self, flat: FlatParameter, name: str, own: slice, values: Tensor) -> None:
        """Write a range of a moment: full blocks, except at its end."""
        self._moments[flat].write(name, own, values)

    def restore_steps(
        self,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        flat: FlatParameter,
        states: Mapping[int, Mapping[str, Any]],
    ) -> Collection[str]:
        """Replace the steps of some slots; return the names of the flat's moments, created if any slot has a state."""
        for i, state in states.items():
            self._steps_of(flat)[i] = int(state.get("step", 0))
            self._taken.forget(id(flat.parameters[i]))
        if any(states.values()) and flat not in self._moments:
            self._make(optimizer, engine, [flat], {id(p) for g in optimizer.param_groups for p in g["params"]})
        return list(self._moments.get(flat, ()))


def _any_lr_on_device(groups: Iterable[Options], device: torch.device) -> bool:
    """Return whether any lr must be read on the device."""
    return any(is_on_device(group["lr"], device) for group in groups)
