"""CRC32C by its definition, in every way that a processor has: this one, and aarch64 where there is an emulator."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from disk.programs import build_cpp_program
from npuzero import _native
from npuzero.errors import ContractError
from npuzero.memory.file import BLOCK

DATA = random.Random(2).randbytes(2 * BLOCK + 13)
LENGTHS = (0, 1, 7, 8, 9, 1000, BLOCK, BLOCK + 1, len(DATA))


def crc32c(data: bytes) -> int:
    """By its definition, bit by bit."""
    rest = 0xFFFFFFFF
    for byte in data:
        rest ^= byte
        for _ in range(8):
            rest = rest >> 1 ^ (0x82F63B78 if rest & 1 else 0)
    return rest ^ 0xFFFFFFFF


@pytest.mark.parametrize("way", _native.io.crc32c_ways())
def test_checksums(way: str) -> None:
    check = _native.io.crc32c_by
    assert check(way, b"123456789") == 0xE3069283
    assert check(way, bytes(32)) == 0x8A9136AA, "RFC 3720, B.4"
    for nbytes in LENGTHS:
        assert check(way, DATA[:nbytes]) == crc32c(DATA[:nbytes])
    assert _native.io.crc32c(DATA) == crc32c(DATA)
    with pytest.raises(ContractError, match="crc32c_ways"):
        check("none", DATA)


def test_checksums_of_aarch64(tmp_path: Path) -> None:
    """By the table and by ARMv8's instruction."""
    program = build_cpp_program("checksums", ("crc32c",), tmp_path, "aarch64")
    ran = subprocess.run([*program, *map(str, LENGTHS)], input=DATA, capture_output=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    found = ran.stdout.decode().splitlines()
    assert found == [f"{way} {n} {crc32c(DATA[:n])}" for way in ("table", "armv8") for n in LENGTHS]


@pytest.mark.slow
def test_the_store_of_aarch64(tmp_path: Path) -> None:
    """It comes through its stress there, too: threads, faults, stores that are dropped."""
    if _native.io.is_memory(str(tmp_path)):
        pytest.skip("the temporary folder is in memory")
    program = build_cpp_program("stress", ("crc32c", "system", "file", "store"), tmp_path, "aarch64", ("-O1",))
    ran = subprocess.run([*program, str(tmp_path), "1"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "requests" in ran.stdout and not ran.stderr
