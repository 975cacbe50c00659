"""Mutants of communicators, worlds and the mesh."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "over Gloo and NCCL the shards of hpz are gathered in the wrong places",
        "comm/hierarchical.py",
        "block = whole.view(self.outer.size, -1)[self.outer.rank]",
        "block = whole.view(self.outer.size, -1)[0]",
        ("world/test_comm.py::test_hierarchical_equals_flat",),
    ),
    Mutant(
        "over Gloo and NCCL micro-batches of hpz replace each other",
        "comm/hierarchical.py",
        "accumulate=accumulate, tag=tag",
        "accumulate=False, tag=tag",
        ("world/test_comm.py::test_hierarchical_equals_flat",),
    ),
    Mutant(
        "over Gloo and NCCL experts get each other's tokens",
        "comm/hierarchical.py",
        "out.view(self.size, -1)[self._places] = received.view(self.size, -1)",
        "out.copy_(received)",
        ("world/test_comm.py::test_hierarchical_equals_flat",),
    ),
    Mutant(
        "a broadcast comes from another rank than the one named",
        "comm/hierarchical.py",
        "place = self.flat.ranks.index(self.ranks[root])",
        "place = root",
        ("world/test_comm.py::test_hierarchical_equals_flat",),
    ),
    Mutant(
        "the axes of the mesh are the wrong way round",
        "comm/mesh.py",
        "there[NODE] * self.shape.local + there[LOCAL]",
        "there[LOCAL] * self.shape.node + there[NODE]",
        ("unit/comm/test_communicator.py::test_mesh_is_rank_arithmetic",),
    ),
    Mutant(
        "what goes wrong in a step of a lane is silence",
        "device/lane.py",
        "handle.error = error",
        "pass",
        ("unit/test_lane.py::test_a_lane_keeps_order_and_errors",),
    ),
    Mutant(
        "on one rank a sum replaces what it should be added to",
        "comm/single.py",
        "            shard.add_(whole)",
        "            shard.copy_(whole)",
        ("unit/comm/test_communicator.py::test_single_rank_copies",),
    ),
    Mutant(
        "an operation whose handle is forgotten writes into memory that others have by then",
        "comm/shared_memory.py",
        "            self._kept.append((operation, tensors))",
        "            pass",
        ("world/test_comm.py::test_threads[2]",),
    ),
    Mutant(
        "ranks that wait for each other in different places wait for ten minutes",
        "comm/board.py",
        "return all(rank not in found or slots[rank].arrived.get(place, 0) >= number for rank in ranks)",
        "return True",
        ("faults/test_diverging.py::test_who_is_stuck",),
    ),
    Mutant(
        "a rank that has come to a place before is taken to have come again",
        "comm/board.py",
        "slots[rank].arrived.get(place, 0) >= number",
        "slots[rank].arrived.get(place, 0) > 0",
        ("faults/test_diverging.py::test_who_is_stuck",),
    ),
    Mutant(
        "a rank of which another thread computes is taken for one that never comes",
        "comm/board.py",
        "if self._threads <= self._waits.keys() else ()",
        "if self._waits else ()",
        ("faults/test_diverging.py::test_a_thread_beside_the_main_one_may_still_come",),
    ),
    Mutant(
        "ranks that are threads exchange values of two calls at once",
        "comm/loopback.py",
        "self._came[place] = here.number",
        "pass",
        ("world/test_comm.py::test_threads[2]",),
    ),
    Mutant(
        "a model on some ranks sends on the channels of one on all ranks",
        "comm/world.py",
        'f"{name}@{_listed(self.ranks)}"',
        "name",
        ("world/test_subworld.py::test_a_part_is_a_world_of_its_own",),
    ),
    Mutant(
        "ranks that exchange values among some of them wait for all",
        "comm/world.py",
        " or tuple(self.ranks))",
        ")",
        ("world/test_subworld.py::test_others_need_not_come",),
    ),
    Mutant(
        "ranks that wait for each other in different parts wait for ten minutes",
        "comm/world.py",
        "        self.board = whole.board\n",
        "",
        ("world/test_subworld.py::test_ranks_that_wait_for_each_other_in_different_parts_are_told",),
    ),
    Mutant(
        "a rank that gives up in a part is waited for by the others",
        "comm/world.py",
        "self._of.fail(failure)",
        "super().fail(failure)",
        ("world/test_subworld.py::test_an_abort_in_a_part_is_the_runs",),
    ),
    Mutant(
        "a group of ranks without the run's first exports no weights",
        "checkpoint/export.py",
        "engine.world.ranks[0] not in",
        "0 not in",
        ("world/test_subworld.py::test_each_group_exports_its_weights",),
    ),
)
