"""Record on parameters how they are cut over tensor ranks, and gather the full tensors again.

A cut is recorded before a model is sharded. Until ``npuzero.zero()`` the parameter is the full tensor, for
initialization and files. ``npuzero.zero()`` keeps this rank's part as the parameter. State dicts, exported files and
checkpoints have full tensors again.
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

#: Elements of a tensor to read or send at once.
PIECE = 2**20


def cut_parameter(parameter: nn.Parameter, cut: Cut) -> None:
    """Record that ranks along an axis will have different parts of ``parameter``; the same cut on all ranks.

    A parameter registered in two places has one cut.

    Raises:
        ConfigError: the parameter has another cut already, the cut does not fit its shape, or the axis is unknown.
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
    """Return the cut of ``parameter``; None: no cut is recorded."""
    return getattr(parameter, _CUT, None)


def get_local_portion(parameter: nn.Parameter, mesh: CountingMesh) -> TensorPortion | None:
    """Return the portion that this rank will have of an uncut parameter; None: all of it."""
    cut = get_cut(parameter)
    if cut is None or mesh.size(cut.axes) == 1:
        return None
    return TensorPortion(cut, parameter.shape, mesh.size(cut.axes), mesh.index(cut.axes))


def set_portion(parameter: nn.Parameter, portion: TensorPortion | None) -> None:
    """Record the portion of the full tensor that ``parameter``, now cut, has."""
    setattr(parameter, _PORTION, portion)


def get_portion(parameter: Tensor) -> TensorPortion | None:
    """Return the portion of its state dict tensor that ``parameter`` has; None: all of it."""
    return getattr(parameter, _PORTION, None)


def full_tensor_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of the parameter's tensor in the state dict."""
    portion = get_portion(parameter)
    return parameter.shape if portion is None else portion.whole


def gather_cut_blocks(
    portion: TensorPortion, mesh: CountingMesh, dtype: torch.dtype, read: Callable[[int, int], Tensor]
) -> Iterator[tuple[CutBlock, Tensor]]:
    """Yield all elements of a cut tensor in order, from the parts of its ranks. Collective along the cut's axes.

    Args:
        dtype: of the elements.
        read: returns elements ``[begin, end)`` of this rank's part, 1-D; called with consecutive ranges.

    Yields:
        (block, values): the range of elements, and its values, 1-D on the device.
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
    """Return the full tensor, on the device of this rank's ``part``. Collective along the cut's axes."""
    whole = allocate_zeros(portion.whole.numel(), part.dtype, part.device)
    mine = part.detach().reshape(-1)
    for block, values in gather_cut_blocks(portion, mesh, part.dtype, lambda begin, end: mine[begin:end]):
        whole[block.begin : block.end].copy_(values)
    return whole.view(portion.whole)
