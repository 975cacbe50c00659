"""The peers, each used as documented, on the workload of benchmarks.step; entries have the form of its contenders.

In bf16: ``torch_ddp`` has bfloat16 parameters and communication, and torch's fused AdamW on float32 masters, as npuzero
has; ``ddp-autocast`` and ``zero-redundancy`` have float32 parameters under autocast, as is usual. FSDP2 computes and
sends bfloat16 and keeps float32 shards. DeepSpeed runs its bf16 engine with its CPU Adam. Clipping is each peer's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.step.contenders import Build, TrainSteps, clip_and_step, plain_steps
from benchmarks.step.workload import MAX_NORM, GPTWorkload


def join_ranks(backend: str) -> None:
    """Join the process group; ``"shm"`` is npuzero's backend."""
    if backend == "shm":
        import npuzero  # noqa: F401  registers it
    dist.init_process_group(backend)


def torch_ddp(backend: str) -> Build:
    """Build DistributedDataParallel on parameters of the workload's precision."""

    def build(model: nn.Module, workload: GPTWorkload) -> TrainSteps:
        join_ranks(backend)
        wrap = partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True)
        return plain_steps(model, workload.hyper, workload.dtype, wrap)

    return build


def ddp_autocast(redundancy: bool) -> Build:
    """Build DDP on float32 parameters under autocast, with or without ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def build(model: nn.Module, workload: GPTWorkload) -> TrainSteps:
        join_ranks("gloo")
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        steps = plain_steps(wrapped, workload.hyper)
        if redundancy:
            parameters = list(wrapped.parameters())
            optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, fused=True, **workload.hyper)
            steps = TrainSteps(wrapped, partial(clip_and_step, parameters, optimizer))
        if workload.dtype != torch.float32:
            steps.forward = partial(torch.autocast, "cpu", workload.dtype)
        return steps

    return build


def torch_fsdp2(backend: str, reshard: bool) -> Build:
    """Apply fully_shard to each block and the root; ``reshard`` releases parameters between forward and backward."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def build(model: nn.Module, workload: GPTWorkload) -> TrainSteps:
        join_ranks(backend)
        policy = MixedPrecisionPolicy(param_dtype=workload.dtype, reduce_dtype=workload.dtype)
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, fused=True, **workload.hyper)
        return TrainSteps(model, partial(clip_and_step, parameters, optimizer))

    return build


def deepspeed_zero(zero: dict[str, Any], **further: Any) -> Build:
    """Build DeepSpeed's engine; ``zero`` is its ``zero_optimization``, and ``further`` adds other keys."""
    import deepspeed as library
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    def build(model: nn.Module, workload: GPTWorkload) -> TrainSteps:
        library.init_distributed(dist_backend="gloo")
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": workload.batch,
            "gradient_clipping": MAX_NORM,
            "bf16": {"enabled": workload.dtype == torch.bfloat16},
            "zero_optimization": zero,
            **further,
        }
        optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **workload.hyper)
        engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config)
        return TrainSteps(engine, engine.step, backward=engine.backward)

    return build


CONTENDERS: dict[str, Callable[[], Build]] = {
    "ddp": partial(torch_ddp, "gloo"),
    "ddp-shm": partial(torch_ddp, "shm"),
    "ddp-autocast": partial(ddp_autocast, redundancy=False),
    "zero-redundancy": partial(ddp_autocast, redundancy=True),
    "fsdp2": partial(torch_fsdp2, "gloo", True),
    "fsdp2-keep": partial(torch_fsdp2, "gloo", False),
    "fsdp2-shm": partial(torch_fsdp2, "shm", True),
    "deepspeed-1": partial(deepspeed_zero, {"stage": 1}),
    "deepspeed-2": partial(deepspeed_zero, {"stage": 2}),
    "deepspeed-3": partial(deepspeed_zero, {"stage": 3}),
}
