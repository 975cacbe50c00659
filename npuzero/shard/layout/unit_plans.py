"""The plans of one model: a default, and separate plans for named units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from npuzero.config import describe_value
from npuzero.errors import ConfigError, did_you_mean
from npuzero.plan import Plan


@dataclass(frozen=True)
class UnitPlans:
    """Map units to plans.

    Attributes:
        model: plan of all units that ``units`` does not name.
        units: plans by unit name.
    """

    model: Plan
    units: Mapping[str, Plan] = field(default_factory=dict)

    @staticmethod
    def named(model: Plan, units: object, offload: str | None = None) -> UnitPlans:
        """Return the plans from a user's arguments. Presets take the model's precision and local size.

        Args:
            units: a Plan, a preset's name or a stage, by unit name; or None.
            offload: argument of :meth:`Plan.offloaded` for the model's plan and for units' presets; None: no offload.

        Raises:
            ConfigError: ``units`` is not a mapping, or has an unknown preset.
        """
        if units is not None and not isinstance(units, Mapping):
            do = "Give a dict from the names of units to their plans."
            raise ConfigError("unit_plans", expected="a mapping", got=describe_value(units), do=do)

        def preset(name: str | float) -> Plan:
            plan = place(Plan.preset(name, precision=model.precision, local_size=model.local_size))
            return replace(plan, activations=model.activations)

        def place(plan: Plan) -> Plan:
            return plan if offload is None else plan.offloaded(offload)

        named = {} if units is None else units
        own = {name: chosen if isinstance(chosen, Plan) else preset(chosen) for name, chosen in named.items()}
        return UnitPlans(place(model), own)

    def of(self, names: Sequence[str]) -> list[Plan]:
        """Return the plan of each unit, given the names of all units.

        Raises:
            ConfigError: a plan names an unknown unit, or differs from the model's plan in ``local_size``,
                ``precision.matmul``, ``activations`` or ``lag``, which all units share.
        """
        for name, own in self.units.items():
            if name not in names:
                raise ConfigError(
                    "unit_plans",
                    expected=f"names of units: {', '.join(names)}",
                    got=repr(name),
                    do=did_you_mean(name, names, "Name one of these."),
                )
            for fact, here, there in (
                ("local_size", own.local_size, self.model.local_size),
                ("precision.matmul", own.precision.matmul, self.model.precision.matmul),
                ("activations", own.activations, self.model.activations),
                ("lag", own.lag, self.model.lag),
            ):
                if here != there:
                    raise ConfigError(
                        f"unit_plans: {name}, {fact}",
                        expected=f"{there!r}, as in the plan of the model, since all units share it",
                        got=repr(here),
                        do="Give the same in both.",
                    )
        return [self.units.get(name, self.model) for name in names]
