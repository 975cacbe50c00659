"""Save and load checkpoints that any plan on any number of ranks, and torch.distributed.checkpoint, can read.

In: a sharded model, its optimizer, and optional scheduler, scaler, data position and RNG states.
Out: a folder ``step-N`` in DCP's format with a manifest of checksums. docs/checkpoints.md describes the format,
resuming and exchange with torch.

Read first: ``public.py`` (the API), ``saving.py`` (the protocol of a save), ``layout/parts.py`` (the tensors of a
checkpoint and the rank that writes each part).

Names are imported on first access: they need torch.distributed.checkpoint, which takes longer to import than all of
npuzero.
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
