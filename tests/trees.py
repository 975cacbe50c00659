"""The syntax trees of sources, for as long as a file of tests looks at them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest


@cache
def parse_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@pytest.fixture(scope="module", autouse=True)
def trees_end_with_these_tests() -> Iterator[None]:
    """They are a million objects, through which every later collection of this process would look."""
    yield
    parse_tree.cache_clear()
