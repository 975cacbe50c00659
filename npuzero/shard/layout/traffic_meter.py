"""Count the bytes that an engine sends and holds in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from npuzero.comm import HOST_CHANNEL, Communicator, CountingCommunicator, Mesh
from npuzero.errors import StateError
from npuzero.memory import MemorySpaces
from npuzero.plan import LINKS, STAGE, Axes, Plan, Report, Sent, sent_by_axis, sent_by_verb


class CountingMesh:
    """Make communicators that count the bytes they send: control traffic separate from the training state's.

    Attributes:
        world: the ranks of all stages. The engine's ranks are those that train the same modules.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._made: dict[tuple[Axes, str], Communicator] = {}
        self.world = mesh.world
        self.shape = mesh.shape
        self.size = mesh.size
        self.index = mesh.index
        self.sent = Sent()
        self.restored = Sent()  # by R4, which may run in the step after its update
        self.control = Sent()

    def communicator(self, axes: Axes, purpose: str) -> Communicator:
        """Return a counting wrapper of :meth:`Mesh.communicator`, created at its first use."""
        key = (axes, purpose)
        if key not in self._made:
            counter = {"control": self.control, HOST_CHANNEL: self.control, "restore": self.restored}.get(
                purpose, self.sent
            )
            self._made[key] = CountingCommunicator(
                self._mesh.communicator(axes, purpose), counter, self.shape.sizes(axes)
            )
        return self._made[key]

    def host(self, axes: Axes = STAGE) -> Communicator:
        """Return the communicator for host tensors along ``axes`` (by default the ranks of one stage).

        On CPU it is the control channel.
        """
        on_host = self._mesh.world.device.type == "cpu"
        return self.communicator(axes, "control" if on_host else HOST_CHANNEL)


class TrafficMeter:
    """Measure a step from its first forward to the end of its update."""

    def __init__(self, plan: Plan, mesh: CountingMesh, spaces: MemorySpaces) -> None:
        self._plan = plan
        self._mesh = mesh
        self._spaces = spaces
        self.settle: Callable[[], Counter[str]] = Counter  # waits for the last update, returns the bytes it moved
        self._begun = False
        self._restored = Sent()  # by R4 of the last step, as far as reported
        self._last: Report | None = None

    def step_begins(self) -> None:
        """Record a training forward; the first one after an optimizer's step begins a new step."""
        if not self._begun:
            self._begun = True
            self._restored.clear()
            self._reset()

    def reset(self) -> None:
        """Restart all counts."""
        self._mesh.restored.clear()
        self._reset()

    def _reset(self) -> None:
        self._mesh.sent.clear()
        self._mesh.control.clear()
        self._spaces.mover.moved.clear()
        self._spaces.reset_peaks()

    def step_ends(self) -> None:
        """Make the report of the step so far. A step of a second optimizer without a forward adds to it."""
        self._restored += self._mesh.restored
        sent = self._mesh.sent + self._restored
        by_verb = sent_by_verb(sent, self._mesh.control.total())
        moved = dict.fromkeys(LINKS, 0) | self._spaces.mover.moved
        world = self._mesh.shape.world
        self._last = Report(self._spaces.peaks(), by_verb, self._plan, world, moved, sent_by_axis(sent))
        self._mesh.restored.clear()
        self._begun = False

    def now(self, moved: Mapping[str, int]) -> Report:
        """Return a report of the bytes that this rank holds now, without sent bytes.

        Args:
            moved: bytes by link, to include.
        """
        held = {memory: dict(space.held) for memory, space in self._spaces.items()}
        return Report(
            held, sent_by_verb(Sent(), 0), self._plan, self._mesh.shape.world, dict.fromkeys(LINKS, 0) | dict(moved)
        )

    def report(self) -> Report:
        """Return the report of the bytes that the last step held and sent on this rank.

        Raises:
            StateError: no step has been taken.
        """
        if self._last is None:
            raise StateError(
                "npuzero.report",
                expected="a model that has taken a step",
                got="none yet",
                do="Call it after optimizer.step(); npuzero.predict says what to expect before.",
            )
        beside = self.settle()
        return replace(self._last, bytes_moved={link: n + beside[link] for link, n in self._last.bytes_moved.items()})
