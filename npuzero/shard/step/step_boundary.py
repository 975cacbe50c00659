"""The step boundary: ranks agree on which gradients there are, and the update learns how to use them.

Between two updates the gradients of a model are in one of three stages::

    OPEN      backward passes come, and add to them
    AGREED    the ranks know which parameters took part, and R3 has summed their gradients
    STEPPED   an update has used them; they can still be read, until zero_grad() or the next backward pass

A backward pass opens them again, in whatever stage they are.
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

#: Of how many parameters an error gives the names.
_NAMED = 10

#: The gradients of a flat, from which on their memory is lent between steps: moving less is not worth the calls.
LENT_BYTES = 2**20


class BoundaryPhase(enum.Enum):
    """Name how far the present gradients are."""

    OPEN = "open"
    AGREED = "agreed"
    STEPPED = "stepped"


class StepBoundary:
    """Keep track of the gradients of one model between two updates.

    Attributes:
        gradient_scale: [1] float32 on the device: what gradients are multiplied by at the update (clipping, unscaling).
        skip: [1] float32 on the device, or None: where it is not zero, the present update changes nothing.
        board: of the world, which records the calls that this rank left by an exception.
        accord: what all ranks must say alike.
        sums: over the gradients, once they are agreed on.
        early: the updates that begin before there is any agreement.
        summed: whether the present gradients are over all ranks.
        agreed: whether the ranks know which of them there are, for the update to come.
        incomplete: an error has left the present gradients incomplete; nothing but dropping them helps.
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
        # Flags, each with the ids of the parameters whose next update it may skip.
        self._skips: list[tuple[frozenset[int], Tensor]] = []
        self._trained = frozenset(id(parameter) for flat in self._flats for parameter in flat.parameters)
        self._stage = BoundaryPhase.OPEN
        self._used: dict[FlatParameter, list[bool]] = {}  # per slot, where AGREED
        self._some = False  # any stage has gradients, where AGREED
        self._scaled = False  # gradient_scale is not 1
        self._brought = False  # a backward pass of this rank is in what the next step sums, whatever was dropped of it
        self._dropped = False  # the user has dropped some of the present gradients, while others stay

    @property
    def summed(self) -> bool:
        return self._stage is not BoundaryPhase.OPEN

    @property
    def agreed(self) -> bool:
        return self._stage is BoundaryPhase.AGREED

    @property
    def used_slots(self) -> Mapping[FlatParameter, list[bool]]:
        """Return by flat, per slot, whether any rank has a gradient in the present step (after :meth:`finish`)."""
        assert self._stage is BoundaryPhase.AGREED
        return self._used

    def used(self, flat: FlatParameter) -> list[bool]:
        """Return of one flat what :attr:`used_slots` has of it."""
        return self.used_slots[flat]

    def reopen(self) -> bool:
        """Prepare for a backward pass that brings more gradients.

        Returns:
            whether there are some already.
        """
        present = self._present()
        some = _any_gradient_values(present)
        self._update.spare_gradients(used=self._stage is BoundaryPhase.STEPPED and some)
        if not some:  # the program has zeroed the gradients, in whatever way
            self.forget()
        elif self.incomplete:
            raise _incomplete_gradients_error("backward")
        elif self._scaled:  # more gradients come after clipping: scale what there is, as torch's clipping would have
            self.apply_scale()
        if self._stage is BoundaryPhase.STEPPED:  # what no optimizer has used of the last step's
            self._skips.clear()
        self._clear_dropped(present)
        self._stage = BoundaryPhase.OPEN
        self.sums.forget()
        self._brought = True
        return some

    def finish(self) -> bool:
        """Run R3: bring every gradient to READY on its owner. Collective; does nothing the second time.

        Returns:
            False where no rank has any gradient (torch's optimizers then do nothing); of other stages' modules neither.
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
        if not self.early.begun:  # else these are gradients of a step to come
            with self._update.holding():
                self._update.spare_gradients(used=self._stage is BoundaryPhase.STEPPED)
        if self._stage is not BoundaryPhase.AGREED:
            self._agree_anew()
        else:  # the program may have dropped some since, as it does on every rank
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
        # Before the vote: a rank that had no backward pass owes the others, who may be waiting, its zeros.
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
        """Zero what the buffers hold of gradients that the program dropped, or set to zeros, while others stay."""
        for flat, here in present.items():
            for i in flat.gradient.dropped(here):
                self._reducer.drain()
                flat.gradient.clear(i)
                self._dropped = self._dropped or not here[i]

    def _refuse_unused(self, votes: Mapping[FlatParameter, list[int]]) -> None:
        """Raise where some rank has no gradient of a parameter that trains. Collective over the stages.

        Raises:
            ConfigError: an optimizer begins its updates before anybody can know.
            StateError: on every rank of every stage: there is such a parameter.
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
                and not (flat.rests.tied and self._used[flat][i])  # the other end of the pipeline has used it
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
        """Return on how many ranks each slot has a gradient; clear one that some rank dropped and no rank has.

        Where ranks follow different rules, or any has written into parameters, all compare.
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
        if dropped:  # a rank dropped a gradient that the others have through it
            for flat, anywhere in agreed.items():
                for i in flat.slots:
                    if not anywhere[i]:
                        flat.gradient.clear(i)
            self._dropped = False
        return agreed

    # -- what the update is told -----------------------------------------------------------------------------------

    def scale_gradients(self, by: Tensor) -> None:
        """Have the update multiply all gradients by one number more: [1] or () float32."""
        self.gradient_scale.mul_(by)
        self._scaled = True

    def apply_scale(self) -> None:
        """Multiply the gradients themselves by the number that the update was to multiply them by."""
        with self.changing():
            for flat in self._flats:
                flat.own_gradient.mul_(self.gradient_scale.to(flat.own_gradient.device))
            self.gradient_scale.fill_(1.0)
        self._scaled = False

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Change the gradients in place inside; where that raises, they are incomplete."""
        self.incomplete = True
        yield
        self.incomplete = False

    def skip_where(self, flag: Tensor, parameters: frozenset[int] | None = None) -> None:
        """Have the next update of some parameters change nothing where ``flag`` ([1] float32) is not zero.

        Args:
            parameters: their ids; None: all. An update of other parameters beside them is skipped with them.
        """
        self._skips.append((self._trained if parameters is None else parameters, flag))

    def begin_update(self, members: frozenset[int]) -> None:
        """Let :attr:`skip` be that of an update of ``members``, ids of parameters."""
        flags = [flag for parameters, flag in self._skips if not parameters.isdisjoint(members)]
        self.skip = reduce(torch.maximum, flags) if flags else None

    # -- afterwards ------------------------------------------------------------------------------------------------

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
        """Let other buffers have the memory of the last step's gradients until the next ones; after zero_grad().

        Gradients that are under way stay until the next backward pass finds them dropped.
        """
        large = [
            (unit, flat.gradient.memory)
            for unit in self._units
            for flat in unit.trainable
            if flat.gradient.buffer.nbytes >= LENT_BYTES
        ]
        # Not while a collective may write into the buffers, nor between an agreement and the update that it is for.
        done = self._stage is not BoundaryPhase.AGREED and self._reducer.idle
        if large and done and not _any_gradient_values(self._present()):
            self.forget()
            for unit, memory in large:
                self._update.lend(unit, memory)


def _interrupt_gathers(units: Sequence[Unit], device: torch.device) -> None:
    """Meet ranks that gather for a backward pass, and would wait for ever: together it is an error at once."""
    groups: dict[object, RankGroup] = {}
    for flat in (flat for unit in units for flat in unit.flats if flat.rests.parameters.cut):
        groups.setdefault(flat.rests.parameters.group.axes, flat.rests.parameters.group)
    for group in groups.values():
        nothing = torch.empty(0, device=device)
        group.communicator("gather").all_reduce(nothing, tag="a step without a backward pass").wait()


def _zero_unused_gradients(used: Mapping[FlatParameter, list[bool]]) -> None:
    """Zero what feedback alone has brought of gradients that no rank has: a norm is not to count it."""
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
