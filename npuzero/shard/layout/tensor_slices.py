"""Cuts as parameters carry them: said before a model is sharded, applied as it is, and undone on every way out.

A parameter that is cut is whole until ``npuzero.zero()``: initialisation and files see all of it. There each rank takes
its part, which is the parameter from then on. State dicts, exported files and checkpoints have whole tensors again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from npuzero.errors import ConfigError
from npuzero.memory import allocate_zeros
from npuzero.plan import STAGE, Cut, CutBlock, Relation, TensorPortion
from npuzero.shard.layout.axis_relations import relate_parameter
from npuzero.shard.layout.traffic_meter import CountingMesh

_CUT, _PORTION = "_npuzero_cut", "_npuzero_portion"

#: Elements of a tensor that are read, or sent, at once.
PIECE = 2**20


def cut_parameter(parameter: nn.Parameter, cut: Cut) -> None:
    """Say that ranks along an axis are to have different parts of ``parameter``; alike on all ranks.

    A parameter that is registered in two places is one, and has one cut.

    Raises:
        ConfigError: it has another cut already, the cut is none of its shape, or there is no such axis.
    """
    subject = f"a cut of a parameter of shape {tuple(parameter.shape)}"
    known = get_cut(parameter)
    if known is not None and known != cut:
        do = "Cut a parameter that two modules have alike in both, or give each module one of its own."
        raise ConfigError(subject, expected=f"the one that it has: {known}", got=str(cut), do=do)
    if not set(cut.axes) <= set(STAGE):
        do = "Name an axis whose ranks train the same modules."
        raise ConfigError(subject, expected=f"axes among {STAGE}", got=repr(cut.axes), do=do)
    cut.check(f"of shape {tuple(parameter.shape)}", parameter.shape, 1)
    for axis in cut.axes:
        relate_parameter(parameter, axis, Relation.CUT)
    setattr(parameter, _CUT, cut)


def get_cut(parameter: nn.Parameter) -> Cut | None:
    """Return the cut of ``parameter``; None: nobody has said any."""
    return getattr(parameter, _CUT, None)


def get_local_portion(parameter: nn.Parameter, mesh: CountingMesh) -> TensorPortion | None:
    """Return what this rank is to have of a parameter that is whole; None: all of it."""
    cut = get_cut(parameter)
    if cut is None or mesh.size(cut.axes) == 1:
        return None
    return TensorPortion(cut, parameter.shape, mesh.size(cut.axes), mesh.index(cut.axes))


def set_portion(parameter: nn.Parameter, portion: TensorPortion | None) -> None:
    """Note what ``parameter``, which is whole no more, has of the tensor that it was."""
    setattr(parameter, _PORTION, portion)


def get_portion(parameter: Tensor) -> TensorPortion | None:
    """Return what ``parameter`` has of a tensor in the state dict; None: all of it."""
    return getattr(parameter, _PORTION, None)


def full_tensor_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of the tensor in the state dict."""
    portion = get_portion(parameter)
    return parameter.shape if portion is None else portion.whole


def gather_cut_blocks(
    portion: TensorPortion, mesh: CountingMesh, dtype: torch.dtype, read: Callable[[int, int], Tensor]
) -> Iterator[tuple[CutBlock, Tensor]]:
    """Yield all elements of a cut tensor in their order, from what ranks have of it. Collective along the cut's axes.

    Args:
        dtype: of the elements.
        read: gives elements ``[begin, end)`` of this rank's part, 1-D; what it is asked for follows each other.

    Yields:
        which elements, and themselves: 1-D, on the device.
    """
    communicator = mesh.communicator(portion.cut.axes, "control")
    for block in portion.blocks(PIECE):
        begin, end = portion.share_of(block)
        values = allocate_zeros(block.end - block.begin, dtype, communicator.device)
        if block.owner is not None:
            if begin < end:
                values.copy_(read(begin, end))
            communicator.broadcast(values, root=block.owner, tag="part").wait()
        else:
            shares = allocate_zeros(values.numel(), dtype, communicator.device)
            communicator.all_gather(shares, read(begin, end).to(communicator.device), tag="parts").wait()
            for index, share in enumerate(shares.split(end - begin)):
                portion.of(index).into(block, values, share)
        yield block, values


def gather_full_tensor(portion: TensorPortion, mesh: CountingMesh, part: Tensor) -> Tensor:
    """Return the whole tensor, on the device where ``part`` is, this rank's of it. Collective along the cut's axes."""
    whole = allocate_zeros(portion.whole.numel(), part.dtype, part.device)
    mine = part.detach().reshape(-1)
    for block, values in gather_cut_blocks(portion, mesh, part.dtype, lambda begin, end: mine[begin:end]):
        whole[block.begin : block.end].copy_(values)
    return whole.view(portion.whole)
