"""Adam and AdamW: torch's signatures, one launch a step, over cut models and over plain parameters."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from npuzero import ops
from npuzero.api.optimizer import Options, ZeroOptimizer
from npuzero.errors import ConfigError
from npuzero.ops import storage
from npuzero.optim import MOMENT_DTYPES, MOMENTS, AdamState, Range, Rows, TakenSteps, lies_there, segments
from npuzero.plan import DTYPES, MASTERS, Precision
from npuzero.shard.engine import Engine, engine_behind
from npuzero.shard.unit import Flat


class Adam(ZeroOptimizer):
    """``torch.optim.Adam`` with one fused launch for a model's shards or all plain parameters; see :class:`AdamW`."""

    _decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        masters: str | None = None,
        moments: str | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        kind = torch.optim.AdamW if self._decoupled else torch.optim.Adam
        options.update(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
        _check_choice("masters", masters, MASTERS)
        _check_choice("moments", moments, MOMENT_DTYPES)
        if type(seed) is not int or not 0 <= seed < 2**64:
            raise ConfigError(
                "seed", expected="an int from 0 to 2^64 - 1", got=repr(seed), do="Give one in that range."
            )
        self._chosen = {"masters": masters, "moments": moments}
        self._seed = seed
        super().__init__(kind, params, **options)
        self._begin()

    def _begin(self) -> None:
        """What is counted, kept of cut models, and remembered from step to step: nothing yet."""
        self._moments: weakref.WeakKeyDictionary[Flat, AdamState] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Flat, list[int]] = weakref.WeakKeyDictionary()
        # By id of the parameter: where it is capturable, or a loss scaler may skip its steps, the device counts.
        self._taken = TakenSteps()
        self._lines: dict[torch.device, ops.Line] = {}
        self._cut_lines: weakref.WeakKeyDictionary[Engine, tuple[list[Flat], ops.Line]] = weakref.WeakKeyDictionary()
        self._shared_steps: dict[torch.device, tuple[Tensor, tuple[Tensor, ...]]] = {}

    def __getstate__(self) -> Options:
        return {**super().__getstate__(), "_chosen": self._chosen, "_seed": self._seed}

    def __setstate__(self, state: Options) -> None:
        self._begin()
        super().__setstate__(state)

    def _check_group(self, group: Options) -> None:
        super()._check_group(group)
        for parameter in group["params"]:
            if parameter.dtype not in DTYPES.values():
                raise ConfigError(
                    f"{type(self).__name__}: a parameter of shape {tuple(parameter.shape)}",
                    expected="float32, bfloat16 or float16, as for torch's fused optimizers on most devices",
                    got=str(parameter.dtype),
                    do=f"Give it to torch.optim.{self._class.__name__}, or as real and imaginary parts.",
                )
        if any(isinstance(beta, Tensor) and beta.device.type != "cpu" for beta in group["betas"]):
            raise ConfigError(
                f"{type(self).__name__}: betas",
                expected="numbers, or tensors in the host's memory",
                got="tensors on a device, for which each step would wait",
                do="Give numbers; lr may be a tensor on the device.",
            )

    def _update(self, ready: list[Engine]) -> None:
        members = {id(parameter): (number, group) for number, (group, parameter) in enumerate(self._parameters())}
        plain = [parameter for parameter in self._owners()[1] if parameter.grad is not None]
        for parameter in plain:
            _check_dense(members[id(parameter)][0], parameter)
        for device in {parameter.device for parameter in plain}:
            here = [parameter for parameter in plain if parameter.device == device]
            self._update_plain(device, [(*members[id(parameter)], parameter) for parameter in here])
        for engine in ready:
            self._update_cut(engine, members)

    def _check_precision(self, precision: Precision) -> None:
        for name, chosen in self._chosen.items():
            if chosen not in (None, getattr(precision, name)):
                raise ConfigError(
                    f"{type(self).__name__}({name}={chosen!r})",
                    expected=f"None or {getattr(precision, name)!r} over a model that has a plan, which says it",
                    got=repr(chosen),
                    do=f"Give zero() a Precision with {name}={chosen!r}, or leave it out here.",
                )

    def _update_cut(self, engine: Engine, members: Mapping[int, tuple[int, Options]]) -> None:
        """One launch for all flats of a model: this rank's shards laid end to end.

        Args:
            members: by id of the parameter its number, of which random bits depend, and its options.
        """
        counted = self._counted_on_device(engine, members)
        updated = [
            [
                used and id(parameter) in members
                for parameter, used in zip(flat.parameters, engine.used(flat), strict=True)
            ]
            for flat in engine.flats()
        ]
        here: list[int] = []
        if counted:
            here = [
                id(parameter)
                for flat, used in zip(engine.flats(), updated, strict=True)
                for parameter in itertools.compress(flat.parameters, used)
            ]
            self._taken.part(here)
        device, counts = engine.space.device, self._taken.counts
        rows = Rows(device, self._decoupled)
        known = not counted and not any(lies_there(group["lr"], device) for group in self.param_groups)
        shards: list[Flat] = []
        ranges: list[Range] = []
        start = 0
        for flat, used in zip(engine.flats(), updated, strict=True):
            steps = [] if counted else self._steps_of(flat)
            drawing = engine.plan.precision.moments != "fp32" or flat.rounds_stochastically
            for i in itertools.compress(flat.slots, used):
                parameter, own = flat.parameters[i], flat.own_slots[i]
                number, group = members[id(parameter)]
                if not counted:
                    steps[i] += 1
                count = counts[id(parameter)] if counted else steps[i]
                step, row = (steps[i], None) if known else rows.row(group, count)
                random = (number, flat.place_of_own(i)) if drawing else (0, None)
                if own.start < own.stop:
                    ranges.append(Range(start + own.start, start + own.stop, group, step, row, *random))
            if any(used):  # also on a rank whose shard is all padding, so that every rank holds the same
                shards.append(flat)
                start += flat.master.numel()
        dynamic = rows.table()
        if counted:
            self._taken.take(here, engine.skip)
        line = self._cut_line(engine, shards)
        gradients = [flat.own_gradient for flat in shards]
        line.update(gradients, segments(ranges, self._decoupled), engine.gradient_scale, engine.skip, dynamic)

    def _counted_on_device(self, engine: Engine, members: Mapping[int, tuple[int, Options]]) -> bool:
        """Whether the device counts the steps of a model: where an option asks for it, or once a step may be skipped
        without the host's knowledge. It begins with what the host has counted.
        """
        asked = engine.skip is not None or any(group["capturable"] for group in self.param_groups)
        if not asked and not self._taken.counts:
            return False
        trained = [(flat, i, id(flat.parameters[i])) for flat in engine.flats() for i in flat.slots]
        asked = engine.skip is not None or any(key in members and members[key][1]["capturable"] for *_, key in trained)
        counted = asked or any(key in self._taken.counts for *_, key in trained)
        for flat, i, key in trained if counted else ():
            if key not in self._taken.counts:
                self._taken.begin(key, self._steps_of(flat)[i], engine.space.device)
        return counted

    def _cut_line(self, engine: Engine, shards: list[Flat]) -> ops.Line:
        """What the update of ``shards`` writes; an engine's buffers stay where they are."""
        last, line = self._cut_lines.get(engine, ([], None))
        if line is None or last != shards:
            moments = [self._moments_of(engine, flat).stored for flat in shards]
            line = ops.Line(
                [flat.master for flat in shards],
                [stored["exp_avg"] for stored in moments],
                [stored["exp_avg_sq"] for stored in moments],
                low=[flat.low for flat in shards],
                remainder=[flat.remainder for flat in shards],
                max_exp_avg_sq=[stored.get("max_exp_avg_sq") for stored in moments],
                seed=self._seed,
            )
            self._cut_lines[engine] = shards, line
        return line

    def _steps_of(self, flat: Flat) -> list[int]:
        """Per slot: how often it was updated, as far as the host has counted."""
        return self._steps.setdefault(flat, [0] * len(flat.parameters))

    def _step_of(self, flat: Flat, i: int) -> int:
        """How often a slot was updated; waits for the device where that has counted."""
        count = self._taken.counts.get(id(flat.parameters[i]))
        return self._steps_of(flat)[i] if count is None else int(count.item())

    def _moments_of(self, engine: Engine, flat: Flat) -> AdamState:
        if flat not in self._moments:
            self._check_precision(engine.plan.precision)
            amsgrad = any(group["amsgrad"] for group in self.param_groups)
            allocate = functools.partial(engine.space.allocate, label="states")
            moments = engine.plan.precision.moments
            self._moments[flat] = AdamState(flat.master.numel(), moments, amsgrad, allocate)
        return self._moments[flat]

    def _update_plain(self, device: torch.device, plain: list[tuple[int, Options, nn.Parameter]]) -> None:
        """Parameters of one device that no model made by ``zero()`` owns: their numbers, options, and themselves.

        One that is not float32 and contiguous gets a float32 master in its state, unless ``masters`` says otherwise of
        bfloat16; torch would update it in place with every operation rounded. The update writes the rounded master to
        where the parameter lies, if that is contiguous.
        """
        parameters = [parameter for _, _, parameter in plain]
        states = [self.state[parameter] or self._begin_state(group, parameter) for _, group, parameter in plain]
        scale, skip = self._of_scaler("grad_scale", device), self._of_scaler("found_inf", device)
        counted = [group["capturable"] or skip is not None for _, group, _ in plain]
        rows = Rows(device, self._decoupled)
        steps = self._count(device, plain, states, counted)
        numbers = [rows.row(group, step) for (_, group, _), step in zip(plain, steps, strict=True)]
        dynamic = rows.table()
        self._taken.take(itertools.compress(map(id, parameters), counted), skip)
        low = [p if "master" in state and _lies_flat(p) else None for p, state in zip(parameters, states, strict=True)]
        line = self._line_of(
            [state.get("master", parameter) for parameter, state in zip(parameters, states, strict=True)],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            low=low,
            remainder=[state.get("remainder") for state in states],
            max_exp_avg_sq=[state.get("max_exp_avg_sq") for state in states],
        )
        line.update(
            [parameter.grad.contiguous() for parameter in parameters if parameter.grad is not None],
            segments(self._ranges(plain, numbers), self._decoupled),
            None if scale is None else scale.double().reciprocal().float(),
            skip,
            dynamic,
        )
        for parameter, state, written in zip(parameters, states, low, strict=True):
            if "master" in state and written is None:
                master = state["master"]
                parameter.copy_(storage.upper_half(master) if parameter.dtype == torch.bfloat16 else master)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks: whether it may leave ``grad_scale`` and ``found_inf`` on the device, here."""
        return all(group["fused"] or group["capturable"] for group in self.param_groups)

    def _of_scaler(self, name: str, device: torch.device) -> Tensor | None:
        """[1] float32: what a scaler left here, if one did."""
        left: Tensor | None = getattr(self, name, None)
        return None if left is None else left.to(device, torch.float32).view(1)

    def _ranges(
        self, plain: list[tuple[int, Options, nn.Parameter]], numbers: list[tuple[int, int | None]]
    ) -> list[Range]:
        """Of parameters laid end to end: one for each run of those with one group, and one step count or row.

        What is rounded stochastically has one for each parameter.
        """
        ranges: list[Range] = []
        begin = end = 0
        for i, ((number, group, parameter), step) in enumerate(zip(plain, numbers, strict=True)):
            end += parameter.numel()
            alone = self._chosen["moments"] not in (None, "fp32") or self._master_of(parameter) == "none"
            if alone or i + 1 == len(plain) or plain[i + 1][1] is not group or numbers[i + 1] != step:
                random = (number, 0) if alone else (0, None)
                ranges.append(Range(begin, end, group, *step, *random))
                begin = end
        return ranges

    def _count(
        self,
        device: torch.device,
        plain: list[tuple[int, Options, nn.Parameter]],
        states: list[Options],
        counted: list[bool],
    ) -> list[int | Tensor]:
        """Of each parameter the number of this update; where the device counts, its count of those before."""
        known = [state for state, there in zip(states, counted, strict=True) if not there]
        steps: Iterator[int] = iter(self._count_here(device, known) if known else ())
        there = list(itertools.compress(plain, counted))
        for _, _, parameter in there:
            self._counted(parameter)
        self._taken.part([id(parameter) for _, _, parameter in there])
        for _, _, parameter in there:
            self.state[parameter]["step"] = self._taken.counts[id(parameter)]
        return [state["step"] if on else next(steps) for state, on in zip(states, counted, strict=True)]

    def _counted(self, parameter: nn.Parameter) -> None:
        """Has the device count the steps of a plain parameter, if it does not."""
        state = self.state[parameter]
        if self._taken.counts.get(id(parameter)) is not state["step"]:
            step = float(state["step"])
            state["step"] = self._taken.begin(id(parameter), step, parameter.device, torch.float32)

    def _count_here(self, device: torch.device, states: list[Options]) -> list[int]:
        """Adds this update to each state's step, on the host; what they are now.

        They are made views of one tensor, which is counted up as long as the same states are updated.
        """
        shared, views = self._shared_steps.get(device, (None, ()))
        if shared is None or [id(state["step"]) for state in states] != [id(view) for view in views]:
            shared = torch.stack([state["step"].cpu() for state in states])
            views = shared.unbind()
            self._shared_steps[device] = shared, views
            for state, view in zip(states, views, strict=True):
                state["step"] = view
        return list(map(int, shared.add_(1.0).tolist()))

    def _line_of(
        self,
        masters: Sequence[Tensor],
        exp_avg: Sequence[Tensor],
        exp_avg_sq: Sequence[Tensor],
        **some: Any,
    ) -> ops.Line:
        """The last step's line of their device where it is still theirs: to ask takes less than to make one."""
        device = masters[0].device
        line = self._lines.get(device)
        if line is None or not line.is_of(masters, exp_avg, exp_avg_sq, **some):
            line = ops.Line(masters, exp_avg, exp_avg_sq, **some, seed=self._seed)
            self._lines[device] = line
        return line

    def _begin_state(self, group: Options, parameter: nn.Parameter) -> Options:
        state = self.state[parameter]
        like = torch.contiguous_format
        state["step"] = torch.tensor(0.0)
        dtype = MOMENT_DTYPES[self._chosen["moments"] or "fp32"]
        for name in MOMENTS[: 3 if group["amsgrad"] else 2]:
            if dtype == torch.uint8:
                count = storage.stored_numel(parameter.numel(), dtype)
                state[name] = torch.zeros(count, dtype=dtype, device=parameter.device)
            else:
                state[name] = torch.zeros_like(parameter, dtype=dtype, memory_format=like)
        self._begin_master(parameter, state)
        return cast(Options, state)

    def _master_of(self, parameter: nn.Parameter) -> str:
        """How a plain parameter's master is kept: ``"own"`` where it is the float32 parameter, else as ``masters``."""
        if parameter.dtype == torch.float32 and parameter.is_contiguous():
            return "own"
        halves = parameter.dtype == torch.bfloat16 and parameter.is_contiguous()
        return self._chosen["masters"] or "fp32" if halves else "fp32"

    def _begin_master(self, parameter: nn.Parameter, state: Options) -> None:
        kind = self._master_of(parameter)
        if kind == "fp32" and "master" not in state:
            state["master"] = parameter.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        elif kind == "split":
            state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)

    def _plain_state(self, parameter: nn.Parameter) -> Options:
        state = dict(self.state.get(parameter, {}))
        if not state:
            return state
        state["step"] = state["step"].clone()  # its own memory, as torch's has
        if "remainder" in state:
            state["master"] = storage.join(parameter.detach(), state.pop("remainder"))
        for name in MOMENTS:
            if name in state and state[name].dtype != torch.float32:
                wide = storage.widen(state[name].view(-1), parameter.numel(), signed=name == MOMENTS[0])
                state[name] = wide.view(parameter.shape)
        return state

    def _restore_plain(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        self._lines.clear()  # else the moments of before stay until the next step
        self.state.pop(parameter, None)
        if not state:
            return
        mine = {k: v.clone() if isinstance(v, Tensor) else torch.tensor(v) for k, v in state.items()}
        mine["step"] = torch.tensor(float(state["step"]))  # torch's may be on the parameter's device
        master = mine.get("master")
        if self._master_of(parameter) != "fp32":
            mine.pop("master", None)
        self._begin_master(parameter, mine)
        if "remainder" in mine and master is not None:
            upper, remainder = storage.split(master.reshape(-1))
            parameter.view(-1).copy_(upper)
            mine["remainder"].view(-1).copy_(remainder)
        dtype = MOMENT_DTYPES[self._chosen["moments"] or "fp32"]
        for name in MOMENTS:
            if name in mine and mine[name].dtype != dtype:
                wide = mine[name].float().reshape(-1)
                stored = torch.zeros(storage.stored_numel(wide.numel(), dtype), dtype=dtype, device=wide.device)
                storage.narrow(wide, stored, signed=name == MOMENTS[0])
                mine[name] = stored if dtype == torch.uint8 else stored.view(parameter.shape)
        self.state[parameter] = mine

    def load_state_dict(self, state_dict: Options) -> None:
        super().load_state_dict(state_dict)
        for group, parameter in self._parameters():
            if group["capturable"] and engine_behind(parameter) is None and self.state.get(parameter):
                self._counted(parameter)

    def state_names(self) -> tuple[str, ...]:
        amsgrad = any(group["amsgrad"] for group in self.param_groups)
        return ("step", *MOMENTS[: 3 if amsgrad else 2])

    def cut_buffer(self, flat: Flat, name: str) -> Tensor:
        return self._moments[flat].read(name)

    def _flat_state(self, flat: Flat) -> dict[str, Tensor]:
        if flat not in self._moments:
            return {}
        moments = self._moments[flat]
        return {name: moments.read(name) for name in moments.stored}

    def _slot_state(self, flat: Flat, i: int) -> Options:
        step = self._step_of(flat, i)
        return {"step": step, **self._moments[flat].stored} if step else {}

    def _restore(self, engine: Engine, flat: Flat, i: int, state: Mapping[str, Any]) -> None:
        self._steps_of(flat)[i] = int(state.get("step", 0))
        self._taken.forget(id(flat.parameters[i]))
        if state or flat in self._moments:
            own, moments = flat.own_slots[i], self._moments_of(engine, flat)
            for name in moments.stored:
                moments.write(name, own, state[name] if state else torch.zeros(own.stop - own.start))


class AdamW(Adam):
    """``torch.optim.AdamW``, fused: one launch for all shards of a model does unscaling, update and the rounded copy.

    Over a model made by :func:`npuzero.zero` the moments and masters are cut as its plan says. Over plain parameters
    it is a drop-in whose ``state_dict`` is torch's, and all of them are updated by one launch.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as for ``torch.optim.AdamW``. An lr that is a tensor on
            the parameters' device is read there, and never by the host.
        capturable: as torch's: steps are counted on the device, so that a graph can capture :meth:`step` after one step
            outside of it. A replay goes on counting, and sees another lr where that is a tensor on the device.
        masters: of plain contiguous bfloat16 parameters: ``"fp32"`` (None); ``"split"``, the 16 bits that the parameter
            lacks, with the same results; ``"none"``, the parameter alone, rounded stochastically. Others have fp32.
        moments: of plain parameters: ``"fp32"`` (None), ``"bf16"`` or ``"int8"``. ``state_dict`` has float32 always.
            Of a model with a plan its precision says both.
        seed: of stochastic rounding, with the step and the parameter's place among ``params``.
        fused: the update is, always; True lets torch.amp.GradScaler decide on the device, as for torch's.
        foreach: accepted for compatibility.
        differentiable: must be False.

    Raises:
        ConfigError: options out of range.
    """

    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


def _check_dense(number: int, parameter: nn.Parameter) -> None:
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise ConfigError(
            f"gradient of parameter {number}",
            expected="a dense tensor",
            got=str(parameter.grad.layout),
            do="Use sparse=False, or torch.optim.SparseAdam for that parameter.",
        )


def _check_choice(name: str, value: str | None, allowed: Iterable[str]) -> None:
    if value is not None and value not in allowed:
        raise ConfigError(
            name, expected=f"None or one of {', '.join(allowed)}", got=repr(value), do="Choose among these."
        )


def _lies_flat(parameter: nn.Parameter) -> bool:
    """Whether the update can write the parameter's own memory as the rounded copy of its master."""
    return parameter.dtype in (torch.bfloat16, torch.float16) and parameter.is_contiguous()
