"""What one rank held and sent in a step: the same record whether it was predicted or measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from npuzero.plan.presets import Plan
from npuzero.plan.table.placement import Memory

#: The parts of a training state that a report counts; ``buffers`` are what lives within a step only.
LABELS = ("parameters", "gradients", "states", "buffers")
#: Verbs that every report lists; whatever else is sent stands before ``control``.
VERBS = ("all_gather", "reduce_scatter", "all_reduce", "control")
#: Ways between memories that every report lists.
TO_HOST, TO_DEVICE, TO_DISK, FROM_DISK = LINKS = ("device>host", "host>device", "host>nvme", "nvme>host")

#: Bytes sent, by axis and collective.
Sent = Counter[tuple[str, str]]


@dataclass(frozen=True)
class Report:
    """Give the bytes of one rank for one step, predicted or measured.

    Attributes:
        held: by memory space (:class:`Memory`), then by state: ``parameters``, ``gradients``, ``states``, ``buffers``
            (high water of what lives within a step only: gathered units, held copies, communication buffers).
        bytes_sent: by collective, payload bytes this rank sends; ``control`` is what the engine says to itself (which
            parameters took part, the norm) and never grows with the model's size in elements.
        plan: the plan it belongs to.
        world: number of ranks.
        bytes_moved: by link between two memories of this rank (:data:`LINKS`), bytes copied.
        sent_along: ``bytes_sent`` but for ``control`` by the axis along which they go (``"local"``, ``"node"``), then
            by collective. One over several axes goes level by level
            (:func:`~npuzero.plan.table.mesh_shape.axis_bytes`); axes along which nothing goes are left out.

    Example::

        report = npuzero.predict(net, "zero2", world=8)
        print(sum(report.bytes_held.values()), report.bytes_sent["reduce_scatter"])
        print({axis: sum(verbs.values()) for axis, verbs in report.sent_along.items()})
    """

    held: Mapping[Memory, Mapping[str, int]]
    bytes_sent: dict[str, int]
    plan: Plan = field(repr=False)
    world: int
    bytes_moved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINKS, 0))
    sent_along: dict[str, dict[str, int]] = field(default_factory=dict, repr=False)

    @property
    def bytes_held(self) -> dict[str, int]:
        """Return the bytes by state, over all memory spaces."""
        total: Counter[str] = Counter()
        for parts in self.held.values():
            total.update(parts)
        return dict(total)

    @property
    def memory(self) -> dict[str, int]:
        """Return the bytes by memory space, over all states."""
        return {memory.value: sum(self.held.get(memory, {}).values()) for memory in Memory}

    def with_more(self, verb: str, axis: str, nbytes: int) -> Report:
        """Return it with so many bytes more that ``verb`` sends along ``axis``."""
        if not nbytes:
            return self
        sent = {**self.bytes_sent, verb: self.bytes_sent.get(verb, 0) + nbytes}
        there = self.sent_along.get(axis, {})
        along = {} if verb == "control" else {axis: {**there, verb: there.get(verb, 0) + nbytes}}
        return replace(self, bytes_sent=sent, sent_along={**self.sent_along, **along})


def sent_by_axis(sent: Sent) -> dict[str, dict[str, int]]:
    """Return bytes as :attr:`Report.sent_along` has them."""
    along: dict[str, dict[str, int]] = {}
    for (axis, verb), nbytes in sent.items():
        along.setdefault(axis, {})[verb] = nbytes
    return along


def sent_by_verb(sent: Sent, control: int) -> dict[str, int]:
    """Return bytes as :attr:`Report.bytes_sent` lists them: the training state's, and the engine's own as
    ``control``.
    """
    state: Counter[str] = Counter()
    for (_, verb), nbytes in sent.items():
        state[verb] += nbytes
    return {verb: state[verb] for verb in VERBS[:-1]} | state | {VERBS[-1]: control}
