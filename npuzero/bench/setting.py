"""Size, device and probes of the op benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from npuzero.bench.harness import Contender, local_contender

ELEMENTS, QUICK_ELEMENTS = 64 * 2**20, 2**20
OWN = "npuzero"

_CPU = torch.device("cpu")
SEED = 1


@dataclass(frozen=True)
class BenchmarkSetting:
    """Define the number of elements and the device of op benchmarks."""

    elements: int = ELEMENTS
    device: torch.device = _CPU

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw normal values; the same for the same shape."""
        drawn = torch.empty(*shape, dtype=dtype, device=self.device)
        return drawn.normal_(generator=torch.Generator(self.device).manual_seed(SEED))

    def contender(self, name: str, call: Callable[[], object], bytes_per_element: int | None, count: int) -> Contender:
        """Make a contender on this device that moves ``bytes_per_element`` bytes for each of ``count`` elements."""
        nbytes = None if bytes_per_element is None else bytes_per_element * count
        return local_contender(name, call, device=self.device, nbytes=nbytes)

    def probes(self, *names: str) -> list[Contender]:
        """Make probes of the machine's bandwidth, on separate buffers."""
        n = self.elements
        a, b, c = (self.random(n) for _ in range(3))
        known: dict[str, tuple[Callable[[], object], int]] = {
            "copy": (lambda: a.copy_(b), 8),
            "in place": (lambda: a.mul_(1.0), 8),
            "triad": (lambda: torch.add(b, c, alpha=0.5, out=a), 12),
        }
        return [self.contender(name, known[name][0], known[name][1], n) for name in names]
