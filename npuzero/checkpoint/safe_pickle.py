"""Reading pickles that anybody may have written, or broken: only named classes, only harmless opcodes."""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

#: Opcodes that build numbers, texts, containers and objects of the classes that are let in. Left out are those that
#: allocate what they announce before it is there, index a memo by a number of the file's, or reach extensions.
_OPCODES = frozenset(
    """
    MARK STOP POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINBYTES BINBYTES
    SHORT_BINUNICODE BINUNICODE BINUNICODE8 EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_DICT DICT SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET PROTO FRAME MEMOIZE BINPUT LONG_BINPUT BINGET
    LONG_BINGET GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID
    """.split()  # noqa: SIM905
)


class Refused(pickle.UnpicklingError):
    """The pickle wants something that is not let in."""


class _Restricted:
    """Lets in what it is told to, and nothing else."""

    allowed: Mapping[tuple[str, str], Any]
    persistent: Callable[[Any], Any] | None

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.allowed[module, name]
        except KeyError:
            raise Refused(f"{module}.{name} is not let in") from None

    def persistent_load(self, pid: Any) -> Any:
        if self.persistent is None:
            raise Refused("a persistent id")
        return self.persistent(pid)


class _Quick(_Restricted, pickle.Unpickler):
    """Python's own in C."""


class _Careful(_Restricted, pickle._Unpickler):
    """Python's own in Python: its memo is a dict, so that no number in a broken file becomes an allocation."""

    dispatch = {  # noqa: RUF012
        code: function
        for code, function in pickle._Unpickler.dispatch.items()
        if code in {getattr(pickle, name)[0] for name in _OPCODES}
    }


def loads(
    raw: bytes,
    allowed: Mapping[tuple[str, str], Any],
    persistent: Callable[[Any], Any] | None = None,
    *,
    intact: bool = False,
) -> Any:
    """The object that ``raw`` pickles, built of nothing but containers, numbers, texts and what ``allowed`` names.

    Args:
        allowed: what stands for each (module, name) that the pickle may ask for.
        persistent: makes an object of a persistent id.
        intact: a checksum says that no byte has changed since it was written: then it is read three times as fast.

    Raises:
        Refused: it wants something else, or is no pickle.
    """
    unpickler = (_Quick if intact else _Careful)(io.BytesIO(raw))
    unpickler.allowed, unpickler.persistent = allowed, persistent
    try:
        return unpickler.load()
    except Refused:
        raise
    except Exception as error:  # whatever broken bytes lead to: they are no pickle
        raise Refused(f"{type(error).__name__}: {error}") from error


def member(kind: Any, name: Any) -> Any:
    """Stands for ``getattr`` where a pickle names a member of an enum."""
    if not (isinstance(kind, enum.EnumMeta) and isinstance(name, str)):
        raise Refused("getattr of what is no enum")
    return kind[name]
