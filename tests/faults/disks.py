"""Disk faults on one rank of several processes; every function runs on each rank."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import npuzero
from faults.dead_ranks import CULPRIT, dead_rank_loss
from npuzero import Memory, Placement, Plan, Settings, _native
from npuzero.comm import World
from world.toy import build_seeded_model

Call = _native.io.Call

#: By name: the system call that fails, and how.
FAULTS = {
    "a full disk": (Call.write, {"error": errno.ENOSPC}),
    "a bad sector that is written": (Call.write, {"error": errno.EIO}),
    "a bad sector that is read": (Call.read, {"error": errno.EIO}),
    "the end of the file": (Call.read, {"most": 0}),
    "a bit that is another": (Call.read, {"flip": True}),
}
AXES = Plan.preset("zero3").states.axes
#: Parameters are unsharded, so that each rank can read them alone; optimizer states are in files.
READABLE = Plan(
    gradients=Placement(AXES),
    states=Placement(AXES, Memory.NVME),
    precision=Plan.preset("zero2", precision="bf16").precision,
    name="readable",
)


def inject_disk_fault(name: str, after: int = 0) -> None:
    """Inject the fault ``name`` into its call, after ``after`` calls that succeed."""
    call, how = FAULTS[name]
    _native.io.inject(call, after=after, **how)


def settings_in(folder: Path, **further: object) -> Settings:
    return Settings(nvme_paths=(str(folder),), chunk_bytes=3000, **further)


def disk_fails(world: World, stage: str, folder: Path, fault: str) -> None:
    """Fail the culprit's disk in the update of the second step."""
    model = npuzero.zero(build_seeded_model(), stage, world=world, offload="nvme", settings=settings_in(folder))
    optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        dead_rank_loss(model, world.rank).backward()
        if world.rank == CULPRIT and step == 1:
            inject_disk_fault(fault, after=2)
        optimizer.step()
        optimizer.zero_grad()


def disk_is_full(world: World, stage: str, folder: Path, where: str) -> None:
    """Refuse the culprit every new file, as a full disk does: in zero() or in the first step."""

    def fill_up(place: str) -> None:
        if world.rank == CULPRIT and place == where:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

    fill_up("zero")
    options = {"offload": "nvme", "precision": "bf16", "settings": settings_in(folder)}
    model = npuzero.zero(build_seeded_model(), stage, world=world, **options)
    optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
    dead_rank_loss(model, world.rank).backward()
    fill_up("step")
    optimizer.step()
    dead_rank_loss(model, world.rank).backward()
