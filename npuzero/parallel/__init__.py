"""Parallel axes next to ZeRO's data axes: functions over a communicator that divide a model's computation over ranks.

In: an unsharded model and a mesh with a ``tensor``, ``pipe`` or sequence axis. Out: the model with hooks, relations and
divided parameters, which ``zero`` shards afterwards.

* ``functions``: collectives that autograd differentiates;
* ``tensor_parallel``: divide Linears by a plan; read ``tensor_parallel/divide.py`` first;
* ``pipeline_parallel``: stages, schedules and the step; read ``pipeline_parallel/runner.py`` next;
* ``sequence_parallel``: slices of sequences; read ``sequence_parallel/slices.py`` then;
* ``class_parallel``: embedding, cross entropy and softmax over a sharded vocabulary or class set.
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
        if name != "TorchStage":  # imported on first use: torch's pipelining takes a second
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from npuzero.parallel.pipeline_parallel import torch_stage

        value = globals()[name] = torch_stage.TorchStage
        return value
