"""The requests of programs between backward and the step: clipping, norms, unscaling, one unsharded gradient.

Everything here is collective but :meth:`Gradients.read`, and has the ranks agree first which gradients there are
(:meth:`Boundary.finish`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from npuzero.comm import World
from npuzero.comm.calls import collective, torchs
from npuzero.config import strict_word
from npuzero.errors import StateError
from npuzero.shard.accord import Words
from npuzero.shard.boundary import Boundary
from npuzero.shard.flat import Flat
from npuzero.shard.guard import INSTEAD
from npuzero.shard.pipe import Pipe
from npuzero.shard.unit import Unit
from npuzero.shard.values import Values


class Gradients:
    """Answer what a program asks of its model's present gradients."""

    def __init__(
        self, units: Sequence[Unit], world: World, pipe: Pipe, boundary: Boundary, values: Values, alone: bool
    ) -> None:
        self._units = units
        self._flats = [flat for unit in units for flat in unit.trainable]
        self._places = {id(p): (flat, i) for flat in self._flats for i, p in enumerate(flat.parameters)}
        self._world = world
        self._pipe = pipe
        self._boundary = boundary
        self._values = values
        self._alone = alone  # no other rank need be waited for

    @_disable_dynamo
    @collective("clip_grad_norm_")
    def clip_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Return the global norm; have the update scale the gradients so that it is at most ``max_norm``."""
        boundary = self._boundary
        boundary.early.refuse("clip_grad_norm_")
        boundary.accord.call("clip_grad_norm_", {"max_norm": max_norm, "norm_type": norm_type})
        total = torch.zeros((), device=self._world.device)
        if boundary.finish():
            total = (boundary.sums.norm(norm_type) * boundary.gradient_scale[0]).float()
            if error_if_nonfinite and not total.isfinite().item():
                raise StateError(
                    "clip_grad_norm_",
                    expected="finite gradients",
                    got=f"a norm of {total.item()}, here from units {self._nonfinite_units()}",
                    do="Lower the learning rate or look at the loss; zero_grad() drops these gradients.",
                )
            boundary.scale_gradients((max_norm / (total + 1e-6)).clamp(max=1.0))
        return total

    @_disable_dynamo
    @collective("clip_grad_value_")
    def clip_values(self, limit: float) -> None:
        """Bring every element of the gradients into ``[-limit, limit]``."""
        self._boundary.early.refuse("clip_grad_value_")
        self._boundary.accord.call("clip_grad_value_", {"clip_value": limit})
        if self._boundary.finish():
            self._boundary.apply_scale()
            for flat in self._flats:
                flat.own_gradient.clamp_(-limit, limit)
            self._boundary.sums.forget()

    @_disable_dynamo
    @collective("skip_nonfinite_")
    def skip_nonfinite(self) -> Tensor:
        """Have the present step change nothing if any gradient has an inf or NaN; return () bool: it has."""
        boundary = self._boundary
        boundary.early.refuse("skip_nonfinite_")
        boundary.accord.call("skip_nonfinite_", {})
        if not boundary.finish():
            return torch.zeros((), dtype=torch.bool, device=self._world.device)
        bad = boundary.sums.total()[1] != 0  # counted by the pass that sums squares: clipping takes no other
        boundary.skip_where(bad.float().view(1))
        return bad

    @_disable_dynamo
    @collective("grad_norms")
    def norms(self, p: float) -> dict[str, float]:
        """Return by name the p-norm of each unsharded gradient that any rank of any stage has."""
        boundary = self._boundary
        boundary.accord.call("grad_norms", {"norm_type": p})
        if not boundary.finish():
            return {}
        used = (place for place in self._places.values() if boundary.used(place[0])[place[1]])
        here = {flat.layout.slots[i].name: (flat, i) for flat, i in used}
        names = self._pipe.names([*here])
        norms = (boundary.sums.norms([here.get(name) for name in names], p) * boundary.gradient_scale[0]).float()
        return dict(zip(names, norms.tolist(), strict=True))

    @collective("full_gradient")
    def full(self, flat: Flat, i: int) -> Tensor | None:
        """Return the unsharded gradient of a slot, float32; None where no rank has any."""
        if not self._boundary.finish() or not self._boundary.used(flat)[i]:
            return None
        whole = self._values.whole_slot(flat, i, self._values.gather_states(flat, flat.own_gradient))
        return whole * self._boundary.gradient_scale[0]

    def read(self, flat: Flat, i: int) -> Tensor:
        """Return a float32 copy for a program that reads ``p.grad`` where this rank has all of it. Not collective.

        Raises:
            StateError: no rank has all of it, or the ranks have not summed it yet.
        """
        self._values.check_here()
        if self._alone:
            self._boundary.finish()
        slot = flat.layout.slots[i]
        if flat.rests.states.guarded or not self._boundary.summed:
            call, line = torchs()
            cut = f"plan {flat.plan.name!r}, which leaves each rank a shard of the sum"
            raise StateError(
                f"reading the gradient of {slot.name}" + (call and f" by {call}") + (line and f", called at {line}"),
                expected="a gradient that this rank has unsharded, after the ranks have summed it",
                got=cut if flat.rests.states.guarded else "one that is not summed yet",
                do="To look at it call npuzero.full_gradient(parameter) or npuzero.grad_norms(model) on every rank; "
                f"to train use {INSTEAD}.{strict_word(self._world.size)}",
            )
        gradient = flat.own_gradient[flat.own_slots[i]].view(slot.shape).to(self._world.device)
        return gradient * self._boundary.gradient_scale[0]

    @collective("LossScaler.unscale_")
    def unscale(self, inverse: Tensor, rules: Words, parameters: Container[int]) -> Tensor | None:
        """Multiply the gradients of some parameters by ``inverse`` (float32, one element).

        Where these are all of the model's it happens at the update.

        Args:
            rules: what the loss scaler was told, the same on every rank.
            parameters: the ids of those that the optimizer at hand has.

        Returns:
            () float32 on the device, not zero where an element of these gradients is inf or NaN, on any rank; None
            where no rank has any.
        """
        boundary = self._boundary
        boundary.early.refuse("LossScaler.unscale_")
        boundary.accord.call("LossScaler", rules)
        if not boundary.finish():
            return None
        # The update has one scale for the model: an optimizer of some parameters has theirs multiplied here.
        chosen = [place for key, place in self._places.items() if key in parameters]
        some_only, used = self._pipe.any(
            len(chosen) < len(self._places), any(boundary.used(flat)[i] for flat, i in chosen)
        )
        if not some_only:
            boundary.scale_gradients(inverse)  # costs no pass over the gradients
            return (boundary.sums.total()[1] != 0).float()
        if not used:
            return None
        bad = boundary.sums.nonfinite(chosen)
        for flat, i in chosen:
            mine = flat.own_gradient[flat.own_slots[i]]
            mine.mul_(inverse.to(mine.device))
        boundary.sums.forget()
        return (bad != 0).float()

    def _nonfinite_units(self) -> list[str]:
        return [u.name for u in self._units if any(not flat.own_gradient.isfinite().all() for flat in u.trainable)]
