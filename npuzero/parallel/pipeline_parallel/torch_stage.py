"""Run torch's pipeline schedules over stages that npuzero shards.

``torch.distributed.pipelining`` knows DistributedDataParallel and FSDP by type, and scales the gradients that they
leave in ``p.grad``. A stage made by :func:`npuzero.zero` leaves none there: its engine reduces gradients as they leave
autograd, and scales them in the update. Importing ``torch.distributed.pipelining`` takes a second, so this file is
imported on first use of :class:`TorchStage`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from npuzero.comm.watchdog.call_names import collective_call
from npuzero.errors import ConfigError
from npuzero.shard.find_engine import engine_of


class TorchStage(PipelineStage):
    """Run a sharded stage under torch's schedules (``ScheduleGPipe``, ``Schedule1F1B``, ``ScheduleInterleaved1F1B``).

    The schedule calls it like a ``PipelineStage``; npuzero's engine shards, gathers and reduces, and its optimizer,
    clipping and checkpoints work as usual. :func:`npuzero.pipeline` does without torch's runtime: it divides the model,
    and all stages of a rank are one model.

    Args:
        module: the stage, made by :func:`npuzero.zero` with a mesh whose ``pipe`` axis has the pipeline's ranks.
        stage_index: its number; stage i is on rank i % (ranks of the pipeline), as in torch's schedules.
        num_stages: in the pipeline.
        device: of this rank.
        group: torch's process group of the ranks along ``pipe`` that share this rank's index on all other axes. None:
            the default group.
        no_sync: accumulate the gradients of a step's micro-batches on each rank and reduce them once, in the last:
            fewer bytes for plans that shard gradients, which stay unsharded (float32) until then. False: reduce after
            each micro-batch.
        shapes: ``input_args`` and ``output_args`` of a PipelineStage: tensors of one micro-batch, possibly on meta,
            that require gradients as the real ones will. With both, the first step skips torch's shape inference.

    Raises:
        StateError: ``module`` was not made by :func:`npuzero.zero`.
        ConfigError: in a step: the schedule splits the backward (zero bubble); or it scales gradients (torch's
            schedules do unless ``scale_grads=False``) after ``AdamW(early=True)`` has used them.

    Example::

        import torch.distributed as dist
        from torch.distributed.pipelining import ScheduleGPipe

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        stage = npuzero.parallel.TorchStage(model, 0, 1, world.device)
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
        losses = []
        schedule.step(x, target=torch.zeros(4, 1, device=x.device), losses=losses)
        npuzero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.destroy_process_group()
    """

    def __init__(
        self,
        module: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        *,
        no_sync: bool = False,
        **shapes: Tensor | tuple[Tensor, ...] | None,
    ) -> None:
        self._engine = engine_of(module)
        self._no_sync = no_sync
        super().__init__(module, stage_index, num_stages, device, group=group, **shapes)  # type: ignore[arg-type]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run one micro-batch's backward and reduce its gradients, or accumulate them under ``no_sync``."""
        if not full_backward:
            raise ConfigError(
                "TorchStage",
                expected="a schedule whose backward is one: ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B",
                got="one that computes the gradients of weights apart from those of inputs (zero bubble)",
                do="Choose one of these, or npuzero.pipeline(schedule='zero-bubble').",
            )
        alone = self._no_sync and not last_backward
        with self._engine.passes.no_sync() if alone else contextlib.nullcontext():
            super().backward_one_chunk(bwd_chunk_id, loss, last_backward=last_backward)

    @collective_call("TorchStage")
    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients by a factor in the update, after finishing their reduction. Collective over the data
        ranks.
        """
        if grad_scale_factor == 1:
            return
        boundary = self._engine.boundary
        boundary.early.refuse("TorchStage")
        boundary.accord.call("TorchStage", {"grad_scale_factor": grad_scale_factor})
        if boundary.finish():
            boundary.scale_gradients(torch.full((1,), 1.0 / grad_scale_factor, device=self._engine.device))
