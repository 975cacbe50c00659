"""Evaluate an InternEvo configuration without running it.

The file is Python, which InternEvo imports. Here the syntax tree is walked instead: assignments of literals, calls of
``dict(...)`` and a few other builtins, arithmetic, comparisons, f-strings, subscripts, and names assigned before. Any
other syntax is refused with its line.

Invariants:
    * nothing of the file is executed: no exec, no eval, no import, no attribute, no method of a value;
    * a value is None, a bool, a number, a text, or a list, tuple or dict of values;
    * anything that can grow is bounded before it is computed: integers, texts, elements, steps, files.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npuzero.compat.internevo.expressions import ExpressionEvaluator, ImportedName
from npuzero.compat.internevo.source import MOST_FILES, ConfigurationSource, EvaluationBudget
from npuzero.errors import did_you_mean


@dataclass(frozen=True)
class EvaluatedFile:
    """Hold the values that a file assigns.

    Args:
        source: the path of the file.
        values: the top-level assignments of the file and its bases by name, in the order of the first assignments.
        read: the names that an expression reads.
    """

    source: str
    values: Mapping[str, Any]
    read: frozenset[str]


def evaluate(path: str | Path) -> EvaluatedFile:
    """Evaluate the configuration at ``path`` without running it.

    Bases, ``with read_base(): from configs._base_.x import *``, are evaluated as well: from the file of that name under
    the configuration's folder, one of its parents, or the current folder.

    Raises:
        ConfigError: there is no such file, it is no Python, or it needs to be run; ``error.subject`` is file and line.

    Example::

        from npuzero.compat import internevo

        print(internevo.evaluate("7B_sft.py").values["model"])
    """
    return _evaluate_file(Path(path), EvaluationBudget())


def _evaluate_file(path: Path, budget: EvaluationBudget) -> EvaluatedFile:
    file = _StatementEvaluator(ConfigurationSource(path, budget))
    file.block(file.source.tree.body)
    named = file.expressions.names.items()
    values = {name: value for name, value in named if not (isinstance(value, ImportedName) or name.startswith("__"))}
    return EvaluatedFile(str(path), values, frozenset(file.expressions.read))


class _StatementEvaluator:
    """Evaluate the statements of one file."""

    def __init__(self, source: ConfigurationSource) -> None:
        self.source = source
        self.expressions = ExpressionEvaluator(source)

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        value = self.expressions.value
        # In Python's order: the value before the targets; an augmented assignment reads its target first.
        if isinstance(node, ast.Assign):
            found = value(node.value)
            for target in node.targets:
                self._assign(target, found)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, value(node.value))
        elif isinstance(node, ast.AugAssign):
            before = value(node.target)
            self._assign(node.target, self.expressions.binary(node, node.op, before, value(node.value), in_place=True))
        elif isinstance(node, ast.If):
            self.block(node.body if value(node.test) else node.orelse)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node)
        elif isinstance(node, ast.With):
            self._bases(node)
        elif not (isinstance(node, ast.Pass) or _is_docstring(node)):
            self.source.refuse(node)

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.expressions.names[target.id] = value
        elif isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Slice):
            owner, key = self.expressions.value(target.value), self.expressions.value(target.slice)
            self.source.attempt(target, operator.setitem, owner, key, value)
            self.source.bound(target, owner)
        elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (tuple, list)):
            if len(target.elts) != len(value):
                self.source.fail(target, f"{len(target.elts)} values", str(len(value)), "Correct the assignment.")
            for part, item in zip(target.elts, value, strict=True):
                self._assign(part, item)
        else:
            self.source.refuse(target)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        """Record imported names: a file may import, but its expressions may not use these names."""
        for alias in node.names:
            if alias.name == "*":
                self.source.refuse(node)
            self.expressions.names[alias.asname or alias.name.partition(".")[0]] = ImportedName(self.source.line(node))

    def _bases(self, node: ast.With) -> None:
        """Evaluate the files that are imported under ``with read_base():``."""
        call = node.items[0].context_expr
        name = call.func if isinstance(call, ast.Call) and not (call.args or call.keywords) else None
        if len(node.items) > 1 or not (isinstance(name, ast.Name) and name.id == "read_base"):
            self.source.refuse(node)
        for statement in node.body:
            if not isinstance(statement, ast.ImportFrom):
                self.source.refuse(statement)
            self._base(statement)

    def _base(self, node: ast.ImportFrom) -> None:
        if self.source.budget.files >= MOST_FILES:
            do = "Take bases out, above all one that imports itself by way of others."
            self.source.fail(node, f"at most {MOST_FILES} files", "more", do)
        found = _evaluate_file(self._file(node), self.source.budget)
        self.expressions.read |= found.read
        for alias in node.names:
            if alias.name == "*":
                taken = {name: value for name, value in found.values.items() if not name.startswith("_")}
            elif alias.name in found.values:
                taken = {alias.asname or alias.name: found.values[alias.name]}
            else:
                do = did_you_mean(alias.name, list(found.values), "Assign it there.")
                self.source.fail(node, f"a name that {found.source} assigns", repr(alias.name), do)
            self.expressions.names |= taken

    def _file(self, node: ast.ImportFrom) -> Path:
        """Return the file of a base."""
        parts = (node.module or "").split(".")
        folder = self.source.path.absolute().parent
        around = [folder, *folder.parents]
        roots = around[node.level - 1 : node.level] if node.level else [*around, Path.cwd()]
        name = Path(*parts[:-1], f"{parts[-1]}.py")
        found = next((root / name for root in roots if (root / name).is_file()), None)
        if found is None:
            do = "Put it there, or write what it says into this file."
            self.source.fail(node, f"the base {name} in {folder} or around it", "no such file", do)
        return found


def _is_docstring(node: ast.stmt) -> bool:
    """Return whether a statement is a lone string, which serves as a comment."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
