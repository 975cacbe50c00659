"""Mistakes in the formula of flat_lion; those of the walk that it has in common are flat_adam's."""

from __future__ import annotations

from .mutant import KernelMutant

MUTANTS = (
    KernelMutant(
        "the update's betas are the moment's",
        "flat_lion.cpp",
        "Muls(c, m, beta1_, count);",
        "Muls(c, m, beta2_, count);",
        "values",
    ),
    KernelMutant(
        "the moment takes the update's share of the gradient",
        "flat_lion.cpp",
        "Muls(c, g, one_minus_beta2_, count);",
        "Muls(c, g, one_minus_beta1_, count);",
        "values",
    ),
    KernelMutant(
        "the moment decays while the update reads it",
        "flat_lion.cpp",
        "Add(c, c, rest, count);\n    Muls(m, m, beta2_, count);",
        "Add(c, c, rest, count);\n    Muls(m, m, beta2_, count);\n    Muls(c, m, beta1_, count);",
        "race",
    ),
    KernelMutant(
        "the next tile over the last one's",
        "flat_lion.cpp",
        "uses c at once\n    PipeBarrier<PIPE_V>();\n    Sub(p, p, rest, count);",
        "uses c at once\n    Sub(p, p, rest, count);",
        "race",
    ),
    KernelMutant(
        "one room too few",
        "launch.cpp",
        'launch_update("npuzero_flat_lion", 2,',
        'launch_update("npuzero_flat_lion", 1,',
        "bounds",
    ),
    KernelMutant(
        "another column of the row",
        "flat_lion.cpp",
        "ScalarAt(row + 4, 0.0f)",
        "ScalarAt(row + 8, 0.0f)",
        "values",
    ),
    KernelMutant(
        "the decay comes after the update",
        "flat_lion.cpp",
        "Sub(p, p, rest, count);",
        "Sub(p, p, rest, count);\n    PipeBarrier<PIPE_V>();\n    Muls(p, p, decay_, count);",
        "values",
    ),
)

MEANINGS = {
    "zeros": (
        KernelMutant(
            "zero moves up",
            "flat_lion.cpp",
            "CompareScalar(first, c, 0.0f, CMPMODE::LE, lanes);",
            "CompareScalar(first, c, 0.0f, CMPMODE::LT, lanes);",
            "values",
            quick=True,
        ),
        KernelMutant(
            "zero moves down",
            "flat_lion.cpp",
            "CompareScalar(second, c, 0.0f, CMPMODE::GE, lanes);",
            "CompareScalar(second, c, 0.0f, CMPMODE::GT, lanes);",
            "values",
        ),
    ),
    "not finite": (
        KernelMutant(
            "NaN moves down",
            "flat_lion.cpp",
            "Select(sign, first, sign, c, SELMODE::VSEL_TENSOR_TENSOR_MODE, count);",
            "",
            "values",
        ),
    ),
    "ties": (
        KernelMutant(
            "a signed code's least is judged by what is drawn",
            "codes.h",
            "EncodeSigned(place, exponents, t, rest, own, static_cast<int16_t>(kAbove), count);",
            "EncodeSigned(place, exponents, t, rest, rest.ReinterpretCast<int16_t>(), static_cast<int16_t>(kAbove), "
            "count);",
            "values",
        ),
    ),
}
