"""Which way to train is the fastest of those that fit: memory is looked at first, which is cheap, and then time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.plan import DATA, LOCAL, OFFLOADS, PRESETS, Level, MeshShape, Placement, Plan, PrecisionLike
from npuzero.planner.estimate import Estimate, Estimator
from npuzero.planner.models import ModelShape
from npuzero.planner.run import Job, Run

#: The part of a step's tokens that whole micro-batches may be more than was asked for.
_MORE = 0.1
#: Sequences of a micro-batch at most.
_LARGEST = 1024
#: Groups of ranks that are looked at beside those of a node: so many nodes together.
_NODES = (2, 4)


@dataclass(frozen=True)
class Choices:
    """Say among which ways to train a search chooses.

    Attributes:
        presets: names that :meth:`Plan.preset` takes; those that come to the same on these ranks are looked at once.
        precisions: names of :data:`PRECISIONS`, dtypes, or :class:`Precision`: these say in what is sent, too.
        offloads: what rests off the device beside each preset, as ``zero(offload=)`` has it; None: nothing.
        local_sizes: ranks in a group, for presets that shard within groups; None: a node's, and several nodes'.
        recompute: whether blocks compute their forward again in backward.
        micro_batches: sequences of a rank in one pass; None: powers of two, as many as fit.
        settings: of the engine.
        spare: the part of the device's memory that stays free: for what a prediction of activations misses, and what
            an allocator loses between tensors.
    """

    presets: tuple[str, ...] = PRESETS
    precisions: tuple[PrecisionLike, ...] = ("bf16",)
    offloads: tuple[str | None, ...] = (None,)
    local_sizes: tuple[int, ...] | None = None
    recompute: tuple[bool, ...] = (False, True)
    micro_batches: tuple[int, ...] | None = None
    settings: Settings = field(default_factory=Settings)
    spare: float = 0.05


#: What tells two plans apart on the same ranks, by :func:`alike`.
Key = tuple[object, ...]


def alike(plan: Plan, mesh: MeshShape) -> Key:
    """Return what plans have in common that place a state alike on these ranks, and send alike.

    Over an axis of one rank nothing is divided, and nothing travels.
    """
    within = {"after_forward": plan.held_after_forward, "between": plan.held_between}
    placements: tuple[Placement, ...] = tuple(
        replace(part, axes=tuple(mesh.sizes(part.axes))) for part in (plan.parts | within).values()
    )
    levels: tuple[Level, ...] = tuple(map(plan.precision.level_of, mesh.sizes(DATA)))
    gathers = plan.precision.gathers if mesh.size(plan.parameters.axes) > 1 else None
    facts = ("parameters", "plain_wire", "masters", "moments", "sums", "matmul")
    own = tuple(getattr(plan.precision, fact) for fact in facts)
    return placements, gathers, levels, own, plan.lag, mesh


def placements(job: Job, choices: Choices) -> list[tuple[Plan, MeshShape]]:
    """Return the plans that the engine can follow on the cluster, each with its mesh; of those that come to the same
    the first.

    Raises:
        ConfigError: the engine refuses all of them; or a name, a precision or a size that there is not.
    """
    found: dict[Key, tuple[Plan, MeshShape]] = {}
    refusal: ConfigError | None = None
    mesh = MeshShape(job.cluster.nodes, job.cluster.local)
    for plan in _plans(choices):
        for size in _groups(plan, mesh, choices):
            sized = replace(plan, local_size=size)
            try:
                shape = sized.mesh_shape(mesh)
            except ConfigError as error:
                refusal = error
                continue
            found.setdefault(alike(sized, shape), (sized, shape))
    if not found and refusal is not None:
        raise refusal
    return list(found.values())


def _plans(choices: Choices) -> Iterator[Plan]:
    """Yield each preset in each precision, with each part of it off the device that may be."""
    for precision in choices.precisions:
        for preset in choices.presets:
            plan = Plan.preset(preset, precision=precision)
            for offload in choices.offloads:
                if offload is None:
                    yield plan
                elif not any(part.far for part in plan.parts.values()):
                    with_parameters = "parameters" in OFFLOADS.get(offload, ())
                    if not with_parameters or plan.parameters.axes == plan.states.axes:
                        yield plan.offloaded(offload)


def _groups(plan: Plan, mesh: MeshShape, choices: Choices) -> Iterator[int | None]:
    """Yield the sizes of groups of ranks that make a difference to a plan; None: a node's."""
    if not any(part.axes == (LOCAL,) for part in plan.parts.values()):
        yield None
    elif choices.local_sizes is not None:
        yield from choices.local_sizes
    else:
        yield None
        yield from (mesh.local * nodes for nodes in _NODES if nodes < mesh.node and mesh.node % nodes == 0)


@dataclass(frozen=True)
class Found:
    """Hold what a search found.

    Attributes:
        fitting: the fastest run of each plan that fits, with and without recomputation, the fastest first.
        slower: runs that fit and were not timed, for what they compute alone takes longer than the fastest.
        misfits: of each plan that does not fit, the run that takes least; least first.
        looked, timed: of how many runs it was asked whether they fit, and how many were timed.
    """

    fitting: tuple[Estimate, ...]
    slower: tuple[Estimate, ...]
    misfits: tuple[Estimate, ...]
    looked: int
    timed: int


def search(job: Job, choices: Choices | None = None, every: bool = False) -> Found:
    """Return what fits, the fastest first, and what does not.

    Args:
        job: what is to be trained, where.
        choices: among which ways.
        every: time also what cannot be the fastest.

    Raises:
        ConfigError: names or sizes that there are not; or fewer tokens of a step than one sequence for each rank.
    """
    choices = Choices() if choices is None else choices
    estimator = Estimator(job)
    groups: list[list[Estimate]] = []
    misfits: list[Estimate] = []
    for plan, mesh in placements(job, choices):
        for recompute in choices.recompute:
            fits, least = _that_fit(plan, mesh, recompute, choices, estimator)
            if fits:
                groups.append(fits)
            else:
                misfits.append(least)
    fitting, slower = _timed(groups, estimator, every)
    fitting.sort(key=_seconds_a_token)
    misfits.sort(key=estimator.least_bytes)
    return Found(tuple(fitting), tuple(slower), tuple(misfits), estimator.looked, estimator.timed)


def _seconds_a_token(estimate: Estimate) -> float:
    return estimate.step_s / estimate.tokens


def _timed(
    groups: Sequence[Sequence[Estimate]], estimator: Estimator, every: bool
) -> tuple[list[Estimate], list[Estimate]]:
    """Return the fastest of each plan's runs, and those of plans that cannot be the fastest."""
    least = [min(estimator.least_s(each) / each.tokens for each in fits) for fits in groups]
    timed: dict[int, Estimate] = {}
    slower: list[Estimate] = []
    best = math.inf
    for i in sorted(range(len(groups)), key=least.__getitem__):
        if least[i] >= best and not every:
            slower.append(groups[i][-1])
            continue
        timed[i] = _fastest(groups[i], estimator)
        best = min(best, _seconds_a_token(timed[i]))
    return [timed[i] for i in sorted(timed)], slower  # of equally fast ones the first of the table comes first


def _that_fit(
    plan: Plan, mesh: MeshShape, recompute: bool, choices: Choices, estimator: Estimator
) -> tuple[list[Estimate], Estimate]:
    """Return the runs of a plan that fit, by size of their micro-batches, and the one that takes least."""
    fits: list[Estimate] = []
    for size, count in batches(estimator.job, mesh, choices.micro_batches):
        each = estimator.estimate(Run(plan, mesh, size, count, recompute, choices.settings))
        if not estimator.fits(each, choices.spare):  # and nor does a larger one
            return fits, each
        fits.append(each)
    return fits, fits[0]


def _fastest(fits: Sequence[Estimate], estimator: Estimator) -> Estimate:
    """Return the fastest of a plan's runs: from the largest micro-batch down, while that gains anything."""
    best = estimator.time(fits[-1])
    for each in fits[-2::-1]:
        smaller = estimator.time(each)
        if smaller.tokens_per_s <= best.tokens_per_s:
            break
        best = smaller
    return best


def batches(job: Job, mesh: MeshShape, sizes: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Return sizes of micro-batches, ascending, each with how many of them have the tokens of a step.

    Args:
        job, mesh: what says how many sequences each rank has in a step.
        sizes: which are meant; None: powers of two.

    Raises:
        ConfigError: a step has fewer tokens than one sequence for each rank.
    """
    sizes = [2**power for power in range(_LARGEST.bit_length())] if sizes is None else sorted(sizes)
    if job.tokens_per_step is None:
        return [(size, 1) for size in sizes]
    ranks = mesh.data
    asked = job.tokens_per_step / (job.sequence * ranks)
    whole = [(size, math.ceil(asked / size)) for size in sizes]
    found = [(size, count) for size, count in whole if size * count <= asked * (1 + _MORE)]
    if not found:
        raise ConfigError(
            "tokens_per_step",
            expected=f"micro-batches of {_words(sizes)} for each of {ranks} rank{'s' * (ranks > 1)}: "
            f"{sizes[0] * ranks * job.sequence:,} tokens or a multiple",
            got=f"{job.tokens_per_step:,}",
            do="Give more tokens, shorter sequences, or fewer devices.",
        )
    return found


def _words(sizes: Sequence[int]) -> str:
    return f"{sizes[0]} sequence{'s' * (sizes[0] > 1)}{' or more' * (len(sizes) > 1)}"


def first_fit(job: Job, choices: Choices) -> Estimate | None:
    """Return the first plan that fits with the smallest micro-batch, not timed; None where none does."""
    estimator = Estimator(job)
    for plan, mesh in placements(job, choices):
        size, count = batches(job, mesh, choices.micro_batches)[0]
        for recompute in choices.recompute:
            estimate = estimator.estimate(Run(plan, mesh, size, count, recompute, choices.settings))
            if estimator.fits(estimate, choices.spare):
                return estimate
    return None


def state_bytes(model: ModelShape, precision: PrecisionLike) -> int:
    """Return the bytes of a whole training state: parameters, gradients, masters and moments, on one rank alone."""
    report = model.predict(Plan.preset(PRESETS[0], precision=precision), 1, Settings())
    return sum(report.bytes_held[part] for part in ("parameters", "gradients", "states"))
