"""Reading pickles that anybody may have written, or broken: a machine of its own, which does less than Python's.

It knows the opcodes that ``pickle.dump`` writes for what a checkpoint describes, and of the world outside what it is
given: functions, dataclasses, constants. Nothing on its stack can be called or changed but by these rules, so that what
is refused has done nothing; and everything is checked before it takes memory or time, so that what a pickle makes stays
within a fixed multiple of its length.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any


class Refused(pickle.UnpicklingError):
    """The pickle wants something that is not let in."""


@dataclass(frozen=True)
class Function:
    """What a pickle may call: it checks what it is given, and gives nothing much larger than that."""

    call: Callable[..., Any]


class Kind:
    """A dataclass that a pickle may make instances of.

    Args:
        made: the class; an instance is made without calling anything of it.
        types: what each of its fields may be; no entry: anything.
        ordered: whether the state is a tuple of the fields, which the class's ``__setstate__`` takes, and no dict.
        key: whether an instance may be a key of a dict: it must hash quickly, however it was made.
    """

    def __init__(self, made: type, *, ordered: bool = False, key: bool = False, **types: tuple[type, ...]) -> None:
        self.made, self.types, self.ordered, self.key = made, types, ordered, key
        self.fields = [field.name for field in fields(made)]
        self.needed = {
            field.name for field in fields(made) if field.default is MISSING and field.default_factory is MISSING
        }

    def build(self, instance: Any, state: Any) -> None:
        """Give an instance its state, once.

        Raises:
            Refused: it has one, or this is none.
        """
        if self.ordered:
            if type(state) is not tuple or len(state) != len(self.fields):
                raise Refused(f"a state of {self.made.__name__} that is no tuple of {len(self.fields)}")
            values: dict[str, Any] = dict(zip(self.fields, state, strict=True))
        else:
            values = state
        if instance.__dict__ or type(values) is not dict:
            raise Refused(f"a state of {self.made.__name__} that is a second one, or no dict")
        known = 0
        for name in self.fields:
            if name in values:
                known += 1
                types = self.types.get(name)
                if types is not None and type(values[name]) not in types:
                    raise Refused(f"{self.made.__name__}.{name} of type {type(values[name]).__name__}")
            elif name in self.needed:
                raise Refused(f"{self.made.__name__} without {name}")
        if known != len(values):
            raise Refused(f"fields that {self.made.__name__} does not have")
        if self.ordered:
            instance.__setstate__(state)
        else:
            instance.__dict__.update(values)


#: More containers within containers, and more arguments of a call, than any checkpoint has.
_MARKS = _ARGUMENTS = 256


class _Machine:
    """One pickle being read. A method for each opcode; the loop does the most frequent ones itself."""

    def __init__(
        self, raw: bytes, allowed: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any] | None
    ) -> None:
        self._raw = raw
        self._at = 0
        self._allowed = allowed
        self._persistent = persistent
        self._kinds = {kind.made: kind for kind in allowed.values() if isinstance(kind, Kind)}
        self._keys = {str, *(kind.made for kind in self._kinds.values() if kind.key)}
        self._stack: list[Any] = []  # of the values after the last mark
        self._before: list[list[Any]] = []  # the stacks before each mark
        self._memo: list[Any] = []

    def run(self) -> Any:
        """The object."""
        raw, memo, steps = self._raw, self._memo, _STEPS
        while True:
            code = raw[self._at]
            self._at += 1
            if code == 0x94:  # MEMOIZE
                memo.append(self._stack[-1])
            elif code == 0x68:  # BINGET
                self._stack.append(memo[raw[self._at]])
                self._at += 1
            elif code == 0x6A:  # LONG_BINGET
                self._stack.append(memo[self._count(4)])
            elif code == 0x2E:  # STOP
                return self._stack.pop()
            else:
                step = steps.get(code)
                if step is None:
                    raise Refused(f"opcode {code:#04x} at byte {self._at - 1}")
                step(self)

    def mark(self) -> None:
        if len(self._before) == _MARKS:
            raise Refused(f"more than {_MARKS} marks")
        self._before.append(self._stack)
        self._stack = []

    def _pop_to_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._before.pop()
        return items

    # -- numbers, texts, constants -------------------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        """The next bytes."""
        begin = self._at
        self._at = end = begin + count
        if end > len(self._raw):
            raise Refused(f"{count} bytes announced, {len(self._raw) - begin} there")
        return self._raw[begin:end]

    def _count(self, width: int) -> int:
        begin = self._at
        self._at = end = begin + width
        return int.from_bytes(self._raw[begin:end], "little")

    def _line(self) -> str:
        end = self._raw.index(b"\n", self._at)
        line = self._raw[self._at : end]
        self._at = end + 1
        return line.decode()

    def integer(self, width: int) -> None:
        self._stack.append(self._count(width))

    def signed(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def long(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._count(1)), "little", signed=True))

    def real(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def text(self, width: int) -> None:
        self._stack.append(self._take(self._count(width)).decode())

    def constant(self, value: object) -> None:
        self._stack.append(value)

    def protocol(self) -> None:
        if self._count(1) > pickle.HIGHEST_PROTOCOL:
            raise Refused("a later protocol of pickle")

    def frame(self) -> None:
        self._take(8)

    # -- the memo ------------------------------------------------------------------------------------------------------

    def put(self, width: int) -> None:
        """Numbers that come in order, as picklers give them: none is an allocation."""
        if self._count(width) != len(self._memo):
            raise Refused("a memo out of order")
        self._memo.append(self._stack[-1])

    # -- containers ----------------------------------------------------------------------------------------------------

    def empty(self, kind: type) -> None:
        self._stack.append(kind())

    def tuple_of(self, count: int) -> None:
        if count > len(self._stack):
            raise Refused("a tuple of values that are not there")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def tuple_to_mark(self) -> None:
        made = tuple(self._pop_to_mark())
        self._stack.append(made)

    def append(self) -> None:
        self._extend([self._stack.pop()])

    def appends(self) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise Refused(f"something appended to a {type(self._stack[-1]).__name__}")
        self._stack[-1].extend(items)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def set_items(self) -> None:
        self._update(self._pop_to_mark())

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise Refused(f"items set in a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in self._keys:  # others may take long to hash, or for ever
                raise Refused(f"a key that is a {type(key).__name__}")
            target[key] = value

    # -- what is let in ------------------------------------------------------------------------------------------------

    def _find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str or (module, name) not in self._allowed:
            raise Refused(f"{str(module)[:80]}.{str(name)[:80]} is not let in")
        self._stack.append(self._allowed[module, name])

    def find(self) -> None:
        module = self._line()
        self._find(module, self._line())

    def find_on_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._find(module, name)

    def reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(function) is not Function or type(arguments) is not tuple or len(arguments) > _ARGUMENTS:
            raise Refused(f"a call of a {type(function).__name__}")
        self._stack.append(function.call(*arguments))

    def new(self) -> None:
        arguments, kind = self._stack.pop(), self._stack.pop()
        if type(kind) is not Kind or type(arguments) is not tuple or arguments:
            raise Refused(f"an instance of a {type(kind).__name__}")
        self._stack.append(object.__new__(kind.made))

    def build(self) -> None:
        state, instance = self._stack.pop(), self._stack[-1]
        kind = self._kinds.get(type(instance))
        if kind is None:
            raise Refused(f"a state of a {type(instance).__name__}")
        kind.build(instance, state)

    def persist(self) -> None:
        if self._persistent is None:
            raise Refused("a persistent id")
        self._stack.append(self._persistent(self._stack.pop()))


def _with(step: Callable[[_Machine, Any], None], argument: Any) -> Callable[[_Machine], None]:
    return lambda machine: step(machine, argument)


_NAMED: dict[str, Callable[[_Machine], None]] = {
    "PROTO": _Machine.protocol,
    "FRAME": _Machine.frame,
    "MARK": _Machine.mark,
    "NONE": _with(_Machine.constant, None),
    "NEWTRUE": _with(_Machine.constant, True),
    "NEWFALSE": _with(_Machine.constant, False),
    "BININT": _Machine.signed,
    "BININT1": _with(_Machine.integer, 1),
    "BININT2": _with(_Machine.integer, 2),
    "LONG1": _Machine.long,
    "BINFLOAT": _Machine.real,
    "SHORT_BINUNICODE": _with(_Machine.text, 1),
    "BINUNICODE": _with(_Machine.text, 4),
    "BINUNICODE8": _with(_Machine.text, 8),
    "EMPTY_LIST": _with(_Machine.empty, list),
    "EMPTY_DICT": _with(_Machine.empty, dict),
    "EMPTY_TUPLE": _with(_Machine.constant, ()),
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "TUPLE": _Machine.tuple_to_mark,
    "TUPLE1": _with(_Machine.tuple_of, 1),
    "TUPLE2": _with(_Machine.tuple_of, 2),
    "TUPLE3": _with(_Machine.tuple_of, 3),
    "BINPUT": _with(_Machine.put, 1),
    "LONG_BINPUT": _with(_Machine.put, 4),
    "GLOBAL": _Machine.find,
    "STACK_GLOBAL": _Machine.find_on_stack,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.new,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persist,
}
_STEPS = {getattr(pickle, name)[0]: step for name, step in _NAMED.items()}


def loads(raw: bytes, allowed: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any] | None = None) -> Any:
    """The object that ``raw`` pickles, built of nothing but containers, numbers, texts and what ``allowed`` names.

    Args:
        allowed: what stands for each (module, name) that the pickle may ask for: a :class:`Function`, a
            :class:`Kind`, or a constant.
        persistent: makes an object of a persistent id, whatever that is.

    Raises:
        Refused: it wants something else, or is no pickle.
    """
    try:
        return _Machine(raw, allowed, persistent).run()
    except Refused:
        raise
    except Exception as error:  # whatever broken bytes lead to: they are no pickle
        raise Refused(f"{type(error).__name__}: {error}"[:200]) from error
