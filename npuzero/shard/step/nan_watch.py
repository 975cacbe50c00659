"""Find the first inf or NaN of a step: count on the device, and search only after a bad step."""

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
    """Watch each unit's outputs and the order of gradients; :meth:`look` reports the origin of an inf or NaN.

    The verdict is read when the next forward begins: the device has computed it long before and still has the update to
    run, so waiting for it costs nothing.

    Args:
        world: all ranks of all pipeline stages.
        stage: index of this rank's stage.
        everyone: communicator of all ranks.
    """

    def __init__(self, units: list[Unit], world: World, stage: int, everyone: Communicator) -> None:
        self._units = units
        self._world = world
        self._stage = stage
        self._everyone = everyone
        # Per unit, and in the last row for losses: sum of squares and non-finite elements of this step's outputs.
        self._seen = torch.zeros(len(units) + 1, 2, dtype=torch.float64, device=world.device)
        self._part = torch.zeros(2, dtype=torch.float64, device=world.device)
        self._order: dict[int, None] = {}  # units in the order of their outputs
        self._arrived: dict[str, None] = {}  # parameters in the order of their gradients
        self._verdict: Tensor | None = None

    def outputs(self, unit: Unit, tensors: Iterable[Tensor]) -> None:
        """Count non-finite elements in the outputs of a forward of ``unit``."""
        if unit.index == 0:  # it returns once per part, after the units of that part
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
        """Return the verdict on a step with complete gradients. Collective.

        Args:
            loss: this rank's loss.
            gradients: () number of non-finite gradient elements over all ranks.

        Returns:
            [1] float32, nonzero if anything was non-finite on any rank.
        """
        if loss is not None:
            self._count(len(self._units), [loss.float()])
        bad = self._seen[:, 1].sum().view(1)
        self._everyone.all_reduce(bad, tag="finite").wait()
        self._verdict = ((bad + gradients) != 0).float()
        return self._verdict

    def look(self) -> None:
        """Read the verdict of :meth:`conclude`: reset after a good step, raise after a bad one. Collective.

        Raises:
            NonFiniteError: something was non-finite on some rank; names the origin.
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
        # Each entry begins with its sort key: forward runs from the first stage to the last, backward in reverse.
        mine: dict[str, Any] = {
            "parameters": [[self._stage, place[name], name, owner[name]] for name in parameters],
            "outputs": [[self._stage, at, self._world.rank, self._units[i].name] for at, i in outputs[:1]],
            "losses": [self._world.rank] if counts[-1] else [],
            "gradients": [[-self._stage, came.get(name, len(came)), name, owner[name]] for name in gradients],
        }
        said: list[dict[str, Any]] = self._world.exchange(mine)
        first = {kind: min(found) for kind in mine if (found := [each for rank in said for each in rank[kind]])}
        # In causal order: a bad parameter makes outputs bad, these the loss, and any of them makes all gradients bad.
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
    """Hold the watcher of one model while watching is on.

    Args:
        make: creates a watcher.
        boundary: step boundary of the model.
        show: passes the present watcher, or None, to the hooks.
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
        """Start or stop watching for non-finite values."""
        if on:
            self._boundary.early.refuse("FiniteGuard")
        self.watching = self._make() if on else None
        self._show(self.watching)

    @_disable_dynamo
    def check(self, loss: Tensor | None, counts: Tensor | None) -> None:
        """Skip the present step if anything in it is inf or NaN; :meth:`look` reports it. Collective.

        Args:
            loss: this rank's loss, if it is to be checked.
            counts: () bool, whether non-finite gradients count; None: they do.
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
        """Raise a NonFiniteError if the last checked step was bad. Collective."""
        if self.watching is not None:
            self.watching.look()


def _nonfinite_slots(flat: FlatParameter, what: str) -> list[str]:
    """Return the names of slots with non-finite parameters or gradients (``what``) in this rank's states shard."""
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
