"""The public constructor of the mesh of ranks, and checks of a mesh that a program passes in."""

from __future__ import annotations

from torch import nn

from npuzero import comm
from npuzero.arguments import check_count
from npuzero.comm import Mesh, World
from npuzero.config import describe_value, public_name
from npuzero.errors import ConfigError, refuse_unknown_keywords
from npuzero.parallel.sequence_parallel.transformers_models import check_sequence_prepared
from npuzero.shard.layout.mesh_axes import find_mesh


@refuse_unknown_keywords(
    tp="tensor", tensor_parallel="tensor", pp="pipe", pipeline="pipe", dp="data", sp="sequence", cp="sequence"
)
def mesh(
    *,
    data: int | None = None,
    sequence: int = 1,
    tensor: int = 1,
    pipe: int = 1,
    pod: int = 1,
    local_size: int | None = None,
    world: World | None = None,
) -> Mesh:
    """Arrange the ranks along named axes. Every rank calls it. The product of the sizes is the world size.

    Ranks of the ``tensor`` axis are neighbours (0 and 1, 2 and 3, ...), ranks of ``pipe`` have the largest stride.

    Args:
        data: ranks with different data; None: as many as the remaining sizes leave.
        sequence: how many neighbours among the data ranks share each sequence.
        tensor: ranks that divide the layers of one model (tensor parallelism).
        pipe: stages of a pipeline.
        pod: groups of data ranks; no tensor is sharded across groups unless a plan does so.
        local_size: data ranks in the ``local`` axis of plans that shard within groups; None: the ranks of one host.
        world: the ranks; None: the world of :func:`npuzero.init`.

    Raises:
        ConfigError: the product of the sizes is not the world size.

    Example::

        mesh = npuzero.mesh(tensor=1)
        print(mesh.size(("node", "local")), "ranks with data of their own")
    """
    world = comm.current_world() if world is None else world
    check_given_ranks(world, None, "npuzero.mesh()")
    if data is not None:
        check_count("npuzero.mesh(): data", data, "Give the number of ranks with data of their own, or leave it out.")
    made = Mesh(world, local_size, pipe=pipe, pod=pod, sequence=sequence, tensor=tensor)
    if data is not None and data != made.shape.data:
        raise ConfigError(
            "npuzero.mesh()",
            expected=f"sizes that multiply to the world of {world.size}: data={made.shape.data}, or None",
            got=f"pipe={pipe}, data={data}, tensor={tensor}",
            do="Correct one of the sizes, or start as many ranks.",
        )
    return made


def find_training_ranks(model: nn.Module, world: object, mesh: object) -> World | Mesh | None:
    """Return the ranks on which :func:`npuzero.zero` trains ``model``.

    The given ones, else the mesh over which its layers were divided; None: neither, so all ranks.

    Raises:
        ConfigError: as :func:`check_given_ranks`; the layers were divided over another mesh; the mesh has a sequence
            axis and :func:`npuzero.parallel.sequence` has not prepared the transformers model.
    """
    ranks = find_mesh(model, check_given_ranks(world, mesh))
    check_sequence_prepared(model, ranks)
    return ranks


def check_pipeline(model: object, mesh: object, loss_fn: object) -> None:
    """Raise a ConfigError if an argument of :func:`npuzero.pipeline` has the wrong type."""
    wanted = (
        (model, nn.Module, "model", "a torch.nn.Module", "Pass the whole model."),
        (mesh, Mesh, "mesh", "a npuzero.Mesh", "Pass what npuzero.mesh(pipe=...) returned."),
    )
    for value, kind, name, expected, do in wanted:
        if not isinstance(value, kind):
            raise ConfigError(f"npuzero.pipeline(): {name}", expected=expected, got=describe_value(value), do=do)
    if loss_fn is not None and not callable(loss_fn):
        do = "Give a function of the model's output and its targets."
        raise ConfigError(
            "npuzero.pipeline(): loss_fn", expected="a function, or None", got=describe_value(loss_fn), do=do
        )


def check_given_ranks(world: object, mesh: object, subject: str = "npuzero.zero()") -> World | Mesh | None:
    """Return the ranks that a program passed to ``subject``: a world, a mesh, a mesh and its world, or none.

    Raises:
        ConfigError: a wrong type, or the world is not the mesh's.
    """
    if world is None and mesh is None:
        return None
    ranks, kind, name = (world, World, "world") if mesh is None else (mesh, Mesh, "mesh")
    if not isinstance(ranks, kind):
        do = (
            "Leave it out, or pass what npuzero.init() returned."
            if mesh is None
            else "Pass what npuzero.mesh() returned."
        )
        raise ConfigError(f"{subject}: {name}", expected=f"a {public_name(kind)}", got=describe_value(ranks), do=do)
    if isinstance(ranks, Mesh) and world not in (None, ranks.world):
        do = "Give the mesh alone."
        raise ConfigError(subject, expected="the world of the mesh", got=f"{world} and {mesh}", do=do)
    return ranks
