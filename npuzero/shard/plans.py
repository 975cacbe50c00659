"""The plans of one model: its own, and those of units that follow others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from npuzero.errors import ConfigError
from npuzero.plan import Plan


@dataclass(frozen=True)
class Plans:
    """Which plan each unit follows.

    Attributes:
        model: of the units that are not named.
        units: by name, of those that are.
    """

    model: Plan
    units: Mapping[str, Plan] = field(default_factory=dict)

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
                    do="Name one of these.",
                )
            for fact, here, there in (
                ("local_size", own.local_size, self.model.local_size),
                ("precision.matmul", own.precision.matmul, self.model.precision.matmul),
            ):
                if here != there:
                    raise ConfigError(
                        f"unit_plans: {name}, {fact}",
                        expected=f"{there!r}, as in the plan of the model, since all units share it",
                        got=repr(here),
                        do="Give the same in both.",
                    )
        return [self.units.get(name, self.model) for name in names]
