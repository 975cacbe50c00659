"""Launch a fused rule on an offloaded chunk: its pieces are separate tensors on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from npuzero.optim.rules.rule import Options, ParameterRange, UpdateRule
from npuzero.optim.rules.segments import build_segments, ranges_within, shift_ranges
from npuzero.shard.offload.offloaded_update import StagedChunk, UpdateScalars
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.tiered_tensor import copy_rounded


class OffloadedLaunch:
    """Update the chunks of one step one after another, on the offload stream's thread.

    Args:
        ranges: of each flat parameter, on its shard.
        moments: the names of all moments that the rule may have.
    """

    def __init__(
        self, rule: UpdateRule, seed: int, ranges: Mapping[FlatParameter, list[ParameterRange]], moments: Sequence[str]
    ) -> None:
        self._rule = rule
        self._seed = seed
        # The program may change options before the update has run, as LR schedulers do; so they are copied.
        options: dict[int, Options] = {}
        for part in (part for parts in ranges.values() for part in parts):
            if id(part.options) not in options:
                options[id(part.options)] = _copy_options(part.options)
        self._ranges = {
            flat: [part._replace(options=options[id(part.options)]) for part in parts] for flat, parts in ranges.items()
        }
        self._moments = moments

    def agrees(self, ranges: Mapping[FlatParameter, list[ParameterRange]], flat: FlatParameter) -> bool:
        """Return whether the ranges of ``flat`` and their options still equal the constructor's."""
        now = [part._replace(options=_copy_options(part.options)) for part in ranges.get(flat, ())]
        return now == self._ranges[flat]

    def __call__(self, staged: Sequence[StagedChunk], numbers: UpdateScalars) -> None:
        """Update pieces, laid end to end."""
        line = self._rule.line(
            master=[each.master for each in staged],
            **{name: [each.states.get(name) for each in staged] for name in self._moments},
            low=[each.low for each in staged],
            remainder=[each.states.get("remainder") for each in staged],
            seed=self._seed,
        )
        chunk: list[ParameterRange] = []
        start = 0
        for each in staged:
            begin, end = each.piece.begin, each.piece.end
            mine = ranges_within(self._ranges[each.piece.flat], begin, end)
            if each.low is not None:
                _round_outside_ranges(each.low, each.master, mine, begin)
            chunk += shift_ranges(mine, start - begin)
            start += end - begin
        gradients = [each.gradient for each in staged]
        line.update(gradients, build_segments(self._rule, chunk), numbers.scale, numbers.skip, numbers.dynamic)


def _copy_options(options: Mapping[str, Any]) -> Options:
    """Return a copy of a group's options, without its parameters."""
    here = {key: value for key, value in options.items() if key != "params"}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in here.items()}


def _round_outside_ranges(low: Tensor, master: Tensor, ranges: Sequence[ParameterRange], shift: int) -> None:
    """Round the masters outside ``ranges``, which the rule does not write, into ``low``; otherwise ``low`` is stale
    there.
    """
    last = 0
    for begin, end in [*((part.begin - shift, part.end - shift) for part in ranges), (low.numel(), 0)]:
        if last < begin:
            copy_rounded(master[last:begin], low[last:begin])
        last = end
