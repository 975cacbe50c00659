"""Read untrusted or damaged pickles with a pickle machine that does less than Python's.

It has the opcodes that ``pickle.dump`` writes for a checkpoint's metadata, and reaches only the functions, dataclasses
and constants that the caller allows. Objects on its stack are called or changed by these rules alone, so a refused
pickle has had no effect. All checks come before memory or time is spent: the result is at most a fixed multiple of the
pickle's length.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any


class PickleRefused(pickle.UnpicklingError):
    """Report that the pickle needs something that is not allowed."""


@dataclass(frozen=True)
class PickleFunction:
    """Name a function that a pickle may call; it checks its arguments, and returns nothing much larger than these."""

    call: Callable[..., Any]


class PickleDataclass:
    """Name a dataclass that a pickle may make instances of.

    Args:
        made: the class; instances are made without calling any of its code.
        types: allowed types of each field; no entry: any type.
        ordered: whether the state is a tuple of the fields for the class's ``__setstate__``, instead of a dict.
        key: whether an instance may be a key of a dict: it must hash quickly for any state.
    """

    def __init__(self, made: type, *, ordered: bool = False, key: bool = False, **types: tuple[type, ...]) -> None:
        self.made, self.types, self.ordered, self.key = made, types, ordered, key
        self.fields = [field.name for field in fields(made)]
        self.needed = {
            field.name for field in fields(made) if field.default is MISSING and field.default_factory is MISSING
        }

    def build(self, instance: Any, state: Any) -> None:
        """Set the state of an instance, once.

        Raises:
            PickleRefused: it has a state, or ``state`` is not valid.
        """
        if self.ordered:
            if type(state) is not tuple or len(state) != len(self.fields):
                raise PickleRefused(f"a state of {self.made.__name__} that is no tuple of {len(self.fields)}")
            values: dict[str, Any] = dict(zip(self.fields, state, strict=True))
        else:
            values = state
        # Once: the instance may have become a key of a dict, and a second state would change its hash.
        if instance.__dict__ or type(values) is not dict:
            raise PickleRefused(f"a state of {self.made.__name__} that is a second one, or no dict")
        known = 0
        for name in self.fields:
            if name in values:
                known += 1
                types = self.types.get(name)
                if types is not None and type(values[name]) not in types:
                    raise PickleRefused(f"{self.made.__name__}.{name} of type {type(values[name]).__name__}")
            elif name in self.needed:
                raise PickleRefused(f"{self.made.__name__} without {name}")
        if known != len(values):
            raise PickleRefused(f"fields that {self.made.__name__} does not have")
        if self.ordered:
            instance.__setstate__(state)
        else:
            instance.__dict__.update(values)


#: Upper bounds of nested containers and of arguments of a call, above those of any checkpoint.
_MARKS = _ARGUMENTS = 256


class _PickleMachine:
    """Run one pickle: its bytes, the stack, the memo, and the loop over opcodes; each opcode is a function below."""

    def __init__(
        self, raw: bytes, allowed: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any] | None
    ) -> None:
        self._raw = raw
        self._at = 0
        self._allowed = allowed
        self.persistent = persistent
        self.kinds = {kind.made: kind for kind in allowed.values() if isinstance(kind, PickleDataclass)}
        self.keys = {str, *(kind.made for kind in self.kinds.values() if kind.key)}
        self.stack: list[Any] = []  # values after the last mark
        self._before: list[list[Any]] = []  # the stacks before each mark
        self.memo: list[Any] = []

    def run(self) -> Any:
        """Return the object."""
        raw, memo, steps = self._raw, self.memo, _STEPS
        while True:
            code = raw[self._at]
            self._at += 1
            # The most frequent opcodes are inlined.
            if code == 0x94:  # MEMOIZE
                memo.append(self.stack[-1])
            elif code == 0x68:  # BINGET
                self.stack.append(memo[raw[self._at]])
                self._at += 1
            elif code == 0x6A:  # LONG_BINGET
                self.stack.append(memo[self.count(4)])
            elif code == 0x2E:  # STOP
                return self.stack.pop()
            else:
                step = steps.get(code)
                if step is None:
                    raise PickleRefused(f"opcode {code:#04x} at byte {self._at - 1}")
                step(self)

    def mark(self) -> None:
        if len(self._before) == _MARKS:
            raise PickleRefused(f"more than {_MARKS} marks")
        self._before.append(self.stack)
        self.stack = []

    def pop_to_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self._before.pop()
        return items

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        begin = self._at
        self._at = end = begin + count
        if end > len(self._raw):
            raise PickleRefused(f"{count} bytes announced, {len(self._raw) - begin} there")
        return self._raw[begin:end]

    def count(self, width: int) -> int:
        """Return the next number; at the end of the bytes a smaller one, and the next read fails."""
        begin = self._at
        self._at = end = begin + width
        return int.from_bytes(self._raw[begin:end], "little")

    def line(self) -> str:
        end = self._raw.index(b"\n", self._at)
        line = self._raw[self._at : end]
        self._at = end + 1
        return line.decode()

    def find(self, module: Any, name: Any) -> None:
        """Push the object that is allowed for a global name."""
        if type(module) is not str or type(name) is not str or (module, name) not in self._allowed:
            raise PickleRefused(f"{str(module)[:80]}.{str(name)[:80]} is not let in")
        self.stack.append(self._allowed[module, name])


_Step = Callable[[_PickleMachine], None]

# -- numbers, texts, constants -----------------------------------------------------------------------------------------


def _push_integer(width: int) -> _Step:
    return lambda machine: machine.stack.append(machine.count(width))


def _push_signed(machine: _PickleMachine) -> None:
    machine.stack.append(int.from_bytes(machine.take(4), "little", signed=True))


def _push_long(machine: _PickleMachine) -> None:
    machine.stack.append(int.from_bytes(machine.take(machine.count(1)), "little", signed=True))


def _push_float(machine: _PickleMachine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


def _push_text(width: int) -> _Step:
    return lambda machine: machine.stack.append(machine.take(machine.count(width)).decode())


def _push_constant(value: object) -> _Step:
    return lambda machine: machine.stack.append(value)


def _check_protocol(machine: _PickleMachine) -> None:
    if machine.count(1) > pickle.HIGHEST_PROTOCOL:
        raise PickleRefused("a later protocol of pickle")


def _skip_frame(machine: _PickleMachine) -> None:
    machine.take(8)


def _put_memo(width: int) -> _Step:
    """Append to the memo. Numbers must be in order, as picklers write them, so that no number allocates memory."""

    def step(machine: _PickleMachine) -> None:
        if machine.count(width) != len(machine.memo):
            raise PickleRefused("a memo out of order")
        machine.memo.append(machine.stack[-1])

    return step


# -- containers --------------------------------------------------------------------------------------------------------


def _push_empty(kind: type) -> _Step:
    return lambda machine: machine.stack.append(kind())


def _build_tuple(count: int) -> _Step:
    def step(machine: _PickleMachine) -> None:
        stack = machine.stack
        if count > len(stack):
            raise PickleRefused("a tuple of values that are not there")
        stack[-count:] = [tuple(stack[-count:])]

    return step


def _build_marked_tuple(machine: _PickleMachine) -> None:
    made = tuple(machine.pop_to_mark())
    machine.stack.append(made)


def _append_item(machine: _PickleMachine) -> None:
    _extend_list(machine, [machine.stack.pop()])


def _append_items(machine: _PickleMachine) -> None:
    _extend_list(machine, machine.pop_to_mark())


def _extend_list(machine: _PickleMachine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not list:
        raise PickleRefused(f"something appended to a {type(target).__name__}")
    target.extend(items)


def _set_item(machine: _PickleMachine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update_dict(machine, [key, value])


def _set_items(machine: _PickleMachine) -> None:
    _update_dict(machine, machine.pop_to_mark())


def _update_dict(machine: _PickleMachine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not dict or len(items) % 2:
        raise PickleRefused(f"items set in a {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in machine.keys:  # other types may hash slowly, or never finish
            raise PickleRefused(f"a key that is a {type(key).__name__}")
        target[key] = value


# -- allowed globals ---------------------------------------------------------------------------------------------------


def _find_global(machine: _PickleMachine) -> None:
    module = machine.line()
    machine.find(module, machine.line())


def _find_stack_global(machine: _PickleMachine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.find(module, name)


def _call_function(machine: _PickleMachine) -> None:
    arguments, function = machine.stack.pop(), machine.stack.pop()
    if type(function) is not PickleFunction or type(arguments) is not tuple or len(arguments) > _ARGUMENTS:
        raise PickleRefused(f"a call of a {type(function).__name__}")
    machine.stack.append(function.call(*arguments))


def _new_instance(machine: _PickleMachine) -> None:
    arguments, kind = machine.stack.pop(), machine.stack.pop()
    if type(kind) is not PickleDataclass or type(arguments) is not tuple or arguments:
        raise PickleRefused(f"an instance of a {type(kind).__name__}")
    machine.stack.append(object.__new__(kind.made))


def _build_instance(machine: _PickleMachine) -> None:
    state, instance = machine.stack.pop(), machine.stack[-1]
    # Any other target, such as a class or function of this process, would be changed permanently.
    kind = machine.kinds.get(type(instance))
    if kind is None:
        raise PickleRefused(f"a state of a {type(instance).__name__}")
    kind.build(instance, state)


def _load_persistent(machine: _PickleMachine) -> None:
    if machine.persistent is None:
        raise PickleRefused("a persistent id")
    machine.stack.append(machine.persistent(machine.stack.pop()))


_NAMED: dict[str, _Step] = {
    "PROTO": _check_protocol,
    "FRAME": _skip_frame,
    "MARK": _PickleMachine.mark,
    "NONE": _push_constant(None),
    "NEWTRUE": _push_constant(True),
    "NEWFALSE": _push_constant(False),
    "BININT": _push_signed,
    "BININT1": _push_integer(1),
    "BININT2": _push_integer(2),
    "LONG1": _push_long,
    "BINFLOAT": _push_float,
    "SHORT_BINUNICODE": _push_text(1),
    "BINUNICODE": _push_text(4),
    "BINUNICODE8": _push_text(8),
    "EMPTY_LIST": _push_empty(list),
    "EMPTY_DICT": _push_empty(dict),
    "EMPTY_TUPLE": _push_constant(()),
    "APPEND": _append_item,
    "APPENDS": _append_items,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "TUPLE": _build_marked_tuple,
    "TUPLE1": _build_tuple(1),
    "TUPLE2": _build_tuple(2),
    "TUPLE3": _build_tuple(3),
    "BINPUT": _put_memo(1),
    "LONG_BINPUT": _put_memo(4),
    "GLOBAL": _find_global,
    "STACK_GLOBAL": _find_stack_global,
    "REDUCE": _call_function,
    "NEWOBJ": _new_instance,
    "BUILD": _build_instance,
    "BINPERSID": _load_persistent,
}
_STEPS = {getattr(pickle, name)[0]: step for name, step in _NAMED.items()}


def load_pickle(
    raw: bytes, allowed: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Load the object pickled in ``raw``, made of containers, numbers, texts and ``allowed`` objects only.

    Args:
        allowed: for each (module, name) that the pickle may use: a :class:`PickleFunction`, a :class:`PickleDataclass`,
            or a constant.
        persistent: makes an object of a persistent id of any type.

    Raises:
        PickleRefused: the pickle needs something else, or is damaged.
    """
    try:
        return _PickleMachine(raw, allowed, persistent).run()
    except PickleRefused:
        raise
    except Exception as error:  # damaged bytes can raise anything
        raise PickleRefused(f"{type(error).__name__}: {error}"[:200]) from error
