"""Lets operators on npu tensors compute, on the host: the fake device's memory is host memory.

Only for tests of what surrounds the computation. An operator waits for the current stream, as a kernel on it would
start after what was issued before, and computes at once; so whoever reads on another stream's behalf comes too early
as ever. npuzero's own kernels do not go this way.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

#: What torch_npu does itself, by the fake's documented calls: allocation, storages, streams, single values.
THEIRS = (
    "empty", "resize", "set_", "record_stream", "is_pinned", "pin_memory", "copy_from",
    "has_compatible_shallow_copy_type", "is_set_to",
)  # fmt: skip

#: Bytes copied between the device and pinned memory, by link; a few numbers at once are no part of a training state.
copied: Counter[str] = Counter()
_NUMBERS_BYTES = 64

_library: Any = None


def compute_on_host() -> None:
    """Has the operators computed on the host from now on, in this process."""
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        names = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
        for name in (full.removeprefix("aten::") for full in names if full.startswith("aten::")):
            base, _, overload = name.partition(".")
            if not base.lstrip("_").startswith(THEIRS) and hasattr(torch.ops.aten, base):
                op = getattr(getattr(torch.ops.aten, base), overload or "default")
                if not _is_view(op):
                    function = _OWN.get(name) or partial(_on_host, op)
                    _library.impl(name, function, "PrivateUse1", allow_override=True)


def _is_view(op: Any) -> bool:
    return any(value.alias_info is not None and not value.alias_info.is_write for value in op._schema.returns)


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over an npu tensor's memory."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8)[: storage.nbytes() // tensor.itemsize * tensor.itemsize]
    return flat.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _host_memory(tensor: torch.Tensor) -> torch.Tensor:
    return host_view(tensor) if tensor.device.type == "npu" else tensor


_reads = True


@contextlib.contextmanager
def forbid_host_reads() -> Iterator[None]:
    """A read of a device tensor on the host fails inside, and so does a wait for a stream: both wait for the device."""
    global _reads
    _reads = False
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.npu.Stream, "synchronize", _refuse_wait)
            yield
    finally:
        _reads = True


def _await_stream() -> None:
    stream = torch.npu.current_stream()
    super(torch.npu.Stream, stream).synchronize()  # past what `forbid_host_reads` has put there


def _refuse_wait(stream: Any) -> None:
    raise AssertionError("the host waits for a stream of the device")


def _check_reads() -> None:
    if not _reads:
        raise AssertionError("the host reads a tensor of the device, and waits for it")


def _item(tensor: torch.Tensor) -> Any:
    _check_reads()
    _await_stream()
    return host_view(tensor).item()


def _count_pinned_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    ways = {("cpu", "npu"): (target, "device>host"), ("npu", "cpu"): (source, "host>device")}
    host, link = ways.get((target.device.type, source.device.type), (None, ""))
    if host is not None and host.nbytes > _NUMBERS_BYTES and host.is_pinned():
        copied[link] += host.nbytes


def _copy_tensor(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _count_pinned_copy(target, source)
    if target.device.type == "cpu":
        _check_reads()
    _await_stream()
    _host_memory(target).copy_(_host_memory(source))
    return target


def _to_copy(source: torch.Tensor, *, device: torch.device | None = None, **options: Any) -> torch.Tensor:
    _await_stream()
    options = {key: options[key] for key in ("dtype", "memory_format") if options.get(key) is not None}
    copy = torch.ops.aten._to_copy(_host_memory(source), device="cpu", **options)
    if device is None or device.type != "cpu":
        return _put_on_device(copy)
    _check_reads()
    return copy


def _put_on_device(value: torch.Tensor) -> torch.Tensor:
    """A copy on the device."""
    put = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="npu")
    host_view(put).copy_(value)
    return put


def _on_host(op: Any, *arguments: Any, **options: Any) -> Any:
    _await_stream()
    back: dict[int, torch.Tensor] = {}  # by the host's tensor: the device's

    def down(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor) or value.device.type != "npu":
            return value
        host = host_view(value)
        back[id(host)] = value
        return host

    arguments, options = tree_map(down, (arguments, options))
    if not back or "device" in options:
        options["device"] = torch.device("cpu")
    result = op(*arguments, **options)

    def up(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return back[id(value)] if id(value) in back else _put_on_device(value)

    return tree_map(up, result)


def _matmul_backward(
    gradient: torch.Tensor, left: torch.Tensor, right: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    """As torch's own formulas have it for the shapes that linear layers and attention have."""
    if right.dim() == 2:
        rows, flat = gradient.reshape(-1, gradient.shape[-1]), left.reshape(-1, left.shape[-1])
        own = (rows @ right.t()).view(left.shape) if mask[0] else None
        column_major = right.stride(0) == 1
        other = ((rows.t() @ flat).t() if column_major else flat.t() @ rows) if mask[1] else None
        return own, other
    return (
        gradient @ right.transpose(-1, -2) if mask[0] else None,
        left.transpose(-1, -2) @ gradient if mask[1] else None,
    )


_OWN = {
    "copy_": _copy_tensor,
    "_to_copy": _to_copy,
    "_local_scalar_dense": _item,
    "matmul_backward": partial(_on_host, _matmul_backward),
}
