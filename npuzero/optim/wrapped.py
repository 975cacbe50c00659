"""Any element-wise optimizer of torch's over a cut model, and over a plain one too."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from npuzero import device as devices
from npuzero.errors import CheckpointError, ConfigError, NpuZeroError, StateError, config_error_as
from npuzero.optim.terms import Terms
from npuzero.plan import Precision
from npuzero.shard.accord import Words
from npuzero.shard.engine import Engine
from npuzero.shard.flat import Flat
from npuzero.shard.ownership import engine_behind, owners, uncopied

# They look beyond one element: norms, matrices, or the loss itself.
_NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam", "LARS", "LAMB", "Lamb", "Shampoo", "SOAP")

Options = dict[str, Any]


class ZeroOptimizer(torch.optim.Optimizer):
    """Any element-wise torch optimizer over a cut model: each rank updates its shard of the masters.

    Parameters that no ``npuzero.zero()`` has seen are handed to the optimizer as they are. It may be built before or
    after ``zero()``; param_groups, LR schedulers, closures and hooks work as in torch.

    Args:
        optimizer_class: a subclass of ``torch.optim.Optimizer`` whose update of an element depends on nothing but
            that element's parameter, gradient and state.
        params: as for torch: tensors, or dicts with ``params`` and options.
        defaults: the class's own keyword arguments.

    Raises:
        ConfigError: not an optimizer class, not element-wise, or options it refuses.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], params: Any, **defaults: Any) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise ConfigError(
                "ZeroOptimizer",
                expected="a subclass of torch.optim.Optimizer",
                got=repr(optimizer_class),
                do="Pass the class, then params, then its keyword arguments.",
            )
        if optimizer_class.__name__ in _NOT_ELEMENTWISE or issubclass(optimizer_class, ZeroOptimizer):
            raise ConfigError(
                "ZeroOptimizer",
                expected="an element-wise optimizer (a shard is updated without the rest)",
                got=optimizer_class.__name__,
                do="Choose SGD, Adam, AdamW, RMSprop, Adagrad or the like.",
            )
        self._class = optimizer_class
        self._options = defaults
        self._inner: torch.optim.Optimizer | None = None
        self._stand_ins: dict[int, Tensor] = {}  # by id of a cut parameter: this rank's range of its master
        self._terms: weakref.WeakKeyDictionary[Engine, Terms] = weakref.WeakKeyDictionary()
        with _as_config_error(
            f"{type(self).__name__}({defaults})", f"what torch.optim.{optimizer_class.__name__} takes"
        ):
            super().__init__(params, optimizer_class([torch.zeros(1)], **defaults).defaults)
        for engine in self._owners()[0]:
            engine.boundary.accord.propose(self._terms_for(engine))

    @property
    def kind(self) -> str:
        """The class, as errors name it."""
        return f"{type(self).__name__}({self._class.__name__})"

    @property
    def constants(self) -> Words:
        """What random bits depend on, beside the groups."""
        return {}

    def _terms_for(self, engine: Engine) -> Terms:
        if engine not in self._terms:
            self._terms[engine] = Terms(self, engine)
        return self._terms[engine]

    def __getstate__(self) -> Options:
        """What a copy or pickle takes along; torch's has neither class nor hooks.

        Raises:
            StateError: the parameters are of a cut model, of which each rank holds a part.
        """
        engines = self._engines()
        if engines:
            raise uncopied("copied or pickled")
        return {**super().__getstate__(), "_class": self._class, "_options": self._options, "_inner": self._inner}

    def __setstate__(self, state: Options) -> None:
        self._stand_ins = {}
        self._terms = weakref.WeakKeyDictionary()
        super().__setstate__(state)

    @_disable_dynamo
    def add_param_group(self, param_group: Options) -> None:
        """As torch's; options are checked by the optimizer class.

        Raises:
            ConfigError: parameters or options that torch refuses, or ``differentiable``.
        """
        with _as_config_error(type(self).__name__, f"a group that torch.optim.{self._class.__name__} takes"):
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            arguments = inspect.signature(self._class).parameters.keys() - {"params"}
            self._class([torch.zeros(1)], **{key: value for key, value in group.items() if key in arguments})
        self._check_group(group)
        self._terms.clear()
        if self._inner is not None:
            self._inner.add_param_group(self._counterpart(group))

    def _check_group(self, group: Options) -> None:
        """Raises ConfigError for options and parameters that no update here can take."""
        if group.get("differentiable"):
            raise ConfigError(
                type(self).__name__,
                expected="differentiable=False",
                got="True",
                do="Use torch.optim for an update that autograd goes through.",
            )

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Collective where the model is cut: call it on every rank.

        Raises:
            StateError: parameters of a deleted model, or of a cut and an uncut model mixed up; or a graph is being
                captured, and a group is not ``capturable``.
        """
        self._check_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engines = self._engines()
        for engine in engines:
            engine.boundary.accord.follow(self._terms_for(engine))
        ready = [engine for engine in engines if engine.begin_update()]
        self._update(ready)
        for engine in ready:
            engine.end_update()
        return loss

    def _check_capture(self) -> None:
        of = next((parameter.device for _, parameter in self._parameters()), torch.device("cpu"))
        if of.type not in devices.KINDS:
            return
        device = devices.get(of)
        if (device.replays and all(group.get("capturable") for group in self.param_groups)) or not device.capturing():
            return
        subject = f"{type(self).__name__}.step in the capture of a graph"
        if not device.replays:
            raise StateError(
                subject,
                expected=f"steps that are run, on {device.kind}",
                got="one that is captured, and would be replayed",
                do="Call step() outside of the capture.",
            )
        raise StateError(
            subject,
            expected="capturable=True in every group",
            got="steps that the host counts, which a replay would not count",
            do=f"Make the optimizer with capturable=True ({self._class.__name__} must have it).",
        )

    def _engines(self) -> list[Engine]:
        """The engines of the models whose parameters these are, each once, in order.

        Raises:
            StateError: beside cut parameters there are plain ones, whose gradients nobody reduces.
        """
        engines, plain = self._owners()
        if plain and any(engine.world.size > 1 for engine in engines):
            raise StateError(
                type(self).__name__,
                expected="parameters of models made by npuzero.zero() only",
                got=f"{len(plain)} others beside them, whose gradients no rank would reduce",
                do="Pass every trained module through npuzero.zero(), or give the others an optimizer of their own.",
            )
        return engines

    def _owners(self) -> tuple[list[Engine], list[nn.Parameter]]:
        return owners(itertools.chain.from_iterable(group["params"] for group in self.param_groups))

    def _parameters(self) -> Iterator[tuple[Options, nn.Parameter]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter

    def _update(self, ready: list[Engine]) -> None:
        inner = self._inner or self._make_inner()
        for group, mirror in zip(self.param_groups, inner.param_groups, strict=True):
            mirror.update((key, value) for key, value in group.items() if key != "params")
        ready = [engine for engine in ready if engine.boundary.skip is None or not engine.boundary.skip.item()]
        for engine in ready:
            for flat in engine.flats():
                flat.own_gradient.mul_(engine.boundary.gradient_scale)
            engine.boundary.gradient_scale.fill_(1.0)
        for engine in self._engines():
            for flat in engine.flats():
                for i, parameter in enumerate(flat.parameters):
                    stand_in = self._stand_ins.get(id(parameter))
                    if stand_in is not None:
                        counts = engine in ready and engine.boundary.used(flat)[i]
                        stand_in.grad = flat.own_gradient[flat.own_slots[i]] if counts else None
        inner.step()
        for engine in ready:
            for flat in engine.flats():
                flat.refresh_low()

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. A cut gradient is dropped whatever ``set_to_none`` says: no zeros are kept of it."""
        engines, plain = self._owners()
        kept = () if set_to_none else {id(parameter) for parameter in plain}
        with torch._C.DisableTorchFunctionSubclass():
            for _, parameter in self._parameters():
                if id(parameter) in kept and parameter.grad is not None:
                    parameter.grad.detach_().zero_()
                else:
                    parameter.grad = None
        for engine in engines:
            # The graph of a capturable step has the gradients' addresses.
            engine.forget_gradients(lend=not any(group.get("capturable") for group in self.param_groups))

    # -- state, in torch's shape -----------------------------------------------------------------------------------

    @_disable_dynamo
    def state_dict(self) -> Options:
        """What the torch optimizer of a plain model would give: whole tensors by parameter number.

        Tensors of cut parameters are on the CPU. Collective where the model is cut: call it on every rank.
        """
        numbers = {id(parameter): number for number, (_, parameter) in enumerate(self._parameters())}
        state: dict[int, Options] = {
            numbers[id(parameter)]: dict(plain)
            for parameter in self._owners()[1]
            if (plain := self._plain_state(parameter))
        }
        for engine in self._engines():
            for flat in engine.flats():
                for i, gathered in enumerate(self._gather(engine, flat)):
                    if gathered and id(flat.parameters[i]) in numbers:
                        state[numbers[id(flat.parameters[i])]] = gathered
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [numbers[id(p)] for p in group["params"]]}
            for group in self.param_groups
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def _gather(self, engine: Engine, flat: Flat) -> list[Options]:
        """Per slot of ``flat``: its whole state, put together from what the ranks say they have."""
        said = cast(list[list[Options]], engine.world.exchange([self._described(flat, i) for i in flat.slots]))
        known = [{name: value for rank in said for name, value in rank[i].items()} for i in flat.slots]
        mine = self._flat_state(flat)
        names = sorted({name for slot in known for name, value in slot.items() if value is None})
        wholes = {name: engine.values.gather_states(flat, mine.get(name)).cpu() for name in names}
        return [
            {
                name: wholes[name][slot.begin : slot.end].view(slot.shape) if value is None else torch.tensor(value)
                for name, value in state.items()
            }
            for slot, state in zip(flat.layout.slots, known, strict=True)
        ]

    def _described(self, flat: Flat, i: int) -> dict[str, float | None]:
        """A slot's state as text can carry it: numbers, and None for each tensor of the parameter's shape."""
        state = {name: value for name, value in self._slot_state(flat, i).items() if value is not None}
        return {k: None if isinstance(v, Tensor) and v.dim() else float(v) for k, v in state.items()}

    @_disable_dynamo
    def load_state_dict(self, state_dict: Options) -> None:
        """Take a state in torch's shape, e.g. that of ``torch.optim.AdamW``; every rank gives the whole of it.

        Raises:
            CheckpointError: no such state, other groups, other tensors, or tensors of other shapes.
        """
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            raise CheckpointError(
                "optimizer state",
                expected="a mapping with state and param_groups, as state_dict() gives",
                got=str(sorted(state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__,
                do="Load what an optimizer's state_dict() gave.",
            )
        groups = state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise CheckpointError(
                "optimizer state",
                expected=f"groups of {[len(g['params']) for g in self.param_groups]} parameters",
                got=str([len(g["params"]) for g in groups]),
                do="Build the optimizer with the same groups.",
            )
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update((key, copy.deepcopy(value)) for key, value in loaded.items() if key != "params")
        order = [number for group in groups for number in group["params"]]
        with torch.no_grad():
            for number, (_, parameter) in zip(order, self._parameters(), strict=True):
                state = state_dict["state"].get(number, {})
                if state:
                    self._check_state(number, parameter, state)
                engine = engine_behind(parameter)
                place = engine.place(parameter) if engine else None
                if engine is None:
                    self._restore_plain(parameter, state)
                elif place is not None:
                    flat, i = place
                    own = {k: flat.cut_like_own(i, v) if _is_whole(k, v, parameter) else v for k, v in state.items()}
                    self._restore(engine, flat, i, own)

    def cut_state(self, flat: Flat) -> list[dict[str, float | None]]:
        """Per slot of ``flat`` its numbers by name, and None for each tensor, whose part :meth:`cut_buffer` has.

        The same on all ranks.
        """
        return [self._described(flat, i) for i in flat.slots]

    def cut_buffer(self, flat: Flat, name: str) -> Tensor:
        """[n/S] float32: this rank's part of the tensors ``name`` of all slots, however they are kept; maybe a copy."""
        return self._flat_state(flat)[name]

    def load_cut_state(
        self, engine: Engine, flat: Flat, buffers: Mapping[str, Tensor], slots: Sequence[Mapping[str, float | None]]
    ) -> None:
        """Take what :meth:`cut_state` and :meth:`cut_buffer` gave; a slot without anything loses its state.

        Raises:
            CheckpointError: a slot lacks what the optimizer class needs.
        """
        for i, state in enumerate(slots):
            if state:
                self._check_names(flat.layout.slots[i].name, state)
            own = flat.own_slots[i]
            self._restore(engine, flat, i, {k: buffers[k][own] if v is None else v for k, v in state.items()})

    def state_names(self) -> tuple[str, ...]:
        """Names that a parameter's state must have; the others are the class's own business."""
        return ()

    def _plain_state(self, parameter: nn.Parameter) -> Options:
        return dict(self._inner.state.get(parameter, {})) if self._inner else {}

    def _restore_plain(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        inner = self._inner or self._make_inner()
        inner.state.pop(parameter, None)
        if state:
            inner.state[parameter] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}

    def _flat_state(self, flat: Flat) -> dict[str, Tensor]:
        """This rank's [n/S] buffers by name, put together from the ranges of the parameters."""
        buffers: dict[str, Tensor] = {}
        for i in flat.slots:
            own = flat.own_slots[i]
            for name, value in self._slot_state(flat, i).items():
                if isinstance(value, Tensor) and value.numel() == own.stop - own.start and value.dim():
                    whole = buffers.setdefault(name, torch.zeros_like(flat.master))
                    whole[own].copy_(value)
        return buffers

    def _slot_state(self, flat: Flat, i: int) -> Options:
        stand_in = self._stand_ins.get(id(flat.parameters[i]))
        return {} if stand_in is None or self._inner is None else dict(self._inner.state.get(stand_in, {}))

    def _restore(self, engine: Engine, flat: Flat, i: int, state: Mapping[str, Any]) -> None:
        """Slot ``i``'s state: 1-D tensors of this rank's part of the slot, and numbers; nothing if it has none."""
        inner = self._inner or self._make_inner()
        stand_in = self._stand_ins.get(id(flat.parameters[i]))
        if stand_in is not None:
            inner.state.pop(stand_in, None)
            if state:
                inner.state[stand_in] = {
                    k: v.clone() if isinstance(v, Tensor) else torch.tensor(v) for k, v in state.items()
                }

    def _check_state(self, number: int, parameter: nn.Parameter, state: object) -> None:
        subject = f"optimizer state {number}"
        if not isinstance(state, Mapping):
            raise CheckpointError(
                subject, expected="a mapping", got=type(state).__name__, do="Load a state of the same optimizer class."
            )
        self._check_names(subject, state)
        for name, value in state.items():
            shaped = name in self.state_names() and name != "step"
            if isinstance(value, Tensor) and (value.dim() or shaped) and value.shape != parameter.shape:
                raise CheckpointError(
                    f"{subject}.{name}",
                    expected=f"shape {tuple(parameter.shape)}",
                    got=str(tuple(value.shape)),
                    do="Load a state of the same model.",
                )

    def _check_names(self, subject: str, state: Mapping[str, Any]) -> None:
        needs = self.state_names()
        if any(name not in state for name in needs):
            raise CheckpointError(
                subject,
                expected=f"a mapping with {', '.join(needs)}",
                got=str(sorted(state)),
                do="Load a state of the same optimizer class.",
            )

    def _check_precision(self, precision: Precision) -> None:
        """Whether masters and moments can be kept so.

        Raises:
            ConfigError: they cannot.
        """
        for name in ("masters", "moments"):
            if getattr(precision, name) != "fp32":
                raise ConfigError(
                    f"{type(self).__name__} over a model of precision.{name}={getattr(precision, name)!r}",
                    expected="'fp32', which is what torch's optimizers compute in",
                    got=repr(getattr(precision, name)),
                    do="Use npuzero.AdamW or npuzero.Adam, or a precision with masters and moments in fp32.",
                )

    def _make_inner(self) -> torch.optim.Optimizer:
        """The optimizer that does the work, over this rank's ranges of the masters."""
        groups = [self._counterpart(group) for group in self.param_groups]
        self._inner = self._class(groups, **self._options)
        return self._inner

    def _counterpart(self, group: Options) -> Options:
        """``group`` for the inner optimizer; frozen parameters of a cut model have no part in it."""
        members: list[Tensor] = []
        for parameter in group["params"]:
            engine = engine_behind(parameter)
            place = engine.place(parameter) if engine else None
            if engine is not None and place is not None:
                self._check_precision(engine.plan.precision)
                flat, i = place
                self._stand_ins[id(parameter)] = flat.master[flat.own_slots[i]].detach()
            if engine is None or place is not None:
                members.append(self._stand_ins.get(id(parameter), parameter))
        return {**{key: value for key, value in group.items() if key != "param_names"}, "params": members}


@contextlib.contextmanager
def _as_config_error(subject: str, expected: str) -> Iterator[None]:
    """torch's own complaint about an argument, in this package's form, and still what torch's was."""
    try:
        yield
    except NpuZeroError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, RuntimeError) as error:
        do = "Correct the argument; torch's page of the class says more."
        raise config_error_as(type(error))(subject, expected=expected, got=str(error), do=do) from error


def _is_whole(name: str, value: object, parameter: nn.Parameter) -> bool:
    """Whether ``value`` is a state of the parameter's shape, of which a rank keeps its part: a scalar's step is not."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and (value.dim() > 0 or name != "step")
