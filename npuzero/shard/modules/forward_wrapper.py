"""Run an engine's hooks around a module's call, compiled or not.

torch's forward hooks run inside the code that ``module.compile()`` compiles, so Dynamo would trace the engine. The
hooks here run around it. So the graph of a module has all of its computation, and nothing else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from npuzero.shard.modules.attribute_overlay import overlay_attributes

#: Called with the module, its arguments and keyword arguments; may return others.
Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], "tuple[tuple[Any, ...], dict[str, Any]] | None"]
#: Called with the module and its output.
After = Callable[[nn.Module, Any], None]
#: Called if the call inside raised; the error is raised again.
Failed = Callable[[], None]


class ForwardHook(NamedTuple):
    """Hold the functions to run around a call. After ``before`` either ``after`` or ``failed`` runs, in every case.

    If ``after`` raises, it must have cleaned up first.
    """

    before: Before
    after: After
    failed: Failed


_REASON = "npuzero's engine gathers and releases parameters around a unit; compile the units, not what is around them"


class ForwardWrapper:
    """Run hooks around every call of a module; a hook added later runs outside of earlier ones.

    It replaces the module's ``_call_impl``, which runs the user's hooks and forward. The replacement also tells Dynamo,
    when compiled code calls the module, that a call runs more than these.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._plain: Callable[..., Any] = type(module)._call_impl
        self._compiled: Callable[..., Any] | None = module.__dict__.pop("_compiled_call_impl", None)
        self._around: list[ForwardHook] = []
        call = torch.compiler.disable(self._call, recursive=False, reason=_REASON)
        overlay_attributes(module, _call_impl=call, compile=self._compile, _npuzero_entrance=self)

    @staticmethod
    def of(module: nn.Module) -> ForwardWrapper:
        """Return the wrapper of ``module``; create it at the first call."""
        found: ForwardWrapper | None = module.__dict__.get("_npuzero_entrance")
        return found or ForwardWrapper(module)

    def add(self, visit: ForwardHook) -> None:
        """Run ``visit`` around every call, never traced by Dynamo."""
        self._around.append(ForwardHook(*(torch.compiler.disable(each, reason=_REASON) for each in visit)))

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        entered = len(self._around)
        try:
            while entered:
                entered -= 1
                args, kwargs = self._around[entered].before(module, args, kwargs) or (args, kwargs)
            output = self._plain(module, *args, **kwargs) if self._compiled is None else self._compiled(*args, **kwargs)
        except BaseException:
            for visit in self._around[entered:]:  # also the hook that raised in ``before``: it may have done a part
                visit.failed()
            raise
        left = 0
        try:
            for visit in self._around:
                left += 1
                visit.after(module, output)
        except BaseException:
            for visit in self._around[left:]:
                visit.failed()
            raise
        return output

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module inside, as ``nn.Module.compile`` does."""
        module = self._module()
        assert module is not None
        self._compiled = torch.compile(MethodType(self._plain, module), *args, **kwargs)
