"""Initial values of a model: its own tensors on rank 0, files, or its modules' initialisation.

A model built on ``meta`` has shapes and no data. Each rank reads from files only the ranges of its shards. Values that
are not in files are initialised module by module, one unit at a time, and broadcast from rank 0. So a rank holds at
most one unsharded unit in addition to its shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from npuzero.comm import Mesh
from npuzero.errors import CheckpointError, ConfigError
from npuzero.memory import allocate_zeros
from npuzero.plan import STAGE
from npuzero.shard.layout.find_units import UnitSpec, enclosing_paths

#: Fills the parameters and buffers of a module, like a function for ``nn.Module.apply``. It is called with each module
#: that contains a tensor without values, inner modules first, while all other tensors are on meta. None: use the
#: modules' ``reset_parameters()``.
Initialize = Callable[[nn.Module], object] | None


class StoredValues(Protocol):
    """Provide values of tensors by name, as files do."""

    def check(self, model: nn.Module) -> str:
        """Return a text that must be equal on all ranks; raise a CheckpointError if the values do not fit the model."""

    def unknown(self) -> list[str]:
        """Return the stored names that the model lacks, if that is an error."""

    def unknown_to(self, names: list[str]) -> CheckpointError:
        """Return the error that no model has ``names``."""

    def has(self, name: str) -> bool:
        """Return whether values of the parameter or buffer ``name`` are stored."""

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Return the elements ``[begin, end)`` of ``name``: 1-D, on the CPU, in their stored dtype."""


class InitialValues:
    """Provide the initial values of one model.

    Args:
        stored: values that replace the model's own; None: no replacement.
        initialize: see :data:`Initialize`.
    """

    def __init__(self, stored: StoredValues | None = None, initialize: Initialize = None) -> None:
        self._stored = stored
        self._initialize = initialize

    def check(self, model: nn.Module, alone: bool = True) -> str:
        """Check that every tensor on meta will get values; return a text that must be equal on all ranks.

        Args:
            alone: whether this is the full model; else further stored names may belong to other stages.

        Raises:
            CheckpointError: the stored values do not fit.
            ConfigError: a tensor has no source of values.
        """
        agreed = "" if self._stored is None else self._stored.check(model)
        if alone and self._stored is not None and self._stored.unknown():
            raise self._stored.unknown_to(self._stored.unknown())
        # If only some tensors are on meta, that is a mistake unless weights= or initialize= gives their values.
        intended = (
            self._stored is not None or self._initialize is not None or all(p.is_meta for p in model.parameters())
        )
        for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in named:
                makers = [] if self.has(name) or not tensor.is_meta else self._makers(model, {name})
                if tensor.is_meta and not self.has(name) and not (intended and makers):
                    raise ConfigError(
                        f"{kind} {name}",
                        expected="data, values in weights=, or a module around it that can initialise it",
                        got="a tensor on meta" + (", and no module with reset_parameters()" if not makers else ""),
                        do="Give weights=, or initialize=, which is called with the modules around such a tensor; "
                        "or load the model before npuzero.zero().",
                    )
        return agreed

    def check_stages(self, mesh: Mesh) -> None:
        """Check that every stored name belongs to some pipeline stage. Collective over all stages.

        Raises:
            CheckpointError: on every rank: a name belongs to no stage.
        """
        unknown = [] if self._stored is None else self._stored.unknown()
        said = mesh.world.exchange(None if mesh.index(STAGE) else unknown)[:: mesh.size(STAGE)]
        strangers = sorted(set.intersection(*map(set, said)))
        if strangers and self._stored is not None:
            raise self._stored.unknown_to(strangers)

    def has(self, name: str) -> bool:
        """Return whether values of ``name`` are stored."""
        return self._stored is not None and self._stored.has(name)

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Return stored elements, see :meth:`StoredValues.read`."""
        assert self._stored is not None
        return self._stored.read(name, begin, end)

    def fill_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Fill the model's buffers with stored values, or with their modules' initialisation."""
        made = {}
        for name, buffer in model.named_buffers():
            if self.has(name):
                stored = self.read(name, 0, buffer.numel()).view(buffer.shape)
                set_tensor_data(buffer, stored.to(device, buffer.dtype))
            elif buffer.is_meta:
                made[name] = buffer
        self._make(model, made, device)

    def fill_unit(self, model: nn.Module, spec: UnitSpec, device: torch.device) -> None:
        """Fill the parameters of a unit that are on meta and not stored, by their modules' initialisation."""
        self._make(model, {name: p for name, p in spec.parameters if p.is_meta and not self.has(name)}, device)

    def _make(self, model: nn.Module, tensors: dict[str, Tensor], device: torch.device) -> None:
        if not tensors:
            return
        # Mark first: a tensor that its module forgets to initialise would otherwise train from uninitialised memory.
        for tensor in tensors.values():
            set_tensor_data(tensor, _make_unset(tensor, device))
        with _hide_on_meta(model, tensors.values()):
            for make in self._makers(model, tensors):
                make()
        for name, tensor in tensors.items():
            if tensor.numel() and _is_unset(tensor):
                raise ConfigError(
                    f"first values of {name}",
                    expected=f"to be filled by {'initialize=' if self._initialize else 'reset_parameters()'}",
                    got="a tensor that it left as it was",
                    do="Give an initialize= that fills the parameters and buffers of the modules it is called with.",
                )

    def _makers(self, model: nn.Module, names: Collection[str]) -> list[Callable[[], object]]:
        """Return the calls that initialise the tensors ``names``: one per enclosing module, inner modules first.

        Later modules come before earlier ones, so that the first module that has a tied tensor decides its values.
        """
        paths = {""} | {path for name in names for path in enclosing_paths(name)}
        found: list[Callable[[], object] | None] = []
        for path, module in reversed(list(model.named_modules())):
            if path not in paths:
                continue
            if self._initialize is not None:
                found.append(partial(self._initialize, module))
            else:  # torch's modules have either name
                found.append(getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None))
        return [make for make in found if make is not None]


def set_tensor_data(tensor: Tensor, data: Tensor) -> None:
    """Set the data of ``tensor``, also if it is on meta, and keep the object that modules and optimizers refer to."""
    if tensor.device.type == data.device.type:
        tensor.data = data
    else:
        other = _wrap_like(tensor, data)
        other.__class__ = type(tensor)
        other.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, other)


def _wrap_like(tensor: Tensor, data: Tensor) -> Tensor:
    return nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


@contextlib.contextmanager
def _hide_on_meta(model: nn.Module, kept: Collection[Tensor]) -> Iterator[None]:
    """Move all tensors of ``model`` except ``kept`` to meta inside the context, so that filling them has no effect."""
    keep = {id(tensor) for tensor in kept}
    others = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in keep and not t.is_meta]
    with torch._C.DisableTorchFunctionSubclass():
        hidden = [(t, _wrap_like(t, torch.empty_like(t, device="meta"))) for t in others]
    # Swap, do not replace: modules and closures of initialisers refer to these objects.
    for tensor, twin in hidden:
        torch.utils.swap_tensors(tensor, twin)
    try:
        yield
    finally:
        for tensor, twin in hidden:
            torch.utils.swap_tensors(tensor, twin)


# Marks a tensor that has not been filled: no initialisation leaves this value in all elements.
def _unset_value(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _make_unset(like: Tensor, device: torch.device) -> Tensor:
    return allocate_zeros(like.numel(), like.dtype, device).fill_(_unset_value(like.dtype)).view(like.shape)


def _is_unset(tensor: Tensor) -> bool:
    if tensor.dtype in (torch.bool, torch.uint8):  # any value may be meant
        return False
    mark = _unset_value(tensor.dtype)
    return bool((tensor.isnan() if mark != mark else tensor == mark).all())
