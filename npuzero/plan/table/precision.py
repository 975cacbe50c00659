"""Precision: the dtypes that parts of the training state are stored, sent and computed with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from npuzero.errors import ConfigError, did_you_mean, refuse_unknown_keywords
from npuzero.plan.table.placement import DATA, NODE
from npuzero.plan.table.wire import (
    BLOCKS,
    THIN,
    WireLevel,
    Wires,
    check_plain_wires,
    iter_named_wires,
    sort_wires_by_axis,
)

#: Each parameter starts on a multiple of this many elements: 16 bytes even with 8 bits per element.
START_ELEMENTS = 16

#: Dtypes of parameters and of communication, by short name.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Bytes per element of the masters of a low-precision parameter: a full float32; the lower half, since the bfloat16
#: parameter is the upper half; nothing, if there is only the parameter, rounded stochastically.
MASTERS = {"fp32": 4, "split": 2, "none": 0}
#: Bytes per element of a moment; int8 adds one byte per :data:`MOMENT_BLOCK` elements: their exponent.
MOMENTS = {"fp32": 4, "bf16": 2, "int8": 1}
#: Elements of a flat parameter that share an exponent. Every shard starts and ends on a multiple of this.
MOMENT_BLOCK = 64
#: Modes of float32 matrix products: exact, or with inputs rounded to TF32 (on an NPU: HF32).
MATMULS = ("ieee", "tf32")
#: Dtypes of R3's finished gradient sums, which are sent if a plan replicates states.
SUMS = ("fp32", "wire")
#: Wire formats of all-gathered parameters: unchanged, or quantized.
GATHERS = (None, "int8")
#: Quantized axes with error feedback: the rounding error of gradients is stored and added in the next reduction.
FEEDBACKS = (None, NODE, "all")


def _check_among(name: str, value: object, values: Sequence[object]) -> None:
    if type(value) not in map(type, values) or value not in values:
        raise ConfigError(
            f"precision.{name}",
            expected=f"one of {', '.join(map(str, values))}",
            got=repr(value),
            do=did_you_mean(value, _spellings(values), "Choose among these, or leave it out."),
        )


def _spellings(values: Iterable[object]) -> dict[str, object]:
    return {str(value).removeprefix("torch."): value for value in values if value is not None}


@refuse_unknown_keywords(dtype="parameters", param_dtype="parameters", reduce_dtype="wires")
@dataclass(frozen=True)
class Precision:
    """Choose the dtypes that parts of the training state are stored, sent and computed with.

    Attributes:
        parameters: dtype that parameters are converted to, and the root's floating inputs; None: each keeps its dtype.
        wires: communication dtype of gradients (FSDP's reduce_dtype); None: the parameters'. ``"int8"`` or
            ``"int4"``: quantized to 8 or 4 bits, in blocks that share a scale, and summed in float32 (ZeRO++'s qgZ). Or
            a mapping by data axis such as ``{"node": "int4", "local": torch.bfloat16}``, stored as pairs: missing
            axes use the parameters' dtype. A sum over several axes then runs axis by axis.
        accumulation: dtype of gradient sums over ranks and over micro-batches.
        masters: master weights of parameters that are not float32: ``"fp32"``; ``"split"``, the lower half only, with
            the same results; ``"none"``, only the parameters themselves, rounded stochastically.
        moments: optimizer moments: ``"fp32"``, ``"bf16"``, or ``"int8"`` with an exponent for each block.
        matmul: float32 matrix products: ``"ieee"``, or ``"tf32"`` where the device has it (on an NPU: HF32).
        sums: dtype of finished gradient sums sent to the ranks that replicate states (R3's all_reduce): ``"fp32"``, or
            ``"wire"``, rounded to the communication dtype. No effect if all ranks shard states.
        gathers: ``"int8"``: sharded parameters are quantized to 8 bits, in blocks that share a scale, for the
            all-gather before a unit computes (ZeRO++'s qwZ). Forward and backward see the same rounded values; stored
            parameters, updates and parameters that a program reads are never rounded. None: not quantized.
        feedback: store the rounding error of quantized gradients and add it in the next reduction (error feedback):
            along ``"node"``, or along ``"all"`` quantized axes, at 4 bytes per quantized element. None: it is lost.

    Raises:
        ConfigError: an unknown value, or values that contradict each other.

    Example::

        precision = npuzero.Precision(torch.bfloat16, wires=torch.float32, moments="bf16")
        model = npuzero.zero(net, stage=3, precision=precision)
        thin = npuzero.Precision(torch.bfloat16, gathers="int8", wires={"node": "int4"})
    """

    parameters: torch.dtype | None = None
    wires: Wires = None
    accumulation: torch.dtype = torch.float32
    masters: str = "fp32"
    moments: str = "fp32"
    matmul: str = "ieee"
    sums: str = "fp32"
    gathers: str | None = None
    feedback: str | None = None

    def __post_init__(self) -> None:
        # A mapping becomes sorted pairs: the frozen dataclass must stay hashable, since plans are cache keys.
        if isinstance(self.wires, (Mapping, tuple)):
            object.__setattr__(self, "wires", sort_wires_by_axis(self.wires))
        dtypes = (None, *DTYPES.values())
        allowed: dict[str, Sequence[object]] = {
            "parameters": dtypes,
            "accumulation": (torch.float32,),
            "masters": tuple(MASTERS),
            "moments": tuple(MOMENTS),
            "matmul": MATMULS,
            "sums": SUMS,
            "gathers": GATHERS,
            "feedback": FEEDBACKS,
        }
        if self.accumulation in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"precision.accumulation={self.accumulation}",
                expected="torch.float32: gradients of micro-batches and ranks add up in it under every plan",
                got=str(self.accumulation),
                do="Leave accumulation out. For fewer bytes let gradients travel in 16 bits, wires=torch.bfloat16, "
                "shard them (stage 2 or 3), or keep them on the host.",
            )
        for name, values in allowed.items():
            _check_among(name, getattr(self, name), values)
        for name, wire in iter_named_wires(self.wires):
            _check_among(name, wire, (None, *DTYPES.values(), *THIN))
        check_plain_wires(self.wires)
        if self.masters != "fp32" and self.parameters is not torch.bfloat16:
            raise ConfigError(
                f"precision.masters={self.masters!r}",
                expected="parameters=torch.bfloat16: only a bfloat16 is the upper half of a float32",
                got=f"parameters={self.parameters}",
                do="Convert the parameters to bfloat16, or keep masters='fp32'.",
            )
        if self.plain_wire is torch.float16 and self.parameters is not torch.float16:
            raise ConfigError(
                "precision.wires=torch.float16",
                expected="float16 parameters, whose gradients a loss scale keeps in range",
                got=f"parameters={self.parameters}",
                do="Let gradients travel in bfloat16 or float32.",
            )
        if self.feedback is not None and not any(self.level_of(axis).feedback for axis in DATA):
            raise ConfigError(
                f"precision.feedback={self.feedback!r}",
                expected="gradients that travel as int8 or int4"
                + (f" along {NODE!r}" if self.feedback == NODE else "")
                + ", of which rounding loses something",
                got=f"wires={self.wires}",
                do='Say e.g. wires={"node": "int4"}, or leave feedback out.',
            )

    def parameter_of(self, own: torch.dtype) -> torch.dtype:
        """Return the dtype of a parameter that was given in ``own``."""
        return self.parameters or own

    @property
    def plain_wire(self) -> torch.dtype | None:
        """Return the communication dtype of gradients along axes that are not quantized; None: the parameters'."""
        return next((wire for _, wire in iter_named_wires(self.wires) if isinstance(wire, torch.dtype)), None)

    def wire_of(self, parameter: torch.dtype) -> torch.dtype:
        """Return the communication dtype of gradients of parameters of dtype ``parameter``.

        Quantized wires round values of this dtype.
        """
        return self.plain_wire or parameter

    def level_of(self, axis: str) -> WireLevel:
        """Return the wire level of gradients along ``axis`` alone."""
        wire = dict(self.wires).get(axis) if isinstance(self.wires, tuple) else self.wires
        if axis not in DATA or not isinstance(wire, str):
            return WireLevel((axis,))
        return WireLevel((axis,), THIN[wire], self.feedback in (axis, "all"))

    @property
    def gather_bits(self) -> int | None:
        """Return the bits per element of parameters all-gathered to compute; None: not quantized."""
        return None if self.gathers is None else THIN[self.gathers]

    @property
    def thin(self) -> bool:
        """Tell whether any communication is quantized."""
        return self.gathers is not None or any(isinstance(wire, str) for _, wire in iter_named_wires(self.wires))

    @property
    def shard_elements(self) -> int:
        """Return the multiple of elements of every shard: full blocks of every quantized format."""
        bits = {self.gather_bits, *(self.level_of(axis).bits for axis in DATA)} - {None}
        return max((BLOCKS[each] for each in bits if each), default=1)

    def sums_of(self, parameter: torch.dtype) -> torch.dtype:
        """Return the communication dtype of finished gradient sums of parameters of this dtype."""
        return self.wire_of(parameter) if self.sums == "wire" else self.accumulation

    @property
    def start_elements(self) -> int:
        """Return the multiple of elements on which each parameter starts in its flat parameter.

        A block that shares a scale or an exponent never has elements of two parameters. So no result depends on which
        parameters share a flat parameter, which :attr:`Settings.bucket_bytes` decides.
        """
        return max(MOMENT_BLOCK if self.moments == "int8" else START_ELEMENTS, self.shard_elements)

    def keeps_fp32_masters(self, parameter: torch.dtype) -> bool:
        """Tell whether parameters of this dtype are rounded copies of separate float32 masters."""
        return self.masters == "fp32" and parameter != torch.float32

    def master_bytes(self, parameter: torch.dtype) -> int:
        """Return the bytes per element of the masters of a parameter of this dtype."""
        return 0 if parameter == torch.float32 else MASTERS[self.masters]

    def moment_bytes(self, numel: int) -> int:
        """Return the bytes of one moment of ``numel`` elements, a number of full blocks."""
        exponents = numel // MOMENT_BLOCK if self.moments == "int8" else 0
        return MOMENTS[self.moments] * numel + exponents


#: Each parameter keeps its dtype, and its gradients are sent in that dtype.
AS_GIVEN = Precision()
#: Names for :func:`parse_precision`.
PRECISIONS = {
    "fp32": Precision(torch.float32),
    "tf32": Precision(torch.float32, matmul="tf32"),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
    "bf16-split": Precision(torch.bfloat16, masters="split"),
    "bf16-stochastic": Precision(torch.bfloat16, masters="none"),
    "bf16-8bit": Precision(torch.bfloat16, masters="split", moments="int8"),
}

PrecisionLike = Precision | str | torch.dtype | None


def parse_precision(precision: PrecisionLike) -> Precision:
    """Return the Precision for a name of :data:`PRECISIONS` or for a dtype of the parameters; None: unchanged dtypes.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(precision, Precision):
        return precision
    if precision is None or (isinstance(precision, torch.dtype) and precision in DTYPES.values()):
        return Precision(precision)
    if isinstance(precision, str) and precision in PRECISIONS:
        return PRECISIONS[precision]
    raise ConfigError(
        "precision",
        expected=f"one of {', '.join(PRECISIONS)}, a Precision, or a dtype: {', '.join(map(str, DTYPES.values()))}",
        got=repr(precision),
        do=did_you_mean(precision, _SPELLINGS, "Leave it out to keep each parameter's own dtype."),
    )


# Other spellings of the dtypes.
_SPELLINGS = (
    {**_spellings(PRECISIONS)}
    | {"half": "fp16", "float": "fp32", "mixed": "bf16"}
    | {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
)
