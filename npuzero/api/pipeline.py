"""Cut a model into the stages of a pipeline, and shard each stage over its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import nn

from npuzero.api.model import PlanLike, checked_settings, chosen_plan, zero
from npuzero.checkpoint.weight_files.read_weights import Weights
from npuzero.comm import Mesh
from npuzero.config import Settings
from npuzero.errors import refuse_unknown_keywords
from npuzero.parallel.mesh import check_pipeline
from npuzero.parallel.pipeline_parallel.divide import divide_into_stages
from npuzero.parallel.pipeline_parallel.keep_between import choose_between_plan
from npuzero.parallel.pipeline_parallel.runner import Loss, Pipeline, agree_on_schedule
from npuzero.parallel.pipeline_parallel.schedule import schedule as table_of
from npuzero.parallel.tensor_parallel.api import repeats_activations
from npuzero.plan import PIPE, TENSOR, Plan, PrecisionLike
from npuzero.shard.layout.unit_plans import UnitPlans


@refuse_unknown_keywords(
    preset="plan", dtype="precision", num_chunks="chunks", num_microbatches="micro_batches", loss="loss_fn"
)
def pipeline(  # noqa: PLR0913 - all there is to choose, by name
    model: nn.Module,
    mesh: Mesh,
    stage: int | float | None = None,
    *,
    plan: PlanLike | None = None,
    schedule: str = "1f1b",
    micro_batches: int,
    chunks: int = 1,
    loss_fn: Loss | None = None,
    blocks: Sequence[nn.Module | str] | None = None,
    split: Sequence[int] | Sequence[str] | None = None,
    precision: PrecisionLike = None,
    local_size: int | None = None,
    offload: str | None = None,
    unit_plans: Mapping[str, PlanLike] | None = None,
    weights: str | Path | Weights | None = None,
    initialize: Callable[[nn.Module], object] | None = None,
    buffers: str | None = None,
    settings: Settings | None = None,
) -> Pipeline:
    """Cut ``model`` into stages over the pipe axis of ``mesh``, and shard each stage over its ranks.

    A step is ``pipe.step(inputs, target=...)``, which runs forward and backward of all micro-batches. Optimizer,
    clipping and checkpoints work as for any model of :func:`npuzero.zero`. Parameters keep their names in the full
    model.

    Args:
        model: the full model, the same on every rank, on the device or on meta. A rank drops the blocks of other
            stages.
        mesh: of all ranks, see :func:`npuzero.mesh`.
        stage, plan, precision, local_size, offload, unit_plans, weights, initialize, buffers, settings: as for
            :func:`npuzero.zero`, within the ranks of each stage. With a preset, gathered parameters stay unsharded
            until the step (``Plan.between``) if the training state then takes at most half of the device's memory; a
            :class:`Plan` is followed as it is.
        schedule: ``gpipe``, ``1f1b``, ``interleaved`` (with ``chunks``) or ``zero-bubble``.
        micro_batches: the number of micro-batches that each batch is cut into.
        chunks: stages of each rank; stage s is on pipe rank s % ranks.
        loss_fn: called with the model's output for a micro-batch, and its targets; returns their mean. None: the
            model's own loss (labels in its keyword arguments), or the output of the last block.
        blocks: modules or their names, each called with the output of the previous one; a list among them stands for
            its children. None: the children of an nn.Sequential, or the blocks that a transformers model declares.
        split: the number of blocks of each stage, or the name of its first block; None balances by compute.

    Raises:
        ConfigError: on every rank: the model cannot be cut or scheduled, or ranks disagree.
        StateError: the model is sharded already.

    Example::

        layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        loss = torch.nn.functional.mse_loss
        pipe = npuzero.pipeline(layers, npuzero.mesh(pipe=1), stage=2, micro_batches=2, loss_fn=loss)
        optimizer = npuzero.AdamW(pipe.parameters(), lr=1e-3)
        print(pipe.step(torch.ones(4, 8), target=torch.zeros(4, 8)))
        optimizer.step()
    """
    check_pipeline(model, mesh, loss_fn)
    settings = checked_settings(settings)
    ranks = mesh.size((PIPE,))
    sharers = mesh.size((TENSOR,)) if repeats_activations(model) else 1
    given = {"micro_batches": repr(micro_batches), "schedule": repr(schedule), "chunks": repr(chunks)}
    table, division = agree_on_schedule(
        mesh,
        given,
        lambda: (
            table_of(schedule, ranks, micro_batches, chunks),
            divide_into_stages(model, ranks, chunks, split, blocks),
        ),
    )
    pipe = division.take(range(mesh.index((PIPE,)), table.stages, ranks), Pipeline)
    pipe.follow(table, sharers)
    own = chosen_plan(stage, plan, precision, local_size)
    if table.name == "zero-bubble" or not isinstance(plan, Plan):
        own = choose_between_plan(own, pipe, mesh, settings, UnitPlans.named(own, unit_plans, offload))
    zero(
        pipe,
        plan=own,
        offload=offload,
        units=pipe.unit_rule,
        unit_plans=unit_plans,
        weights=weights,
        initialize=initialize,
        buffers=buffers,
        mesh=mesh,
        settings=settings,
    )
    pipe.open(mesh, loss_fn, overlap=settings.overlaps_activations)
    return pipe
