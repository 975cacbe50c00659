"""Mistakes in the kernel of pack, its tiling and what it shares with others."""

from __future__ import annotations

from .mutant import KernelMutant

MUTANTS = (
    # flags and barriers
    KernelMutant(
        "a barrier of another pipe",
        "pack.cpp",
        "Muls(result, x, scale_, count);\n    PipeBarrier<PIPE_V>();",
        "Muls(result, x, scale_, count);\n    PipeBarrier<PIPE_MTE2>();",
        "race",
    ),
    # queues
    KernelMutant("a forgotten Free of what was loaded", "pack.cpp", "in_.FreeTensor(in);", "", "queue"),
    KernelMutant(
        "Free before the last use",
        "pack.cpp",
        "npu::Store(row->target + at * size, out, count * size);\n      out_.FreeTensor(out);",
        "out_.FreeTensor(out);\n      npu::Store(row->target + at * size, out, count * size);",
        "queue",
    ),
    KernelMutant("no EnQue", "pack.cpp", "out_.EnQue(out);", "", "queue"),
    # memory
    KernelMutant(
        "a tail rounded up to a block",
        "walk.h",
        "DataCopyPad(target, from, DataCopyExtParams(1, static_cast<uint32_t>(bytes), 0, 0, 0));",
        "target.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(to), RoundUp(bytes, kBlockBytes));\n"
        "    DataCopy(target, from, static_cast<uint32_t>(RoundUp(bytes, kBlockBytes)));",
        "bounds",
    ),
    KernelMutant("an oversized tile", "table.h", "kSlotBytes = 16384;", "kSlotBytes = 20480;", "capacity"),
    KernelMutant(
        "an unaligned start in UB",
        "pack.cpp",
        "if (accumulate_) npu::Load(in[kSlotBytes],",
        "if (accumulate_) npu::Load(in[kSlotBytes - 4],",
        "alignment",
    ),
    # types, rounding, repeats
    KernelMutant(
        "rounding toward zero",
        "walk.h",
        "RoundMode bf16 = RoundMode::CAST_RINT",
        "RoundMode bf16 = RoundMode::CAST_TRUNC",
        "values",
    ),
    # the cut
    KernelMutant(
        "neighbours that nothing binds",
        "tiling.h",
        "if ((below.end - 1) / line_bytes != above.begin / line_bytes) continue;",
        "continue;",
        "cores",
    ),
    KernelMutant(
        "a share that is left out",
        "tiling.h",
        "if (end > begin) shares.push_back({begin, end, part_at(begin)});",
        "if (end > begin && core != 2) shares.push_back({begin, end, part_at(begin)});",
        "values",
    ),
)

MEANINGS = {
    "ties": (
        KernelMutant(
            "f16 by truncation",
            "walk.h",
            "Cast(to.ReinterpretCast<half>(), from, RoundMode::CAST_RINT, count);",
            "Cast(to.ReinterpretCast<half>(), from, RoundMode::CAST_TRUNC, count);",
            "values",
        ),
        KernelMutant(
            "a wire's ties away from zero",
            "walk.h",
            "RoundMode bf16 = RoundMode::CAST_RINT",
            "RoundMode bf16 = RoundMode::CAST_ROUND",
            "values",
        ),
    ),
}
