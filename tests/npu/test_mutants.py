"""Kernels and tilings with one mistake each, and the check that must find it: the emulator's own test.

A mutant is a replacement in a source of csrc/npu; the changed kernel is compiled and exercised like the right one.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from npu import exercise
from npu.conftest import Install
from npu.emulated import ROOT, Emulator, build
from npu.test_kernels import caught


@dataclass(frozen=True)
class Mutant:
    """`old` occurs once in the file, and becomes `new`; `check` finds it where `op` is exercised."""

    name: str
    op: str
    file: str
    old: str
    new: str
    check: str


MUTANTS = (
    # flags and barriers
    Mutant(
        "stores do not wait for the update",
        "flat_adam",
        "flat_adam.cpp",
        "WaitFlag<HardEvent::V_MTE3>(updated_[mine]);",
        "",
        "race",
    ),
    Mutant(
        "no flag between update and stores",
        "flat_adam",
        "flat_adam.cpp",
        "SetFlag<HardEvent::V_MTE3>(updated_[mine]);\n      WaitFlag<HardEvent::V_MTE3>(updated_[mine]);",
        "",
        "race",
    ),
    Mutant(
        "a slot is loaded while it is stored",
        "flat_adam",
        "flat_adam.cpp",
        "if (used_[slot]) WaitFlag<HardEvent::MTE3_MTE2>(stored_[slot]);\n    used_[slot] = false;",
        "",
        "race",
    ),
    Mutant(
        "both slots have one flag",
        "flat_adam",
        "flat_adam.cpp",
        "loaded_[i] = pipe_.AllocEventID<HardEvent::MTE2_V>();",
        "loaded_[i] = i == 0 ? pipe_.AllocEventID<HardEvent::MTE2_V>() : loaded_[0];",
        "flag",
    ),
    Mutant(
        "an event that was not allocated",
        "flat_adam",
        "flat_adam.cpp",
        "stored_[i] = pipe_.AllocEventID<HardEvent::MTE3_MTE2>();",
        "stored_[i] = i;",
        "flag",
    ),
    Mutant(
        "the wrong pair of pipes",
        "flat_adam",
        "flat_adam.cpp",
        "SetFlag<HardEvent::MTE2_V>(loaded_[slot]);",
        "SetFlag<HardEvent::MTE2_MTE3>(loaded_[slot]);",
        "flag",
    ),
    Mutant(
        "the scalar unit does not wait for vectors",
        "norm",
        "norm.cpp",
        "SetFlag<HardEvent::V_S>(computed_);\n    WaitFlag<HardEvent::V_S>(computed_);",
        "",
        "race",
    ),
    Mutant(
        "vectors do not wait for the scalar unit",
        "norm",
        "norm.cpp",
        "SetFlag<HardEvent::S_V>(read_);\n    WaitFlag<HardEvent::S_V>(read_);",
        "",
        "race",
    ),
    Mutant(
        "the result is stored before it is written",
        "norm",
        "norm.cpp",
        "SetFlag<HardEvent::S_MTE3>(written);\n  WaitFlag<HardEvent::S_MTE3>(written);",
        "",
        "race",
    ),
    Mutant(
        "sums are read before they are loaded",
        "norm",
        "norm.cpp",
        "SetFlag<HardEvent::MTE2_S>(loaded);\n  WaitFlag<HardEvent::MTE2_S>(loaded);",
        "",
        "race",
    ),
    Mutant(
        "no barrier between widening and rounding",
        "cast",
        "walk.h",
        "npu::Widen(wide, from, from_dtype, count);\n    PipeBarrier<PIPE_V>();",
        "npu::Widen(wide, from, from_dtype, count);",
        "race",
    ),
    Mutant(
        "a barrier of another pipe",
        "pack",
        "pack.cpp",
        "Muls(result, x, scale_, count);\n    PipeBarrier<PIPE_V>();",
        "Muls(result, x, scale_, count);\n    PipeBarrier<PIPE_MTE2>();",
        "race",
    ),
    Mutant(
        "columns of draws are read before they are loaded",
        "cast",
        "draws.h",
        "SetFlag<HardEvent::MTE2_V>(loaded_);\n    WaitFlag<HardEvent::MTE2_V>(loaded_);",
        "",
        "race",
    ),
    Mutant(
        "columns of draws are loaded while they are read",
        "flat_adam",
        "draws.h",
        "SetFlag<HardEvent::V_MTE2>(used_);\n    WaitFlag<HardEvent::V_MTE2>(used_);",
        "",
        "race",
    ),
    Mutant(
        "rows of draws that meet in a block, in any order",
        "flat_adam",
        "draws.h",
        "if (lead_ != 0) PipeBarrier<PIPE_V>();",
        "",
        "race",
    ),
    Mutant(
        "an index that begins with the scalar unit's stores, and no flag",
        "cast",
        "draws.h",
        "Duplicate(Half(0), 0xffff, kLanes);",
        "CreateVecIndex(Half(0), 0xffff, kLanes);",
        "race",
    ),
    # queues
    Mutant("a forgotten Free of what was loaded", "pack", "pack.cpp", "in_.FreeTensor(in);", "", "queue"),
    Mutant("a forgotten Free of what was stored", "cast", "cast.cpp", "out_.FreeTensor(out);", "", "queue"),
    Mutant(
        "Free before the last use",
        "pack",
        "pack.cpp",
        "npu::Store(row->target + at * size, out, count * size);\n      out_.FreeTensor(out);",
        "out_.FreeTensor(out);\n      npu::Store(row->target + at * size, out, count * size);",
        "queue",
    ),
    Mutant(
        "a queue of one place for two tiles",
        "cast",
        "cast.cpp",
        "TQue<TPosition::VECIN, 2> in_;",
        "TQue<TPosition::VECIN, 1> in_;",
        "queue",
    ),
    Mutant(
        "one buffer for two tiles",
        "norm",
        "norm.cpp",
        "pipe_.InitBuffer(in_, 2, 2 * kSlotBytes);",
        "pipe_.InitBuffer(in_, 1, 2 * kSlotBytes);",
        "queue",
    ),
    Mutant("no EnQue", "pack", "pack.cpp", "out_.EnQue(out);", "", "queue"),
    Mutant(
        "a queue that is fed twice", "cast", "cast.cpp", "in_.EnQue(in);", "in_.EnQue(in);\n    in_.EnQue(in);", "queue"
    ),
    # memory
    Mutant(
        "DataCopy for DataCopyPad",
        "cast",
        "walk.h",
        "DataCopyPad(to, source, DataCopyExtParams(1, static_cast<uint32_t>(bytes), 0, 0, 0),\n"
        "                DataCopyPadExtParams<uint8_t>(false, 0, 0, 0));",
        "DataCopy(to, source, static_cast<uint32_t>(bytes));",
        "alignment",
    ),
    Mutant(
        "a tail rounded up to a block",
        "pack",
        "walk.h",
        "DataCopyPad(target, from, DataCopyExtParams(1, static_cast<uint32_t>(bytes), 0, 0, 0));",
        "target.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(to), RoundUp(bytes, kBlockBytes));\n"
        "    DataCopy(target, from, static_cast<uint32_t>(RoundUp(bytes, kBlockBytes)));",
        "bounds",
    ),
    Mutant(
        "a read beyond the global tensor",
        "norm",
        "walk.h",
        "DataCopy(to, source, static_cast<uint32_t>(bytes));",
        "DataCopy(to, source, static_cast<uint32_t>(bytes) + 32);",
        "bounds",
    ),
    Mutant("an oversized tile", "norm", "table.h", "kSlotBytes = 16384;", "kSlotBytes = 20480;", "capacity"),
    Mutant("a UB larger than it is", "flat_adam", "tiling.h", "usable = 188160", "usable = 208896", "capacity"),
    Mutant(
        "a tile of more than a place",
        "flat_adam",
        "launch.cpp",
        "row.piece.tile = head.tile;",
        "row.piece.tile = 2 * head.tile;",
        "race",
    ),
    Mutant(
        "a tile of more than a buffer",
        "cast",
        "tiling.h",
        "kSlotBytes / widest_itemsize",
        "4 * kSlotBytes / widest_itemsize",
        "bounds",
    ),
    Mutant(
        "an unaligned start in UB",
        "pack",
        "pack.cpp",
        "if (accumulate_) npu::Load(in[kSlotBytes],",
        "if (accumulate_) npu::Load(in[kSlotBytes - 4],",
        "alignment",
    ),
    Mutant(
        "an output that is never computed",
        "flat_adam",
        "flat_adam.cpp",
        "npu::Round(Place(slot, 3), p, row->low_dtype, count, RoundMode::CAST_ROUND);",
        "npu::Round(Place(slot, 3), p, row->low_dtype, count / 2, RoundMode::CAST_ROUND);",
        "values",
    ),
    Mutant(
        "a tail that is not computed",
        "cast",
        "walk.h",
        "npu::Widen(to.ReinterpretCast<float>(), from, from_dtype, count);",
        "npu::Widen(to.ReinterpretCast<float>(), from, from_dtype, RoundUp(count, kRepeat) - kRepeat + 1);",
        "poison",
    ),
    Mutant(
        "a write to what is only read",
        "flat_adam",
        "flat_adam.cpp",
        "npu::Store(row->low + at * 2, Place(slot, 3), count * 2);",
        "npu::Store(row->grad + at * 2, Place(slot, 3), count * 2);",
        "bounds",
    ),
    # types, rounding, repeats
    Mutant(
        "bf16 straight to f16",
        "cast",
        "walk.h",
        "npu::Round(to, wide, to_dtype, count);",
        "Cast(to.ReinterpretCast<half>(), from.ReinterpretCast<bfloat16_t>(), RoundMode::CAST_RINT, count);",
        "dtype",
    ),
    Mutant(
        "And of 32-bit integers",
        "cast",
        "draws.h",
        "And(halves, halves, Half(upper).ReinterpretCast<uint16_t>(), static_cast<uint64_t>(2 * kRepeat), repeats,",
        "And(lanes, lanes, Half(upper), static_cast<uint64_t>(kRepeat), repeats,",
        "dtype",
    ),
    Mutant(
        "rounding toward zero",
        "pack",
        "walk.h",
        "RoundMode bf16 = RoundMode::CAST_RINT",
        "RoundMode bf16 = RoundMode::CAST_TRUNC",
        "values",
    ),
    Mutant(
        "Compare without its tail",
        "cast",
        "draws.h",
        "CMPMODE::LE, RoundUp(count, kRepeat)",
        "CMPMODE::LE, count",
        "repeat",
    ),
    Mutant(
        "a repeat too few",
        "flat_adam",
        "flat_adam.cpp",
        "static_cast<uint8_t>(RoundUp(count, kRepeat) / kRepeat)",
        "static_cast<uint8_t>(count < 2 * kRepeat ? 2 : count / kRepeat)",
        "values",
    ),
    Mutant(
        "repeats of part of a register",
        "flat_adam",
        "flat_adam.cpp",
        "static_cast<uint64_t>(kRepeat), repeats",
        "static_cast<uint64_t>(kRepeat / 2), repeats",
        "repeat",
    ),
    Mutant(
        "a product that overflows",
        "cast",
        "draws.h",
        "static_cast<int32_t>(2 * x), lanes",
        "static_cast<int32_t>(32 * x), lanes",
        "poison",
    ),
    Mutant(
        "halves that overlap",
        "norm",
        "norm.cpp",
        "Add(patterns, patterns, patterns[half], half);",
        "Add(patterns, patterns, patterns[half], half + kLanes);",
        "overlap",
    ),
    # the arithmetic
    Mutant(
        "the first moment before its decay",
        "flat_adam",
        "flat_adam.cpp",
        "Muls(t, g, one_minus_beta2_, count);",
        "Muls(t, g, one_minus_beta1_, count);",
        "values",
    ),
    Mutant("the next key of the other word", "cast", "draws.h", "k0 += 0x9E3779B9u;", "k0 += 0xBB67AE85u;", "values"),
    Mutant(
        "squares without their low halves",
        "norm",
        "norm.cpp",
        "Add(low, low, high, width);",
        "Muls(low, low, 0.0f, width);",
        "values",
    ),
    Mutant(
        "no 64-bit places",
        "flat_adam",
        "draws.h",
        "static_cast<uint32_t>(words.counter >> 32)",
        "0",
        "values",
    ),
    Mutant(
        "columns that begin where the row does not",
        "cast",
        "draws.h",
        "(i * kDrawTable + kLanes - lead) * 4",
        "(i * kDrawTable + kLanes) * 4",
        "bounds",
    ),
    # codes of 8 bits
    Mutant(
        "exponents are spread as they are computed",
        "flat_adam",
        "codes.h",
        "Muls(Lane(2), Lane(2), kNan, blocks);\n    PipeBarrier<PIPE_V>();",
        "Muls(Lane(2), Lane(2), kNan, blocks);",
        "race",
    ),
    Mutant(
        "a block's tail is not filled",
        "flat_adam",
        "codes.h",
        "if (count % kCodeBlock != 0) {",
        "if (count % kCodeBlock == 1) {",
        "values",
    ),
    Mutant(
        "the largest of NaN",
        "flat_adam",
        "codes.h",
        "Mins(t.ReinterpretCast<int32_t>(), t.ReinterpretCast<int32_t>(), kInfinity, count);",
        "",
        "poison",
    ),
    Mutant(
        "f32 straight to bytes",
        "flat_adam",
        "codes.h",
        "Cast(to, room, RoundMode::CAST_RINT, count);",
        "Cast(to, from.ReinterpretCast<float>(), RoundMode::CAST_RINT, count);",
        "dtype",
    ),
    Mutant(
        "one exponent for every block",
        "flat_adam",
        "codes.h",
        "BinaryRepeatParams(1, 1, 0, 8, 8, 1)",
        "BinaryRepeatParams(1, 1, 0, 8, 8, 0)",
        "poison",
    ),
    Mutant(
        "an exponent for each datablock",
        "flat_adam",
        "codes.h",
        "BinaryRepeatParams(1, 1, 0, 8, 8, 1)",
        "BinaryRepeatParams(1, 1, 1, 8, 8, 8)",
        "repeat",
    ),
    Mutant(
        "lanes that begin within a datablock",
        "flat_adam",
        "codes.h",
        "stride_ = RoundUp(tile / kCodeBlock, kSpreadLanes);",
        "stride_ = tile / kCodeBlock + 1;",
        "alignment",
    ),
    Mutant(
        "draws of fewer bits than are dropped",
        "flat_adam",
        "codes.h",
        "ShiftLeft(bits, bits, kDropped - 16, count);",
        "",
        "values",
    ),
    Mutant(
        "a second moment with a sign",
        "flat_adam",
        "flat_adam.cpp",
        "other_.Get<float>(), place == 1,\n                   count);",
        "other_.Get<float>(), place != 4,\n                   count);",
        "values",
    ),
    Mutant(
        "a tile that begins within a block of codes",
        "flat_adam",
        "launch.cpp",
        "row.piece.tile = head.tile;",
        "row.piece.tile = head.tile - 32;",
        "race",
    ),
    Mutant(
        "exponents of two cores in one line",
        "flat_adam",
        "launch.cpp",
        "writes(moment.exponents, 1, kCodeBlock);",
        "",
        "cores",
    ),
    # the cut
    Mutant(
        "cuts wherever they fall",
        "flat_adam",
        "tiling.h",
        "if (aligned == inside) return place;",
        "return place;",
        "cores",
    ),
    Mutant(
        "neighbours that nothing binds",
        "pack",
        "tiling.h",
        "if ((below.end - 1) / line_bytes != above.begin / line_bytes) continue;",
        "continue;",
        "cores",
    ),
    Mutant(
        "overlapping shares",
        "cast",
        "tiling.h",
        "shares.push_back({begin, end, part_at(begin)});",
        "shares.push_back({begin, std::min(end + 256, total), part_at(begin)});",
        "cores",
    ),
    Mutant(
        "a share that is left out",
        "pack",
        "tiling.h",
        "if (end > begin) shares.push_back({begin, end, part_at(begin)});",
        "if (end > begin && core != 2) shares.push_back({begin, end, part_at(begin)});",
        "values",
    ),
    Mutant(
        "more blocks than cores",
        "norm",
        "tiling.h",
        "for (int64_t core = 0; core < wanted; ++core) {",
        "for (int64_t core = 0; core < wanted + 9; ++core) {",
        "cores",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_killed_by_the_check_that_is_meant_for_it(mutant: Mutant, install: Install) -> None:
    path = ROOT / "csrc" / "npu" / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} has {text.count(mutant.old)} of: {mutant.old}"
    emulated = install(Emulator(build(mutant.op, {path: text.replace(mutant.old, mutant.new)})))
    emulated.schedules = (0,)
    assert caught(exercise.ALL[mutant.op]) == mutant.check


def test_there_are_mutants_of_every_kernel() -> None:
    assert len(MUTANTS) >= 25
    assert {mutant.op for mutant in MUTANTS} == set(exercise.ALL)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
