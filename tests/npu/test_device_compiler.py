"""The kernels as a compiler like the device's reads them, which is a clang; nothing is run.

For it global memory is an address space of its own, what runs on the device says so, kernels are launched by `<<<>>>`,
and namespace AscendC has more names than the emulator's header. g++, which compiles the kernels for the emulator, knows
nothing of that. CANN's own compiler and header are not here: that they take the sources is not shown by this.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from clang import cindex

from npu.test_sources import ROOT, device_sources, strip_comments

KERNELS = sorted(path for path in device_sources() if path.suffix == ".cpp")
EMULATOR = ROOT.parent.parent / "tests" / "npu" / "emulator" / "kernel_operator.h"
WAYS = ("ascendc", "bisheng")

# Function templates that the full kernel_operator.h has, as its documentation lists them.
THEIRS = (
    *("Acos", "Arange", "Asin", "Atan", "Axpy", "Broadcast", "Ceil", "Clamp", "Copy", "Cos", "CumSum", "Erf", "Exp"),
    *("Fill", "Floor", "Fmod", "Frac", "Log", "Mean", "Normalize", "Pad", "Power", "Reciprocal", "Round", "Sign"),
    *("Sin", "Sort", "Sum", "Tan", "Tanh", "TopK", "Transpose", "Trunc", "UnPad", "Xor"),
)
WARNINGS = "-Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wdouble-promotion -Wundefined-reinterpret-cast"
CLANG = f"-x cuda -std=c++17 -nocudainc -nocudalib -Wno-unknown-cuda-version {WARNINGS} -I/wrapped -I{ROOT.parent}"
# A kernel is marked, since for this compiler it cannot be of the device and be launched, too.
DEVICE = (
    "--cuda-device-only",
    "-D__gm__=__attribute__((address_space(1)))",
    "-D__aicore__=__attribute__((device))",
    '-D__global__=__attribute__((annotate("kernel")))',
)
HOST = ("--cuda-host-only", "-D__gm__=", "-D__aicore__=", "-D__global__=__attribute__((global))")


def make_ascendc_decoys() -> str:
    """For namespace AscendC: templates that take anything, and twins of our functions, for calls that match exactly."""
    names, twins = set(THEIRS), []
    for path in device_sources():
        code = strip_comments(path)
        types = re.findall(r"^(?:struct|class|union) (\w+)", code, re.MULTILINE)
        heads = re.findall(r"^(__aicore__ inline [^{;]*?\b(\w+)\([^{;]*\)) \{", code, re.MULTILINE)
        names |= {*types, *(name for _, name in heads)}
        twins += [f"{head};" for head, _ in heads if not re.search(rf"\b({'|'.join([*types, 'Row'])})\b", head)]
    known = re.findall(r"\b[A-Z]\w+(?=[(,])", EMULATOR.read_text())
    greedy = [f"template <class... T> __aicore__ void {name}(T&&...) = delete;" for name in sorted(names - set(known))]
    return "\n".join(["namespace AscendC {", *greedy, *twins, "}"])


def parse_device_file(path: Path, way: str, *, host: bool = False, changes: Mapping[Path, str] | None = None) -> tuple:
    """What clang makes of a file where other files have other texts, and what it complains of."""
    wrapped = "\n".join(
        [
            "#pragma once",
            '#define __vector__ __attribute__((annotate("vector")))',
            "#pragma clang force_cuda_host_device begin",
            "int cudaConfigureCall(unsigned cores, void* l2, void* stream);",
            "int __cudaPushCallConfiguration(unsigned cores, void* l2, void* stream);",
            f'#include "{EMULATOR}"',
            "" if host else "#pragma clang force_cuda_host_device end",  # there only kernels are told from the rest
            make_ascendc_decoys(),
            "#undef KERNEL_TASK_TYPE_DEFAULT",
            "#define KERNEL_TASK_TYPE_DEFAULT(type) [[maybe_unused]] constexpr KernelMetaType stated = type",
        ]
    )
    files = [("/wrapped/kernel_operator.h", wrapped), *((str(at), text) for at, text in (changes or {}).items())]
    arguments = [*CLANG.split(), *(HOST if host else DEVICE), *["-DNPUZERO_BISHENG"] * (way == "bisheng" and not host)]
    unit = cindex.Index.create().parse(str(path), args=arguments, unsaved_files=files)
    return unit, [str(one) for one in unit.diagnostics if one.severity >= cindex.Diagnostic.Warning]


def kernel_types(unit: cindex.TranslationUnit, way: str) -> dict[str, bool]:
    """By kernel: whether it says that it is for vector cores, as that way needs it."""
    said = "vector" if way == "bisheng" else "KERNEL_TYPE_AIV_ONLY"
    functions = {
        cursor.spelling: {inner.spelling for inner in cursor.walk_preorder()}
        for cursor in unit.cursor.walk_preorder()
        if cursor.kind == cindex.CursorKind.FUNCTION_DECL and cursor.is_definition()
    }
    return {name: said in inside for name, inside in functions.items() if "kernel" in inside}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_a_kernel_is_accepted_and_states_its_type(path: Path, way: str) -> None:
    unit, complaints = parse_device_file(path, way)
    assert not complaints, complaints
    types = kernel_types(unit, way)
    assert types and all(types.values()), types
    assert list(types) == re.findall(r"^NPUZERO_KERNEL\((\w+)", path.read_text(), re.MULTILINE)


def test_the_entries_launch_what_kernels_take(tmp_path: Path) -> None:
    """The files that bisheng gets, as CMake writes them."""
    (tmp_path / "bisheng").touch(mode=0o755)
    options = (f"-DASCEND_HOME_PATH={tmp_path}", f"-Dbisheng={tmp_path / 'bisheng'}", "-DNPUZERO_NPU_WAY=bisheng")
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert cmake
    subprocess.run([cmake, "-S", ROOT, "-B", tmp_path / "built", *options], check=True, capture_output=True)
    entries = sorted((tmp_path / "built").glob("*.asc"))
    assert [entry.stem for entry in entries] == [path.stem for path in KERNELS]
    for entry in entries:
        _, complaints = parse_device_file(entry, "bisheng", host=True)
        assert not complaints, complaints
        _, complaints = parse_device_file(
            entry, "bisheng", host=True, changes={entry: entry.read_text().replace("nullptr, ", "")}
        )
        assert "too few execution configuration arguments" in complaints[0]


# In a file, what stands there becomes something else, and then clang says so.
MUTANTS = {
    "a call that theirs answers better": (
        "pack",
        "pack.cpp",
        "npu::Store(row->target + at * size, out,",
        "Store(row->target + at * size, out,",
        "call to deleted function 'Store'",
    ),
    "a call that theirs answers as well": (
        "cast",
        "walk.h",
        "npu::Widen(wide, from, from_dtype, count);",
        "Widen(wide, from, from_dtype, count);",
        "call to 'Widen' is ambiguous",
    ),
    "a type of ours where theirs is seen, too": (
        "norm",
        "norm.cpp",
        "NPUZERO_KERNEL(npuzero_norm, RunNorm)",
        'using namespace npuzero::npu;\nstatic_assert(sizeof(ExactSum) > 0, "");',
        "reference to 'ExactSum' is ambiguous",
    ),
    "a number in GM for a template's const T&": (
        "norm",
        "norm.cpp",
        "Muls(t, t, addend_scale_, count);",
        "Muls(t, t, head_->scale, count);",
        "no matching function for call to 'Muls'",
    ),
    "a struct in GM as if it were here": (
        "cast",
        "cast.cpp",
        "rounding_ = head->rounding;",
        "const CastHead mine = *head;\n    rounding_ = mine.rounding;",
        "no matching constructor for initialization of 'const CastHead'",
    ),
    "a pointer that loses its space": (
        "pack",
        "walk.h",
        "reinterpret_cast<__gm__ const Head*>(table)->cores",
        "reinterpret_cast<const Head*>(table)->cores",
        "reinterpret_cast from 'GM_ADDR'",
    ),
    "a function of the host": (
        "pack",
        "walk.h",
        "__aicore__ inline int32_t ItemSize",
        "inline int32_t ItemSize",
        "no matching function for call to 'ItemSize'",
    ),
}


@pytest.mark.parametrize(("kernel", "file", "old", "new", "said"), MUTANTS.values(), ids=MUTANTS)
def test_a_mistake_that_the_emulators_compiler_does_not_see_is_found(
    kernel: str, file: str, old: str, new: str, said: str
) -> None:
    path = ROOT / file
    assert path.read_text().count(old) == 1
    _, complaints = parse_device_file(
        ROOT / f"{kernel}.cpp", "bisheng", changes={path: path.read_text().replace(old, new)}
    )
    assert any(said in complaint for complaint in complaints), complaints


@pytest.mark.parametrize(
    ("way", "word"), [("bisheng", "__vector__"), ("ascendc", "KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);")]
)
def test_a_kernel_without_its_type_is_found(way: str, word: str) -> None:
    path = ROOT / "walk.h"
    unit, _ = parse_device_file(ROOT / "norm.cpp", way, changes={path: strip_comments(path).replace(word, "")})
    assert kernel_types(unit, way) == {"npuzero_norm": False, "npuzero_norm_finish": False}
