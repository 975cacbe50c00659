"""Memory spaces: allocate the buffers of the training state, and count them."""

from npuzero.memory.device import DeviceSpace, zeros
from npuzero.memory.host import HostSpace
from npuzero.memory.mover import Mover
from npuzero.memory.pool import Pool
from npuzero.memory.ring import Ring
from npuzero.memory.space import Source, Space, Transient
from npuzero.memory.spaces import Spaces

__all__ = [
    "DeviceSpace",
    "HostSpace",
    "Mover",
    "Pool",
    "Ring",
    "Source",
    "Space",
    "Spaces",
    "Transient",
    "zeros",
]
