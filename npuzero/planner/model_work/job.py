"""Inputs of the planner: a model to train on a cluster, and one way to train it."""

from __future__ import annotations

from dataclasses import dataclass, field

from npuzero.config import Settings
from npuzero.plan import MeshShape, Plan
from npuzero.planner.hardware.cluster import Cluster
from npuzero.planner.models import ModelShape


@dataclass(frozen=True)
class TrainingJob:
    """Describe a model to train on a cluster.

    Attributes:
        model: shapes of its units, and its modules on meta.
        cluster: the cluster.
        sequence: tokens of a sequence.
        tokens_per_step: tokens of all ranks together; None: one micro-batch of one sequence per rank.
        attention: ``"flash"`` keeps no scores, ``"plain"`` keeps them.
        clip: whether the gradient norm is computed.
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
        plan, mesh: the placement, and the sizes of the mesh.
        micro_batch: sequences per rank in one pass.
        micro_batches: passes of a step.
        recompute: whether each block keeps only its input and recomputes its forward in backward.
        settings: settings of the engine.
    """

    plan: Plan
    mesh: MeshShape
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: bool = False
    settings: Settings = field(default_factory=Settings)
