"""Store offloaded states by chunk: the masters of a model, or the moments of one optimizer."""

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

#: Names and dtypes of the states, by flat parameter.
Fields = Mapping[FlatParameter, Mapping[str, torch.dtype]]
#: The states of one piece by name, as they are stored (codes for 8-bit moments).
Views = Mapping[str, Tensor]


class StateStore(ABC):
    """Store the states ``fields`` of the pieces of ``chunks``.

    The update accesses chunk after chunk (``fetch``, ``views``, ``store``); the turn of a chunk selects its ring slot.
    All other code accesses ranges, through :meth:`spread`, while no update is in flight.
    """

    def __init__(self, chunks: Sequence[UpdateChunk], fields: Fields, quiet: Callable[[], None]) -> None:
        self._chunks = chunks
        self._fields = fields
        self._quiet = quiet
        # For each flat, its pieces as (chunk, index of the piece in that chunk).
        self._places: dict[FlatParameter, list[tuple[int, int]]] = {flat: [] for flat in fields}
        for k, chunk in enumerate(chunks):
            for i, piece in enumerate(chunk.pieces):
                if piece.flat in fields:
                    self._places[piece.flat].append((k, i))

    def extent_bytes(self, k: int) -> int:
        """Return the bytes that ``fetch`` reads from a disk, and that ``store`` writes."""
        return 0

    def reads(self, k: int, every: bool) -> bool:
        """Return whether the update must fetch chunk ``k``. ``every``: it updates all pieces of the chunk."""
        return True

    def settle(self) -> None:
        """Write back changes made outside of updates. Called when an update begins."""
        return

    @abstractmethod
    def fetch(self, k: int, turn: int) -> AsyncHandle:
        """Start to read chunk ``k`` to the host."""

    def foresee(self, k: int, turn: int) -> None:
        """Prefetch chunk ``k`` between updates: it probably has that turn in the next update."""
        return

    @abstractmethod
    def views(self, k: int, turn: int) -> list[Views]:
        """Return the states of each piece of chunk ``k``, which is on the host."""

    @abstractmethod
    def store(self, k: int, turn: int) -> AsyncHandle:
        """Start to write the updated chunk ``k`` back."""

    @abstractmethod
    def opened(self, k: int, write: bool) -> list[Views]:
        """Return the same as :meth:`views`, outside of updates. Valid until another chunk is opened."""

    def kept(self, name: str, k: int, i: int) -> KeptPart | None:
        """Keep a snapshot of a piece's state in place, until it is released. None: the caller must copy it.

        Raises:
            OutOfSpace: there is no room for writes during the snapshot.
        """
        return None

    def has(self, flat: FlatParameter) -> bool:
        """Return whether this store has any state of ``flat``."""
        return flat in self._fields

    def spread(self, flat: FlatParameter, name: str) -> TieredTensor:
        """Return the offloaded part of one state of a flat parameter: its pieces in this store."""
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
    """Store states in host memory and update them in place.

    Each state of a flat is one tensor, the concatenation of its stored pieces. Unless they are codes, these are the
    flat's own elements in order.
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
        """Return a state of all offloaded elements of a flat; for states that are not stored as codes."""
        return self._wholes[flat, name]

    def fetch(self, k: int, turn: int) -> AsyncHandle:
        return ReadyHandle()

    def views(self, k: int, turn: int) -> list[Views]:
        return list(self._views[k])

    def store(self, k: int, turn: int) -> AsyncHandle:
        return ReadyHandle()

    def opened(self, k: int, write: bool) -> list[Views]:
        return self.views(k, 0)
