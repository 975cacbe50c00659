"""Plans: one row of the table each, the presets, and the prefix law that every plan keeps."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from npuzero.errors import ConfigError, did_you_mean, refuse_unknown_keywords
from npuzero.plan.table.axis_relations import Relation, Relations, axes_with
from npuzero.plan.table.mesh_shape import MeshShape
from npuzero.plan.table.placement import (
    DATA,
    ENDS,
    LOCAL,
    NODE,
    STAGE,
    TENSOR,
    WHOLE,
    Axes,
    Memory,
    Placement,
    axes_between,
    axes_beyond,
)
from npuzero.plan.table.precision import AS_GIVEN, Precision, PrecisionLike, parse_precision


@refuse_unknown_keywords(held="after_forward", reshard_after_forward="after_forward", reshard_after_backward="between")
@dataclass(frozen=True)
class Plan:
    """Place the parts of a training state over the ranks: one row of the table.

    Attributes:
        parameters: placement of parameters between steps.
        after_forward: placement of parameters between a unit's forward and its backward (FSDP's reshard_after_forward;
            the secondary copy of ZeRO++'s hpZ).
        gradients: placement of gradients while micro-batches accumulate.
        states: placement of master weights and moments.
        precision: dtype of each part.
        local_size: ranks in the ``local`` axis. None: the ranks that share a host; <= 0: all ranks; n: groups of n
            (InternEvo's ``zero1.size``). Must divide the world.
        name: name of the preset, for readers.
        activations: placement of torch's activation checkpoints between forward and backward. Axes are ``()``, or
            ``("tensor",)``: each tensor rank keeps a part of the activations that all of them hold (ZeRO-R's P_a; for
            the mode "mtp", further modes shard activations themselves). The size depends on the batch: reports count
            it, predictions do not.
        lag: 1: an update becomes visible one step later; it overlaps the forward and backward in between
            (ZeRO-Offload's delayed parameter update). 0: at once, as in torch.
        relations: relations of the parameters to mesh axes that differ from the default. npuzero sets them per flat
            parameter with :meth:`related`; a model's plan leaves them empty.
        between: placement of parameters between the micro-batches of a step, on the device: from a unit's first use to
            the update they are never sharded further; ``()`` keeps them unsharded. None: as ``parameters``. (FSDP2's
            set_reshard_after_backward.)

    Raises:
        ConfigError: the plan breaks the prefix law (the axes of ``after_forward``, ``parameters``, ``gradients`` and
            ``states`` are each a prefix of the next, the axes of ``between`` a prefix of ``parameters``) or the law of
            memories (offloaded gradients and parameters need states offloaded over the same axes; a lag needs all
            states and gradients offloaded, and parameters on the device).

    Example::

        everywhere = npuzero.Placement(("node", "local"))
        plan = npuzero.Plan(gradients=everywhere, states=everywhere, name="mine")  # parameters stay unsharded
        model = npuzero.zero(net, plan=plan)
    """

    parameters: Placement = WHOLE
    after_forward: Placement = WHOLE
    gradients: Placement = WHOLE
    states: Placement = WHOLE
    precision: Precision = AS_GIVEN
    local_size: int | None = None
    name: str = "custom"
    activations: Placement = WHOLE
    lag: int = 0
    relations: Relations = ()
    between: Placement | None = None

    def __post_init__(self) -> None:
        parts = self.parts
        for part, placement in {**parts, "activations": self.activations}.items():
            if not isinstance(placement, Placement) or not isinstance(placement.axes, tuple):
                raise ConfigError(
                    f"plan {self.name!r}, {part}",
                    expected="a Placement with a tuple of axes",
                    got=repr(placement),
                    do="Write e.g. Placement(axes=('node', 'local')); () is unsharded.",
                )
            _check_placement(self.name, part, placement)
        # The prefix law makes each deeper shard a contiguous sub-range, so a collective never has to permute elements.
        laid = {**parts, "between": self.held_between}
        for shallow, deep in _LAW:
            inner, outer = laid[shallow].axes, laid[deep].axes
            if outer[: len(inner)] != inner:
                raise ConfigError(
                    f"plan {self.name!r}",
                    expected=f"{shallow}.axes to be a prefix of {deep}.axes: a deeper cut is a sub-range",
                    got=f"{shallow}.axes={inner}, {deep}.axes={outer}",
                    do=f"Cut {deep} over {inner} first, or {shallow} over fewer axes.",
                )
        if self.held_between.far and self.held_between != self.parameters:
            raise ConfigError(
                f"plan {self.name!r}, between.memory",
                expected="Memory.DEVICE, or the placement of parameters: within a step they wait there, or where they "
                "rest",
                got=f"{self.between} beside {self.parameters}",
                do="Write Placement(axes) without a memory, or leave between out.",
            )
        if self.gradients.far and not (self.states.far and self.gradients.axes == self.states.axes):
            raise ConfigError(
                f"plan {self.name!r}, gradients.memory",
                expected="Memory.DEVICE, where states rest on the device or are sharded over other axes",
                got=f"{self.gradients} beside {self.states}",
                do="Keep gradients on the device, or place states off it over the same axes.",
            )
        if self.parameters.far and not (
            self.states.far and self.states.share == 1 and self.states.axes == self.parameters.axes
        ):
            raise ConfigError(
                f"plan {self.name!r}, parameters.memory",
                expected="Memory.DEVICE, unless all of states rests off it, too, over the same axes: the update "
                "reads and writes both where they rest",
                got=f"{self.parameters} beside {self.states}",
                do="Keep parameters on the device, or place states off it, all of them, over the same axes.",
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
        _check_lag(self)

    @staticmethod
    @refuse_unknown_keywords()
    def preset(name: str | int | float, *, precision: PrecisionLike = None, local_size: int | None = None) -> Plan:
        """Return the plan of a preset's name (``"zero3"``, ``"hsdp"`` ...) or of a ZeRO stage (``3``).

        Args:
            name: one of :data:`PRESETS`, :data:`OFFLOADED` or :data:`THINNED`, or 0, 1, 2, 3, 1.5; or ``"isp"``, for
                sequence parallelism.
            precision: None keeps each parameter's dtype; a name of :data:`PRECISIONS`, a dtype that the parameters
                are converted to, or a :class:`Precision`.
            local_size: see :class:`Plan`.

        Raises:
            ConfigError: unknown name or precision.
        """
        key: object = name
        if isinstance(name, (int, float)) and not isinstance(name, bool) and abs(name) < len(PRESETS):
            key = f"zero{name:g}"
        # Derived presets first: each takes another preset's row and changes one property.
        if isinstance(key, str) and key in _OFFLOADED:
            row, offload = _OFFLOADED[key]
            return replace(Plan.preset(row, precision=precision, local_size=local_size).offloaded(offload), name=key)
        if isinstance(key, str) and key in _DELAYED:
            return replace(Plan.preset(_DELAYED[key], precision=precision, local_size=local_size), lag=1, name=key)
        if isinstance(key, str) and key in _THIN:
            row, thin = _THIN[key]
            thinner = _make_thin_precision(parse_precision(precision), thin)
            return replace(Plan.preset(row, precision=thinner, local_size=local_size), name=key)
        if not isinstance(key, str) or key not in _ROWS:
            raise ConfigError(
                "plan preset",
                expected=f"one of {', '.join((*PRESETS, *OFFLOADED, *THINNED, *SEQUENCED))} or a stage 0, 1, 1.5, 2, 3",
                got=repr(name),
                do=did_you_mean(name, _SPELLINGS, "Choose a preset, or build a Plan from Placements."),
            )
        parameters, after_forward, gradients, states = map(Placement, _ROWS[key])
        return Plan(parameters, after_forward, gradients, states, parse_precision(precision), local_size, key)

    def offloaded(self, offload: str) -> Plan:
        """Return this plan with parts of the training state offloaded.

        Gradients are offloaded to the host if sharded over the same axes as states; else they stay on the device.

        Args:
            offload: ``"host"``: states and gradients on the host. ``"nvme"``: states in files on NVMe.
                ``"host+parameters"``, ``"nvme+parameters"``: also parameters.

        Raises:
            ConfigError: an unknown value; a plan that already offloads a part; or parameters to be offloaded that are
                sharded over other axes than states.

        Example::

            plan = npuzero.Plan.preset("hsdp", precision="bf16").offloaded("host")
        """
        if not isinstance(offload, str) or offload not in OFFLOADS:
            raise ConfigError(
                "offload",
                expected=f"None or one of {', '.join(OFFLOADS)}",
                got=repr(offload),
                do=did_you_mean(offload, tuple(OFFLOADS), "Choose among these, or build a Plan from Placements."),
            )
        if any(placement.far for placement in self.parts.values()):
            raise ConfigError(
                f"offload={offload!r}",
                expected="a plan with all parts on the device",
                got=f"plan {self.name!r}, which says where its parts rest",
                do="Give either of them.",
            )
        memories = OFFLOADS[offload]
        alike = self.gradients.axes == self.states.axes != ()
        return replace(
            self,
            parameters=replace(self.parameters, memory=memories.get("parameters", Memory.DEVICE)),
            gradients=replace(self.gradients, memory=Memory.HOST if alike else Memory.DEVICE),
            states=replace(self.states, memory=memories["states"]),
            name=f"{self.name}+{offload}",
        )

    @property
    def parts(self) -> dict[str, Placement]:
        """Return the placements by name, the least sharded first, and last ``between`` if it is set."""
        names = ("after_forward", "parameters", "gradients", "states")
        said = {} if self.between is None else {"between": self.between}
        return {part: getattr(self, part) for part in names} | said

    @functools.cached_property
    def held_between(self) -> Placement:
        """Return the placement of parameters between the micro-batches of a step."""
        return self.parameters if self.between is None else self.between

    @functools.cached_property
    def held_after_forward(self) -> Placement:
        """Return the placement of parameters between a unit's forward and its backward.

        This is ``after_forward``, unless ``between`` shards no further: parameters kept until the next forward are
        also there in backward.
        """
        between = self.held_between
        return between if len(between.axes) <= len(self.after_forward.axes) else self.after_forward

    def related(self, relations: Relations) -> Plan:
        """Return the plan of parameters with these relations: an axis that cuts them does not shard them again.

        Returns the same object for equal arguments, since plans are compared often.
        """
        return _apply_relations(self, relations) if relations else self

    @functools.cached_property
    def averaged(self) -> Axes:
        """Return the axes along which ranks see different data: gradients are averaged over them."""
        return axes_with(self.relations, Relation.AVERAGED)

    @functools.cached_property
    def reduced(self) -> Axes:
        """Return D: the axes over which gradients are summed, averaged ones included."""
        return axes_with(self.relations, Relation.AVERAGED, Relation.SUMMED)

    @functools.cached_property
    def divided(self) -> Axes:
        """Return the axes along which ranks of one stage have different elements of the parameters."""
        return tuple(axis for axis in axes_with(self.relations, Relation.CUT) if axis in STAGE)

    @functools.cached_property
    def alike(self) -> Axes:
        """Return the axes along which ranks have the same elements; includes ``ends`` for tied parameters."""
        return axes_with(self.relations, Relation.AVERAGED, Relation.SUMMED, Relation.REPEATED)

    @functools.cached_property
    def tied(self) -> bool:
        """Tell whether the first and the last stage of a pipeline share the parameters."""
        return ENDS in self.alike

    @functools.cached_property
    def owners(self) -> Axes:
        """Return the axes along which ranks own different elements of the states: sharded and cut axes."""
        return self.states.axes + axes_with(self.relations, Relation.CUT)

    @functools.cached_property
    def deeper(self) -> Axes:
        """Return states - gradients: the axes that shard states but not gradients; R3 reduce-scatters over them."""
        return axes_between(self.states.axes, self.gradients.axes)

    @functools.cached_property
    def beyond(self) -> Axes:
        """Return D - states: the axes of D that do not shard states; R3 all-reduces over them."""
        return axes_beyond(self.states.axes, self.reduced)

    @functools.cached_property
    def restored(self) -> Axes:
        """Return states - parameters: the axes that shard states but not parameters; R4 all-gathers over them."""
        return axes_between(self.states.axes, self.parameters.axes)

    def mesh_shape(self, world: int | MeshShape, host_size: int | None = None) -> MeshShape:
        """Return the sizes of the mesh axes for ``world`` ranks.

        Args:
            world: number of ranks; or a mesh, which is returned with ``node`` and ``local`` set by ``local_size``.
            host_size: ranks that share a host; None: all of them.

        Raises:
            ConfigError: the local size does not divide the world; or a preset for sequence parallelism without it.
        """
        if isinstance(world, MeshShape):
            shape = world
            if self.local_size is not None:
                groups = self.mesh_shape(world.node * world.local)
                shape = replace(world, node=groups.node, local=groups.local)
            _check_sequence_preset(self, shape)
            return shape
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
        shape = MeshShape(world // local, local)
        if host_size is not None:  # a real mesh, not only a number of ranks: its sequence axis is known
            _check_sequence_preset(self, shape)
        return shape


_D: Axes = (NODE, LOCAL)
_HPZ: Axes = (LOCAL, NODE)
_L: Axes = (LOCAL,)
# preset: axes of parameters, after_forward, gradients, states
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
    "isp": (_L, _L, _L, _HPZ),
}
#: Values of ``offload``: the memory of each offloaded part.
OFFLOADS: dict[str, dict[str, Memory]] = {
    "host": {"states": Memory.HOST},
    "nvme": {"states": Memory.NVME},
    "host+parameters": {"states": Memory.HOST, "parameters": Memory.HOST},
    "nvme+parameters": {"states": Memory.NVME, "parameters": Memory.NVME},
}
# preset: its row, and the value of ``offload``
_OFFLOADED = {
    "offload": ("zero2", "host"),
    "offload3": ("zero3", "host"),
    "infinity-states": ("zero3", "nvme"),
    "infinity": ("zero3", "nvme+parameters"),
}
# preset: its row, and the axes with quantized gradients; its gathers are always quantized
_THIN: dict[str, tuple[str, dict[str, str]]] = {
    "zero++": ("hpz", {NODE: "int4", LOCAL: "int4"}),
    "thin": ("hpz", {NODE: "int4"}),
}
# preset: the preset with the same placements and no lag
_DELAYED = {"delayed": "offload"}
#: Presets for sequence parallelism (InternEvo's isp: the local axis is its weight axis).
SEQUENCED = ("isp",)
#: Names for :meth:`Plan.preset`: those with all parts on the device, and offloaded ones.
PRESETS = tuple(name for name in _ROWS if name not in SEQUENCED)
OFFLOADED = (*_OFFLOADED, *_DELAYED)
#: Presets that quantize communication, so results differ: ZeRO++'s, and one that rounds less.
THINNED = tuple(_THIN)
# Spellings of other engines.
_SPELLINGS = {
    **{name: name for name in (*PRESETS, *OFFLOADED, *SEQUENCED, *THINNED)},
    **{name.removeprefix("zero"): name for name in PRESETS},
    **{name.replace("zero", "stage"): name for name in PRESETS},
    "ddp": "zero0",
    "shard_grad_op": "zero2",
    "fsdp": "zero3",
    "full_shard": "zero3",
    "hybrid_shard": "hsdp",
    "zeropp": "zero++",
    "zeroplusplus": "zero++",
    "zero-offload": "offload",
    "zero2-offload": "offload",
    "zero3-offload": "offload3",
    "zero-infinity": "infinity",
}


# The prefix law: the first one's axes are a prefix of the second one's.
_LAW = (
    ("after_forward", "parameters"),
    ("between", "parameters"),
    ("parameters", "gradients"),
    ("gradients", "states"),
)
# Memories allowed for each part.
_MEMORIES = {
    "parameters": tuple(Memory),
    "after_forward": (Memory.DEVICE,),
    "between": tuple(Memory),
    "gradients": (Memory.DEVICE, Memory.HOST),
    "states": tuple(Memory),
    "activations": tuple(Memory),
}


def _make_thin_precision(precision: Precision, thin: Mapping[str, str]) -> Precision:
    """Return ``precision`` with int8 gathers, and with the wires ``thin`` unless it already quantizes gradients."""
    if any(precision.level_of(axis).bits for axis in DATA):
        return replace(precision, gathers="int8")
    plain = precision.plain_wire
    return replace(precision, gathers="int8", wires=thin if plain is None else {**dict.fromkeys(DATA, plain), **thin})


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@functools.lru_cache(maxsize=1024)
def _apply_relations(plan: Plan, relations: Relations) -> Plan:
    cut = axes_with(relations, Relation.CUT)

    def uncut(placement: Placement) -> Placement:
        return replace(placement, axes=tuple(axis for axis in placement.axes if axis not in cut))

    return replace(
        plan,
        parameters=uncut(plan.parameters),
        after_forward=uncut(plan.after_forward),
        gradients=uncut(plan.gradients),
        states=uncut(plan.states),
        between=None if plan.between is None else uncut(plan.between),
        relations=relations,
    )


def _check_placement(plan: str, part: str, placement: Placement) -> None:
    # Data ranks compute different batches, so they hold different activations: only tensor ranks can shard them.
    legal = (TENSOR,) if part == "activations" else DATA
    if len(set(placement.axes)) != len(placement.axes) or not set(placement.axes) <= set(legal):
        stranger = next((axis for axis in placement.axes if axis not in legal), None)
        raise ConfigError(
            f"plan {plan!r}, {part}.axes",
            expected=f"distinct axes among {legal}",
            got=repr(placement.axes),
            do=did_you_mean(stranger, legal, "Name each axis once, outermost first; () is unsharded."),
        )
    if placement.memory not in _MEMORIES[part]:
        raise ConfigError(
            f"plan {plan!r}, {part}.memory",
            expected=" or ".join(map(str, _MEMORIES[part])),
            got=str(placement.memory),
            do="Keep this part there.",
        )
    shared = part == "states" and placement.far
    share = placement.share
    if type(share) not in (int, float) or not 0 < share <= 1 or (share < 1 and not shared):
        raise ConfigError(
            f"plan {plan!r}, {part}.share",
            expected="a number above 0, up to 1" if shared else "1.0: states alone, off the device, are divided",
            got=repr(share),
            do="Give the part of a shard that rests off the device.",
        )


def _check_sequence_preset(plan: Plan, shape: MeshShape) -> None:
    if plan.name.partition("+")[0] in SEQUENCED and shape.local > 1 == shape.sequence:
        raise ConfigError(
            f"plan {plan.name!r}",
            expected="ranks that share sequences: a mesh with a sequence axis",
            got=f"sequence=1 beside weights that are sharded over {shape.local} ranks",
            do="Give npuzero.mesh(sequence=...), or take 'hsdp', which shards weights alone.",
            local_size=shape.local,
        )


def _check_lag(plan: Plan) -> None:
    """Raise ConfigError if ``plan`` has a lag but does not leave the update to the host alone."""
    if not _is_int(plan.lag) or plan.lag not in (0, 1):
        raise ConfigError(
            f"plan {plan.name!r}, lag",
            expected="0 or 1",
            got=repr(plan.lag),
            do="Say 1 to see updates a step later.",
        )
    wholly = plan.states.far and plan.states.share == 1 and plan.gradients.far
    if plan.lag and (not wholly or plan.parameters.far):
        raise ConfigError(
            f"plan {plan.name!r}, lag=1",
            expected="all states off the device, gradients on the host, parameters on the device: for the host "
            "updates them beside the device's whole step",
            got=f"states {plan.states}, gradients {plan.gradients}, parameters {plan.parameters}",
            do="Take the preset 'delayed', or place gradients and states off the device; or leave lag out.",
        )
