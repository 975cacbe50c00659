"""Contenders with ranks that share batches, and their plain reference training; see benchmarks.step.

Contenders with tensor ranks divide the same layers in the same way: Linears by transformers' own plan, the embedding
and the head along the vocabulary, with logits gathered. In bf16 all compute and send bfloat16, and keep float32 shards:
npuzero's precision is then ``bf16-split``, the layout of FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.axes.llama import llama_loss
from benchmarks.peers.contenders import join_ranks
from benchmarks.step.contenders import Build, TrainSteps, plain_steps
from benchmarks.step.workload import MAX_NORM, GPTWorkload

RANKS = 2  # that share a batch


def plain_llama() -> Build:
    """Build plain torch in one process."""
    return lambda model, workload: replace(plain_steps(model, workload.hyper, workload.dtype), loss=llama_loss)


def npuzero_tensor(mode: str) -> Build:
    """Build npuzero with tensor ranks, and stage 3 over data ranks."""
    import npuzero

    def build(model: nn.Module, workload: GPTWorkload) -> TrainSteps:
        npuzero.init()
        mesh = npuzero.mesh(tensor=RANKS)
        words = {**model.config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
        words["lm_head"] = "colwise_gather_output"
        npuzero.parallel.tensor(model, mesh, mode=mode, plan=words)
        return shard_with_preset(model, workload, mesh, "zero3")

    return build


def npuzero_isp() -> Build:
    """Build npuzero with ranks that share a sequence, and stage 3 over all of them."""
    import npuzero
    from npuzero import parallel

    def build(model: nn.Module, workload: GPTWorkload) -> TrainSteps:
        npuzero.init()
        mesh = npuzero.mesh(sequence=RANKS, local_size=RANKS)

        def loss(model: nn.Module, tokens: Tensor) -> Tensor:
            inputs, labels = (parallel.slice(part, mesh) for part in (tokens[:, :-1], tokens[:, 1:]))
            return parallel.token_loss(model(input_ids=inputs).logits, labels, mesh)

        parallel.sequence(model, mesh)
        return replace(shard_with_preset(model, workload, mesh, "isp"), loss=loss)

    return build


def npuzero_zero3() -> Build:
    """Build npuzero with separate sequences per rank, and stage 3 over all ranks."""
    import npuzero

    def build(model: nn.Module, workload: GPTWorkload) -> TrainSteps:
        npuzero.init()
        return shard_with_preset(model, workload, npuzero.mesh(), "zero3")

    return build


def shard_with_preset(model: nn.Module, workload: GPTWorkload, mesh: Any, preset: str) -> TrainSteps:
    """Build npuzero's training under a preset."""
    import npuzero

    precision = workload.precision + ("-split" if workload.precision == "bf16" else "")
    npuzero.zero(model, plan=npuzero.Plan.preset(preset, precision=precision), mesh=mesh)
    return build_train_steps(model, workload.hyper)


def build_train_steps(model: nn.Module, hyper: dict[str, Any]) -> TrainSteps:
    """Build npuzero's clipping and AdamW for a model that it has sharded."""
    import npuzero

    optimizer = npuzero.AdamW(model.parameters(), **hyper)

    def update() -> None:
        npuzero.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return TrainSteps(model, update, loss=llama_loss)


def torch_tensor_fsdp2(backend: str) -> Build:
    """Build torch's parallelize_module over tensor ranks and FSDP2 over data ranks, as in its tutorial."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if backend == "shm":
        import npuzero  # noqa: F401  here: imports do not count toward the measured memory

    def build(model: nn.Module, workload: GPTWorkload) -> TrainSteps:
        join_ranks(backend)
        shape = (dist.get_world_size() // RANKS, RANKS)
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        words = model.config.base_model_tp_plan
        plan: dict[str, Any] = {f"model.{pattern}": styles[word]() for pattern, word in words.items()}
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tensor"], plan)
        policy = MixedPrecisionPolicy(param_dtype=workload.dtype, reduce_dtype=workload.dtype)
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh["data"], mp_policy=policy)
        by_mesh: dict[Any, list[Tensor]] = {}  # norm weights are on another mesh; torch takes one at a time
        for parameter in model.parameters():
            by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
        groups = list(by_mesh.values())
        optimizer = torch.optim.AdamW([{"params": group} for group in groups], fused=True, **workload.hyper)

        def update() -> None:
            norms = [nn.utils.get_total_norm([each.grad for each in group]).full_tensor() for group in groups]
            norm = torch.stack(norms).norm()
            for group in groups:
                nn.utils.clip_grads_with_norm_(group, MAX_NORM, norm)
            optimizer.step()
            optimizer.zero_grad()

        return TrainSteps(model, update, loss=llama_loss)

    return build


CONTENDERS: dict[str, Callable[[], Build]] = {
    "plain": plain_llama,
    "mtp": partial(npuzero_tensor, "mtp"),
    "msp": partial(npuzero_tensor, "msp"),
    "isp": npuzero_isp,
    "zero3": npuzero_zero3,
    "torch": partial(torch_tensor_fsdp2, "gloo"),
    "torch-shm": partial(torch_tensor_fsdp2, "shm"),
}
