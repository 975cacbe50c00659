"""Memory spaces: allocate the buffers of the training state on the device, the host and NVMe, and count them.

In: numel, dtype and a label (parameters, gradients, states, buffers). Out: zeroed flat buffers or file stores, with
held and peak bytes by label. ``MemorySpaces`` maps each memory that a plan can name to its space.

``HostCopier`` copies between device and host. ``BufferPool``, ``PagePool`` and ``BufferRing`` reuse buffers, so that a
steady step allocates nothing.

Read first: ``space.py``, ``device.py``, ``file.py``.
"""

from npuzero.memory.device import DeviceSpace, allocate_zeros
from npuzero.memory.evacuation import SpaceOffload, find_foreign_buffers
from npuzero.memory.file import FileStore, check_folders
from npuzero.memory.host import HostSpace
from npuzero.memory.mover import HostCopier
from npuzero.memory.page_pool import PagePool, PageRun
from npuzero.memory.pool import BufferPool
from npuzero.memory.ring import BufferRing
from npuzero.memory.space import MemorySpace, ReleasableBuffer, Source, TransientBuffer
from npuzero.memory.spaces import MemorySpaces

__all__ = [
    "BufferPool",
    "BufferRing",
    "DeviceSpace",
    "FileStore",
    "HostCopier",
    "HostSpace",
    "MemorySpace",
    "MemorySpaces",
    "PagePool",
    "PageRun",
    "ReleasableBuffer",
    "Source",
    "SpaceOffload",
    "TransientBuffer",
    "allocate_zeros",
    "check_folders",
    "find_foreign_buffers",
]
