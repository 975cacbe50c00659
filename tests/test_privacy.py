"""Tests, benchmarks and examples use no private name of another file: they test behaviour."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from trees import parse_tree, trees_end_with_these_tests  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
USERS = sorted(path for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))
USERS = [path for path in USERS if path.parent.name != "mutants" and path != Path(__file__).resolve()]  # which quote
PACKAGE = frozenset((ROOT / "npuzero").rglob("*.py"))

# Names that are public in spite of their underscore: the extension, the one module that imports it, NamedTuple methods.
DOORS = {"_C", "_native", "_replace"}

# Exceptions: tests that have no public way to observe their subject.
ALLOWED = {
    ("tests/world/forking.py", "_process_world"),  # freed early; the end of a forked child's interpreter frees it later
    ("tests/unit/comm/test_communicator.py", "_process_world"),  # a process that is in no world yet
    ("tests/world/test_comm.py", "_named"),  # to act as ranks that may not open each other's memory
    ("tests/world/test_again.py", "_store"),  # a store that answers late
    ("tests/world/test_late.py", "_submit"),  # the place where operations are queued with the memory they will use
    ("tests/npu/binding/hccl_cases.py", "_group"),  # a rank that joins and does not connect
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOORS and name != "_"


@cache
def private_names(path: Path) -> frozenset[str]:
    """Return the private names that a file defines: functions, classes, variables, attributes of objects it makes."""
    found = set()
    for node in ast.walk(parse_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own_attribute(node.value, path):
            found.add(node.attr)
    return frozenset(filter(is_private, found))


def is_own_attribute(value: ast.expr, path: Path) -> bool:
    """Tell whether this file makes ``value``'s attributes: anything in the package, its own objects in a test."""
    return path in PACKAGE or (isinstance(value, ast.Name) and value.id in ("self", "cls"))


def used_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of every attribute, import and one-name string that may belong to another file."""
    for node in ast.walk(parse_tree(path)):
        if isinstance(node, ast.Attribute) and root_name(node) != "torch":
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # for setattr, or a program
            yield from ((node.lineno, name) for name in re.findall(r"(?:^|(?<=\w\.))_[A-Za-z]\w*\b", node.value))


def root_name(node: ast.expr) -> str:
    """Return the name at the beginning of ``name.attribute.attribute``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_no_private_name_of_another_file_is_used() -> None:
    given = {path: private_names(path) for path in (*PACKAGE, *USERS)}
    every = frozenset().union(*given.values())
    uses = [
        (path.relative_to(ROOT).as_posix(), line, name)
        for path in USERS
        for line, name in used_names(path)
        if is_private(name) and name in every - given[path]
    ]
    wrong = [f"{file}:{line} uses {name}" for file, line, name in uses if (file, name) not in ALLOWED]
    assert not wrong, wrong
    assert {(file, name) for file, _, name in uses} == ALLOWED, "what is allowed and not used need not be"
