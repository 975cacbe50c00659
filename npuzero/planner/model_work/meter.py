"""Measure the compute and the live storages of a model's units while it runs, on meta or on any device.

Liveness is observed, not modelled: autograd's graph, Python's references and a module's own order keep tensors alive on
meta exactly as on other devices. So one meter predicts (on meta) and measures (on real tensors).
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

#: Sequence numbers from here on belong to autograd nodes that no forward created: gradient accumulation.
_NO_FORWARD = 2**63


@dataclass
class UnitSpan:
    """Count one stretch of a pass that belongs to one unit.

    Attributes:
        unit, backward: the unit, and the direction.
        begin_bytes, peak_bytes, end_bytes: live bytes at its start, at their peak, and at its end.
        gradient_bytes: gradients of its parameters that are complete at its end, and alive until then.
        flops: FLOPs of matrix products.
        moved_bytes: bytes that all other kernels read and write.
        kernels: kernels launched.
    """

    unit: int
    backward: bool
    begin_bytes: int
    peak_bytes: int
    end_bytes: int
    gradient_bytes: int = 0
    flops: float = 0.0
    moved_bytes: int = 0
    kernels: int = 0


@dataclass
class LiveStorages:
    """Count the bytes of live storages, except excluded ones."""

    now_bytes: int = 0
    known: dict[int, object] = field(default_factory=dict)

    def pass_over(self, tensors: Sequence[Tensor]) -> None:
        """Skip these tensors, now and later: parameters, buffers, the batch."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.known[storage._cdata] = storage

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed; views share their base's."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.now_bytes += nbytes
            self.known[key] = weakref.ref(storage, lambda _: self._freed(key, nbytes))

    def _freed(self, key: int, nbytes: int) -> None:
        self.now_bytes -= nbytes
        self.known.pop(key, None)


class OpMeter(TorchDispatchMode):
    """Count each op that runs under it, by unit and direction.

    Args:
        modules: modules of the units, the root first.
        recompute: make each unit except the root keep only its inputs, with ``torch.utils.checkpoint``.
        around: function that makes a context for the forward of units and for their recomputation.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        recompute: bool = False,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.around = around
        self.spans: list[UnitSpan] = []
        self.live = LiveStorages()
        self._backward = False
        self._inside = [0]
        self._numbers, self._units = [0], [0]  # first sequence number of autograd nodes, and their unit
        self._last = 0
        self.live.pass_over([*modules[0].parameters(), *modules[0].buffers()])
        for i, module in enumerate(modules[1:], 1):
            _wrap_unit_forward(module, i, self, recompute)

    @contextmanager
    def inside(self, unit: int) -> Iterator[None]:
        """Count ops in the context for the unit."""
        self._enter(unit)
        try:
            yield
        finally:
            self._inside.pop()
            self._mark(self._inside[-1])

    def _enter(self, unit: int) -> None:
        self._inside.append(unit)
        self._mark(unit)

    def _mark(self, unit: int) -> None:
        if not self._backward:
            self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            self._units.append(unit)

    def backward(self, loss: Tensor, parameters: Mapping[nn.Parameter, int]) -> None:
        """Run backward; a unit's gradients stay alive until all of them are complete, as the engine packs them."""
        kept: dict[int, list[Tensor]] = {}
        missing: dict[int, int] = {}
        for unit in parameters.values():
            missing[unit] = missing.get(unit, 0) + 1

        def arrived(parameter: Tensor) -> None:
            unit = parameters[parameter]  # type: ignore[index]
            if parameter.grad is None:
                return
            kept.setdefault(unit, []).append(parameter.grad)
            parameter.grad = None
            missing[unit] -= 1
            if not missing[unit]:
                self.spans[-1].gradient_bytes += sum(g.untyped_storage().nbytes() for g in kept.pop(unit))

        hooks = [parameter.register_post_accumulate_grad_hook(arrived) for parameter in parameters]
        self._backward, self._last = True, 0
        loss.backward()
        kept.clear()
        for hook in hooks:
            hook.remove()

    def finish(self) -> list[UnitSpan]:
        """Return the spans, after all tensors of the pass are freed."""
        if self.spans:
            self.spans[-1].end_bytes = self.live.now_bytes
        return self.spans

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        span = self._span()
        kwargs = kwargs or {}
        answer = _ON_META.get(func.name()) if args and isinstance(args[0], Tensor) and args[0].is_meta else None
        out = (answer or func)(*args, **kwargs)
        tensors = _tensor_leaves(out)
        # Views and queries launch no kernel: they move no bytes and allocate no storage.
        if not _launches_nothing(func):
            span.kernels += 1
            products = _find_flops_formula(func)
            if products is not None:
                span.flops += products(*args, **kwargs, out_val=out)
            else:
                read = tensors if func.name() in _CHOOSE else _tensor_leaves((args, kwargs))
                span.moved_bytes += sum(t.numel() * t.element_size() for t in (*read, *tensors))
            for tensor in tensors:
                self.live.add(tensor)
            span.peak_bytes = max(span.peak_bytes, self.live.now_bytes)
        return out

    def _span(self) -> UnitSpan:
        """Return the span of the next op."""
        unit, now = self._unit(), self.live.now_bytes
        if not self.spans or (self.spans[-1].unit, self.spans[-1].backward) != (unit, self._backward):
            if self.spans:
                self.spans[-1].end_bytes = now
            self.spans.append(UnitSpan(unit, self._backward, now, now, now))
        return self.spans[-1]

    def _unit(self) -> int:
        if not self._backward or len(self._inside) > 1:  # recomputation counts as backward
            self._last = self._inside[-1]
            return self._last
        node = torch._C._current_autograd_node()
        # Autograd numbers nodes in the order of forward: the number of a backward node gives the unit that created it.
        number = node._sequence_nr() if node is not None else _NO_FORWARD
        if number < _NO_FORWARD:
            self._last = self._units[bisect.bisect_right(self._numbers, number) - 1]
        return self._last


def _wrap_unit_forward(module: nn.Module, unit: int, meter: OpMeter, recompute: bool) -> None:
    forward = module.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        with meter.inside(unit), meter.around():
            return forward(*args, **kwargs)

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(counted, *args, use_reentrant=False, **kwargs)

    module.forward = checkpointed if recompute else counted


def _tensor_leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@cache
def _launches_nothing(func: Any) -> bool:
    """Return whether an op launches no kernel: a view, or a query."""
    return bool(func.is_view) or func.name() in _NOTHING


#: Ops that read only as many bytes of their inputs as they write.
_CHOOSE = ("aten::embedding", "aten::index.Tensor", "aten::index_select", "aten::gather")
_QUESTION = "aten::_local_scalar_dense"
_NOTHING = ("aten::detach", _QUESTION, "aten::_unsafe_view")


def _answer_meta_read(tensor: Tensor) -> bool | int | float:
    """Answer a query of data that meta lacks: True or 0, as for one unmasked sequence per row."""
    return True if tensor.dtype is torch.bool else 0


def _grouped_out(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the result of grouped products, [rows, out] or [groups, rows, out], for all dtypes, not only bfloat16."""
    groups = [offs.shape[0]] if offs is not None and a.dim() == b.dim() == 2 else []
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


_ON_META: dict[str, Callable[..., Any]] = {_QUESTION: _answer_meta_read, "aten::_grouped_mm": _grouped_out}


@cache
def _find_flops_formula(func: Any) -> Callable[..., float] | None:
    """Return the formula for an op's FLOPs; None unless it is a matrix product."""
    name = func.name()
    if "grouped_mm" in name:
        return _grouped_backward_flops if name.endswith("backward") else _grouped_mm_flops
    if name.endswith("flash_attention_for_cpu"):
        return _attention_flops
    if name.endswith("flash_attention_for_cpu_backward"):
        return _attention_backward_flops
    formula: Callable[..., float] | None = flop_registry.get(func.overloadpacket)
    return formula


def _grouped_mm_flops(rows: Tensor, matrices: Tensor, *args: Any, **kwargs: Any) -> float:
    """Return the FLOPs of grouped products: each row is multiplied only by the matrix of its group."""
    return 2.0 * rows.numel() * matrices.shape[-1]


def _grouped_backward_flops(gradient: Tensor, rows: Tensor, matrices: Tensor, *args: Any, **kwargs: Any) -> float:
    return 2 * _grouped_mm_flops(rows, matrices)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> float:
    """Return the FLOPs of scores and of weighted values, [B, H, T, K] each, masked scores included."""
    return 2.0 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
) -> float:
    """Return twice the forward's FLOPs; the recomputation of scores in kernels is not counted."""
    return 2 * _attention_flops(query, key, value)
