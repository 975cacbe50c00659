"""Mistakes in the kernel of norm, its tiling and what it shares with others."""

from __future__ import annotations

from .mutant import KernelMutant

MUTANTS = (
    # flags and barriers
    KernelMutant(
        "the scalar unit does not wait for vectors",
        "norm.cpp",
        "SetFlag<HardEvent::V_S>(computed_);\n    WaitFlag<HardEvent::V_S>(computed_);",
        "",
        "race",
    ),
    KernelMutant(
        "vectors do not wait for the scalar unit",
        "norm.cpp",
        "SetFlag<HardEvent::S_V>(read_);\n    WaitFlag<HardEvent::S_V>(read_);",
        "",
        "race",
    ),
    KernelMutant(
        "the result is stored before it is written",
        "exact_sum.h",
        "SetFlag<HardEvent::S_MTE3>(written);\n  WaitFlag<HardEvent::S_MTE3>(written);",
        "",
        "race",
    ),
    KernelMutant(
        "sums are read before they are loaded",
        "norm.cpp",
        "SetFlag<HardEvent::MTE2_S>(loaded);\n  WaitFlag<HardEvent::MTE2_S>(loaded);",
        "",
        "race",
    ),
    # queues
    KernelMutant(
        "one buffer for two tiles",
        "norm.cpp",
        "pipe_.InitBuffer(in_, 2, narrow_ ?",
        "pipe_.InitBuffer(in_, 1, narrow_ ?",
        "queue",
    ),
    # memory
    KernelMutant(
        "a read beyond the global tensor",
        "walk.h",
        "DataCopy(to, source, static_cast<uint32_t>(bytes));",
        "DataCopy(to, source, static_cast<uint32_t>(bytes) + 32);",
        "bounds",
    ),
    # types, rounding, repeats
    KernelMutant(
        "halves that overlap",
        "norm.cpp",
        "Add(patterns, patterns, patterns[half], half);",
        "Add(patterns, patterns, patterns[half], half + kFew);",
        "overlap",
    ),
    # the arithmetic
    KernelMutant(
        "squares without their low halves", "norm.cpp", "Mul(x, x, x, width);", "Muls(x, x, 0.0f, width);", "values"
    ),
    KernelMutant(
        "a sum without what it loses",
        "norm.cpp",
        "Sub(pair.smaller, pair.smaller, pair.larger, pair.lanes);",
        "Duplicate(pair.smaller, 0.0f, pair.lanes);",
        "values",
    ),
    KernelMutant(
        "squares that vanish are taken as they are",
        "norm.cpp",
        "if (!finite || most < kLeastSum) return false;",
        "if (!finite) return false;",
        "values",
    ),
    KernelMutant(
        "the first chunk of a pair is left out",
        "norm.cpp",
        "pair.a = kept ? Kept() : sums[first * kRow];",
        "pair.a = sums[first * kRow];",
        "values",
    ),
    # the cut
    KernelMutant(
        "more blocks than cores",
        "tiling.h",
        "for (int64_t core = 0; core < wanted; ++core) {",
        "for (int64_t core = 0; core < wanted + 9; ++core) {",
        "cores",
    ),
)

MEANINGS = {
    "not finite": (
        KernelMutant(
            "an infinity of one core makes a NaN of all",
            "norm.cpp",
            "total.nans += static_cast<int64_t>(npu::GetLong(its, kDigits + 1));",
            "total.nans += static_cast<int64_t>(npu::GetLong(its, kDigits));",
            "values",
            quick=True,
        ),
        KernelMutant(
            "a core's NaN is not merged",
            "norm.cpp",
            "total.nans += static_cast<int64_t>(npu::GetLong(its, kDigits + 1));",
            "",
            "values",
        ),
        KernelMutant(
            "a core's infinity is not merged",
            "norm.cpp",
            "total.bad += static_cast<int64_t>(npu::GetLong(its, kDigits));",
            "",
            "values",
        ),
        KernelMutant(
            "the first core's sums for all",
            "norm.cpp",
            "const LocalTensor<uint32_t> its = sums[core * kNormBytes / 4];",
            "const LocalTensor<uint32_t> its = sums[0];",
            "values",
        ),
        KernelMutant(
            "a core leaves its infinities as NaNs",
            "norm.cpp",
            "SetLong(words, kDigits + 1, static_cast<uint64_t>(sum_.nans));",
            "SetLong(words, kDigits + 1, static_cast<uint64_t>(sum_.bad));",
            "values",
        ),
        KernelMutant(
            "an infinity counts as a NaN",
            "norm.cpp",
            "if (most > kInfinity) sum_.nans += 1;",
            "if (most >= kInfinity) sum_.nans += 1;",
            "values",
        ),
        KernelMutant("a NaN counts as an infinity", "norm.cpp", "if (most > kInfinity) sum_.nans += 1;", "", "values"),
        KernelMutant(
            "a NaN for whatever is not finite",
            "exact_sum.h",
            "sum.nans != 0 ? 0x7ff8000000000000u",
            "sum.bad != 0 ? 0x7ff8000000000000u",
            "values",
        ),
    ),
    "workspaces": (
        KernelMutant(
            "sums begin in the line that the workspace begins in",
            "launch.cpp",
            "(address(args.workspace.data) + line_bytes - 1)",
            "address(args.workspace.data)",
            "bounds",
            quick=True,
        ),
        KernelMutant(
            "more cores than the workspace is for",
            "tiling.h",
            "kNormBytes / 16 * 8192",
            "kNormBytes / 16 * 2048",
            "bounds",
        ),
        KernelMutant(
            "sums end where the next core's begin", "table.h", "kNormBytes = 256;", "kNormBytes = 208;", "cores"
        ),
        KernelMutant(
            "cores meet in a line of what is added up in place",
            "launch.cpp",
            "args.addend && head.x % line_bytes != 0 ? 1 : cores",
            "cores",
            "cores",
        ),
    ),
    "ties": (
        KernelMutant(
            "a tie of the sum, whatever follows it",
            "exact_sum.h",
            "dropped > 0x400 || (dropped == 0x400 && (rest != 0 || (kept & 1) != 0))",
            "dropped > 0x400 || (dropped == 0x400 && (kept & 1) != 0)",
            "values",
        ),
        KernelMutant(
            "the sum's ties away from zero",
            "exact_sum.h",
            "dropped > 0x400 || (dropped == 0x400 && (rest != 0 || (kept & 1) != 0))",
            "dropped >= 0x400",
            "values",
        ),
        KernelMutant(
            "the sum's ties toward zero",
            "exact_sum.h",
            "dropped > 0x400 || (dropped == 0x400 && (rest != 0 || (kept & 1) != 0))",
            "dropped > 0x400 || (dropped == 0x400 && rest != 0)",
            "values",
        ),
        KernelMutant(
            "the sum by truncation",
            "exact_sum.h",
            "dropped > 0x400 || (dropped == 0x400 && (rest != 0 || (kept & 1) != 0))",
            "false",
            "values",
        ),
    ),
    "magnitudes": (
        KernelMutant(
            "squares of bf16 are not scaled",
            "norm.cpp",
            "Muls(squares, squares, scale, rows * kRow);",
            "",
            "values",
            quick=True,
        ),
        KernelMutant(
            "squares of bf16 are scaled where they need not be",
            "norm.cpp",
            "if (scale != 1.0f) {\n      Muls(squares",
            "if (scale == 1.0f) {\n      Muls(squares",
            "values",
        ),
    ),
}
