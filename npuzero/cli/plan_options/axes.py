"""``npuzero plan``: parallel axes other than ZeRO's, the model divided over them, and the traffic of its layers."""

from __future__ import annotations

import argparse

import torch

from npuzero.cli.arguments import parse_number
from npuzero.cli.plan_options import pipes
from npuzero.errors import ConfigError
from npuzero.parallel.tensor_parallel.api import MODES
from npuzero.plan import PIPE, POD, PRECISIONS, SEQUENCE, TENSOR, MeshShape, Plan
from npuzero.planner.model_work.axes import LayerTraffic, arrange_mesh, divide_model_shape
from npuzero.planner.models import ModelShape


def add_axis_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that arrange the ranks."""
    axes = parser.add_argument_group("axes (docs/tensor.md, docs/sequence.md); the other ranks have data of their own")
    pipes.add_pipe_options(axes)
    axes.add_argument("--tensor", type=parse_number, default=1, metavar="N", help="ranks that divide the layers (1)")
    axes.add_argument("--mode", choices=tuple(MODES), help="of parallel.tensor (mtp)")
    axes.add_argument(
        "--sequence", type=parse_number, default=1, metavar="N", help="ranks that share sequences (1); adds the row isp"
    )
    axes.add_argument(
        "--pod", type=parse_number, default=1, metavar="N", help="groups that nothing is sharded over (1)"
    )
    axes.add_argument(
        "--tokens",
        type=parse_number,
        metavar="N",
        help="that a rank sees in a micro-batch (of its slice, with --sequence): for what layers and stages send",
    )


def check_axis_options(options: argparse.Namespace) -> None:
    """Check that the options are consistent.

    Raises:
        ConfigError: they are not.
    """
    several = options.tensor > 1 or options.sequence > 1 or options.pipe > 1
    sliced = options.tensor > 1 and MODES[options.mode or "mtp"].sliced
    for option, wrong, needed in (
        ("mode", options.tensor == 1, "--tensor 2 or more beside it"),
        ("tokens", not several, "--tensor, --sequence or --pipe beside it"),
        ("tiles", options.tensor > 1, "layers in one piece where tensor ranks divide them"),
    ):
        if getattr(options, option) and wrong:
            raise ConfigError(f"--{option}", expected=needed, got="another", do="Leave one of them out, or say both.")
    # A mode that slices sequences gives each tensor rank an equal part of a micro-batch's tokens.
    if sliced and (options.tokens or 0) % options.tensor:
        raise ConfigError(
            "--tokens",
            expected=f"a number that {options.tensor} tensor ranks divide: --mode {options.mode} slices sequences",
            got=str(options.tokens),
            do="Pad sequences, or take --mode mtp.",
        )


def has_parallel_axes(options: argparse.Namespace) -> bool:
    """Return whether there is an axis other than ZeRO's data axes."""
    return any(size > 1 for size in (options.pipe, options.tensor, options.sequence, options.pod))


def build_mesh_shape(options: argparse.Namespace) -> MeshShape:
    """Return the sizes of the axes, arranged as :func:`npuzero.mesh` does for these ranks and hosts.

    Raises:
        ConfigError: they do not multiply to the world.
    """
    host = Plan(local_size=options.local).mesh_shape(options.world).local
    return arrange_mesh(options.world, host, **{axis: getattr(options, axis) for axis in (PIPE, POD, TENSOR, SEQUENCE)})


def divide_layers(
    model: ModelShape, mesh: MeshShape, options: argparse.Namespace
) -> tuple[ModelShape, dict[str, dict[str, int]]]:
    """Return the model divided over tensor ranks, and the bytes its layers send per step, by axis and collective.

    Bytes are returned only if --tokens is given.

    Raises:
        ConfigError: its layers or heads cannot be divided, or the division is unknown.
    """
    model = divide_model_shape(model, mesh.tensor, options.mode or "mtp")
    layers = LayerTraffic.of(model, mesh)
    if not options.tokens:
        return model, {}
    itemsize = PRECISIONS[options.precision].parameter_of(torch.float32).itemsize
    return model, layers.nbytes(mesh, itemsize, options.tokens, options.micro_batches)
