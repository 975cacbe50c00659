"""Offload the inputs that torch's activation checkpointing saves from forward to backward.

torch.utils.checkpoint saves the inputs of each checkpointed block, and nothing computed inside. Only these inputs are
offloaded: they are the remaining activations of a checkpointed model, each is needed once, in reverse order, and the
compute time of a block passes between two of them. Tensors saved outside of checkpointing are mostly needed soon and
stay on the device; so do parameters and views of them, tensors without gradient (masks, positions), and small tensors.

Detection: the model's forward runs within saved_tensors_hooks. While torch's checkpoint runs a block, its own hooks
hide these. It saves its inputs outside of its hooks, from its own module, which identifies them.

Names used here::

    save      one save of a tensor; autograd keeps it in place of the tensor
    item      a tensor's bytes, stored once for all its saves; it lives as long as one of its saves
    home      the storage of the bytes
    ahead     the item prefetched for autograd: the save before the one that it requests now

In forward, one copy to the home overlaps the next block's compute, and the tensor lives until it is done; in backward,
one copy is prefetched ahead of the computing block. So the device holds two items, for any number of blocks.
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
from npuzero.device import AsyncHandle
from npuzero.errors import ConfigError, StateError
from npuzero.memory import MemorySpaces, PageRun
from npuzero.plan import Memory, Placement
from npuzero.shard.layout.shard_specs import RankGroup
from npuzero.shard.layout.traffic_meter import CountingMesh
from npuzero.shard.modules.forward_wrapper import ForwardHook
from npuzero.shard.modules.sharded_tensor import in_backward
from npuzero.shard.offload.activation_storage import (
    ActivationStorage,
    device_activation_storage,
    disk_activation_storage,
    host_activation_storage,
)
from npuzero.shard.parameters.user_writes import digest_integers
from npuzero.shard.state.flat_parameter import FlatParameter

#: Tensors with fewer bytes stay on the device.
SMALL_BYTES = 2**16
# A rank's part of a tensor sharded over ranks is a multiple of so many bytes.
_PART_BYTES = 512


class _DeviceTensor(NamedTuple):
    """Hold a tensor that stays on the device, and its version when saved."""

    tensor: Tensor
    version: int


class _OffloadedTensor:
    """Hold one tensor's offloaded bytes: an item, see the module's docstring."""

    def __init__(self, near: _DeviceTensor, home: ActivationStorage, runs: list[PageRun], stored: AsyncHandle) -> None:
        self.near: _DeviceTensor | None = near  # until it is stored
        self._home, self.runs = home, runs
        self.stored: AsyncHandle | None = stored  # until it has been awaited
        self.lost = False  # storing it failed
        like = near.tensor
        self.storage = StorageWeakRef(like.untyped_storage())  # keeps the storage's address from being reused
        self.shape, self.stride, self.dtype, self.nbytes = like.shape, like.stride(), like.dtype, like.nbytes
        self.written = False  # the program wrote to it while it was being copied
        self.saves = self.asked = 0
        self.last_pass = -1  # the last autograd pass that requested it
        self.here: Tensor | None = None  # uint8, back on the device
        self.arrival: AsyncHandle | None = None

    def settle(self) -> None:
        """Wait until it is stored; raise an error of that once."""
        if self.stored is None:
            return
        # Drop the handle first: its error keeps the waiting frames, they the loss, and the loss's graph this item. The
        # garbage collector does not follow that cycle through autograd.
        stored, self.stored = self.stored, None
        self.lost = True
        stored.wait()
        self.lost = False
        if self.near is not None:
            self.written = self.near.tensor._version != self.near.version
            self.near = None

    def __del__(self) -> None:
        self._home.give(self.runs)


class _ForwardSaves:
    """List the saves of one forward, in order."""

    def __init__(self) -> None:
        self.saves: list[weakref.ref[_SavedReference]] = []
        self.ahead: weakref.ref[_OffloadedTensor] | None = None


class _SavedReference:
    """Represent an offloaded tensor in autograd's graph."""

    def __init__(self, item: _OffloadedTensor, forward: _ForwardSaves) -> None:
        self.item = item
        self.forward = forward
        self.index = len(forward.saves)
        forward.saves.append(weakref.ref(self))
        item.saves += 1


class ActivationOffload:
    """Move the inputs that activation checkpointing saves off the device, in every forward of one model.

    Args:
        home: storage of the offloaded bytes.
        device: compute device; tensors on other devices are not moved.
        sharers: ranks with equal activations, which they shard; None: each rank keeps its own in full.
    """

    def __init__(self, home: ActivationStorage, device: torch.device, sharers: Communicator | None = None) -> None:
        self._home = home
        self._device = device
        self._sharers = sharers
        self._compared = False  # the sharers' activations have been compared
        self._resident: set[int] = set()  # storages that stay on the device
        self._items: weakref.WeakValueDictionary[tuple[Any, ...], _OffloadedTensor] = weakref.WeakValueDictionary()
        self._under_way: deque[_OffloadedTensor] = deque()
        self._entered: list[saved_tensors_hooks | None] = []
        self._forward = _ForwardSaves()

    def leave(self, buffers: Iterable[Tensor]) -> None:
        """Leave all tensors in the storages of ``buffers`` on the device."""
        self._resident.update(buffer.untyped_storage()._cdata for buffer in buffers)

    def visit(self) -> ForwardHook:
        """Return the hook around the model's forward."""
        return ForwardHook(self._enter, lambda module, output: self._leave(), self._leave)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._entered.append(None)
        # Existing hooks belong to an enclosing forward, to a checkpoint around the model, or to a program that moves
        # tensors itself. Under torch.func saved-tensor hooks are disabled.
        hooks: Any = torch._C._autograd
        if in_backward() or not hooks._saved_tensors_hooks_is_enabled() or hooks._top_saved_tensors_default_hooks(True):
            return
        self._forward = _ForwardSaves()
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._entered[-1] = hooks

    def _leave(self) -> None:
        hooks = self._entered.pop()
        if hooks is not None:
            hooks.__exit__()

    # -- forward ---------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> _DeviceTensor | _SavedReference:
        if self._may_move(tensor) and _is_checkpoint_input():
            return self._save(tensor)
        return _DeviceTensor(
            tensor.detach(), tensor._version
        )  # detached: an output that saves itself would be a reference cycle

    def _may_move(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or not tensor.requires_grad or tensor.nbytes < SMALL_BYTES:
            return False
        plain = tensor.layout == torch.strided and tensor.device == self._device
        # Strides are restored exactly, since sums depend on them. A tensor with gaps stays: they would be copied too.
        return (
            plain and _spanned_numel(tensor) == tensor.numel() and tensor.untyped_storage()._cdata not in self._resident
        )

    def _save(self, tensor: Tensor) -> _SavedReference:
        near = _DeviceTensor(tensor.detach(), tensor._version)
        storage = tensor.untyped_storage()._cdata
        key = storage, near.version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        item = self._items.get(key)
        if item is None:
            item = self._items[key] = _OffloadedTensor(
                near, self._home, *self._home.store(self._part(_dense_bytes(near.tensor)))
            )
            self._under_way.append(item)
            # An item being stored keeps its tensor: at most one, so that device memory is bounded.
            self._settle(1)
        return _SavedReference(item, self._forward)

    def _settle(self, most: int) -> None:
        """Wait until at most ``most`` tensors are being stored."""
        while len(self._under_way) > most:
            self._under_way.popleft().settle()

    def _part(self, raw: Tensor) -> Tensor:
        """Return this rank's part of a tensor's bytes."""
        if self._sharers is None:
            return raw
        if not self._compared:
            _check_sharers_equal(raw, self._sharers)
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

    def _unpack(self, kept: _DeviceTensor | _SavedReference) -> Tensor:
        if type(kept) is _DeviceTensor:
            if kept.tensor._version != kept.version:
                raise _written_activation_error(kept.tensor)
            return kept.tensor
        assert type(kept) is _SavedReference
        self._settle(0)
        self._start(kept.item)
        self._start_before(kept)
        return self._arrived(kept.item)

    def _start(self, item: _OffloadedTensor) -> None:
        if item.arrival is None:
            item.here = torch.empty(self._part_bytes(item.nbytes), dtype=torch.uint8, device=self._device)
            item.arrival = self._home.fetch(item.runs, item.here)

    def _start_before(self, save: _SavedReference) -> None:
        """Start the prefetch of the item saved before ``save``, unless an earlier prefetch is still unused."""
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

    def _arrived(self, item: _OffloadedTensor) -> Tensor:
        assert item.arrival is not None and item.here is not None
        arrival, here = item.arrival, item.here
        item.here = item.arrival = None  # avoids the cycle described in settle()
        arrival.wait()
        if item.lost:
            raise _lost_activation_error(item)
        if item.written:
            raise _written_activation_error(item)
        raw = here
        if self._sharers is not None:
            raw = torch.empty(raw.numel() * self._sharers.size, dtype=torch.uint8, device=self._device)
            self._sharers.all_gather(raw, here, tag="activation").wait()
        item.last_pass = torch._C._current_graph_task_id()
        item.asked += 1
        if item.asked % item.saves:  # keep it for its next save; a retained graph fetches it again
            item.here, item.arrival = here, arrival
        return raw[: item.nbytes].view(item.dtype).as_strided(item.shape, item.stride)


_HOMES = {
    Memory.DEVICE: device_activation_storage,
    Memory.HOST: host_activation_storage,
    Memory.NVME: disk_activation_storage,
}


def make_activation_hook(
    placement: Placement, spaces: MemorySpaces, device: torch.device, flats: Iterable[FlatParameter], mesh: CountingMesh
) -> ForwardHook | None:
    """Return the forward hook that offloads a model's activations as ``placement`` describes; None if it need not."""
    sharers = RankGroup(mesh, placement.axes)
    if not placement.far and not sharers.many:
        return None
    home = _HOMES[placement.memory](spaces, device)
    activations = ActivationOffload(home, device, sharers.communicator("activations") if sharers.many else None)
    activations.leave(flat.whole for flat in flats)
    return activations.visit()


def _is_checkpoint_input() -> bool:
    """Return whether torch's activation checkpointing called the pack hook, to save an input."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == torch.autograd.function.__name__:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == torch.utils.checkpoint.__name__


def _spanned_numel(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last in memory, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _dense_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor without gaps, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _check_sharers_equal(raw: Tensor, sharers: Communicator) -> None:
    """Raise a ConfigError on all sharers if their bytes differ: parts of different tensors cannot be joined."""
    said = torch.empty(sharers.size * 2, dtype=torch.int64, device=raw.device)
    sharers.all_gather(said, digest_integers(raw), tag="activations").wait()
    if not said.view(-1, 2).eq(said[:2]).all():
        raise ConfigError(
            "plan: activations.axes",
            expected="ranks of the tensor axis that hold the same activations between blocks, as under mode='mtp'",
            got="different ones: other modes divide them over these ranks already",
            do="Leave the axes out: activations=Placement(memory=...).",
        )


def _lost_activation_error(tensor: _OffloadedTensor) -> StateError:
    return StateError(
        "backward",
        expected="activations that were stored in forward",
        got=f"one of shape {tuple(tensor.shape)} and dtype {tensor.dtype} whose storing failed",
        do="See the error that was raised then, and run forward again.",
    )


def _written_activation_error(tensor: Any) -> StateError:
    return StateError(
        "backward",
        expected="a saved tensor as it was in forward",
        got=f"one of shape {tuple(tensor.shape)} and dtype {tensor.dtype} that was written in place since",
        do="Write a new tensor where the old one is needed for gradients: x = x + y instead of x += y.",
    )
