"""A step captured once and run again: by a graph where there is a GPU, by a recording of operations on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npuzero import _native
from npuzero.memory import TransientBuffer

_LAUNCHES = ("flat_adam", "pack", "norm", "cast")


def capture_step(step: Callable[[], None], device: torch.device, warm_up: int = 3) -> Callable[[], None]:
    """Runs ``step`` a few times, captures it once more without running it, and returns what runs it again."""
    if device.type == "cpu":
        for _ in range(warm_up):
            step()
        return _StepRecording(step).replay
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class _StepRecording(TorchDispatchMode):
    """What a graph is: operations with the numbers they had, on the memory they had. To record a step is to take it."""

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__()
        self._calls: list[Callable[[], None]] = []
        with pytest.MonkeyPatch.context() as patch:
            for name in _LAUNCHES:
                patch.setattr(_native, name, self._recorded(getattr(_native, name)))
            for name in ("restore", "release"):  # memory that a graph has to itself comes and goes here
                patch.setattr(TransientBuffer, name, self._recorded(getattr(TransientBuffer, name)))
            with self:
                step()

    @torch.no_grad()
    def replay(self) -> None:
        for call in self._calls:
            call()

    def _recorded(self, launch: Any) -> Any:
        def recorded(*arguments: Any) -> None:
            self._calls.append(lambda: launch(*arguments))
            launch(*arguments)

        return recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if func.namespace != "profiler":
            self._calls.append(lambda: _replay_operation(func, args, kwargs, tree_leaves(results)))
        return results


def _replay_operation(func: Any, args: Any, kwargs: Any, results: list[Any]) -> None:
    """The results land where they landed the first time."""
    for value, place in zip(tree_leaves(func(*args, **kwargs)), results, strict=True):
        if isinstance(place, Tensor) and value.data_ptr() != place.data_ptr():
            place.copy_(value)
