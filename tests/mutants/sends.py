"""Mutants of sends and their channels."""

from __future__ import annotations

from .mutant import PackageMutant

FAULTS = "faults/test_send_faults.py"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "a rank receives where it sends",
        "comm/backends/channels.py",
        "self._channel(from_, self.rank)",
        "self._channel(self.rank, from_)",
        ("unit/comm/test_communicator.py::test_counted_adds_what_a_ring_sends",),
    ),
    PackageMutant(
        "sends of two groups of the same ranks meet",
        "comm/backends/channels.py",
        "f\"{self.name}@sends among {'-'.join(map(str, self.ranks))}\"",
        'f"{self.name}@sends"',
        ("world/test_comm.py::test_threads[2]",),
    ),
    PackageMutant(
        "a rank that has sent is taken for one that never comes",
        "comm/backends/channels.py",
        "super().arrived() | {channel.place: channel.started for channel in self._open()}",
        "super().arrived()",
        (f"{FAULTS}::test_a_send_is_where_it_was_started",),
    ),
    PackageMutant(
        "a rank ends before what it has sent is received",
        "comm/backends/shared_memory.py",
        "        super().drain()\n",
        "",
        (f"{FAULTS}::test_a_rank_that_ends_with_sends_under_way_finishes_them",),
    ),
    PackageMutant(
        "who receives from a rank that gave up waits for ten minutes",
        "comm/backends/shared_memory.py",
        "        self._communicator.heed()\n",
        "",
        (f"{FAULTS}::test_who_waits_for_a_rank_that_gives_up_is_told",),
    ),
    PackageMutant(
        "a rank sends over a communicator that it has closed",
        "comm/backends/shared_memory.py",
        "        self.heed()\n",
        "",
        (f"{FAULTS}::test_who_waits_for_a_rank_that_gives_up_is_told",),
    ),
    PackageMutant(
        "of two ranks that met in vain the others do not hear",
        "comm/backends/shared_memory.py",
        "            self.of.fail(found)\n",
        "            pass\n",
        (f"{FAULTS}::test_others_of_the_group_hear_of_it",),
    ),
    PackageMutant(
        "over Gloo a rank receives what was sent for something else",
        "comm/backends/process_group.py",
        "if theirs != mine:",
        "if not theirs:",
        (f"{FAULTS}::test_processes_whose_ends_differ",),
    ),
    PackageMutant(
        "over Gloo both directions between two ranks are one",
        "comm/backends/process_group.py",
        "int(self._ascending)",
        "0",
        ("world/test_comm.py::test_gloo_sums_bit_for_bit_as_shared_memory[2]",),
    ),
    PackageMutant(
        "over Gloo a send goes on where its communicator is broken",
        "comm/backends/process_group.py",
        "        made._errors = self._errors\n",
        "",
        (f"{FAULTS}::test_over_gloo_one_failure_ends_every_wait",),
    ),
    PackageMutant(
        "over Gloo who waits is not told what another wait has met",
        "comm/watchdog/hang_detector.py",
        "                check()\n",
        "",
        (f"{FAULTS}::test_over_gloo_one_failure_ends_every_wait",),
    ),
    PackageMutant(
        "a report leaves out what a rank hands to the next",
        "comm/counted.py",
        '        self._count("send", buffer, tag)\n',
        "",
        ("unit/comm/test_communicator.py::test_counted_adds_what_a_ring_sends",),
    ),
    PackageMutant(
        "a send counts less in a larger group",
        "plan/table/mesh_shape.py",
        '    if verb == "send":\n        return nbytes\n',
        '    if verb == "send":\n        return nbytes * (size - 1) // size\n',
        ("unit/test_plan.py::test_ring_bytes",),
    ),
    PackageMutant(
        "a rank that sends to itself waits for ever",
        "comm/checks.py",
        "peer == rank or peer not in range(size)",
        "peer not in range(size)",
        ("unit/comm/test_communicator.py::test_refused_before_anything_is_sent",),
    ),
)
