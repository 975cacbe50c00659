"""Send and receive activations and their gradients between neighbouring stages of a pipeline.

Over ``stage 1>2`` activations travel forward and gradients back, on one channel each. Sends complete when the receiver
has arrived; the step awaits them at its end. Only the sender knows the shapes, so it sends a header
(:class:`TransferLayout`) over the host's channel with the first micro-batch of each step. All micro-batches of the step
have the same layout.

A rank with a stage that raised keeps to the schedule and sends zeros: otherwise its neighbours would wait for it and
could not go on after the error. If it raises before the header, the header reports it, and no tensor crosses the link
in this step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from npuzero.comm import HOST_CHANNEL, Communicator
from npuzero.config import describe_value
from npuzero.device import AsyncHandle
from npuzero.errors import ContractError
from npuzero.plan import PIPE, TENSOR
from npuzero.shard.layout.traffic_meter import CountingMesh

#: The most tensors that a stage may return, and the most dimensions of each.
MOST_TENSORS, MOST_DIMS = 8, 8
_FIELDS = 3 + MOST_DIMS  # dtype, whether a gradient returns, number of dimensions, sizes
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@dataclass(frozen=True)
class TensorMeta:
    """Describe one tensor on a link; ``returns``: its gradient is sent back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    returns: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorMeta:
        return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}" + (" with a gradient" if self.returns else "")


@dataclass(frozen=True)
class TransferLayout:
    """Describe the tensors of one micro-batch on a link; ``bare``: a single tensor, not a tuple."""

    pieces: tuple[TensorMeta, ...]
    bare: bool

    def __str__(self) -> str:
        return ", ".join(map(str, self.pieces))


class StageOutputs(NamedTuple):
    """Hold the outputs of a stage; ``bare``: a single tensor, not a tuple."""

    tensors: tuple[Tensor, ...]
    bare: bool = True

    @property
    def layout(self) -> TransferLayout:
        return TransferLayout(tuple(map(TensorMeta.of, self.tensors)), self.bare)


def encode_transfer_layout(layout: TransferLayout | None) -> Tensor:
    """Encode ``layout`` as [90] int64; None: no tensor crosses the link in this step."""
    words = [0, 0] if layout is None else [1 + layout.bare, len(layout.pieces)]
    for piece in layout.pieces if layout else ():
        sizes = [*piece.shape, *[0] * (MOST_DIMS - len(piece.shape))]
        words += [_DTYPES.index(piece.dtype), piece.returns, len(piece.shape), *sizes]
    said = torch.zeros(2 + MOST_TENSORS * _FIELDS, dtype=torch.int64)
    said[: len(words)] = torch.tensor(words)
    return said


def decode_transfer_layout(said: Tensor) -> TransferLayout | None:
    """Decode a header; None: no tensor crosses the link in this step."""
    kind, count, *words = said.tolist()
    if not kind:
        return None
    fields = (words[i * _FIELDS : (i + 1) * _FIELDS] for i in range(count))
    pieces = (TensorMeta(tuple(sizes[:dims]), _DTYPES[dtype], bool(back)) for dtype, back, dims, *sizes in fields)
    return TransferLayout(tuple(pieces), kind == 2)


def check_stage_outputs(where: str, outputs: object) -> StageOutputs:
    """Check the outputs of a stage and return them ready to be sent.

    Raises:
        ContractError: the output is not a tensor, or a tuple or list of tensors; or a tensor's dtype, layout or number
            of dimensions is not supported.
    """
    tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
    legal = isinstance(tensors, (tuple, list)) and all(isinstance(each, Tensor) for each in tensors)
    if not legal or not 0 < len(tensors) <= MOST_TENSORS:  # type: ignore[arg-type]
        raise ContractError(
            where,
            expected=f"a tensor, or a tuple of up to {MOST_TENSORS} tensors, for the next stage",
            got=describe_value(outputs),
            do="Let the last block of each stage return tensors alone.",
        )
    for tensor in tensors:  # type: ignore[attr-defined]
        if tensor.dtype not in _DTYPES or tensor.dim() > MOST_DIMS or tensor.layout is not torch.strided:
            raise ContractError(
                where,
                expected=f"dense tensors of up to {MOST_DIMS} dimensions, of a dtype among {len(_DTYPES)} usual ones",
                got=f"one of {tensor.dim()} dimensions, {tensor.dtype}, {tensor.layout}",
                do="Convert it before the stage ends.",
            )
    return StageOutputs(tuple(tensors), isinstance(outputs, Tensor))  # type: ignore[arg-type]


class _OneWayChannel:
    """Carry tensors in one direction between two stages, over one channel.

    If all tensor ranks hold the same activations, each sends its part, and the receivers all-gather the parts
    (Narayanan et al. 2021, section 4.1: scatter and gather).
    """

    def __init__(self, mesh: CountingMesh, name: str, sender: int, receiver: int, repeated: bool) -> None:
        self._channel = mesh.communicator((PIPE,), name)
        self._group = mesh.communicator((TENSOR,), "pipeline") if repeated else None
        self._sender, self._receiver = sender, receiver
        self.name = name
        self.device = self._channel.device
        self._sent: list[tuple[AsyncHandle, Tensor]] = []
        self._coming: dict[int, list[tuple[AsyncHandle, Tensor]]] = {}

    def send(self, micro: int, tensors: Sequence[Tensor]) -> None:
        self._sent = [each for each in self._sent if not each[0].done()]
        for tensor in tensors:
            flat = self._part(tensor.detach().reshape(-1))
            self._sent.append((self._channel.send(flat, self._receiver, self._tag(micro)), flat))

    def expect(self, micro: int, pieces: Sequence[TensorMeta]) -> None:
        """Start to receive a micro-batch's tensors, unless already started."""
        if micro in self._coming:
            return
        coming = self._coming[micro] = []
        for piece in pieces:
            whole = torch.empty(piece.shape, dtype=piece.dtype, device=self.device)
            part = self._part(whole.view(-1))
            coming.append((self._channel.recv(part, self._sender, self._tag(micro)), whole))

    def take(self, micro: int, pieces: Sequence[TensorMeta]) -> tuple[Tensor, ...]:
        """Wait for a micro-batch's tensors and return them."""
        self.expect(micro, pieces)
        return tuple(self._whole(handle, whole) for handle, whole in self._coming.pop(micro))

    def finish(self) -> None:
        """Wait until every send has been received."""
        for handle, _ in self._sent:
            handle.wait()
        self._sent = []

    def _whole(self, handle: AsyncHandle, whole: Tensor) -> Tensor:
        handle.wait()
        group, flat = self._group, whole.view(-1)
        if group is not None and group.size > 1 and flat.numel() % group.size == 0:
            group.all_gather(flat, self._part(flat), tag=f"gather {self.name}").wait()
        return whole

    def _part(self, flat: Tensor) -> Tensor:
        """Return this rank's part of ``flat``."""
        group = self._group
        if group is None or flat.numel() % group.size:
            return flat
        return flat.chunk(group.size)[group.rank]

    def _tag(self, micro: int) -> str:
        return f"{self.name} #{micro}"


class StageLink:
    """Connect a stage to the next one: one object for the sender's end and the receiver's end.

    Args:
        stage: the first of the two.
        ranks: of the two stages, along the pipe axis.
        repeated: all tensor ranks hold the same activations.

    Attributes:
        layout: the tensors that travel in this step; None before the header, or if none travels.
        closed: no tensor travels in this step, because the sender's stage raised before the header.
    """

    def __init__(self, mesh: CountingMesh, stage: int, ranks: tuple[int, int], repeated: bool) -> None:
        before, after = ranks
        self.name = f"stage {stage}>{stage + 1}"
        self._ahead = _OneWayChannel(mesh, self.name, before, after, repeated)
        self._back = _OneWayChannel(mesh, f"stage {stage + 1}>{stage}", after, before, repeated)
        self._host: Communicator = mesh.communicator((PIPE,), HOST_CHANNEL)
        self._ranks = ranks
        self._said: list[tuple[AsyncHandle, Tensor]] = []
        self._heading: tuple[AsyncHandle, Tensor] | None = None
        self.layout: TransferLayout | None = None
        self.closed = False

    def begin(self) -> None:
        """Begin a step: shapes may differ from the last step's."""
        self.layout, self.closed = None, False

    def end(self) -> None:
        """Wait for the step's sends."""
        for way in (self._ahead, self._back):
            way.finish()
        for handle, _ in self._said:
            handle.wait()
        self._said = []

    # -- the sender's end ------------------------------------------------------------------------------------------

    def give(self, micro: int, outputs: StageOutputs | None) -> None:
        """Send a micro-batch's activations; None: the stage has raised and has none.

        Raises:
            ContractError: their layout differs from the first micro-batch's; no tensor has been sent.
        """
        if self.layout is None and not self.closed:
            self._announce(None if outputs is None else outputs.layout)
        if self.closed:
            return
        assert self.layout is not None
        if outputs is not None and outputs.layout != self.layout:
            raise ContractError(
                f"{self.name} #{micro}",
                expected=f"the same from every micro-batch of a step, as from #0: {self.layout}",
                got=str(outputs.layout),
                do="Pad the batch, so that its micro-batches are of one shape.",
            )
        self._ahead.send(micro, self._zeros(self.layout.pieces) if outputs is None else outputs.tensors)

    def expect_back(self, micro: int) -> None:
        """Start to receive the gradients of a micro-batch's activations."""
        if self._returning:
            self._back.expect(micro, self._returning)

    def take_back(self, micro: int) -> tuple[Tensor, ...]:
        """Return the gradients of the activations that require them, in order."""
        return self._back.take(micro, self._returning)

    # -- the receiver's end ----------------------------------------------------------------------------------------

    def expect(self, micro: int) -> None:
        """Start to receive a micro-batch's activations, or the header before the first one."""
        if self.layout is not None:
            self._ahead.expect(micro, self.layout.pieces)
        elif self._heading is None and not self.closed:
            said = encode_transfer_layout(None)
            self._heading = (self._host.recv(said, self._ranks[0], f"{self.name} shapes"), said)

    def take(self, micro: int) -> StageOutputs | None:
        """Return a micro-batch's activations as autograd leaves; None if the sender has raised."""
        self.expect(micro)
        if self._heading is not None:
            handle, said = self._heading
            self._heading = None
            handle.wait()
            self.layout = decode_transfer_layout(said)
            self.closed = self.layout is None
        if self.layout is None:
            return None
        tensors = self._ahead.take(micro, self.layout.pieces)
        for tensor, piece in zip(tensors, self.layout.pieces, strict=True):
            tensor.requires_grad_(piece.returns)
        return StageOutputs(tensors, self.layout.bare)

    def give_back(self, micro: int, gradients: tuple[Tensor, ...] | None) -> None:
        """Send the gradients of the activations that require them; None: the stage has raised."""
        if self._returning:
            self._back.send(micro, self._zeros(self._returning) if gradients is None else gradients)

    # --------------------------------------------------------------------------------------------------------------

    @property
    def _returning(self) -> tuple[TensorMeta, ...]:
        """Return the tensors that send a gradient back: a tensor that needs none sends none."""
        return tuple(piece for piece in self.layout.pieces if piece.returns) if self.layout else ()

    def _announce(self, layout: TransferLayout | None) -> None:
        said = encode_transfer_layout(layout)
        self._said.append((self._host.send(said, self._ranks[1], f"{self.name} shapes"), said))
        self.layout, self.closed = layout, layout is None

    def _zeros(self, pieces: Sequence[TensorMeta]) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(piece.shape, dtype=piece.dtype, device=self._ahead.device) for piece in pieces)
