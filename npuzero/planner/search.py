"""Search for the fastest way to train that fits: check memory first, which is cheap, then time the runs that fit."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.parallel.tensor_parallel.api import MODES
from npuzero.plan import DATA, LOCAL, OFFLOADS, PRESETS, SEQUENCED, MeshShape, Placement, Plan, PrecisionLike, WireLevel
from npuzero.planner.hardware.cluster import Cluster
from npuzero.planner.model_work.axes import LayerTraffic, arrange_mesh, divide_model_shape, slowest_stage_shape
from npuzero.planner.model_work.job import TrainingJob, TrainingRun
from npuzero.planner.model_work.stages import StagedModel
from npuzero.planner.models import ModelShape
from npuzero.planner.timing.estimate import Estimate, Estimator, count_sequence_groups, count_step_tokens

#: Fraction by which full micro-batches may exceed the requested tokens of a step.
_MORE = 0.1
#: Largest number of sequences in a micro-batch.
_LARGEST = 1024
#: Groups of several nodes that are tried in addition to single nodes: numbers of nodes.
_NODES = (2, 4)


@dataclass(frozen=True)
class Choices:
    """Hold the options that a search chooses from.

    Attributes:
        presets: names for :meth:`Plan.preset`; presets that are equivalent on these ranks are tried once.
        precisions: names of :data:`PRECISIONS`, dtypes, or :class:`Precision`, which also sets communication dtypes.
        offloads: values of ``zero(offload=)`` to try with each preset; None: no offload.
        local_sizes: ranks in a group, for presets that shard within groups; None: one node, and several nodes.
        recompute: whether blocks recompute their forward in backward.
        micro_batches: sequences per rank in one pass; None: powers of two, as many as fit.
        tensor, sequence, pipe: ranks along these axes, in all combinations; (1,): the axis is not used.
        mode: mode of :func:`npuzero.parallel.tensor`.
        settings: settings of the engine.
        spare: fraction of device memory that must stay free: for activations that the prediction misses and for
            fragmentation of the allocator.
    """

    presets: tuple[str, ...] = PRESETS
    precisions: tuple[PrecisionLike, ...] = ("bf16",)
    offloads: tuple[str | None, ...] = (None,)
    local_sizes: tuple[int, ...] | None = None
    recompute: tuple[bool, ...] = (False, True)
    micro_batches: tuple[int, ...] | None = None
    tensor: tuple[int, ...] = (1,)
    sequence: tuple[int, ...] = (1,)
    pipe: tuple[int, ...] = (1,)
    mode: str = "mtp"
    settings: Settings = field(default_factory=Settings)
    spare: float = 0.05


#: Identifies equivalent plans on the same ranks; made by :func:`make_equivalence_key`.
Key = tuple[object, ...]


def make_equivalence_key(plan: Plan, mesh: MeshShape) -> Key:
    """Return a key that is equal for plans with the same placements and the same communication on these ranks.

    Axes of one rank are left out: nothing is divided over them, and nothing is sent.
    """
    within = {"after_forward": plan.held_after_forward, "between": plan.held_between}
    placements: tuple[Placement, ...] = tuple(
        replace(part, axes=tuple(mesh.sizes(part.axes))) for part in (plan.parts | within).values()
    )
    levels: tuple[WireLevel, ...] = tuple(map(plan.precision.level_of, mesh.sizes(DATA)))
    gathers = plan.precision.gathers if mesh.size(plan.parameters.axes) > 1 else None
    facts = ("parameters", "plain_wire", "masters", "moments", "sums", "matmul")
    own = tuple(getattr(plan.precision, fact) for fact in facts)
    return placements, gathers, levels, own, plan.lag, mesh


def choices_over_axes(cluster: Cluster, choices: Choices) -> Choices:
    """Return the choices with all power-of-two sizes of the tensor, sequence and pipe axes.

    Tensor and sequence ranks stay within a node, since each layer waits for their traffic; stages may use all ranks.
    """
    within, over = ([2**power for power in range(size.bit_length())] for size in (cluster.local, cluster.ranks))
    return replace(choices, tensor=tuple(within), sequence=tuple(within), pipe=tuple(over))


def list_mesh_shapes(job: TrainingJob, choices: Choices) -> list[tuple[MeshShape, TrainingJob]]:
    """Return the possible meshes for the chosen axis sizes, each with the job and its model divided accordingly.

    Raises:
        ConfigError: no mesh is possible; the error of the first one.
    """
    found: list[tuple[MeshShape, TrainingJob]] = []
    models: dict[int, ModelShape] = {}
    refusal: ConfigError | None = None
    sizes = itertools.product(choices.tensor, choices.sequence, choices.pipe)
    for tensor, sequence, pipe in sizes:
        try:
            mesh = arrange_mesh(job.cluster.ranks, job.cluster.local, tensor=tensor, sequence=sequence, pipe=pipe)
            if tensor not in models:
                models[tensor] = divide_model_shape(job.model, tensor, choices.mode)
            _check_sequence_slices(job, tensor if MODES[choices.mode].sliced else 1, sequence)
            LayerTraffic.of(models[tensor], mesh)
            if slowest_stage_shape(models[tensor], pipe) is not models[tensor]:
                StagedModel.of(models[tensor], pipe, tensor=tensor)
            list_micro_batches(job, mesh, choices.micro_batches)
            list_plan_placements(job, choices, mesh)
        except ConfigError as error:
            refusal = refusal or error
            continue
        found.append((mesh, replace(job, model=models[tensor])))
    if not found and refusal is not None:
        raise refusal
    return found


def _check_sequence_slices(job: TrainingJob, tensor: int, sequence: int) -> None:
    """Check that all slices of a sequence are equally long."""
    if job.sequence % (tensor * sequence):
        raise ConfigError(
            "seq",
            expected=f"a multiple of {tensor * sequence}, of the ranks that have slices of a sequence",
            got=str(job.sequence),
            do="Pad sequences, or take fewer ranks for each.",
        )


def list_plan_placements(
    job: TrainingJob, choices: Choices, mesh: MeshShape | None = None
) -> list[tuple[Plan, MeshShape]]:
    """Return the distinct plans that the engine supports on the cluster, each with its mesh.

    Of equivalent plans only the first is returned.

    Args:
        mesh: sizes of the axes; None: the cluster's, with ZeRO's axes only.

    Raises:
        ConfigError: the engine refuses all plans; or a name, precision or size is unknown.
    """
    found: dict[Key, tuple[Plan, MeshShape]] = {}
    refusal: ConfigError | None = None
    mesh = MeshShape(job.cluster.nodes, job.cluster.local) if mesh is None else mesh
    for plan in _iter_preset_plans(choices, mesh.sequence > 1):
        for size in _iter_group_sizes(plan, mesh, choices):
            sized = replace(plan, local_size=size)
            try:
                shape = sized.mesh_shape(mesh)
            except ConfigError as error:
                refusal = error
                continue
            found.setdefault(make_equivalence_key(sized, shape), (sized, shape))
    if not found and refusal is not None:
        raise refusal
    return list(found.values())


def _iter_preset_plans(choices: Choices, sequenced: bool = False) -> Iterator[Plan]:
    """Yield each preset in each precision, with each allowed offload.

    Args:
        sequenced: whether ranks share sequences; adds the presets for that.
    """
    presets = (*choices.presets, *SEQUENCED * (sequenced and choices.presets == PRESETS))
    for precision in choices.precisions:
        for preset in presets:
            plan = Plan.preset(preset, precision=precision)
            for offload in choices.offloads:
                if offload is None:
                    yield plan
                elif not any(part.far for part in plan.parts.values()):
                    with_parameters = "parameters" in OFFLOADS.get(offload, ())
                    if not with_parameters or plan.parameters.axes == plan.states.axes:
                        yield plan.offloaded(offload)


def _iter_group_sizes(plan: Plan, mesh: MeshShape, choices: Choices) -> Iterator[int | None]:
    """Yield the group sizes that make a difference to a plan; None: a node."""
    if not any(part.axes == (LOCAL,) for part in plan.parts.values()):
        yield None
    elif choices.local_sizes is not None:
        yield from choices.local_sizes
    else:
        yield None
        yield from (mesh.local * nodes for nodes in _NODES if nodes < mesh.node and mesh.node % nodes == 0)


@dataclass(frozen=True)
class SearchResult:
    """Hold the results of a search.

    Attributes:
        fitting: the fastest run of each plan that fits, with and without recomputation; the fastest first.
        slower: runs that fit but were not timed, since their lower bound of time exceeds the fastest run. Runs
            with tensor, sequence or pipe ranks are not listed here.
        misfits: for each plan that does not fit, its run with the least memory; least first. If any run fits, only
            plans without tensor, sequence and pipe ranks.
        looked, timed: number of runs checked for memory, and number of runs timed.
    """

    fitting: tuple[Estimate, ...]
    slower: tuple[Estimate, ...]
    misfits: tuple[Estimate, ...]
    looked: int
    timed: int


def search_runs(
    job: TrainingJob,
    choices: Choices | None = None,
    every: bool = False,
    tell: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """Return the runs that fit, the fastest first, and the runs that do not.

    Args:
        job: model, cluster and batch.
        choices: options to choose from.
        every: also time runs that cannot be the fastest.
        tell: progress callback, called with the plans done and the plans in total.

    Raises:
        ConfigError: unknown names or sizes; or a step with fewer tokens than one sequence per rank.
    """
    choices = Choices() if choices is None else choices
    looking = _RunSearch(choices, every)
    with _pause_garbage_collection():
        for mesh, divided_job in list_mesh_shapes(job, choices):
            looking.add(mesh, divided_job)
        return looking.found(tell or (lambda done, ways: None))


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Disable Python's cyclic garbage collector: a search makes no cycles, and one collection over all of torch's
    objects takes as long as about ten plans.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _RunSearch:
    """Try runs in order of their lower bound of time.

    Runs that cannot be the fastest are not timed; with tensor, sequence or pipe ranks they are not even checked.
    """

    def __init__(self, choices: Choices, every: bool) -> None:
        self._choices = choices
        self._every = every
        self._estimators: dict[ModelShape, Estimator] = {}
        self._ways: list[_PlanRuns] = []

    def add(self, mesh: MeshShape, job: TrainingJob) -> None:
        """Add all plans for a mesh, without and with recomputation."""
        estimator = self._estimators.setdefault(job.model, Estimator(job))
        sizes = list_micro_batches(job, mesh, self._choices.micro_batches)
        for plan, placed, recompute in _iter_plan_variants(job, self._choices, mesh):
            runs = [TrainingRun(plan, placed, size, count, recompute, self._choices.settings) for size, count in sizes]
            least = min(estimator.least_s(run) / count_step_tokens(job, run) for run in runs)
            self._ways.append(_PlanRuns(estimator, runs, least))

    def found(self, tell: Callable[[int, int], None]) -> SearchResult:
        """Check and time all added plans, and return the result."""
        fitting: dict[int, Estimate] = {}
        slower: list[Estimate] = []
        misfits: list[tuple[float, bool, Estimate]] = []
        best = math.inf
        order = sorted(range(len(self._ways)), key=lambda i: (self._ways[i].divided, self._ways[i].least))
        for done, i in enumerate(order):
            tell(done, len(order))
            way = self._ways[i]
            # ``least`` is a lower bound of time: above the best time so far, a run cannot be the fastest.
            beaten = way.least >= best and not self._every
            if beaten and way.divided:
                continue
            fits, least = way.that_fit(self._choices.spare)
            if not fits:
                misfits.append((way.estimator.least_bytes(least), way.divided, least))
            elif beaten:
                slower.append(fits[-1])
            else:
                fitting[i] = _find_fastest_run(fits, way.estimator)
                best = min(best, _seconds_a_token(fitting[i]))
        # Stable sort in the order of addition: of equally fast runs the first preset of the table wins.
        fastest = sorted((fitting[i] for i in sorted(fitting)), key=_seconds_a_token)
        misfits.sort(key=lambda each: each[0])
        told = tuple(each for _, divided, each in misfits if not (divided and fastest))
        looked, timed = (sum(getattr(e, what) for e in self._estimators.values()) for what in ("looked", "timed"))
        return SearchResult(tuple(fastest), tuple(slower), told, looked, timed)


@dataclass(frozen=True)
class _PlanRuns:
    """Hold the runs of a plan by size of their micro-batches, ascending.

    Attributes:
        least: lower bound of the seconds per token of all these runs.
    """

    estimator: Estimator
    runs: Sequence[TrainingRun]
    least: float

    @property
    def divided(self) -> bool:
        """Tell whether there are tensor, sequence or pipe ranks."""
        mesh = self.runs[0].mesh
        return mesh.tensor * mesh.sequence * mesh.pipe > 1

    def that_fit(self, spare: float) -> tuple[list[Estimate], Estimate]:
        """Return the runs that fit, and the run with the least memory."""
        fits: list[Estimate] = []
        for run in self.runs:
            each = self.estimator.as_trained(self.estimator.estimate(run), spare)
            if not self.estimator.fits(each, spare):  # larger micro-batches do not fit either
                return fits, each
            fits.append(each)
        return fits, fits[0]


def _seconds_a_token(estimate: Estimate) -> float:
    return estimate.step_s / estimate.tokens


def _iter_plan_variants(job: TrainingJob, choices: Choices, mesh: MeshShape) -> Iterator[tuple[Plan, MeshShape, bool]]:
    """Yield each plan for a mesh, without and with recomputation."""
    for plan, placed in list_plan_placements(job, choices, mesh):
        for recompute in choices.recompute:
            yield plan, placed, recompute


def _find_fastest_run(fits: Sequence[Estimate], estimator: Estimator) -> Estimate:
    """Return the fastest of a plan's runs: from the largest micro-batch down, while tokens per second increase."""
    best = estimator.time(fits[-1])
    for each in fits[-2::-1]:
        smaller = estimator.time(each)
        if smaller.tokens_per_s <= best.tokens_per_s:
            break
        best = smaller
    return best


def list_micro_batches(job: TrainingJob, mesh: MeshShape, sizes: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Return sizes of micro-batches, ascending, each with their number in a step.

    Args:
        job, mesh: give the sequences of each rank in a step.
        sizes: sizes to choose from; None: powers of two.

    Raises:
        ConfigError: a step has fewer tokens than one sequence per rank.
    """
    sizes = [2**power for power in range(_LARGEST.bit_length())] if sizes is None else sorted(sizes)
    if job.tokens_per_step is None:
        return [(size, 1) for size in sizes]
    ranks = count_sequence_groups(mesh)
    asked = job.tokens_per_step / (job.sequence * ranks)
    whole = [(size, math.ceil(asked / size)) for size in sizes]
    found = [(size, count) for size, count in whole if size * count <= asked * (1 + _MORE)]
    if not found:
        raise ConfigError(
            "tokens_per_step",
            expected=f"micro-batches of {_format_sequence_counts(sizes)} for each of {ranks} rank{'s' * (ranks > 1)}: "
            f"{sizes[0] * ranks * job.sequence:,} tokens or a multiple",
            got=f"{job.tokens_per_step:,}",
            do="Give more tokens, shorter sequences, or fewer devices.",
        )
    return found


def _format_sequence_counts(sizes: Sequence[int]) -> str:
    return f"{sizes[0]} sequence{'s' * (sizes[0] > 1)}{' or more' * (len(sizes) > 1)}"


def find_first_fit(job: TrainingJob, choices: Choices) -> Estimate | None:
    """Return the first plan that fits with the smallest micro-batch, not timed; None if none fits."""
    for mesh, divided_job in list_mesh_shapes(job, choices):
        estimator = Estimator(divided_job)
        for plan, placed, recompute in _iter_plan_variants(divided_job, choices, mesh):
            size, count = list_micro_batches(divided_job, placed, choices.micro_batches)[0]
            run = TrainingRun(plan, placed, size, count, recompute, choices.settings)
            estimate = estimator.as_trained(estimator.estimate(run), choices.spare)
            if estimator.fits(estimate, choices.spare):
                return estimate
    return None


def state_bytes(model: ModelShape, precision: PrecisionLike) -> int:
    """Return the bytes of an unsharded training state: parameters, gradients, masters and moments."""
    report = model.predict(Plan.preset(PRESETS[0], precision=precision), 1, Settings())
    return sum(report.bytes_held[part] for part in ("parameters", "gradients", "states"))
