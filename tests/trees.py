"""Cache the syntax trees of sources while a file of tests reads them."""

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
    """Drop the trees at the end: they are a million objects, and every later garbage collection would scan them."""
    yield
    parse_tree.cache_clear()
