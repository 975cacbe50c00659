"""One rank of a contender of these benchmarks, for npuzero.bench's worker; options as in benchmarks.step.work.

npuzero's contenders are plans: over gloo, or if the environment names links, over shared memory with those links.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peers.contenders import deepspeed_zero
from benchmarks.step import work
from benchmarks.step.contenders import Build, TrainSteps, independent_ranks
from benchmarks.step.workload import MAX_NORM, GPTWorkload

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))

from model import GPT, GPTConfig

#: Ranks per node, and in total.
EACH, RANKS = 2, 4
PLANS = ("zero3", "hpz", "zero++", "thin")


@dataclass(frozen=True)
class DemoWorkload(GPTWorkload):
    """Sizes of the demo's GPT and of a step. The default model has 25.4 M parameters and little compute."""

    sequence: int = 16
    batch: int = 1

    def model(self) -> Any:
        """Return the model in float32 on the CPU, with the same weights in every process."""
        torch.manual_seed(0)
        return GPT(GPTConfig(self.dim, self.layers, self.heads, self.vocabulary))


def npuzero_on_nodes(preset: str) -> Build:
    """Build npuzero under a preset that distinguishes levels within and between nodes."""
    import npuzero
    from benchmarks.wires.links import VARIABLE, LinkedWorld, NodeLinks

    def build(model: nn.Module, workload: GPTWorkload) -> TrainSteps:
        shared = os.environ.get(VARIABLE)
        world = npuzero.init("cpu", backend="shm" if shared else "gloo")
        if shared:
            world = LinkedWorld(world, NodeLinks(Path(shared)))
        placed = npuzero.Plan.preset(preset, precision=workload.precision, local_size=EACH)
        npuzero.zero(model, plan=placed, world=world)
        optimizer = npuzero.AdamW(model.parameters(), **workload.hyper)

        def update() -> None:
            npuzero.clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

        return TrainSteps(model, update)

    return build


#: By default its stage 3 keeps parameters of this size from forward to backward; these settings gather them again,
#: which is the purpose of hpZ's second copy. (Version 0.19.8 has the quantizer of ZeRO++ for accelerators only, and
#: raises an error.)
_HPZ = {"stage": 3, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "zero_hpz_partition_size": EACH}
_ZEROPP = {**_HPZ, "zero_quantized_weights": True, "zero_quantized_gradients": True}
PEERS = ("deepspeed-3", "deepspeed-hpz", "deepspeed-zero++")
CONTENDERS: dict[str, Callable[[], Build]] = {
    "plain": independent_ranks,
    **{preset: partial(npuzero_on_nodes, preset) for preset in PLANS},
    **{name: partial(deepspeed_zero, zero) for name, zero in zip(PEERS, ({"stage": 3}, _HPZ, _ZEROPP), strict=True)},
}


class WireRank(work.StepRank):
    """A rank that reports the traffic of its plan between nodes."""

    def crossed(self) -> int:
        """Return the bytes that this rank sent to other nodes in the last step, summed by level."""
        import npuzero

        return sum(npuzero.report(self.steps.model).sent_along["node"].values())


def make(rank: int, size: int, options: dict[str, Any]) -> WireRank:
    """Make the rank of this team."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return WireRank(rank, options, DemoWorkload)
