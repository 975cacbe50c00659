"""Where bytes rest, and who counts them."""

from npuzero.memory.pool import Pool
from npuzero.memory.space import Source, Space, Transient, zeros

__all__ = ["Pool", "Source", "Space", "Transient", "zeros"]
