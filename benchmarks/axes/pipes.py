"""One rank of a contender with pipeline stages; options as in axes.work.

All contenders cut the model after the same layer, run the same micro-batches in 1F1B order, clip by the norm over all
stages and update with AdamW. Within a stage's ranks parameters are sharded, and all-gathered once per step: FSDP2 does
so with ``reshard_after_forward=False``, npuzero if memory allows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.axes.contenders import build_train_steps, plain_llama
from benchmarks.axes.llama import LlamaSizes
from benchmarks.peers.contenders import join_ranks
from benchmarks.step.contenders import Build, TrainSteps, plain_steps
from benchmarks.step.work import StepRank
from benchmarks.step.workload import MAX_NORM

STAGES = 2
FIRST = "model.embed_tokens"  # the first module after which blocks follow


@dataclass(frozen=True)
class PipelineSizes(LlamaSizes):
    """Sizes of a step through two stages in micro-batches; ``first`` layers are in the first stage."""

    sequence: int = 32
    batch: int = 8
    micro_batches: int = 8
    first: int = 5

    @property
    def sent(self) -> Tensor:
        """Return a micro-batch's activations between the stages, on meta."""
        shape = (self.batch // self.micro_batches, self.sequence, self.dim)
        return torch.empty(shape, dtype=self.dtype, device="meta")

    @property
    def sent_bytes(self) -> int:
        """Return bytes that a rank sends to the other stage per step: activations, or their gradients."""
        return self.micro_batches * self.sent.nbytes

    @property
    def bubble(self) -> float:
        """Return the idle share of a 1F1B rank's step if both stages take equally long."""
        return (STAGES - 1) / (self.micro_batches + STAGES - 1)


class PipedRank(StepRank):
    """A rank that reports the bytes sent by its stage."""

    def sent(self) -> int:
        """Return the bytes between stages that npuzero counted in the last step."""
        import npuzero

        return npuzero.report(self.steps.model).bytes_sent["send"]


def make(rank: int, size: int, options: dict[str, Any]) -> StepRank:
    """Make the rank of this team."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return PipedRank(rank, options, PipelineSizes)


class LlamaStage(nn.Module):
    """One of two stages of a Llama: tokens int64[B, T] to activations [B, T, D], or these to logits [B, T, V]."""

    def __init__(self, model: Any, stage: int, first: int) -> None:
        super().__init__()
        self.begins = stage == 0
        self.model = model.model
        self.head: nn.Module = nn.Identity() if self.begins else model.lm_head
        if self.begins:
            self.model.layers = self.model.layers[:first]
            self.model.norm = nn.Identity()
        else:
            self.model.layers = self.model.layers[first:]
            self.model.embed_tokens = None

    def forward(self, x: Tensor) -> Tensor:
        given = {"input_ids" if self.begins else "inputs_embeds": x}
        return self.head(self.model(**given).last_hidden_state)


def mean_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return mean cross-entropy, in nats, of ``tokens`` int64[B, T] under ``logits`` [B, T, V]."""
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def schedule_steps(steps: TrainSteps, loss: Callable[[nn.Module, Tensor], Tensor]) -> TrainSteps:
    """Return steps with a ``loss`` that runs the full schedule, including backward."""
    return replace(steps, loss=loss, backward=lambda loss: None)


def stage_compute_only() -> Build:
    """Build a stage without communication: forward and backward of each micro-batch, and the update."""
    begins = int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]) // STAGES

    def build(model: nn.Module, workload: PipelineSizes) -> TrainSteps:
        stage = LlamaStage(model, 0 if begins else 1, workload.first)
        received = torch.randn_like(workload.sent, device="cpu")

        def loss(stage: nn.Module, tokens: Tensor) -> Tensor:
            for micro in tokens.chunk(workload.micro_batches):
                if begins:
                    stage(micro[:, :-1]).backward(received / received.numel())
                else:
                    found = mean_token_loss(stage(received.clone().requires_grad_()), micro[:, 1:])
                    (found / workload.micro_batches).backward()
            return torch.zeros(())

        return schedule_steps(plain_steps(stage, workload.hyper, workload.dtype), loss)

    return build


def npuzero_pipeline(preset: str, schedule: str = "1f1b") -> Build:
    """Build npuzero's pipeline with stages sharded by a preset over data ranks."""
    import npuzero

    def build(model: nn.Module, workload: PipelineSizes) -> TrainSteps:
        npuzero.init()
        pipe = npuzero.pipeline(
            model,
            npuzero.mesh(pipe=STAGES),
            plan=preset,
            precision=workload.precision + ("-split" if workload.precision == "bf16" else ""),
            schedule=schedule,
            micro_batches=workload.micro_batches,
            split=(FIRST, f"model.layers.{workload.first}"),
            loss_fn=lambda output, target: mean_token_loss(output.logits, target),
        )
        return schedule_steps(
            build_train_steps(pipe, workload.hyper),
            lambda pipe, tokens: pipe.step(tokens[:, :-1], target=tokens[:, 1:]),
        )

    return build


def torch_pipeline(backend: str, shards: bool = True) -> Build:
    """Build torch.distributed.pipelining over the stages, and if it ``shards``, FSDP2 over data ranks."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    if backend == "shm":
        import npuzero  # noqa: F401  here: imports do not count toward the measured memory

    def build(model: nn.Module, workload: PipelineSizes) -> TrainSteps:
        join_ranks(backend)
        shape = (STAGES, dist.get_world_size() // STAGES)
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("pipe", "data"))
        group, number = mesh.get_group("pipe"), mesh.get_local_rank("pipe")
        stage = LlamaStage(model, number, workload.first)
        policy = MixedPrecisionPolicy(param_dtype=workload.dtype, reduce_dtype=workload.dtype)
        for module in (*stage.model.layers, stage) if shards else ():
            fully_shard(module, mesh=mesh["data"], mp_policy=policy, reshard_after_forward=False)
        piece = PipelineStage(stage, number, STAGES, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(piece, workload.micro_batches, loss_fn=mean_token_loss)
        parameters = list(stage.parameters())
        optimizer = torch.optim.AdamW(parameters, fused=True, **workload.hyper)

        def loss(_: nn.Module, tokens: Tensor) -> Tensor:
            if number == 0:
                schedule.step(tokens[:, :-1], return_outputs=False)
                return torch.zeros(())
            losses: list[Tensor] = []
            schedule.step(target=tokens[:, 1:], losses=losses, return_outputs=False)
            return STAGES * torch.stack(losses).mean()  # so that the mean over all ranks is the loss

        def update() -> None:
            norm = nn.utils.get_total_norm([each.grad for each in parameters])
            squared = (norm.full_tensor() if shards else norm).square()
            dist.all_reduce(squared, group=group)
            nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, squared.sqrt())
            optimizer.step()
            optimizer.zero_grad()

        return schedule_steps(TrainSteps(stage, update), loss)

    return build


CONTENDERS: dict[str, Callable[[], Build]] = {
    "plain": plain_llama,
    "compute": stage_compute_only,
    "zero3": partial(npuzero_pipeline, "zero3"),
    "zero2": partial(npuzero_pipeline, "zero2"),
    "zero-bubble": partial(npuzero_pipeline, "zero3", "zero-bubble"),
    "torch": partial(torch_pipeline, "gloo"),
    "torch-shm": partial(torch_pipeline, "shm"),
    "torch-whole": partial(torch_pipeline, "gloo", shards=False),
}
