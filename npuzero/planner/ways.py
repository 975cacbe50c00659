"""Changes that would make a job fit if nothing fits as asked: single changes first, then pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from npuzero.errors import ConfigError
from npuzero.plan import OFFLOADS, PRECISIONS, Memory, Precision, parse_precision
from npuzero.planner.hardware.cluster import Cluster
from npuzero.planner.model_work.job import TrainingJob
from npuzero.planner.search import Choices, find_first_fit, search_runs
from npuzero.planner.timing.estimate import Estimate

#: How often the number of devices may be doubled; and how many of these numbers to try once the devices together have
#: memory for the state, since more devices would help no further.
_DOUBLINGS, _ROOMY = 12, 3


@dataclass(frozen=True)
class WayOut:
    """Hold a change that makes a job fit.

    Attributes:
        what: description, such as ``"states on the host"``.
        estimate: the fastest run that then fits.
    """

    what: str
    estimate: Estimate


#: Description of a change, and the changed job and choices.
Change = tuple[str, TrainingJob, Choices]
Changes = Callable[[TrainingJob, Choices], Iterator[Change]]


def ways_out(job: TrainingJob, choices: Choices) -> Iterator[WayOut]:
    """Yield changes that make a job fit: the smallest of each kind; if no single change does, pairs of two kinds."""
    kinds: tuple[Changes, ...] = (
        _allow_recomputation, _smaller_micro_batches, _flash_attention, _more_devices, _lower_precisions,
            _offload_states, _more_sequence_ranks, _more_tensor_ranks
    )  # fmt: skip
    singles = [way for kind in kinds if (way := _find_first_change(kind(job, choices)))]
    yield from singles
    if singles:
        return
    for what, changed, among in list(_lower_precisions(job, choices))[-1:]:
        for kind in (_more_devices, _offload_states):
            way = _find_first_change((f"{what} and {more}", to, of) for more, to, of in kind(changed, among))
            if way is not None:
                yield way


def _find_first_change(changes: Iterator[tuple[str, TrainingJob, Choices]]) -> WayOut | None:
    """Return the first change that makes the job fit, with the fastest run under it."""
    for what, job, choices in changes:
        try:
            fit = find_first_fit(job, choices)
        except ConfigError:  # refused by the engine, or too few tokens for the ranks
            continue
        if fit is not None:
            best = search_runs(job, choices).fitting[0]
            return WayOut(what.format(plan=best.run.plan.name), best)
    return None


def _allow_recomputation(job: TrainingJob, choices: Choices) -> Iterator[Change]:
    """Yield recomputation, if the choices exclude it."""
    if True not in choices.recompute:
        yield "recomputation", job, replace(choices, recompute=(True,))


def _smaller_micro_batches(job: TrainingJob, choices: Choices) -> Iterator[Change]:
    """Yield smaller micro-batches, if the choices exclude them."""
    if choices.micro_batches is not None and min(choices.micro_batches) > 1:
        sizes = tuple(range(1, min(choices.micro_batches)))
        yield "a smaller micro-batch", job, replace(choices, micro_batches=sizes)


def _flash_attention(job: TrainingJob, choices: Choices) -> Iterator[Change]:
    """Yield flash attention, which keeps no scores, if the job uses another."""
    if job.attention != "flash":
        yield "flash attention", replace(job, attention="flash"), choices


def _more_devices(job: TrainingJob, choices: Choices) -> Iterator[Change]:
    """Yield clusters of the same kind with more devices."""
    cluster = job.cluster
    local = Cluster.named(cluster.name).local if cluster.name in Cluster.names() else cluster.local
    state = job.model.parameters * element_bytes(parse_precision(choices.precisions[0]))
    roomy = 0
    for doubling in range(1, _DOUBLINGS + 1):
        ranks = cluster.ranks * 2**doubling
        if state / ranks > cluster.device.memory_bytes:
            continue
        roomy += 1
        if roomy > _ROOMY:
            return
        try:
            larger = cluster.with_ranks(ranks, min(ranks, max(local, cluster.local)))
        except ConfigError:  # a node would be incomplete, or the link between nodes is unknown
            return
        yield f"{ranks:,} devices with {{plan}}", replace(job, cluster=larger), choices


def _lower_precisions(job: TrainingJob, choices: Choices) -> Iterator[Change]:
    """Yield precisions with a smaller state than the requested one, the largest first."""
    own = parse_precision(choices.precisions[0])
    # Not wider parameters: float32 ones may take less memory in total, but compute more slowly.
    wide = own.parameter_of(torch.float32).itemsize
    fewer = {
        name: element_bytes(each)
        for name, each in PRECISIONS.items()
        if element_bytes(each) < element_bytes(own) and each.parameter_of(torch.float32).itemsize <= wide
    }
    for name in sorted(fewer, key=lambda name: -fewer[name]):
        yield name, job, replace(choices, precisions=(name,))


def element_bytes(precision: Precision) -> float:
    """Return the bytes of training state per parameter element: parameter, gradient, master and two moments."""
    dtype = precision.parameter_of(torch.float32)
    block = 1024
    moments = 2 * precision.moment_bytes(block) / block
    return dtype.itemsize + precision.accumulation.itemsize + precision.master_bytes(dtype) + moments


def _offload_states(job: TrainingJob, choices: Choices) -> Iterator[Change]:
    """Yield the offloads that the cluster has links for."""
    words = {Memory.HOST: "on the host", Memory.NVME: "on NVMe"}
    links = {Memory.HOST: "host", Memory.NVME: "disk_read"}
    for offload, parts in OFFLOADS.items():
        if all(links[memory] in job.cluster.links for memory in parts.values()):
            what = " and ".join(sorted(parts, reverse=True))
            yield f"{what} {words[parts['states']]}", job, replace(choices, offloads=(offload,))


def _more_sequence_ranks(job: TrainingJob, choices: Choices) -> Iterator[Change]:
    """Yield more ranks per sequence, within a node."""
    for size in _sizes_within_node(job, choices.sequence):
        yield f"{size} ranks for each sequence", job, replace(choices, sequence=(size,))


def _more_tensor_ranks(job: TrainingJob, choices: Choices) -> Iterator[Change]:
    """Yield more tensor ranks, within a node."""
    for size in _sizes_within_node(job, choices.tensor):
        yield f"{size} tensor ranks", job, replace(choices, tensor=(size,))


def _sizes_within_node(job: TrainingJob, sizes: Sequence[int]) -> list[int]:
    return [2**power for power in range(job.cluster.local.bit_length()) if 2**power > max(sizes)]
