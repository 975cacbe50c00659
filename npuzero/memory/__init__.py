"""Where bytes rest, and who counts them."""

from npuzero.memory.pool import Pool
from npuzero.memory.space import Space, Transient

__all__ = ["Pool", "Space", "Transient"]
