"""The kernel sources keep to what the device compiler has: a subset of C++, without a library."""

from __future__ import annotations

import re
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


def code_of(path: Path) -> str:
    """Without comments and texts."""
    return re.sub(r'//[^\n]*|"[^"\n]*"', "", path.read_text())


def test_there_are_kernels() -> None:
    assert {"cast.cpp", "flat_adam.cpp", "norm.cpp", "pack.cpp"} <= {path.name for path in device_sources()}


@pytest.mark.parametrize("path", device_sources(), ids=lambda path: path.name)
def test_no_construct_that_the_device_lacks(path: Path) -> None:
    code = code_of(path)
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


@pytest.mark.parametrize("path", device_sources(), ids=lambda path: path.name)
def test_every_function_is_the_devices_and_none_calls_itself(path: Path) -> None:
    code = code_of(path)
    heads = re.compile(
        r"^(?P<head>[^\n;{}#]*?)\b(?P<name>[A-Z]\w+|npuzero_\w+)\([^;{}]*\)\s*(:[^{;]*)?\{", re.MULTILINE
    )
    for match in heads.finditer(code):
        if re.search(r"\b(if|while|for|switch|return)\b", match["head"]):
            continue
        name, depth, at = match["name"], 1, match.end()
        assert "__aicore__" in match["head"], f"{path.name}: {name} has no __aicore__"
        while depth:
            depth += {"{": 1, "}": -1}.get(code[at], 0)
            at += 1
        body = code[match.end() : at]
        assert not re.search(rf"(?<![\w.>]){name}\(", body), f"{path.name}: {name} calls itself"
