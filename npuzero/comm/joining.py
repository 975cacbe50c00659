"""Join a process to its world, and find the world of a thread.

``current_world()`` is the first of these: the world of ``run_threads`` inside it; the world that ``process_world``
made; a world on torch.distributed, if that is initialized, or of the launcher's ranks; a world of one rank.
"""

from __future__ import annotations

import atexit
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from npuzero import config, device, observe
from npuzero.comm.process_world import ProcessWorld
from npuzero.comm.rendezvous.restarts import open_restart_store
from npuzero.comm.rendezvous.roll_call import DO, EXPECTED, RollCall, StoredRankRegistry
from npuzero.comm.watchdog import fork
from npuzero.comm.watchdog.call_names import named_call
from npuzero.comm.world import TIMEOUT_S, SingleWorld, World
from npuzero.errors import CollectiveError, ConfigError, did_you_mean

#: Backends of ``process_world``. "shm" is shared memory alone: all ranks on one host.
BACKENDS = ("shm", "gloo", "nccl", "hccl")


@named_call("init")
def process_world(
    device: torch.device | str | None = None,
    timeout_s: float | None = None,
    backend: str | None = None,
    *,
    buffer_mb: int | None = None,
) -> World:
    """Join the world that torchrun started this process in, return it, and make it ``current_world()``.

    A second call gives the same world until it is closed.

    Args:
        device: this rank's device; None: an npu or a GPU of this host by LOCAL_RANK if there are any, else the CPU.
        timeout_s: seconds before a waiting collective gives up; None: NPUZERO_TIMEOUT_S, or 600.
        backend: None: hccl, nccl or gloo by device, with shared memory between CPU ranks of one host; "gloo": that
            alone; "shm": shared memory alone.
        buffer_mb: hccl's buffer per group, except groups for small messages; each group takes two.

    Raises:
        ConfigError: the launcher's variables are incomplete, the backend is missing or does not serve the device, there
            are more ranks than devices, or this process is in a world with other options.
        CollectiveError: the ranks did not find each other.
        StateError: this process is a forked child of a rank.
    """
    default_s = config.read_environment().timeout_s  # always read: a misspelt variable is an error
    launch = _read_launch()
    here = _choose_device(device, launch.local_rank)
    _check_backend(backend, here)
    wishes = {"device": device and here, "timeout_s": timeout_s, "backend": backend, "buffer_mb": buffer_mb}
    joined = _get_joined_world()
    if joined is not None and (joined.size > 1 or launch.world_size == 1):
        joined._check_birthplace("init")
        _check_requested_options(joined, wishes)
        return joined
    seconds = default_s if timeout_s is None else timeout_s
    if dist.is_available() and dist.is_initialized():
        world: World = _make_torch_world(here, backend, seconds, buffer_mb)
    elif launch.world_size == 1:
        _warn_if_alone(here, named=":" in str(device))
        world = SingleWorld(here, seconds)
    else:
        _init_process_group(here, seconds)
        world = _make_torch_world(here, backend, seconds, buffer_mb)
    _set_process_world(world, wishes)
    return world


def current_world() -> World:
    """Return the world of the calling thread; see the head of this module."""
    inside: World | None = getattr(_thread, "world", None)
    if inside is not None:
        return inside
    joined = _get_joined_world()
    if joined is not None:
        return joined
    if dist.is_available() and dist.is_initialized():
        _set_process_world(
            _make_torch_world(_choose_device(None, _read_launch().local_rank), None, TIMEOUT_S, None), {}
        )
    elif config.read_launch().world_size > 1:  # ranks that did not join must not train separately in silence
        process_world()
    else:
        here = device.choose(0)
        _warn_if_alone(here, named=False)
        _set_process_world(SingleWorld(here), {})
    return current_world()


@contextmanager
def entered(world: World) -> Iterator[World]:
    """Make ``world`` the calling thread's for the length of a ``with`` block."""
    before = getattr(_thread, "world", None)
    _thread.world = world
    try:
        yield world
    finally:
        _thread.world = before


_thread = threading.local()
_process_world: World | None = None


_group: Any = None  # torch.distributed's default group when the world was made
_wishes: dict[str, Any] = {}  # options of the call that made it


def _set_process_world(world: World, wishes: dict[str, Any]) -> None:
    global _process_world, _group, _wishes
    _process_world = world
    _group = _default_group()
    _wishes = wishes
    observe.set_rank(world.rank, process=True)


def _get_joined_world() -> World | None:
    """Return this process's world; None if it is closed, or torch.distributed was started again since."""
    world = _process_world
    if world is None or world.closed:
        return None
    group = _default_group()
    # A world of one rank uses no group, so torch.distributed may start after it. A larger world is stale after that.
    alone = world.size == 1 and (group is None or dist.get_world_size() == 1)
    return world if alone or group is None or group is _group else None


def _read_launch() -> config.Launch:
    """Read the ranks that the launcher gave, to this process or to torch.distributed."""
    group = (dist.get_rank(), dist.get_world_size()) if _default_group() is not None else None
    return config.read_launch(group=group)


def _default_group() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _check_requested_options(world: World, wishes: dict[str, Any]) -> None:
    """Raise a ConfigError if the world has other options than requested."""
    has = {**_wishes, "device": world.device, "timeout_s": world.timeout_s}
    for name, wish in wishes.items():
        if wish is not None and wish != has.get(name):
            raise ConfigError(
                f"init: {name}",
                expected=f"{has.get(name) or 'none'}, as in the world that this process is in",
                got=str(wish),
                do="Ask for all of it in the first call, or close that world first (world.close()), on every rank.",
            )


def _make_torch_world(here: torch.device, backend: str | None, timeout_s: float, buffer_mb: int | None) -> ProcessWorld:
    if fork.has_inherited_group():
        raise fork.forked_world_error("torch.distributed's group")
    store = dist.PrefixStore(  # type: ignore[attr-defined]
        "npuzero", dist.distributed_c10d._get_default_store()
    )
    return ProcessWorld(
        store, dist.get_rank(), dist.get_world_size(), here, backend=backend, timeout_s=timeout_s, buffer_mb=buffer_mb
    )


def _choose_device(wanted: torch.device | str | None, local_rank: int) -> torch.device:
    if wanted is None:
        return device.choose(local_rank)
    found = device.get(wanted).device
    if found.type != "cpu" and ":" not in str(found):
        count = device.get(wanted).count()
        if local_rank >= count:
            raise ConfigError(
                "init: device",
                expected=f"at most one process per {found.type} device, of which this host has {count}",
                got=f"local rank {local_rank}",
                do="Start as many processes per host as it has devices (torchrun --nproc-per-node).",
            )
        return torch.device(found.type, local_rank)
    return found


def _warn_if_alone(here: torch.device, named: bool) -> None:
    """Warn if one rank leaves devices idle, or if it is one of several tasks of srun or mpirun.

    No warning if a launcher set torchrun's variables, or, of idle devices, if the device was given with its index.
    Tasks without these variables each train alone.
    """
    if config.has_launcher():
        return
    count, tasks = device.get(here).count(), config.count_launched_tasks()
    text = ""
    if tasks > 1:
        text = (
            f"one of {tasks} tasks that srun or mpirun started, each of which trains alone: they say nothing of ranks. "
            "Have them start torchrun, one task a node, or set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT for each."
        )
    elif count > 1 and not named:
        text = (
            f"one rank of {count} {here.type} devices: this process trains alone, on {here}. For all of them start it "
            f"with torchrun --nproc-per-node {count}; for one alone name it, npuzero.init({str(here)!r})."
        )
    if text:
        warnings.warn(text, RuntimeWarning, stacklevel=5)  # the caller of init() or zero(), past the keyword check


def _check_backend(backend: str | None, here: torch.device) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(
            "init: backend",
            expected=f"one of {', '.join(BACKENDS)}, or None",
            got=repr(backend),
            do=did_you_mean(backend, BACKENDS, "Name one of these."),
        )
    serves = ("shm", "gloo") if here.type == "cpu" else (device.get(here).backend,)
    if backend is not None and backend not in serves:
        raise ConfigError(
            "init: backend", expected=f"one of {', '.join(serves)} for {here}", got=repr(backend), do="Leave it None."
        )


def _init_process_group(here: torch.device, timeout_s: float) -> None:
    """Start torch.distributed from the launcher's variables, with the backend of the device."""
    backend = device.get(here).backend
    meeting = config.find_rendezvous_address()
    if not dist.is_backend_available(backend):
        raise ConfigError(
            "init",
            expected=f"torch.distributed with {backend}",
            got="a torch without it",
            do="Install a build with it.",
        )
    if here.type != "cpu":
        getattr(torch, here.type).set_device(here)
    launch = config.read_launch()
    call = RollCall(StoredRankRegistry(launch.rank, launch.world_size, meeting), timeout_s)
    try:
        with call:
            told: dict[str, Any] = {}
            if config.agent_keeps_store():
                store = open_restart_store(launch.rank, launch.world_size, meeting, timeout_s)
                told = {"store": store, "rank": launch.rank, "world_size": launch.world_size}
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **told)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise CollectiveError(
            "init",
            expected=f"{EXPECTED}: all meet at {meeting} by {backend}",
            got=(call.said and f"{call.said}; ") + f"{type(error).__name__}: {error}",
            do=DO,
        ) from error
    _at_exit.append(dist.destroy_process_group)


_at_exit: list[Callable[[], None]] = []


@atexit.register
def _end_process_world() -> None:
    if _process_world is not None and not _process_world.inherited:
        orderly = getattr(sys, "last_value", None) is None  # not after an uncaught exception
        try:
            if orderly:
                _process_world.drain()
        finally:
            _process_world.close()
        if orderly and isinstance(_process_world, ProcessWorld):
            _process_world.outlive()
    for action in _at_exit:
        if dist.is_initialized() and not fork.has_inherited_group():
            action()
