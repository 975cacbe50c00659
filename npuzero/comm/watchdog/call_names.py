"""Name collective calls in the user's words, to report where a rank is.

Functions are named at their definition, at no cost per call. A wait or an error searches the frames of its thread for
names.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: The calls of every step. A call of some ranks that is not among these was missed by the remaining ranks.
STEP = ("forward", "backward", "optimizer.step")

#: Prefixes of frames that are not the user's: this package, Python and its packages, torch.
_FOREIGN = (
    *(str(Path(file).parent) + os.sep for file in (str(Path(__file__).parents[1]), threading.__file__, torch.__file__)),
    "<",
)

_TORCH = str(Path(torch.__file__).parent) + os.sep
# Wrappers in torch around the called function.
_WRAPPERS = {"wrapper", "decorate_context", "inner", "fn", "nonrecursive_disable_wrapper"}
_WALKS = str(Path("utils", "_pytree.py"))  # used by this package to look into arguments

_names: dict[CodeType, str] = {}
_thread = threading.local()


class CallSite(NamedTuple):
    """Locate a thread: within ``call``, a collective by its name, and at ``line`` of the user's code."""

    call: str = ""
    line: str = ""


class ExitRecorder(Protocol):
    """Record the last call that a rank left by an exception; implemented by the status board."""

    def record_exit(self, call: str, error: BaseException | None) -> None:
        """Record that this rank has left ``call`` by ``error``."""

    def clear_exit(self) -> None:
        """Clear the record: this rank calls again."""


def named_call(name: str) -> Callable[[_Function], _Function]:
    """Name a function for errors of ranks that wait for each other; the function is not changed."""

    def register(function: _Function) -> _Function:
        _names[inspect.unwrap(function).__code__] = name
        return function

    return register


def collective_call(name: str) -> Callable[[_Function], _Function]:
    """Name a public collective call as :func:`named_call` does, and record the exceptions that leave it.

    This adds a wrapper. Hooks, called many times per step, use ``named_call`` alone: their engine records for them.
    """
    exits = _ExitRecording(name)

    def wrap(function: _Function) -> _Function:
        named_call(name)(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with exits:
                return function(*args, **kwargs)

        @functools.wraps(function)
        def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with exits:
                return (yield from function(*args, **kwargs))

        return cast("_Function", generate if inspect.isgeneratorfunction(function) else call)

    return wrap


class _ExitRecording(AbstractContextManager[None]):
    """Record exceptions that leave the call ``name``, if the calling thread uses a world."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        recorder = _get_exit_recorder()
        if recorder is not None:
            recorder.clear_exit()

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        recorder = _get_exit_recorder()
        if recorder is not None and error is not None:
            recorder.record_exit(self._name, error)


def record_exits(recorder: ExitRecorder) -> None:
    """Make ``recorder`` record the collective calls that the calling thread leaves by an exception."""
    _thread.recorder = recorder


def _get_exit_recorder() -> ExitRecorder | None:
    recorder: ExitRecorder | None = getattr(_thread, "recorder", None)
    return recorder


def set_failure(text: str) -> None:
    """Set the exception to add to errors of ranks that wait for the calling thread; ``""``: none."""
    _thread.failure = text


def find_call_site() -> CallSite:
    """Return the calling thread's place: the outermost collective that the user's innermost frame called, if any."""
    frame: FrameType | None = sys._getframe(1)
    call = ""
    while frame is not None and frame.f_code.co_filename.startswith(_FOREIGN):
        call = _names.get(frame.f_code, call)
        frame = frame.f_back
    failure = getattr(_thread, "failure", "")
    return CallSite(call, _format_frame_line(frame) + (failure and f", after it raised {failure},"))


def find_torch_call() -> CallSite:
    """Return the function of torch that the user's innermost frame called, "" if none, and that frame's line.

    Examples: ``torch.optim.AdamW.step``, ``clip_grad_norm_``. An operator's name alone would tell the user little.
    """
    frame: FrameType | None = sys._getframe(1)
    call = ""
    while frame is not None and frame.f_code.co_filename.startswith(_FOREIGN):
        code = frame.f_code
        name = code.co_name
        helper = name.startswith("_") or name in _WRAPPERS or code.co_filename.endswith(_WALKS)
        public = name == "__init__" or not helper
        if public and code.co_filename.startswith(_TORCH):
            call = f"{_format_class_prefix(frame.f_locals.get('self'))}{name}".removesuffix(".__init__")
        frame = frame.f_back
    return CallSite(call, _format_frame_line(frame))


def _format_class_prefix(owner: object) -> str:
    """Return the class name of a method's object as a prefix: with the package for torch's classes; "" for None."""
    if owner is None or isinstance(owner, torch.Tensor):
        return "" if owner is None else "Tensor."
    home, _, rest = type(owner).__module__.partition(".")
    package = f"{home}.{rest.partition('.')[0]}." if home == "torch" and rest else ""
    return f"{package}{type(owner).__name__}."


def _format_frame_line(frame: FrameType | None) -> str:
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def error_subject(operation: str, rank: int) -> str:
    """Return the subject of an error of ``rank`` in ``operation``, with the user's call if the thread is in one."""
    call = find_call_site().call
    return f"{call} on rank {rank}, in {operation}" if call else f"{operation} on rank {rank}"
