"""All mutants, by the kernel that is exercised to find them."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain

from . import cast, dequantize_sum, flat_adam, flat_lion, norm, pack, quantize
from .mutant import KernelMutant

KERNELS = {
    "cast": cast,
    "dequantize_sum": dequantize_sum,
    "flat_adam": flat_adam,
    "flat_lion": flat_lion,
    "norm": norm,
    "pack": pack,
    "quantize": quantize,
}

# Mistakes that break a rule of the device, or the arithmetic everywhere.
MUTANTS: dict[str, tuple[KernelMutant, ...]] = {op: kernel.MUTANTS for op, kernel in KERNELS.items()}

# Mistakes that break no rule of the device, but few values or places: by what an exercise has to have to see them.
MEANINGS: defaultdict[str, list[KernelMutant]] = defaultdict(list)
for _kernel in KERNELS.values():
    for _kind, _mutants in _kernel.MEANINGS.items():
        MEANINGS[_kind].extend(_mutants)

ALL: dict[str, tuple[KernelMutant, ...]] = {
    op: (*kernel.MUTANTS, *chain.from_iterable(kernel.MEANINGS.values())) for op, kernel in KERNELS.items()
}
