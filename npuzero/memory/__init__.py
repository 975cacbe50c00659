"""Memory spaces: allocate the buffers of the training state, and count them."""

from npuzero.memory.device import DeviceSpace, zeros
from npuzero.memory.file import check_folders
from npuzero.memory.host import HostSpace
from npuzero.memory.mover import FROM_DISK, TO_DISK, Mover
from npuzero.memory.pool import Pool
from npuzero.memory.ring import Ring
from npuzero.memory.space import Source, Space, Transient
from npuzero.memory.spaces import Spaces

__all__ = [
    "FROM_DISK",
    "TO_DISK",
    "DeviceSpace",
    "HostSpace",
    "Mover",
    "Pool",
    "Ring",
    "Source",
    "Space",
    "Spaces",
    "Transient",
    "check_folders",
    "zeros",
]
