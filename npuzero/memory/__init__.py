"""Memory spaces: allocate the buffers of the training state, and count them."""

from npuzero.memory.device import DeviceSpace, zeros
from npuzero.memory.pool import Pool
from npuzero.memory.space import Source, Space, Transient
from npuzero.memory.spaces import Spaces

__all__ = ["DeviceSpace", "Pool", "Source", "Space", "Spaces", "Transient", "zeros"]
