"""Who counts what an engine sends."""

from __future__ import annotations

from collections import Counter

from npuzero.comm import HOST_CHANNEL, Communicator, Counted, Mesh
from npuzero.plan import AXES, Axes


class CountingMesh:
    """A mesh whose communicators count what they send: control traffic apart from the training state's."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._made: dict[tuple[Axes, str], Communicator] = {}
        self.shape = mesh.shape
        self.size = mesh.size
        self.index = mesh.index
        self.sent: Counter[str] = Counter()
        self.control: Counter[str] = Counter()

    def communicator(self, axes: Axes, purpose: str) -> Communicator:
        """The communicator of :meth:`Mesh.communicator`, made at its first use."""
        key = (axes, purpose)
        if key not in self._made:
            counter = self.control if purpose in ("control", HOST_CHANNEL) else self.sent
            self._made[key] = Counted(self._mesh.communicator(axes, purpose), counter)
        return self._made[key]

    def host(self) -> Communicator:
        """All ranks, over tensors on the host: the control channel itself where that is on the host already."""
        on_host = self._mesh.world.device.type == "cpu"
        return self.communicator(AXES, "control" if on_host else HOST_CHANNEL)
