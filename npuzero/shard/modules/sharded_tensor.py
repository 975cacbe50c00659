"""Guard sharded parameters and gradients: reading them raises an error.

A released parameter is a view of released memory. Reading it directly returns garbage on the host and ends the process
on an accelerator. So while its unit does not compute, a parameter has the class :class:`ShardedParameter`, which torch
calls for every operation: access to data raises a StateError, access to metadata works. While its unit computes it has
the class :class:`WatchedParameter`, which operations do not go through.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves, tree_map_only

from npuzero.comm.watchdog.call_names import find_torch_call
from npuzero.errors import StateError

_GETTERS = [
    "shape",
    "dtype",
    "device",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "ndim",
    "layout",
    "is_sparse",
    "names",
    "is_cuda",
    "is_meta",
    "is_quantized",
    "is_nested",
    "itemsize",
    "nbytes",
    "_version",
    "output_nr",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "is_cpu",
    "is_mkldnn",
    "is_xla",
    "is_mps",
    "is_xpu",
    "retains_grad",
    "grad_dtype",
]
_METHODS = [
    "size",
    "dim",
    "numel",
    "nelement",
    "ndimension",
    "stride",
    "element_size",
    "storage_offset",
    "get_device",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "requires_grad_",
    "register_hook",
    "__hash__",
    "__len__",
    "register_post_accumulate_grad_hook",
    "is_inference",
    "is_signed",
    "type",
    "is_shared",
    "has_names",
]


def _metadata_functions() -> frozenset[Any]:
    """Return the operations that need no data, in the form that ``__torch_function__`` receives."""
    attributes = vars(torch._C.TensorBase) | vars(Tensor)
    grad, requires_grad = attributes["grad"], attributes["requires_grad"]
    found = [attributes[name].__get__ for name in _GETTERS if name in attributes]
    found += [grad.__get__, grad.__set__, grad.__delete__, requires_grad.__set__]
    found += [getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)]
    found += [torch.numel, torch.is_floating_point, torch.is_complex, torch.autograd.grad, torch.autograd.backward]
    found += [torch._has_compatible_shallow_copy_type]
    return frozenset(found)


_METADATA = _metadata_functions()
_DATA = vars(torch._C.TensorBase)["data"]
_REPR = (Tensor.__repr__, Tensor.__format__)
# Functions that read data without an operation that ``__torch_dispatch__`` would see.
_VALUES = (Tensor.numpy, Tensor.tolist, Tensor.__reduce_ex__)
_READS = (*_VALUES, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage)


# The operation of torch.amp.GradScaler on gradients.
_UNSCALING = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_SCALER = "npuzero.LossScaler(), which has the calls of torch.amp.GradScaler"
#: The replacement, in error texts, for optimizers and clipping functions of plain torch.
INSTEAD = "npuzero.AdamW or npuzero.ZeroOptimizer(YourOptimizer, ...), and npuzero.clip_grad_norm_(model, n)"
# With create_graph=True autograd does not add in place.
_ADDITIONS = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)


def in_backward() -> bool:
    """Return whether the caller runs inside autograd's engine (a hook, or a recomputed checkpointed forward)."""
    return torch._C._current_graph_task_id() != -1


def is_engine_parameter(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a parameter of an engine."""
    return "_npuzero_engine" in tensor.__dict__


class ShardedParameter(nn.Parameter):
    """Guard a parameter: its class while its data must not be read. See the module's docstring."""

    # Set on each guarded parameter: makes the data readable, or raises a StateError.
    _npuzero_open: Callable[[], None]
    # The class of the parameter when not guarded.
    _npuzero_class: type[nn.Parameter] = nn.Parameter

    def as_subclass(self, cls: type[Tensor]) -> Any:
        """Open the parameter first: torch calls no ``__torch_function__`` here, and the result has no guard."""
        self._npuzero_open()
        return super().as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _REPR:
            self = args[0]
            with torch._C.DisableTorchFunctionSubclass():
                facts = f"shape={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad}"
                return f"ShardedParameter({facts})"
        if func is Tensor.detach and "_npuzero_given" in args[0].__dict__:
            return args[0].__dict__["_npuzero_given"]
        if func not in _METADATA:
            if _assigns_own_data(func, args):
                return None
            for tensor in _find_guarded((*args, *kwargs.values())):
                tensor._npuzero_open()
        if func == _DATA.__get__:  # now open, maybe of the class WatchedParameter: use its getter, not torch's
            return args[0].data
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _assigns_own_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether this is ``t.data = t``, as ``Module._apply`` does if nothing changes."""
    return bool(func == _DATA.__set__ and args[0] is args[1])


def _find_guarded(values: Any) -> list[ShardedParameter]:
    found = []
    for value in values:
        if isinstance(value, ShardedParameter):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(_find_guarded(value))
    return found


class WatchedParameter(nn.Parameter):
    """Watch writes into a parameter: its class while its data may be read.

    torch counts writes into a tensor (``_version``), but not those through ``p.data``, which returns a new alias with a
    separate count each time. Here all aliases share one count, that of the alias in ``_npuzero_aliases``.
    """

    # Set on each watched parameter: the dict that keeps its alias, and its key there.
    _npuzero_aliases: tuple[dict[int, Tensor], int]
    _npuzero_class: type[nn.Parameter] = nn.Parameter

    @property
    def data(self) -> Tensor:
        aliases, i = self._npuzero_aliases
        if i not in aliases:
            aliases[i] = _DATA.__get__(self)
        return aliases[i].detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is self:
            return
        self._npuzero_aliases[0].pop(self._npuzero_aliases[1], None)
        _DATA.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the parameter's original class, which no engine owns."""
        copied = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        copied.__class__ = self._npuzero_class
        return copied


def guard_parameter(parameter: nn.Parameter) -> None:
    """Guard ``parameter``, which may be of a subclass that the user defined."""
    if not issubclass(type(parameter), ShardedParameter):
        parameter.__class__ = _make_role_class(ShardedParameter, _unguarded_class(parameter))


def watch_parameter(parameter: nn.Parameter) -> None:
    """Open ``parameter`` to reads, and watch writes into it."""
    kind = type(parameter)
    if not issubclass(kind, WatchedParameter):
        parameter.__class__ = _make_role_class(WatchedParameter, _unguarded_class(parameter))


def _unguarded_class(parameter: nn.Parameter) -> type[nn.Parameter]:
    """Return the class of a parameter while it is neither guarded nor watched."""
    return getattr(type(parameter), "_npuzero_class", type(parameter))


@functools.cache
def _make_role_class(role: type[nn.Parameter], kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the subclass of ``kind`` for a role: guarded, or watched."""
    if kind is nn.Parameter:
        return role
    name = role.__name__.removesuffix("Parameter") + kind.__name__
    return types.new_class(name, (role, kind), {}, lambda body: body.update(_npuzero_class=kind))


class GradientMarker(Tensor):
    """Mark in ``p.grad`` that a gradient exists in the engine's flat buffers.

    It has the parameter's shape, dtype and device but no data: an operation on it raises, so that a plain optimizer or
    ``torch.nn.utils.clip_grad_norm_`` names its replacement instead of doing nothing. Setting ``p.grad = None``, as
    ``zero_grad`` does, drops the gradient, as in torch.

    If the plan keeps gradients unsharded and the ranks have summed this one, it can be read: an operation that writes
    nothing gets a copy.

    If another backward pass finds the marker in ``p.grad``, autograd adds to it. The marker then keeps the summand for
    :meth:`take_added`.

    ``p.grad.zero_()``, as called by ``zero_grad(set_to_none=False)``, makes the gradient zeros: the next step updates
    the parameter by them, as in torch.
    """

    #: Returns the gradient, or raises a StateError with the reason and the remedy.
    whole: Callable[[], Tensor]
    #: The parameter's name, and the plan that shards the gradient; "" if the plan keeps it unsharded.
    name: str = "a parameter"
    sharded_by: str = ""
    _added: Tensor | None
    #: Zeroes the gradient. It has no reference to a parameter, even a weak one: torch.utils.swap_tensors refuses that.
    _zero: Callable[[], None]

    @staticmethod
    def __new__(cls, parameter: Tensor, zero: Callable[[], None]) -> GradientMarker:
        shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
        marker: GradientMarker = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        marker._added, marker._zero = None, zero
        return marker

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _assigns_own_data(func, args):
            return None
        # While it compiles, Dynamo queries the storage size of gradients, without reading them.
        described = func is Tensor.untyped_storage and TracingContext.try_get() is not None
        if func in _VALUES:
            return func(args[0]._read(), *args[1:], **(kwargs or {}))
        if func in _READS and not described:
            raise args[0]._unreadable(f"Tensor.{func.__name__}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:  # called by p.grad.detach_() and zero_grad(set_to_none=False)
            return args[0]
        if func in _ADDITIONS and in_backward() and isinstance(args[0], cls):
            args[0]._added = args[1]
            return args[0]
        if func is torch.ops.aten.zero_.default:
            args[0]._zero()
            return args[0]
        if func._schema.is_mutable:
            marker = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
            name = func._schema.name.removeprefix("aten::")
            raise marker._unreadable(f"Tensor.{name}", _SCALER if func is _UNSCALING else INSTEAD)
        args, kwargs = tree_map_only(cls, cls._read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _read(self) -> Tensor:
        """Return a copy of the gradient, in the parameter's dtype."""
        return self.whole().to(self.dtype)

    def take_added(self) -> Tensor | None:
        """Return the gradient that autograd added since the last call; None if there is none."""
        added, self._added = self._added, None
        return added

    def _unreadable(self, operation: str, instead: str = INSTEAD) -> StateError:
        call, line = find_torch_call()
        why = "the engine keeps this gradient in a buffer of its own, and would not see what is written into p.grad"
        if self.sharded_by:
            why = f"plan {self.sharded_by!r} leaves each rank a shard of this gradient, and no rank has it unsharded"
        return StateError(
            f"{call or operation} on the gradient of {self.name}" + (line and f", called at {line}"),
            expected="npuzero's optimizers and npuzero.clip_grad_norm_ on a model made by npuzero.zero()",
            got=f"a plain torch operation: {why}",
            do=f"Use {instead}.",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientMarker(shape={tuple(self.shape)}, dtype={self.dtype})"
