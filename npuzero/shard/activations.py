"""Activations in farther memory: what torch's activation checkpointing keeps from forward to backward.

torch.utils.checkpoint keeps the inputs of what it will run again, and nothing that is computed inside. These inputs
are all that moves: they are what remains of a checkpointed model's activations, each is needed once, in the reverse
order, and between them lies the time of a block. What is saved outside of checkpointing is mostly needed soon, and
stays where it is; so do parameters and views of them, what needs no gradient (masks, positions), and what is small.

How it is seen: the model's forward runs within saved_tensors_hooks. While torch's checkpoint runs a block it has hooks
of its own, which hide these; it saves its inputs outside of them, from its own module, by which they are known.

Names used here::

    save      one time that a tensor is saved; autograd has it instead of the tensor
    item      a tensor's bytes, once, however often it is saved; it lives as long as one of its saves
    home      where they rest
    ahead     what is on its way back before autograd asks: what was saved before that which it asks for now

On the way out one copy runs while the next block computes, and the tensor lives until it is done; on the way back one
copy runs ahead of the block that computes. So the device holds two of them, whatever the number of blocks.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from npuzero.comm import Communicator
from npuzero.device import Handle
from npuzero.errors import ConfigError, StateError
from npuzero.memory import Run, Spaces
from npuzero.plan import Memory, Placement
from npuzero.shard.counting import CountingMesh
from npuzero.shard.entrance import Visit
from npuzero.shard.flat import Flat
from npuzero.shard.guard import in_backward
from npuzero.shard.homes import Home, home_on_device, home_on_disk, home_on_host
from npuzero.shard.rest import Group
from npuzero.shard.writes import digest

#: Tensors of fewer bytes stay on the device.
SMALL_BYTES = 2**16
# A rank's part of a tensor that ranks divide: whole blocks of so many bytes.
_PART_BYTES = 512


class _Near(NamedTuple):
    """Hold what stays on the device."""

    tensor: Tensor
    version: int


class _Item:
    """Hold one tensor's bytes elsewhere; see the module's text."""

    def __init__(self, near: _Near, home: Home, runs: list[Run], stored: Handle) -> None:
        self.near: _Near | None = near  # until it is stored
        self._home, self.runs = home, runs
        self.stored: Handle | None = stored  # until somebody has waited
        self.lost = False  # it was not stored
        like = near.tensor
        self.storage = StorageWeakRef(like.untyped_storage())  # as long as it lives no other storage has this address
        self.shape, self.stride, self.dtype, self.nbytes = like.shape, like.stride(), like.dtype, like.nbytes
        self.written = False  # while it was on its way
        self.saves = self.asked = 0
        self.last_pass = -1  # of autograd that asked
        self.here: Tensor | None = None  # uint8, on the device again
        self.arrival: Handle | None = None

    def settle(self) -> None:
        """Wait until it is stored; raises what became of that, once."""
        if self.stored is None:
            return
        # An error that is kept has the frames of who waited, these the loss, and its graph this item: a cycle through
        # autograd, in which the collector does not look.
        stored, self.stored = self.stored, None
        self.lost = True
        stored.wait()
        self.lost = False
        if self.near is not None:
            self.written = self.near.tensor._version != self.near.version
            self.near = None

    def __del__(self) -> None:
        self._home.give(self.runs)


class _Forward:
    """Hold the saves of one forward, in order."""

    def __init__(self) -> None:
        self.saves: list[weakref.ref[_Save]] = []
        self.ahead: weakref.ref[_Item] | None = None


class _Save:
    """Stand for a tensor in autograd's graph."""

    def __init__(self, item: _Item, forward: _Forward) -> None:
        self.item = item
        self.forward = forward
        self.index = len(forward.saves)
        forward.saves.append(weakref.ref(self))
        item.saves += 1


class Activations:
    """Move what activation checkpointing keeps, around every forward of one model.

    Args:
        home: where it rests.
        device: where the model computes; tensors elsewhere stay there.
        sharers: ranks that hold equal activations, each of which keeps one part; None: each keeps its own.
    """

    def __init__(self, home: Home, device: torch.device, sharers: Communicator | None = None) -> None:
        self._home = home
        self._device = device
        self._sharers = sharers
        self._compared = False  # what the sharers hold is the same
        self._resident: set[int] = set()  # storages that stay
        self._items: weakref.WeakValueDictionary[tuple[Any, ...], _Item] = weakref.WeakValueDictionary()
        self._under_way: deque[_Item] = deque()
        self._entered: list[saved_tensors_hooks | None] = []
        self._forward = _Forward()

    def leave(self, buffers: Iterable[Tensor]) -> None:
        """Have all that lies in the memory of ``buffers`` stay."""
        self._resident.update(buffer.untyped_storage()._cdata for buffer in buffers)

    def visit(self) -> Visit:
        """Return what stands around the model's forward."""
        return Visit(self._enter, lambda module, output: self._leave(), self._leave)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._entered.append(None)
        # Hooks that are there are of a forward around this one, of whoever runs the model within a checkpoint, or of a
        # program that moves tensors itself. torch.func has none.
        hooks: Any = torch._C._autograd
        if in_backward() or not hooks._saved_tensors_hooks_is_enabled() or hooks._top_saved_tensors_default_hooks(True):
            return
        self._forward = _Forward()
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._entered[-1] = hooks

    def _leave(self) -> None:
        hooks = self._entered.pop()
        if hooks is not None:
            hooks.__exit__()

    # -- forward ---------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> _Near | _Save:
        if self._may_move(tensor) and _kept_by_checkpointing():
            return self._save(tensor)
        return _Near(tensor.detach(), tensor._version)  # the tensor itself would hold itself, where it is an output

    def _may_move(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or not tensor.requires_grad or tensor.nbytes < SMALL_BYTES:
            return False
        plain = tensor.layout == torch.strided and tensor.device == self._device
        # With the strides that it has, for sums depend on them: so a tensor with gaps, which need not move, stays.
        return plain and _span(tensor) == tensor.numel() and tensor.untyped_storage()._cdata not in self._resident

    def _save(self, tensor: Tensor) -> _Save:
        near = _Near(tensor.detach(), tensor._version)
        storage = tensor.untyped_storage()._cdata
        key = storage, near.version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        item = self._items.get(key)
        if item is None:
            item = self._items[key] = _Item(near, self._home, *self._home.store(self._part(_raw(near.tensor))))
            self._under_way.append(item)
            self._settle(1)
        return _Save(item, self._forward)

    def _settle(self, most: int) -> None:
        """Wait until at most so many tensors are on their way out."""
        while len(self._under_way) > most:
            self._under_way.popleft().settle()

    def _part(self, raw: Tensor) -> Tensor:
        """Return what this rank keeps of a tensor's bytes."""
        if self._sharers is None:
            return raw
        if not self._compared:
            _compare(raw, self._sharers)
            self._compared = True
        nbytes = self._part_bytes(raw.numel())
        part = raw[self._sharers.rank * nbytes :][:nbytes]
        return part if part.numel() == nbytes else torch.cat((part, part.new_zeros(nbytes - part.numel())))

    def _part_bytes(self, nbytes: int) -> int:
        if self._sharers is None:
            return nbytes
        blocks = -(-nbytes // (self._sharers.size * _PART_BYTES))
        return blocks * _PART_BYTES

    # -- backward --------------------------------------------------------------------------------------------------

    def _unpack(self, kept: _Near | _Save) -> Tensor:
        if type(kept) is _Near:
            if kept.tensor._version != kept.version:
                raise _written(kept.tensor)
            return kept.tensor
        assert type(kept) is _Save
        self._settle(0)
        self._start(kept.item)
        self._start_before(kept)
        return self._arrived(kept.item)

    def _start(self, item: _Item) -> None:
        if item.arrival is None:
            item.here = torch.empty(self._part_bytes(item.nbytes), dtype=torch.uint8, device=self._device)
            item.arrival = self._home.fetch(item.runs, item.here)

    def _start_before(self, save: _Save) -> None:
        """Start the way back of what was saved before ``save``, unless another has come that nobody took."""
        forward = save.forward
        ahead = None if forward.ahead is None else forward.ahead()
        if ahead is not None and ahead is not save.item and ahead.arrival is not None:
            return
        this_pass = torch._C._current_graph_task_id()
        for index in range(save.index - 1, -1, -1):
            before = forward.saves[index]()
            if before is not None and before.item.arrival is None and before.item.last_pass != this_pass:
                forward.ahead = weakref.ref(before.item)
                self._start(before.item)
                return

    def _arrived(self, item: _Item) -> Tensor:
        assert item.arrival is not None and item.here is not None
        arrival, here = item.arrival, item.here
        item.here = item.arrival = None  # for the reason that is in settle()
        arrival.wait()
        if item.lost:
            raise _lost(item)
        if item.written:
            raise _written(item)
        raw = here
        if self._sharers is not None:
            raw = torch.empty(raw.numel() * self._sharers.size, dtype=torch.uint8, device=self._device)
            self._sharers.all_gather(raw, here, tag="activation").wait()
        item.last_pass = torch._C._current_graph_task_id()
        item.asked += 1
        if item.asked % item.saves:  # another save asks for it; where none does, it comes again for a retained graph
            item.here, item.arrival = here, arrival
        return raw[: item.nbytes].view(item.dtype).as_strided(item.shape, item.stride)


_HOMES = {Memory.DEVICE: home_on_device, Memory.HOST: home_on_host, Memory.NVME: home_on_disk}


def around_forward(
    placement: Placement, spaces: Spaces, device: torch.device, flats: Iterable[Flat], mesh: CountingMesh
) -> Visit | None:
    """Return what stands around the forward of a model whose activations rest where ``placement`` says."""
    sharers = Group(mesh, placement.axes)
    if not placement.far and not sharers.many:
        return None
    home = _HOMES[placement.memory](spaces, device)
    activations = Activations(home, device, sharers.communicator("activations") if sharers.many else None)
    activations.leave(flat.whole for flat in flats)
    return activations.visit()


def _kept_by_checkpointing() -> bool:
    """Return whether torch's activation checkpointing saves an input: then its module called the hook that asks."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == torch.autograd.function.__name__:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == torch.utils.checkpoint.__name__


def _span(tensor: Tensor) -> int:
    """Return how many elements lie between the first and the last, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _raw(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor without gaps, in the order in which they lie."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _compare(raw: Tensor, sharers: Communicator) -> None:
    """Raise a ConfigError, on all of them, where sharers hold different bytes: a part of each would make nothing."""
    said = torch.empty(sharers.size * 2, dtype=torch.int64, device=raw.device)
    sharers.all_gather(said, digest(raw), tag="activations").wait()
    if not said.view(-1, 2).eq(said[:2]).all():
        raise ConfigError(
            "plan: activations.axes",
            expected="ranks of the tensor axis that hold the same activations between blocks, as under mode='mtp'",
            got="different ones: other modes divide them over these ranks already",
            do="Leave the axes out: activations=Placement(memory=...).",
        )


def _lost(tensor: _Item) -> StateError:
    return StateError(
        "backward",
        expected="activations that were stored in forward",
        got=f"one of shape {tuple(tensor.shape)} and dtype {tensor.dtype} whose storing failed",
        do="See the error that was raised then, and run forward again.",
    )


def _written(tensor: Any) -> StateError:
    return StateError(
        "backward",
        expected="a saved tensor as it was in forward",
        got=f"one of shape {tuple(tensor.shape)} and dtype {tensor.dtype} that was written in place since",
        do="Write a new tensor where the old one is needed for gradients: x = x + y instead of x += y.",
    )
