"""The step boundary: ranks agree on the present gradients, and the update gets their scale and skip flag.

Between two updates the gradients of a model are in one of three phases::

    OPEN      backward passes add to them
    AGREED    the ranks know which parameters have a gradient, and R3 has summed the gradients
    STEPPED   an update has used them; they can still be read, until zero_grad() or the next backward pass

A backward pass returns to OPEN from any phase.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from npuzero.comm import World
from npuzero.errors import StateError
from npuzero.plan import DIGEST_BITS, STAGE
from npuzero.shard.gradients.input_digests import SharedInputs
from npuzero.shard.gradients.norms import GradientSums
from npuzero.shard.gradients.reduce_scatter import GradientReducer
from npuzero.shard.gradients.vote_rules import OptimizerRuleVote
from npuzero.shard.gradients.vote_stages import StageVote
from npuzero.shard.layout.shard_specs import RankGroup
from npuzero.shard.layout.traffic_meter import CountingMesh
from npuzero.shard.parameters.full_parameters import FullParameters
from npuzero.shard.state.claim import deleted_model_error
from npuzero.shard.state.flat_gradient import has_gradient_values
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.unit import Unit
from npuzero.shard.step.check_parameters import ParameterCheck
from npuzero.shard.step.early_update import EarlyUpdate
from npuzero.shard.step.optimizer_update import OptimizerUpdate

#: Maximum number of parameters that an error names.
_NAMED = 10

#: Bytes of a flat's gradients from which their memory is lent between steps; below, it is not worth the calls.
LENT_BYTES = 2**20


class BoundaryPhase(enum.Enum):
    """Name the phase of the present gradients."""

    OPEN = "open"
    AGREED = "agreed"
    STEPPED = "stepped"


class StepBoundary:
    """Keep track of the gradients of one model between two updates.

    Attributes:
        gradient_scale: [1] float32 on the device: factor of the gradients at the update (clipping, unscaling).
        skip: [1] float32 on the device, or None: if nonzero, the present update changes nothing.
        board: the world's hang detector, which records the calls that this rank left by an exception.
        accord: vote on the rules and calls that must be equal on all ranks.
        sums: norms and counts over the gradients, once they are agreed on.
        early: updates that start inside backward, before any agreement.
        summed: whether the present gradients are summed over all ranks.
        agreed: whether the ranks have agreed on them for the next update.
        incomplete: whether an error has left the present gradients incomplete; they can only be dropped.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts that act at the boundary, made and wired by the engine
        self,
        units: Sequence[Unit],
        world: World,
        mesh: CountingMesh,
        pipe: StageVote,
        reducer: GradientReducer,
        update: OptimizerUpdate,
        early: EarlyUpdate,
        values: FullParameters,
        census: ParameterCheck,
        inputs: SharedInputs,
        *,
        ignore_unused: bool,
    ) -> None:
        self._units = units
        self._flats = [flat for unit in units for flat in unit.trainable]
        self._mesh = mesh
        self._pipe = pipe
        self._reducer = reducer
        self._update = update
        self.early = early
        self._values = values
        self._census = census
        self._ignore_unused = ignore_unused
        self.board = world.board
        self.accord = OptimizerRuleVote(self._flats, world, pipe.world, inputs)
        self.sums = GradientSums(self._flats, mesh, world.device)
        self.gradient_scale = torch.ones(1, device=world.device)
        self.skip: Tensor | None = None
        self.incomplete = False
        # Flags, each with the ids of the parameters that have their next update skipped by it.
        self._skips: list[tuple[frozenset[int], Tensor]] = []
        self._trained = frozenset(id(parameter) for flat in self._flats for parameter in flat.parameters)
        self._stage = BoundaryPhase.OPEN
        self._used: dict[FlatParameter, list[bool]] = {}  # per slot, if AGREED
        self._some = False  # any stage has gradients, if AGREED
        self._scaled = False  # gradient_scale is not 1
        self._brought = False  # this rank has run a backward pass for the next step, even if its gradients were dropped
        self._dropped = False  # the program has dropped some, but not all, of the present gradients

    @property
    def summed(self) -> bool:
        return self._stage is not BoundaryPhase.OPEN

    @property
    def agreed(self) -> bool:
        return self._stage is BoundaryPhase.AGREED

    @property
    def used_slots(self) -> Mapping[FlatParameter, list[bool]]:
        """Return per flat and slot whether any rank has a gradient in the present step (after :meth:`finish`)."""
        assert self._stage is BoundaryPhase.AGREED
        return self._used

    def used(self, flat: FlatParameter) -> list[bool]:
        """Return :attr:`used_slots` of one flat."""
        return self.used_slots[flat]

    def reopen(self) -> bool:
        """Prepare for a backward pass.

        Returns:
            whether gradients are already present.
        """
        present = self._present()
        some = _any_gradient_values(present)
        # First, since an overlapped update may still read the gradients that backward is about to change.
        self._update.spare_gradients(used=self._stage is BoundaryPhase.STEPPED and some)
        if not some:  # the program has zeroed the gradients, in any way
            self.forget()
        elif self.incomplete:
            raise _incomplete_gradients_error("backward")
        elif self._scaled:  # further gradients after clipping: scale the present ones, as torch's clipping would have
            self.apply_scale()
        if self._stage is BoundaryPhase.STEPPED:  # drop flags of the last step that no optimizer has used
            self._skips.clear()
        self._clear_dropped(present)
        self._stage = BoundaryPhase.OPEN
        self.sums.forget()
        self._brought = True
        return some

    def finish(self) -> bool:
        """Run R3: bring every gradient to READY on its owner. Collective; a second call does nothing.

        Returns:
            False if no rank of any stage has a gradient (torch's optimizers then do nothing).
        """
        if self._reducer.open:
            raise StateError(
                "npuzero step",
                expected="a call after backward() has returned",
                got="a call inside a backward pass, or after one that raised",
                do="Call it after loss.backward(); after an exception call zero_grad() first.",
            )
        if self.incomplete and _any_flag(self._present()):
            raise _incomplete_gradients_error("npuzero step")
        if not self.early.begun:  # else the running update belongs to this step, and reads these gradients
            with self._update.holding():
                self._update.spare_gradients(used=self._stage is BoundaryPhase.STEPPED)
        if self._stage is not BoundaryPhase.AGREED:
            self._agree_anew()
        else:  # the program may have dropped some since, in the same way on every rank
            present = self._present()
            if present != self._used or any(flat.gradient.zeroed for flat in self._flats):
                self._used = present
                self.sums.forget()
                self._clear_dropped(present)
                self._some = _any_flag(present) or self._pipe.many  # other stages may not have dropped theirs
        self._brought = self._brought and self._some
        return self._some

    def _agree_anew(self) -> None:
        root = self._units[0].module()
        if root is None:
            raise deleted_model_error("optimizer")
        self._census.check(root)
        present = self._present()
        self._clear_dropped(present)
        self._values.look_at_whole()
        if not self._brought and not _any_gradient_values(present):
            self.forget()
            _interrupt_gathers(self._units, self.gradient_scale.device)
        # Before the vote: ranks may be waiting in a reduction for the zeros of a rank without a backward pass.
        self._reducer.finish()
        self.accord.begin_vote()
        votes = self._vote(present)
        in_use = {flat: [ranks > 0 for ranks in slots] for flat, slots in votes.items()}
        self._used = self._pipe.tie(in_use)
        _zero_unused_gradients(self._used)
        self._some = self._pipe.agree(_any_flag(self._used), self.accord)
        if self._some and not self._ignore_unused:
            self._refuse_unused(votes)
        with torch._C.DisableTorchFunctionSubclass():
            for flat, used in self._used.items():
                for i, (anywhere, here) in enumerate(zip(used, present[flat], strict=True)):
                    if anywhere and not here:
                        flat.gradient.adopt(i)
        self._stage = BoundaryPhase.AGREED

    def _present(self) -> dict[FlatParameter, list[bool]]:
        """Return per slot whether this rank has a gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            return {flat: flat.gradient.present() for flat in self._flats}

    def _clear_dropped(self, present: Mapping[FlatParameter, list[bool]]) -> None:
        """Zero, in the buffers, gradients that the program has dropped or set to zero one by one."""
        for flat, here in present.items():
            for i in flat.gradient.dropped(here):
                self._reducer.drain()
                flat.gradient.clear(i)
                self._dropped = self._dropped or not here[i]

    def _refuse_unused(self, votes: Mapping[FlatParameter, list[int]]) -> None:
        """Check that every rank has a gradient of every parameter that trains. Collective over the stages.

        Raises:
            ConfigError: an optimizer has ``early``: it may update before this check.
            StateError: on every rank of every stage: a gradient is missing.
        """
        self.early.refuse("Settings(ignore_unused_parameters=False)")
        ranks = self._mesh.size(STAGE)
        with torch._C.DisableTorchFunctionSubclass():
            unused = [
                flat.layout.slots[i].name
                for flat, here in votes.items()
                for i in flat.slots
                if here[i] < ranks
                and flat.parameters[i].requires_grad
                and not (flat.rests.tied and self._used[flat][i])  # the opposite end of the pipeline has used it
            ]
        if any(self._pipe.any(bool(unused))):
            names = self._pipe.names(unused)
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise StateError(
                "a step with Settings(ignore_unused_parameters=False)",
                expected="a gradient of every parameter that trains, on every rank",
                got=f"none, on some rank, of {', '.join(names[:_NAMED])}{more}",
                do="Let the loss of every rank depend on them, or freeze them by requires_grad_(False) on every rank. "
                "Nothing was updated; zero_grad() drops these gradients.",
                parameters=names,
            )

    def _vote(self, present: dict[FlatParameter, list[bool]]) -> Mapping[FlatParameter, list[int]]:
        """Return the number of ranks with a gradient, per slot; clear slots that some rank dropped and no rank has.

        The same all_reduce tells whether rules differ, or a rank has written to parameters: then all ranks compare.
        """
        if not present or self._mesh.size(STAGE) == 1:
            return {flat: [*map(int, here)] for flat, here in present.items()}
        flags = [flag for flat in self._flats for flag in present[flat]]
        said = (self._dropped, self._values.written, self.accord.inputs.ballot_of_data())
        ballot = [*flags, *said, *self.accord.ballot(present)]
        votes = torch.tensor(ballot, dtype=torch.float32)
        self._mesh.host().all_reduce(votes, tag="parameters in use").wait()
        *used, dropped, written, repeated = (sums := votes.tolist())[:-DIGEST_BITS]
        self.accord.look(sums[-DIGEST_BITS:])
        self.accord.inputs.look_at_data(repeated)
        if written:
            self._values.compare_written()
        votes_of = map(int, used)
        agreed = {flat: [next(votes_of) for _ in flat.slots] for flat in self._flats}
        if dropped:  # sums on further ranks may still hold a gradient that a rank brought alone, and dropped
            for flat, anywhere in agreed.items():
                for i in flat.slots:
                    if not anywhere[i]:
                        flat.gradient.clear(i)
            self._dropped = False
        return agreed

    # -- scale and skip flags of the update ------------------------------------------------------------------------

    def scale_gradients(self, by: Tensor) -> None:
        """Multiply the scale that the update applies to all gradients by ``by``, [1] or () float32."""
        self.gradient_scale.mul_(by)
        self._scaled = True

    def apply_scale(self) -> None:
        """Multiply the gradients themselves by the scale, and reset it to 1."""
        with self.changing():
            for flat in self._flats:
                flat.own_gradient.mul_(self.gradient_scale.to(flat.own_gradient.device))
            self.gradient_scale.fill_(1.0)
        self._scaled = False

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Mark the gradients incomplete if changing them in place inside raises."""
        self.incomplete = True
        yield
        self.incomplete = False

    def skip_where(self, flag: Tensor, parameters: frozenset[int] | None = None) -> None:
        """Skip the next update of some parameters if ``flag`` ([1] float32) is nonzero.

        Args:
            parameters: their ids; None: all. An update that includes any of them is skipped entirely.
        """
        self._skips.append((self._trained if parameters is None else parameters, flag))

    def begin_update(self, members: frozenset[int]) -> None:
        """Set :attr:`skip` for an update of ``members``, ids of parameters."""
        flags = [flag for parameters, flag in self._skips if not parameters.isdisjoint(members)]
        self.skip = reduce(torch.maximum, flags) if flags else None

    # -- after the update ------------------------------------------------------------------------------------------

    def step_ends(self, members: frozenset[int]) -> None:
        """Note that an update of ``members`` has used the gradients."""
        self._stage = BoundaryPhase.STEPPED
        self._used = {}
        self._skips = [(left, flag) for parameters, flag in self._skips if (left := parameters - members)]
        self.skip = None
        self._brought = False
        self.sums.forget()

    def forget(self) -> None:
        """Drop all gradients."""
        self._reducer.reset()
        self._stage = BoundaryPhase.OPEN
        self.incomplete = self._dropped = self._brought = False
        self.gradient_scale.fill_(1.0)
        self._scaled = False
        self._skips.clear()
        self.skip = None

    def lend_memory(self) -> None:
        """Release the memory of the last step's gradients until the next backward pass; called after zero_grad().

        Gradients in a running reduction stay until the next backward pass finds them dropped.
        """
        large = [
            (unit, flat.gradient.memory)
            for unit in self._units
            for flat in unit.trainable
            if flat.gradient.buffer.nbytes >= LENT_BYTES
        ]
        # Not while a collective may write to the buffers, nor between an agreement and its update.
        done = self._stage is not BoundaryPhase.AGREED and self._reducer.idle
        if large and done and not _any_gradient_values(self._present()):
            self.forget()
            for unit, memory in large:
                self._update.lend(unit, memory)


def _interrupt_gathers(units: Sequence[Unit], device: torch.device) -> None:
    """Start a mismatched collective with ranks that gather for a backward pass: an error at once, not a deadlock."""
    groups: dict[object, RankGroup] = {}
    for flat in (flat for unit in units for flat in unit.flats if flat.rests.parameters.cut):
        groups.setdefault(flat.rests.parameters.group.axes, flat.rests.parameters.group)
    for group in groups.values():
        nothing = torch.empty(0, device=device)
        group.communicator("gather").all_reduce(nothing, tag="a step without a backward pass").wait()


def _zero_unused_gradients(used: Mapping[FlatParameter, list[bool]]) -> None:
    """Zero slots that hold only error feedback because no rank has a gradient: a norm must not count them."""
    for flat, anywhere in used.items():
        if flat.gradient.residuals and not flat.gradient.kept.lent:
            for i in (i for i in flat.slots if not anywhere[i]):
                flat.gradient.clear(i)


def _incomplete_gradients_error(subject: str) -> StateError:
    return StateError(
        subject,
        expected="gradients that are complete, or none",
        got="those of a backward pass, clipping or unscaling that has raised: some of them are lacking",
        do="Call zero_grad() after such an error, and go on with the next batch.",
    )


def _any_flag(flags: Mapping[FlatParameter, list[bool]]) -> bool:
    return any(map(any, flags.values()))


def _any_gradient_values(present: Mapping[FlatParameter, list[bool]]) -> bool:
    return any(any(here) and has_gradient_values(flat.gradient, here) for flat, here in present.items())
