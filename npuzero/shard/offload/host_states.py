"""Banks: some states of flats that rest far, chunk by chunk: the masters of a model, or the moments of one
optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from npuzero.device import AsyncHandle, ReadyHandle
from npuzero.memory import MemorySpace, MemorySpaces
from npuzero.ops.storage import stored_numel
from npuzero.shard.offload.chunks import UpdateChunk
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.snapshot import KeptPart
from npuzero.shard.state.tiered_tensor import TieredTensor, TierRange

#: By flat, the names and dtypes of its states.
Fields = Mapping[FlatParameter, Mapping[str, torch.dtype]]
#: Of a piece, by name, each state as it is stored: of the piece's elements alone.
Views = Mapping[str, Tensor]


class StateStore(ABC):
    """Hold the states ``fields`` of the pieces of ``chunks``.

    The update asks for chunk after chunk (``fetch``, ``views``, ``store``), each at its turn, by which a slot of a ring
    goes; everybody else for ranges, by :meth:`parts`, while no update is under way.
    """

    def __init__(self, chunks: Sequence[UpdateChunk], fields: Fields, quiet: Callable[[], None]) -> None:
        self._chunks = chunks
        self._fields = fields
        self._quiet = quiet
        # By flat: of each of its pieces the chunk, and which piece of that it is.
        self._places: dict[FlatParameter, list[tuple[int, int]]] = {flat: [] for flat in fields}
        for k, chunk in enumerate(chunks):
            for i, piece in enumerate(chunk.pieces):
                if piece.flat in fields:
                    self._places[piece.flat].append((k, i))

    def extent_bytes(self, k: int) -> int:
        """Return what ``fetch`` reads from a disk, and ``store`` writes there."""
        return 0

    def reads(self, k: int, every: bool) -> bool:
        """Tell whether the update of chunk ``k``, or of ``every`` piece of it, needs what is there."""
        return True

    def settle(self) -> None:
        """Bring what was written outside of updates to where it rests; an update begins."""
        return

    @abstractmethod
    def fetch(self, k: int, turn: int) -> AsyncHandle:
        """Begin to bring chunk ``k`` to the host."""

    def foresee(self, k: int, turn: int) -> None:
        """Begin to bring chunk ``k``, which no update is at, to the host: it may have that turn in the next one."""
        return

    @abstractmethod
    def views(self, k: int, turn: int) -> list[Views]:
        """Return the states of each piece of chunk ``k``, which is on the host."""

    @abstractmethod
    def store(self, k: int, turn: int) -> AsyncHandle:
        """Begin to bring chunk ``k``, which was written, back to where it rests."""

    @abstractmethod
    def opened(self, k: int, write: bool) -> list[Views]:
        """Return as :meth:`views`, for who is not the update; lasts until another chunk is opened."""

    def kept(self, name: str, k: int, i: int) -> KeptPart | None:
        """Keep a state of a piece where it is, until it is released; None where it must be copied to be kept.

        Raises:
            OutOfSpace: there is no room for what is written meanwhile.
        """
        return None

    def has(self, flat: FlatParameter) -> bool:
        """Tell whether any state of ``flat`` is here."""
        return flat in self._fields

    def spread(self, flat: FlatParameter, name: str) -> TieredTensor:
        """Return a state of a flat: what lies near of it, and its pieces here."""
        pieces = [(self._chunks[k].pieces[i], k, i) for k, i in self._places[flat]]
        parts = [
            TierRange(piece.begin, piece.end, partial(self._open, name, k, i), partial(self.kept, name, k, i))
            for piece, k, i in pieces
        ]
        return TieredTensor(self._fields[flat][name], parts)

    def _open(self, name: str, k: int, i: int, write: bool) -> Tensor:
        self._quiet()
        return self.opened(k, write)[i][name]


class HostStateStore(StateStore):
    """Hold states in the host's memory, where they are updated in place.

    A state of a flat is one tensor of the stored pieces side by side: the flat's own elements in order, where none are
    codes.
    """

    def __init__(
        self, chunks: Sequence[UpdateChunk], fields: Fields, quiet: Callable[[], None], spaces: MemorySpaces
    ) -> None:
        super().__init__(chunks, fields, quiet)
        self._wholes: dict[tuple[FlatParameter, str], Tensor] = {}
        self._views: list[list[dict[str, Tensor]]] = [[{} for _ in chunk.pieces] for chunk in chunks]
        for flat, states in fields.items():
            for name, dtype in states.items():
                self._allocate(spaces.host, flat, name, dtype)

    def _allocate(self, space: MemorySpace, flat: FlatParameter, name: str, dtype: torch.dtype) -> None:
        places = self._places[flat]
        pieces = [self._chunks[k].pieces[i] for k, i in places]
        lengths = [stored_numel(piece.end - piece.begin, dtype) for piece in pieces]
        whole = self._wholes[flat, name] = space.allocate(sum(lengths), dtype, "states")
        for (k, i), part in zip(places, whole.split(lengths), strict=True):
            self._views[k][i][name] = part

    def whole(self, flat: FlatParameter, name: str) -> Tensor:
        """Return a state of all far elements of a flat, which is not kept in codes."""
        return self._wholes[flat, name]

    def fetch(self, k: int, turn: int) -> AsyncHandle:
        return ReadyHandle()

    def views(self, k: int, turn: int) -> list[Views]:
        return list(self._views[k])

    def store(self, k: int, turn: int) -> AsyncHandle:
        return ReadyHandle()

    def opened(self, k: int, write: bool) -> list[Views]:
        return self.views(k, 0)
