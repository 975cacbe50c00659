"""Decide whether parameters stay unsharded between the micro-batches of a pipeline's step."""

from __future__ import annotations

from dataclasses import replace

from npuzero import device
from npuzero.comm import Mesh
from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.parallel.pipeline_parallel.runner import Pipeline
from npuzero.plan import Memory, Placement, Plan
from npuzero.shard import build
from npuzero.shard.layout.unit_plans import UnitPlans

#: The share of the device's memory that a training state with unsharded parameters may take.
BETWEEN_SHARE = 0.5


def choose_between_plan(plan: Plan, pipe: Pipeline, mesh: Mesh, settings: Settings, plans: UnitPlans) -> Plan:
    """Return a plan that keeps gathered parameters unsharded until the optimizer step, if memory allows.

    A pipeline has many micro-batches in a step: otherwise parameters would be gathered for each, in forward and
    backward.

    Args:
        plans: the plans of single units, next to ``plan``.

    Returns:
        ``plan`` unchanged if it sets ``between`` already, if nothing would change, or if any rank lacks the memory.

    Raises:
        ConfigError: the zero-bubble schedule needs it, and the plan sets ``between`` to sharded.
    """
    if pipe.schedule.name == "zero-bubble":
        if plan.between is not None and plan.between.axes:
            raise ConfigError(
                f"plan {plan.name!r}, between, under the schedule zero-bubble",
                expected="parameters that stay unsharded until the step: a weight's gradient is computed long after "
                "those that pass through it",
                got=str(plan.between),
                do="Leave it out, or choose the schedule 1f1b.",
            )
        return replace(plan, between=Placement(()))
    kept = make_unsharded_plan(plan)
    if kept is None:
        return plan
    foreseen = build.predict_model(
        pipe, replace(plans, model=kept), mesh, pipe.unit_rule, settings, pipe.parts, acts=pipe.acts
    )
    where = mesh.world.device
    total, sharers = device.get(where).memory().total, len(mesh.world.local) if where.type == "cpu" else 1
    fits = total is None or sum(foreseen.held[Memory.DEVICE].values()) * sharers <= BETWEEN_SHARE * total
    return kept if all(mesh.world.exchange(fits, "pipeline")) else plan


def make_unsharded_plan(plan: Plan) -> Plan | None:
    """Return ``plan`` with parameters unsharded between micro-batches.

    None if it sets ``between``, shards no parameters, or keeps them off the device.
    """
    if plan.between is not None or not plan.parameters.axes or plan.parameters.far:
        return None
    return replace(plan, between=Placement(()))
