"""Run collectives: worlds of ranks, device meshes over them, and communicators of process groups.

In: the launcher's environment, and flat tensors. Out: asynchronous all-gather, reduce-scatter, all-reduce, all-to-all,
broadcast and sends, with the same bits on every rank.

Read first: ``world.py`` (ranks and their communicators), ``communicator.py`` (the interface of collectives),
``mesh.py`` (axes and groups). ``backends`` implements collectives, ``rendezvous`` connects ranks, and ``watchdog``
detects hangs.

Importing registers the torch.distributed backend ``"shm"``, which is an entry in a table.
"""

from __future__ import annotations

import torch.distributed as dist

from npuzero.comm.communicator import Communicator
from npuzero.comm.counted import CountingCommunicator
from npuzero.comm.joining import current_world, entered, process_world
from npuzero.comm.loopback import run_threads
from npuzero.comm.mesh import Mesh
from npuzero.comm.process_world import ProcessWorld
from npuzero.comm.world import HOST_CHANNEL, SingleWorld, World
from npuzero.device import AsyncHandle

__all__ = [
    "HOST_CHANNEL",
    "AsyncHandle",
    "Communicator",
    "CountingCommunicator",
    "Mesh",
    "ProcessWorld",
    "SingleWorld",
    "World",
    "current_world",
    "entered",
    "process_world",
    "run_threads",
]

if dist.is_available():
    from npuzero.comm.torch_backend import register_shm_backend

    register_shm_backend()
