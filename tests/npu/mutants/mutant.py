"""A mutant: a kernel or a tiling with one mistake in it, and the check of the emulator that must find it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelMutant:
    """A mistake in csrc/npu, which a check finds where the kernel whose mutant it is is exercised.

    Attributes:
        name: what is wrong.
        file: within ``csrc/npu``.
        old, new: ``old`` occurs once in the file, and becomes ``new``.
        check: of the emulator, or "values": the reference's.
        quick: whether `make test` runs it.
    """

    name: str
    file: str
    old: str
    new: str
    check: str
    quick: bool = False
