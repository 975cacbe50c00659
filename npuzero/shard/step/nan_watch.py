"""The search for the first inf or NaN of a step: counted on the device while all is well, looked up once it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from npuzero.comm import Communicator, World
from npuzero.errors import NonFiniteError
from npuzero.ops.norm import norm_unchecked
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.unit import Unit
from npuzero.shard.step.step_boundary import StepBoundary

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class NanOriginWatcher:
    """Watch each unit's outputs and the order in which gradients come; :meth:`look` tells where it began.

    A verdict is asked for when the next forward begins: by then the device has long passed the point, and has the
    update still to do, so waiting for it costs nothing.

    Args:
        world: all ranks, of all stages of a pipeline.
        stage: this rank's.
        everyone: all ranks.
    """

    def __init__(self, units: list[Unit], world: World, stage: int, everyone: Communicator) -> None:
        self._units = units
        self._world = world
        self._stage = stage
        self._everyone = everyone
        # By unit, and at the end the losses: sum of squares and non-finite elements of what came out in this step.
        self._seen = torch.zeros(len(units) + 1, 2, dtype=torch.float64, device=world.device)
        self._part = torch.zeros(2, dtype=torch.float64, device=world.device)
        self._order: dict[int, None] = {}  # units as their outputs came
        self._arrived: dict[str, None] = {}  # parameters as their gradients came
        self._verdict: Tensor | None = None

    def outputs(self, unit: Unit, tensors: Iterable[Tensor]) -> None:
        """Count what a forward of ``unit`` returned."""
        if unit.index == 0:  # it returns once for each part, and what is of a part came before
            self._order.pop(0, None)
        self._order[unit.index] = None
        self._count(unit.index, tensors)

    def arrives(self, name: str) -> None:
        """Note that the gradient of a parameter has been computed."""
        self._arrived[name] = None

    @torch.no_grad()
    def _count(self, row: int, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.dtype in _FLOATS:
                norm_unchecked(tensor.detach().reshape(-1), self._part)
                self._seen[row] += self._part

    @torch.no_grad()
    def conclude(self, loss: Tensor | None, gradients: Tensor) -> Tensor:
        """Return the verdict on a step, whose gradients are there. Collective.

        Args:
            loss: this rank's.
            gradients: () non-finite elements of theirs, over all ranks.

        Returns:
            [1] float32, not zero where anything was not finite on any rank.
        """
        if loss is not None:
            self._count(len(self._units), [loss.float()])
        bad = self._seen[:, 1].sum().view(1)
        self._everyone.all_reduce(bad, tag="finite").wait()
        self._verdict = ((bad + gradients) != 0).float()
        return self._verdict

    def look(self) -> None:
        """End the step that :meth:`conclude` concluded: forget it, or raise where it went wrong. Collective.

        Raises:
            NonFiniteError: somewhere it did, on any rank.
        """
        if self._verdict is None:
            return
        bad, self._verdict = self._verdict.item() != 0, None
        error = self._origin() if bad else None
        self._seen.zero_()
        self._order.clear()
        self._arrived.clear()
        if error is not None:
            raise error

    def _origin(self) -> NonFiniteError:
        counts = self._seen[:, 1].tolist()
        flats = [(unit, flat) for unit in self._units for flat in unit.flats]
        owner = {slot.name: unit.name for unit, flat in flats for slot in flat.layout.slots}
        place = {name: at for at, name in enumerate(owner)}
        came = {name: at for at, name in enumerate(self._arrived)}
        parameters = [name for _, flat in flats for name in _nonfinite_slots(flat, "parameters")]
        gradients = [
            name for unit in self._units for flat in unit.trainable for name in _nonfinite_slots(flat, "gradient")
        ]
        outputs = [(at, i) for at, i in enumerate(self._order) if counts[i]]
        # Each with what it is ordered by: forward goes from the first stage to the last, backward the other way.
        mine: dict[str, Any] = {
            "parameters": [[self._stage, place[name], name, owner[name]] for name in parameters],
            "outputs": [[self._stage, at, self._world.rank, self._units[i].name] for at, i in outputs[:1]],
            "losses": [self._world.rank] if counts[-1] else [],
            "gradients": [[-self._stage, came.get(name, len(came)), name, owner[name]] for name in gradients],
        }
        said: list[dict[str, Any]] = self._world.exchange(mine)
        first = {kind: min(found) for kind in mine if (found := [each for rank in said for each in rank[kind]])}
        # In the order of causes: a bad parameter spoils outputs, these spoil the loss, and any of them all gradients.
        if "parameters" in first:
            *_, name, unit = first["parameters"]
            return _nonfinite_error(f"parameter {name} of unit {unit!r}", unit, name, None)
        if "outputs" in first:
            *_, rank, unit = first["outputs"]
            return _nonfinite_error(
                f"the output of unit {unit!r} on rank {rank}, whose parameters are finite", unit, None, rank
            )
        if "losses" in first:
            rank = first["losses"]
            return _nonfinite_error(f"the loss on rank {rank}, of finite outputs", None, None, rank)
        *_, name, unit = first["gradients"]
        return _nonfinite_error(f"the gradient of parameter {name} of unit {unit!r}", unit, name, None)


class NanWatch:
    """Hold the watch over one model, while somebody wants one.

    Args:
        make: makes a watch.
        boundary: of the model's steps.
        show: shows the hooks the watch that there is now.
    """

    def __init__(
        self,
        make: Callable[[], NanOriginWatcher],
        boundary: StepBoundary,
        show: Callable[[NanOriginWatcher | None], None],
    ) -> None:
        self._make = make
        self._boundary = boundary
        self._show = show
        self.watching: NanOriginWatcher | None = None

    def watch(self, on: bool) -> None:
        """Begin to watch what stops being finite, and where; or stop watching."""
        if on:
            self._boundary.early.refuse("FiniteGuard")
        self.watching = self._make() if on else None
        self._show(self.watching)

    @_disable_dynamo
    def check(self, loss: Tensor | None, counts: Tensor | None) -> None:
        """Skip the present step where anything in it is inf or NaN; :meth:`look` says. Collective.

        ``counts``: () bool, whether gradients do; None: yes.
        """
        self.look()
        self._boundary.early.refuse("FiniteGuard.check")
        self._boundary.accord.call("FiniteGuard.check", {})
        if self.watching is not None:
            some = self._boundary.finish()
            bad = (
                self._boundary.sums.total()[1] if some else torch.zeros((), device=self._boundary.gradient_scale.device)
            )
            self._boundary.skip_where(self.watching.conclude(loss, bad if counts is None else bad * counts))

    def look(self) -> None:
        """Raise a NonFiniteError where the last step checked was bad. Collective."""
        if self.watching is not None:
            self.watching.look()


def _nonfinite_slots(flat: FlatParameter, what: str) -> list[str]:
    """Return the slots whose part in this rank's states shard is not finite: of the parameters or the gradient."""
    own = flat.own.raw(slice(0, flat.rests.states.numel)) if what == "parameters" else flat.own_gradient
    if own.isfinite().all():
        return []
    return [flat.layout.slots[i].name for i in flat.slots if not own[flat.own_slots[i]].isfinite().all()]


def _nonfinite_error(where: str, unit: str | None, parameter: str | None, rank: int | None) -> NonFiniteError:
    return NonFiniteError(
        "FiniteGuard",
        expected="finite outputs, losses and gradients",
        got=f"inf or NaN, first in {where}",
        do="That step's update was left out: parameters and optimizer states are those before it. Look at the batch "
        "and at that unit, lower the learning rate, or clip.",
        unit=unit,
        parameter=parameter,
        rank=rank,
    )
