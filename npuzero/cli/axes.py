"""What ``npuzero plan`` knows of axes beside ZeRO's own: their sizes, the model divided over them, what layers send."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch

from npuzero.cli import pipes
from npuzero.cli.arguments import number
from npuzero.comm.mesh import groups_of
from npuzero.errors import ConfigError
from npuzero.parallel.division import divide
from npuzero.parallel.tensor import MODES, note
from npuzero.plan import PIPE, POD, PRECISIONS, SEQUENCE, TENSOR, MeshShape, Plan, ring_bytes
from npuzero.planner.axes import around_attention, around_layers
from npuzero.planner.models import ModelShape
from npuzero.shard.build import units_of

#: By axis and collective, the bytes that the layers of one rank send in a step.
LayerBytes = dict[str, dict[str, int]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what says how the ranks are arranged."""
    axes = parser.add_argument_group("axes (docs/tensor.md, docs/sequence.md); the other ranks have data of their own")
    pipes.add_options(axes)
    axes.add_argument("--tensor", type=number, default=1, metavar="N", help="ranks that divide the layers (1)")
    axes.add_argument("--mode", choices=tuple(MODES), help="of parallel.tensor (mtp)")
    axes.add_argument(
        "--sequence", type=number, default=1, metavar="N", help="ranks that share sequences (1); adds the row isp"
    )
    axes.add_argument("--pod", type=number, default=1, metavar="N", help="groups that nothing is sharded over (1)")
    axes.add_argument(
        "--tokens",
        type=number,
        metavar="N",
        help="that a rank sees in a micro-batch (of its slice, with --sequence): for what layers and stages send",
    )


def check_options(options: argparse.Namespace) -> None:
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


def arranged(options: argparse.Namespace) -> bool:
    """Tell whether there is any axis beside those that ZeRO has of itself."""
    return any(size > 1 for size in (options.pipe, options.tensor, options.sequence, options.pod))


def mesh_shape(options: argparse.Namespace) -> MeshShape:
    """Return the sizes of the axes, as :func:`npuzero.mesh` arranges as many ranks, so many of them on each host.

    Raises:
        ConfigError: they do not multiply to the world.
    """
    hosts = Plan(local_size=options.local).mesh_shape(options.world)
    stage = groups_of(PIPE, options.pipe, options.world, options.world)
    data = groups_of(TENSOR, options.tensor, stage, options.world)
    pod = groups_of(POD, options.pod, data, options.world)
    groups_of(SEQUENCE, options.sequence, data, options.world)
    local = math.gcd(max(1, hosts.local // options.tensor), pod)
    sizes = {axis: getattr(options, axis) for axis in (PIPE, POD, TENSOR, SEQUENCE)}
    return MeshShape(pod // local, local, **sizes)


def divided(model: ModelShape, options: argparse.Namespace) -> tuple[ModelShape, LayerBytes]:
    """Return the model with its parameters cut over tensor ranks, and what its layers send where --tokens says of how
    many.

    Raises:
        ConfigError: its layers or heads cannot be divided, or how that is done is not known.
    """
    if options.tensor == options.sequence == 1:
        return model, {}
    if model.module is None:
        raise _unknown(model.name, options, "none that is known without transformers", "Run: pip install transformers.")
    module = model.module()
    sent: LayerBytes = {}
    if options.tensor > 1:
        mode = MODES[options.mode or "mtp"]
        if not getattr(module, "tp_plan", None):
            do = "In a program give parallel.tensor(plan=...) the words, and npuzero.predict the model."
            raise _unknown(model.name, options, f"none in {type(module).__name__}", do)
        division = divide(module, None, options.tensor, mode.sliced)
        note(module, division)
        model = replace(model, units=units_of(module), module=lambda: module)
        sent[TENSOR] = _sent(around_layers(module, division, mode), options.tensor, options)
    if options.sequence > 1:
        swaps = list(around_attention(module, options.tensor, options.sequence))
        sent[SEQUENCE] = _sent(swaps, options.sequence, options)
    return model, sent if options.tokens else {}


def _unknown(name: str, options: argparse.Namespace, got: str, do: str) -> ConfigError:
    option = "tensor" if options.tensor > 1 else "sequence"
    expected = "a kind of model whose division is known: base_model_tp_plan of transformers"
    return ConfigError(f"{name}: --{option} {getattr(options, option)}", expected=expected, got=got, do=do)


def _sent(collectives: Iterable[tuple[str, str, int]], ranks: int, options: argparse.Namespace) -> dict[str, int]:
    """Return the bytes by collective of a step; ``collectives``: whose, which, and the features of each token."""
    itemsize = PRECISIONS[options.precision].parameter_of(torch.float32).itemsize
    sent: Counter[str] = Counter()
    for _, verb, features in collectives:
        nbytes = ring_bytes(verb, (options.tokens or 0) * features * itemsize, ranks)
        sent[verb] += options.micro_batches * nbytes
    return dict(sent)
