"""Hooks of the engine on module calls and autograd. No other file touches either.

The order of events for a unit, in one training step::

    before forward        wait for R4 and R1; prefetch the next units
    after forward         reshard to plan.after_forward; register a hook on the outputs
    output's hook         backward reaches the unit: wait for R1 over after_forward.axes; prefetch the units before it
    parameter's hook      take the gradient out of p.grad and pass it on; a marker replaces it
    end of backward       reduce the remaining gradients; reshard to plan.between

The backward of a unit without frozen parameters ends when its last gradient has arrived. An autograd node that needs a
frozen parameter may run later, so a unit with frozen parameters also waits for the gradients of its inputs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from npuzero.comm.watchdog.hang_detector import HangDetector
from npuzero.config import explain_strict_refusal
from npuzero.errors import StateError
from npuzero.shard.layout.nested_tensors import find_nested_tensors
from npuzero.shard.modules.attribute_overlay import overlay_attributes
from npuzero.shard.modules.forward_wrapper import After, Before, ForwardHook, ForwardWrapper
from npuzero.shard.modules.sharded_tensor import GradientMarker, in_backward
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.life_cycle import ParameterState
from npuzero.shard.state.unit import Unit
from npuzero.shard.step.nan_watch import NanOriginWatcher


class HookListener(Protocol):
    """Receive the events of the hooks; implemented by ForwardBackward."""

    board: HangDetector

    def forward_begins(self, unit: Unit, inputs: Any) -> None: ...
    def forward_ends(self, unit: Unit, keep_whole: bool, backward_expected: bool) -> None: ...
    def forward_fails(self, unit: Unit) -> None: ...
    def backward_reaches(self, unit: Unit) -> None: ...
    def backward_leaves(self, unit: Unit) -> None: ...
    def gradient_arrives(self, unit: Unit, flat: FlatParameter, i: int, gradient: Tensor) -> None: ...
    def backward_ends(self) -> None: ...


class AutogradHooks:
    """Register all hooks of one model."""

    def __init__(
        self,
        events: HookListener,
        units: list[Unit],
        doors: list[nn.Module],
        input_dtype: torch.dtype | None,
        around: ForwardHook | None = None,
    ) -> None:
        self._events = events
        self._around = around
        self._input_dtype = input_dtype
        self._end_queued = False
        self._units = units
        self._finite: NanOriginWatcher | None = None
        self._finite_handles: list[RemovableHandle] = []
        for unit in units:
            self._watch(unit)
            if unit.index == 0:
                self._watch_entrances(unit, doors)
            for flat in unit.trainable:
                for i, parameter in enumerate(flat.parameters):
                    parameter.register_post_accumulate_grad_hook(self._after_adding(weakref.ref(unit), flat, i))

    def watch_finite(self, watch: NanOriginWatcher | None) -> None:
        """Report the units' outputs and the order of gradients to ``watch``; None: stop."""
        self._finite = watch
        for handle in self._finite_handles:
            handle.remove()
        self._finite_handles.clear()
        if watch is None:
            return
        for unit in self._units:
            for flat in unit.trainable:
                for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
                    self._finite_handles.append(
                        parameter.register_hook(_make_arrival_hook(weakref.ref(watch), slot.name))
                    )

    def backward_begins(self) -> None:
        """Queue a call of ``backward_ends`` for the end of autograd's present pass."""
        if not self._end_queued:
            self._end_queued = True
            Variable._execution_engine.queue_callback(_BackwardEnd(self._finish_backward, self._events.board))

    def forget_backward(self) -> None:
        """Reset after a pass that raised, which never reaches its end."""
        self._end_queued = False

    def _finish_backward(self) -> None:
        self._end_queued = False
        self._events.backward_ends()

    def _watch(self, unit: Unit) -> None:
        module = unit.module()
        assert module is not None
        visit = self._visit(unit, unit.index == 0)
        ForwardWrapper.of(module).add(_outermost_call(visit) if unit.index == 0 else visit)

    def _visit(self, unit: Unit, is_root: bool) -> ForwardHook:
        events = self._events
        return ForwardHook(
            self._before_forward(unit, is_root), self._after_forward(unit, is_root), lambda: events.forward_fails(unit)
        )

    def _watch_entrances(self, root: Unit, doors: list[nn.Module]) -> None:
        """Watch calls from outside into ``doors``, modules inside the model; ``_watch`` watches the model itself."""
        for door in doors if root.guarded else ():
            self._watch_door(root, door)
        model = root.module()
        assert model is not None
        if self._around is not None:
            for module in (model, *doors):
                ForwardWrapper.of(module).add(self._around)

    def _watch_door(self, unit: Unit, door: nn.Module) -> None:
        """Unshard ``unit`` while ``door``, a module inside it, is called from outside."""
        visit = self._visit(unit, is_root=True)
        entered = False

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal entered
            entered = unit.parameter_state is not ParameterState.WHOLE
            return visit.before(module, args, kwargs) if entered else None

        def leave(module: nn.Module, output: Any) -> None:
            if entered:
                visit.after(module, output)

        def fail() -> None:
            if entered:
                visit.failed()

        ForwardWrapper.of(door).add(ForwardHook(enter, leave, fail))

    def watch_method(self, units: list[Unit], module: nn.Module, name: str, plain: Callable[..., Any]) -> None:
        """Unshard ``units`` while the method ``name`` of ``module`` (function ``plain``) is called from outside."""
        visits = [(unit, self._visit(unit, unit.index == 0)) for unit in units]
        module_of = weakref.ref(module)

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            module = module_of()
            assert module is not None
            # Skip units that are already unsharded: they compute, or the caller is within gathered(), which reshards.
            entered = [visit for unit, visit in visits if unit.parameter_state is not ParameterState.WHOLE]
            entered[:0] = [] if self._around is None else [self._around]
            try:
                for visit in entered:
                    args, kwargs = visit.before(module, args, kwargs) or (args, kwargs)
                output = plain(module, *args, **kwargs)
            except BaseException:
                for visit in reversed(entered):
                    visit.failed()
                raise
            left = list(reversed(entered))
            try:
                while left:
                    left.pop(0).after(module, output)
            except BaseException:
                for visit in left:
                    visit.failed()
                raise
            return output

        overlay_attributes(module, **{name: call})

    def _before_forward(self, unit: Unit, is_root: bool) -> Before:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if unit.index == 0 and not in_backward():  # a backward that has not ended by now has raised
                self.forget_backward()
            self._events.forward_begins(unit, (args, kwargs))
            if unit.guarded and unit.has_frozen and torch.is_grad_enabled():
                self._watch_inputs(unit, (args, kwargs))
            if is_root and self._input_dtype is not None:
                return _cast_arguments((args, kwargs), self._input_dtype)
            return None

        return hook

    def _watch_inputs(self, unit: Unit, inputs: Any) -> None:
        for tensor in find_nested_tensors(inputs)[0]:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(lambda _: self._events.backward_leaves(unit))
                return

    def _after_forward(self, unit: Unit, is_root: bool) -> After:
        def hook(module: nn.Module, output: Any) -> None:
            try:
                expected, opaque = self._watch_outputs(unit, is_root, output)
                # Without a hook on any output (tensors hidden in an object), backward starts unannounced.
                self._events.forward_ends(unit, keep_whole=opaque and not expected, backward_expected=expected)
            except BaseException:
                self._events.forward_fails(unit)
                raise

        return hook

    def _watch_outputs(self, unit: Unit, is_root: bool, output: Any) -> tuple[bool, bool]:
        """Return whether backward is expected to reach ``output``, and whether it may hide tensors."""
        expected = opaque = False
        if torch.is_grad_enabled() and (unit.guarded or is_root or self._finite):
            tensors, opaque = find_nested_tensors(output)
            if self._finite and not in_backward():  # checkpointing's recomputation repeats outputs already seen
                self._finite.outputs(unit, tensors)
            reached = self._reached(unit)
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(reached)
                    expected = True
        return expected, opaque

    def _reached(self, unit: Unit) -> Callable[[Tensor], None]:
        """Return a hook for one forward's outputs that reports the first one reached in each backward pass."""
        last = -1

        def hook(_: Tensor) -> None:
            nonlocal last
            if last != (last := torch._C._current_graph_task_id()):
                self.backward_begins()
                self._events.backward_reaches(unit)

        return hook

    def _after_adding(self, unit_of: weakref.ref[Unit], flat: FlatParameter, i: int) -> Callable[[Tensor], None]:
        # Weak references: a parameter must not keep itself alive through its hook, which the garbage collector does
        # not traverse.
        hooks_of, flat_of, last = weakref.ref(self), weakref.ref(flat), len(flat.parameters) - 1
        arrived, marker = flat.gradient.contribution.arrived, flat.gradient.markers[i]

        def hook(parameter: Tensor) -> None:
            gradient = parameter.grad
            if 0 < len(arrived) < last and type(gradient) is Tensor:  # neither its flat's first nor its last
                arrived[i] = gradient
                parameter.grad = marker
                return
            hooks, unit, owner = hooks_of(), unit_of(), flat_of()
            if hooks is None or unit is None or owner is None or gradient is None:
                return
            if type(gradient) is GradientMarker:  # set by an earlier pass; autograd has added the gradient to it
                gradient = gradient.take_added()
            else:
                parameter.grad = None
            if gradient is not None:
                hooks.backward_begins()
                hooks._events.gradient_arrives(unit, owner, i, gradient)
                parameter.grad = marker

        return hook


class _BackwardEnd:
    """Call ``finish`` when autograd's pass ends.

    If the pass raises, autograd drops this object instead, and the hang detector is notified, without the exception,
    which is not available here.
    """

    def __init__(self, finish: Callable[[], None], board: HangDetector) -> None:
        self._finish = finish
        self._board = board
        self._done = False

    def __call__(self) -> None:
        self._finish()
        self._done = True

    def __del__(self) -> None:
        if not self._done:
            self._board.record_exit("backward", None)


def _outermost_call(visit: ForwardHook) -> ForwardHook:
    """Return the hook for the outermost call only, for a model that calls itself, as in a framework's training step."""
    depth = 0

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal depth
        depth += 1
        return visit.before(module, args, kwargs) if depth == 1 else None

    def leave(module: nn.Module, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            visit.after(module, output)

    def fail() -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            visit.failed()

    return ForwardHook(enter, leave, fail)


def second_derivative_error(unit: Unit) -> StateError:
    """Return the error for a second derivative (create_graph, torch.func) through a sharded unit."""
    by_func = torch._C._functorch.peek_interpreter_stack() is not None
    return StateError(
        f"{'torch.func' if by_func else 'backward with create_graph=True'} through unit {unit.name!r}",
        expected="first derivatives where a plan shards parameters, by backward() or torch.autograd.grad: parameters "
        "are resharded as backward leaves a unit",
        got=f"plan {unit.plan.name!r}"
        + (" and a transform of torch.func, which may differentiate again" if by_func else ""),
        do="Use a plan that keeps parameters unsharded (zero0, zero1, zero1.5, zero2)"
        + (
            "; or torch.func.functional_call over a plain model, with the tensors of npuzero.full_state_dict(model, "
            "rank0_only=False)."
            if by_func
            else " for second derivatives."
        )
        + explain_strict_refusal(unit.ranks, unit.strict),
    )


def _make_arrival_hook(watch_of: weakref.ref[NanOriginWatcher], name: str) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        watch = watch_of()
        if watch is not None:
            watch.arrives(name)

    return hook


def _cast_arguments(value: Any, dtype: torch.dtype) -> Any:
    """Convert floating tensors among (nested) arguments to the parameter dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_cast_arguments(child, dtype) for child in value)
    if type(value) is dict:
        return {key: _cast_arguments(child, dtype) for key, child in value.items()}
    return value
