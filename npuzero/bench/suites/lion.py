"""The benchmark of Lion's update."""

from __future__ import annotations

import torch

from npuzero import ops
from npuzero.bench.harness import Benchmark, check_close
from npuzero.bench.setting import OWN, BenchmarkSetting

_LR, _BETA1, _BETA2, _DECAY = 1e-4, 0.9, 0.99, 1e-2
_TOLERANCE = 1e-6  # of the largest parameter: a unit in the last place; an update is 1e-4
_BYTES = 20  # per element: parameter and momentum are read and written, the gradient is read


def benchmark_flat_lion(setting: BenchmarkSetting) -> Benchmark:
    """Compare Lion on one flat float32 tensor with the paper's operations one by one in torch."""
    n = setting.elements
    start, gradient = setting.random(n), setting.random(n)
    master, momentum = start.clone(), torch.zeros_like(start)
    step = 0

    def own() -> None:
        nonlocal step
        step += 1
        ops.flat_lion(master, momentum, gradient, [ops.LionSegment(0, n, _LR, _BETA1, _BETA2, _DECAY, step)])

    def by_torch() -> None:
        update = momentum.mul(_BETA1).add_(gradient, alpha=1 - _BETA1).sign_()
        master.mul_(1 - _LR * _DECAY).add_(update, alpha=-_LR)
        momentum.mul_(_BETA2).add_(gradient, alpha=1 - _BETA2)

    def check() -> str:
        # Momentum starts at zero, so the update's sign is the gradient's (Chen et al., 2023, algorithm 2).
        want = start.double() * (1 - _LR * _DECAY) - _LR * gradient.double().sign()
        for name, update in (("flat_lion", own), ("Lion by torch's operations", by_torch)):
            master.copy_(start)
            momentum.zero_()
            update()
            check_close(name, master, want, tolerance=_TOLERANCE)
        return "all parameters after the first step against float64"

    return Benchmark(
        "flat_lion/flat",
        "Lion fp32, one flat tensor",
        [
            setting.contender("torch, op by op", by_torch, _BYTES, n),
            setting.contender(OWN, own, _BYTES, n),
            *setting.probes("in place"),
        ],
        "torch, op by op",
        check,
        {"elements": n},
    )
