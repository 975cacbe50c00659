"""Communication: worlds of ranks, meshes over them, and communicators within them."""

from __future__ import annotations

from npuzero.comm.communicator import Communicator, Handle
from npuzero.comm.counted import Counted
from npuzero.comm.loopback import run_threads
from npuzero.comm.mesh import Mesh
from npuzero.comm.world import ProcessWorld, SingleWorld, World, current_world, process_world

__all__ = [
    "Communicator",
    "Counted",
    "Handle",
    "Mesh",
    "ProcessWorld",
    "SingleWorld",
    "World",
    "current_world",
    "process_world",
    "run_threads",
]
