"""Report of the bytes that one rank holds and sends in a step, the same record for predictions and measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from npuzero.plan.presets import Plan
from npuzero.plan.table.placement import Memory

#: Parts of a training state in a report; ``buffers`` exist only within a step.
LABELS = ("parameters", "gradients", "states", "buffers")
#: Verbs listed in every report; further verbs come before ``control``.
VERBS = ("all_gather", "reduce_scatter", "all_reduce", "control")
#: Links between memories listed in every report.
TO_HOST, TO_DEVICE, TO_DISK, FROM_DISK = LINKS = ("device>host", "host>device", "host>nvme", "nvme>host")

#: Bytes sent, by axis and collective.
Sent = Counter[tuple[str, str]]


@dataclass(frozen=True)
class Report:
    """Hold the bytes of one rank for one step, predicted or measured.

    Attributes:
        held: by memory space (:class:`Memory`), then by state: ``parameters``, ``gradients``, ``states``, ``buffers``
            (peak of the memory that exists only within a step: unsharded units, copies kept after forward,
            communication buffers).
        bytes_sent: by collective, payload bytes this rank sends; ``control`` is the engine's own traffic (which
            parameters got gradients, the norm) and does not grow with the number of elements.
        plan: the plan of the step.
        world: number of ranks.
        bytes_moved: by link between two memories of this rank (:data:`LINKS`), bytes copied.
        sent_along: ``bytes_sent`` without ``control``, by mesh axis (``"local"``, ``"node"``), then by collective. A
            collective over several axes runs level by level (:func:`~npuzero.plan.table.mesh_shape.axis_bytes`); axes
            without traffic are left out.

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
        """Return a copy with ``nbytes`` more for ``verb`` along ``axis``."""
        if not nbytes:
            return self
        sent = {**self.bytes_sent, verb: self.bytes_sent.get(verb, 0) + nbytes}
        there = self.sent_along.get(axis, {})
        along = {} if verb == "control" else {axis: {**there, verb: there.get(verb, 0) + nbytes}}
        return replace(self, bytes_sent=sent, sent_along={**self.sent_along, **along})


def sent_by_axis(sent: Sent) -> dict[str, dict[str, int]]:
    """Return bytes in the form of :attr:`Report.sent_along`."""
    along: dict[str, dict[str, int]] = {}
    for (axis, verb), nbytes in sent.items():
        along.setdefault(axis, {})[verb] = nbytes
    return along


def sent_by_verb(sent: Sent, control: int) -> dict[str, int]:
    """Return bytes in the form of :attr:`Report.bytes_sent`: the training state's, and the engine's as ``control``."""
    state: Counter[str] = Counter()
    for (_, verb), nbytes in sent.items():
        state[verb] += nbytes
    return {verb: state[verb] for verb in VERBS[:-1]} | state | {VERBS[-1]: control}
