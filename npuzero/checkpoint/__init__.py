"""Checkpoints that any plan on any number of ranks can load, and torch.distributed.checkpoint too.

A row of docs/checkpoints.md each: what is on disk, how to resume, what is exchanged with torch.

What is here is imported when it is first asked for: it needs torch.distributed.checkpoint, which takes longer to import
than all of npuzero.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from npuzero.checkpoint.cut import CutTensor, load_state_dict, state_dict
    from npuzero.checkpoint.loading import Loaded
    from npuzero.checkpoint.public import Checkpointer, Stateful, latest, load, save, verify
    from npuzero.checkpoint.saving import Saving
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.public"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
