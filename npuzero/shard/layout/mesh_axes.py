"""Find the mesh that a model's layers are divided over, and check that the model uses its axes.

Layers that compute with other ranks record their mesh on the parameters, so that :func:`npuzero.zero` finds it on any
part of the model. If no parameter has a relation to an axis, all ranks along it would train the same model on the same
batch independently; that is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from npuzero.comm import Mesh, World
from npuzero.errors import ConfigError
from npuzero.plan import DATA, PIPE, SEQUENCE, TENSOR, Axes, MeshShape, Relation
from npuzero.shard.layout.axis_relations import get_relation, get_relations, is_tied
from npuzero.shard.layout.find_units import UnitSpec

_MESH, _DIVIDED = "_npuzero_mesh", "_npuzero_divided"


def bind_mesh(module: nn.Module, mesh: Mesh) -> None:
    """Record on all parameters of ``module`` that its layers compute with other ranks of ``mesh``."""
    for parameter in module.parameters():
        setattr(parameter, _MESH, mesh)


def find_mesh(model: nn.Module, given: World | Mesh | None) -> World | Mesh | None:
    """Return the ranks to train ``model`` on: ``given``, or the mesh that its layers are divided over.

    Raises:
        ConfigError: layers are divided over another mesh than the given one, or over two different ones.
    """
    # Meshes are compared by shape and world, not identity: separate mesh() calls with the same arguments are equal.
    bound = [(name, getattr(p, _MESH)) for name, p in model.named_parameters() if hasattr(p, _MESH)]
    if not bound:
        return given
    chosen = given if isinstance(given, Mesh) else bound[0][1]
    for name, mesh in bound:
        if not _is_same_mesh(mesh, chosen) or (isinstance(given, World) and given is not mesh.world):
            raise ConfigError(
                "npuzero.zero(): mesh",
                expected=f"the mesh that the layer of parameter {name} was divided over: {mesh}",
                got=str(chosen if given is None or isinstance(given, Mesh) else given),
                do="Pass zero() the mesh that parallel.tensor(), parallel.sequence() or ClassHead was given.",
                parameter=name,
            )
    return chosen


def _is_same_mesh(mesh: Mesh, other: Mesh) -> bool:
    return mesh.world is other.world and all(
        mesh.size(axes) == other.size(axes) for axes in (DATA, (PIPE,), (TENSOR,), (SEQUENCE,))
    )


def uses_tensor_axis(specs: Sequence[UnitSpec]) -> bool:
    """Return whether any parameter has a recorded relation to the tensor axis."""
    return any(get_relation(p, TENSOR) is not None for spec in specs for _, p in spec.parameters)


def check_tensor_axis(ranks: int, used: bool) -> None:
    """Check that a model uses the tensor axis of its mesh, if the axis has several ``ranks``.

    Raises:
        ConfigError: the model does not use it.
    """
    if ranks > 1 and not used:
        raise ConfigError(
            "npuzero.zero(): mesh: axis tensor",
            expected=f"a model whose layers are divided over the {ranks} ranks of the tensor axis",
            got="one of which no parameter is cut along it: these ranks would all compute the same",
            do="Divide it first: npuzero.parallel.tensor(model, mesh, plan=...). For layers of your own say by "
            "npuzero.parallel.relate(layer, tensor='cut') what their ranks hold, or 'repeated' if that is meant. "
            "To train on more data, leave tensor= out of the mesh.",
            axis=TENSOR,
        )


def check_axes(model: nn.Module, specs: Sequence[UnitSpec], ranks: World | Mesh, shape: MeshShape) -> None:
    """Check that ``ranks`` have the axes that parameters relate to, and that divided layers got no new parameters.

    Raises:
        ConfigError: a parameter is cut or summed along an axis, but no mesh was given; or a parameter was added to a
            model after it had been divided.
    """
    if isinstance(ranks, World):
        for name, relations in ((n, get_relations(p)) for spec in specs for n, p in spec.parameters):
            axis = next((axis for axis in relations if axis not in DATA), None)
            if axis is not None and ranks.size > 1:
                raise ConfigError(
                    "npuzero.zero(): mesh",
                    expected=f"a mesh: parameter {name} is {relations[axis].value} along its axis {axis!r}",
                    got=f"none, so that all {ranks.size} ranks would be data ranks",
                    do="Pass the mesh whose ranks compute the layer together: zero(model, mesh=mesh).",
                    parameter=name,
                )
    elif shape.tensor > 1:
        _check_no_adapters(model)


def _check_no_adapters(model: nn.Module) -> None:
    """Refuse parameters that an adapter added to a model after ``parallel.tensor`` had divided it."""
    for path, module in model.named_modules():
        if _DIVIDED not in vars(module):
            continue
        for name, parameter in module.named_parameters(prefix=path):
            if get_relation(parameter, TENSOR) is None:
                raise ConfigError(
                    f"parameter {name}",
                    expected="the parameters that the model had when parallel.tensor() divided it",
                    got="one added since, in a layer of which each tensor rank has a part",
                    do="Adapters (LoRA) inside of divided layers are not supported: train them on data ranks, with "
                    "npuzero.mesh() without tensor=.",
                    parameter=name,
                )


def mark_divided(model: nn.Module) -> None:
    """Record that ``parallel.tensor`` has given every parameter of ``model`` a relation along the tensor axis."""
    setattr(model, _DIVIDED, True)


def find_shared_axes(model: nn.Module, specs: Sequence[UnitSpec], shape: MeshShape) -> Axes:
    """Return the axes along which all ranks must call ``model`` with the same inputs.

    No such axis exists with a pipeline, since stages receive each other's activations, nor if the program's layers see
    a part of the tokens on each rank (``SUMMED``), since it may have divided the tokens before the call.
    """
    divides = any(get_relation(p, TENSOR) is Relation.SUMMED for spec in specs for _, p in spec.parameters)
    ours = any(_DIVIDED in vars(module) for module in model.modules())
    return (TENSOR,) if shape.pipe == 1 and (ours or not divides) else ()


def stage_parameter_names(specs: Sequence[UnitSpec]) -> list[str]:
    """Return the names of the parameters that only this pipeline stage has."""
    return [name for spec in specs for name, parameter in spec.parameters if not is_tied(parameter)]


def repeated_stage_error(name: str, stages: Sequence[int]) -> ConfigError:
    """Return the error for pipeline stages that have a parameter of the same ``name``."""
    return ConfigError(
        "npuzero.zero(): mesh: axis pipe",
        expected="stages with different parts of one model, by their names in the whole model",
        got=f"parameter {name} in each of the stages {', '.join(map(str, stages))}",
        do="Cut a whole model into stages by npuzero.pipeline(model, mesh, ...) instead of zero(). Give stages of your "
        "own the names of the whole model, and say parallel.relate(parameter, pipe='summed') of one that the first "
        "and the last have in common.",
        axis=PIPE,
        parameter=name,
    )
