"""Memory spaces: allocate the buffers of the training state, and count them."""

from npuzero.memory.device import DeviceSpace, zeros
from npuzero.memory.evacuation import Evacuation, foreign_blocks
from npuzero.memory.file import FileStore, check_folders
from npuzero.memory.host import HostSpace
from npuzero.memory.mover import Mover
from npuzero.memory.page_pool import PagePool, Run
from npuzero.memory.pool import Pool
from npuzero.memory.ring import Ring
from npuzero.memory.space import Block, Source, Space, Transient
from npuzero.memory.spaces import Spaces

__all__ = [
    "Block",
    "DeviceSpace",
    "Evacuation",
    "FileStore",
    "HostSpace",
    "Mover",
    "PagePool",
    "Pool",
    "Ring",
    "Run",
    "Source",
    "Space",
    "Spaces",
    "Transient",
    "check_folders",
    "foreign_blocks",
    "zeros",
]
