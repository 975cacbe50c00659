"""THE TABLE: where each part of a training state rests, and what follows from it by arithmetic.

A training state (parameters, gradients, optimizer states) is described by three facts: over which mesh axes it is
cut and in which memory it rests (a :class:`Placement` each), and in which dtype it is kept (one :class:`Precision`).
ZeRO-0/1/2/3 (Rajbhandari et al., 2020), ZeRO-1.5
(InternEvo), HSDP and MiCS, hpZ (ZeRO++, Wang et al., 2023) are values of this one table. A stage number appears in
:meth:`Plan.preset` and nowhere else.

With D = all data axes a step is four rules; each is the identity where its tuple is empty:

====  ==========================================  ==================================================================
rule  when                                        what
====  ==========================================  ==================================================================
R1    before a unit computes                      all_gather over ``parameters.axes`` (in backward: ``held.axes``)
R2    after a micro-batch's backward              reduce_scatter over ``gradients.axes``, add into the accumulator
R3    at the step boundary                        reduce_scatter over states - gradients, all_reduce over D - states
R4    after the update                            all_gather over states - parameters
====  ==========================================  ==================================================================

This module is pure data and arithmetic: it knows no process group, no module and no device.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from npuzero.errors import ConfigError

NODE, LOCAL = "node", "local"
#: The data axes of a mesh in rank order: global rank = node * local_size + local.
AXES = (NODE, LOCAL)

Axes = tuple[str, ...]

#: Shards start and end on multiples of this, since misaligned collectives are many times slower (pytorch#195450).
SHARD_BYTES = 512
#: Numbers that each step's vote carries beside those of the parameters, a bit each, so that ranks find out where they
#: follow different rules.
DIGEST_BITS = 32
#: Each parameter starts on a multiple of this many elements: 16 bytes even on an 8-bit wire.
START_ELEMENTS = 16


class Memory(enum.Enum):
    """Where bytes rest."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True)
class Placement:
    """Where one part of the training state is kept.

    Attributes:
        axes: mesh axes it is cut over, outermost first; ``()`` means whole on each rank.
        memory: where it rests.
    """

    axes: Axes = ()
    memory: Memory = Memory.DEVICE


#: Dtypes of parameters and wires, by the names people give them.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Bytes an element of the masters takes beside a low-precision parameter: the whole of it; the lower half, of which the
#: bfloat16 parameter is the upper; nothing, where the parameter is all there is and is rounded stochastically.
MASTERS = {"fp32": 4, "split": 2, "none": 0}
#: Bytes an element of a moment takes; int8 has a byte beside each :data:`MOMENT_BLOCK` elements: their exponent.
MOMENTS = {"fp32": 4, "bf16": 2, "int8": 1}
#: Elements of a flat that share an exponent. Every shard starts and ends on a multiple, so no cut goes through a block.
MOMENT_BLOCK = 64
#: How float32 matrix products are computed: as written, or with inputs rounded to TF32 (on an NPU: HF32).
MATMULS = ("ieee", "tf32")
#: In which dtype finished sums of gradients travel, where a plan has several ranks keep the same states.
SUMS = ("fp32", "wire")


@dataclass(frozen=True)
class Precision:
    """In which dtype each part of the training state is kept, sent and computed.

    Attributes:
        parameters: what they are converted to, and with them the root's floating inputs; None: each keeps its own.
        wires: in which gradients travel; None: the parameters'. Parameters travel as they are.
        accumulation: in which gradients are summed: over ranks and over micro-batches.
        masters: beside parameters that are not float32: ``"fp32"``; ``"split"``, the lower half only, with the same
            results; ``"none"``, the parameters themselves, rounded stochastically.
        moments: the optimizer's: ``"fp32"``, ``"bf16"``, or ``"int8"`` with an exponent for each block.
        matmul: float32 matrix products: ``"ieee"``, or ``"tf32"`` where the device has them (on an NPU: HF32).
        sums: in which finished sums of gradients travel to the ranks that keep the same states (R3's all_reduce):
            ``"fp32"``, or ``"wire"``, rounded to the dtype of the wires. Where states are cut over all ranks none does.

    Raises:
        ConfigError: a value that is none of these, or several that make no sense together.
    """

    parameters: torch.dtype | None = None
    wires: torch.dtype | None = None
    accumulation: torch.dtype = torch.float32
    masters: str = "fp32"
    moments: str = "fp32"
    matmul: str = "ieee"
    sums: str = "fp32"

    def __post_init__(self) -> None:
        dtypes = (None, *DTYPES.values())
        allowed: dict[str, Sequence[object]] = {
            "parameters": dtypes,
            "wires": dtypes,
            "accumulation": (torch.float32,),
            "masters": tuple(MASTERS),
            "moments": tuple(MOMENTS),
            "matmul": MATMULS,
            "sums": SUMS,
        }
        for name, values in allowed.items():
            value: object = getattr(self, name)
            if type(value) not in map(type, values) or value not in values:
                raise ConfigError(
                    f"precision.{name}",
                    expected=f"one of {', '.join(map(str, values))}",
                    got=repr(value),
                    do="Choose among these, or leave it out.",
                )
        if self.masters != "fp32" and self.parameters is not torch.bfloat16:
            raise ConfigError(
                f"precision.masters={self.masters!r}",
                expected="parameters=torch.bfloat16: only a bfloat16 is the upper half of a float32",
                got=f"parameters={self.parameters}",
                do="Convert the parameters to bfloat16, or keep masters='fp32'.",
            )
        if self.wires is torch.float16 and self.parameters is not torch.float16:
            raise ConfigError(
                "precision.wires=torch.float16",
                expected="float16 parameters, whose gradients a loss scale keeps in range",
                got=f"parameters={self.parameters}",
                do="Let gradients travel in bfloat16 or float32.",
            )

    def parameter_of(self, own: torch.dtype) -> torch.dtype:
        """The dtype of a parameter that came in ``own``."""
        return self.parameters or own

    def wire_of(self, parameter: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of parameters of dtype ``parameter`` travel."""
        return self.wires or parameter

    def sums_of(self, parameter: torch.dtype) -> torch.dtype:
        """The dtype in which finished sums of gradients of such parameters travel."""
        return self.wire_of(parameter) if self.sums == "wire" else self.accumulation

    @property
    def start_elements(self) -> int:
        """Each parameter starts on a multiple of this many elements of its flat: where blocks are, with one."""
        return MOMENT_BLOCK if self.moments == "int8" else START_ELEMENTS

    def master_bytes(self, parameter: torch.dtype) -> int:
        """Bytes an element of the masters takes beside a parameter of this dtype."""
        return 0 if parameter == torch.float32 else MASTERS[self.masters]

    def moment_bytes(self, numel: int) -> int:
        """Bytes of one moment of ``numel`` elements, whole blocks of them."""
        exponents = numel // MOMENT_BLOCK if self.moments == "int8" else 0
        return MOMENTS[self.moments] * numel + exponents


#: Names that :func:`parse_precision` takes.
PRECISIONS = {
    "fp32": Precision(torch.float32),
    "tf32": Precision(torch.float32, matmul="tf32"),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
    "bf16-split": Precision(torch.bfloat16, masters="split"),
    "bf16-stochastic": Precision(torch.bfloat16, masters="none"),
    "bf16-8bit": Precision(torch.bfloat16, masters="split", moments="int8"),
}

PrecisionLike = Precision | str | torch.dtype | None


def parse_precision(precision: PrecisionLike) -> Precision:
    """The Precision that a name of :data:`PRECISIONS` or a dtype of the parameters stands for; None: as they are.

    Raises:
        ConfigError: none of these.
    """
    if isinstance(precision, Precision):
        return precision
    if precision is None or (isinstance(precision, torch.dtype) and precision in DTYPES.values()):
        return Precision(precision)
    if isinstance(precision, str) and precision in PRECISIONS:
        return PRECISIONS[precision]
    raise ConfigError(
        "precision",
        expected=f"one of {', '.join(PRECISIONS)}, a Precision, or a dtype: {', '.join(map(str, DTYPES.values()))}",
        got=repr(precision),
        do="Leave it out to keep each parameter's own dtype.",
    )


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the data axes. ``world`` ranks = ``node`` groups of ``local`` consecutive ranks."""

    node: int
    local: int

    @property
    def world(self) -> int:
        return self.node * self.local

    def size(self, axes: Axes) -> int:
        """Number of ranks that something cut over ``axes`` is cut into."""
        size = 1
        for axis in axes:
            size *= self.node if axis == NODE else self.local
        return size

    def index(self, axes: Axes, rank: int) -> int:
        """Which shard of something cut over ``axes`` is global rank ``rank``'s: the first axis is outermost."""
        place = {NODE: rank // self.local, LOCAL: rank % self.local}
        index = 0
        for axis in axes:
            index = index * (self.node if axis == NODE else self.local) + place[axis]
        return index


@dataclass(frozen=True)
class Plan:
    """One row of the table.

    Attributes:
        parameters: between steps.
        held: between forward and backward (FSDP's reshard_after_forward, the secondary copy of ZeRO++'s hpZ).
        gradients: while micro-batches accumulate.
        states: master weights and moments.
        precision: in which dtypes.
        local_size: ranks in the ``local`` axis. None: the ranks that share a host; <= 0: all ranks; n: groups of n
            (InternEvo's ``zero1.size``). Must divide the world.
        name: the preset it came from, for people to read.

    Raises:
        ConfigError: where the prefix law ``held, parameters, gradients, states: each a prefix of the next`` is broken,
            or a placement cannot be kept in this version.
    """

    parameters: Placement = Placement()
    held: Placement = Placement()
    gradients: Placement = Placement()
    states: Placement = Placement()
    precision: Precision = Precision()
    local_size: int | None = None
    name: str = "custom"

    def __post_init__(self) -> None:
        parts = {part: getattr(self, part) for part in ("held", "parameters", "gradients", "states")}
        for part, placement in parts.items():
            if not isinstance(placement, Placement) or not isinstance(placement.axes, tuple):
                raise ConfigError(
                    f"plan {self.name!r}, {part}",
                    expected="a Placement with a tuple of axes",
                    got=repr(placement),
                    do="Write e.g. Placement(axes=('node', 'local')); () is whole on each rank.",
                )
            _check_placement(self.name, part, placement)
        for shallow, deep in itertools.pairwise(parts):
            inner, outer = parts[shallow].axes, parts[deep].axes
            if outer[: len(inner)] != inner:
                raise ConfigError(
                    f"plan {self.name!r}",
                    expected=f"{shallow}.axes to be a prefix of {deep}.axes: a deeper cut is a sub-range",
                    got=f"{shallow}.axes={inner}, {deep}.axes={outer}",
                    do=f"Cut {deep} over {inner} first, or {shallow} over fewer axes.",
                )
        if not isinstance(self.precision, Precision):
            raise ConfigError(
                f"plan {self.name!r}, precision",
                expected="a Precision",
                got=repr(self.precision),
                do="Write e.g. Precision(torch.bfloat16); Plan.preset takes names too.",
            )
        if self.local_size is not None and not _is_int(self.local_size):
            raise ConfigError(
                "plan.local_size", expected="an int or None", got=repr(self.local_size), do="Give the ranks in a group."
            )

    @staticmethod
    def preset(name: str | int | float, *, precision: PrecisionLike = None, local_size: int | None = None) -> Plan:
        """The plan behind a preset's name (``"zero3"``, ``"hsdp"`` ...) or a ZeRO stage (``3``).

        Args:
            name: one of :data:`PRESETS`, or 0, 1, 2, 3, 1.5.
            precision: None keeps each parameter's dtype; a name of :data:`PRECISIONS`, a dtype that the parameters
                are converted to, or a :class:`Precision`.
            local_size: see :class:`Plan`.

        Raises:
            ConfigError: unknown name or precision.
        """
        key = f"zero{name:g}" if isinstance(name, (int, float)) and not isinstance(name, bool) else name
        if not isinstance(key, str) or key not in _ROWS:
            raise ConfigError(
                "plan preset",
                expected=f"one of {', '.join(PRESETS)} or a stage 0, 1, 1.5, 2, 3",
                got=repr(name),
                do="Choose a preset, or build a Plan from Placements.",
            )
        parameters, held, gradients, states = map(Placement, _ROWS[key])
        return Plan(parameters, held, gradients, states, parse_precision(precision), local_size, key)

    def mesh_shape(self, world: int, host_size: int | None = None) -> MeshShape:
        """Sizes of the axes for ``world`` ranks, ``host_size`` of which share a host (None: all of them).

        Raises:
            ConfigError: the world is not divisible by the group size.
        """
        if not _is_int(world) or world < 1:
            raise ConfigError(
                "world", expected="a positive number of ranks", got=repr(world), do="Give the world size."
            )
        local = self.local_size if self.local_size is not None else (host_size or world)
        local = world if local <= 0 else local
        if world % local:
            raise ConfigError(
                f"plan {self.name!r}",
                expected=f"a local_size that divides the world of {world}",
                got=str(local),
                do="Choose local_size among the divisors of the world size.",
                world=world,
                local_size=local,
            )
        return MeshShape(world // local, local)


_D: Axes = AXES
_HPZ: Axes = (LOCAL, NODE)
_L: Axes = (LOCAL,)
# preset: axes of parameters, held, gradients, states
_ROWS: dict[str, tuple[Axes, Axes, Axes, Axes]] = {
    "zero0": ((), (), (), ()),
    "zero1": ((), (), (), _D),
    "zero1.5": ((), (), (), _L),
    "zero2": ((), (), _D, _D),
    "zero3": (_D, _D, _D, _D),
    "zero3-keep": (_D, (), _D, _D),
    "hpz": (_HPZ, _L, _HPZ, _HPZ),
    "hsdp": (_L, _L, _L, _L),
    "mics": (_L, _L, _L, _L),
}
#: Names :meth:`Plan.preset` takes.
PRESETS = tuple(_ROWS)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_placement(plan: str, part: str, placement: Placement) -> None:
    if len(set(placement.axes)) != len(placement.axes) or not set(placement.axes) <= set(AXES):
        raise ConfigError(
            f"plan {plan!r}, {part}.axes",
            expected=f"distinct axes among {AXES}",
            got=repr(placement.axes),
            do="Name each axis once, outermost first.",
        )
    if placement.memory is not Memory.DEVICE:
        raise ConfigError(
            f"plan {plan!r}, {part}.memory",
            expected="Memory.DEVICE (offload is not in this version)",
            got=str(placement.memory),
            do="Keep this part on the device.",
        )


def axes_between(deep: Axes, shallow: Axes) -> Axes:
    """The axes by which ``deep`` is cut further than ``shallow``, a prefix of it."""
    return deep[len(shallow) :]


def axes_beyond(states: Axes) -> Axes:
    """D - states: the data axes over which the states are replicated, in mesh order."""
    return tuple(axis for axis in AXES if axis not in states)


def ring_bytes(verb: str, nbytes: int, size: int) -> int:
    """Bytes each of ``size`` ranks sends for one collective on a ring (or any algorithm that sends the fewest).

    Args:
        verb: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or barrier.
        nbytes: bytes of the whole (ungathered: size times the shard) buffer.
        size: ranks that take part.
    """
    factors = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "broadcast": 1, "barrier": 0}
    return factors[verb] * nbytes * (size - 1) // size


@dataclass(frozen=True)
class FlatSize:
    """What the arithmetic needs to know of one flat buffer.

    Attributes:
        unit: index of its unit in order of execution; the root unit is 0, since it spans the others.
        numel: padded elements.
        dtype: of the parameters.
        trainable: frozen flats have neither gradients nor states.
    """

    unit: int
    numel: int
    dtype: torch.dtype
    trainable: bool = True


@dataclass(frozen=True)
class Report:
    """Bytes of one rank for one step, predicted or measured.

    Attributes:
        bytes_held: by state: ``parameters``, ``gradients``, ``states``, ``buffers`` (high water of what lives within a
            step only: gathered units, held copies, wires).
        bytes_sent: by verb, payload bytes this rank sends; ``control`` is what the engine says to itself (which
            parameters took part, the norm) and never grows with the model's size in elements.
        memory: by memory space.
        plan: the plan it belongs to.
        world: number of ranks.
    """

    bytes_held: dict[str, int]
    bytes_sent: dict[str, int]
    plan: Plan = field(repr=False)
    world: int

    @property
    def memory(self) -> dict[str, int]:
        held = self.bytes_held
        return {Memory.DEVICE.value: sum(held.values()), Memory.HOST.value: 0, Memory.NVME.value: 0}


#: Verbs that a report lists.
VERBS = ("all_gather", "reduce_scatter", "all_reduce", "control")


def predict_bytes(
    plan: Plan,
    flats: Sequence[FlatSize],
    mesh: MeshShape,
    *,
    trainable_parameters: int,
    micro_batches: int = 1,
    prefetch: int = 1,
    overlap: bool = True,
    clip: bool = False,
    moments: int = 2,
) -> Report:
    """What one rank holds and sends in one steady step: the table's arithmetic.

    Args:
        plan, flats, mesh: the row, the model, the ranks.
        trainable_parameters: number of trainable parameter tensors (the control traffic carries one float each,
            and some for what the ranks must have in common).
        micro_batches: forward and backward passes a step, none of them under ``no_sync``.
        prefetch: units gathered ahead.
        overlap: whether collectives run beside compute (two wires in flight instead of one).
        clip: whether the gradient norm is taken once a step.
        moments: state tensors per parameter beside the master (Adam: 2, with amsgrad 3).
    """
    sent = dict.fromkeys(VERBS, 0)
    held = dict.fromkeys(("parameters", "gradients", "states"), 0)
    cut = {part: mesh.size(getattr(plan, part).axes) for part in ("parameters", "held", "gradients", "states")}
    for flat in flats:
        _add_sent(sent, flat, plan, mesh, micro_batches)
        item = flat.dtype.itemsize
        held["parameters"] += flat.numel * item // cut["parameters"]
        if flat.trainable:
            held["gradients"] += flat.numel * 4 // cut["gradients"]
            shard = flat.numel // cut["states"]
            held["states"] += moments * plan.precision.moment_bytes(shard)
            held["states"] += shard * plan.precision.master_bytes(flat.dtype)
    # Beside the parameters: whether a program dropped gradients, or wrote into parameters, and a digest of the rules.
    votes = trainable_parameters + 2 + DIGEST_BITS if trainable_parameters else 0
    sent["control"] = ring_bytes("all_reduce", 4 * votes, mesh.world)
    if clip:
        sent["control"] += ring_bytes("all_reduce", 2 * torch.float64.itemsize, cut["states"])
    wires = 2 if overlap else 1
    passing = micro_batches == 1 and cut["gradients"] == 1  # one pass a step: its gradients are sent as they come
    held["buffers"] = _buffers(
        flats, plan, mesh, cut, prefetch if overlap else 0, wires, boundary_wires=wires if passing else 1
    )
    return Report(held, sent, plan, mesh.world)


def _add_sent(sent: dict[str, int], flat: FlatSize, plan: Plan, mesh: MeshShape, micro_batches: int) -> None:
    def add(verb: str, numel: int, dtype: torch.dtype, axes: Axes, times: int = 1) -> None:
        sent[verb] += times * ring_bytes(verb, numel * dtype.itemsize, mesh.size(axes))

    n, kept = flat.numel, flat.dtype
    wire, sums = plan.precision.wire_of(kept), plan.precision.sums_of(kept)
    parameters, held, gradients, states = (
        getattr(plan, part).axes for part in ("parameters", "held", "gradients", "states")
    )
    add("all_gather", n, kept, parameters, micro_batches)
    if mesh.size(parameters) > 1:
        add("all_gather", n, kept, held, micro_batches)
    if not flat.trainable:
        return
    add("reduce_scatter", n, wire, gradients, micro_batches)
    add("reduce_scatter", n // mesh.size(gradients), wire, axes_between(states, gradients))
    shard, beyond = n // mesh.size(states), axes_beyond(states)
    if sums == wire:
        add("all_reduce", shard, wire, beyond)
    else:  # a sum of low-precision wires is kept in float32: scattered as wires, gathered as sums
        add("reduce_scatter", shard, wire, beyond)
        add("all_gather", shard, sums, beyond)
    add("all_gather", n // mesh.size(parameters), kept, axes_between(states, parameters))


def _buffers(
    flats: Sequence[FlatSize],
    plan: Plan,
    mesh: MeshShape,
    cut: dict[str, int],
    prefetch: int,
    wires: int,
    boundary_wires: int,
) -> int:
    """High water of gathered units, held copies and wires; the root unit (0) spans the others.

    ``wires``, ``boundary_wires``: how many are lent at a time for R2, and for R3's first collective.
    """
    units = max((flat.unit for flat in flats), default=-1) + 1
    whole, kept = [0] * units, [0] * units
    # In the order of reduction: the wires of R2, and of the one or two collectives of R3.
    wire, deeper, beyond = [], [], []
    goes_deeper = mesh.size(axes_between(plan.states.axes, plan.gradients.axes)) > 1
    goes_beyond = mesh.size(axes_beyond(plan.states.axes)) > 1
    for flat in sorted(flats, key=lambda flat: -flat.unit):
        dtype = plan.precision.wire_of(flat.dtype)
        nbytes = flat.numel * dtype.itemsize
        if cut["parameters"] > 1:
            gathered_bytes = flat.numel * flat.dtype.itemsize
            whole[flat.unit] += gathered_bytes
            kept[flat.unit] += gathered_bytes // cut["held"] if cut["held"] < cut["parameters"] else 0
        if flat.trainable and cut["gradients"] > 1:
            wire.append(nbytes)
        if flat.trainable and dtype != torch.float32:  # float32 sums are their own wires
            deeper.append(nbytes // cut["gradients"] if goes_deeper else 0)
            beyond.append(nbytes // cut["states"] if goes_beyond else 0)
    gathered = sum(kept)
    if cut["held"] > 1:  # else all is kept whole until backward, and nothing is gathered beyond that
        gathered += sum(whole[:1]) + _window(whole[1:], 1 + prefetch)
    # A wire that was lent stays in the pool for its size; R3 has one at a time of what it makes itself.
    first, second = (deeper, beyond) if goes_deeper else (beyond, deeper)
    return gathered + _pooled(wire, wires) + _pooled(first, boundary_wires) + _pooled(second, 1)


def _pooled(sizes: Sequence[int], width: int) -> int:
    """What a pool by size ends up with when up to ``width`` neighbours are lent at a time."""
    windows = [sizes[i : i + width] for i in range(len(sizes))]
    return sum(size * max(window.count(size) for window in windows) for size in set(sizes))


def _window(sizes: Sequence[int], width: int) -> int:
    """Largest sum of ``width`` neighbours."""
    return max((sum(sizes[i : i + width]) for i in range(len(sizes))), default=0)
