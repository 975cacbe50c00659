"""Mistakes in the kernel of cast, its tiling and what it shares with others."""

from __future__ import annotations

from .mutant import KernelMutant

MUTANTS = (
    # flags and barriers
    KernelMutant(
        "no barrier between widening and rounding",
        "walk.h",
        "npu::Widen(wide, from, from_dtype, count);\n    PipeBarrier<PIPE_V>();",
        "npu::Widen(wide, from, from_dtype, count);",
        "race",
    ),
    KernelMutant(
        "columns of draws are read before they are loaded",
        "draws.h",
        "SetFlag<HardEvent::MTE2_V>(loaded_);\n    WaitFlag<HardEvent::MTE2_V>(loaded_);",
        "",
        "race",
    ),
    KernelMutant(
        "an index that begins with the scalar unit's stores, and no flag",
        "draws.h",
        "Duplicate(Half(0), 0xffff, kLanes);",
        "CreateVecIndex(Half(0), 0xffff, kLanes);",
        "race",
    ),
    # queues
    KernelMutant("a forgotten Free of what was stored", "cast.cpp", "out_.FreeTensor(out);", "", "queue"),
    KernelMutant(
        "a queue of one place for two tiles",
        "cast.cpp",
        "TQue<TPosition::VECIN, 2> in_;",
        "TQue<TPosition::VECIN, 1> in_;",
        "queue",
    ),
    KernelMutant(
        "a queue that is fed twice", "cast.cpp", "in_.EnQue(in);", "in_.EnQue(in);\n    in_.EnQue(in);", "queue"
    ),
    # memory
    KernelMutant(
        "DataCopy for DataCopyPad",
        "walk.h",
        "DataCopyPad(to, source, DataCopyExtParams(1, static_cast<uint32_t>(bytes), 0, 0, 0),\n"
        "                DataCopyPadExtParams<uint8_t>(false, 0, 0, 0));",
        "DataCopy(to, source, static_cast<uint32_t>(bytes));",
        "alignment",
    ),
    KernelMutant(
        "a tile of more than a buffer",
        "tiling.h",
        "kSlotBytes / widest_itemsize",
        "4 * kSlotBytes / widest_itemsize",
        "bounds",
    ),
    KernelMutant(
        "a tail that is not computed",
        "walk.h",
        "npu::Widen(to.ReinterpretCast<float>(), from, from_dtype, count);",
        "npu::Widen(to.ReinterpretCast<float>(), from, from_dtype, RoundUp(count, kRepeat) - kRepeat + 1);",
        "poison",
    ),
    # types, rounding, repeats
    KernelMutant(
        "bf16 straight to f16",
        "walk.h",
        "npu::Round(to, wide, to_dtype, count);",
        "Cast(to.ReinterpretCast<half>(), from.ReinterpretCast<bfloat16_t>(), RoundMode::CAST_RINT, count);",
        "dtype",
    ),
    KernelMutant(
        "And of 32-bit integers",
        "draws.h",
        "And(halves, halves, Half(upper).ReinterpretCast<uint16_t>(), static_cast<uint64_t>(2 * kRepeat), repeats,",
        "And(lanes, lanes, Half(upper), static_cast<uint64_t>(kRepeat), repeats,",
        "dtype",
    ),
    KernelMutant(
        "Compare without its tail", "draws.h", "CMPMODE::LE, RoundUp(count, kRepeat)", "CMPMODE::LE, count", "repeat"
    ),
    KernelMutant(
        "a product that overflows",
        "draws.h",
        "static_cast<int32_t>(2 * x), lanes",
        "static_cast<int32_t>(32 * x), lanes",
        "poison",
    ),
    # the arithmetic
    KernelMutant("the next key of the other word", "draws.h", "k0 += 0x9E3779B9u;", "k0 += 0xBB67AE85u;", "values"),
    KernelMutant(
        "columns that begin where the row does not",
        "draws.h",
        "(i * kDrawTable + kLanes - lead) * 4",
        "(i * kDrawTable + kLanes) * 4",
        "bounds",
    ),
    # the cut
    KernelMutant(
        "overlapping shares",
        "tiling.h",
        "shares.push_back({begin, end, part_at(begin)});",
        "shares.push_back({begin, std::min(end + 256, total), part_at(begin)});",
        "cores",
    ),
)

MEANINGS = {
    "payloads": (
        KernelMutant(
            "a draw is added to a NaN",
            "draws.h",
            "Select(sum, mask, sum, from, SELMODE::VSEL_TENSOR_TENSOR_MODE, count);",
            "",
            "poison",
            quick=True,
        ),
        KernelMutant("tf32 rounds NaNs", "cast.cpp", "kLargest, CMPMODE::LE,", "kLargest, CMPMODE::NE,", "poison"),
        KernelMutant(
            "tf32 rounds whatever is not finite",
            "cast.cpp",
            "Select(out, finite, out, in, SELMODE::VSEL_TENSOR_TENSOR_MODE, count);",
            "",
            "poison",
        ),
        KernelMutant(
            "a copy by way of f32",
            "walk.h",
            "npu::Copy(to, from, count * ItemSize(from_dtype));",
            "if (from_dtype == kBF16) {\n"
            "      npu::Widen(wide, from, from_dtype, count);\n"
            "      PipeBarrier<PIPE_V>();\n"
            "      npu::Round(to, wide, to_dtype, count);\n"
            "    } else {\n"
            "      npu::Copy(to, from, count * ItemSize(from_dtype));\n"
            "    }",
            "values",
        ),
        KernelMutant(
            "the largest is not rounded to tf32",
            "cast.cpp",
            "kLargest, CMPMODE::LE,",
            "kLargest, CMPMODE::LT,",
            "values",
        ),
    ),
    "ties": (
        KernelMutant(
            "ties to f16 away from zero",
            "walk.h",
            "Cast(to.ReinterpretCast<half>(), from, RoundMode::CAST_RINT, count);",
            "Cast(to.ReinterpretCast<half>(), from, RoundMode::CAST_ROUND, count);",
            "values",
        ),
        KernelMutant(
            "ties to bf16 away from zero",
            "walk.h",
            "RoundMode bf16 = RoundMode::CAST_RINT",
            "RoundMode bf16 = RoundMode::CAST_ROUND",
            "values",
        ),
        KernelMutant(
            "bf16 by floor",
            "walk.h",
            "RoundMode bf16 = RoundMode::CAST_RINT",
            "RoundMode bf16 = RoundMode::CAST_FLOOR",
            "values",
        ),
        KernelMutant(
            "ties away from zero to even",
            "cast.cpp",
            "kBF16, count, RoundMode::CAST_ROUND);",
            "kBF16, count, RoundMode::CAST_RINT);",
            "values",
        ),
        KernelMutant(
            "tf32's ties toward zero",
            "cast.cpp",
            "in.ReinterpretCast<int32_t>(), 0x1000, count);",
            "in.ReinterpretCast<int32_t>(), 0x0fff, count);",
            "values",
        ),
    ),
    "draws": (
        KernelMutant(
            "a row's border one early",
            "draws.h",
            "(column + count - 1) / kDrawColumns",
            "(column + count - 2) / kDrawColumns",
            "poison",
            quick=True,
        ),
        KernelMutant(
            "a row's border one late",
            "draws.h",
            "end = (row + 1) * kDrawColumns - column;",
            "end = (row + 1) * kDrawColumns - column + 1;",
            "poison",
        ),
        KernelMutant(
            "a phase of draws is dropped",
            "draws.h",
            "const int32_t column = static_cast<int32_t>(index % kDrawColumns);",
            "const int32_t column = static_cast<int32_t>(index % kDrawColumns / kLanes * kLanes);",
            "alignment",
        ),
        KernelMutant(
            "an offset's phase is dropped",
            "launch.cpp",
            "head.offset = args.offset;",
            "head.offset = args.offset / 8 * 8;",
            "values",
        ),
        KernelMutant(
            "one row of draws for all",
            "draws.h",
            "WordOf(first + row, stream, step)",
            "WordOf(first, stream, step)",
            "values",
        ),
        KernelMutant(
            "rows are counted in 32 bits",
            "draws.h",
            "words.counter = row / 4;",
            "words.counter = static_cast<uint32_t>(row / 4);",
            "values",
        ),
        KernelMutant(
            "the offset is lost",
            "cast.cpp",
            "offset_ + static_cast<uint64_t>(at), 0, 0, count",
            "static_cast<uint64_t>(at), 0, 0, count",
            "values",
        ),
        KernelMutant(
            "words of another row", "draws.h", "words.counter != row / 4 || words.stream", "words.stream", "values"
        ),
        KernelMutant(
            "columns of another seed",
            "launch.cpp",
            "if (columns.empty() || made_of != seed) {",
            "if (columns.empty()) {",
            "values",
        ),
        KernelMutant(
            "half of the seed", "launch.cpp", "head.seed_high = static_cast<uint32_t>(args.seed >> 32);", "", "values"
        ),
        KernelMutant("the square is left out", "draws.h", "((word + x * x) & 0xffff)", "(word & 0xffff)", "values"),
    ),
}
