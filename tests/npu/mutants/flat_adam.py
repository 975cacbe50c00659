"""Mistakes in the kernel of flat_adam, its tiling and what it shares with others."""

from __future__ import annotations

from .mutant import Mutant

_SKIP = "ScalarAt(reinterpret_cast<__gm__ const AdamHead*>(table)->skip, 0.0f)"
_IF_SKIP = f"if (!({_SKIP} == 0.0f))"

MUTANTS = (
    # flags and barriers
    Mutant(
        "stores do not wait for the update", "flat_adam.cpp", "WaitFlag<HardEvent::V_MTE3>(updated_[mine]);", "", "race"
    ),
    Mutant(
        "no flag between update and stores",
        "flat_adam.cpp",
        "SetFlag<HardEvent::V_MTE3>(updated_[mine]);\n      WaitFlag<HardEvent::V_MTE3>(updated_[mine]);",
        "",
        "race",
    ),
    Mutant(
        "a slot is loaded while it is stored",
        "flat_adam.cpp",
        "if (used_[slot]) WaitFlag<HardEvent::MTE3_MTE2>(stored_[slot]);\n    used_[slot] = false;",
        "",
        "race",
    ),
    Mutant(
        "both slots have one flag",
        "flat_adam.cpp",
        "loaded_[i] = pipe_.AllocEventID<HardEvent::MTE2_V>();",
        "loaded_[i] = i == 0 ? pipe_.AllocEventID<HardEvent::MTE2_V>() : loaded_[0];",
        "flag",
    ),
    Mutant(
        "an event that was not allocated",
        "flat_adam.cpp",
        "stored_[i] = pipe_.AllocEventID<HardEvent::MTE3_MTE2>();",
        "stored_[i] = i;",
        "flag",
    ),
    Mutant(
        "the wrong pair of pipes",
        "flat_adam.cpp",
        "SetFlag<HardEvent::MTE2_V>(loaded_[slot]);",
        "SetFlag<HardEvent::MTE2_MTE3>(loaded_[slot]);",
        "flag",
    ),
    Mutant(
        "columns of draws are loaded while they are read",
        "draws.h",
        "SetFlag<HardEvent::V_MTE2>(used_);\n    WaitFlag<HardEvent::V_MTE2>(used_);",
        "",
        "race",
    ),
    Mutant(
        "rows of draws that meet in a block, in any order",
        "draws.h",
        "if (lead_ != 0) PipeBarrier<PIPE_V>();",
        "",
        "race",
    ),
    # memory
    Mutant("a UB larger than it is", "tiling.h", "usable = 188160", "usable = 208896", "capacity"),
    Mutant(
        "a tile of more than a place",
        "launch.cpp",
        "row.piece.tile = head.tile;",
        "row.piece.tile = 2 * head.tile;",
        "race",
    ),
    Mutant(
        "an output that is never computed",
        "flat_adam.cpp",
        "npu::Round(Place(slot, 3), p, row->low_dtype, count, RoundMode::CAST_ROUND);",
        "npu::Round(Place(slot, 3), p, row->low_dtype, count / 2, RoundMode::CAST_ROUND);",
        "values",
    ),
    Mutant(
        "a write to what is only read",
        "flat_adam.cpp",
        "npu::Store(row->low + at * 2, Place(slot, 3), count * 2);",
        "npu::Store(row->grad + at * 2, Place(slot, 3), count * 2);",
        "bounds",
    ),
    # types, rounding, repeats
    Mutant(
        "a repeat too few",
        "flat_adam.cpp",
        "static_cast<uint8_t>(RoundUp(count, kRepeat) / kRepeat)",
        "static_cast<uint8_t>(count < 2 * kRepeat ? 2 : count / kRepeat)",
        "values",
    ),
    Mutant(
        "repeats of part of a register",
        "flat_adam.cpp",
        "static_cast<uint64_t>(kRepeat), repeats",
        "static_cast<uint64_t>(kRepeat / 2), repeats",
        "repeat",
    ),
    # the arithmetic
    Mutant(
        "the first moment before its decay",
        "flat_adam.cpp",
        "Muls(t, g, one_minus_beta2_, count);",
        "Muls(t, g, one_minus_beta1_, count);",
        "values",
    ),
    Mutant("no 64-bit places", "draws.h", "static_cast<uint32_t>(words.counter >> 32)", "0", "values"),
    # codes of 8 bits
    Mutant(
        "exponents are spread as they are computed",
        "codes.h",
        "Adds(Lane(1), Lane(1), kInfinity, blocks);\n    PipeBarrier<PIPE_V>();",
        "Adds(Lane(1), Lane(1), kInfinity, blocks);",
        "race",
    ),
    Mutant(
        "a block's tail is not filled",
        "codes.h",
        "if (count % kCodeBlock != 0) {",
        "if (count % kCodeBlock == 1) {",
        "values",
    ),
    Mutant(
        "the largest of NaN",
        "codes.h",
        "Mins(t.ReinterpretCast<int32_t>(), t.ReinterpretCast<int32_t>(), kInfinity - 1, count);",
        "",
        "poison",
    ),
    Mutant(
        "16-bit integers straight to bytes",
        "codes.h",
        "Cast(place, room, RoundMode::CAST_RINT, count);",
        "Cast(place, code, RoundMode::CAST_RINT, count);",
        "dtype",
    ),
    Mutant(
        "an element in place of another that is still read",
        "codes.h",
        "repeats, ByBlock());\n    PipeBarrier<PIPE_V>();\n    Mul(t, t,",
        "repeats, ByBlock());\n    Mul(t, t,",
        "race",
    ),
    Mutant(
        "one exponent for every block",
        "codes.h",
        "BinaryRepeatParams(1, 1, 0, 8, 8, 1)",
        "BinaryRepeatParams(1, 1, 0, 8, 8, 0)",
        "poison",
    ),
    Mutant(
        "an exponent for each datablock",
        "codes.h",
        "BinaryRepeatParams(1, 1, 0, 8, 8, 1)",
        "BinaryRepeatParams(1, 1, 1, 8, 8, 8)",
        "repeat",
    ),
    Mutant(
        "lanes that begin within a datablock",
        "codes.h",
        "stride_ = RoundUp(tile / kCodeBlock, kSpreadLanes);",
        "stride_ = tile / kCodeBlock + 1;",
        "alignment",
    ),
    Mutant(
        "draws of fewer bits than are dropped", "codes.h", "ShiftLeft(bits, bits, kDropped - 16, count);", "", "values"
    ),
    Mutant(
        "a second moment with a sign",
        "flat_adam.cpp",
        "other_.Get<float>(), place == 1,\n                   count);",
        "other_.Get<float>(), place != 4,\n                   count);",
        "values",
    ),
    Mutant(
        "a tile that begins within a block of codes",
        "launch.cpp",
        "row.piece.tile = head.tile;",
        "row.piece.tile = head.tile - 32;",
        "race",
    ),
    Mutant("exponents of two cores in one line", "launch.cpp", "writes(moment.exponents, 1, kCodeBlock);", "", "cores"),
    # the cut
    Mutant("cuts wherever they fall", "tiling.h", "if (aligned == inside) return place;", "return place;", "cores"),
)

MEANINGS = {
    "skip": (
        Mutant("only 1 skips", "flat_adam.cpp", _IF_SKIP, f"if ({_SKIP} == 1.0f)", "values", quick=True),
        Mutant("only what is positive skips", "flat_adam.cpp", _IF_SKIP, f"if ({_SKIP} > 0.0f)", "values"),
        Mutant("NaN does not skip", "flat_adam.cpp", _IF_SKIP, f"if ({_SKIP} > 0.0f || {_SKIP} < 0.0f)", "values"),
        Mutant(
            "less than 1 does not skip", "flat_adam.cpp", _IF_SKIP, f"if (static_cast<int32_t>({_SKIP}) != 0)", "values"
        ),
        Mutant("skip is not handed over", "launch.cpp", "head.skip = address(args.skip);", "", "values"),
        Mutant(
            "no scale is another one",
            "flat_adam.cpp",
            "grad_scale_ = ScalarAt(head->grad_scale, 1.0f);",
            "grad_scale_ = ScalarAt(head->grad_scale, 2.0f);",
            "values",
        ),
    ),
    "not finite": (
        Mutant(
            "the maximum of a NaN is a number",
            "flat_adam.cpp",
            "Compare(number, top, top, CMPMODE::NE, lanes);",
            "Compare(number, v, v, CMPMODE::NE, lanes);",
            "values",
        ),
        Mutant(
            "a block with an infinity is kept",
            "codes.h",
            "kInfinity - 1, count);",
            "kInfinity - (1 << kDropped), count);",
            "poison",
        ),
        Mutant(
            "a block that was lost is read",
            "codes.h",
            "Muls(nan, factor, 0.0f, blocks);",
            "Duplicate(nan, 0.0f, blocks);",
            "values",
        ),
        Mutant(
            "a lost block keeps its codes",
            "codes.h",
            "Mins(Lane(2), Lane(1), 1, blocks);",
            "Duplicate(Lane(2), 1, blocks);",
            "poison",
        ),
    ),
    "payloads": (
        Mutant("a moment's NaN takes a draw", "draws.h", "kLargest, CMPMODE::LE,", "kLargest, CMPMODE::NE,", "poison"),
        Mutant(
            "a NaN has a remainder",
            "flat_adam.cpp",
            "Select(rest, number, rest, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, count);",
            "",
            "poison",
        ),
    ),
    "ties": (
        Mutant(
            "a copy's ties to f16 away from zero",
            "walk.h",
            "Cast(to.ReinterpretCast<half>(), from, RoundMode::CAST_RINT, count);",
            "Cast(to.ReinterpretCast<half>(), from, RoundMode::CAST_ROUND, count);",
            "values",
            quick=True,
        ),
        Mutant(
            "a bf16 copy's ties to even",
            "flat_adam.cpp",
            "p, row->low_dtype, count, RoundMode::CAST_ROUND);",
            "p, row->low_dtype, count, RoundMode::CAST_RINT);",
            "values",
        ),
        Mutant(
            "a moment's ties to even",
            "flat_adam.cpp",
            "kBF16, count,\n               RoundMode::CAST_ROUND);",
            "kBF16, count,\n               RoundMode::CAST_RINT);",
            "values",
        ),
        Mutant(
            "a split master's ties to even",
            "flat_adam.cpp",
            "npu::Round(upper, p, kBF16, count, RoundMode::CAST_ROUND);",
            "npu::Round(upper, p, kBF16, count, RoundMode::CAST_RINT);",
            "poison",
        ),
        Mutant(
            "a code's ties toward zero",
            "codes.h",
            "kHalfCode = 1 << (kDropped - 1);",
            "kHalfCode = (1 << (kDropped - 1)) - 1;",
            "values",
        ),
        Mutant(
            "an exponent's ties toward zero",
            "codes.h",
            "(1 << kDropped) - 1, blocks);",
            "(1 << kDropped) - 2, blocks);",
            "values",
        ),
        Mutant(
            "an exponent goes up before its tie",
            "codes.h",
            "(1 << kDropped) - 1, blocks);",
            "1 << kDropped, blocks);",
            "values",
        ),
        Mutant("another least exponent", "codes.h", "kLeastExponent = 16;", "kLeastExponent = 15;", "values"),
        Mutant(
            "the least code that is no zero is one",
            "codes.h",
            "- (kHalfCode >> 16)",
            "- (kHalfCode >> 16) - 1",
            "values",
        ),
        Mutant(
            "what is below the least code by half is zero",
            "codes.h",
            "(kScaled - 8) << 7",
            "(kScaled - 7) << 7",
            "values",
        ),
    ),
    "draws": (
        Mutant(
            "places are counted in 32 bits",
            "launch.cpp",
            "row.place = static_cast<uint64_t>(part.place);",
            "row.place = static_cast<uint32_t>(part.place);",
            "values",
        ),
        Mutant(
            "the place is lost",
            "flat_adam.cpp",
            "row->place + static_cast<uint64_t>(at), stream, step_, count",
            "static_cast<uint64_t>(at), stream, step_, count",
            "values",
        ),
        Mutant(
            "words of another stream",
            "draws.h",
            "words.counter != row / 4 || words.stream != stream ||",
            "words.counter != row / 4 ||",
            "values",
        ),
        Mutant("words of another step", "draws.h", " || words.step != step)", ")", "values"),
        Mutant(
            "a row's first draws over those of the row before",
            "draws.h",
            "for (int32_t row = (column + count - 1) / kDrawColumns; row >= 0; --row) {",
            "for (int32_t row = 0; row <= (column + count - 1) / kDrawColumns; ++row) {",
            "values",
        ),
        Mutant(
            "master and moment have one stream", "flat_adam.cpp", "row->stream + 0x80000000u", "row->stream", "values"
        ),
        Mutant(
            "draws of the group's step, where the device has it",
            "flat_adam.cpp",
            "static_cast<uint32_t>(ScalarAt(row + 12, 0.0f)) : group->step",
            "group->step : group->step",
            "values",
        ),
    ),
    "tails of codes": (
        Mutant(
            "a tail is filled up with what may be largest",
            "codes.h",
            "Duplicate(t[count / kCodeBlock * kCodeBlock], 0.0f, kCodeBlock);",
            "Duplicate(t[count / kCodeBlock * kCodeBlock], 1.0f, kCodeBlock);",
            "values",
            quick=True,
        ),
        Mutant(
            "a block of one element is left out",
            "codes.h",
            "{ return (count + kCodeBlock - 1) / kCodeBlock; }",
            "{ return (count + kCodeBlock - 2) / kCodeBlock; }",
            "poison",
        ),
        Mutant(
            "the exponent of one element is not loaded",
            "flat_adam.cpp",
            "npu::Load(Half(slot, place), moment.exponents + at / kCodeBlock, (count + kCodeBlock - 1) / kCodeBlock);",
            "npu::Load(Half(slot, place), moment.exponents + at / kCodeBlock, (count + kCodeBlock - 2) / kCodeBlock);",
            "poison",
        ),
        Mutant(
            "an exponent is loaded beyond the last",
            "flat_adam.cpp",
            "npu::Load(Half(slot, place), moment.exponents + at / kCodeBlock, (count + kCodeBlock - 1) / kCodeBlock);",
            "npu::Load(Half(slot, place), moment.exponents + at / kCodeBlock, count / kCodeBlock + 1);",
            "bounds",
        ),
    ),
}
