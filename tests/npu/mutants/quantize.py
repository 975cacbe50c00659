"""Mistakes in the kernel of quantize, its tiling and what it shares with dequantize_sum."""

from __future__ import annotations

from .mutant import KernelMutant

MUTANTS = (
    # flags and barriers
    KernelMutant(
        "no barrier before what a block's largest decides",
        "quantize.cpp",
        "ReduceOrder::ORDER_ONLY_VALUE);\n    PipeBarrier<PIPE_V>();",
        "ReduceOrder::ORDER_ONLY_VALUE);",
        "race",
    ),
    KernelMutant(
        "scales and what they are of in one step",
        "quantize.cpp",
        "PipeBarrier<PIPE_V>();\n    Muls(lost, lost, kNan, blocks);",
        "Muls(lost, lost, kNan, blocks);\n    PipeBarrier<PIPE_V>();",
        "race",
    ),
    # queues
    KernelMutant("a forgotten Free of what was rounded", "quantize.cpp", "in_.FreeTensor(in);", "", "queue"),
    # memory
    KernelMutant(
        "residuals where scales are", "quantize.cpp", "rest_ = scales_ + 2 * kSkew;", "rest_ = scales_;", "values"
    ),
    KernelMutant(
        "residuals off a block of UB",
        "quantize.cpp",
        "beside_ = tile * ItemSize(dtype_) + kSkew;",
        "beside_ = tile * ItemSize(dtype_) + kSkew / 16;",
        "alignment",
    ),
    KernelMutant(
        "repeats that write what others wrote",
        "wire.h",
        "apart(1, 1, 1, 8, Step(), Step())",
        "apart(1, 1, 1, 4, Step(), Step())",
        "overlap",
    ),
    # types, rounding, repeats
    KernelMutant(
        "f32 straight to 8 bits",
        "quantize.cpp",
        "blocks_.Narrow(out, whole, count);",
        "Cast(out.ReinterpretCast<int8_t>(), Work(), RoundMode::CAST_RINT, count);",
        "dtype",
    ),
    KernelMutant(
        "integers of 16 bits straight to 8",
        "quantize.cpp",
        "blocks_.Narrow(out, whole, count);",
        "Cast(out.ReinterpretCast<int8_t>(), codes, RoundMode::CAST_RINT, count);",
        "dtype",
    ),
    # the arithmetic
    KernelMutant(
        "a block's largest of its neighbours, too",
        "wire.h",
        "apart(1, 1, 1, 8, Step(), Step())",
        "apart(1, 1, 1, 8, 8, 8)",
        "poison",
    ),
    KernelMutant("a scale that is rounded down", "quantize.cpp", "Adds(scale, scale, 0xffff, blocks);", "", "poison"),
    KernelMutant(
        "a scale for one code more than there is",
        "launch.cpp",
        "head.inverse = 1.0f / wire_largest(args.bits);",
        "head.inverse = 1.0f / (wire_largest(args.bits) + 1);",
        "poison",
    ),
    # the cut
    KernelMutant(
        "a cut in a line of scales",
        "launch.cpp",
        "part.written[1] = {row.scales, 2, head.wire.block};",
        "part.written[1] = {row.codes, 1, 8 / args.bits};",
        "cores",
    ),
    KernelMutant(
        "messages without what fills them up",
        "launch.cpp",
        "row.codes = address(messages.data) + i * message_bytes(count, wire.bits);",
        "row.codes = address(messages.data) + i * (message_bytes(count, wire.bits) - message_line);",
        "cores",
    ),
)

MEANINGS = {
    "ties": (
        KernelMutant(
            "codes' ties away from zero",
            "quantize.cpp",
            "Cast(codes, Work(), RoundMode::CAST_RINT, count);",
            "Cast(codes, Work(), RoundMode::CAST_ROUND, count);",
            "values",
        ),
        KernelMutant(
            "a scale that is rounded to nearest",
            "quantize.cpp",
            "Adds(scale, scale, 0xffff, blocks);",
            "Adds(scale, scale, 0x7fff, blocks);",
            "values",
        ),
    ),
    "not finite": (
        KernelMutant(
            "NaNs among what the largest is looked for",
            "quantize.cpp",
            "Mins(folded, folded, kInfinity, blocks * kRepeat);",
            "",
            "poison",
        ),
        KernelMutant("a lost block is rounded", "quantize.cpp", "blocks_.Mask(x, kMask, count);", "", "poison"),
        KernelMutant(
            "a lost block's scale is infinity",
            "quantize.cpp",
            "Max(lost, lost, scale, blocks);",
            "Adds(lost, scale, 0, blocks);",
            "values",
        ),
        KernelMutant(
            "a lost block's factor is infinity",
            "quantize.cpp",
            "Mins(scale, largest, kInfinity - 1, blocks);",
            "Mins(scale, largest, kInfinity, blocks);",
            "values",
        ),
        KernelMutant(
            "the largest number is taken for infinity",
            "quantize.cpp",
            "Adds(lost, largest, 1 - kInfinity, blocks);",
            "Adds(lost, largest, 2 - kInfinity, blocks);",
            "poison",
        ),
    ),
    "zeros": (
        KernelMutant(
            "no least scale", "quantize.cpp", "Maxs(scale, scale, kLeastScale, blocks);", "", "poison", quick=True
        ),
        KernelMutant(
            "another least scale", "quantize.cpp", "kLeastScale = 7 << 23;", "kLeastScale = 8 << 23;", "values"
        ),
    ),
}
