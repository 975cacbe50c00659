"""Gradient access between backward and the step: clipping, norms, unscaling, one unsharded gradient.

All calls except :meth:`ModelGradients.read` are collective: the ranks first agree on the present gradients
(:meth:`StepBoundary.finish`).
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Collection, Container, Sequence

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from npuzero import observe
from npuzero.comm import World
from npuzero.comm.watchdog.call_names import collective_call, find_torch_call
from npuzero.config import explain_strict_refusal
from npuzero.errors import StateError
from npuzero.shard.gradients.norms import Place, local_gradient_ranges
from npuzero.shard.gradients.vote_rules import Words
from npuzero.shard.gradients.vote_stages import StageVote
from npuzero.shard.modules.sharded_tensor import INSTEAD
from npuzero.shard.parameters.full_parameters import FullParameters
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.unit import Unit
from npuzero.shard.step.step_boundary import StepBoundary


class ModelGradients:
    """Provide a model's present gradients to the program.

    Attributes:
        boundary: step boundary of the model.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        world: World,
        pipe: StageVote,
        boundary: StepBoundary,
        values: FullParameters,
        alone: bool,
    ) -> None:
        self._units = units
        self._flats = [flat for unit in units for flat in unit.trainable]
        self._places = {id(p): (flat, i) for flat in self._flats for i, p in enumerate(flat.parameters)}
        self.boundary = boundary
        self._world = world
        self._pipe = pipe
        self._values = values
        self._alone = alone  # read() may call finish(): no further rank takes part
        # True until a loss scaler has unscaled, or the warning was given.
        self._unscaled = observe.current_rank() == 0 and any(flat.dtype is torch.float16 for flat in self._flats)

    def choose(self, call: str, words: Words, parameters: Sequence[Tensor] | None) -> ChosenGradients:
        """Return the present gradients of ``parameters`` for ``call``, once the ranks agree on them. Collective.

        Args:
            words: the arguments that must be equal on all ranks.
            parameters: parameters of the model; None: all with a gradient.
        """
        places = None if parameters is None else self._places_of(parameters)
        if self._pipe.many:  # all stages must take the same branch below, since _present() is collective over them
            words = {**words, "model or parameters": "model" if parameters is None else "parameters"}
        self.boundary.accord.call(call, words, "" if places is None else _describe_places(places))
        some = self.boundary.finish()
        if not some or parameters is None or (places is None and not self._pipe.many):
            return ChosenGradients(self, some)
        return self._present(self._places.values() if places is None else places)

    def _places_of(self, parameters: Sequence[Tensor]) -> list[Place] | None:
        """Return the places of the gradients of ``parameters``; None if these are all of the model's, each once."""
        keys = [key for key in map(id, parameters) if key in self._places]
        if len(keys) == len(self._places) and len(set(keys)) == len(keys):
            return None
        return [self._places[key] for key in keys]

    def _present(self, places: Collection[Place]) -> ChosenGradients:
        """Return the ``places`` with a gradient on any rank. Collective over the stages of a pipeline."""
        used = {flat: self.boundary.used(flat) for flat in self._flats}
        if self._pipe.many:  # a parameter tied between both ends counts once, no matter which end is given it
            chosen = {flat: [False] * len(here) for flat, here in used.items()}
            for flat, i in places:
                chosen[flat][i] = True
            tied = self._pipe.tie(chosen)
            places = [*places, *((f, i) for f in self._flats for i in f.slots if tied[f][i] and not chosen[f][i])]
        present = [(flat, i) for flat, i in places if used[flat][i]]
        every = len(present) == len(set(present)) == sum(map(sum, used.values()))
        if self._pipe.any(not every)[0]:
            return ChosenGradients(self, some=True, places=present)
        return ChosenGradients(self, some=True)

    def own_shards(self) -> list[Tensor]:
        """Return this rank's gradient shard of each flat."""
        return [flat.own_gradient for flat in self._flats]

    def nonfinite_units(self) -> list[str]:
        """Return the names of units with an inf or NaN in this rank's gradient shards."""
        return [u.name for u in self._units if any(not flat.own_gradient.isfinite().all() for flat in u.trainable)]

    @_disable_dynamo
    @collective_call("grad_norms")
    def norms(self, p: float, parameters: Sequence[Tensor] | None) -> dict[str, float]:
        """Return, by parameter name, the p-norm of each unsharded gradient that any rank of any stage has."""
        boundary = self.boundary
        chosen = self.choose("grad_norms", {"norm_type": p}, parameters)
        if not chosen.some:
            return {}
        places = self._places.values() if chosen.places is None else chosen.places
        here = {flat.layout.slots[i].name: (flat, i) for flat, i in places if boundary.used(flat)[i]}
        names = self._pipe.names([*here])
        norms = (boundary.sums.norms([here.get(name) for name in names], p) * boundary.gradient_scale[0]).float()
        return dict(zip(names, norms.tolist(), strict=True))

    @collective_call("full_gradient")
    def full(self, flat: FlatParameter, i: int) -> Tensor | None:
        """Return the unsharded gradient of a slot, float32; None if no rank has one."""
        if not self.boundary.finish() or not self.boundary.used(flat)[i]:
            return None
        whole = self._values.whole_slot(flat, i, self._values.gather_states(flat, flat.own_gradient))
        return whole * self.boundary.gradient_scale[0]

    def read(self, flat: FlatParameter, i: int) -> Tensor:
        """Return a float32 copy of a slot's gradient, for reads of ``p.grad``. Not collective.

        Raises:
            StateError: the gradient is sharded, or the ranks have not summed it yet.
        """
        self._values.check_here()
        if self._alone:
            self.boundary.finish()
        slot = flat.layout.slots[i]
        if i in flat.gradient.zeroed:
            return torch.zeros(slot.shape, device=self._world.device)
        if flat.rests.states.guarded or not self.boundary.summed:
            call, line = find_torch_call()
            cut = f"plan {flat.plan.name!r}, which leaves each rank a shard of the sum"
            raise StateError(
                f"reading the gradient of {slot.name}" + (call and f" by {call}") + (line and f", called at {line}"),
                expected="a gradient that this rank has unsharded, after the ranks have summed it",
                got=cut if flat.rests.states.guarded else "one that is not summed yet",
                do="To look at it call npuzero.full_gradient(parameter) or npuzero.grad_norms(model) on every rank; "
                f"to train use {INSTEAD}.{explain_strict_refusal(self._world.size)}",
            )
        gradient = flat.own_gradient[flat.own_slots[i]].view(slot.shape).to(self._world.device)
        return gradient * self.boundary.gradient_scale[0]

    @collective_call("LossScaler.unscale_")
    def unscale(self, inverse: Tensor, rules: Words, parameters: Container[int]) -> Tensor | None:
        """Multiply the gradients of some parameters by ``inverse`` (float32, one element).

        If these are all parameters of the model, the update does it.

        Args:
            rules: the loss scaler's options, equal on every rank.
            parameters: ids of the optimizer's parameters.

        Returns:
            () float32 on the device, nonzero if any of these gradients has an inf or NaN on any rank; None if no rank
            has a gradient.
        """
        boundary = self.boundary
        self._unscaled = False
        boundary.early.refuse("LossScaler.unscale_")
        boundary.accord.call("LossScaler", rules)
        if not boundary.finish():
            return None
        # The update has one scale per model, so gradients of an optimizer of only some parameters are multiplied here.
        chosen = [place for key, place in self._places.items() if key in parameters]
        some_only, used = self._pipe.any(
            len(chosen) < len(self._places), any(boundary.used(flat)[i] for flat, i in chosen)
        )
        if not some_only:
            boundary.scale_gradients(inverse)  # costs no pass over the gradients
            return (boundary.sums.total()[1] != 0).float()
        if not used:
            return None
        part = ChosenGradients(self, some=True, places=chosen)
        bad = part.nonfinite()
        part.scale(inverse)
        return bad.float()

    def warn_unscaled(self) -> None:
        """Warn once, on rank 0, about a step with float16 gradients and no loss scaler."""
        if self._unscaled:
            self._unscaled = False
            warnings.warn(
                "float16 gradients without a loss scaler: those below 6e-8 vanish, and one that overflows makes every "
                "parameter NaN. Scale the loss by npuzero.LossScaler (scaler.scale(loss).backward(); "
                "scaler.step(optimizer); scaler.update()), or take bfloat16, which needs none. Where it is meant: "
                "warnings.filterwarnings('ignore', message='float16 gradients').",
                RuntimeWarning,
                stacklevel=2,
            )


class ChosenGradients:
    """Hold the gradients that one call covers, in one model. Its methods are collective.

    The update applies one scale to all gradients of a model, without a further pass over them. Part of the gradients
    cannot use it and is multiplied in place.

    Attributes:
        some: whether any rank of any stage has one.
        places: their places, with duplicates as given, as in torch; None: all present gradients.
        device: device of the results.
    """

    def __init__(self, gradients: ModelGradients, some: bool, places: list[Place] | None = None) -> None:
        self.some = some
        self.places = places
        self.device = gradients.boundary.gradient_scale.device
        self._gradients = gradients
        self._boundary = gradients.boundary

    def norm(self, p: float) -> Tensor:
        """Return () float64: the p-norm."""
        return self._boundary.sums.norm(p, self.places) * self._boundary.gradient_scale[0]

    def nonfinite(self) -> Tensor:
        """Return () bool: whether any element is inf or NaN, counted in the same pass as the sum of squares."""
        sums = self._boundary.sums
        return (sums.total() if self.places is None else sums.total_of(self.places))[1] != 0

    def scale(self, by: Tensor) -> None:
        """Multiply the gradients by ``by``, () or [1] float32."""
        if self.places is None:
            self._boundary.scale_gradients(by)
            return
        with self._boundary.changing():
            for own in local_gradient_ranges(self.places):
                own.mul_(by.to(own.device))
        self._boundary.sums.forget()

    def clamp(self, limit: float) -> None:
        """Clip every element to ``[-limit, limit]``."""
        self._boundary.apply_scale()
        shards = self._gradients.own_shards() if self.places is None else local_gradient_ranges(self.places)
        with self._boundary.changing():
            for own in shards:
                own.clamp_(-limit, limit)
        self._boundary.sums.forget()


def _describe_places(places: Sequence[Place]) -> str:
    """Return a description of parameters, equal on ranks with the same parameters in the same order."""
    names = [flat.layout.slots[i].name for flat, i in places]
    if not names:
        return "none"
    digest = zlib.crc32("\n".join(names).encode())
    return f"{len(names)}, from {names[0]} to {names[-1]} (digest {digest:08x})"
