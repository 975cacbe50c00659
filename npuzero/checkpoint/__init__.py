"""Checkpoints that any plan on any number of ranks can load, and torch.distributed.checkpoint too.

A row of docs/checkpoints.md each: what is on disk, how to resume, what is exchanged with torch.
"""

from npuzero.checkpoint.cut import CutTensor, load_state_dict, state_dict
from npuzero.checkpoint.loading import Loaded
from npuzero.checkpoint.public import Checkpointer, Stateful, latest, load, save, verify
from npuzero.checkpoint.saving import Saving

__all__ = [
    "Checkpointer",
    "CutTensor",
    "Loaded",
    "Saving",
    "Stateful",
    "latest",
    "load",
    "load_state_dict",
    "save",
    "state_dict",
    "verify",
]
