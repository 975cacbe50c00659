"""The ZeRO engine: units, their flat buffers, and the four rules of the placement table."""
