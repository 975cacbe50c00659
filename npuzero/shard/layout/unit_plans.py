"""The plans of one model: its own, and those of units that follow others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from npuzero.config import describe_value
from npuzero.errors import ConfigError, did_you_mean
from npuzero.plan import Plan


@dataclass(frozen=True)
class UnitPlans:
    """Say which plan each unit follows.

    Attributes:
        model: of the units that are not named.
        units: by name, of those that are.
    """

    model: Plan
    units: Mapping[str, Plan] = field(default_factory=dict)

    @staticmethod
    def named(model: Plan, units: object, offload: str | None = None) -> UnitPlans:
        """Return the plans that a user names: presets have the model's precision and groups of ranks.

        Args:
            offload: what of them, and of units' presets, rests off the device, if anything.
            units: by name a Plan, a preset's name or a stage; or None.

        Raises:
            ConfigError: no mapping, or no preset.
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
        """Return the plan of each unit, by the names of all.

        Raises:
            ConfigError: there is no unit of a name; or one has other groups of ranks, or another way to compute, than
                the model has: these are one for all.
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
