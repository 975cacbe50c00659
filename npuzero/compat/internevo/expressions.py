"""Evaluate an expression of a configuration by its syntax tree."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from typing import Any

from npuzero.compat.internevo.source import MOST_BITS, MOST_DEPTH, MOST_ELEMENTS, ConfigurationSource
from npuzero.errors import did_you_mean

#: The builtins that a file may call.
CALLS: dict[str, Callable[..., Any]] = {
    kind.__name__: kind for kind in (dict, list, tuple, int, float, bool, str, len, min, max, abs)
}

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
}
# With these operators an augmented assignment changes a list or dict in place, under all its names.
_IN_PLACE = {ast.Add: operator.iadd, ast.Mult: operator.imul, ast.BitOr: operator.ior}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_CONVERT: dict[str, Callable[[Any], str]] = {"r": repr, "s": str, "a": ascii}


class ImportedName:
    """Mark a name that an import binds, which no expression may use."""

    def __init__(self, statement: str) -> None:
        self.statement = statement


class ExpressionEvaluator:
    """Evaluate expressions of one file.

    Args:
        source: the file.

    Attributes:
        names: the names assigned or imported so far.
        read: the names that an expression has read.
    """

    def __init__(self, source: ConfigurationSource) -> None:
        self.source = source
        self.names: dict[str, Any] = {}
        self.read: set[str] = set()
        self._depth = 0

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression.

        Raises:
            ConfigError: it has no value, is too large, or would need to be run.
        """
        self._depth += 1
        if self._depth > MOST_DEPTH:
            expected = f"at most {MOST_DEPTH} expressions inside of one another"
            self.source.fail(node, expected, "more", "Give parts of it names.")
        self.source.attempt(node, self.source.budget.spend, 1)
        found = getattr(self, f"_{type(node).__name__.lower()}", self.source.refuse)(node)
        self._depth -= 1
        return found

    def binary(self, node: ast.AST, sign: ast.operator, left: Any, right: Any, in_place: bool = False) -> Any:
        """Return ``left sign right``. Refuse results that are too large, and operands that are not numbers, texts or
        collections.
        """
        if type(sign) not in _BINARY:
            self.source.refuse(node)
        if isinstance(sign, ast.Mod) and isinstance(left, str):
            self.source.refuse(node, "a text filled in by %")
        self._foresee(node, sign, left, right)
        function = (in_place and _IN_PLACE.get(type(sign))) or _BINARY[type(sign)]
        return self.source.bound(node, self.source.attempt(node, function, left, right))

    def _foresee(self, node: ast.AST, sign: ast.operator, left: Any, right: Any) -> None:
        """Refuse an operation with a result too large to compute."""
        # Sums at most double a value, and bound() checks them afterwards; powers and repetitions must be refused first.
        if isinstance(left, int) and isinstance(right, int):
            if isinstance(sign, ast.Pow) and abs(left) > 1 and left.bit_length() * right > 2 * MOST_BITS:
                self.source.large(node, "a power of more bits than an integer may have")
        elif isinstance(sign, ast.Mult):
            for many, times in ((left, right), (right, left)):
                sized = isinstance(many, (str, list, tuple)) and isinstance(times, int)
                if sized and len(many) * times > MOST_ELEMENTS:
                    self.source.large(node, f"{len(many)} * {times} elements")

    # -- one method for each node class; value() finds it by the class's name ---------------------------------------

    def _constant(self, node: ast.Constant) -> Any:
        return self.source.bound(node, node.value)

    def _name(self, node: ast.Name) -> Any:
        if node.id not in self.names:
            do = did_you_mean(node.id, list(self.names), "Assign it above.")
            self.source.fail(node, "a name that the file assigns before", repr(node.id), do)
        found = self.names[node.id]
        if isinstance(found, ImportedName):
            do = "Write the value itself: the file is not run, and nothing is imported."
            self.source.fail(node, "values", f"{node.id}, of `{found.statement}`", do)
        self.read.add(node.id)
        return found

    def _list(self, node: ast.List) -> Any:
        return self.source.bound(node, list(self._items(node.elts)))

    def _tuple(self, node: ast.Tuple) -> Any:
        return self.source.bound(node, tuple(self._items(node.elts)))

    def _dict(self, node: ast.Dict) -> Any:
        found: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            if key is None:
                found |= self._mapping(item)
            else:
                self.source.attempt(key, found.__setitem__, self.value(key), self.value(item))
        return self.source.bound(node, found)

    def _call(self, node: ast.Call) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in CALLS or name in self.names:
            self.source.refuse(node, f"a call, `{self.source.line(node)[:60]}`; {', '.join(CALLS)} may be called")
        options: dict[str, Any] = {}
        for word in node.keywords:
            options |= self._mapping(word.value) if word.arg is None else {word.arg: self.value(word.value)}
        values = [*self._items(node.args)]
        if any(not isinstance(option, str) for option in options):
            self.source.fail(node, "keyword arguments with names", repr(options)[:60], "Write them as a dict.")
        return self.source.bound(node, self.source.attempt(node, CALLS[name], *values, **options))

    def _binop(self, node: ast.BinOp) -> Any:
        return self.binary(node, node.op, self.value(node.left), self.value(node.right))

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        if type(node.op) not in _UNARY:
            self.source.refuse(node)
        return self.source.attempt(node, _UNARY[type(node.op)], self.value(node.operand))

    def _boolop(self, node: ast.BoolOp) -> Any:
        found = None
        for part in node.values:
            found = self.value(part)
            if bool(found) is isinstance(node.op, ast.Or):
                break
        return found

    def _compare(self, node: ast.Compare) -> bool:
        left = self.value(node.left)
        for sign, part in zip(node.ops, node.comparators, strict=True):
            right = self.value(part)
            if not self.source.attempt(node, _COMPARE[type(sign)], left, right):
                return False
            left = right
        return True

    def _ifexp(self, node: ast.IfExp) -> Any:
        return self.value(node.body if self.value(node.test) else node.orelse)

    def _subscript(self, node: ast.Subscript) -> Any:
        owner = self.value(node.value)
        if isinstance(node.slice, ast.Slice):
            ends = (node.slice.lower, node.slice.upper, node.slice.step)
            part = slice(*(None if end is None else self.value(end) for end in ends))
            return self.source.bound(node, self.source.attempt(node, operator.getitem, owner, part))
        key = self.value(node.slice)
        if isinstance(owner, dict) and not self.source.attempt(node, owner.__contains__, key):
            do = did_you_mean(key, map(str, owner), "Add it to the dict.")
            self.source.fail(node, f"a key among {', '.join(map(str, owner))}", repr(key), do)
        return self.source.attempt(node, operator.getitem, owner, key)

    def _joinedstr(self, node: ast.JoinedStr) -> Any:
        return self.source.bound(node, "".join(self.value(part) for part in node.values))

    def _formattedvalue(self, node: ast.FormattedValue) -> str:
        value = self.value(node.value)
        if node.conversion != -1:
            value = self.source.attempt(node, _CONVERT[chr(node.conversion)], value)
        spec = "" if node.format_spec is None else self.value(node.format_spec)
        numbers = "".join(letter if letter.isdecimal() else " " for letter in spec).split()
        if any(len(number) > 3 for number in numbers):
            self.source.large(node, f"a field of format {spec[:40]!r}")
        return str(self.source.attempt(node, format, value, spec))

    def _items(self, nodes: list[ast.expr]) -> Iterator[Any]:
        for node in nodes:
            if isinstance(node, ast.Starred):
                found = self.value(node.value)
                yield from found if isinstance(found, (list, tuple)) else self.source.refuse(node)
            else:
                yield self.value(node)

    def _mapping(self, node: ast.expr) -> dict[Any, Any]:
        found = self.value(node)
        return found if isinstance(found, dict) else self.source.refuse(node, "** of what is no dict")
