"""Build units from a model and a plan: checks, grouping, layout; and predict bytes for the same flat parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from npuzero import device
from npuzero.arguments import check_count, check_flag, describe_value
from npuzero.comm import Mesh, World
from npuzero.config import Settings, nvme_folders
from npuzero.errors import CheckpointError, ConfigError, NpuZeroError, StateError
from npuzero.memory import check_folders
from npuzero.plan import PIPE, STAGE, Cut, FlatSize, Memory, MeshShape, Plan, Relations, Report, StepSpec, predict_bytes
from npuzero.shard.layout.axis_relations import relations_key
from npuzero.shard.layout.check_ranks_agree import check_same_model, check_same_stages, describe_model
from npuzero.shard.layout.find_units import UnitRule, UnitSpec, discover_units
from npuzero.shard.layout.flat_layout import FlatLayout
from npuzero.shard.layout.mesh_axes import check_axes, check_tensor_axis, uses_tensor_axis
from npuzero.shard.layout.shard_specs import ShardSpecs
from npuzero.shard.layout.tensor_slices import get_cut, get_local_portion
from npuzero.shard.layout.tiled_linear import find_tile_rows
from npuzero.shard.layout.traffic_meter import CountingMesh
from npuzero.shard.layout.unit_plans import UnitPlans
from npuzero.shard.parameters.model_parts import Group, find_part_indices
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.initial_values import InitialValues
from npuzero.shard.state.unit import Unit

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def agree_on_plan(
    model: nn.Module,
    plans: UnitPlans,
    settings: Settings,
    rule: UnitRule,
    ranks: World | Mesh,
    origin: InitialValues,
    buffers: str | None = None,
) -> tuple[list[UnitSpec], list[Plan], MeshShape]:
    """Return the units of ``model``, their plans and the mesh shape, after checking that all ranks have the same.

    Collective; moves no data.

    Raises:
        ConfigError: something cannot be sharded, or the ranks disagree.
        CheckpointError: the given weights do not fit the model.
        StateError: the model is sharded already.
    """
    # A rank with a problem takes part in the exchange nevertheless, so that all ranks raise the same error.
    world = get_stage_world(ranks)
    staged = isinstance(ranks, Mesh) and ranks.size((PIPE,)) > 1
    specs: list[UnitSpec] = []
    own: list[Plan] = []
    shape = MeshShape(1, 1)
    weights = ""
    problem: NpuZeroError | None = None
    try:
        device.get(world.device).set_matmul(plans.model.precision.matmul)
        shape = mesh_shape_on(plans.model, ranks)
        specs = _discover_by_rule(model, rule)
        own = plans.of([spec.name for spec in specs])
        _check_memories([plans.model, *own], settings, world.device)
        _check_shardable(model, specs, world)
        check_axes(model, specs, ranks, shape)
        _check_cuts(model, specs, shape)
        device.get(world.device).check([t for t in (*model.parameters(), *model.buffers()) if not t.is_meta])
        weights = origin.check(model, alone=not staged)
    except (ConfigError, StateError, CheckpointError) as error:
        problem = error
    same = {
        **_flatten_fields("plan", plans.model),
        **{
            key: text
            for name, own in plans.units.items()
            for key, text in _flatten_fields(f"unit_plans[{name!r}]", own).items()
        },
        **_flatten_fields("settings", settings.common),
        "weights": weights,
        "buffers": repr(buffers),
        "mesh": repr(shape),
    }
    described = [] if problem else describe_model(model, specs)
    try:
        check_same_model(described, same, world, problem)
        check_tensor_axis(shape.tensor, staged or uses_tensor_axis(specs))  # in a pipeline any stage may use it
    except (ConfigError, StateError, CheckpointError) as error:
        if not staged:
            raise
        problem = error
    if isinstance(ranks, Mesh) and staged:
        common = {key: text for key, text in same.items() if key != "weights" and not key.startswith("unit_plans")}
        check_same_stages(ranks, common, problem, dict(described), specs)
        origin.check_stages(ranks)
    return specs, own, shape


def get_stage_world(ranks: World | Mesh) -> World:
    """Return the ranks that train the same modules: the world, or this rank's stage of a pipeline."""
    return ranks.part(STAGE) if isinstance(ranks, Mesh) else ranks


def mesh_shape_on(plan: Plan, ranks: World | Mesh | MeshShape | int) -> MeshShape:
    """Return the mesh shape for ``plan`` on ``ranks``; raise a ConfigError if they give different ``local_size``."""
    if isinstance(ranks, World):
        return plan.mesh_shape(ranks.size, len(ranks.local))
    if not isinstance(ranks, Mesh):
        return plan.mesh_shape(ranks)
    shape = plan.mesh_shape(ranks.shape)
    if ranks.local_size is not None and shape.local != ranks.shape.local:
        raise ConfigError(
            f"plan {plan.name!r}: local_size",
            expected=f"{ranks.local_size}, as the mesh has it, or None",
            got=str(plan.local_size),
            do="Give it in one place.",
        )
    return shape


def _flatten_fields(path: str, record: object) -> dict[str, str]:
    """Return the fields of a dataclass as texts by path; ``name``, the most informative field, first."""
    if not is_dataclass(record):
        return {path: repr(record)}
    names = sorted((item.name for item in fields(record)), key=lambda name: name != "name")
    return {k: text for name in names for k, text in _flatten_fields(f"{path}.{name}", getattr(record, name)).items()}


def build_units(
    specs: list[UnitSpec], plans: Sequence[Plan], settings: Settings, mesh: CountingMesh, strict: bool
) -> list[Unit]:
    """Return the units with flat parameters laid out, before any data moves.

    Args:
        strict: guard parameters and gradients as on several ranks.
    """
    units = []
    for i, (spec, plan) in enumerate(zip(specs, plans, strict=True)):
        named = dict(spec.parameters)
        flats: list[FlatParameter] = []
        for layout, _, own in build_layouts(_parameter_facts(spec), plan, mesh.shape, settings.bucket_bytes):
            parameters = [named[slot.name] for slot in layout.slots]
            rests = ShardSpecs.of(own, layout, mesh, strict)
            portions = [get_local_portion(parameter, mesh) for parameter in parameters]
            flats.append(FlatParameter(f"{spec.name}[{len(flats)}]", layout, parameters, own, rests, portions))
        units.append(Unit(spec, i, flats, plan))
    return units


def predict_model(
    model: nn.Module,
    plans: UnitPlans,
    ranks: World | Mesh | MeshShape | int,
    rule: UnitRule,
    settings: Settings,
    parts: Sequence[Group] = (),
    **facts: Any,
) -> Report:
    """Return :func:`npuzero.plan.predict_bytes` for the flat parameters that :func:`build_units` makes of ``model``.

    Args:
        parts: modules or names of each part, as in
            :meth:`npuzero.shard.step.forward_backward.ForwardBackward.divide`.
        facts: as in :func:`build_steady_step`.
    """
    _check_parts(parts)
    shape = mesh_shape_on(plans.model, ranks)
    specs = _find_checked_units(model, rule)
    _check_cuts(model, specs, shape)
    units = [_parameter_facts(spec) for spec in specs]
    names = [spec.name for spec in specs]
    facts |= {"own": plans.of(names), "spans": nested_unit_spans(names)}
    if parts:
        facts["parts"] = find_part_indices([(spec.name, spec.module) for spec in specs], parts)
    return predict_units(units, plans.model, shape, settings, **facts)


def nested_unit_spans(names: Sequence[str]) -> tuple[int, ...]:
    """Return for each unit the index of the last unit nested in it, or of itself; ``names``: of all units, in order."""
    last = list(range(len(names)))
    around: list[int] = []  # enclosing units, outermost first; the root encloses all
    for i, name in enumerate(names):
        while len(around) > 1 and not name.startswith(f"{names[around[-1]]}."):
            around.pop()
        for outer in around:
            last[outer] = i
        around.append(i)
    return tuple(last)


def get_unit_parameters(model: nn.Module, rule: UnitRule = None) -> list[list[ParameterFacts]]:
    """Return the parameters of each unit of ``model``, the root unit first; they may be on any device, even meta.

    Raises:
        ConfigError: a parameter cannot be part of a flat parameter, or a rule names no module.
    """
    return [_parameter_facts(spec) for spec in _find_checked_units(model, rule)]


def _find_checked_units(model: nn.Module, rule: UnitRule) -> list[UnitSpec]:
    specs = _discover_by_rule(model, rule)
    for name, parameter in (pair for spec in specs for pair in spec.parameters):
        _check_parameter(name, parameter)
    return specs


@dataclass(frozen=True)
class ParameterFacts:
    """Describe a parameter for layout and prediction; ``shape`` is the full shape, even if it will be cut."""

    name: str
    shape: torch.Size
    dtype: torch.dtype = torch.float32
    trainable: bool = True
    relations: Relations = ()
    cut: Cut | None = None

    def part(self, mesh: MeshShape) -> torch.Size:
        """Return the shape of each rank's part."""
        return self.shape if self.cut is None else self.cut.shape(self.shape, mesh.size(self.cut.axes))


def predict_units(
    units: Sequence[Sequence[ParameterFacts]], plan: Plan, shape: MeshShape, settings: Settings, **facts: Any
) -> Report:
    """Return the prediction for units given by their parameters, root first.

    Args:
        facts: as in :func:`build_steady_step`.

    Raises:
        ConfigError: the number of micro-batches is not positive, parts lack acts, or an act names no part.
    """
    flats, step = build_steady_step(units, plan, shape, settings, **facts)
    return predict_bytes(plan, flats, shape, step)


def build_steady_step(  # noqa: PLR0913 - the facts of a step, a name each
    units: Sequence[Sequence[ParameterFacts]],
    plan: Plan,
    shape: MeshShape,
    settings: Settings,
    *,
    own: Sequence[Plan] | None = None,
    spans: tuple[int, ...] = (),
    parts: tuple[tuple[int, ...], ...] = (),
    acts: Sequence[tuple[int, bool]] = (),
    micro_batches: int = 1,
    clip: bool = False,
    moments: int = 2,
) -> tuple[list[FlatSize], StepSpec]:
    """Return the flat parameters and the step spec of units given by their parameters, root first.

    They are the input of :func:`npuzero.plan.prediction.step_schedule.steady_step`.

    Args:
        own: plans per unit, if they differ.
        spans, parts, acts: nesting of units, the units of each part, and the passes of parts, as in
            :class:`npuzero.plan.StepSpec`.

    Raises:
        ConfigError: the number of micro-batches is not positive, parts lack acts, or an act names no part.
    """
    clip = check_flag("predict: clip", clip)
    check_count("predict: moments", moments, "Give the number of an optimizer's moments: 2 of Adam.", least=0)
    _check_passes(micro_batches, parts, acts)
    # Most blocks are alike: units with the same shapes and plan share one layout.
    alike: dict[tuple[object, ...], list[tuple[int, torch.dtype, bool, Plan]]] = {}
    sizes: list[FlatSize] = []
    for i, (unit, its) in enumerate(zip(units, own or [plan] * len(units), strict=True)):
        key = its, *((each.part(shape), each.dtype, each.trainable, each.relations) for each in unit)
        if key not in alike:
            laid_out = build_layouts(unit, its, shape, settings.bucket_bytes)
            alike[key] = [(layout.numel, layout.dtype, trainable, own) for layout, trainable, own in laid_out]
        sizes += [FlatSize(i, *flat) for flat in alike[key]]
    step = StepSpec(
        trainable_parameters=sum(parameter.trainable for unit in units for parameter in unit),
        tied_parameters=sum(p.trainable and plan.related(p.relations).tied for unit in units for p in unit),
        micro_batches=micro_batches,
        prefetch=settings.prefetch,
        overlaps_gradients=settings.overlaps_gradients,
        overlaps_parameters=settings.overlaps_parameters,
        clip=clip,
        moments=moments,
        chunk_bytes=settings.chunk_bytes,
        on_device=settings.update_on == "device",
        spans=spans,
        parts=parts,
        acts=tuple(acts),
    )
    return sizes, step


def _check_parts(parts: object) -> None:
    """Check that ``parts`` is a list of parts, each an iterable of modules or names."""
    groups = parts if isinstance(parts, Sequence) and not isinstance(parts, str) else [None]
    if any(isinstance(group, (str, torch.Tensor)) or not isinstance(group, Iterable) for group in groups):
        raise ConfigError(
            "predict: parts",
            expected="a list of parts, each a list of modules or of their names",
            got=describe_value(parts),
            do='Pass such as [["0", "1"], ["2"]], or () for one part.',
        )


def _check_passes(micro_batches: object, parts: Sequence[object], acts: Sequence[tuple[int, bool]]) -> None:
    """Check the number of micro-batches and the acts of parts."""
    check_count("predict: micro_batches", micro_batches, "Give the number of backward passes a step.")
    count = len(parts) or 1
    if (
        not isinstance(acts, Sequence)
        or (parts and not acts)
        or not all(_is_pass_act(act) and 0 <= act[0] < count for act in acts)
    ):
        raise ConfigError(
            "predict: acts",
            expected=f"passes of {count} parts, each (number of the part from 0, whether it is a backward pass)",
            got=describe_value(acts),
            do="Give parts and acts together, or neither of them.",
        )


def _is_pass_act(act: object) -> bool:
    return isinstance(act, tuple) and len(act) == 2 and isinstance(act[0], int)


def build_layouts(
    parameters: Sequence[ParameterFacts], plan: Plan, mesh: MeshShape, bucket_bytes: int
) -> Iterator[tuple[FlatLayout, bool, Plan]]:
    """Generate the layouts of one unit: parameters grouped by dtype, trainability and relations, in buckets.

    A flat parameter takes parameters up to ``bucket_bytes``; a larger parameter gets a separate one.

    Yields:
        layout, whether its parameters train, and their plan, adapted to their relations.
    """
    precision = plan.precision
    groups: dict[tuple[torch.dtype, bool, Relations], list[list[ParameterFacts]]] = {}
    filled: dict[tuple[torch.dtype, bool, Relations], int] = {}
    for parameter in parameters:
        key = (precision.parameter_of(parameter.dtype), parameter.trainable, parameter.relations)
        nbytes = parameter.part(mesh).numel() * key[0].itemsize
        buckets = groups.setdefault(key, [])
        if not buckets or filled[key] + nbytes > bucket_bytes:
            buckets.append([])
            filled[key] = 0
        buckets[-1].append(parameter)
        filled[key] += nbytes
    # Parameters tied between two stages come first, so that their flats have the same names in both stages.
    for (kind, trainable, relations), buckets in sorted(
        groups.items(), key=lambda group: PIPE not in dict(group[0][2])
    ):
        own = plan.related(relations)
        ranks = mesh.size(own.reduced)
        for bucket in buckets:
            named = ((p.name, p.part(mesh)) for p in bucket)
            start, shard = precision.start_elements, precision.shard_elements
            yield FlatLayout.of(named, ranks, kind, precision.wire_of(kind), start, shard), trainable, own


def _parameter_facts(spec: UnitSpec) -> list[ParameterFacts]:
    return [
        ParameterFacts(name, p.shape, p.dtype, p.requires_grad, relations_key(p), get_cut(p))
        for name, p in spec.parameters
    ]


def _discover_by_rule(model: nn.Module, rule: UnitRule) -> list[UnitSpec]:
    try:
        return discover_units(model, rule)
    except ConfigError:
        raise
    except Exception as error:
        if rule is None:
            raise
        raise ConfigError(
            "units",
            expected="a predicate of (name, module) that returns a bool",
            got=f"{type(error).__name__}: {error}",
            do="Correct the predicate; it is called with every module's qualified name and the module.",
        ) from error


def _check_memories(plans: Sequence[Plan], settings: Settings, where: torch.device) -> None:
    """Check the memories that offloading needs, on every rank, before anything is allocated."""
    if any(Memory.NVME in (plan.parameters.memory, plan.states.memory, plan.activations.memory) for plan in plans):
        check_folders([Path(folder) for folder in nvme_folders(settings)])
    if settings.update_on == "device" and any(plan.states.far for plan in plans):
        device.get(where).check_reach()


def _check_shardable(model: nn.Module, specs: list[UnitSpec], world: World) -> None:
    kind = world.device.type
    for name, p in (pair for spec in specs for pair in spec.parameters):
        # Check the parameters, not the model, which may be part of a sharded model or contain one.
        if getattr(p, "_npuzero_engine", None) is not None:
            raise StateError(
                f"parameter {name}",
                expected="a model that npuzero.zero() has not seen",
                got="one it has sharded already",
                do="Call npuzero.zero() once, on the outermost module.",
            )
        _check_parameter(name, p)
        if p.device.type not in (kind, "meta"):
            raise _wrong_device_error(f"parameter {name}", p, kind)
    _check_no_overlap([pair for spec in specs for pair in spec.parameters])
    for name, buffer in model.named_buffers():
        _check_tensor_shaped(f"buffer {name}", buffer)
        if buffer.device.type not in (kind, "meta"):
            raise _wrong_device_error(f"buffer {name}", buffer, kind)


def _check_cuts(model: nn.Module, specs: list[UnitSpec], shape: MeshShape) -> None:
    """Check that cut parameters can be divided over the ranks of this mesh."""
    tiles = find_tile_rows(model)
    for name, parameter in (pair for spec in specs for pair in spec.parameters):
        cut = get_cut(parameter)
        if cut is None:
            continue
        cut.check(name, parameter.shape, shape.size(cut.axes))
        if name in tiles:
            raise ConfigError(
                f"parameter {name}: {cut}",
                expected="a cut of a parameter in one piece",
                got=f"one of {tiles[name].name}, which npuzero.tiled() has divided: a rank's rows would not be "
                "neighbours",
                do="Leave one of the two out: over more ranks along the axis each has less of the layer, too.",
            )


def _wrong_device_error(subject: str, tensor: Tensor, kind: str) -> ConfigError:
    do = f"Move the model first: model.to({kind!r}); or build it on meta, without data."
    return ConfigError(subject, expected=f"data on {kind}", got=f"data on {tensor.device.type}", do=do)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    """Check that the parameter, on any device, can be part of a flat parameter."""
    _check_tensor_shaped(f"parameter {name}", parameter)
    if not issubclass(type(parameter), nn.Parameter):
        raise ConfigError(
            f"parameter {name}",
            expected="an ordinary tensor in nn.Parameter, whose data can move into a flat buffer",
            got=type(parameter).__name__,
            do="Make it nn.Parameter of a plain tensor, or leave its module out of the model given to npuzero.zero().",
        )
    if parameter.dtype not in _FLOATS:
        raise ConfigError(
            f"parameter {name}",
            expected="float32, bfloat16 or float16",
            got=str(parameter.dtype),
            do="Convert it before npuzero.zero(), or register it as a buffer if nothing trains it.",
        )


def check_not_lazy(model: nn.Module) -> None:
    """Raise a ConfigError if a parameter or buffer of ``model`` has no shape yet."""
    for name, parameter in model.named_parameters():
        _check_tensor_shaped(f"parameter {name}", parameter)
    for name, buffer in model.named_buffers():
        _check_tensor_shaped(f"buffer {name}", buffer)


def _check_tensor_shaped(subject: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ConfigError(
            subject,
            expected="a shape",
            got="an uninitialized tensor of a lazy module",
            do="Run the model once, or give the module its sizes, before npuzero.zero().",
        )


def _check_no_overlap(named: list[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that are views of the same memory: flattening would silently untie them."""
    # Sorted by address: if any two overlap, two neighbours do. Skip strided views, which span memory between elements.
    here = [(name, p) for name, p in named if p.nbytes and p.is_contiguous() and not p.is_meta]
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in here)
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            raise ConfigError(
                f"parameters {name} and {other}",
                expected="each in memory of its own",
                got="two parameters over the same memory",
                do="Tie them by assigning the one nn.Parameter in both places, or clone one of them.",
            )
