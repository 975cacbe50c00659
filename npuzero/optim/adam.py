"""Adam and AdamW: torch's signatures, one launch a step, over cut models and over plain parameters."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from npuzero import ops
from npuzero.errors import ConfigError
from npuzero.optim.counts import TakenSteps
from npuzero.optim.plain import Member, Options, PlainAdam
from npuzero.optim.segments import MOMENT_DTYPES, MOMENTS, AdamState, Range, Rows, lies_there, segments
from npuzero.optim.wrapped import ZeroOptimizer
from npuzero.plan import DTYPES, MASTERS, Precision
from npuzero.shard.accord import Words
from npuzero.shard.engine import Engine
from npuzero.shard.flat import Flat
from npuzero.shard.ownership import engine_behind

# As torch has them: a program may put this module's in their place.
_ADAM, _ADAMW = torch.optim.Adam, torch.optim.AdamW


class Adam(ZeroOptimizer):
    """``torch.optim.Adam`` with one fused launch for a model's shards or all plain parameters; see :class:`AdamW`."""

    def __init__(  # noqa: PLR0913 - torch's signature, and three more
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        masters: str | None = None,
        moments: str | None = None,
        seed: int = 0,
    ) -> None:
        self._make(
            _ADAM,
            params,
            *(masters, moments, seed),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )

    def _make(
        self,
        kind: type[torch.optim.Optimizer],
        params: Any,
        masters: str | None,
        moments: str | None,
        seed: int,
        **options: Any,
    ) -> None:
        _check_choice("masters", masters, MASTERS)
        _check_choice("moments", moments, MOMENT_DTYPES)
        if type(seed) is not int or not 0 <= seed < 2**64:
            raise ConfigError(
                "seed", expected="an int from 0 to 2^64 - 1", got=repr(seed), do="Give one in that range."
            )
        self._chosen = {"masters": masters, "moments": moments}
        self._seed = seed
        ZeroOptimizer.__init__(self, kind, params, **options)
        self._begin()

    @property
    def kind(self) -> str:
        return type(self).__name__

    @property
    def constants(self) -> Words:
        return {"seed": self._seed}

    def _begin(self) -> None:
        """What is counted, kept of cut models, and remembered from step to step: nothing yet."""
        self._moments: weakref.WeakKeyDictionary[Flat, AdamState] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Flat, list[int]] = weakref.WeakKeyDictionary()
        # By id of a cut parameter: where it is capturable, or a loss scaler may skip its steps, the device counts.
        self._taken = TakenSteps()
        self._cut_lines: weakref.WeakKeyDictionary[Engine, tuple[list[Flat], ops.Line]] = weakref.WeakKeyDictionary()
        self._plain = PlainAdam(**self._chosen, seed=self._seed)

    def __getstate__(self) -> Options:
        return {**super().__getstate__(), "_chosen": self._chosen, "_seed": self._seed}

    def __setstate__(self, state: Options) -> None:
        super().__setstate__(state)
        self._begin()

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
        plain = [Member(*members[id(parameter)], parameter) for parameter in self._owners()[1]]
        # A scaler leaves these two here.
        self._plain.update(self.state, plain, getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
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
                for parameter, used in zip(flat.parameters, engine.boundary.used(flat), strict=True)
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
        device, counts = engine.device, self._taken.counts
        rows = Rows(device)
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
            self._taken.take(here, engine.boundary.skip)
        line = self._cut_line(engine, shards)
        gradients = [flat.own_gradient for flat in shards]
        line.update(gradients, segments(ranges), engine.boundary.gradient_scale, engine.boundary.skip, dynamic)

    def _counted_on_device(self, engine: Engine, members: Mapping[int, tuple[int, Options]]) -> bool:
        """Whether the device counts the steps of a model: where an option asks for it, or once a step may be skipped
        without the host's knowledge. It begins with what the host has counted.
        """
        asked = engine.boundary.skip is not None or any(group["capturable"] for group in self.param_groups)
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
            allocate = functools.partial(engine.spaces[flat.rests.states.memory].allocate, label="states")
            moments = engine.plan.precision.moments
            self._moments[flat] = AdamState(flat.master.numel(), moments, amsgrad, allocate)
        return self._moments[flat]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks: whether it may leave ``grad_scale`` and ``found_inf`` on the device, here."""
        return all(group["fused"] or group["capturable"] for group in self.param_groups)

    def load_state_dict(self, state_dict: Options) -> None:
        super().load_state_dict(state_dict)
        for group, parameter in self._parameters():
            if group["capturable"] and engine_behind(parameter) is None and self.state.get(parameter):
                self._plain.count_on_device(parameter, self.state[parameter])

    def _plain_state(self, parameter: nn.Parameter) -> Options:
        return self._plain.read(parameter, self.state.get(parameter, {}))

    def _restore_plain(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        mine = self._plain.write(parameter, state)
        self.state.pop(parameter, None)
        if mine:
            self.state[parameter] = mine

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
    it is a drop-in whose ``state_dict`` is torch's (with a ``master`` of each parameter in 16 bits), and all of them
    are updated by one launch. A program may write into plain parameters between steps, but where they have masters not
    in place through ``p.data``, which torch does not show.

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
        ConfigError: options out of range, or parameters that torch refuses; of torch's kind of error, too.
    """

    def __init__(  # noqa: PLR0913 - torch's signature, and three more
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        masters: str | None = None,
        moments: str | None = None,
        seed: int = 0,
    ) -> None:
        self._make(
            _ADAMW,
            params,
            *(masters, moments, seed),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )

    def _update(self, ready: list[Engine]) -> None:
        for group in self.param_groups:  # what was loaded may be Adam's
            group["decoupled_weight_decay"] = True
        super()._update(ready)


def _check_choice(name: str, value: str | None, allowed: Iterable[str]) -> None:
    if value is not None and value not in allowed:
        raise ConfigError(
            name, expected=f"None or one of {', '.join(allowed)}", got=repr(value), do="Choose among these."
        )
