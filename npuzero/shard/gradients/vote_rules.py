"""Vote on optimizer rules: all ranks must update and clip by the same rules, and train the same parameters.

Each rank updates its own shard, so no other rank notices a different rule. The vote, an all_reduce at the start of a
step, carries a digest of each rank's rules, one number per bit: if all ranks agree, each bit's sum is 0 or the number
of ranks. If any rank differs, which is rare, the ranks exchange the rules in full, and each raises the same error.
Digests of shared inputs (:mod:`npuzero.shard.gradients.input_digests`) are added to the same bits; equal inputs add 0
to the sums.
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

#: Options by name: numbers, texts, None, and lists of these.
Words = dict[str, Any]

_MASK = (1 << DIGEST_BITS) - 1
#: Key of a call's entry that names its parameters.
_PARAMETERS = "parameters"


class GroupRule(NamedTuple):
    """Hold the update rule of one parameter group of an optimizer.

    Attributes:
        optimizer: name of the optimizer's class.
        number: index of the group.
        rule: the group's options.
        members: by parameter name, its place in the optimizer if the place matters, else 0.
    """

    optimizer: str
    number: int
    rule: Words
    members: dict[str, int]


class OptimizerRules(Protocol):
    """Describe the rules by which one optimizer updates parameters of one model."""

    #: Ids of the parameters.
    members: frozenset[int]

    def digest(self) -> int:
        """Return a number that is equal on ranks with equal rules; called each step."""

    def groups(self) -> list[GroupRule]:
        """Return the rules in full."""


class OptimizerRuleVote:
    """Collect this rank's rules and collective calls, and compare them over all ranks.

    Args:
        flats: the trainable flat parameters of the model.
        world: the ranks that train it.
        stages: the ranks at this rank's place in all pipeline stages; they train other modules but make the same calls.
        inputs: digests of the inputs of ranks that share a batch.
    """

    def __init__(self, flats: Sequence[FlatParameter], world: World, stages: World, inputs: SharedInputs) -> None:
        self._flats = flats
        self._world = world
        self._stages = stages
        self.inputs = inputs
        self._rules: list[OptimizerRules] = []
        self._stepped: set[int] = set()  # ids of the rules of optimizers that have stepped
        self._calls: dict[str, Words] = {}
        self._said: dict[str, Words] = {}  # the calls in the present vote
        self._frozen: list[str] = []
        self._bits: tuple[int, list[int]] = (0, _digest_bits(0))

    def propose(self, rules: OptimizerRules) -> None:
        """Note a new optimizer; until it steps, it does not replace the rules of an optimizer that has stepped."""
        if not any(id(other) in self._stepped for other in self._rules if other.members & rules.members):
            self._take(rules)

    def follow(self, rules: OptimizerRules) -> None:
        """Note an optimizer's step: from now on its rules replace all earlier rules of its parameters."""
        if id(rules) not in self._stepped:
            self._take(rules)
            self._stepped.add(id(rules))

    def _take(self, rules: OptimizerRules) -> None:
        self._rules = [other for other in self._rules if not other.members & rules.members]
        self._rules.append(rules)
        self._stepped &= {id(kept) for kept in self._rules}

    def call(self, name: str, words: Words, parameters: str = "") -> None:
        """Note a call that all ranks must make with the same arguments, for the next vote.

        Args:
            parameters: names of its parameters, if they are part of the model; not compared between stages.
        """
        if self._world.size > 1 or self._stages.size > 1:
            made = sum(key.partition(",")[0] == name for key in self._calls)
            key = f"{name}, call {made + 1}" if made else name
            self._calls[key] = {**words, _PARAMETERS: parameters} if parameters else words

    def begin_vote(self) -> None:
        """Take the calls noted so far as the subject of the next votes."""
        self._said, self._calls = self._calls, {}
        self.inputs.begin_vote()

    def ballot(self, present: Mapping[FlatParameter, list[bool]]) -> list[int]:
        """Return this rank's bits for the vote's all_reduce.

        Args:
            present: per slot, whether this rank has a gradient.
        """
        # A parameter with a gradient trains, so requires_grad is read only without one: usually for no parameter.
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
        """Check the bits' sums over all ranks; if the ranks differ, exchange and compare the rules. Collective then.

        Raises:
            ConfigError: on every rank: rules, calls, inputs or trained parameters differ.
        """
        if {*sums} <= {0.0, float(self._world.size)}:
            return
        # All frozen parameters, with or without a gradient: an older gradient may be present on some ranks only.
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
        """Return this rank's bits for the all_reduce over all stages."""
        return _digest_bits(_crc32_of_text(str(sorted(_drop_parameter_names(self._said).items()))) if self._said else 0)

    def look_at_calls(self, sums: Iterable[float]) -> None:
        """Check these bits' sums over all stages; if they differ, exchange and compare the calls. Collective then.

        Raises:
            ConfigError: on every rank: stages made different calls.
        """
        if not {*sums} <= {0.0, float(self._stages.size)}:
            said = self._stages.exchange([_drop_parameter_names(self._said), find_call_site()])
            _compare_calls([rank[0] for rank in said], [CallSite(*rank[1]) for rank in said], self._stages.ranks)


def _drop_parameter_names(said: dict[str, Words]) -> dict[str, Words]:
    """Return calls without their parameter names, which differ between stages."""
    return {call: {word: value for word, value in words.items() if word != _PARAMETERS} for call, words in said.items()}


# Bits, not the digest: a bit's sum is 0 or the number of ranks only if all ranks have the same bit.
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
    """Return the error for a function ``name`` that some ranks have not ``called``."""
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
        # numbers, which matter only if options differ. Places last: only random bits depend on them.
        kinds = [rules[name].optimizer if name in rules else "no optimizer" for rules in by_name]
        if _any_differs(kinds):
            raise _rule_mismatch_error(
                f"parameter {name}", "one class of optimizer on every rank", kinds, ranks, key="class", **facts
            )
        options = dict.fromkeys(key for group in groups for key in group.rule)  # groups may lack options
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
    """Return whether any value differs from the first; NaN equals NaN."""
    return any(value != values[0] and str(value) != str(values[0]) for value in values)


def _rule_mismatch_error(
    subject: str, expected: str, values: list[Any], ranks: Sequence[int], **facts: Any
) -> ConfigError:
    """Return the error for ``values``, one per rank of ``ranks``; the most frequent value is taken as intended."""
    those: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        those.setdefault(str(value), []).append(rank)
    got = "; ".join(f"{word} on rank{'s' * (len(on) > 1)} {', '.join(map(str, on))}" for word, on in those.items())
    usual = max(those.values(), key=len)
    rank = next(rank for rank in ranks if rank not in usual)
    do = "Give every rank the same; let what follows a loss or a norm follow its mean over all ranks."
    return ConfigError(subject, expected=expected, got=got, do=do, rank=rank, values=values, **facts)
