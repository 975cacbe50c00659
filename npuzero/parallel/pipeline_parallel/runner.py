"""Run a pipeline's step: micro-batches through the stages of neighbouring ranks.

A rank runs its row of the schedule (``schedule.py``), action by action. Receives for the next action start before the
current one computes (``send_recv.py``). Within a stage the engine works as without a pipeline. After the last action
all ranks agree that none has raised, and share the loss.

Invariants:
    * a rank with a stage that raises finishes its row without computing, so that no rank waits for it; the error is
      raised on every rank at the end of the step, and the next step may follow ``zero_grad()``;
    * a CollectiveError is raised at once: the communicators are broken;
    * an error between stages, such as no memory for a receive, or a KeyboardInterrupt, aborts the communicators.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from npuzero import observe
from npuzero.comm import HOST_CHANNEL, Mesh
from npuzero.comm.watchdog.call_names import collective_call, set_failure
from npuzero.config import describe_value
from npuzero.errors import CollectiveError, ConfigError, ContractError, NpuZeroError, StateError
from npuzero.parallel.pipeline_parallel.divide import PipelineStages, StageDivision
from npuzero.parallel.pipeline_parallel.micro_batches import Batch, merge_micro_batches, split_micro_batches
from npuzero.parallel.pipeline_parallel.schedule import PipelineSchedule, StageAction
from npuzero.parallel.pipeline_parallel.send_recv import (
    StageLink,
    StageOutputs,
    check_stage_outputs,
    encode_transfer_layout,
)
from npuzero.parallel.pipeline_parallel.split_backward import input_gradients, weight_gradients
from npuzero.plan import AXES, DIGEST_BITS, PIPE, TENSOR, Report, ring_bytes
from npuzero.shard.engine import Engine
from npuzero.shard.find_engine import engine_of
from npuzero.shard.gradients.input_digests import SharedInputs

#: Called with the last stage's output for a micro-batch, and its targets; returns the mean loss over it, () float.
Loss = Callable[..., Tensor]


class LossScalerProtocol(Protocol):
    """Scale a loss before backward: the part of :class:`npuzero.LossScaler` that a step calls."""

    def scale(self, outputs: Tensor) -> Tensor: ...


class Pipeline(PipelineStages):
    """Train the stages of a model on this rank; made by :func:`npuzero.pipeline`.

    It is the model that ``zero`` has sharded: ``npuzero.clip_grad_norm_``, ``report``, ``full_state_dict``, ``export``
    and ``checkpoint`` take it. An optimizer takes its ``parameters()``, which are this rank's.

    Attributes:
        schedule: the actions of each rank, in order.
        sharers: tensor ranks that hold the same activations; each sends a part.
        peak: the most forwards alive at once in the last step: forward begun and backward not finished.
    """

    schedule: PipelineSchedule
    sharers: int
    peak: int
    _runner: PipelineRunner

    def follow(self, schedule: PipelineSchedule, sharers: int = 1) -> None:
        """Set the schedule that steps follow.

        Args:
            sharers: tensor ranks that hold the same activations between stages; each sends a part.
        """
        self.schedule, self.sharers, self.peak = schedule, sharers, 0

    @property
    def row(self) -> tuple[StageAction, ...]:
        """Return this rank's actions of a step, in order."""
        return self.schedule.row(self.numbers[0] % self.schedule.ranks)

    @property
    def parts(self) -> list[tuple[str, ...]]:
        """Return the blocks of each stage here; stages run one at a time: see :func:`npuzero.predict`."""
        return [self.blocks_of[number] for number in self.numbers]

    @property
    def acts(self) -> list[tuple[int, bool]]:
        """Return the passes over ``parts`` as (part, is backward), the form that :func:`npuzero.predict` takes."""
        return [(self.numbers.index(act.stage), act.kind != "F") for act in self.row if act.kind != "I"]

    def with_sends(self, foreseen: Report, nbytes: int) -> Report:
        """Add the traffic between stages to a prediction: activations, their gradients, headers, votes and the loss.

        Args:
            nbytes: bytes of a micro-batch's activations between two stages, as each rank holds them.
        """
        first = {"F": 0, "B": self.count - 1, "I": self.count - 1}  # the stage at which this traffic starts
        acts = [act for act in self.row if act.kind in first]
        sends = sum(act.stage != self.count - 1 - first[act.kind] for act in acts)
        gathers = sum(act.stage != first[act.kind] for act in acts)
        headers = sum(stage < self.count - 1 for stage in self.numbers) * encode_transfer_layout(None).nbytes
        flags = 4 * (2 + DIGEST_BITS)
        said = headers + sum(ring_bytes("all_reduce", size, foreseen.world) for size in (flags, 4))  # and the loss
        foreseen = foreseen.with_more("send", PIPE, sends * nbytes // self.sharers)
        foreseen = foreseen.with_more("all_gather", TENSOR, gathers * ring_bytes("all_gather", nbytes, self.sharers))
        return foreseen.with_more("control", PIPE, said)

    def open(self, mesh: Mesh, loss_fn: Loss | None, *, overlap: bool = True) -> None:
        """Connect this rank's stages to their neighbours, after sharding. Every rank calls it.

        Args:
            overlap: receive for the next action while one computes.
        """
        self._runner = PipelineRunner(self, engine_of(self), mesh, loss_fn, overlap)

    @collective_call("pipeline.step")
    def step(
        self,
        *args: Any,
        target: Any = None,
        train: bool = True,
        scaler: LossScalerProtocol | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of one batch, in micro-batches; an optimizer's ``step()`` follows. Collective.

        Every rank passes the batch of its data rank: all stages of a pipeline pass the same one. Tensors with the batch
        as first dimension are split; each micro-batch gets every other argument unchanged.

        Args:
            args, kwargs: arguments of the model.
            target: a tensor, or a tuple: passed to ``loss_fn`` after the model's output.
            train: False: forward only, without gradients.
            scaler: scales the loss before backward.

        Returns:
            The loss, () float32, the same bits on every rank: the mean over micro-batches and over data ranks. Without
            ``train`` and without a loss: on the last stage's ranks its output for the full batch, elsewhere None.

        Raises:
            StateError: on every rank: a stage raised, the batch does not divide, micro-batches differ in shape, a stage
                returns no tensors, or there is no loss; the error names the stage, the micro-batch and the cause.
            ConfigError: on every rank: ranks of one pipeline got different batches.
            CollectiveError: a rank died, or called something else.
        """
        runner = self._runner
        if train and not torch.is_grad_enabled():
            raise StateError(
                "pipeline.step",
                expected="gradients to be enabled",
                got="a call inside torch.no_grad()",
                do="Leave no_grad() for it, or pass train=False.",
            )
        with torch.set_grad_enabled(train):
            result = runner.run((args, kwargs, () if target is None else _wrap_in_tuple(target)), train, scaler)
        if train:
            self.peak = runner.peak
        return result


class PipelineRunner:
    """Run a pipeline's steps on this rank; see :meth:`Pipeline.open`. ``peak`` is as in :class:`Pipeline`."""

    def __init__(
        self,
        model: Pipeline,
        engine: Engine,
        mesh: Mesh,
        loss_fn: Loss | None,
        overlap: bool,
    ) -> None:
        self._model = model
        self._engine = engine
        self._mesh = mesh
        self._schedule = model.schedule
        self._loss_fn = loss_fn
        self._overlap = overlap
        self._last = model.count - 1
        self._parts = {stage: part for part, stage in enumerate(model.numbers)}
        engine.passes.divide(model.parts)
        self._rows = {True: model.row, False: [act for act in model.row if act.kind == "F"]}
        ranks = self._schedule.ranks
        # Every rank of the pipe creates the channels of all links in the same order, else channels would not match.
        repeated = model.sharers > 1
        edges = [StageLink(engine.mesh, s, (s % ranks, (s + 1) % ranks), repeated) for s in range(self._last)]
        self._before = {stage: edges[stage - 1] for stage in model.numbers if stage}
        self._behind = {stage: edges[stage] for stage in model.numbers if stage < self._last}
        self._edges = [edge for edge in edges if edge in {*self._before.values(), *self._behind.values()}]
        self._live: dict[tuple[int, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        self._owed: dict[tuple[int, int], Callable[[], None]] = {}  # weight gradients that are computed later
        self._acts = {"F": self._forward, "B": self._backward, "I": self._backward_inputs, "W": self._backward_weights}
        self._failure: tuple[str, Exception] | None = None
        self._inputs = SharedInputs(mesh, (PIPE, TENSOR))
        self.peak = 0

    def run(self, batch: Batch, train: bool, scaler: LossScalerProtocol | None) -> Any:
        """Run one step; see :meth:`Pipeline.step`."""
        self._engine.finite.look()  # on all stages at once, because it may raise
        if train:
            self._engine.meter.step_begins()  # before the first forward, so that its all-gathers are counted
        self._failure = None
        self._forget()
        self._train, self._scaler = train, scaler
        self._outputs: list[Any] = []
        self._sum = torch.zeros((), device=self._engine.device)
        self._losses = 0
        self.peak = 0
        self._inputs.note(batch)
        for edge in self._edges:
            edge.begin()
        self._micros: list[Batch] = []
        with self._trying(None):
            self._micros = split_micro_batches(batch, self._schedule.micro_batches)
            if scaler is not None:  # create the scaler's tensors on the loss's device, on every rank
                scaler.scale(self._sum)
        try:
            self._follow(self._rows[train])
            some = self._agree()
        except CollectiveError as error:
            # If a stage raised on one data rank only, its peers wait in a collective: the stage's error is the cause.
            raise error from self._cause()
        finally:
            set_failure("")
        return self._mean_loss() if some else merge_micro_batches(self._outputs) if self._outputs else None

    def _follow(self, row: Sequence[StageAction]) -> None:
        """Run a row of the schedule.

        Leaving it early aborts the world: neighbours would take a tensor of the next step for one of this step.
        """
        try:
            for k, act in enumerate(row):
                self._expect(row[k : k + 2] if self._overlap else row[k : k + 1])
                with observe.span("pipeline", f"{act.kind} {act.stage} #{act.micro}", rank=self._mesh.world.rank):
                    self._acts[act.kind](act)
            for edge in self._edges:
                edge.end()
        except CollectiveError:
            raise
        except BaseException as error:
            self._mesh.world.abort(f"it has left pipeline.step: {type(error).__name__}: {error}")
            raise

    # -- acts ------------------------------------------------------------------------------------------------------

    def _expect(self, acts: Sequence[StageAction]) -> None:
        for act in acts:
            if act.kind == "F" and act.stage in self._before:
                self._before[act.stage].expect(act.micro)
            elif act.kind in {"B", "I"} and act.stage in self._behind:
                self._behind[act.stage].expect_back(act.micro)

    def _forward(self, act: StageAction) -> None:
        stage, micro = act.stage, act.micro
        before, behind = self._before.get(stage), self._behind.get(stage)
        inputs = StageOutputs(()) if before is None else before.take(micro)
        outputs: StageOutputs | None = None
        if inputs is not None and self._failure is None:
            with self._trying(act):
                outputs = self._compute(act, inputs)
                if self._train:
                    self._live[stage, micro] = (inputs.tensors, outputs.tensors)
                    self.peak = max(self.peak, len(self._live) + len(self._owed))
        if behind is not None:
            with self._trying(act):
                return behind.give(micro, outputs)
            behind.give(micro, None)  # send zeros instead of the refused outputs
        return None

    def _compute(self, act: StageAction, inputs: StageOutputs) -> StageOutputs:
        """Return the outputs to send to the next stage; of the last stage the loss, if there is one."""
        args, kwargs, target = self._micros[act.micro]
        if act.stage:
            args = (inputs.tensors[0] if inputs.bare else inputs.tensors,)
        with self._engine.passes.part(self._parts[act.stage]):
            output = self._model(act.stage, *args, **kwargs)
        if act.stage < self._last:
            return check_stage_outputs(f"{_describe_action(act)}: output", output)
        loss = self._loss(output, target)
        if loss is None:
            self._outputs.append(output)
            return StageOutputs(())
        self._sum += loss.detach()
        self._losses += 1
        if not self._train:
            return StageOutputs(())
        loss = loss / self._schedule.micro_batches
        return StageOutputs((loss if self._scaler is None else self._scaler.scale(loss),))

    def _loss(self, output: Any, target: tuple[Any, ...]) -> Tensor | None:
        """Return the loss of a micro-batch; None without a loss when not training."""
        loss: object
        if self._loss_fn is not None and (target or self._train):
            loss = self._loss_fn(output, *target)
        else:
            loss = getattr(output, "loss", None)
            if loss is None and not self._train:
                return None
            loss = output if loss is None else loss
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss.reshape(())
        raise ContractError(
            "pipeline.step: the loss",
            expected="a tensor of one element, from loss_fn, the model's output.loss, or the last stage itself",
            got=describe_value(loss),
            do="Give npuzero.pipeline(loss_fn=...) and step(target=...), or labels that the model knows.",
        )

    def _backward(self, act: StageAction) -> None:
        self._backward_inputs(act)
        self._backward_weights(act)

    def _backward_inputs(self, act: StageAction) -> None:
        """Compute the input gradients that the previous stage waits for; keep the rest of the backward for "W"."""
        key = stage, micro = act.stage, act.micro
        before, behind = self._before.get(stage), self._behind.get(stage)
        gradients = () if behind is None else behind.take_back(micro)
        returned: tuple[Tensor, ...] | None = None
        inputs, outputs = self._live.pop(key, ((), ()))
        # A failed stage still sends (zeros), because the previous stage's receive is posted. An "I" action without
        # input gradients, as on stage 0, puts off all of its backward to "W".
        if self._failure is None:
            with self._trying(act):
                wanting = [each for each in inputs if each.requires_grad]
                reached = [each for each in outputs if each.requires_grad]
                if reached and act.kind == "I" and wanting:
                    self._owed[key] = self._split(stage, reached, gradients, wanting)
                elif reached and act.kind == "I":
                    self._owed[key] = partial(self._differentiate, stage, reached, gradients)
                elif reached:
                    self._differentiate(stage, reached, gradients)
                returned = tuple(map(_gradient_or_zeros, wanting))
        if before is not None:
            before.give_back(micro, returned)

    def _backward_weights(self, act: StageAction) -> None:
        rest = self._owed.pop((act.stage, act.micro), None)
        if rest is not None and self._failure is None:
            with self._trying(act):
                rest()

    def _differentiate(self, stage: int, outputs: Sequence[Tensor], gradients: tuple[Tensor, ...]) -> None:
        with self._engine.passes.part(self._parts[stage]):
            torch.autograd.backward(outputs, gradients or None)

    def _split(
        self, stage: int, outputs: Sequence[Tensor], gradients: tuple[Tensor, ...], inputs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Compute the gradients of ``inputs`` alone where possible; return a function that computes the weight
        gradients.
        """
        passes, part = self._engine.passes, self._parts[stage]
        with passes.part(part):
            groups = input_gradients(outputs, gradients or None, inputs)
        if groups is None:
            self._differentiate(stage, outputs, gradients)
            return lambda: None

        def rest() -> None:
            with passes.unsharded(part):  # activation checkpointing re-runs a block from its middle
                found = weight_gradients(groups)
            passes.take_gradients(part, found)

        return rest

    # -- the end of a step -----------------------------------------------------------------------------------------

    def _trying(self, act: StageAction | None) -> _ErrorRecorder:
        return _ErrorRecorder(self, act)

    def fails(self, act: StageAction | None, error: Exception) -> None:
        """Record the first error of a step; ``act`` None: before the first action."""
        if self._failure is None:
            self._failure = ("the batch" if act is None else _describe_action(act), error)
            # Peers of this stage may wait in a collective that this rank never reaches: their error gives this cause.
            set_failure(self._cause_in_words())

    def _cause(self) -> Exception | None:
        return None if self._failure is None else self._failure[1]

    def _cause_in_words(self) -> str:
        assert self._failure is not None
        where, error = self._failure
        return f"{where}: {type(error).__name__}: {error}"

    def _forget(self) -> None:
        self._live.clear()
        self._owed.clear()

    def _agree(self) -> bool:
        """Raise on every rank if any rank failed or has a different batch; return whether there is a loss."""
        self._inputs.begin_vote()
        ballot = [self._failure is not None, self._losses, *self._inputs.ballot()]
        flags = torch.tensor(ballot, dtype=torch.float32)
        self._engine.mesh.communicator(AXES, HOST_CHANNEL).all_reduce(flags, tag="pipeline step").wait()
        failed, losses, *bits = flags.tolist()
        if not failed:
            if any(bits):
                self._forget()
                self._inputs.compare(self._mesh.world.exchange(self._inputs.said()), range(self._mesh.world.size))
            return bool(losses)
        self._forget()
        mine = self._failure
        said = self._mesh.world.exchange(mine and self._cause_in_words())
        rank, text = next((rank, text) for rank, text in enumerate(said) if text is not None)
        raise StateError(
            "pipeline.step",
            expected="every stage to run every micro-batch",
            got=f"on rank {rank}: {text}",
            do="Mend it there; every rank has raised this. Call zero_grad() to go on.",
            rank=rank,
        ) from self._cause()

    def _mean_loss(self) -> Tensor:
        """Return the mean loss over micro-batches and data ranks, on every rank."""
        counts = self._losses and self._mesh.index((TENSOR,)) == 0  # tensor ranks have the same loss: count it once
        scale = self._schedule.micro_batches * self._mesh.shape.data
        total = (self._sum / scale if counts else torch.zeros_like(self._sum)).view(1)
        self._engine.mesh.communicator(AXES, "control").all_reduce(total, tag="pipeline loss").wait()
        return total.view(())


class _ErrorRecorder(AbstractContextManager[None]):
    """Record an error of the block and go on, because other ranks wait for the actions that follow."""

    def __init__(self, runner: PipelineRunner, act: StageAction | None) -> None:
        self._runner = runner
        self._act = act

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, CollectiveError):
            return False
        self._runner.fails(self._act, error)
        return True


def agree_on_schedule(
    mesh: Mesh, arguments: dict[str, str], make: Callable[[], tuple[PipelineSchedule, StageDivision]]
) -> tuple[PipelineSchedule, StageDivision]:
    """Return the schedule and the division that all ranks agree on.

    Raises:
        ConfigError: on every rank: one cannot make them, or ranks differ in arguments or model.
    """
    problem: NpuZeroError | None = None
    made = None
    try:
        made = make()
    except NpuZeroError as error:
        problem = error
    said = mesh.world.exchange(
        {"problem": problem and str(problem), "mesh": repr(mesh), **arguments} | _describe_division(made), "pipeline"
    )
    # A rank's own error comes first, because it carries the parameter or stage at fault. The exchange runs on every
    # rank before any rank raises.
    if problem is not None:
        raise problem
    for rank, other in enumerate(said):
        subject = next((key for key in (*said[0], *other) if other.get(key) != said[0].get(key)), None)
        if subject is not None:
            failed = next((each["problem"] for each in said if each["problem"]), None)
            raise ConfigError(
                f"npuzero.pipeline(): {subject}",
                expected=f"the same on every rank, as on rank 0: {said[0].get(subject)}",
                got=f"on rank {rank}: {failed or other.get(subject)}",
                do="Build the same model with the same arguments on every rank.",
                rank=rank,
            )
    assert made is not None
    return made


def _describe_division(made: tuple[PipelineSchedule, StageDivision] | None) -> dict[str, str]:
    if made is None:
        return {}
    schedule, division = made
    return {
        "schedule": schedule.name,
        "micro_batches": str(schedule.micro_batches),
        "chunks": str(schedule.chunks),
        "stages": hashlib.sha256(repr(division.blocks).encode()).hexdigest()[:12],
    }


def _gradient_or_zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _describe_action(act: StageAction) -> str:
    return f"stage {act.stage}, {'forward' if act.kind == 'F' else 'backward'} of micro-batch #{act.micro}"


def _wrap_in_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
