"""Collective calls by the names that programs know them by: where a rank is, in the user's words.

A function says its name where it is defined, which costs its calls nothing. Whoever waits, or raises, looks for names
among the frames of its thread.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: The calls that every step consists of. What a rank calls beside them is what the others have left out.
STEP = ("forward", "backward", "optimizer.step")

#: Where frames are not the user's: this package, Python's own and what is installed there, torch.
_FOREIGN = (
    *(str(Path(file).parent) + os.sep for file in (str(Path(__file__).parent), threading.__file__, torch.__file__)),
    "<",
)

_names: dict[CodeType, str] = {}


class Place(NamedTuple):
    """Say where a thread is: within ``call``, a collective by its name, and at ``line`` of the user's code."""

    call: str = ""
    line: str = ""


def collective(name: str) -> Callable[[_Function], _Function]:
    """Let errors of ranks that wait for each other speak of a function as ``name``; the function stays what it is."""

    def register(function: _Function) -> _Function:
        _names[inspect.unwrap(function).__code__] = name
        return function

    return register


def here() -> Place:
    """Return where the calling thread is: the outermost collective that the user's innermost frame called, if any."""
    frame: FrameType | None = sys._getframe(1)
    call = ""
    while frame is not None and frame.f_code.co_filename.startswith(_FOREIGN):
        call = _names.get(frame.f_code, call)
        frame = frame.f_back
    return Place(call, "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")


def subject(operation: str, rank: int) -> str:
    """Return what an error of ``rank`` in ``operation`` is about: the user's call, where the thread is within one."""
    call = here().call
    return f"{call} on rank {rank}, in {operation}" if call else f"{operation} on rank {rank}"
