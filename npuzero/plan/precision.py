"""In which dtype each part of the training state is kept, sent and computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from npuzero.errors import ConfigError, did_you_mean, keywords

#: Each parameter starts on a multiple of this many elements: 16 bytes even in 8 bits.
START_ELEMENTS = 16

#: Dtypes of parameters and of communication, by the names people give them.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Bytes an element of the masters takes beside a low-precision parameter: the whole of it; the lower half, of which the
#: bfloat16 parameter is the upper; nothing, where the parameter is all there is and is rounded stochastically.
MASTERS = {"fp32": 4, "split": 2, "none": 0}
#: Bytes an element of a moment takes; int8 has a byte beside each :data:`MOMENT_BLOCK` elements: their exponent.
MOMENTS = {"fp32": 4, "bf16": 2, "int8": 1}
#: Elements of a flat that share an exponent. Every shard starts and ends on a multiple of them.
MOMENT_BLOCK = 64
#: How float32 matrix products are computed: as written, or with inputs rounded to TF32 (on an NPU: HF32).
MATMULS = ("ieee", "tf32")
#: In which dtype finished sums of gradients travel, where a plan has several ranks keep the same states.
SUMS = ("fp32", "wire")


@keywords(dtype="parameters", param_dtype="parameters", reduce_dtype="wires")
@dataclass(frozen=True)
class Precision:
    """Choose the dtypes in which each part of the training state is kept, sent and computed.

    Attributes:
        parameters: what they are converted to, and with them the root's floating inputs; None: each keeps its own.
        wires: the communication dtype of gradients (FSDP's reduce_dtype); None: the parameters'. Parameters are sent
            as they are.
        accumulation: in which gradients are summed: over ranks and over micro-batches.
        masters: beside parameters that are not float32: ``"fp32"``; ``"split"``, the lower half only, with the same
            results; ``"none"``, the parameters themselves, rounded stochastically.
        moments: the optimizer's: ``"fp32"``, ``"bf16"``, or ``"int8"`` with an exponent for each block.
        matmul: float32 matrix products: ``"ieee"``, or ``"tf32"`` where the device has them (on an NPU: HF32).
        sums: in which finished sums of gradients are sent to the ranks that keep the same states (R3's all_reduce):
            ``"fp32"``, or ``"wire"``, rounded to the communication dtype. Where all ranks shard states none are.

    Raises:
        ConfigError: a value that is none of these, or several that make no sense together.

    Example::

        precision = npuzero.Precision(torch.bfloat16, wires=torch.float32, moments="bf16")
        model = npuzero.zero(net, stage=3, precision=precision)
    """

    parameters: torch.dtype | None = None
    wires: torch.dtype | None = None
    accumulation: torch.dtype = torch.float32
    masters: str = "fp32"
    moments: str = "fp32"
    matmul: str = "ieee"
    sums: str = "fp32"

    def __post_init__(self) -> None:
        dtypes = (None, *DTYPES.values())
        allowed: dict[str, Sequence[object]] = {
            "parameters": dtypes,
            "wires": dtypes,
            "accumulation": (torch.float32,),
            "masters": tuple(MASTERS),
            "moments": tuple(MOMENTS),
            "matmul": MATMULS,
            "sums": SUMS,
        }
        for name, values in allowed.items():
            value: object = getattr(self, name)
            if type(value) not in map(type, values) or value not in values:
                raise ConfigError(
                    f"precision.{name}",
                    expected=f"one of {', '.join(map(str, values))}",
                    got=repr(value),
                    do=did_you_mean(value, _spellings(values), "Choose among these, or leave it out."),
                )
        if self.masters != "fp32" and self.parameters is not torch.bfloat16:
            raise ConfigError(
                f"precision.masters={self.masters!r}",
                expected="parameters=torch.bfloat16: only a bfloat16 is the upper half of a float32",
                got=f"parameters={self.parameters}",
                do="Convert the parameters to bfloat16, or keep masters='fp32'.",
            )
        if self.wires is torch.float16 and self.parameters is not torch.float16:
            raise ConfigError(
                "precision.wires=torch.float16",
                expected="float16 parameters, whose gradients a loss scale keeps in range",
                got=f"parameters={self.parameters}",
                do="Let gradients travel in bfloat16 or float32.",
            )

    def parameter_of(self, own: torch.dtype) -> torch.dtype:
        """Return the dtype of a parameter that came in ``own``."""
        return self.parameters or own

    def wire_of(self, parameter: torch.dtype) -> torch.dtype:
        """Return the communication dtype of gradients of parameters of dtype ``parameter``."""
        return self.wires or parameter

    def sums_of(self, parameter: torch.dtype) -> torch.dtype:
        """Return the communication dtype of finished sums of gradients of such parameters."""
        return self.wire_of(parameter) if self.sums == "wire" else self.accumulation

    @property
    def start_elements(self) -> int:
        """Return of how many elements each parameter's start in its flat is a multiple: where blocks are, of one."""
        return MOMENT_BLOCK if self.moments == "int8" else START_ELEMENTS

    def keeps_fp32_masters(self, parameter: torch.dtype) -> bool:
        """Tell whether masters are float32 numbers beside parameters of this dtype, which are their rounded copies."""
        return self.masters == "fp32" and parameter != torch.float32

    def master_bytes(self, parameter: torch.dtype) -> int:
        """Return the bytes an element of the masters takes beside a parameter of this dtype."""
        return 0 if parameter == torch.float32 else MASTERS[self.masters]

    def moment_bytes(self, numel: int) -> int:
        """Return the bytes of one moment of ``numel`` elements, whole blocks of them."""
        exponents = numel // MOMENT_BLOCK if self.moments == "int8" else 0
        return MOMENTS[self.moments] * numel + exponents


#: Each parameter keeps its dtype, and its gradients travel in it.
AS_GIVEN = Precision()
#: Names that :func:`parse_precision` takes.
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
    """Return the Precision that a name of :data:`PRECISIONS` or a dtype of the parameters stands for; None:
    as they are.

    Raises:
        ConfigError: none of these.
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


def _spellings(values: Iterable[object]) -> dict[str, object]:
    return {str(value).removeprefix("torch."): value for value in values if value is not None}


# How else the names of dtypes are spelt.
_SPELLINGS = (
    {**_spellings(PRECISIONS)}
    | {"half": "fp16", "float": "fp32", "mixed": "bf16"}
    | {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
)
