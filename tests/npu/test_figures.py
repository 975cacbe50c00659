"""What the npu kernels are to cost by the counts of the emulator; no measurement (npu/figures.py)."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from npu import figures

REFERENCE = "flat_adam bf16 gradient and copy"
DRAWN = (
    "cast f32 to bf16, stochastic",
    "flat_adam bf16 masters, stochastic",
    "flat_adam bf16 moments, gradient and copy",
    "flat_adam 8-bit moments, bf16 gradient and copy",
    "flat_adam 8-bit moments, bf16 masters",
    "flat_lion bf16 masters and moments, stochastic",
    "flat_lion 8-bit moments, bf16 gradient and copy",
)
WIRES = [name for name in figures.CASES if name.startswith(("quantize", "dequantize_sum"))]
NORMS = ("norm of f32", "norm of bf16", "norm of f32 + bf16")


@functools.cache
def kernel_figures(name: str) -> dict[str, float]:
    return figures.measure_kernel_figures([name])[name]


@pytest.mark.parametrize("name", DRAWN)
def test_rounding_by_chance_and_codes_take_at_most_twice_the_ordinary_update(name: str) -> None:
    assert kernel_figures(name)["ms"] <= 2 * kernel_figures(REFERENCE)["ms"]


@pytest.mark.parametrize("name", NORMS)
def test_norm_takes_little_more_than_its_bytes(name: str) -> None:
    assert kernel_figures(name)["share_of_hbm"] >= 0.6


@pytest.mark.parametrize("name", WIRES)
def test_thin_wires_take_little_more_than_their_bytes(name: str) -> None:
    row = kernel_figures(name)
    assert row["bytes"] == pytest.approx(row["least_bytes"], abs=1e-9) and row["share_of_hbm"] >= 0.75


def test_the_update_reads_no_two_sources_from_one_group_of_banks() -> None:
    """But for the division by one block, which meets every other repeat."""
    assert kernel_figures(REFERENCE)["conflicts"] <= 0.5 / 64


@pytest.mark.parametrize("name", [name for name in figures.CASES if name.startswith("flat_") and name not in DRAWN])
def test_the_ordinary_update_is_bound_by_its_bytes(name: str) -> None:
    row = kernel_figures(name)
    assert row["bytes"] == row["least_bytes"] and row["share_of_hbm"] == 1


def test_the_documentation_has_the_table_of_the_record() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    record = json.loads((root / "benchmarks" / "results" / "npu" / "counts.json").read_text(encoding="utf-8"))
    assert set(record["kernels"]) == set(figures.CASES)
    assert figures.format_kernel_table(record["kernels"]) in (root / "docs" / "npu.md").read_text(encoding="utf-8")
