"""Mutants of the ops of a thin wire: their references, whose kernels then differ, and their doors."""

from __future__ import annotations

from .mutant import PackageMutant

QUANTIZE = "ops/reference/quantize.py"
SUM = "ops/reference/dequantize_sum.py"
GRID = "ops/test_quantize.py::test_equals_reference_on_the_grid"
SUMS = "ops/test_dequantize_sum.py::test_equals_reference_on_the_grid"
ORDER = "ops/test_dequantize_sum.py::test_rows_are_added_in_their_order_and_before_they_are_accumulated"
BAD = "ops/test_quantize.py::test_bad_arguments_are_refused"
BAD_SUMS = "ops/test_dequantize_sum.py::test_bad_arguments_are_refused"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "a scale is rounded down, and the largest are clipped", QUANTIZE, "+ 0xFFFF) >> 16", ") >> 16", (GRID,)
    ),
    PackageMutant("a scale is rounded to nearest", QUANTIZE, "+ 0xFFFF) >> 16", "+ 0x8000) >> 16", (GRID,)),
    PackageMutant("a code of 4 bits may be 8, which is -8", QUANTIZE, "{8: 127, 4: 7}", "{8: 127, 4: 8}", (GRID,)),
    PackageMutant("small blocks divide by zero", QUANTIZE, "_LEAST = 2.0**-120", "_LEAST = 0.0", (GRID,)),
    PackageMutant("denormals have codes", QUANTIZE, "_LEAST = 2.0**-120", "_LEAST = 2.0**-126", (GRID,)),
    PackageMutant(
        "one value that is not finite spoils the message", QUANTIZE, ".all(1, keepdim=True)", ".all()", (GRID,)
    ),
    PackageMutant(
        "what is not finite arrives as a number",
        QUANTIZE,
        "torch.where(finite, upper, _LOST)",
        "torch.where(finite, upper, 0x3F80)",
        (GRID,),
    ),
    PackageMutant(
        "what is not finite stays in the residual for ever",
        QUANTIZE,
        "torch.where(finite, x - codes * scale, 0.0)",
        "x - codes * scale",
        (GRID,),
    ),
    PackageMutant(
        "ties go up", QUANTIZE, "torch.round(x * (1 / scale))", "torch.floor(x * (1 / scale) + 0.5)", (GRID,)
    ),
    PackageMutant(
        "values are cut off", QUANTIZE, "torch.round(x * (1 / scale))", "torch.trunc(x * (1 / scale))", (GRID,)
    ),
    PackageMutant(
        "the residual is forgotten", QUANTIZE, "source.float() + residual).view", "source.float()).view", (GRID,)
    ),
    PackageMutant(
        "the first of two codes stands in the upper half",
        QUANTIZE,
        "(pairs[:, 0] & 15) | (pairs[:, 1] & 15) << 4",
        "(pairs[:, 1] & 15) | (pairs[:, 0] & 15) << 4",
        (GRID,),
    ),
    PackageMutant("messages lie closer than a line", "ops/reference/_wire.py", "_LINE = 512", "_LINE = 256", (GRID,)),
    PackageMutant("rows are added from the last", SUM, "bits))):", "bits)).flip(0)):", (ORDER,)),
    PackageMutant("the last row alone counts", SUM, "value if i == 0 else total + value", "value", (SUMS,)),
    PackageMutant("codes of 4 bits have no sign", SUM, "((halves ^ 8) - 8).float()", "halves.float()", (SUMS,)),
    PackageMutant(
        "sums replace what they are to be added to",
        SUM,
        "out.float() + total.view(-1) if accumulate else total.view(-1)",
        "total.view(-1)",
        (SUMS,),
    ),
    PackageMutant(
        "a buffer without whole blocks is taken",
        "ops/_wire.py",
        "if tensor.numel() % (pieces * _BLOCK[bits]):",
        "if tensor.numel() % _BLOCK[bits]:",
        (BAD,),
    ),
    PackageMutant("a message may begin anywhere", "ops/_wire.py", "_START = 64", "_START = 1", (BAD, BAD_SUMS)),
    PackageMutant(
        "messages of one row are taken for two",
        "ops/_wire.py",
        "count = rows * pieces * _native",
        "count = pieces * _native",
        (BAD_SUMS,),
    ),
    PackageMutant("any number of bits is taken", "ops/_wire.py", "or bits not in _BLOCK", "", (BAD, BAD_SUMS)),
    PackageMutant(
        "the residual may be the source itself",
        "ops/quantize.py",
        '        written.append(("residual", residual))\n',
        "",
        (BAD,),
    ),
    PackageMutant(
        "a sum may be written over the messages that it is made of",
        "ops/dequantize_sum.py",
        '    _check.check_disjoint("dequantize_sum", [("out", out)], [("messages", messages)])\n',
        "",
        (BAD_SUMS,),
    ),
    PackageMutant(
        "the kernel forgets to accumulate",
        "ops/dequantize_sum.py",
        "rows, pieces, bits, accumulate, stream)",
        "rows, pieces, bits, False, stream)",
        (SUMS,),
    ),
    PackageMutant(
        "the kernel has no residual",
        "ops/quantize.py",
        "_native.optional_view(residual)",
        "None",
        (GRID,),
    ),
)
