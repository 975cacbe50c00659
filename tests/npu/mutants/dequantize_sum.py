"""Mistakes in the kernel of dequantize_sum, its tiling and what it shares with quantize."""

from __future__ import annotations

from .mutant import KernelMutant

MUTANTS = (
    # flags and barriers
    KernelMutant(
        "codes and scales that are read while they are widened",
        "dequantize_sum.cpp",
        "kBF16, blocks);\n    PipeBarrier<PIPE_V>();",
        "kBF16, blocks);",
        "race",
    ),
    KernelMutant(
        "a row is added while it is scaled",
        "dequantize_sum.cpp",
        "PipeBarrier<PIPE_V>();\n      Add(sum, sum, Wide(), count);",
        "Add(sum, sum, Wide(), count);",
        "race",
    ),
    # queues
    KernelMutant(
        "a forgotten Free of what a sum is added to", "dequantize_sum.cpp", "before_.FreeTensor(in);", "", "queue"
    ),
    KernelMutant(
        "a queue of one place for two rows",
        "dequantize_sum.cpp",
        "TQue<TPosition::VECIN, 2> in_;",
        "TQue<TPosition::VECIN, 1> in_;",
        "queue",
    ),
    # memory
    KernelMutant(
        "scales off a block of UB",
        "dequantize_sum.cpp",
        "scales_ = tile * head->wire.bits / 8;",
        "scales_ = tile * head->wire.bits / 8 + 2;",
        "alignment",
    ),
    KernelMutant(
        "a tile as if all were of 8 bits",
        "launch.cpp",
        "wire_of(args.out.dtype, args.bits, 2)",
        "wire_of(args.out.dtype, args.bits, 1)",
        "capacity",
    ),
    # types
    KernelMutant(
        "codes straight to f32",
        "dequantize_sum.cpp",
        "Cast(Wide(), codes, RoundMode::CAST_NONE, count);",
        "Cast(Wide(), in.ReinterpretCast<int8_t>(), RoundMode::CAST_NONE, count);",
        "dtype",
    ),
    KernelMutant(
        "scales of f16",
        "dequantize_sum.cpp",
        "npu::Widen(blocks_.LaneOfFloats(0), in[scales_], kBF16, blocks);",
        "npu::Widen(blocks_.LaneOfFloats(0), in[scales_], kF16, blocks);",
        "values",
    ),
    # the arithmetic
    KernelMutant(
        "one scale for all blocks",
        "wire.h",
        "BinaryRepeatParams(1, 1, 0, Step(), Step(), 1);",
        "BinaryRepeatParams(1, 1, 0, Step(), Step(), 0);",
        "values",
    ),
    KernelMutant(
        "a first row that is added to nothing", "dequantize_sum.cpp", "first ? sum : Wide()", "Wide()", "poison"
    ),
    KernelMutant(
        "the last row is left out",
        "dequantize_sum.cpp",
        "for (int32_t row = 0; row < rows_; ++row) {\n        const bool last = row == rows_ - 1;",
        "const int32_t rows = rows_ > 1 ? rows_ - 1 : 1;\n"
        "      for (int32_t row = 0; row < rows; ++row) {\n        const bool last = row == rows - 1;",
        "values",
    ),
    KernelMutant("what there was is forgotten", "dequantize_sum.cpp", "Add(sum, before, sum, count);", "", "values"),
    # the cut
    KernelMutant(
        "rows that lie a message apart",
        "launch.cpp",
        "head.row_bytes = args.pieces * message_bytes(count, args.bits);",
        "head.row_bytes = message_bytes(count, args.bits);",
        "values",
    ),
    KernelMutant(
        "a cut in a block",
        "launch.cpp",
        "itemsize(args.out.dtype)}}}, 1, head.wire.block});",
        "itemsize(args.out.dtype)}}}, 1});",
        "poison",
        quick=True,
    ),
)

MEANINGS: dict[str, tuple[KernelMutant, ...]] = {}
