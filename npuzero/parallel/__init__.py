"""Parallel axes beside ZeRO's own: functions over a communicator that cut a model's computation over ranks.

``functions`` has the collectives that autograd differentiates, each its partner's conjugate; ``vocabulary`` an
embedding and a cross entropy over a sharded vocabulary; ``ClassHead`` a softmax over more classes than a device holds.
``sequences`` divides sequences, and ``sequence_models`` prepares models of transformers for that. ``tensor`` divides
layers: by ``words``, of which ``division`` makes data, and ``regions`` hooks. ``TorchStage`` lets torch's pipeline
schedules drive sharded stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npuzero.parallel.class_parallel import vocabulary
from npuzero.parallel.class_parallel.class_head import ClassHead
from npuzero.parallel.class_parallel.margins import ArcFace, CosFace
from npuzero.parallel.pipeline_parallel import schedule
from npuzero.parallel.relate import relate
from npuzero.parallel.sequence_parallel.slices import attention, slice, token_loss
from npuzero.parallel.sequence_parallel.transformers_models import sequence
from npuzero.parallel.tensor_parallel.api import tensor, tensor_bytes

__all__ = [
    "ArcFace",
    "ClassHead",
    "CosFace",
    "TorchStage",
    "attention",
    "relate",
    "schedule",
    "sequence",
    "slice",
    "tensor",
    "tensor_bytes",
    "token_loss",
    "vocabulary",
]

if TYPE_CHECKING:
    from npuzero.parallel.pipeline_parallel.torch_stage import TorchStage
else:

    def __getattr__(name: str) -> object:
        if name != "TorchStage":  # imported when it is first asked for: torch's pipelining takes a second
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from npuzero.parallel.pipeline_parallel import torch_stage

        value = globals()[name] = torch_stage.TorchStage
        return value
