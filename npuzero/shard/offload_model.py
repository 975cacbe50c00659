"""Offload a model's entire training state to the host, while the program uses the device's memory otherwise.

While it is offloaded, its only copy is on the host, parameters cannot be read, and any use of it raises a StateError.
Storage objects stay, so parameters are still views of their flat buffers afterwards.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from npuzero.comm.watchdog.call_names import collective_call, find_call_site
from npuzero.errors import StateError
from npuzero.memory import MemorySpaces, SpaceOffload, find_foreign_buffers
from npuzero.shard.find_engine import engine_of
from npuzero.shard.gradients.reduce_scatter import GradientReducer
from npuzero.shard.modules.sharded_tensor import in_backward
from npuzero.shard.parameters.all_gather_updated import UpdatedParameterGatherer
from npuzero.shard.parameters.full_parameters import FullParameters
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.unit import Unit
from npuzero.shard.step.forward_backward import ForwardBackward
from npuzero.shard.step.optimizer_update import OptimizerUpdate


@contextlib.contextmanager
def offloaded(model: nn.Module) -> Iterator[None]:
    """Move the model's entire training state to the host inside the block, and free its device memory.

    For a program that needs the device for other work, such as generation between two updates of a policy. It offloads
    parameters, present gradients, near states of every optimizer, pools, and module buffers, which can be used on the
    host inside the block. torch's allocator also returns the memory. At the end of the block everything is restored,
    bit by bit. Enter it on every rank, between passes: it waits for running work, such as the end of an update, and
    sends nothing itself. Nested in a block for the same model it does nothing.

    Inside, a pass, ``step()`` or a read of parameters, gradients or optimizer states is a StateError; :func:`report`
    returns the bytes held. Parameters stay the same objects and views of the same storages, but their addresses may
    change: capture graphs again afterwards. Do not use earlier views of parameters inside the block.

    Raises:
        StateError: the model is not sharded, or its parameters are in use, in a pass or within :func:`gathered`.
        OutOfSpace: on entry: the host has too little memory; nothing has moved. On exit: the device has too little, and
            the model stays offloaded; retry later by ``with npuzero.offloaded(model): pass``.

    Example::

        with npuzero.offloaded(model):
            print(npuzero.report(model).memory)  # nothing on the device; another model may have it
        loss = model(x).sum()
    """
    engine = engine_of(model)
    engine.absence.begin()
    absence_of = weakref.ref(engine.absence)
    del engine, model  # the program may delete the model inside the block, which frees all its memory
    try:
        yield
    finally:
        absence = absence_of()
        if absence is not None:
            absence.end()


class TensorHolder(Protocol):
    """Hold tensors of a model that are not allocated by its memory spaces."""

    def tensors_of(self, flats: Iterable[FlatParameter]) -> Iterable[Tensor]:
        """Return the tensors that belong to ``flats``."""


class _OffloadedBuffer(NamedTuple):
    """Record that a module's buffer ``name``, the tensor ``own``, is replaced by ``host``."""

    module: nn.Module
    name: str
    own: Tensor
    host: Tensor


class ModelOffload:
    """Move the training state of one model from the device to the host, and back.

    Attributes:
        away: whether it is offloaded.
        times: number of times it has been restored; each may change addresses.
        beside: further holders of its tensors.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        spaces: MemorySpaces,
        values: FullParameters,
        update: OptimizerUpdate,
        reducer: GradientReducer,
        restorer: UpdatedParameterGatherer,
        passes: ForwardBackward,
    ) -> None:
        self._units = units
        self._flats = [flat for unit in units for flat in unit.trainable]
        self._values = values
        self._update = update
        self._reducer = reducer
        self._restorer = restorer
        self._passes = passes
        self._evacuation = SpaceOffload(spaces)
        self._device = spaces.device.device
        self._swapped: list[_OffloadedBuffer] = []
        self._depth = 0
        self.away = False
        self.times = 0
        self.beside: weakref.WeakSet[TensorHolder] = weakref.WeakSet()

    @collective_call("offloaded")
    def begin(self) -> None:
        """Move the training state to the host after all running work has ended; do nothing if it is there already.

        Raises:
            StateError: parameters are in use.
            OutOfSpace: the host has too little memory; nothing has moved.
        """
        if not self.away:
            self._check_idle()
            self._values.bring_home()
            self._update.settle()
            self._reducer.drain()
            self._leave()
        self._depth += 1

    @collective_call("offloaded")
    def end(self) -> None:
        """Move the training state back, at the end of the outermost block.

        Raises:
            OutOfSpace: the device has too little memory; the rest stays on the host.
        """
        self._depth -= 1
        if self._depth:
            return
        self._evacuation.come_back()
        for module, name, own, host in self._swapped:
            if module._buffers.get(name) is host:  # else the program has replaced it
                module._buffers[name] = own
        self._swapped = []
        self._restorer.refusal = None
        self.away = False
        self.times += 1
        for unit in self._units:
            if not unit.guarded:
                unit.reopen()

    @property
    def nbytes(self) -> int:
        """Return the number of offloaded bytes."""
        return self._evacuation.nbytes

    def _check_idle(self) -> None:
        inside = {
            "a forward": self._passes.inside,
            "a backward pass, or after one that raised": in_backward() or self._reducer.open,
            "npuzero.gathered()": self._values.opened,
        }
        for what in (what for what, so in inside.items() if so):
            raise StateError(
                "npuzero.offloaded",
                expected="a call between passes, when nothing uses the model's parameters",
                got=f"one inside {what}",
                do="Enter it after backward() or step() has returned; after an exception call zero_grad() first.",
            )

    def _leave(self) -> None:
        buffers = list(self._buffers())
        states = [t for tenant in self.beside for t in tenant.tensors_of(self._flats) if t.device == self._device]
        blocks = [
            *find_foreign_buffers((own for _, _, own in buffers), "buffers"),
            *find_foreign_buffers(states, "states"),
        ]
        copies = self._evacuation.leave(blocks)
        self.away = True
        self._restorer.refusal = _offloaded_model_error
        for unit in self._units:
            unit.close()
        self._swap(buffers, {block.raw.untyped_storage()._cdata: c for block, c in zip(blocks, copies, strict=True)})

    def _buffers(self) -> Iterable[tuple[nn.Module, str, Tensor]]:
        """Yield the buffers of the model's modules on the device."""
        model = self._units[0].module()
        for module in model.modules() if model is not None else ():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device == self._device and buffer.layout is torch.strided:
                    yield module, name, buffer

    def _swap(self, buffers: Iterable[tuple[nn.Module, str, Tensor]], copies: dict[int, Tensor]) -> None:
        """Replace the modules' buffers by copies on the host, which programs may read and write."""
        for module, name, own in buffers:
            copy = copies.get(own.untyped_storage()._cdata)
            if copy is not None:
                whole = copy.view(own.dtype)
                host = whole.as_strided(own.shape, own.stride(), own.storage_offset())
                module._buffers[name] = host
                self._swapped.append(_OffloadedBuffer(module, name, own, host))


def _offloaded_model_error() -> StateError:
    call = find_call_site().call
    return StateError(
        f"{call} of a model that is offloaded" if call else "reading or writing a model that is offloaded",
        expected="its training state on the device",
        got="a call within npuzero.offloaded(model), which has brought that to the host's memory",
        do="Leave the block first; inside it npuzero.report(model) and zero_grad() work.",
    )
