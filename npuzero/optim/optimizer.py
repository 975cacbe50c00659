"""The interface of all optimizers: torch's methods over sharded models and plain parameters; a worker updates."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from npuzero import device as devices
from npuzero.comm.watchdog.call_names import collective_call
from npuzero.config import explain_strict_refusal
from npuzero.errors import ConfigError, NpuZeroError, StateError, config_error_as
from npuzero.optim.rules.rule import Options
from npuzero.optim.workers import torch_states as states
from npuzero.optim.workers.base import OptimizerWorker
from npuzero.optim.workers.torch_optimizer import TorchOptimizerWorker
from npuzero.optim.workers.vote_terms import VoteTerms
from npuzero.shard.engine import Engine
from npuzero.shard.find_engine import engine_behind, split_by_engine
from npuzero.shard.gradients.vote_rules import Words
from npuzero.shard.offload.delayed_update import LAGGING
from npuzero.shard.state.claim import refused_copy_error
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.snapshot import Later, StateSnapshot


class ZeroOptimizer(torch.optim.Optimizer):
    """Run any element-wise torch optimizer over a sharded model: each rank updates its shard of the masters.

    Plain parameters are passed to the torch optimizer unchanged. Build it before or after ``npuzero.zero()``;
    param_groups, LR schedulers, closures and hooks work as in torch.

    Args:
        optimizer_class: a subclass of ``torch.optim.Optimizer`` that updates each element by nothing but its parameter,
            gradient and state. This is tested on a few elements, updated together and separately.
        params: as for torch: tensors, or dicts with ``params`` and options.
        defaults: the class's own keyword arguments.

    Raises:
        ConfigError: not an optimizer class, not element-wise, or options it refuses.

    Example::

        optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
        loss.backward()
        optimizer.step()
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], params: Any, **defaults: Any) -> None:
        if isinstance(optimizer_class, type) and issubclass(optimizer_class, ZeroOptimizer):
            raise ConfigError(
                "ZeroOptimizer",
                expected="a class of torch's kind, to put over shards",
                got=f"{optimizer_class.__name__}, which works over shards itself",
                do=f"Use npuzero.{optimizer_class.__name__}(params, ...).",
            )
        self._open(TorchOptimizerWorker(optimizer_class, defaults), params, defaults)

    def _open(self, worker: OptimizerWorker, params: Any, options: Options) -> None:
        """Finish a constructor with its worker, parameters and options."""
        self._worker = worker
        self._terms: weakref.WeakKeyDictionary[Engine, VoteTerms] = weakref.WeakKeyDictionary()
        given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
        what = "model.parameters(), not the model" if isinstance(params, nn.Module) else f"what {worker.alike} takes"
        with _as_config_error(f"{type(self).__name__}({given})", what):
            super().__init__(params, worker.defaults(options))
        self.state = states.PlainParameterStates()
        _propose_rules(self)

    @property
    def kind(self) -> str:
        """Return the class name as errors show it."""
        return self._worker.kind(type(self).__name__)

    @property
    def constants(self) -> Words:
        """Return the values that random bits depend on, in addition to the groups."""
        return self._worker.constants

    def _terms_for(self, engine: Engine) -> VoteTerms:
        if engine not in self._terms:
            self._terms[engine] = VoteTerms(self, engine)
        return self._terms[engine]

    def __getstate__(self) -> Options:
        """Return the state for copy and pickle: torch's, which lacks the hooks, and the worker.

        Raises:
            StateError: parameters belong to a sharded model, and each rank has only a part of them.
        """
        if self._engines():
            raise refused_copy_error("copied or pickled")
        return {**super().__getstate__(), "_worker": self._worker}

    def __setstate__(self, state: Options) -> None:
        self._terms = weakref.WeakKeyDictionary()
        super().__setstate__(state)

    @_disable_dynamo
    def add_param_group(self, param_group: Options) -> None:
        """Add a parameter group; the optimizer class checks its options.

        Raises:
            ConfigError: parameters or options that torch refuses, or ``differentiable``.
        """
        with _as_config_error(type(self).__name__, f"a group that {self._worker.alike} takes"):
            super().add_param_group(param_group)
            try:
                self._worker.check_group(type(self).__name__, self.param_groups[-1])
            except Exception:
                self.param_groups.pop()
                raise
        self._terms.clear()

    @_disable_dynamo
    @torch.no_grad()
    @collective_call("optimizer.step")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once. Collective where the model is sharded: call it on every rank.

        Raises:
            StateError: parameters of a deleted model, or sharded and plain parameters together; or a graph is being
                captured and a group is not ``capturable``.
        """
        _check_capture(type(self).__name__, self.param_groups, self._worker.alike)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engines = self._engines()
        for engine in engines:
            engine.boundary.accord.follow(self._terms_for(engine))
            engine.lag.check(self, early=self._worker.promise(self, engine) is not None)
        with contextlib.ExitStack() as begun:
            for engine in engines:
                begun.enter_context(engine.step(self._worker))
            ready = [engine for engine in engines if engine.begin_update(self._terms_for(engine).members)]
            self._worker.update(self, ready)
            for engine in ready:
                engine.end_update(self._terms_for(engine).members)
        for engine in engines:
            engine.early.follow(self._worker.promise(self, engine))
        return loss

    def _engines(self) -> list[Engine]:
        """Return the engines of the optimizer's parameters, each once, in order.

        Raises:
            StateError: there are plain parameters among sharded ones, and no rank reduces their gradients.
        """
        engines, plain = _owners(self)
        if plain and not all(engine.alone for engine in engines):
            raise StateError(
                type(self).__name__,
                expected="parameters of models made by npuzero.zero() only",
                got=f"{len(plain)} others beside them, whose gradients no rank would reduce",
                do="Pass every trained module through npuzero.zero(), or give the others an optimizer of their own."
                + explain_strict_refusal(engines[0].world.size),
            )
        return engines

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tell torch.amp.GradScaler whether scale and overflow may stay on the device."""
        return self._worker.decides_on_device(self.param_groups)

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or with ``set_to_none=False`` zero the existing ones, which then still update."""
        engines, _ = _owners(self)
        for engine in engines:
            engine.early.keep()
        with torch._C.DisableTorchFunctionSubclass():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if set_to_none:
                        parameter.grad = None
                    elif parameter.grad is not None:
                        parameter.grad.detach_().zero_()
        for engine in engines if not set_to_none else ():
            engine.zero_gradients(self._terms_for(engine).members)
        for engine in engines:
            # A captured step holds the addresses of the gradients.
            engine.forget_gradients(lend=not any(group.get("capturable") for group in self.param_groups))

    # -- state, in torch's shape -----------------------------------------------------------------------------------

    @_disable_dynamo
    @collective_call("optimizer.state_dict")
    def state_dict(self) -> Options:
        """Return torch's state dict of the unsharded model: full tensors by parameter number.

        Tensors of sharded parameters are on the CPU. Collective where the model is sharded: call it on every rank.
        While an update of a delayed plan is pending, each state also has ``ahead``: the parameter after that update.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        found = states.unshard_state_dict(self._worker, self, self._engines(), _owners(self)[1])
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, found)
            found = found if replaced is None else replaced
        return found

    @_disable_dynamo
    def load_state_dict(self, state_dict: Options) -> None:
        """Load a state dict of torch's format, e.g. of ``torch.optim.AdamW``; every rank passes the full one.

        Raises:
            CheckpointError: it is no state dict, or its groups, tensors or shapes differ.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        states.load_state_dict_shards(self._worker, self, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def cut_state(self, flat: FlatParameter) -> list[dict[str, float | None]]:
        """Return for each slot of ``flat`` its numbers by name, and None for each tensor, to be read by
        :meth:`cut_buffer`.

        The same on all ranks.
        """
        described = [states.describe_slot_state(self._worker, flat, i) for i in flat.slots]
        return [{**state, LAGGING: None} if state and flat.ahead is not None else state for state in described]

    def cut_buffer(self, flat: FlatParameter, name: str, own: slice, snapshot: StateSnapshot) -> Later:
        """Return a function that gives a range of this rank's shard of the tensors ``name`` of all slots, as float32.
        It may copy; the memory and dtype of the stored state do not matter.
        """
        if name == LAGGING:
            behind = snapshot.copied(flat.own_parameters[own])
            return lambda: behind().float()
        later = self._worker.later(flat, name, own, snapshot)
        assert later is not None, name
        return later

    def load_cut_state(
        self, engine: Engine, flat: FlatParameter, slots: Sequence[Mapping[str, float | None]]
    ) -> Collection[str]:
        """Start loading the result of :meth:`cut_state`; a slot without a state loses its own.

        Returns:
            The names of the tensors, which are undefined until :meth:`write_cut_buffer` has written all of each.

        Raises:
            CheckpointError: a slot lacks a state that the optimizer class needs.
        """
        for slot, state in zip(flat.layout.slots, slots, strict=True):
            if state:
                states.check_state_names(slot.name, state, self.state_names())
        names = [*self._worker.restore_numbers(self, engine, flat, slots)]
        return names + [LAGGING] * engine.lag.expect(flat, slots)

    def write_cut_buffer(self, flat: FlatParameter, name: str, own: slice, values: Tensor) -> None:
        """Write a range of the result of :meth:`cut_buffer`. It starts on a multiple of MOMENT_BLOCK elements, and ends
        on one or at the end of the shard.
        """
        if name != LAGGING:
            self._worker.write(flat, name, own, values)
        elif engine := engine_behind(flat.parameters[0]):
            engine.lag.take_behind(flat, own, values)

    def state_names(self) -> tuple[str, ...]:
        """Return the names that a parameter's state must have; the optimizer class may keep more."""
        return self._worker.state_names(self.param_groups)

    def check_rule(self, saved: Collection[str], groups: Sequence[Options]) -> None:
        """Warn if an optimizer of another rule saved the state that is about to be loaded.

        Args:
            saved: the state names that any parameter has.
            groups: the saved options of each group.

        Raises:
            CheckpointError: this rule cannot continue from such a state.
        """
        states.check_rule(self._worker, self, saved, groups)


def _owners(optimizer: ZeroOptimizer) -> tuple[list[Engine], list[nn.Parameter]]:
    """Return the engines of the optimizer's sharded parameters, and its plain parameters."""
    return split_by_engine(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _propose_rules(optimizer: ZeroOptimizer) -> None:
    """Register the optimizer's rules with the models of its parameters."""
    for engine in _owners(optimizer)[0]:
        engine.boundary.accord.propose(optimizer._terms_for(engine))
        promise = optimizer._worker.promise(optimizer, engine)
        if promise is not None:
            engine.early.follow(promise)


def shard_in_place(
    optimizer: torch.optim.Optimizer, worker: OptimizerWorker, base: type[ZeroOptimizer] = ZeroOptimizer
) -> ZeroOptimizer:
    """Make ``optimizer`` update shards from now on, keeping its groups, defaults, hooks and attributes.

    As with FSDP2's ``fully_shard``, the object gets a new class of the same name: a subclass of ``base`` and of its
    class. So every reference to the optimizer stays valid.

    Args:
        optimizer: a torch optimizer over parameters of sharded models. Its state moves to ``worker``.
        worker: replaces the optimizer's own ``step``.
        base: the npuzero class that the new class derives from first.

    Raises:
        ConfigError: ``worker`` refuses an option, a parameter or the class, or the program has replaced a method on
            this object.
        CheckpointError: the state does not belong to these parameters. In either case the optimizer is unchanged.
    """
    cls, before = type(optimizer), {**vars(optimizer)}
    _check_replaced(optimizer)
    with _as_config_error(cls.__name__, f"an optimizer as {worker.alike}"):
        defaults = worker.defaults(optimizer.defaults)
        for group in optimizer.param_groups:
            worker.check_group(cls.__name__, {**defaults, **group})
    for options in (optimizer.defaults, *optimizer.param_groups):
        for name, value in defaults.items():
            options.setdefault(name, value)
    optimizer.__class__ = type(cls.__name__, (base, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    assert isinstance(optimizer, base)
    try:
        vars(optimizer).pop("step", None)  # a scheduler's wrapper, which counts steps of the former class
        optimizer._patch_step_function()
        optimizer._worker, optimizer._terms = worker, weakref.WeakKeyDictionary()
        optimizer.state = states.PlainParameterStates()
        if before["state"]:
            states.load_state_dict_shards(
                worker, optimizer, states.pack_state_dict(before["state"], optimizer.param_groups)
            )
        _propose_rules(optimizer)
    except Exception:
        optimizer.__class__ = cls  # type: ignore[assignment]
        vars(optimizer).clear()
        vars(optimizer).update(before)
        raise
    return optimizer


def _check_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if a method was replaced on the object: the replacement would call the former class."""
    replaced = [
        name
        for name, value in vars(optimizer).items()
        if callable(getattr(ZeroOptimizer, name, None)) and not hasattr(value, "_wrapped_by_lr_sched")
    ]
    if replaced:
        raise ConfigError(
            type(optimizer).__name__,
            expected="an optimizer whose methods are its class's",
            got=f"one whose {', '.join(replaced)} the program has replaced",
            do="Replace methods after the optimizer was prepared, or use register_step_pre_hook and its like.",
        )


def _check_capture(name: str, groups: list[Options], alike: str) -> None:
    """Raise StateError during the capture of a graph that could not be replayed."""
    of = next((parameter.device for _, parameter in states.numbered_parameters(groups)), torch.device("cpu"))
    if of.type not in devices.KINDS:
        return
    device = devices.get(of)
    if (device.replays and all(group.get("capturable") for group in groups)) or not device.capturing():
        return
    subject = f"{name}.step in the capture of a graph"
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
        do=f"Make the optimizer with capturable=True ({alike.rpartition('.')[2]} must have it).",
    )


@contextlib.contextmanager
def _as_config_error(subject: str, expected: str) -> Iterator[None]:
    """Raise torch's error about an argument as a ConfigError that is also an instance of torch's type."""
    try:
        yield
    except NpuZeroError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, RuntimeError) as error:
        do = "Correct the argument; torch's page of the class says more."
        raise config_error_as(type(error))(subject, expected=expected, got=str(error), do=do) from error
