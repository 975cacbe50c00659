"""The launch of a fused rule over a chunk that is far: its pieces are on the host, each in tensors of its own."""

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
    """Update chunk after chunk of one step, on the stream's lane.

    Args:
        ranges: of each flat, on its shard.
        moments: the names of all that the rule may have.
    """

    def __init__(
        self, rule: UpdateRule, seed: int, ranges: Mapping[FlatParameter, list[ParameterRange]], moments: Sequence[str]
    ) -> None:
        self._rule = rule
        self._seed = seed
        # What the program may change before the update is done, as schedulers of lr do.
        options: dict[int, Options] = {}
        for part in (part for parts in ranges.values() for part in parts):
            if id(part.options) not in options:
                options[id(part.options)] = _copy_options(part.options)
        self._ranges = {
            flat: [part._replace(options=options[id(part.options)]) for part in parts] for flat, parts in ranges.items()
        }
        self._moments = moments

    def agrees(self, ranges: Mapping[FlatParameter, list[ParameterRange]], flat: FlatParameter) -> bool:
        """Tell whether the ranges of ``flat``, and their options, are still those that this was made with."""
        now = [part._replace(options=_copy_options(part.options)) for part in ranges.get(flat, ())]
        return now == self._ranges[flat]

    def __call__(self, staged: Sequence[StagedChunk], numbers: UpdateScalars) -> None:
        """Update pieces, which are laid end to end."""
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
    """Return a group's options, but for its parameters, as they are now."""
    here = {key: value for key, value in options.items() if key != "params"}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in here.items()}


def _round_outside_ranges(low: Tensor, master: Tensor, ranges: Sequence[ParameterRange], shift: int) -> None:
    """Round masters outside of ``ranges``, where the rule writes nothing, into ``low``: that is what lies there."""
    last = 0
    for begin, end in [*((part.begin - shift, part.end - shift) for part in ranges), (low.numel(), 0)]:
        if last < begin:
            copy_rounded(master[last:begin], low[last:begin])
        last = end
