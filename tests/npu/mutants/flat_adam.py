"""Mistakes in the kernel of flat_adam, its tiling and what it shares with others."""

from __future__ import annotations

from .mutant import KernelMutant

_SKIP = "ScalarAt(reinterpret_cast<__gm__ const FlatHead*>(table)->skip, 0.0f)"
_IF_SKIP = f"if (!({_SKIP} == 0.0f))"

MUTANTS = (
    # flags and barriers
    KernelMutant(
        "stores do not wait for the update", "flat.h", "WaitFlag<HardEvent::V_MTE3>(updated_[mine]);", "", "race"
    ),
    KernelMutant(
        "no flag between update and stores",
        "flat.h",
        "SetFlag<HardEvent::V_MTE3>(updated_[mine]);\n      WaitFlag<HardEvent::V_MTE3>(updated_[mine]);",
        "",
        "race",
    ),
    KernelMutant(
        "a slot is loaded while it is stored",
        "flat.h",
        "if (used_[slot]) WaitFlag<HardEvent::MTE3_MTE2>(stored_[slot]);\n    used_[slot] = false;",
        "",
        "race",
    ),
    KernelMutant(
        "both slots have one flag",
        "flat.h",
        "loaded_[i] = pipe_.AllocEventID<HardEvent::MTE2_V>();",
        "loaded_[i] = i == 0 ? pipe_.AllocEventID<HardEvent::MTE2_V>() : loaded_[0];",
        "flag",
    ),
    KernelMutant(
        "an event that was not allocated",
        "flat.h",
        "stored_[i] = pipe_.AllocEventID<HardEvent::MTE3_MTE2>();",
        "stored_[i] = i;",
        "flag",
    ),
    KernelMutant(
        "the wrong pair of pipes",
        "flat.h",
        "SetFlag<HardEvent::MTE2_V>(loaded_[slot]);",
        "SetFlag<HardEvent::MTE2_MTE3>(loaded_[slot]);",
        "flag",
    ),
    KernelMutant(
        "columns of draws are loaded while they are read",
        "draws.h",
        "SetFlag<HardEvent::V_MTE2>(used_);\n    WaitFlag<HardEvent::V_MTE2>(used_);",
        "",
        "race",
    ),
    KernelMutant(
        "rows of draws that meet in a block, in any order",
        "draws.h",
        "if (lead_ != 0) PipeBarrier<PIPE_V>();",
        "",
        "race",
    ),
    # memory
    KernelMutant("a UB larger than it is", "tiling.h", "usable = 188160", "usable = 208896", "capacity"),
    KernelMutant(
        "a tile of more than a place",
        "launch.cpp",
        "row.piece.tile = head.tile;",
        "row.piece.tile = 2 * head.tile;",
        "race",
    ),
    KernelMutant(
        "an output that is never computed",
        "flat.h",
        "npu::Round(Place(slot, kGradient), tile.p, row->low_dtype, count, RoundMode::CAST_ROUND);",
        "npu::Round(Place(slot, kGradient), tile.p, row->low_dtype, count / 2, RoundMode::CAST_ROUND);",
        "values",
    ),
    KernelMutant(
        "a write to what is only read",
        "flat.h",
        "npu::Store(row->low + at * 2, Place(slot, kGradient), count * 2);",
        "npu::Store(row->grad + at * 2, Place(slot, kGradient), count * 2);",
        "bounds",
    ),
    # types, rounding, repeats
    KernelMutant(
        "a repeat too few",
        "flat_adam.cpp",
        "static_cast<uint8_t>(RoundUp(count, kRepeat) / kRepeat)",
        "static_cast<uint8_t>(count < 2 * kRepeat ? 2 : count / kRepeat)",
        "values",
    ),
    KernelMutant(
        "repeats of part of a register",
        "flat_adam.cpp",
        "static_cast<uint64_t>(kRepeat), repeats",
        "static_cast<uint64_t>(kRepeat / 2), repeats",
        "repeat",
    ),
    # the arithmetic
    KernelMutant(
        "the first moment before its decay",
        "flat_adam.cpp",
        "Muls(t, g, one_minus_beta2_, count);",
        "Muls(t, g, one_minus_beta1_, count);",
        "values",
    ),
    KernelMutant("no 64-bit places", "draws.h", "static_cast<uint32_t>(words.counter >> 32)", "0", "values"),
    # codes of 8 bits
    KernelMutant(
        "exponents are spread as they are computed",
        "codes.h",
        "Adds(Lane(1), Lane(1), kInfinity, blocks);\n    PipeBarrier<PIPE_V>();",
        "Adds(Lane(1), Lane(1), kInfinity, blocks);",
        "race",
    ),
    KernelMutant(
        "a block's tail is not filled",
        "codes.h",
        "if (count % kCodeBlock != 0) {",
        "if (count % kCodeBlock == 1) {",
        "values",
    ),
    KernelMutant(
        "the largest of NaN",
        "codes.h",
        "Mins(t.ReinterpretCast<int32_t>(), t.ReinterpretCast<int32_t>(), kInfinity - 1, count);",
        "",
        "poison",
    ),
    KernelMutant(
        "16-bit integers straight to bytes",
        "codes.h",
        "Cast(place, room, RoundMode::CAST_RINT, count);",
        "Cast(place, code, RoundMode::CAST_RINT, count);",
        "dtype",
    ),
    KernelMutant(
        "an element in place of another that is still read",
        "codes.h",
        "repeats, ByBlock());\n    PipeBarrier<PIPE_V>();\n    Mul(t, t,",
        "repeats, ByBlock());\n    Mul(t, t,",
        "race",
    ),
    KernelMutant(
        "one exponent for every block",
        "codes.h",
        "BinaryRepeatParams(1, 1, 0, 8, 8, 1)",
        "BinaryRepeatParams(1, 1, 0, 8, 8, 0)",
        "poison",
    ),
    KernelMutant(
        "an exponent for each datablock",
        "codes.h",
        "BinaryRepeatParams(1, 1, 0, 8, 8, 1)",
        "BinaryRepeatParams(1, 1, 1, 8, 8, 8)",
        "bounds",
    ),
    KernelMutant(
        "lanes that begin within a datablock",
        "codes.h",
        "stride_ = RoundUp(tile / kCodeBlock, kSpreadLanes);",
        "stride_ = tile / kCodeBlock + 1;",
        "alignment",
    ),
    KernelMutant(
        "draws of fewer bits than are dropped", "codes.h", "ShiftLeft(bits, bits, kDropped - 16, count);", "", "values"
    ),
    KernelMutant(
        "a second moment with a sign",
        "flat_adam.cpp",
        "bool Signed(int32_t i) { return i == 0; }",
        "bool Signed(int32_t i) { return i != 2; }",
        "values",
    ),
    KernelMutant(
        "a tile that begins within a block of codes",
        "launch.cpp",
        "row.piece.tile = head.tile;",
        "row.piece.tile = head.tile - 32;",
        "race",
    ),
    KernelMutant(
        "exponents of two cores in one line", "launch.cpp", "writes(moment.exponents, 1, kCodeBlock);", "", "cores"
    ),
    # the cut
    KernelMutant(
        "cuts wherever they fall", "tiling.h", "if (aligned == inside) return place;", "return place;", "cores"
    ),
)

MEANINGS = {
    "skip": (
        KernelMutant("only 1 skips", "flat.h", _IF_SKIP, f"if ({_SKIP} == 1.0f)", "values", quick=True),
        KernelMutant("only what is positive skips", "flat.h", _IF_SKIP, f"if ({_SKIP} > 0.0f)", "values"),
        KernelMutant("NaN does not skip", "flat.h", _IF_SKIP, f"if ({_SKIP} > 0.0f || {_SKIP} < 0.0f)", "values"),
        KernelMutant(
            "less than 1 does not skip", "flat.h", _IF_SKIP, f"if (static_cast<int32_t>({_SKIP}) != 0)", "values"
        ),
        KernelMutant("skip is not handed over", "launch.cpp", "head.skip = address(args.skip);", "", "values"),
        KernelMutant(
            "no scale is another one",
            "flat.h",
            "grad_scale_ = ScalarAt(head->grad_scale, 1.0f);",
            "grad_scale_ = ScalarAt(head->grad_scale, 2.0f);",
            "values",
        ),
    ),
    "not finite": (
        KernelMutant(
            "the maximum of a NaN is a number",
            "flat_adam.cpp",
            "Compare(number, top, top, CMPMODE::NE, lanes);",
            "Compare(number, v, v, CMPMODE::NE, lanes);",
            "values",
        ),
        KernelMutant(
            "a block with an infinity is kept",
            "codes.h",
            "kInfinity - 1, count);",
            "kInfinity - (1 << kDropped), count);",
            "poison",
        ),
        KernelMutant(
            "a block that was lost is read",
            "codes.h",
            "Muls(nan, factor, 0.0f, blocks);",
            "Duplicate(nan, 0.0f, blocks);",
            "values",
        ),
        KernelMutant(
            "a lost block keeps its codes",
            "codes.h",
            "Mins(Lane(2), Lane(1), 1, blocks);",
            "Duplicate(Lane(2), 1, blocks);",
            "poison",
        ),
    ),
    "payloads": (
        KernelMutant(
            "a moment's NaN takes a draw", "draws.h", "kLargest, CMPMODE::LE,", "kLargest, CMPMODE::NE,", "poison"
        ),
        KernelMutant(
            "a NaN has a remainder",
            "flat.h",
            "Select(rest, number, rest, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, count);",
            "",
            "poison",
        ),
    ),
    "ties": (
        KernelMutant(
            "a copy's ties to f16 away from zero",
            "walk.h",
            "Cast(to.ReinterpretCast<half>(), from, RoundMode::CAST_RINT, count);",
            "Cast(to.ReinterpretCast<half>(), from, RoundMode::CAST_ROUND, count);",
            "values",
            quick=True,
        ),
        KernelMutant(
            "a bf16 copy's ties to even",
            "flat.h",
            "tile.p, row->low_dtype, count, RoundMode::CAST_ROUND);",
            "tile.p, row->low_dtype, count, RoundMode::CAST_RINT);",
            "values",
        ),
        KernelMutant(
            "a moment's ties to even",
            "flat.h",
            "kBF16, count,\n               RoundMode::CAST_ROUND);",
            "kBF16, count,\n               RoundMode::CAST_RINT);",
            "values",
        ),
        KernelMutant(
            "a split master's ties to even",
            "flat.h",
            "npu::Round(upper, p, kBF16, count, RoundMode::CAST_ROUND);",
            "npu::Round(upper, p, kBF16, count, RoundMode::CAST_RINT);",
            "poison",
        ),
        KernelMutant(
            "a code's ties toward zero",
            "codes.h",
            "kHalfCode = 1 << (kDropped - 1);",
            "kHalfCode = (1 << (kDropped - 1)) - 1;",
            "values",
        ),
        KernelMutant(
            "an exponent's ties toward zero",
            "codes.h",
            "(1 << kDropped) - 1, blocks);",
            "(1 << kDropped) - 2, blocks);",
            "values",
        ),
        KernelMutant(
            "an exponent goes up before its tie",
            "codes.h",
            "(1 << kDropped) - 1, blocks);",
            "1 << kDropped, blocks);",
            "values",
        ),
        KernelMutant("another least exponent", "codes.h", "kLeastExponent = 16;", "kLeastExponent = 15;", "values"),
        KernelMutant(
            "the least code that is no zero is one",
            "codes.h",
            "- (kHalfCode >> 16)",
            "- (kHalfCode >> 16) - 1",
            "values",
        ),
        KernelMutant(
            "what is below the least code by half is zero",
            "codes.h",
            "(kScaled - 8) << 7",
            "(kScaled - 7) << 7",
            "values",
        ),
    ),
    "draws": (
        KernelMutant(
            "places are counted in 32 bits",
            "launch.cpp",
            "row.place = static_cast<uint64_t>(part.place);",
            "row.place = static_cast<uint32_t>(part.place);",
            "values",
        ),
        KernelMutant(
            "the place is lost",
            "flat.h",
            "row->place + static_cast<uint64_t>(at), stream, formula_.step, count",
            "static_cast<uint64_t>(at), stream, formula_.step, count",
            "values",
        ),
        KernelMutant(
            "words of another stream",
            "draws.h",
            "words.counter != row / 4 || words.stream != stream ||",
            "words.counter != row / 4 ||",
            "values",
        ),
        KernelMutant("words of another step", "draws.h", " || words.step != step)", ")", "values"),
        KernelMutant(
            "a row's first draws over those of the row before",
            "draws.h",
            "for (int32_t row = (column + count - 1) / kDrawColumns; row >= 0; --row) {",
            "for (int32_t row = 0; row <= (column + count - 1) / kDrawColumns; ++row) {",
            "values",
        ),
        KernelMutant(
            "master and moment have one stream", "flat.h", "row->stream + 0x80000000u", "row->stream", "values"
        ),
        KernelMutant(
            "draws of the group's step, where the device has it",
            "flat_adam.cpp",
            "static_cast<uint32_t>(ScalarAt(row + 12, 0.0f)) : group->step",
            "group->step : group->step",
            "values",
        ),
    ),
    "tails of codes": (
        KernelMutant(
            "a tail is filled up with what may be largest",
            "codes.h",
            "Duplicate(t[count / kCodeBlock * kCodeBlock], 0.0f, kCodeBlock);",
            "Duplicate(t[count / kCodeBlock * kCodeBlock], 1.0f, kCodeBlock);",
            "values",
            quick=True,
        ),
        KernelMutant(
            "a block of one element is left out",
            "codes.h",
            "{ return (count + kCodeBlock - 1) / kCodeBlock; }",
            "{ return (count + kCodeBlock - 2) / kCodeBlock; }",
            "poison",
        ),
        KernelMutant(
            "the exponent of one element is not loaded",
            "flat.h",
            "npu::Load(Half(slot, place), moment.exponents + at / kCodeBlock, (count + kCodeBlock - 1) / kCodeBlock);",
            "npu::Load(Half(slot, place), moment.exponents + at / kCodeBlock, (count + kCodeBlock - 2) / kCodeBlock);",
            "poison",
        ),
        KernelMutant(
            "an exponent is loaded beyond the last",
            "flat.h",
            "npu::Load(Half(slot, place), moment.exponents + at / kCodeBlock, (count + kCodeBlock - 1) / kCodeBlock);",
            "npu::Load(Half(slot, place), moment.exponents + at / kCodeBlock, count / kCodeBlock + 1);",
            "bounds",
        ),
    ),
}
