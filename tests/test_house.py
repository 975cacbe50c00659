"""The house's rules for folders, names and prose: what a reader who knows PyTorch and not this project relies on."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from trees import parse_tree, trees_end_with_these_tests  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "npuzero"
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")})

#: Files in a folder; its ``__init__`` counts.
MOST_FILES = 12
#: Part of the module-level functions and classes whose name no other file of the package has.
OWN_NAMES = 0.95
#: Odd wordings in 1,000 words of docstrings and comments of a package, or of a page.
ODD_WORDINGS = 5.0
#: Functions more complex than this have a comment that says why.
COMPLEX = 10

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def name_of(folder: Path) -> str:
    return folder.relative_to(ROOT).as_posix()


def imports_at_run_time(node: ast.AST) -> Iterator[str]:
    """The modules that are imported wherever in the file; those for type checkers alone are none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from imports_at_run_time(child)


def floors(folder: Path) -> dict[str, set[str]]:
    """What each file or folder in ``folder`` imports of the others, by their first names below it."""
    prefix = ".".join(folder.relative_to(ROOT).parts) + "."
    graph: dict[str, set[str]] = defaultdict(set)
    for path in folder.rglob("*.py"):
        own = path.relative_to(folder).parts[0].removesuffix(".py")
        if own != "__init__":
            found = (module.removeprefix(prefix) for module in imports_at_run_time(parse_tree(path)))
            heads = {head.split(".")[0] for head in found if not head.startswith("npuzero")}
            entries = {head for head in heads if (folder / head).is_dir() or (folder / f"{head}.py").exists()}
            graph[own] |= entries - {own}
    return graph


def complexity(function: Definition) -> int:
    """One more than the number of branches, as McCabe's, where conditions and loops within a line count as well."""
    branches = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.Assert, ast.comprehension)
    count = 1
    for node in ast.walk(function):
        count += isinstance(node, branches)
        if isinstance(node, ast.comprehension):
            count += len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count


def comment_lines(path: Path) -> set[int]:
    """Lines with a comment for readers; those for tools are none."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
    return {
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|fmt)", token.string)
    }


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_a_folder_holds_few_files(folder: Path) -> None:
    files = sorted(path.name for path in folder.glob("*.py"))
    assert len(files) <= MOST_FILES, f"divide {name_of(folder)}: {len(files)} files"


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_files_of_a_folder_import_one_way(folder: Path) -> None:
    """There is an order in which each file and folder imports earlier ones only."""
    try:
        TopologicalSorter(floors(folder)).prepare()
    except CycleError as error:
        pytest.fail(f"{name_of(folder)}: {' -> '.join(reversed(error.args[1]))}")


def test_names_are_their_files_own() -> None:
    files_of: dict[str, set[Path]] = defaultdict(set)
    classes: dict[str, set[Path]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for node in parse_tree(path).body:
            if isinstance(node, Definition):
                files_of[node.name].add(path)
                if isinstance(node, ast.ClassDef):
                    classes[node.name].add(path)
    shared = {name: sorted(map(name_of, files)) for name, files in classes.items() if len(files) > 1}
    assert not shared, f"classes of one name in several files: {shared}"
    definitions = sum(map(len, files_of.values()))
    own = sum(len(files) == 1 for files in files_of.values())
    several = {name for name, files in files_of.items() if len(files) > 1}
    assert own >= OWN_NAMES * definitions, f"{own} of {definitions}; give names of their own to {sorted(several)}"


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_a_complex_function_says_why(folder: Path) -> None:
    silent = []
    for path in sorted(folder.glob("*.py")):
        comments = comment_lines(path)
        for node in ast.walk(parse_tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and complexity(node) > COMPLEX:
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                if not comments.intersection(lines):
                    silent.append(f"{name_of(path)}:{node.lineno} {node.name}")
    assert not silent, f"say why, in a comment: {silent}"


def odd_wordings(text: str) -> tuple[float, list[str]]:
    """How many there are in 1,000 words, and which."""
    lines = (ROOT / "tests" / "odd_wordings.txt").read_text("utf-8").splitlines()
    wordings = "|".join(line for line in lines if line and not line.startswith("#"))
    found = re.findall(rf"\b(?:{wordings})\b", text, re.IGNORECASE)
    return 1000 * len(found) / max(1, len(re.findall(r"[A-Za-z']+", text))), found


def prose_of(path: Path) -> str:
    """The docstrings and comments of a Python file; the text of a page without its blocks of code."""
    if path.suffix == ".md":
        return re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(parse_tree(path)) if isinstance(node, owners)]
    lines = path.read_text("utf-8").splitlines()
    return "\n".join([*docstrings, *(lines[number - 1].partition("#")[2] for number in comment_lines(path))])


@pytest.mark.parametrize("part", sorted(path for path in PACKAGE.iterdir() if any(path.glob("*.py"))), ids=name_of)
def test_code_is_written_in_plain_words(part: Path) -> None:
    odd, found = odd_wordings("\n".join(map(prose_of, sorted(part.rglob("*.py")))))
    assert odd <= ODD_WORDINGS, f"{odd:.1f} of 1,000 words, such as {found[:20]}"


def test_readers_pages_are_written_in_plain_words() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    odd, found = odd_wordings("\n".join(map(prose_of, pages)))
    assert odd <= ODD_WORDINGS, f"{odd:.1f} of 1,000 words, such as {found[:20]}"
