"""Check the rules that need no build: layers, one op one name, no torch in C++, stages as data, sizes, silence.

The last test imports the package in a fresh process; it is skipped where the extension is not built.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from trees import parse_tree, trees_end_with_these_tests  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "npuzero"
CSRC = ROOT / "csrc"

# A module imports its own part and the rows above; parts of one row never import each other.
ROWS = (
    ("errors", "cann"),
    ("arguments",),
    ("plan",),
    ("config",),
    ("observe",),
    ("device",),
    ("_native",),
    ("ops",),
    ("memory", "comm"),
    ("shard",),
    ("parallel",),
    ("optim", "schedules"),
    ("checkpoint",),
    ("api", "info"),
    ("adopt",),
    ("planner",),
    ("bench",),
    ("compat",),
    ("cli",),
    ("accelerate",),
    ("transformers", "lightning"),
    ("__main__",),
    ("__init__",),
)
ROW_OF = {part: index for index, row in enumerate(ROWS) for part in row}

# The folders of csrc that each folder's files may include; bindings.cpp is above them all.
CSRC_MAY_INCLUDE = {
    "core": {"core"},
    "ops": {"ops", "core"},
    "cpu": {"cpu", "ops", "core"},
    "driver": {"driver", "ops", "core"},
    "cuda": {"cuda", "ops", "core"},
    "npu": {"npu", "ops", "core"},
    "comm": {"comm", "core"},
    "io": {"io", "core"},
    "host": {"host", "core"},
}

TALKS = ("cli", "__main__")


def python_files(folder: Path = PACKAGE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def package_part(path: Path) -> str:
    """Return the part a module belongs to: the first name below the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def source_place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def imported_modules(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Return every module that `path` imports, anywhere in the file, by its full dotted name."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(parse_tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "npuzero" else [module]
            yield from ((node, name) for name in names)


def imported_parts(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Return the parts of the package that `path` imports; a public name of the package counts as ``__init__``."""
    for node, module in imported_modules(path):
        head, _, rest = module.partition(".")
        if head == "npuzero":
            part = rest.partition(".")[0]
            yield node, part if part in ROW_OF or part == "_C" else "__init__"


def docstring_ids(tree: ast.Module) -> set[int]:
    """Return the ids of the constants that are docstrings."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, owners) and node.body and isinstance(node.body[0], ast.Expr):
            found.add(id(node.body[0].value))
    return found


def test_every_part_has_a_row():
    parts = {package_part(path) for path in python_files()}
    assert parts <= set(ROW_OF), f"give {sorted(parts - set(ROW_OF))} a row in docs/architecture.md and here"


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_up_the_rows_only(path):
    own = package_part(path)
    wrong = [
        f"{source_place(path, node)} imports {part}"
        for node, part in imported_parts(path)
        if part not in (own, "_C") and ROW_OF[part] >= ROW_OF[own]
    ]
    assert not wrong, wrong


def test_the_extension_has_one_importer():
    importers = {path for path in python_files() for _, part in imported_parts(path) if part == "_C"}
    assert {path.relative_to(PACKAGE).as_posix() for path in importers} == {"_native.py"}


def test_one_op_one_name():
    table = CSRC / "ops" / "ops.h"
    contracts = sorted(path.stem for path in (CSRC / "ops").glob("*.h") if path != table)
    assert re.findall(r"each\((\w+),", table.read_text("utf-8")) == contracts != [], "all of them, by name"
    homes = ("csrc/cpu/{}.cpp", "npuzero/ops/{}.py", "npuzero/ops/reference/{}.py", "tests/ops/test_{}.py")
    missing = [home.format(op) for op in contracts for home in homes if not (ROOT / home.format(op)).is_file()]
    assert not missing, missing
    doors = sorted(path.stem for path in (PACKAGE / "ops").glob("*.py") if not path.stem.startswith("_"))
    assert doors == contracts
    references = (PACKAGE / "ops" / "reference").glob("*.py")
    assert sorted(path.stem for path in references if not path.stem.startswith("_")) == contracts


def test_references_share_nothing_with_the_kernels():
    for path in python_files(PACKAGE / "ops" / "reference"):
        assert "_native" not in {part for _, part in imported_parts(path)}, path


def csrc_includes() -> Iterator[tuple[Path, int, str]]:
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in {".h", ".hpp", ".cpp", ".cu", ".cuh", ".asc"}:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if match := re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line):
                    yield path, number, match.group(1)


def test_cpp_never_sees_torch():
    torch_headers = re.compile(r"^(torch|ATen|c10|caffe2|torch_npu)/|^(torch|Python)\.h")
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}" for path, line, name in csrc_includes() if torch_headers.match(name)
    ]
    assert not wrong, wrong


def test_cpp_layers():
    folders = {path.name for path in CSRC.iterdir() if path.is_dir()}
    wrong = []
    for path, line, name in csrc_includes():
        own, _, rest = path.relative_to(CSRC).as_posix().partition("/")
        folder = name.partition("/")[0]
        if rest and folder in folders and folder not in CSRC_MAY_INCLUDE[own]:
            wrong.append(f"{path.relative_to(ROOT)}:{line} includes {name}")
    assert not wrong, wrong


def test_no_preset_is_named_outside_the_table():
    wrong = []
    for path in (path for path in python_files() if package_part(path) != "plan"):
        texts = docstring_ids(parse_tree(path))
        for node in ast.walk(parse_tree(path)):
            text = getattr(node, "value", None) if isinstance(node, ast.Constant) and id(node) not in texts else None
            if isinstance(text, str) and re.fullmatch(r"zero\d[\w.-]*|hsdp|mics|hpz", text):
                wrong.append(f"{source_place(path, node)} names preset {text!r}")
    assert not wrong, wrong


#: The parts in which `stage` means a ZeRO stage: Plan.preset turns it into a row of the table.
ZERO_STAGES = ("plan", "api", "info", "planner", "cli", "bench")


def asks_for_a_stage(node: ast.AST, zero_only: bool) -> bool:
    """Tell whether `node` compares a ZeRO stage or preset.

    A pipeline has stages as well, and code asks whether one is the first or last, or before another. ZeRO's stages are
    compared with their numbers and, with `zero_only`, with anything.
    """
    if isinstance(node, ast.Match):
        sides = [node.subject, *(pattern for case in node.cases for pattern in ast.walk(case.pattern))]
    elif isinstance(node, ast.Compare) and not isinstance(node.ops[0], (ast.Is, ast.IsNot)):
        sides = [node.left, *node.comparators]
    else:
        return False
    names = {getattr(side, "id", getattr(side, "attr", "")) for side in sides}
    leaves = (leaf for side in sides for leaf in ((side, *side.elts) if hasattr(side, "elts") else (side,)))
    values = {leaf.value for leaf in leaves if isinstance(leaf, ast.Constant)}
    return bool(names & {"preset", "zero_stage"} or ("stage" in names and (zero_only or values - {0})))


@pytest.mark.parametrize(
    ("code", "asks"),
    [
        ("stage == 3", True),
        ("plan.stage >= 2", True),
        ("stage in (1, 2)", True),
        ("1.5 == stage", True),
        ("preset == name", True),
        ("zero_stage > 0", True),
        ("match stage:\n    case 3: pass", True),
        ("stage == 0", False),
        ("self.stage == self.stages - 1", False),
        ("0 < stage < last", False),
        ("stage is None", False),
    ],
)
def test_a_pipelines_stage_may_be_compared(code, asks):
    nodes = [*ast.walk(ast.parse(code))]
    assert any(asks_for_a_stage(node, zero_only=False) for node in nodes) is asks
    assert any(asks_for_a_stage(node, zero_only=True) for node in nodes) is ("is None" not in code)


def test_a_stage_is_data_not_an_if():
    """Find no comparison with a ZeRO stage or preset: Plan.preset looks it up in the table."""
    wrong = [
        f"{source_place(path, node)} asks for a stage"
        for path in python_files()
        for node in ast.walk(parse_tree(path))
        if asks_for_a_stage(node, package_part(path) in ZERO_STAGES)
    ]
    assert not wrong, wrong


# Upper bounds: a file or class above them is divided. In api only code counts, so that examples in docstrings cost
# nothing. The exceptions have their reason in docs/decisions, under this number.
CLASS_METHODS, FILE_LINES, API_CODE_LINES = 20, 500, 290
LARGE: dict[str, int] = {}


def project_sources() -> Iterator[Path]:
    folders = ("npuzero", "csrc", "tests", "docker", "examples", "benchmarks", ".ci")
    suffixes = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".sh"}
    for path in (*ROOT.glob("*.py"), *(path for folder in folders for path in sorted((ROOT / folder).rglob("*")))):
        if path.suffix in suffixes:
            yield path


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def code_lines_of(path: Path) -> int:
    """Return the lines of code: no docstrings (examples in them cost nothing), comments or blank lines."""
    code: set[int] = set()
    tree = parse_tree(path)
    texts = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    docstring = {line for text in texts for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in (*silent, tokenize.ENCODING):
                code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstring)


def count_methods(node: ast.ClassDef) -> int:
    """Count private methods and properties; overloads do not count."""
    methods = (each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return len({method.name for method in methods})


def test_what_is_large_is_divided():
    sizes = {path.relative_to(ROOT).as_posix(): (count_lines(path), FILE_LINES) for path in project_sources()}
    sizes["npuzero/api"] = sum(map(code_lines_of, python_files(PACKAGE / "api"))), API_CODE_LINES
    for path in (path for path in project_sources() if path.suffix == ".py"):
        for node in ast.walk(parse_tree(path)):
            if isinstance(node, ast.ClassDef):
                sizes[f"{path.relative_to(ROOT).as_posix()}: {node.name}"] = count_methods(node), CLASS_METHODS
    above = {name: f"{size} > {most}" for name, (size, most) in sizes.items() if size > most}
    new = {name: size for name, size in above.items() if name not in LARGE}
    assert not new, f"divide {new}"
    assert LARGE.keys() <= above.keys(), f"no longer large, take it out of the list: {LARGE.keys() - above.keys()}"
    records = {path.name[:4] for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md")}
    assert {f"{number:04d}" for number in LARGE.values()} <= records


def test_the_library_prints_nothing():
    wrong = [
        source_place(path, node)
        for path in python_files()
        if package_part(path) not in TALKS
        for node in ast.walk(parse_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"print", "breakpoint"}
    ]
    assert not wrong, wrong


def test_config_is_the_only_reader_of_the_environment():
    wrong = [
        source_place(path, node)
        for path in python_files()
        if package_part(path) != "config"
        for node in ast.walk(parse_tree(path))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"}
    ]
    assert not wrong, wrong


def test_vendors_packages_are_imported_only_when_asked_for():
    """Import torch_npu never at the head of a module: importing it fails where it is installed without CANN."""
    wrong = [
        source_place(path, node)
        for path in python_files()
        for node in parse_tree(path).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in [node.module or "" if isinstance(node, ast.ImportFrom) else alias.name for alias in node.names]
        if name.partition(".")[0] in {"torch_npu", "matplotlib", "safetensors", "rich"}
    ]
    assert not wrong, wrong


def project_texts() -> Iterator[Path]:
    folders = ("npuzero", "csrc", "tests", "docs", "docker", "examples", "benchmarks", ".ci")
    suffixes = {
        ".py",
        ".pyi",
        ".h",
        ".cpp",
        ".cu",
        ".md",
        ".txt",
        ".toml",
        ".json",
        ".yml",
        ".cmake",
        ".Dockerfile",
        "",
    }
    for path in (*ROOT.iterdir(), *(path for folder in folders for path in (ROOT / folder).rglob("*"))):
        known = path.suffix in suffixes and path.name != ".git"  # a file in a work tree of git's
        if path.is_file() and known and "__pycache__" not in path.parts:
            yield path


def test_no_file_names_a_machine():
    """Find no path of an author's machine in any file."""
    home = re.compile("|".join(re.escape(f"/{folder}/") for folder in ("work", "root", "home")))
    wrong = [str(path.relative_to(ROOT)) for path in project_texts() if home.search(path.read_text("utf-8", "replace"))]
    assert not wrong, wrong


def heading_anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_documents_lead_somewhere():
    wrong = []
    for path in (path for path in project_texts() if path.suffix == ".md"):
        text = path.read_text("utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, anchor = target.partition("#")
            there = path.parent / file if file else path
            found = there.exists() and (not anchor or anchor in heading_anchors(there.read_text("utf-8")))
            if "://" not in target and not found:
                wrong.append(f"{path.relative_to(ROOT)} → {target}")
        named, defined = (
            set(re.findall(what, text, re.MULTILINE)) for what in (r"\]\[(\w+)\]", r"^\[(\w+)\]: https://")
        )
        wrong += [f"{path.relative_to(ROOT)} → [{name}]" for name in named ^ defined]
    assert not wrong, wrong


_IMPORT = """
import json, sys, threading
import torch
started = []
sys.addaudithook(lambda event, args: started.append(event) if event in {
    "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"} else None)
import npuzero
print(json.dumps({
    "processes": started,
    "threads": threading.active_count(),
    "cuda": torch.cuda.is_initialized(),
    "group": torch.distributed.is_available() and torch.distributed.is_initialized(),
    "heavy": sorted(sys.modules.keys() & {
        "torch_npu", "matplotlib", "rich", "safetensors", "setuptools", "torch.distributed.checkpoint",
        "accelerate", "transformers", "lightning", "pytorch_lightning"}),
}))
"""


@pytest.mark.skipif(find_spec("npuzero._C") is None, reason="needs the extension")
def test_import_touches_nothing(tmp_path):
    # torch loads its backends' packages by itself; only the imports of npuzero count here.
    variables = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", _IMPORT]  # away from the sources, so that the installed package is imported
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout) == {"processes": [], "threads": 1, "cuda": False, "group": False, "heavy": []}
