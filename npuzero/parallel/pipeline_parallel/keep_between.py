"""Whether parameters stay unsharded between the micro-batches of a pipeline's step."""

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

#: Of the device's memory, that a training state may take whose parameters stay unsharded.
BETWEEN_SHARE = 0.5


def choose_between_plan(plan: Plan, pipe: Pipeline, mesh: Mesh, settings: Settings, plans: UnitPlans) -> Plan:
    """Return the plan by which parameters, once gathered, stay unsharded until the step, where that is possible.

    A pipeline has many micro-batches a step: gathered for each, parameters would travel as often, forward and backward.

    Args:
        plans: with it, those of single units.

    Returns:
        ``plan`` itself where it says what stays, where nothing would change, and where a rank has not the memory.

    Raises:
        ConfigError: the schedule needs it (zero-bubble), and the plan says otherwise.
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
    """Return the plan by which parameters stay unsharded between micro-batches; None where that is not to be chosen."""
    if plan.between is not None or not plan.parameters.axes or plan.parameters.far:
        return None
    return replace(plan, between=Placement(()))
