"""Run torch optimizers over shards: each rank has an instance of the class over its ranges of the masters."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from npuzero.errors import ConfigError
from npuzero.optim.rules.rule import Options
from npuzero.optim.workers.base import OptimizerWorker, refuse_differentiable
from npuzero.optim.workers.check_elementwise import check_elementwise, state_names
from npuzero.optim.workers.torch_offloaded import HostOptimizerInputs
from npuzero.optim.workers.torch_states import check_state_names
from npuzero.plan import Precision
from npuzero.shard.engine import Engine
from npuzero.shard.find_engine import engine_behind, split_by_engine
from npuzero.shard.gradients.vote_rules import Words
from npuzero.shard.layout.flat_layout import intersect_ranges
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.snapshot import Later, StateSnapshot


class TorchOptimizerWorker(OptimizerWorker):
    """Update by a torch optimizer: plain parameters directly, sharded ones by this rank's ranges of the masters.

    Args:
        optimizer_class: an element-wise class.
        options: its keyword arguments.

    Raises:
        ConfigError: it is no optimizer class.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], options: Options) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise ConfigError(
                "ZeroOptimizer",
                expected="a subclass of torch.optim.Optimizer",
                got=repr(optimizer_class),
                do="Pass the class, then params, then its keyword arguments.",
            )
        self.alike = f"torch.optim.{optimizer_class.__name__}"
        self.constants: Words = {}
        self._class = optimizer_class
        self._options = options
        self._inner: torch.optim.Optimizer | None = None
        self._state: defaultdict[Any, Options] = defaultdict(dict)  # as in torch, by plain parameter and stand-in
        self._members: dict[int, tuple[Options, list[Tensor]]] = {}  # by id of a group: the group, and its stand-ins
        self._aside: dict[FlatParameter, HostOptimizerInputs] = {}  # of offloaded flats
        self._stand_ins: dict[int, Tensor] = {}  # by id of a sharded parameter: this rank's range of its master

    def __getstate__(self) -> Options:
        """Leave stand-ins out: they are ranges of a sharded model, which cannot be copied."""
        return {**self.__dict__, "_stand_ins": {}, "_members": {}, "_aside": {}}

    def kind(self, name: str) -> str:
        return f"{name}({self._class.__name__})"

    def defaults(self, options: Options) -> Options:
        return self._class([torch.zeros(1, 1)], **options).defaults

    def check_group(self, name: str, group: Options) -> None:
        options = self._options | _arguments(self._class, group)
        self._class([torch.zeros(1, 1)], **options)
        refuse_differentiable(name, group)
        device = next((p.device for p in group["params"]), torch.device("cpu"))
        self.numbers |= check_elementwise(self._class, options, device)

    def update(self, optimizer: torch.optim.Optimizer, ready: list[Engine]) -> None:
        """Update all at once; the torch optimizer decides the order."""
        inner = self._made(optimizer)
        # A skipped step must not count. torch's optimizers cannot skip on the device, so the host waits.
        ready = [engine for engine in ready if engine.boundary.skip is None or not engine.boundary.skip.item()]
        for engine in ready:
            engine.boundary.apply_scale()
        far = [flat for engine in ready for flat in engine.flats() if flat in self._aside]
        gradients = {flat: self._aside[flat].fetch() for flat in far}
        # Of all engines, ready or not: otherwise the last step's gradient would be used again.
        for engine in split_by_engine(p for group in optimizer.param_groups for p in group["params"])[0]:
            for flat in engine.flats():
                for i, parameter in enumerate(flat.parameters):
                    stand_in = self._stand_ins.get(id(parameter))
                    if stand_in is not None:
                        counts = engine in ready and engine.boundary.used(flat)[i]
                        gradient = gradients.get(flat, flat.own_gradient)
                        stand_in.grad = gradient[flat.own_slots[i]] if counts else None
        for engine in ready:
            engine.update.begun = True
        with self._standing_in(optimizer, inner):
            _step_without_hooks(self._class)(inner)
        for engine in ready:
            for flat in engine.flats():
                if flat in self._aside:
                    self._aside[flat].store()
                else:
                    flat.refresh_low()

    def _made(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that updates: ``optimizer`` itself if it is of the class, else an inner one. The inner
        one is created at first use, since ``zero()`` may be called after ``optimizer`` is built.
        """
        members = [self._members_of(group) for group in optimizer.param_groups]
        if isinstance(optimizer, self._class):
            return optimizer
        if self._inner is None:
            pairs = zip(optimizer.param_groups, members, strict=True)
            groups = [
                {**{key: value for key, value in group.items() if key != "param_names"}, "params": those}
                for group, those in pairs
            ]
            self._inner = self._class(groups, **self._options)
            self._state = self._inner.state
        return self._inner

    @contextlib.contextmanager
    def _standing_in(self, optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> Iterator[None]:
        """Give ``inner`` the groups of ``optimizer`` with stand-ins as parameters, and their states. Keys that it
        writes into a group, such as a step count, persist as in torch.
        """
        groups, state = optimizer.param_groups, inner.state
        parameters = [group["params"] for group in groups]
        inner.param_groups, inner.state = groups, self._state
        try:
            for group in groups:
                group["params"] = self._members_of(group)
            yield
        finally:
            inner.state = state
            for group, those in zip(groups, parameters, strict=True):
                group["params"] = those

    def _members_of(self, group: Options) -> list[Tensor]:
        """Return the stand-ins of a group's parameters, cached. Frozen parameters of a sharded model have none."""
        if id(group) not in self._members:
            members: list[Tensor] = []
            for parameter in group["params"]:
                engine = engine_behind(parameter)
                place = engine.place(parameter) if engine else None
                if engine is not None and place is not None:
                    flat, i = place
                    _check_fp32_precision(flat.plan.precision)
                    engine.absence.beside.add(self)
                    self._stand_ins[id(parameter)] = self._master_of(engine, flat)[flat.own_slots[i]].detach()
                if engine is None or place is not None:
                    members.append(self._stand_ins.get(id(parameter), parameter))
            self._members[id(group)] = group, members
        return self._members[id(group)][1]

    def _master_of(self, engine: Engine, flat: FlatParameter) -> Tensor:
        if not flat.far:
            return flat.master
        if flat not in self._aside:
            self._aside[flat] = HostOptimizerInputs(engine, flat)
            self._aside[flat].fetch()
        return self._aside[flat].master

    def tensors_of(self, flats: Iterable[FlatParameter]) -> list[Tensor]:
        """Return the states of ``flats`` that the torch optimizer has created."""
        slots = [self.slot_state(flat, i) for flat in flats for i in flat.slots]
        return [value for state in slots for value in state.values() if isinstance(value, Tensor)]

    # -- states ----------------------------------------------------------------------------------------------------

    def state_names(self, groups: list[Options]) -> tuple[str, ...]:
        return ()

    def kept_names(self, groups: list[Options], saved: Collection[str]) -> Collection[str]:
        names: set[str] = set()
        for group in groups:
            found = state_names(self._class, self._options | _arguments(self._class, group), saved)
            if found is None:  # the names are unknown
                return saved
            kept, goes_on = found
            if not goes_on:
                check_state_names("optimizer state", dict.fromkeys(saved), tuple(kept))
            names |= kept
        return names

    def slot_state(self, flat: FlatParameter, i: int) -> Options:
        stand_in = self._stand_ins.get(id(flat.parameters[i]))
        return {} if stand_in is None else dict(self._state.get(stand_in, {}))

    def later(self, flat: FlatParameter, name: str, own: slice, snapshot: StateSnapshot) -> Later | None:
        found = None
        for i in flat.slots:
            value = self.slot_state(flat, i).get(name)
            if _is_shard_of_slot(value, flat, i):
                if found is None:
                    found = torch.zeros(own.stop - own.start, dtype=torch.float32, device=value.device)
                here, there = _intersect_slices(own, flat.own_slots[i])
                found[here].copy_(value[there])
        return None if found is None else snapshot.copied(found)

    def restore(
        self, optimizer: torch.optim.Optimizer, engine: Engine, flat: FlatParameter, i: int, state: Mapping[str, Any]
    ) -> None:
        self._made(optimizer)
        stand_in = self._stand_ins.get(id(flat.parameters[i]))
        if stand_in is not None:
            self._state.pop(stand_in, None)
            if state:
                self._state[stand_in] = {
                    k: v.to(stand_in.device, copy=True) if isinstance(v, Tensor) else torch.tensor(v)
                    for k, v in state.items()
                }

    def restore_numbers(
        self,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        flat: FlatParameter,
        slots: Sequence[Mapping[str, float | None]],
    ) -> Collection[str]:
        for i, state in enumerate(slots):
            own = flat.own_slots[i]
            parts = {k: torch.zeros(own.stop - own.start) if v is None else v for k, v in state.items()}
            self.restore(optimizer, engine, flat, i, parts)
        return {name for state in slots for name, value in state.items() if value is None}

    def write(self, flat: FlatParameter, name: str, own: slice, values: Tensor) -> None:
        for i in flat.slots:
            value = self.slot_state(flat, i).get(name)
            if _is_shard_of_slot(value, flat, i):
                here, there = _intersect_slices(own, flat.own_slots[i])
                value[there].copy_(values[here])

    def plain_state(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Options:
        return dict(self._state.get(parameter, {}))

    def restore_plain(
        self, optimizer: torch.optim.Optimizer, group: Options, parameter: nn.Parameter, state: Mapping[str, Any]
    ) -> None:
        self._made(optimizer)
        self._state.pop(parameter, None)
        if state:
            self._state[parameter] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def _arguments(cls: type[torch.optim.Optimizer], group: Options) -> Options:
    """Return the entries of ``group`` that are keyword arguments of ``cls``."""
    arguments = inspect.signature(cls).parameters.keys() - {"params"}
    return {key: value for key, value in group.items() if key in arguments}


def _step_without_hooks(cls: type[torch.optim.Optimizer]) -> Callable[..., object]:
    """Return the step of a class without torch's hooks, which already run around the outer optimizer's step."""
    step: Callable[..., object] = inspect.unwrap(cls.step, stop=lambda step: not hasattr(step, "hooked"))
    return step


def _is_shard_of_slot(value: object, flat: FlatParameter, i: int) -> TypeGuard[Tensor]:
    """Return whether ``value`` is this rank's part of a tensor shaped like slot ``i``."""
    own = flat.own_slots[i]
    return isinstance(value, Tensor) and value.numel() == own.stop - own.start and value.dim() > 0


def _intersect_slices(own: slice, mine: slice) -> tuple[slice, slice]:
    """Return the overlap of two ranges of a shard, as a slice of each."""
    begin, end = intersect_ranges((own.start, own.stop), (mine.start, mine.stop))
    return slice(begin - own.start, end - own.start), slice(begin - mine.start, end - mine.start)


def _check_fp32_precision(precision: Precision) -> None:
    """Raise ConfigError if masters or moments are stored in a format that torch's optimizers cannot use."""
    for name in ("masters", "moments"):
        if getattr(precision, name) != "fp32":
            raise ConfigError(
                f"ZeroOptimizer over a model of precision.{name}={getattr(precision, name)!r}",
                expected="'fp32', which is what torch's optimizers compute in",
                got=repr(getattr(precision, name)),
                do="Use npuzero.AdamW or npuzero.Adam, or a precision with masters and moments in fp32.",
            )
