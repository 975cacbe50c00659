"""Devices: streams, events, memory figures, the collective backend of each kind, and lanes.

In: a ``torch.device`` or its name. Out: a ``Device`` with the operations that torch does not unify between cpu, cuda
and npu, and lanes: ordered asynchronous steps on a host thread or on a stream.

Importing this package touches no device. torch_npu is imported only when an npu is requested.

Read first: ``device.py``, ``lane.py``, ``npu.py``.
"""

from __future__ import annotations

from functools import cache

import torch

from npuzero.device.cpu import Cpu
from npuzero.device.cuda import Cuda
from npuzero.device.device import Availability, Device, Event, MemoryFigures
from npuzero.device.handle import AsyncHandle, ReadyHandle, wait_quietly
from npuzero.device.lane import HostLane, WorkLane, make_lane
from npuzero.device.npu import Npu
from npuzero.errors import ConfigError, did_you_mean

__all__ = [
    "KINDS",
    "AsyncHandle",
    "Availability",
    "Device",
    "Event",
    "HostLane",
    "MemoryFigures",
    "ReadyHandle",
    "WorkLane",
    "choose",
    "get",
    "make_lane",
    "wait_quietly",
]

#: Kinds by torch's device type, in order of preference.
KINDS: dict[str, type[Device]] = {kind.kind: kind for kind in (Npu, Cuda, Cpu)}
# Other common names, for suggestions in errors.
_SPELLINGS = {kind: kind for kind in KINDS} | {"gpu": "cuda", "nvidia": "cuda", "ascend": "npu", "host": "cpu"}


@cache
def get(device: torch.device | str) -> Device:
    """Return the Device of a torch.device or its name; the same object each time.

    Raises:
        ConfigError: the kind is unknown or cannot be used here; the error has the reason.
    """
    kind = _get_device_class(device)
    found = kind.available()
    if not found.ok:
        raise ConfigError(f"device {device}", expected="a usable device", got=found.reason, do=found.do)
    index = str(device).partition(":")[2]
    if kind is Cpu and index not in {"", "0"}:
        do = "Say cpu: ranks share it, and torchrun --nproc-per-node says how many there are."
        raise ConfigError("device", expected="cpu, which is one device", got=repr(str(device)), do=do)
    # torch and frameworks write "cpu:0" also; tensors on the CPU have the device "cpu".
    return kind(torch.device(kind.kind) if kind is Cpu else torch.device(device))


def choose(local_rank: int = 0) -> torch.device:
    """Return the device for process ``local_rank`` of this host: an npu if there is one, else a GPU, else the CPU.

    Raises:
        ConfigError: this host has fewer devices of the kind than processes.
    """
    kind = next(kind for kind in KINDS.values() if kind.available().ok)
    if kind is Cpu:
        return torch.device("cpu")
    if local_rank >= kind.count():
        raise ConfigError(
            "init: device",
            expected=f"at most one process per {kind.kind} device, of which this host has {kind.count()}",
            got=f"local rank {local_rank}",
            do="Start as many processes per host as it has devices (torchrun --nproc-per-node).",
        )
    return torch.device(kind.kind, local_rank)


def _get_device_class(device: torch.device | str) -> type[Device]:
    # torch.device("npu") fails without torch_npu, so the kind is read from the text.
    word = str(device).partition(":")[0]
    if word not in KINDS:
        raise ConfigError(
            "device",
            expected=f"one of {', '.join(KINDS)}",
            got=repr(str(device)),
            do=did_you_mean(
                word, _SPELLINGS, "Name the device, not the backend; how to add a device: docs/adding-a-device.md."
            ),
        )
    return KINDS[word]
