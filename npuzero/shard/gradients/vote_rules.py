"""The accord: ranks must follow the same rules of update and clipping, and train the same parameters.

Each rank updates its own shard, so no other rank notices by which rule. The vote that begins a step carries a digest of
what the rank says, a number for each bit: where all ranks say the same, a bit's sum is 0 or the number of ranks. Where
one differs, which is rare, the ranks exchange the words themselves, and each raises the same error. What ranks that
share a batch were given (:mod:`npuzero.shard.gradients.input_digests`) adds to the same bits, and nothing to their sums
where it agrees.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from operator import add
from typing import Any, NamedTuple, Protocol

import torch

from npuzero.comm import World
from npuzero.comm.watchdog.call_names import CallSite, find_call_site
from npuzero.errors import ConfigError
from npuzero.plan import DIGEST_BITS
from npuzero.shard.gradients.input_digests import SharedInputs
from npuzero.shard.state.flat_parameter import FlatParameter

#: By name what is said: numbers, texts, None, and lists of these.
Words = dict[str, Any]

_MASK = (1 << DIGEST_BITS) - 1
#: The word of a call that names the parameters it is given.
_PARAMETERS = "parameters"


class GroupRule(NamedTuple):
    """Hold the rule that one group of an optimizer's parameters is updated by.

    Attributes:
        optimizer: its class.
        number: of the group.
        rule: the options.
        members: by parameter name its place in the optimizer, where that matters, else 0.
    """

    optimizer: str
    number: int
    rule: Words
    members: dict[str, int]


class OptimizerRules(Protocol):
    """Describe the rules by which one optimizer updates parameters of one model."""

    #: Ids of these parameters.
    members: frozenset[int]

    def digest(self) -> int:
        """Return a number that is the same on ranks with the same rules; asked each step."""

    def groups(self) -> list[GroupRule]:
        """Return the rules in full."""


class OptimizerRuleVote:
    """Collect what this rank says, and compare it with what the other ranks say.

    Args:
        flats: the trainable flats of the model.
        world: the ranks that train it.
        stages: those at this rank's place in all stages of a pipeline; they train other modules, and call the same.
        inputs: what ranks that share a batch were given.
    """

    def __init__(self, flats: Sequence[FlatParameter], world: World, stages: World, inputs: SharedInputs) -> None:
        self._flats = flats
        self._world = world
        self._stages = stages
        self.inputs = inputs
        self._rules: list[OptimizerRules] = []
        self._stepped: set[int] = set()  # ids of those rules whose optimizer has taken a step
        self._calls: dict[str, Words] = {}
        self._said: dict[str, Words] = {}  # the calls that the present vote is about
        self._frozen: list[str] = []
        self._bits: tuple[int, list[int]] = (0, _digest_bits(0))

    def propose(self, rules: OptimizerRules) -> None:
        """Note a new optimizer. Until it steps, its rules do not replace those of an optimizer that has stepped."""
        if not any(id(other) in self._stepped for other in self._rules if other.members & rules.members):
            self._take(rules)

    def follow(self, rules: OptimizerRules) -> None:
        """Note an optimizer's step: from now on its rules are those of its parameters, whatever other they had."""
        if id(rules) not in self._stepped:
            self._take(rules)
            self._stepped.add(id(rules))

    def _take(self, rules: OptimizerRules) -> None:
        self._rules = [other for other in self._rules if not other.members & rules.members]
        self._rules.append(rules)
        self._stepped &= {id(kept) for kept in self._rules}

    def call(self, name: str, words: Words, parameters: str = "") -> None:
        """Note a call that all ranks must make with the same arguments; the next vote says so.

        Args:
            parameters: which ones it is given, where that is a part of the model; stages have others.
        """
        if self._world.size > 1 or self._stages.size > 1:
            made = sum(key.partition(",")[0] == name for key in self._calls)
            key = f"{name}, call {made + 1}" if made else name
            self._calls[key] = {**words, _PARAMETERS: parameters} if parameters else words

    def begin_vote(self) -> None:
        """Take the calls noted so far for those that the votes to come are about."""
        self._said, self._calls = self._calls, {}
        self.inputs.begin_vote()

    def ballot(self, present: Mapping[FlatParameter, list[bool]]) -> list[int]:
        """Return the bits that this rank puts into the vote.

        Args:
            present: per slot, whether this rank has a gradient; only those without are asked whether they train.
        """
        # A parameter that has a gradient trains: only the others need be asked, so a usual step asks none.
        absent = ((flat, i) for flat, here in present.items() if not all(here) for i in flat.slots if not here[i])
        self._frozen = _frozen_names(absent)
        digest = sum(rules.digest() for rules in self._rules)
        if self._said or self._frozen:
            digest += _crc32_of_text(f"{sorted(self._said.items())}{self._frozen}")
        if self._bits[0] != digest:
            self._bits = digest, _digest_bits(digest)
        bits = self._bits[1]
        return [*map(add, bits, self.inputs.ballot())] if self.inputs.many else bits

    def look(self, sums: Iterable[float]) -> None:
        """Take the bits' sums over all ranks; where they differ, compare with all ranks. Collective then.

        Raises:
            ConfigError: on every rank: they say different things.
        """
        if {*sums} <= {0.0, float(self._world.size)}:
            return
        # All that is frozen, with a gradient or without: one of before it was frozen may be there on some ranks only.
        everything = ((flat, i) for flat in self._flats for i in flat.slots)
        groups = [group for rules in self._rules for group in rules.groups()]
        said = self._world.exchange(
            [self._said, _frozen_names(everything), groups, find_call_site(), self.inputs.said()]
        )
        _compare_calls([rank[0] for rank in said], [CallSite(*rank[3]) for rank in said], self._world.ranks)
        self.inputs.compare([rank[4] for rank in said], self._world.ranks)
        _compare_training([rank[1] for rank in said], self._world.ranks)
        _compare_rules([[GroupRule(*group) for group in rank[2]] for rank in said], self._world.ranks)

    def ballot_of_calls(self) -> list[int]:
        """Return the bits that this rank puts into the vote of all stages."""
        return _digest_bits(_crc32_of_text(str(sorted(_drop_parameter_names(self._said).items()))) if self._said else 0)

    def look_at_calls(self, sums: Iterable[float]) -> None:
        """Take these bits' sums over all stages; where they differ, compare the calls. Collective then.

        Raises:
            ConfigError: on every rank: stages make different calls.
        """
        if not {*sums} <= {0.0, float(self._stages.size)}:
            said = self._stages.exchange([_drop_parameter_names(self._said), find_call_site()])
            _compare_calls([rank[0] for rank in said], [CallSite(*rank[1]) for rank in said], self._stages.ranks)


def _drop_parameter_names(said: dict[str, Words]) -> dict[str, Words]:
    """Return calls without the parameters that they are given, of which no stage has those of another."""
    return {call: {word: value for word, value in words.items() if word != _PARAMETERS} for call, words in said.items()}


def _digest_bits(digest: int) -> list[int]:
    folded = (digest ^ digest >> DIGEST_BITS) & _MASK
    return [folded >> place & 1 for place in range(DIGEST_BITS)]


def _crc32_of_text(text: str) -> int:
    return zlib.crc32(text.encode())


def _frozen_names(slots: Iterable[tuple[FlatParameter, int]]) -> list[str]:
    with torch._C.DisableTorchFunctionSubclass():
        return [flat.layout.slots[i].name for flat, i in slots if not flat.parameters[i].requires_grad]


def _compare_calls(said: list[dict[str, Words]], places: list[CallSite], ranks: Sequence[int]) -> None:
    # Sorted, here and below, so that all ranks find the same difference first and raise the same error.
    for name in sorted({name for calls in said for name in calls}):
        if not all(name in calls for calls in said):
            raise _missing_call_error(name, [name in calls for calls in said], places, ranks)
        for key in dict.fromkeys(key for calls in said for key in calls[name]):
            values = [calls[name].get(key, "all of the model's") for calls in said]
            if _any_differs(values):
                raise _rule_mismatch_error(f"{name}: {key}", "the same on every rank", values, ranks, key=key)


def _missing_call_error(name: str, called: list[bool], places: list[CallSite], ranks: Sequence[int]) -> ConfigError:
    """Return the error of ranks of which some have not ``called`` the function ``name``."""
    words: dict[str, list[int]] = {}
    for rank, it, place in zip(ranks, called, places, strict=True):
        at = f"{place.call or 'something else'}{place.line and f' at {place.line}'}"
        within = f"is in {at}" if place.call == name else f"has called {name}"
        words.setdefault(within if it else f"went on to {at} without it", []).append(rank)
    return ConfigError(
        name,
        expected=f"{name} on every rank, since it is collective",
        got="; ".join(f"rank {', '.join(map(str, those))} {word}" for word, those in words.items()),
        do=f"Look for a branch that only some ranks take, and call {name} on every rank.",
        key="call",
        rank=ranks[called.index(False)],
        values=called,
    )


def _compare_training(said: list[list[str]], ranks: Sequence[int]) -> None:
    for name in sorted({name for frozen in said for name in frozen}):
        values = [name not in frozen for frozen in said]
        if _any_differs(values):
            subject, expected = f"parameter {name}: requires_grad", "the same on every rank"
            raise _rule_mismatch_error(subject, expected, values, ranks, key="requires_grad", parameter=name)


def _compare_rules(said: list[list[GroupRule]], ranks: Sequence[int]) -> None:
    by_name = [{name: group for group in groups for name in group.members} for groups in said]
    for name in dict.fromkeys(name for rules in by_name for name in rules):
        groups = [rules[name] for rules in by_name if name in rules]
        first = groups[0]
        facts = {"group": first.number, "parameter": name}
        # The class first: options of different optimizers cannot be compared. Then the options, before the groups'
        # numbers, which matter only where options differ. Places last: nothing but random bits depends on them.
        kinds = [rules[name].optimizer if name in rules else "no optimizer" for rules in by_name]
        if _any_differs(kinds):
            raise _rule_mismatch_error(
                f"parameter {name}", "one class of optimizer on every rank", kinds, ranks, key="class", **facts
            )
        options = dict.fromkeys(key for group in groups for key in group.rule)  # some only groups that say them have
        key = next((key for key in options if _any_differs([group.rule.get(key) for group in groups])), None)
        if key is not None and any(group.number != first.number for group in groups):
            words = [f"group {group.number}, of {key} {group.rule.get(key)}" for group in groups]
            expected = "one group on every rank, or groups of the same options"
            raise _rule_mismatch_error(f"{first.optimizer}: parameter {name}", expected, words, ranks, key=key, **facts)
        if key is not None:
            subject = f"{first.optimizer}: {key} of group {first.number}, which has {name}"
            values = [group.rule.get(key) for group in groups]
            raise _rule_mismatch_error(subject, "the same on every rank", values, ranks, key=key, **facts)
        places = [group.members[name] for group in groups]
        if _any_differs(places):
            expected = "one place among the optimizer's parameters on every rank: random bits depend on it"
            raise _rule_mismatch_error(
                f"{first.optimizer}: parameter {name}", expected, places, ranks, key="params", **facts
            )


def _any_differs(values: Sequence[Any]) -> bool:
    """Return whether any value is not like the first; NaN is like NaN."""
    return any(value != values[0] and str(value) != str(values[0]) for value in values)


def _rule_mismatch_error(
    subject: str, expected: str, values: list[Any], ranks: Sequence[int], **facts: Any
) -> ConfigError:
    """Return the error for ``values``, what each of ``ranks`` says; what most of them say is taken as meant."""
    those: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        those.setdefault(str(value), []).append(rank)
    got = "; ".join(f"{word} on rank{'s' * (len(on) > 1)} {', '.join(map(str, on))}" for word, on in those.items())
    usual = max(those.values(), key=len)
    rank = next(rank for rank in ranks if rank not in usual)
    do = "Give every rank the same; let what follows a loss or a norm follow its mean over all ranks."
    return ConfigError(subject, expected=expected, got=got, do=do, rank=rank, values=values, **facts)
