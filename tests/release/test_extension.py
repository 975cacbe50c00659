"""What the extension module asks of a machine: common libraries, and no instruction that a processor may lack."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import pytest

from npuzero import _C

pytestmark = pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump, of binutils")

#: Of glibc and gcc; libgomp is torch's where torch has one.
LIBRARIES = {"c", "m", "rt", "dl", "pthread", "stdc++", "gcc_s", "gomp", "ld-linux-x86-64", "ld-linux-aarch64"}
_FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
#: AVX and AVX-512 encode every instruction anew, and its name begins with a v then (verr and verw are of the 80286).
_WIDE = re.compile(r"^ +[0-9a-f]+:\tv(?!er[rw])")


def run_objdump(*flags: str) -> list[str]:
    command = ["objdump", *flags, _C.__file__]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.splitlines()


def test_it_links_neither_torch_nor_python_nor_a_vendors_library() -> None:
    needed = {line.split()[1] for line in run_objdump("--private-headers") if line.startswith("  NEEDED")}
    assert {re.sub(r"^lib|\.so[.\d]*$", "", name) for name in needed} <= LIBRARIES


@pytest.mark.skipif(platform.machine() != "x86_64", reason="aarch64 has one instruction set")
def test_what_not_every_processor_has_is_in_the_functions_of_that_instruction_set_alone() -> None:
    function, wide = "", set()
    for line in run_objdump("--disassemble", "--no-show-raw-insn"):
        if begun := _FUNCTION.match(line):
            function = begun[1]
        elif _WIDE.match(line):
            wide.add(function)
    assert {"avx2", "avx512"} <= {isa for name in wide for isa in re.findall(r"avx512|avx2", name)}
    assert [name for name in wide if "avx" not in name] == []
