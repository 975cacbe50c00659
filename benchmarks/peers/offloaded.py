"""Contenders with optimizer states on a disk, each used as documented, on the workload of benchmarks.step.

The folder is the first of NPUZERO_NVME_PATHS, the same for all. Every update ends on the disk: modified pages of a map
are written; npuzero has entries that wait for their update, ``-blocking``. npuzero and DeepSpeed bypass the page cache.
The kernel decides which pages of a map stay in memory, within a cap, or all are dropped after a block's update.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.contenders import deepspeed_zero
from benchmarks.step.contenders import Build, TrainSteps
from benchmarks.step.workload import MAX_NORM, GPTWorkload

_WRITE_AND_WAIT = 7  # of sync_file_range(2): wait for running writes, write all pages, wait for their end
#: DeepSpeed's settings of a run, as JSON; see nvme.py.
TUNING = "NVME_BENCHMARK_DEEPSPEED"


def nvme_folder() -> Path:
    """Return the folder of all contenders' states."""
    return Path(os.environ["NPUZERO_NVME_PATHS"].split(os.pathsep)[0])


def npuzero_nvme(storage: str = "", overlap: bool = True) -> Build:
    """Build npuzero's stage 3 with states on NVMe; ``storage`` is the suffix of the precision's name."""
    import npuzero

    def build(model: nn.Module, workload: GPTWorkload) -> TrainSteps:
        npuzero.init()
        precision = workload.precision + storage
        npuzero.zero(model, 3, offload="nvme", precision=precision, settings=npuzero.Settings(overlap=overlap))
        optimizer = npuzero.AdamW(model.parameters(), **workload.hyper)

        def update() -> None:
            npuzero.clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

        return TrainSteps(model, update)

    return build


def deepspeed_nvme() -> Build:
    """Build DeepSpeed's stage 3 with optimizer states on NVMe, by its aio and its CPU Adam."""
    tuning = json.loads(os.environ[TUNING])
    offload = {"device": "nvme", "nvme_path": str(nvme_folder()), "pin_memory": False, **tuning["offload_optimizer"]}
    zero = {"stage": 3, "offload_optimizer": offload, **tuning["sub_group"]}
    return deepspeed_zero(zero, aio=tuning["aio"])


class MappedMemory:
    """float32 memory mapped from an unnamed file, which is deleted with it."""

    def __init__(self, numel: int) -> None:
        with TemporaryFile(dir=nvme_folder()) as file:
            os.posix_fallocate(file.fileno(), 0, 4 * numel)
            self._map = mmap.mmap(file.fileno(), 4 * numel)
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self.tensor = torch.frombuffer(self._map, dtype=torch.float32)

    def write(self) -> None:
        """Write modified pages to the disk, without flushing the disk's cache: no contender does that."""
        if ctypes.CDLL(None, use_errno=True).sync_file_range(self._file, *map(ctypes.c_int64, (0, 0)), _WRITE_AND_WAIT):
            raise OSError(ctypes.get_errno(), "sync_file_range")

    def forget(self) -> None:
        """Drop written pages from memory."""
        self._map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)


def mapped_adamw(forget: bool = False) -> Build:
    """Build torch's fused AdamW over masters and moments in memory-mapped files, block by block.

    ``forget``: a block's pages are written and dropped after its update; else the kernel decides which stay in memory.
    """

    def build(model: nn.Module, workload: GPTWorkload) -> TrainSteps:
        updates = [MappedAdamW(list(parameters), workload.hyper) for parameters in _parameters_by_block(model)]
        model.to(workload.dtype)
        parameters = list(model.parameters())

        def update() -> None:
            norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in parameters]
            scale = (MAX_NORM / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
            for each in updates:
                each.step(scale)
                if forget:
                    each.write(forget=True)
            for each in updates:
                each.write()

        return TrainSteps(model, update)

    return build


def _parameters_by_block(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    inner = [list(block.parameters()) for block in model.blocks]  # type: ignore[union-attr, operator]
    known = {id(parameter) for block in inner for parameter in block}
    yield [parameter for parameter in model.parameters() if id(parameter) not in known]
    yield from inner


class MappedAdamW:
    """Update some parameters from mapped states."""

    def __init__(self, parameters: list[nn.Parameter], hyper: dict[str, Any]) -> None:
        self._parameters = parameters
        numel = sum(parameter.numel() for parameter in parameters)
        self._maps = [MappedMemory(numel) for _ in range(3)]
        masters, first, second = (self._parts(states.tensor) for states in self._maps)
        for master, parameter in zip(masters, parameters, strict=True):
            master.copy_(parameter.detach())
        self._masters = [master.requires_grad_() for master in masters]
        self._optimizer = torch.optim.AdamW(self._masters, fused=True, **hyper)
        for master, exp_avg, exp_avg_sq in zip(self._masters, first, second, strict=True):
            state = {"step": torch.tensor(0.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            self._optimizer.state[master] = state
        self.write(forget=True)

    def step(self, scale: Tensor) -> None:
        """Update with the parameters' gradients times ``scale``, and clear them."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() * scale
            parameter.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._masters)

    def write(self, *, forget: bool = False) -> None:
        """Write modified pages to the disk."""
        for states in self._maps:
            states.write()
            if forget:
                states.forget()

    def _parts(self, whole: Tensor) -> list[Tensor]:
        sizes = [parameter.numel() for parameter in self._parameters]
        parts = whole.split(sizes)
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]


CONTENDERS: dict[str, Callable[[], Build]] = {
    "npuzero": npuzero_nvme,
    "npuzero-blocking": partial(npuzero_nvme, overlap=False),
    "npuzero-split": partial(npuzero_nvme, "-split"),
    "npuzero-split-blocking": partial(npuzero_nvme, "-split", overlap=False),
    "npuzero-8bit": partial(npuzero_nvme, "-8bit"),
    "npuzero-8bit-blocking": partial(npuzero_nvme, "-8bit", overlap=False),
    "deepspeed": deepspeed_nvme,
    "mapped": mapped_adamw,
    "mapped-dropped": partial(mapped_adamw, forget=True),
}
