"""Digest the update rules of an optimizer, for the ranks to compare in each step's vote."""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Sequence
from numbers import Real
from operator import is_
from typing import Any, Protocol

from torch import Tensor

from npuzero.shard.engine import Engine
from npuzero.shard.gradients.vote_rules import GroupRule, Words

Options = dict[str, Any]


class VotingOptimizer(Protocol):
    """Define the optimizer attributes that :class:`VoteTerms` reads."""

    param_groups: list[Options]
    defaults: Options

    @property
    def kind(self) -> str:
        """Return the class name as errors show it."""

    @property
    def constants(self) -> Words:
        """Return further values that random bits depend on."""


class _KnownGroup:
    """Remember one group: its ``members`` in the model, and the ``values`` of its options at the last digest."""

    def __init__(self, members: dict[str, int], constants: str, values: int) -> None:
        self.members = members
        self.values: list[object] = [_NOTHING] * values
        self.digest = 0
        self._base = zlib.crc32(f"{constants}{sorted(members.items())}".encode())
        self._numbers: list[float] = [0] * values

    def take(self, values: Sequence[object]) -> None:
        for i, value in enumerate(values):
            if value is not self.values[i]:
                self._numbers[i] = _option_number(value)
                # A tensor may change in place.
                self.values[i] = _NOTHING if isinstance(value, Tensor) else value
        self.digest = hash((self._base, *self._numbers))


_NOTHING = object()


class VoteTerms:
    """Digest the rules of one optimizer for the parameters of one model.

    Asked in each step, so unchanged options cost one comparison. The terms outlive the optimizer with its last options,
    since ranks garbage-collect it at different times.
    """

    def __init__(self, optimizer: VotingOptimizer, engine: Engine) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._groups = optimizer.param_groups
        self._keys = list(optimizer.defaults)
        self._kind = optimizer.kind
        draws = any(flat.plan.precision.moments != "fp32" or flat.rounds_stochastically for flat in engine.flats())
        self._constants = optimizer.constants if draws else {}
        places = itertools.count()
        self._known: list[_KnownGroup] = []
        members: list[int] = []
        for group in self._groups:
            here: dict[str, int] = {}
            for parameter in group["params"]:
                found, place = engine.place(parameter), next(places)
                if found is not None:
                    flat, i = found
                    here[flat.layout.slots[i].name] = place if draws else 0
                    members.append(id(parameter))
            self._known.append(_KnownGroup(here, f"{self._kind}{self._constants}", len(self._keys)))
        self.members = frozenset(members)

    def digest(self) -> int:
        """Return a number that is equal on ranks with the same rules, in any order of groups."""
        total = 0
        for group, known in zip(self._present(), self._known, strict=False):
            if known.members:
                values = list(map(group.get, self._keys))
                if not all(map(is_, values, known.values)):
                    known.take(values)
                total += known.digest
        return total

    def groups(self) -> list[GroupRule]:
        pairs = enumerate(zip(self._present(), self._known, strict=False))
        return [
            GroupRule(
                self._kind,
                i,
                {**{key: _option_value(group.get(key)) for key in self._keys}, **self._constants},
                it.members,
            )
            for i, (group, it) in pairs
            if it.members
        ]

    def _present(self) -> list[Options]:
        optimizer = self._optimizer()
        if optimizer is not None:
            self._groups = optimizer.param_groups
        return self._groups


def _option_number(value: Any) -> float:
    """Return a number for an option, equal in every process, unlike Python's hash of a text."""
    kind = type(value)
    if kind is float or kind is int or kind is bool:
        return value  # type: ignore[no-any-return]
    return zlib.crc32(repr(_option_value(value)).encode())


def _option_value(value: Any) -> Any:
    """Return an option in a form that ranks can exchange. None if it cannot be compared, or only by a device sync."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else None
    if isinstance(value, (list, tuple)):
        return [_option_value(item) for item in value]
    if isinstance(value, (int, float, str)):
        return value
    return float(value) if isinstance(value, Real) else None
