"""Agreement between pipeline stages, between backward and the step. No stage knows another stage's modules.

The ranks of a stage have already agreed, so each rank represents its stage: collectives here run over the ranks at the
same place in all stages. Without a pipeline nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from npuzero.comm import World
from npuzero.plan import ENDS, PIPE, Axes
from npuzero.shard.gradients.vote_rules import OptimizerRuleVote
from npuzero.shard.layout.traffic_meter import CountingMesh
from npuzero.shard.state.flat_parameter import FlatParameter


class StageVote:
    """Exchange flags and names between the stages of a pipeline. Every call is collective over the stages.

    Args:
        flats: the trainable flat parameters of this stage.
        world: the ranks at this rank's place in all stages, in stage order.

    Attributes:
        world: as given.
        many: whether there is more than one stage.
    """

    def __init__(self, flats: Sequence[FlatParameter], mesh: CountingMesh, world: World) -> None:
        self.world = world
        self.many = world.size > 1
        self._mesh = mesh
        self._tied = [flat for flat in flats if flat.rests.tied]

    def any(self, *flags: bool) -> list[bool]:
        """Return for each flag whether any stage has set it."""
        return [number > 0 for number in self._sum((PIPE,), flags)] if self.many else [*flags]

    def tie(self, used: Mapping[FlatParameter, list[bool]]) -> dict[FlatParameter, list[bool]]:
        """Return per slot whether it is used; a slot tied between the first and the last stage, by either of them."""
        tied = {flat: used[flat] for flat in self._tied}
        flags = [flag for flat in self._tied for flag in tied[flat]]
        either = iter(self._sum((ENDS,), flags) if flags else ())
        return {**used, **{flat: [next(either) > 0 for _ in here] for flat, here in tied.items()}}

    def agree(self, some: bool, accord: OptimizerRuleVote) -> bool:
        """Return whether any stage has ``some`` gradients, after checking that all made the same calls.

        Raises:
            ConfigError: on every rank: the stages made different calls.
        """
        if not self.many:
            return some
        anywhere, *bits = self._sum((PIPE,), [some, *accord.ballot_of_calls()])
        accord.look_at_calls(bits)
        return anywhere > 0

    def names(self, here: list[str]) -> list[str]:
        """Return the union of the stages' names, in stage order."""
        if not self.many:
            return here
        return list(dict.fromkeys(name for stage in self.world.exchange(here) for name in stage))

    def _sum(self, axes: Axes, numbers: Sequence[float]) -> list[float]:
        sums = torch.tensor(numbers, dtype=torch.float32)
        self._mesh.host(axes).all_reduce(sums, tag="stages").wait()
        return sums.tolist()
