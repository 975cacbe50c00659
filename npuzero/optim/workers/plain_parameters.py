"""Run a fused rule over plain parameters: their states, and one launch for all parameters of a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from npuzero.errors import ConfigError
from npuzero.ops import storage
from npuzero.ops.storage.lazy import materialize_lazy
from npuzero.optim.rules.moments import MOMENT_DTYPES
from npuzero.optim.rules.rule import Options, ParameterRange, RuleLine, UpdateRule
from npuzero.optim.rules.segments import CoefficientRows, build_segments
from npuzero.optim.rules.step_counts import TakenSteps

States = dict[Tensor, Options]


class NumberedParameter(NamedTuple):
    """Hold a parameter with its group and its number in the optimizer, which seeds random bits."""

    number: int
    group: Options
    parameter: nn.Parameter


class PlainParameterWorker:
    """Update plain parameters, and keep the data that the optimizer's ``state`` does not have.

    ``state`` uses torch's names. A parameter that is not float32 and contiguous has a float32 ``master`` there, since
    torch would update it in place with every operation rounded; for bfloat16 ``masters`` may choose a ``remainder`` or
    none. When a program writes into such a parameter, its master follows.

    Args:
        masters, moments, seed: as for :class:`npuzero.AdamW`.
    """

    def __init__(self, rule: UpdateRule, masters: str | None, moments: str | None, seed: int) -> None:
        self._rule = rule
        self._masters = masters or "fp32"
        self._moments = MOMENT_DTYPES[moments or "fp32"]
        self._seed = seed
        # By id of the parameter. The device counts if it is capturable, or a loss scaler may skip its steps.
        self._taken = TakenSteps()
        self._lines: dict[torch.device, RuleLine] = {}
        self._shared_steps: dict[torch.device, tuple[Tensor, tuple[Tensor, ...]]] = {}
        # Version counters and addresses of parameters at the last look, to detect writes: ``_marks`` by id for those
        # with masters, ``_seen`` by device for all of the last update.
        self._marks: dict[int, tuple[int, int]] = {}
        self._seen: dict[torch.device, tuple[list[int], list[int]]] = {}
        # By id: the parameter values that a loaded remainder belongs to, until the next update. The model may be loaded
        # later.
        self._loaded: dict[int, Tensor] = {}

    def update(
        self, all_states: States, members: Sequence[NumberedParameter], scale: Tensor | None, skip: Tensor | None
    ) -> None:
        """Update the parameters that have a gradient.

        Args:
            all_states: the optimizer's states; a first update creates a parameter's.
            scale: [1] float32, the divisor of gradients.
            skip: [1] float32, nonzero to change nothing.

        Raises:
            ConfigError: a gradient is not dense.
        """
        members = [member for member in members if member.parameter.grad is not None]
        for member in members:
            _check_dense(member)
        for device in {member.parameter.device for member in members}:
            here = [member for member in members if member.parameter.device == device]
            self._update_on(device, all_states, here, _scalar_on(scale, device), _scalar_on(skip, device))

    def _update_on(
        self,
        device: torch.device,
        all_states: States,
        members: list[NumberedParameter],
        scale: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        parameters = [member.parameter for member in members]
        states = [all_states[member.parameter] or self._begin(all_states, member) for member in members]
        if self._marks:
            self._follow_all(device, parameters, states)
        counted = [member.group["capturable"] or skip is not None for member in members]
        rows = CoefficientRows(self._rule, device)
        steps = self._count(device, members, states, counted)
        numbers = [rows.row(member.group, step) for member, step in zip(members, steps, strict=True)]
        dynamic = rows.table()
        self._taken.take(itertools.compress(map(id, parameters), counted), skip)
        low = [
            p if "master" in state and _can_write_in_place(p) else None
            for p, state in zip(parameters, states, strict=True)
        ]
        line = self._line_of(
            device,
            master=[state.get("master", parameter) for parameter, state in zip(parameters, states, strict=True)],
            **{name: [state.get(name) for state in states] for name in self._rule.moments},
            low=low,
            remainder=[state.get("remainder") for state in states],
        )
        line.update(
            [materialize_lazy(parameter.grad) for parameter in parameters if parameter.grad is not None],
            build_segments(self._rule, self._ranges(members, numbers)),
            None if scale is None else scale.double().reciprocal().float(),
            skip,
            dynamic,
        )
        # The launch writes the rounded master into contiguous parameters only.
        for parameter, state, written in zip(parameters, states, low, strict=True):
            if "master" in state and written is None:
                master = state["master"]
                parameter.copy_(storage.upper_half(master) if parameter.dtype == torch.bfloat16 else master)
                self._marks[id(parameter)] = _version_and_address(parameter)

    def _ranges(self, members: list[NumberedParameter], numbers: list[tuple[int, int | None]]) -> list[ParameterRange]:
        """Lay parameters end to end: one range for each run with one group, and one step count or row.

        With stochastic rounding each parameter gets its own range.
        """
        ranges: list[ParameterRange] = []
        begin = end = 0
        for i, ((number, group, parameter), step) in enumerate(zip(members, numbers, strict=True)):
            end += parameter.numel()
            alone = self._moments != torch.float32 or self._master_of(parameter) == "none"
            if alone or i + 1 == len(members) or members[i + 1].group is not group or numbers[i + 1] != step:
                random = (number, 0) if alone else (0, None)
                ranges.append(ParameterRange(begin, end, group, *step, *random))
                begin = end
        return ranges

    def _line_of(self, device: torch.device, **buffers: Sequence[Tensor | None]) -> RuleLine:
        """Return the last step's line if its buffers are the same; the check is cheaper than a new line."""
        line = self._lines.get(device)
        if line is None or not line.is_of(**buffers):
            line = self._lines[device] = self._rule.line(**buffers, seed=self._seed)
        return line

    # -- steps -----------------------------------------------------------------------------------------------------

    def _count(
        self, device: torch.device, members: list[NumberedParameter], states: list[Options], counted: list[bool]
    ) -> list[int | Tensor]:
        """Return each parameter's number of this update; if the device counts, its count of earlier updates."""
        known = [state for state, there in zip(states, counted, strict=True) if not there]
        steps: Iterator[int] = iter(self._count_here(device, known) if known else ())
        there = [(m.parameter, state) for m, state, on in zip(members, states, counted, strict=True) if on]
        for parameter, state in there:
            self.count_on_device(parameter, state)
        # part() may replace a shared count, so states refer to counts only after it.
        self._taken.part([id(parameter) for parameter, _ in there])
        for parameter, state in there:
            state["step"] = self._taken.counts[id(parameter)]
        return [state["step"] if on else next(steps) for state, on in zip(states, counted, strict=True)]

    def count_on_device(self, parameter: nn.Parameter, state: Options) -> None:
        """Move the step count of ``parameter`` to the device, unless it is there."""
        if self._taken.counts.get(id(parameter)) is not state["step"]:
            step = float(state["step"])
            state["step"] = self._taken.begin(id(parameter), step, parameter.device, torch.float32)

    def _count_here(self, device: torch.device, states: list[Options]) -> list[int]:
        """Add this update to each state's step on the host; return the new counts.

        The steps become views of one tensor, which is incremented as long as the same states are updated.
        """
        shared, views = self._shared_steps.get(device, (None, ()))
        if shared is None or [id(state["step"]) for state in states] != [id(view) for view in views]:
            shared = torch.stack([state["step"].cpu() for state in states])
            views = shared.unbind()
            self._shared_steps[device] = shared, views
            for state, view in zip(states, views, strict=True):
                state["step"] = view
        return list(map(int, shared.add_(1.0).tolist()))

    # -- states ----------------------------------------------------------------------------------------------------

    def _begin(self, all_states: States, member: NumberedParameter) -> Options:
        parameter, state = member.parameter, all_states[member.parameter]
        state["step"] = torch.tensor(0.0)
        for name in self._rule.kept(member.group):
            if self._moments == torch.uint8:
                count = storage.stored_numel(parameter.numel(), self._moments)
                state[name] = torch.zeros(count, dtype=self._moments, device=parameter.device)
            else:
                like = torch.contiguous_format
                state[name] = torch.zeros_like(parameter, dtype=self._moments, memory_format=like)
        self._begin_master(parameter, state)
        return state

    def _master_of(self, parameter: nn.Parameter) -> str:
        """Return how a parameter's master is stored: ``"own"`` if it is the float32 parameter itself, else by
        ``masters``.
        """
        if parameter.dtype == torch.float32 and parameter.is_contiguous():
            return "own"
        return self._masters if parameter.dtype == torch.bfloat16 and parameter.is_contiguous() else "fp32"

    def _begin_master(self, parameter: nn.Parameter, state: Options) -> None:
        kind = self._master_of(parameter)
        if kind in ("fp32", "split"):
            self._marks[id(parameter)] = _version_and_address(parameter)
        if kind == "fp32" and "master" not in state:
            state["master"] = parameter.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        elif kind == "split":
            state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)

    def _follow_all(self, device: torch.device, parameters: list[nn.Parameter], states: list[Options]) -> None:
        seen = list(map(_VERSION, parameters)), list(map(nn.Parameter.data_ptr, parameters))
        if seen != self._seen.get(device):
            self._seen[device] = seen
            for parameter, state in zip(parameters, states, strict=True):
                self._follow(parameter, state)
                self._loaded.pop(id(parameter), None)

    @torch.no_grad()
    def _follow(self, parameter: nn.Parameter, state: Options) -> None:
        """Update the master of a parameter that the program has written or replaced.

        A master keeps its bits where its rounded value is unchanged. A remainder belongs to the former values, and is
        cleared.
        """
        before, now = self._marks.get(id(parameter)), _version_and_address(parameter)
        if before == now or not {"master", "remainder"} & state.keys():
            return
        self._marks[id(parameter)] = now
        if "remainder" in state:
            known = self._loaded.get(id(parameter))
            if known is not None:
                state["remainder"].masked_fill_(storage.view_bits(parameter.detach()) != storage.view_bits(known), 0)
            elif before is not None:  # None: a copied optimizer, with a remainder of these values
                state["remainder"].zero_()
        elif parameter.dtype == torch.float32:
            state["master"].copy_(parameter)
        else:
            storage.copy_changed_low(state["master"], materialize_lazy(parameter.detach()))

    def read(self, parameter: nn.Parameter, state: Options) -> Options:
        """Return ``state`` in torch's format: a full master, float32 moments, a step that is not shared.

        A float32 parameter has no master there. Tensors get the memory layout of the parameter, as torch's updates
        need.
        """
        if not state:
            return {}
        # First update the master by writes into the parameter, as in a step; then copy, since the state here stays in
        # use.
        self._follow(parameter, state)
        state = dict(state)
        state["step"] = state["step"].clone()  # its own memory, as torch's has
        if "remainder" in state:
            state["master"] = storage.join_halves(parameter.detach(), state.pop("remainder"))
        for name, signed in self._rule.moments.items():
            if name in state and state[name].dtype != torch.float32:
                wide = storage.decode_moment(state[name].view(-1), parameter.numel(), signed=signed)
                state[name] = wide.view(parameter.shape)
        if parameter.dtype == torch.float32:
            state.pop("master", None)
        if not parameter.is_contiguous():
            for name in {*self._rule.moments, "master"} & state.keys():
                state[name] = torch.empty_like(parameter, dtype=torch.float32).copy_(state[name])
        return state

    def write(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> Options:
        """Return the result of :meth:`read` converted to the format kept here."""
        self._lines.clear()  # a line holds the former moments in memory until the next step
        if not state:
            return {}
        flat = torch.contiguous_format
        mine = {k: v.clone(memory_format=flat) if isinstance(v, Tensor) else torch.tensor(v) for k, v in state.items()}
        mine["step"] = torch.tensor(float(state["step"]))  # torch's may be on the parameter's device
        master = mine.get("master")
        if self._master_of(parameter) != "fp32" or parameter.dtype == torch.float32:
            mine.pop("master", None)
        self._begin_master(parameter, mine)
        if "remainder" in mine and master is not None:
            upper, remainder = storage.split_halves(master.reshape(-1))
            parameter.view(-1).copy_(upper)
            mine["remainder"].view(-1).copy_(remainder)
            self._loaded[id(parameter)] = parameter.detach().clone()
        dtype = self._moments
        for name, signed in self._rule.moments.items():
            if name in mine and mine[name].dtype != dtype:
                wide = mine[name].float().reshape(-1)
                stored = torch.zeros(storage.stored_numel(wide.numel(), dtype), dtype=dtype, device=wide.device)
                storage.encode_moment(wide, stored, signed=signed)
                mine[name] = stored if dtype == torch.uint8 else stored.view(parameter.shape)
        if id(parameter) in self._marks:
            self._marks[id(parameter)] = _version_and_address(parameter)
        return mine


_VERSION = attrgetter("_version")


def _version_and_address(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


def _scalar_on(value: Tensor | None, device: torch.device) -> Tensor | None:
    """Return [1] float32 on ``device``."""
    return None if value is None else value.to(device, torch.float32).view(1)


def _check_dense(member: NumberedParameter) -> None:
    gradient = member.parameter.grad
    if gradient is not None and gradient.layout is not torch.strided:
        raise ConfigError(
            f"gradient of parameter {member.number}",
            expected="a dense tensor",
            got=str(gradient.layout),
            do="Use sparse=False, or torch.optim.SparseAdam for that parameter.",
        )


def _can_write_in_place(parameter: nn.Parameter) -> bool:
    """Return whether the launch can write the rounded master into the parameter's own memory."""
    return parameter.dtype in (torch.bfloat16, torch.float16) and parameter.is_contiguous()
