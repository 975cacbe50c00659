"""The kernel sources keep to what the device compiler has: a subset of C++, without a library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent / "csrc" / "npu"
HOST = {"launch.h", "launch.cpp", "tiling.h"}

# What it lacks, and words that hint at it.
FORBIDDEN = (
    r"std\s*::",
    r"\bdouble\b",
    r"\blong\s+double\b",
    r"\b(throw|try|catch|noexcept)\b",
    r"\b(virtual|override|dynamic_cast|typeid)\b",
    r"\b(new|delete|malloc|free|memcpy|memset)\b",
    r"\b(goto|static\s+thread_local|thread_local|mutable)\b",
    r"\b(printf|assert|abort|exit)\b",
    r"\[[&=\w,\s]*\]\s*\(",  # a lambda
    r"\b(asm|__asm__|__builtin_\w+|__attribute__)\b",
    r"\bauto\b",
)
INCLUDES = {"kernel_operator.h", "cstdint"}


def device_sources() -> list[Path]:
    return sorted(path for path in ROOT.iterdir() if path.suffix in {".h", ".cpp"} and path.name not in HOST)


def strip_comments(path: Path) -> str:
    """Without comments and texts."""
    return re.sub(r'//[^\n]*|"[^"\n]*"', "", path.read_text())


def test_there_are_kernels() -> None:
    ops = {"cast", "dequantize_sum", "flat_adam", "flat_lion", "norm", "pack", "quantize"}
    assert {f"{op}.cpp" for op in ops} <= {path.name for path in device_sources()}


@pytest.mark.parametrize("path", device_sources(), ids=lambda path: path.name)
def test_no_construct_that_the_device_lacks(path: Path) -> None:
    code = strip_comments(path)
    found = [
        f"{path.name}:{code.count(chr(10), 0, match.start()) + 1}: {match.group()}"
        for pattern in FORBIDDEN
        for match in re.finditer(pattern, code)
    ]
    assert not found, found


@pytest.mark.parametrize("path", device_sources(), ids=lambda path: path.name)
def test_includes_nothing_of_the_host(path: Path) -> None:
    included = re.findall(r'#include\s*[<"]([^>"]+)[>"]', path.read_text())
    device = {f"npu/{other.name}" for other in device_sources()}
    assert set(included) <= INCLUDES | device


def find_functions(path: Path) -> Iterator[tuple[str, str, str]]:
    """Of each function that a file defines: what stands before its name, the name, the body."""
    code = strip_comments(path)
    heads = re.compile(r"^(?P<head>[^\n;{}#]*?)\b(?P<name>[A-Z]\w+)\([^;{}]*\)\s*(:[^{;]*)?\{", re.MULTILINE)
    for match in heads.finditer(code):
        if re.search(r"\b(if|while|for|switch|return)\b", match["head"]):
            continue
        depth, at = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(code[at], 0)
            at += 1
        yield match["head"], match["name"], code[match.end() : at]


@pytest.mark.parametrize("path", device_sources(), ids=lambda path: path.name)
def test_every_function_is_the_devices(path: Path) -> None:
    missing = [name for head, name, _ in find_functions(path) if "__aicore__" not in head]
    assert not missing, missing


def test_no_function_comes_to_call_itself() -> None:
    """By name alone: functions of one name count as one, which finds more than there is."""
    calls: dict[str, set[str]] = {}
    for path in device_sources():
        for _, name, body in find_functions(path):
            calls.setdefault(name, set()).update(re.findall(r"\b([A-Z]\w+)\(", body))
    assert {"Update", "Apply", "Encode", "Make", "Square"} <= set(calls)
    for name in calls:
        reached, new = set(), {name}
        while new:
            called = calls.get(new.pop(), set()) - reached
            reached |= called
            new |= called
        assert name not in reached, f"{name} calls itself, by way of {calls[name] & reached}"


def functions_of_tensors() -> set[str]:
    """Those outside of classes that take something of namespace AscendC: by that, a call is looked up there, too."""
    heads = re.compile(r"^__aicore__ inline [^\n(]*?\b(\w+)\(([^{]*)\) \{", re.MULTILINE)
    taken = re.compile(r"\b(Local|Global)Tensor\b|\bT[A-Z]\w+|\bRoundMode\b")
    return {
        name for path in device_sources() for name, given in heads.findall(strip_comments(path)) if taken.search(given)
    }


@pytest.mark.parametrize("path", device_sources(), ids=lambda path: path.name)
def test_no_call_of_ours_meets_a_name_of_ascendc(path: Path) -> None:
    """The full kernel_operator.h has a Round, a Copy, ... of its own, and the next release may have any other."""
    names = functions_of_tensors()
    assert {"Load", "Store", "Round", "Copy", "Convert"} <= names
    members = {name for head, name, _ in find_functions(path) if head.startswith("  ")}
    calls = re.findall(rf"^(?!.*__aicore__).*?(?<![\w.:])({'|'.join(names)})\(", strip_comments(path), re.MULTILINE)
    assert not set(calls) - members, "a function of ours is called with its namespace: npu::"


@pytest.mark.parametrize("path", device_sources(), ids=lambda path: path.name)
def test_nothing_of_ours_is_outside_of_our_namespace(path: Path) -> None:
    """There ours and AscendC's would be equally near: a type Sum of ours and their function Sum."""
    code = re.sub(r"^#(?:.*\\\n)*.*", "", strip_comments(path), flags=re.MULTILINE)
    parts = re.split(r"^namespace npuzero \{\nnamespace npu \{\n|^\} *\n\} *\n", code, flags=re.MULTILINE)
    before, _, after = parts
    assert not before.strip()
    assert not re.sub(r"^NPUZERO_KERNEL\(npuzero_\w+, \w+\)$", "", after, flags=re.MULTILINE).strip()
    assert "using namespace npuzero" not in code


def test_every_kernel_states_its_type() -> None:
    """By being defined by the one macro that does, either way that there is."""
    listed = re.search(r"kernel_names\[\] = \{([^}]*)\}", (ROOT / "launch.h").read_text())
    texts = {path.name: path.read_text() for path in device_sources()}
    kernels = [name for text in texts.values() for name in re.findall(r"^NPUZERO_KERNEL\((\w+)", text, re.MULTILINE)]
    assert listed and sorted(kernels) == sorted(re.findall(r"\w+", listed[1]))
    assert [name for name, text in texts.items() if "__global__" in text] == ["walk.h"]
    launched, before = re.findall(r"#define NPUZERO_KERNEL(?:.*\\\n)+.*", texts["walk.h"])
    assert 'extern "C" __global__ __vector__ __aicore__ void' in launched
    assert re.search(r"\{\s*\\\n\s*KERNEL_TASK_TYPE_DEFAULT\(KERNEL_TYPE_AIV_ONLY\);", before)
