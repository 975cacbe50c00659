"""What the planner is asked: a model on a cluster, and one way to train it there."""

from __future__ import annotations

from dataclasses import dataclass, field

from npuzero.config import Settings
from npuzero.plan import MeshShape, Plan
from npuzero.planner.hardware.cluster import Cluster
from npuzero.planner.models import ModelShape


@dataclass(frozen=True)
class TrainingJob:
    """Ask for a model to be trained on a cluster.

    Attributes:
        model: its shapes, and its modules on meta.
        cluster: where.
        sequence: tokens of a sequence.
        tokens_per_step: of all ranks together; None: as many as one micro-batch of one sequence a rank is.
        attention: ``"flash"`` keeps no scores, ``"plain"`` keeps them.
        clip: whether the gradient norm is taken.
    """

    model: ModelShape
    cluster: Cluster
    sequence: int
    tokens_per_step: int | None = None
    attention: str = "flash"
    clip: bool = True


@dataclass(frozen=True)
class TrainingRun:
    """Describe one way to train.

    Attributes:
        plan, mesh: the placement, and the ranks that it is over.
        micro_batch: sequences of a rank in one pass.
        micro_batches: passes of a step.
        recompute: whether each block keeps its input alone and computes its forward again in backward.
        settings: of the engine.
    """

    plan: Plan
    mesh: MeshShape
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: bool = False
    settings: Settings = field(default_factory=Settings)
