"""Published training runs and the clock's predictions: other systems' mechanisms as data, with the same arithmetic.

A table (``benchmarks/planning/tables``) holds published measurements and a description of the system: bytes of the
kernels of a layer other than matrix products, communication of tensor ranks, the reduction of gradients, the return of
parameters, and the pipeline's order. Durations come from the same functions as in the engine's own clock:
:mod:`npuzero.planner.hardware.rates`, :mod:`npuzero.planner.hardware.network`, :mod:`npuzero.planner.timing.lanes`.
Clusters are those of the package; none of their numbers is fitted to these tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from npuzero.config import check_keys, read_json
from npuzero.errors import ConfigError, did_you_mean
from npuzero.plan import DATA, ENDS, PIPE, TENSOR, MeshShape
from npuzero.planner.hardware.cluster import Cluster
from npuzero.planner.hardware.network import collective_s
from npuzero.planner.hardware.rates import elementwise_s, find_link_name, products_s
from npuzero.planner.timing import lanes

_FOLDER = Path(__file__).with_name("tables")
_ITEM = 2  # bytes per element of parameters, activations and gradients in all of these runs
_REDUCE, _RESTORE = "reduce", "restore"


@dataclass(frozen=True)
class TrainingSystem:
    """Describe the training mechanisms of a system.

    Attributes:
        name: of the system.
        matrices: of a feed-forward layer: 2, or 3 if it is gated.
        forward, backward: bytes per token that the element-wise kernels of a layer read and write, by the size they are
            proportional to. ``h``: the width; ``h/t``, ``inner/t``: a tensor rank's part; ``as/t``: scores.
        root_forward, root_backward: the same for everything outside the layers, by ``h`` and ``V/t``.
        dtype: of matrix products.
        tensor_forward, tensor_backward: number of blocking all_reduces of a layer's activations over tensor ranks.
        scores_backward: products of attention scores in backward per product in forward; flash attention has additional
            ones.
        accumulate: bytes per parameter read and written to add a micro-batch's gradient.
        update: bytes per owned parameter read and written by the update.
        reduced: bytes per parameter read and written to copy gradients into buckets and back.
        owners: parameters return by consecutive broadcasts, one from each rank that owns any: full tensors are assigned
            from the largest on, each to the rank with the least.
        matrices_owned, vectors_owned: tensors per layer, and outside the layers, for the number of owners.
        vector_hop_s: latency of a hop between nodes for messages as short as vectors.
        kernels: description of these kernels and of the sources of the mechanisms.
    """

    name: str
    matrices: int
    forward: Mapping[str, float]
    backward: Mapping[str, float]
    root_forward: Mapping[str, float]
    root_backward: Mapping[str, float]
    dtype: str
    tensor_forward: int
    tensor_backward: int
    scores_backward: float
    accumulate: float
    update: float
    reduced: float
    owners: bool = False
    matrices_owned: Sequence[int] = (0, 0)
    vectors_owned: Sequence[int] = (0, 0)
    vector_hop_s: float = 0.0
    kernels: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class PublishedRun:
    """Describe one published run.

    Attributes:
        name: within its table.
        published: the measured value, in the table's unit.
        hidden, heads, layers, inner, vocabulary, sequence: of the model.
        ranks, tensor, pipe, chunks: total devices; tensor and pipeline ranks; stages of each rank.
        micro_batch, micro_batches: sequences of a micro-batch, and micro-batches of a rank per step.
        recompute: layers recompute their forward in backward.
        overlapped: the reduction of gradients over data ranks overlaps with backward.
        bucket: elements reduced together.
        owned: ranks that share the states of a data-parallel group; 1: states are replicated.
        doubt: why it is not judged, for example a contradiction; "" if nothing is wrong with it.
    """

    name: str
    published: float
    hidden: int
    heads: int
    layers: int
    inner: int
    vocabulary: int
    sequence: int
    ranks: int
    tensor: int
    pipe: int
    chunks: int
    micro_batch: int
    micro_batches: int
    recompute: bool
    overlapped: bool
    bucket: int
    owned: int
    doubt: str = ""

    @property
    def data(self) -> int:
        return self.ranks // (self.tensor * self.pipe)

    @property
    def tokens(self) -> int:
        """Return the tokens per step of all ranks."""
        return self.data * self.micro_batches * self.micro_batch * self.sequence


@dataclass(frozen=True)
class PublishedTable:
    """Hold one table.

    Attributes:
        unit: ``"TFLOPS"`` per device, by the table's own count of FLOPs; or ``"tokens"`` per second and device.
        source: the publication.
        cluster: without its number of devices.
        rows: all rows, including doubtful ones.
        missing: unavailable rows, with reasons.
    """

    name: str
    unit: str
    source: str
    cluster: Cluster
    system: TrainingSystem
    rows: tuple[PublishedRun, ...]
    missing: Mapping[str, str]

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names of the stored tables."""
        return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))

    @classmethod
    def named(cls, name: str) -> PublishedTable:
        """Return a table by name.

        Raises:
            ConfigError: it does not exist; the error suggests the nearest name.

        Example::

            from benchmarks.planning.published import PublishedTable

            table = PublishedTable.named("narayanan2021")
            print([(row.name, row.published, table.predict(row)) for row in table.rows])
        """
        if name not in cls.names():
            known = ", ".join(cls.names())
            do = did_you_mean(name, cls.names(), "Name one of these.")
            raise ConfigError("published table", expected=f"one of {known}", got=repr(name), do=do)
        data = read_json(_FOLDER / f"{name}.json")
        check_keys(name, data, ("name", "unit", "source", "cluster", "system", "usual", "rows", "missing"))
        return cls(
            data["name"],
            data["unit"],
            data["source"],
            _adjust_cluster_links(data["cluster"]),
            TrainingSystem(**data["system"]),
            tuple(PublishedRun(**{**data["usual"], **row}) for row in data["rows"]),
            data["missing"],
        )

    @property
    def judged(self) -> tuple[PublishedRun, ...]:
        """Return the rows without doubts."""
        return tuple(row for row in self.rows if not row.doubt)

    def row(self, name: str) -> PublishedRun:
        """Return a row by name."""
        return next(row for row in self.rows if row.name == name)

    def predict(self, row: PublishedRun) -> float:
        """Return the clock's prediction of a row, in the table's unit."""
        step_s = self.step_s(row)
        if self.unit == "TFLOPS":
            return count_published_flops(row) / step_s / row.ranks / 1e12
        return row.tokens / step_s / row.ranks

    def errors(self) -> dict[str, float]:
        """Return the relative error of the clock by row, without doubtful rows."""
        return {row.name: self.predict(row) / row.published - 1 for row in self.judged}

    def calibrated(self, name: str) -> PublishedTable:
        """Return the table on a cluster with the sustained rate that makes the row ``name`` exact."""
        row, low, high = self.row(name), 0.1, 1.0
        for _ in range(40):
            sustained = (low + high) / 2
            table = self.sustaining(sustained)
            low, high = (sustained, high) if table.predict(row) < row.published else (low, sustained)
        return self.sustaining(low)

    def sustaining(self, sustained: float) -> PublishedTable:
        """Return the table on devices that sustain a different fraction of their peak."""
        device = replace(self.cluster.device, sustained=sustained)
        return replace(self, cluster=replace(self.cluster, device=device))

    def step_s(self, row: PublishedRun) -> float:
        """Return the seconds of a step."""
        return _RunTiming(self.system, row, self.cluster.with_ranks(row.ranks)).step_s()


def count_published_flops(row: PublishedRun) -> float:
    """Return the FLOPs of a step of all ranks as counted by Narayanan et al. (arXiv:2104.04473, equation 3).

    The factor is 96 with recomputation, 72 without.
    """
    times = 96 if row.recompute else 72
    h, s, layers = row.hidden, row.sequence, row.layers
    return times * row.tokens * layers * h * h * (1 + s / (6 * h) + row.vocabulary / (16 * layers * h))


def _adjust_cluster_links(data: Mapping[str, Any]) -> Cluster:
    cluster = Cluster.named(data["name"])
    for level, rate in data.get("links", {}).items():
        cluster = cluster.with_link(level, bytes_per_s=rate)
    return cluster


@dataclass(frozen=True)
class _RunTiming:
    """Time a step of a row."""

    system: TrainingSystem
    row: PublishedRun
    cluster: Cluster

    def step_s(self) -> float:
        """Return the seconds of a step: the slowest stage of a pipeline, and its waiting for other stages."""
        row = self.row
        stage = row.layers / row.pipe
        forward, backward = self._layer_s()
        around = sum(self._root_s())
        usual = stage * (forward + backward) + self._accumulate_s(stage)
        slowest = usual + around + self._exchange_s()
        begun = (row.pipe - 1) / row.chunks * (usual + self._exchange_s() / 2)
        last = row.micro_batches - 1
        return begun + last * slowest + self._last_s(stage, forward, backward)

    @property
    def mesh(self) -> MeshShape:
        row = self.row
        local = max(1, min(row.data, self.cluster.local // row.tensor))
        return MeshShape(row.data // local, local, tensor=row.tensor, pipe=row.pipe)

    @property
    def tokens(self) -> int:
        return self.row.micro_batch * self.row.sequence

    def _layer_s(self) -> tuple[float, float]:
        """Return the seconds of a layer's forward and backward of a micro-batch.

        With recomputation, backward includes a forward.
        """
        row, system = self.row, self.system
        h, t = row.hidden, row.tensor
        layers = self._products_s(2 * self.tokens * self._layer_numel())
        scores = self._products_s(4 * self.tokens * row.sequence * h / t)
        reduced = collective_s(self.cluster, self.mesh, "all_reduce", (TENSOR,), self.tokens * h * _ITEM)
        forward = layers + scores + self._elementwise_s(system.forward) + system.tensor_forward * reduced
        backward = 2 * layers + system.scores_backward * scores + self._elementwise_s(system.backward)
        backward += system.tensor_backward * reduced
        return forward, backward + row.recompute * forward

    def _root_s(self) -> tuple[float, float]:
        """Return the seconds of everything outside the layers, mainly the logits."""
        row, system = self.row, self.system
        products = self._products_s(2 * row.hidden * row.vocabulary / row.tensor * self.tokens)
        reduced = collective_s(self.cluster, self.mesh, "all_reduce", (TENSOR,), self.tokens * row.hidden * _ITEM)
        return (
            products + self._elementwise_s(system.root_forward) + reduced,
            2 * products + self._elementwise_s(system.root_backward) + reduced,
        )

    def _products_s(self, flops: float) -> float:
        return products_s(self.cluster.device, flops, self.system.dtype, self.tokens)

    def _elementwise_s(self, kernels: Mapping[str, float]) -> float:
        row = self.row
        sizes = {
            "h": row.hidden,
            "h/t": row.hidden / row.tensor,
            "inner/t": row.inner / row.tensor,
            "as/t": row.heads * row.sequence / row.tensor,
            "V/t": row.vocabulary / row.tensor,
        }
        nbytes = sum(each * sizes[size] for size, each in kernels.items())
        return elementwise_s(self.cluster.device, nbytes * self.tokens, self.system.dtype)

    def _layer_numel(self) -> float:
        row = self.row
        return (4 * row.hidden**2 + self.system.matrices * row.hidden * row.inner) / row.tensor

    def _root_numel(self) -> float:
        """Return the most parameters outside the layers on any rank: in a pipeline one embedding."""
        row = self.row
        tied = self.system.matrices == 2 or row.pipe > 1
        return (1 if tied else 2) * row.vocabulary * row.hidden / row.tensor

    def _accumulate_s(self, layers: float) -> float:
        numel = layers * self._layer_numel() + self._root_numel()
        return elementwise_s(self.cluster.device, self.system.accumulate * numel)

    def _exchange_s(self) -> float:
        """Return a micro-batch's waiting time for adjacent stages.

        Per chunk, activations are received while others are sent, then gradients; each rank of a node sends its part,
        and the parts are all-gathered.
        """
        row = self.row
        if row.pipe == 1:
            return 0.0
        nbytes = self.tokens * row.hidden * _ITEM
        sent = collective_s(self.cluster, self.mesh, "send", (PIPE,), nbytes // row.tensor)
        whole = collective_s(self.cluster, self.mesh, "all_gather", (TENSOR,), nbytes)
        return 2 * row.chunks * (sent + whole)

    def _last_s(self, stage: float, forward: float, backward: float) -> float:
        """Return the seconds of the last micro-batch and the update; gradients are reduced during or after backward."""
        layers = max(1, round(stage))
        scale = stage / layers
        root_forward, root_backward = self._root_s()
        acts = [((root_forward, 0.0), (root_backward, 0.0))]
        acts += [((scale * forward, 0.0), (scale * backward, 0.0))] * layers
        player = lanes.ProgramPlayer(acts, self.cluster.contention)
        player.play(list(self._steps(layers, scale)))
        return player.now

    def _steps(self, layers: int, scale: float) -> Iterator[lanes.Step]:
        row, system, device = self.row, self.system, self.cluster.device
        units = range(1, layers + 1)
        yield from (lanes.UnitPass(unit, False) for unit in (*units, 0))
        yield lanes.DeviceWork("exchange", self._exchange_s())
        sizes = [self._root_numel(), *[scale * self._layer_numel()] * layers]
        # The embedding's gradient is last, the head's first: the bucket of both is full with the last layer's.
        order, filled, started = (0, *reversed(units)), 0.0, 0
        late: list[lanes.Step] = []
        for unit in order:
            yield lanes.UnitPass(unit, True)
            filled += sizes[unit]
            while filled >= row.bucket or (unit == 1 and filled > 0):
                numel = min(filled, row.bucket)
                filled -= numel
                started += 1
                send = self._send(_REDUCE, "all_reduce", numel)
                if row.overlapped:
                    yield send
                else:
                    late.append(send)
        total = sum(sizes)
        yield lanes.DeviceWork("accumulate", elementwise_s(device, (system.accumulate + system.reduced) * total))
        yield from late
        if row.pipe > 1:  # the embedding is shared with the head
            seconds = collective_s(self.cluster, self.mesh, "all_reduce", (ENDS,), int(self._root_numel()) * _ITEM)
            yield lanes.DeviceWork("tied", seconds)
        yield lanes.AwaitCollectives(_REDUCE, started, _REDUCE, 0)
        yield lanes.DeviceWork("update", elementwise_s(device, system.update * total / row.owned))
        if system.owners and row.owned > 1:
            yield from self._broadcasts(total)

    def _send(self, key: str, verb: str, numel: float) -> lanes.LaneCollective:
        seconds = collective_s(self.cluster, self.mesh, verb, DATA, int(numel) * _ITEM)
        return lanes.LaneCollective(key, find_link_name(self.cluster, self.mesh, DATA), key, seconds, 1, key, 0)

    def _broadcasts(self, numel: float) -> Iterator[lanes.Step]:
        """Yield a broadcast from each rank that owns parameters."""
        row, system = self.row, self.system
        local = min(row.owned, self.mesh.local)
        mesh = replace(self.mesh, local=local, node=row.owned // local, pod=row.data // row.owned)
        matrices, vectors = (
            each * row.layers + around for each, around in (system.matrices_owned, system.vectors_owned)
        )
        owners = min(row.owned, matrices)
        axes = ("node", "local")
        seconds = owners * collective_s(self.cluster, mesh, "broadcast", axes, int(numel / owners) * _ITEM)
        short = min(row.owned - owners, vectors)  # ranks without a matrix
        if short and mesh.node > 1:
            quick = self.cluster.with_link("node", latency_s=system.vector_hop_s)
            seconds += short * collective_s(quick, mesh, "broadcast", axes, row.hidden * _ITEM)
        link = find_link_name(self.cluster, mesh, axes)
        yield lanes.LaneCollective(_RESTORE, link, _RESTORE, seconds, owners + short, _RESTORE, 0)
        yield lanes.AwaitCollectives(_RESTORE, owners + short, _RESTORE, 0)


def count_ordered_pairs(errors: Sequence[tuple[float, float]], apart: float = 0.05) -> tuple[int, int]:
    """Return how many pairs that differ by more than ``apart`` are in the right order, and their number.

    Args:
        errors: published and predicted value of each row.
    """
    right = count = 0
    for i, (published, predicted) in enumerate(errors):
        for other, said in errors[:i]:
            if abs(published - other) > apart * max(published, other):
                count += 1
                right += (published > other) == (predicted > said)
    return right, count
