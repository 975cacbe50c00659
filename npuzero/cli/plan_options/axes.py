"""What ``npuzero plan`` knows of axes beside ZeRO's own: their sizes, the model divided over them, what layers send."""

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
    """Add what says how the ranks are arranged."""
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
    """Check that options make sense together.

    Raises:
        ConfigError: they do not.
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
    if sliced and (options.tokens or 0) % options.tensor:
        raise ConfigError(
            "--tokens",
            expected=f"a number that {options.tensor} tensor ranks divide: --mode {options.mode} slices sequences",
            got=str(options.tokens),
            do="Pad sequences, or take --mode mtp.",
        )


def has_parallel_axes(options: argparse.Namespace) -> bool:
    """Tell whether there is any axis beside those that ZeRO has of itself."""
    return any(size > 1 for size in (options.pipe, options.tensor, options.sequence, options.pod))


def build_mesh_shape(options: argparse.Namespace) -> MeshShape:
    """Return the sizes of the axes, as :func:`npuzero.mesh` arranges as many ranks, so many of them on each host.

    Raises:
        ConfigError: they do not multiply to the world.
    """
    host = Plan(local_size=options.local).mesh_shape(options.world).local
    return arrange_mesh(options.world, host, **{axis: getattr(options, axis) for axis in (PIPE, POD, TENSOR, SEQUENCE)})


def divide_layers(
    model: ModelShape, mesh: MeshShape, options: argparse.Namespace
) -> tuple[ModelShape, dict[str, dict[str, int]]]:
    """Return the model with its parameters cut over tensor ranks, and by axis and collective the bytes that its layers
    send in a step, where --tokens says of how many.

    Raises:
        ConfigError: its layers or heads cannot be divided, or how that is done is not known.
    """
    model = divide_model_shape(model, mesh.tensor, options.mode or "mtp")
    layers = LayerTraffic.of(model, mesh)
    if not options.tokens:
        return model, {}
    itemsize = PRECISIONS[options.precision].parameter_of(torch.float32).itemsize
    return model, layers.nbytes(mesh, itemsize, options.tokens, options.micro_batches)
