"""Read a configuration's file, report refused syntax with its line, and bound the work of the evaluation."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from npuzero.arguments import open_regular
from npuzero.errors import ConfigError

#: Limits: bytes of one file; files of one configuration; nodes and elements visited in total.
MOST_BYTES, MOST_FILES, MOST_STEPS = 2**20, 16, 2**18
#: Limits: bits of an integer; elements and characters of a value with everything inside; nesting depth.
MOST_BITS, MOST_ELEMENTS, MOST_DEPTH = 1024, 2**14, 100

# Exceptions that Python raises when an expression of the file fails.
_FAILURES = (ArithmeticError, LookupError, TypeError, ValueError, RecursionError)
# Advice for a refused construct, by its class.
_INSTEAD: dict[type[ast.AST], str] = {
    ast.Attribute: "Write the value itself; a dtype is a text, as 'torch.bfloat16'.",
    ast.Call: "Write its result.",
    ast.For: "Write out what the loop makes.",
    ast.FunctionDef: "Write the values that the function returns.",
    ast.ImportFrom: "Write its values here, or import a base under `with read_base():`.",
}


@dataclass
class EvaluationBudget:
    """Count the work of one configuration over all its files."""

    steps: int = 0
    files: int = 0

    def spend(self, steps: int) -> None:
        """Count steps.

        Raises:
            ValueError: too many.
        """
        self.steps += steps
        if self.steps > MOST_STEPS:
            raise ValueError(f"more than {MOST_STEPS} steps to evaluate it")


class ConfigurationSource:
    """Read one file of a configuration, and report errors with its line.

    Args:
        path: of the file.
        budget: of the configuration that the file belongs to.

    Raises:
        ConfigError: there is no such file, it is too large, or it is no Python.
    """

    def __init__(self, path: Path, budget: EvaluationBudget) -> None:
        self.path = path
        self.budget = budget
        budget.files += 1
        self.tree = self._parsed(self._read())

    def _read(self) -> bytes:
        subject, do = f"configuration {self.path}", "Give the path of an InternEvo configuration, a .py file."
        try:
            with open(open_regular(self.path), "rb") as file:
                text = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise ConfigError(subject, expected="a file to read", got=str(error), do=do) from None
        if len(text) > MOST_BYTES:
            raise ConfigError(subject, expected=f"at most {MOST_BYTES} bytes", got="more", do=do)
        return text

    def _parsed(self, text: bytes) -> ast.Module:
        self._lines = text.decode("utf-8", "replace").splitlines()
        try:
            return ast.parse(text, str(self.path))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            where = f"{self.path}:{getattr(error, 'lineno', None) or 1}"
            do = "Correct the file; it is Python, as InternEvo reads it."
            raise ConfigError(where, expected="Python", got=f"{type(error).__name__}: {error}", do=do) from None

    def line(self, node: ast.AST) -> str:
        """Return the line where a node begins, with spaces collapsed."""
        return " ".join(self._lines[node.lineno - 1].split()) if hasattr(node, "lineno") else ""

    def fail(self, node: ast.AST, expected: str, got: str, do: str) -> NoReturn:
        """Raise ConfigError with file and line of the node as its subject."""
        line = getattr(node, "lineno", 1)
        raise ConfigError(f"{self.path}:{line}", expected=expected, got=got, do=do, path=str(self.path), line=line)

    def refuse(self, node: ast.AST, what: str | None = None) -> NoReturn:
        """Refuse a construct that would need to be run; ``what`` describes it."""
        do = _INSTEAD.get(type(node), "Write the value itself.") + " The file is not run."
        expected = "literals, dict(...), arithmetic, comparisons, subscripts and names said before"
        self.fail(node, expected, what or f"{type(node).__name__}: {self.line(node)[:80]}", do)

    def large(self, node: ast.AST, what: str) -> NoReturn:
        """Refuse a value that is too large for a configuration."""
        self.fail(node, "values of a configuration's size", what, "Write a smaller one.")

    def attempt(self, node: ast.AST, function: Callable[..., Any], *values: Any, **options: Any) -> Any:
        """Return the result of ``function``; report its exceptions with the node's line."""
        try:
            return function(*values, **options)
        except _FAILURES as error:
            got = f"{type(error).__name__}: {error}"[:200]
            self.fail(node, "an expression that has a value", got, "Correct it.")

    def bound(self, node: ast.AST, value: Any) -> Any:
        """Return ``value`` if it consists of permitted types and is, with everything inside, not too large."""
        level, elements, depth = [value], 0, 0
        while level:
            depth += 1
            inner: list[Any] = []
            for part in level:
                elements += 1 + self._inside(node, part, inner)
                if elements + len(inner) > MOST_ELEMENTS or depth > MOST_DEPTH:
                    self.large(node, f"more than {MOST_ELEMENTS} elements, or {MOST_DEPTH} inside of one another")
            level = inner
        self.attempt(node, self.budget.spend, elements)
        return value

    def _inside(self, node: ast.AST, part: Any, inner: list[Any]) -> int:
        """Append the elements of ``part`` to ``inner``; return the number of its characters."""
        if isinstance(part, dict):
            inner += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple)):
            inner += part
        elif isinstance(part, int) and part.bit_length() > MOST_BITS:
            self.large(node, f"an integer of {part.bit_length()} bits")
        elif part is not None and not isinstance(part, (int, float, str)):
            self.refuse(node, f"a value of type {type(part).__name__}")
        return len(part) if isinstance(part, str) else 0
