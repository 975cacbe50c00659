"""THE TABLE: where each part of a training state rests, and what follows from it by arithmetic.

A training state (parameters, gradients, optimizer states) is described by three facts: over which mesh axes it is
cut, in which memory it rests, in which dtype it is kept. ZeRO-0/1/2/3 (Rajbhandari et al., 2020), ZeRO-1.5
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
from dataclasses import dataclass, field, replace

import torch

from npuzero.errors import ConfigError

NODE, LOCAL = "node", "local"
#: The data axes of a mesh in rank order: global rank = node * local_size + local.
AXES = (NODE, LOCAL)

Axes = tuple[str, ...]

#: Shards start and end on multiples of this, since misaligned collectives are many times slower (pytorch#195450).
SHARD_BYTES = 512
#: Each parameter starts on a multiple of this many elements: 16 bytes even on an 8-bit wire.
START_ELEMENTS = 16


class Memory(enum.Enum):
    """Where bytes rest."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True)
class Placement:
    """How one part of the training state is kept.

    Attributes:
        axes: mesh axes it is cut over, outermost first; ``()`` means whole on each rank.
        memory: where it rests.
        dtype: in which dtype; None means the parameter's own.
    """

    axes: Axes = ()
    memory: Memory = Memory.DEVICE
    dtype: torch.dtype | None = None


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


@dataclass(frozen=True)
class Plan:
    """One row of the table.

    Attributes:
        parameters: between steps.
        held: between forward and backward (FSDP's reshard_after_forward, the secondary copy of ZeRO++'s hpZ).
        gradients: while micro-batches accumulate; its dtype is the accumulator's.
        states: master weights and moments.
        local_size: ranks in the ``local`` axis. None: the ranks that share a host; <= 0: all ranks; n: groups of n
            (InternEvo's ``zero1.size``). Must divide the world.
        name: the preset it came from, for people to read.

    Raises:
        ConfigError: where the prefix law ``held, parameters, gradients, states: each a prefix of the next`` is broken,
            or a placement cannot be kept in this version.
    """

    parameters: Placement = Placement()
    held: Placement = Placement()
    gradients: Placement = Placement(dtype=torch.float32)
    states: Placement = Placement(dtype=torch.float32)
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
        if self.local_size is not None and not _is_int(self.local_size):
            raise ConfigError(
                "plan.local_size", expected="an int or None", got=repr(self.local_size), do="Give the ranks in a group."
            )

    @staticmethod
    def preset(
        name: str | int | float, *, precision: str | torch.dtype | None = None, local_size: int | None = None
    ) -> Plan:
        """The plan behind a preset's name (``"zero3"``, ``"hsdp"`` ...) or a ZeRO stage (``3``).

        Args:
            name: one of :data:`PRESETS`, or 0, 1, 2, 3, 1.5.
            precision: None keeps each parameter's dtype; ``"fp32"``, ``"bf16"``, ``"fp16"`` or a dtype converts the
                parameters, and with them the wires. Masters, moments and accumulated gradients are float32.
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
        dtype = parse_precision(precision)
        parameters, held, gradients, states = (Placement(axes) for axes in _ROWS[key])
        return Plan(
            replace(parameters, dtype=dtype),
            replace(held, dtype=dtype),
            replace(gradients, dtype=torch.float32),
            replace(states, dtype=torch.float32),
            local_size,
            key,
        )

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

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_precision(precision: str | torch.dtype | None) -> torch.dtype | None:
    """The parameter dtype that ``precision`` names; None stays None (each parameter's own)."""
    if precision is None or precision in _PRECISIONS.values():
        return precision  # type: ignore[return-value]
    if isinstance(precision, str) and precision in _PRECISIONS:
        return _PRECISIONS[precision]
    raise ConfigError(
        "precision",
        expected=f"one of {', '.join(_PRECISIONS)} or their torch dtypes",
        got=repr(precision),
        do="Leave it out to keep each parameter's own dtype.",
    )


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
    allowed: dict[str, tuple[torch.dtype | None, ...]] = {
        "gradients": (torch.float32,),
        "states": (torch.float32,),
    }
    dtypes = allowed.get(part, (None, *_PRECISIONS.values()))
    if placement.dtype not in dtypes:
        raise ConfigError(
            f"plan {plan!r}, {part}.dtype",
            expected=" or ".join(map(str, dtypes)),
            got=str(placement.dtype),
            do="Keep gradients and states in float32; parameters may be float32, bfloat16 or float16.",
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
        dtype: of the parameters and their wire.
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
        trainable_parameters: number of trainable parameter tensors (the control traffic carries one float each).
        micro_batches: forward and backward passes a step, none of them under ``no_sync``.
        prefetch: units gathered ahead.
        overlap: whether collectives run beside compute (two wires in flight instead of one).
        clip: whether the gradient norm is taken once a step.
        moments: fp32 state tensors per parameter beside the master (Adam: 2, with amsgrad 3).
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
            master = 0 if flat.dtype == torch.float32 else 1
            held["states"] += flat.numel * 4 * (moments + master) // cut["states"]
    sent["control"] = ring_bytes("all_reduce", 4 * trainable_parameters, mesh.world)
    if clip:
        sent["control"] += ring_bytes("all_reduce", 2 * torch.float64.itemsize, cut["states"])
    held["buffers"] = _buffers(flats, plan, mesh, cut, prefetch if overlap else 0, 2 if overlap else 1)
    return Report(held, sent, plan, mesh.world)


def _add_sent(sent: dict[str, int], flat: FlatSize, plan: Plan, mesh: MeshShape, micro_batches: int) -> None:
    def add(verb: str, numel: int, dtype: torch.dtype, axes: Axes, times: int = 1) -> None:
        sent[verb] += times * ring_bytes(verb, numel * dtype.itemsize, mesh.size(axes))

    n, wire = flat.numel, flat.dtype
    parameters, held, gradients, states = (
        getattr(plan, part).axes for part in ("parameters", "held", "gradients", "states")
    )
    add("all_gather", n, wire, parameters, micro_batches)
    if mesh.size(parameters) > 1:
        add("all_gather", n, wire, held, micro_batches)
    if not flat.trainable:
        return
    add("reduce_scatter", n, wire, gradients, micro_batches)
    add("reduce_scatter", n // mesh.size(gradients), wire, axes_between(states, gradients))
    shard, beyond = n // mesh.size(states), axes_beyond(states)
    if wire == torch.float32:
        add("all_reduce", shard, wire, beyond)
    else:  # a sum of low-precision wires is kept in float32: scattered as wires, gathered as sums
        add("reduce_scatter", shard, wire, beyond)
        add("all_gather", shard, torch.float32, beyond)
    add("all_gather", n // mesh.size(parameters), wire, axes_between(states, parameters))


def _buffers(
    flats: Sequence[FlatSize], plan: Plan, mesh: MeshShape, cut: dict[str, int], prefetch: int, wires: int
) -> int:
    """High water of gathered units, held copies and wires; the root unit (0) spans the others."""
    units = max((flat.unit for flat in flats), default=-1) + 1
    whole, kept = [0] * units, [0] * units
    # In the order of reduction: the wires of R2, and of the one or two collectives of R3.
    wire, deeper, beyond = [], [], []
    goes_deeper = mesh.size(axes_between(plan.states.axes, plan.gradients.axes)) > 1
    goes_beyond = mesh.size(axes_beyond(plan.states.axes)) > 1
    for flat in sorted(flats, key=lambda flat: -flat.unit):
        nbytes = flat.numel * flat.dtype.itemsize
        if cut["parameters"] > 1:
            whole[flat.unit] += nbytes
            kept[flat.unit] += nbytes // cut["held"] if cut["held"] < cut["parameters"] else 0
        if flat.trainable and cut["gradients"] > 1:
            wire.append(nbytes)
        if flat.trainable and flat.dtype != torch.float32:  # float32 sums are their own wires
            deeper.append(nbytes // cut["gradients"] if goes_deeper else 0)
            beyond.append(nbytes // cut["states"] if goes_beyond else 0)
    gathered = sum(kept)
    if cut["held"] > 1:  # else all is kept whole until backward, and nothing is gathered beyond that
        gathered += sum(whole[:1]) + _window(whole[1:], 1 + prefetch)
    # A wire that was lent stays in the pool for its size; R3 has one at a time of each.
    return gathered + _pooled(wire, wires) + _pooled(deeper, 1) + _pooled(beyond, 1)


def _pooled(sizes: Sequence[int], width: int) -> int:
    """What a pool by size ends up with when up to ``width`` neighbours are lent at a time."""
    windows = [sizes[i : i + width] for i in range(len(sizes))]
    return sum(size * max(window.count(size) for window in windows) for size in set(sizes))


def _window(sizes: Sequence[int], width: int) -> int:
    """Largest sum of ``width`` neighbours."""
    return max((sum(sizes[i : i + width]) for i in range(len(sizes))), default=0)
